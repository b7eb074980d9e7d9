"""The contract of attention without one of its executors on a CPU: the next ones of the table serve its calls."""

import jax
import numpy as np
import test_empty
import test_no_influence
import test_nothing_hidden
import test_removal
import test_zero_gradient
from program import PLANS, cotangents_of, value_and_gradients
from table import OPS
from tiers import parametrize

from masksafe._core import platforms
from masksafe.attention._executors import TABLE

# Choices with which the arrays of the table take the executor.
TAKING = {
    "weights kept": {},
    "formula": {
        "has_fusion_library": True,
        "attention": {"fewest_rows_of_kernels": 1, "fewest_rows_of_one_kernel": 1, "most_weights_kept": 0},
    },
    "loop": PLANS["blocks"],
}
KEYS = [key for key, op in OPS.items() if op.name == "dot_product_attention"]


@parametrize(
    ("name", "key"),
    [(name, KEYS[0]) for name in TAKING],
    exhaustive=[(name, key) for name in TAKING for key in KEYS],
)
def test_without_one_of_a_cpu(name, key, monkeypatch):
    monkeypatch.setitem(PLANS, "blocks", TAKING[name])
    op, taken, choose = OPS[key], [], TABLE[name].choose
    monkeypatch.setitem(TABLE, name, TABLE[name]._replace(choose=lambda choice: taken.append(choose(choice))))
    with platforms.chosen(form="cpu", executors_left_out=(name,)):
        test_removal.test_outputs_are_those_of_what_is_left(key)
        test_no_influence.test_garbage_changes_no_bit(key)
        test_zero_gradient.test_derivatives_by_what_is_masked_are_0(key)
        test_empty.test_nothing_left_is_nothing(key)
        test_nothing_hidden.test_a_bad_element_shows_in_its_row_and_in_no_other(key, np.nan)
        assert not taken
    with platforms.chosen(form="cpu", **TAKING[name]):
        jax.eval_shape(lambda *args: value_and_gradients(key, *args), op.where, op.args, cotangents_of(key))
    assert any(taken) == (name == "loop" or not key.endswith(("options", "largest logit")))


def test_each_executor_of_a_cpu_is_left_out():
    assert {name for name, entry in TABLE.items() if entry.platform == "cpu"} == TAKING.keys()
    *_, last = TABLE.values()
    assert last.platform is None
