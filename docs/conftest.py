"""The pages are doctests; what builds them is not."""

collect_ignore = ["conf.py", "_extensions", "_build"]
