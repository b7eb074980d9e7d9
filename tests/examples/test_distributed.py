"""The example of several processes: they train as one device does, fail together, and none is left behind."""

import time

import distributed
import numpy as np
import processes
import pytest

LAYOUTS = {"data", "vocabulary", "time", "data and time", "data and vocabulary"}


def test_rows_are_ragged_and_once_half_of_them_are_empty():
    lengths = [(distributed.draw_batch(step).labels >= 0).sum(axis=1) for step in range(4)]
    assert all(len(set(of_step[:8])) > 3 for of_step in lengths)
    assert [of_step[8:].any() for of_step in lengths] == [True, False, True, True]


@pytest.mark.slow
def test_two_processes_train_as_one_device_does():
    alone, together = distributed.losses_of(1, 1, 4), distributed.losses_of(2, 2, 4)
    assert set(together) == LAYOUTS
    for losses in together.values():
        np.testing.assert_allclose(losses, alone["one device"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["checkify", "raise"])
def test_a_bad_label_ends_every_process_with_its_message(mode):
    message = distributed.error_of(2, 1, mode)
    number = message.count("labels are outside [0, 128); first at ")
    assert number == 1 if mode == "checkify" else number >= 1  # JAX logs the failure of a callback as well
    assert f": 129 (called at {distributed.__file__}:" in message


@pytest.mark.slow
def test_no_process_is_left_behind_when_one_is_killed():
    with processes.started(distributed.command("train", 2, 10**6), 2, 1) as children:
        time.sleep(1)
        children[1].process.kill()
        with pytest.raises(TimeoutError, match=r"exit statuses \[None, -9\]"):
            processes.wait_for(children, grace=0.5)
    assert all(child.process.poll() is not None for child in children)


def test_a_process_ends_with_the_one_that_started_it():
    with processes.started(distributed.command("train", 1, 10**6), 1, 1) as (child,):
        child.process.stdin.close()  # as when its other end is gone
        assert child.process.wait(timeout=600) == 1
