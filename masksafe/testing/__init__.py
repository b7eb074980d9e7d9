"""Assertions with which users prove of their own code what masksafe promises of its ops."""

from masksafe.testing._consistent import CONSISTENCY_MODES as CONSISTENCY_MODES
from masksafe.testing._consistent import assert_consistent as assert_consistent
from masksafe.testing._gradients import assert_gradients as assert_gradients
from masksafe.testing._mask_safe import assert_mask_safe as assert_mask_safe
from masksafe.testing._nonfinite import NonfiniteReport as NonfiniteReport
from masksafe.testing._nonfinite import nonfinite_report as nonfinite_report
