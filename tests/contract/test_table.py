"""The table itself: no public op is missing."""

from table import NO_ROW, OPS
from tiers import parametrize

import masksafe
from masksafe.testing._nonfinite import OF_LABELS


@parametrize("module", [masksafe], exhaustive=[masksafe.losses], ids=lambda module: module.__name__)
def test_every_public_name_has_a_row_or_a_reason_to_have_none(module):
    names = {name for name in dir(module) if not name.startswith("_")}
    assert names - {op.name for op in OPS.values()} <= set(NO_ROW)


def test_nothing_has_both_or_is_gone():
    assert not {op.name for op in OPS.values()} & set(NO_ROW)
    for name in (*(op.name for op in OPS.values()), *NO_ROW):
        assert hasattr(masksafe, name) or hasattr(masksafe.losses, name)


def test_reports_of_a_nan_know_the_losses_of_labels():
    assert {op.name for op in OPS.values() if op.classes} <= OF_LABELS


def test_masks_leave_something():
    for key, op in OPS.items():
        assert op.where.any(), key
        assert not op.where.all(), key
