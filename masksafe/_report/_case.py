"""What a case is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Inputs = dict[str, Any]
Ops = dict[str, Callable[..., Any]]  # by name, each a function of the inputs of its cases

SEGMENTS = 3  # in the cases of segment ops, for which it is static


class Case(NamedTuple):
    """A call of an op."""

    op: str
    what: str
    inputs: Inputs
    hidden: dict[str, np.ndarray]  # for each input, where it is masked
    expected: np.ndarray | None  # None: the result of the same call with harmless values under the mask
