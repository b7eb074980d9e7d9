"""The contexts of the switches, as objects."""

import threading

import jax
from tiers import parametrize

import masksafe
from masksafe._core.switches import label_check_mode, uses_plain_rules

SWITCHES = {
    "label_checks": (lambda: masksafe.label_checks("raise"), lambda: label_check_mode() == "raise"),
    "forward_mode": (masksafe.forward_mode, uses_plain_rules),
}
each_switch = parametrize("switch", ["label_checks"], exhaustive=SWITCHES)


def in_another_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@each_switch
def test_a_switch_is_on_in_its_context_and_in_a_function_that_it_decorates_but_in_no_other_thread(switch):
    context, is_on = SWITCHES[switch]

    @context()
    def inside(depth):
        """Its docstring."""
        return is_on() and (depth == 0 or inside(depth - 1))

    context()
    assert not is_on()
    with context(), context():
        assert is_on()
        assert not in_another_thread(is_on)
    assert inside(2)
    assert inside.__doc__ == "Its docstring."
    assert not is_on()


@each_switch
def test_a_jitted_function_is_traced_again_in_a_context_and_found_again_behind_it(switch):
    (context, is_on), traces = SWITCHES[switch], []
    step = jax.jit(lambda x: traces.append(is_on()) or x)
    for _ in range(2):
        step(0)
        with context():
            step(0)
    assert traces == [False, True]


def test_a_mode_is_set_for_all_threads():
    try:
        masksafe.set_label_checks("raise")
        assert label_check_mode() == in_another_thread(label_check_mode) == "raise"
        with masksafe.label_checks("off"):
            assert label_check_mode() == "off"
    finally:
        masksafe.set_label_checks("off")
    assert label_check_mode() == "off"
