"""The report of `python -m masksafe`: the contract, case by case."""
