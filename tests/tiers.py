"""Which cases of a test run by default; the others run with `-m forms`."""

import pytest


def few_of(values, *kept):
    """All values as parameters, those that are not kept for other runs: each compiles a program."""
    return [v if v in kept else pytest.param(v, marks=pytest.mark.forms) for v in values]
