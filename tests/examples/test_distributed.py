"""The example of several processes: they train as one device does, fail together, and none is left behind."""

import os
import sys
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
    message = distributed.error_of(2, 2, mode)
    assert message.count("labels are outside [0, 128); first at ") == 1
    assert f": 129 (called at {distributed.__file__}:" in message


@pytest.mark.slow
def test_no_process_is_left_behind_when_one_is_killed():
    with processes.started(distributed.command("train", 2, 10**6), 2, 1) as children:
        time.sleep(1)
        children[1].process.kill()
        with pytest.raises(TimeoutError, match=r"exit statuses \[None, -9\]"):
            processes.wait_for(children, grace=0.5)
    assert all(child.process.poll() is not None for child in children)


# A bad label on the last of two processes, which is the last to end, too: while it ends, the other may not leave it.
LATE_TO_END = f"""
import atexit, sys, time, jax
sys.path.insert(0, {os.path.dirname(processes.__file__)!r})
import masksafe, processes
place = jax.sharding.PartitionSpec("rows")
if sys.argv[-1] == "1":
    atexit.register(time.sleep, 3)
processes.join(sys.argv[2], 2, int(sys.argv[4]))
by_row = jax.NamedSharding(jax.make_mesh((4,), ("rows",)), place)
labels = jax.make_array_from_callback((8,), by_row, lambda index: jax.numpy.arange(8)[index])
loss = masksafe.losses.softmax_cross_entropy_with_integer_labels
part = lambda labels: loss(jax.numpy.zeros((labels.size, 7)), labels)
try:
    with masksafe.label_checks("raise"):
        jax.jit(jax.shard_map(part, mesh=by_row.mesh, in_specs=place, out_specs=place))(labels).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    processes.end(error)
"""


def test_no_process_is_aborted_if_another_ends_later():
    statuses, lines = processes.outcome([sys.executable, "-c", LATE_TO_END], 2, 2)
    assert statuses == [1, 1]
    for told in lines:
        assert "1 of 8 labels are outside [0, 7); first at (1,) of shard 3: 7" in told[-1]


def test_a_process_ends_with_the_one_that_started_it():
    with processes.started(distributed.command("train", 1, 10**6), 1, 1) as (child,):
        child.process.stdin.close()  # as when its other end is gone
        assert child.process.wait(timeout=600) == 1
