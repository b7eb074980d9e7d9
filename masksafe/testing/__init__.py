"""Assertions with which users prove that their own code keeps the contract of masksafe."""

from masksafe.testing._consistent import CONSISTENCY_MODES, assert_consistent
from masksafe.testing._gradients import assert_gradients
from masksafe.testing._mask_safe import assert_mask_safe
from masksafe.testing._nonfinite import NonfiniteReport, nonfinite_report
from masksafe.testing._packing import assert_packing_safe

__all__ = [
    "CONSISTENCY_MODES",
    "NonfiniteReport",
    "assert_consistent",
    "assert_gradients",
    "assert_mask_safe",
    "assert_packing_safe",
    "nonfinite_report",
]


def __dir__() -> list[str]:
    return __all__
