"""The contract on the default GPU, in the forms that are chosen there."""

import jax
import numpy as np
import pytest
from program import (
    assert_close,
    assert_is_nothing,
    assert_is_of_definition,
    assert_nothing_left_is_nothing,
    assert_same_bits,
    each_op,
    of_definition,
    polluted,
    run,
)
from table import OPS
from test_labels import assert_a_bad_label_is_nan
from test_large_arrays import arguments, assert_a_nan_shows, is_possible, run_large

pytestmark = pytest.mark.gpu
OWN_CHOICES = "one pass"  # the plan that changes none
ADDS_IN_ANY_ORDER = "segment_", "load_balancing", "ctc"  # a GPU's scatters are atomic


@pytest.fixture(autouse=True)
def _float32_products():
    with jax.default_matmul_precision("highest"):  # and not TF32
        yield


@each_op()
def test_results_and_derivatives_are_those_of_the_definition(key):
    results = run(key, plan=OWN_CHOICES, all_modes=True)
    assert_close(results.outputs, of_definition(key))
    assert_is_of_definition(key, results)


@each_op()
def test_what_is_masked_changes_nothing_and_has_no_derivative(key):
    op, clean = OPS[key], run(key, plan=OWN_CHOICES, all_modes=True)
    for value in (np.nan, np.inf, -np.inf, np.finfo(np.float32).max):
        dirty = run(key, args=polluted(key, op.where, value), plan=OWN_CHOICES, all_modes=True)
        if op.name.startswith(ADDS_IN_ANY_ORDER):
            assert_close(dirty, tuple(clean))
        else:
            assert_same_bits(dirty, clean)
        for by_args in (dirty.gradients, *dirty[3:]):
            for i, of_arg in zip(op.floats, by_args, strict=True):
                assert_is_nothing(of_arg[op.hides(op.where)[i]])


@each_op()
def test_nothing_left_is_nothing(key):
    assert_nothing_left_is_nothing(key, plan=OWN_CHOICES, all_modes=True)


@each_op(lambda op: op.classes)
def test_a_bad_label_is_nan_in_its_own_row(key):
    labels = -1, OPS[key].classes, -(2**31)
    assert_a_bad_label_is_nan(key, labels, assert_close, plan=OWN_CHOICES, all_modes=True)


@each_op(is_possible)
def test_large_arrays(key):
    """A NaN shows in its row, and nowhere if it is masked."""
    where, args = arguments(key, 0)
    assert_close(run_large(key, *arguments(key, np.nan)), run_large(key, where, args))
    assert_a_nan_shows(key, where, args, assert_close)
