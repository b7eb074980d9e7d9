"""Random calls of every op: what is masked is gone, whatever it holds, and what is left gives no NaN.

Each op is called in random configurations (shapes, axes, a dtype). Each is compiled once, for many masks, values and
kinds of garbage: of all ops together there are over 6,000 cases.
"""

import os
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from program import (
    assert_close,
    assert_is_nothing,
    assert_same_bits,
    cotangents_of,
    each_kind,
    each_op,
    function_of_floats,
    run,
    value_and_gradients,
)
from table import OPS, Op

CASES_OF_A_STYLE = 10  # masks, values and garbage, for each configuration
DTYPES = ["float16", "bfloat16", "float32", "float64"]
SIZES = [1, 2, 2, 3, 3, 5, 5]
STYLES = ["empty", "full", "sparse", "half", "dense", "dead rows"]
GARBAGE = {"f": [np.nan, np.inf, -np.inf, 1e4, -1e4, "extreme"], "i": [-1, -100, 2**31 - 1, -(2**31), "end"]}

pytestmark = pytest.mark.slow


class Call(NamedTuple):
    """A configuration: an op, the options of its call, and the shapes of its mask and its arguments."""

    op: Op
    options: dict[str, Any]
    mask_shape: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


def call_of(op: Op, sizes: list[int], rng: np.random.Generator) -> Call:
    """An op of elements or rows in random shapes, along random axes; what has a shape of its own keeps that."""
    size = lambda least=0: max(least, int(rng.choice(sizes)))  # noqa: E731
    if op.hidden is not None:
        return Call(op, {}, op.where.shape, tuple(a.shape for a in op.args))
    if set(op.kinds) == {"row"} and op.has_axis and op.where.ndim > 1:
        shape = tuple(size() for _ in range(rng.integers(1, 4)))
        axes = tuple(rng.permutation(len(shape))[: rng.integers(1, len(shape) + 1)].tolist())
        return Call(op, {"axis": axes[0] if len(axes) == 1 else axes}, shape, (shape,) * len(op.args))
    has_own = "whole" in op.kinds or op.name == "group_norm"
    shape = size(), *(n if has_own else size(1) for n in op.where.shape[1:])
    if op.name == "merge_attention":
        shape = op.where.shape
    left = op.where.ndim
    of_kind = {
        "row": lambda a: shape + a.shape[left:],
        "of row": lambda a: shape[:1] + a.shape[1:],
        "label": lambda a: shape[:1] + a.shape[1:],
        "along": lambda a: shape[1:],
        "whole": lambda a: a.shape,
    }
    return Call(op, {}, shape, tuple(of_kind[kind](a) for kind, a in zip(op.kinds, op.args, strict=True)))


class Case(NamedTuple):
    """What one of the cases of a call is given, what of it is masked, and the cotangents."""

    mask: np.ndarray
    clean: list[np.ndarray]
    dirty: list[np.ndarray]
    hidden: list[np.ndarray]
    weights: list[np.ndarray]


def cases_of(call, dtype, styles, rng):
    """A case of each style of masks."""
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in values_of_all(call, dtype, rng)]
    outputs = jax.eval_shape(lambda *given: outputs_of(call, *given), np.ones(call.mask_shape, bool), args)
    return [case_of(call, outputs, dtype, style, rng) for style in styles]


def case_of(call, outputs, dtype, style, rng):
    mask = mask_of(style, call.mask_shape, rng)
    wide = "float64" if dtype == "float64" else "float32"
    values = values_of_all(call, dtype, rng)
    hidden = call.op.hides(mask, call.shapes)
    clean = [np.where(h, np.zeros((), x.dtype), x) for x, h in zip(values, hidden, strict=True)]
    dirty = [polluted(x, h, call.op.classes, rng) for x, h in zip(clean, hidden, strict=True)]
    return Case(mask, clean, dirty, hidden, [rng.normal(size=out.shape).astype(wide) for out in outputs])


def mask_of(style, shape, rng):
    if style in ("empty", "full"):
        return np.full(shape, style == "full")
    mask = rng.random(shape) < {"sparse": 0.2, "half": 0.5, "dense": 0.9}.get(style, 0.5)
    if style == "dead rows" and shape:
        mask &= np.expand_dims(rng.random(shape[:-1]) < 0.5, -1)
    return mask


def values_of_all(call, dtype, rng):
    return [values_of(call, number, dtype, rng) for number in range(len(call.shapes))]


