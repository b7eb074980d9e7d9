"""Every op under flags of JAX: 64 bits beside float32, alarms for NaN. `run` refuses to promote ranks and dtypes."""

import functools

import jax
import numpy as np
import pytest
from program import (
    PLANS,
    cotangents_of,
    direction,
    distinct_plans,
    each_op,
    filled,
    program_of,
    reverse_over_reverse_of,
    value_and_gradients,
)
from table import OPS

from masksafe._core import platforms

# The dtype of these is at least JAX's default float, as in optax.
OF_DEFAULT_FLOAT = "multiclass_hinge", "multiclass_perceptron", "multiclass_sparsemax", "ctc_loss"


def traced_beside_64_bits(of, key, dtype, plan):
    """The types of the results of `of(key)`, a function of what a program takes, for integers of 64 bits."""
    op, dtypes = OPS[key], {"f": dtype, "i": "int64"}
    args = tuple(a.astype(dtypes.get(a.dtype.kind, a.dtype)) for a in op.args)
    flags = jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with flags[0], flags[1], flags[2], platforms.chosen(**PLANS[plan]):
        outputs = jax.eval_shape(lambda *args: jax.tree.leaves(op.call(op.where, *args)), *args)
        cotangents = tuple(np.ones(out.shape, out.dtype) for out in outputs)
        return jax.eval_shape(functools.partial(of, key), op.where, args, cotangents)


@each_op()
def test_float32_stays_beside_64_bits(key):
    outputs, gradients = traced_beside_64_bits(value_and_gradients, key, "float32", "blocks")
    assert {g.dtype for g in gradients} == {np.dtype("float32")}
    assert key.startswith(OF_DEFAULT_FLOAT) or {out.dtype for out in outputs} == {np.dtype("float32")}


def every_derivative(key, where, args, cotangents):
    given = where, args, cotangents, tuple(direction(i, args[i]) for i in OPS[key].floats)
    return program_of(key)(*given), reverse_over_reverse_of(key)(*given)


@pytest.mark.forms
@each_op(lambda op: op.tier == "default")
def test_every_derivative_is_traced_beside_64_bits(key):
    traced_beside_64_bits(every_derivative, key, "float32", distinct_plans(key)[-1])


# These lay out arrays in front of their programs, where JAX sees what a mask hides; some variants do so with weights.
ALARM = "group_norm", "merge_attention"


@pytest.mark.forms
@each_op(lambda op: op is OPS[op.name] and op.name not in ALARM)
def test_garbage_is_no_alarm_without_jit(key):
    """JAX searches the outputs of each program: what is kept for a reverse pass may hold no NaN either."""
    op = OPS[key]
    with jax.debug_nans(True):
        value_and_gradients(key, op.where, filled(key, op.where, np.nan, only=0), cotangents_of(key))
