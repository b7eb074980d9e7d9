"""The contexts of the switches, as objects."""

import pytest

import masksafe
from masksafe._core.switches import label_check_mode, uses_plain_rules


@pytest.mark.parametrize(
    ("context", "is_on"),
    [
        (lambda: masksafe.label_checks("raise"), lambda: label_check_mode() == "raise"),
        (masksafe.forward_mode, uses_plain_rules),
    ],
    ids=["label_checks", "forward_mode"],
)
def test_a_switch_is_on_in_its_context_and_in_a_function_that_it_decorates(context, is_on):
    @context()
    def inside(depth):
        """Its docstring."""
        return is_on() and (depth == 0 or inside(depth - 1))

    context()
    assert not is_on()
    with context(), context():
        assert is_on()
    assert inside(2)
    assert inside.__doc__ == "Its docstring."
    assert not is_on()
