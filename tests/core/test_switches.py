"""The contexts of the switches, as objects."""

import warnings

import pytest

import masksafe
from masksafe._core.switches import label_check_mode, uses_plain_rules

CONTEXTS = {
    'masksafe.label_checks("raise")': (lambda: masksafe.label_checks("raise"), lambda: label_check_mode() == "raise"),
    "masksafe.forward_mode()": (masksafe.forward_mode, uses_plain_rules),
}
ALL = pytest.mark.parametrize(("context", "is_on"), CONTEXTS.values(), ids=CONTEXTS)


@ALL
def test_context_that_is_never_entered_warns_where_it_was_made(context, is_on):
    with pytest.warns(RuntimeWarning, match=r"masksafe\..* had no effect: write `with masksafe\..*:`") as caught:
        context()
    assert caught[0].filename == __file__
    assert not is_on()


def test_warning_names_the_switch_of_the_whole_process():
    with pytest.warns(RuntimeWarning, match=r"or masksafe\.set_label_checks\('raise'\)"):
        masksafe.label_checks("raise")


@ALL
def test_context_that_is_used_does_not_warn(context, is_on):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with context():
            assert is_on()
        outer = context()
        with outer, outer:  # as often as one likes
            assert is_on()
        del outer
    assert not is_on()


@ALL
def test_context_decorates_a_function(context, is_on):
    @context()
    def inside(depth):
        """Its docstring."""
        return is_on() and (depth == 0 or inside(depth - 1))

    assert inside(2)
    assert inside.__doc__ == "Its docstring."
    assert not is_on()


@ALL
def test_functions_that_run_after_their_call_are_refused(context, is_on):
    async def later():
        pass

    with pytest.raises(TypeError, match=r"masksafe\.\w+.*: got later, whose body runs after its call has returned"):
        context()(later)