def values_of(call, number, dtype, rng):
    """Of the kind that the table has: labels, signs, bits, shares of which some are 0, or any numbers, maybe large."""
    of_table, shape = call.op.args[number], call.shapes[number]
    if call.op.kinds[number] == "label":
        classes = call.shapes[0][-1] if len(call.mask_shape) > 1 else call.op.classes or of_table.max() + 1
        # No class that the op itself masks.
        allowed = of_table.ravel() if call.op.hidden is not None else np.arange(classes)
        return rng.choice(allowed, shape).astype(np.int32)
    if number not in call.op.floats and shape[1:] == of_table.shape[1:]:
        values = of_table[rng.integers(len(of_table), size=shape[0])]
        return values if values.dtype.kind == "i" else values.astype(jnp.dtype(dtype))
    values = rng.choice(of_table.ravel(), shape)
    if not np.array_equal(of_table, np.round(of_table)):
        are_shares = of_table.min() >= 0 and of_table.max() <= 1
        values = values * (rng.random(shape) < 0.8) if are_shares else values
        values = values if are_shares and "sigmoid" in call.op.name else values * rng.choice([0.1, 1.0, 10.0])
    return values if values.dtype.kind == "i" else values.astype(jnp.dtype(dtype))


def polluted(values, hidden, classes, rng):
    kinds = GARBAGE["i" if values.dtype.kind == "i" else "f"]
    chosen = [kinds[i] for i in rng.integers(len(kinds), size=2)]
    extreme = classes or 7 if values.dtype.kind == "i" else float(jnp.finfo(values.dtype).max)
    garbage = np.where(rng.random(values.shape) < 0.5, *(extreme if isinstance(k, str) else k for k in chosen))
    return np.where(hidden, garbage, values).astype(values.dtype)


def outputs_of(call, mask, args):
    fn, floats = function_of_floats(call.op, mask, args, **call.options)
    return fn(*floats)


def results_of(call: Call) -> Callable[..., Any]:
    """A jitted function of many masks, arguments and weights, stacked, that gives the outputs and gradients of each."""

    def evaluate(case):
        mask, args, weights = case
        fn, floats = function_of_floats(call.op, mask, args, **call.options)

        def total(*floats):
            outputs = fn(*floats)  # -inf, of nothing, and +inf have no use for a weight
            kept = [
                jnp.where(jnp.isfinite(out), out, 0).astype(w.dtype) * w
                for out, w in zip(outputs, weights, strict=True)
            ]
            return sum(map(jnp.sum, kept)), outputs

        return jax.value_and_grad(total, tuple(range(len(floats))), has_aux=True)(*floats)

    return jax.jit(lambda *cases: jax.lax.map(evaluate, cases))


def assert_gone(call, cases):
    of = jax.tree.map(lambda *leaves: np.stack(leaves), *cases)
    evaluate = results_of(call)
    clean = jax.device_get(evaluate(of.mask, of.clean, of.weights))
    (_, outputs), gradients = dirty = jax.device_get(evaluate(of.mask, of.dirty, of.weights))
    assert_same_bits(clean, dirty)
    for gradient, number in zip(gradients, call.op.floats, strict=True):
        assert not np.isnan(gradient.astype(np.float64)).any()
        assert_is_nothing(gradient[of.hidden[number]])
    nothing = [not case.mask.any() for case in cases]
    for out, of_nothing in zip(outputs, call.op.nothing, strict=True):
        assert not np.isnan(out.astype(np.float64)).any()
        assert_is_nothing(out[nothing], of_nothing)


@each_op(lambda op: op.floats)
def test_masked_elements_are_gone_and_nothing_else_is_nan(key):
    # The first configuration of an op is always the same. Others are new in every run, but not in CI, where a change is
    # not to fail for what it did not touch. Each compiles a program: its time says nothing.
    number = {"max_examples": 1 if os.environ.get("CI") else 2, "derandomize": bool(os.environ.get("CI"))}
    timeless = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    op = OPS[key]

    @hypothesis.settings(database=None, print_blob=True, **number, **timeless)
    @hypothesis.given(seed=st.integers(0, 2**32 - 1))
    def check(seed):
        rng = np.random.default_rng([seed, zlib.crc32(key.encode())])
        for sizes in (SIZES, [0, *SIZES])[: 2 if op.stands_for else 1]:
            call, dtype = call_of(op, sizes, rng), rng.choice(DTYPES)
            with jax.enable_x64(dtype == "float64"):
                assert_gone(call, cases_of(call, dtype, STYLES * CASES_OF_A_STYLE, rng))

    check()


@each_kind()
def test_nothing_is_owed_to_a_selection_that_xla_makes_of_a_product(key):
    """The same operation by operation, for the arrays of the table."""
    op, rng = OPS[key], np.random.default_rng(0)
    hidden = op.hides(op.where)
    args = [polluted(a, h, op.classes, rng) for a, h in zip(op.args, hidden, strict=True)]
    with jax.disable_jit():
        outputs, gradients = value_and_gradients(key, op.where, args, cotangents_of(key))
    assert_close((outputs, gradients), run(key)[:2])
    for gradient, number in zip(gradients, op.floats, strict=True):
        assert_is_nothing(gradient[hidden[number]])
