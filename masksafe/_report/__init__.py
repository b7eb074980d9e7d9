"""What `python -m masksafe` runs and prints: the contract, case by case, for masksafe and for its peers."""
