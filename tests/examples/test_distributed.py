"""The example of several processes: they train as one device does, fail together, and none is left behind."""

import time

import distributed
import numpy as np
import processes
import pytest

CURVES = {
    "data, by 2",
    "vocabulary, by 2",
    "time, by 2",
    "data and time, by 2",
    "data and vocabulary, by 2",
    "from checkpoint_of_1, by 2",
    "from checkpoint_of_2, by 1",
}


def test_rows_are_ragged_and_once_half_of_them_are_empty():
    lengths = [(distributed.draw_batch(step).segments > 0).sum(axis=1) for step in range(4)]
    assert all(len(set(of_step[:8])) > 3 for of_step in lengths)
    assert [of_step[8:].any() for of_step in lengths] == [True, False, True, True]


@pytest.mark.slow
def test_two_processes_train_as_one_device_does(tmp_path, capfd):
    differences = distributed.train_everywhere(2, 2, distributed.Job(4, tmp_path))
    assert set(differences) == CURVES
    assert max(differences.values()) < 1e-5
    printed = capfd.readouterr().out
    for tool in ("nonfinite_report", "assert_consistent"):
        found = "got float32[128, 32] on the devices of 2 processes; expected an array on devices of this process."
        assert f"refused: {tool}: args[0]['down']: {found}" in printed
    assert "on a gathered copy: sin gives nan from inf at index (0, 0)" in printed


def test_a_difference_is_told(tmp_path):
    (tmp_path / "one device, by 1.json").write_text("[4, 3, 2, 1]")
    (tmp_path / "data, by 2.json").write_text("[4, 3.3, 2, 1]")
    (tmp_path / "from checkpoint_of_1, by 2.json").write_text("[2, NaN]")
    differences = distributed.compare_losses(distributed.Job(4, tmp_path))
    np.testing.assert_allclose(list(differences.values()), [0.1, np.nan])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["checkify", "raise"])
def test_a_bad_label_ends_every_process_with_its_message(mode, tmp_path):
    message = distributed.run_to_an_error(2, 1, mode, distributed.Job(2, tmp_path))
    number = message.count("labels are outside [0, 128); first at ")
    assert number == 1 if mode == "checkify" else number >= 1  # JAX logs the failure of a callback as well
    assert f": 129 (called at {distributed.__file__}:" in message


@pytest.mark.slow
def test_no_process_is_left_behind_when_one_is_killed(tmp_path):
    with distributed.started(2, 1, ["train"], distributed.Job(10**6, tmp_path)) as children:
        time.sleep(1)
        children[1].process.kill()
        with pytest.raises(TimeoutError, match=r"exit statuses \[None, -9\]"):
            processes.wait_for(children, grace=0.5)
    assert all(child.process.poll() is not None for child in children)


def test_a_process_ends_with_the_one_that_started_it(tmp_path):
    with distributed.started(1, 1, ["train"], distributed.Job(10**6, tmp_path)) as (child,):
        child.process.stdin.close()  # as when its other end is gone
        assert child.process.wait(timeout=600) == 1
