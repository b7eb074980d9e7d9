"""Rule 7. Every way to call an op gives the same results."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from program import (
    PLANS,
    assert_close,
    assert_same_bits,
    cotangents_of,
    distinct_programs,
    each_kind,
    each_op,
    function_of_floats,
    may_be_split,
    polluted,
    run,
    split_rows,
    unmasked,
    value_and_gradients,
)
from table import OPS

import masksafe
from masksafe._core import platforms
from masksafe.testing import assert_consistent


@each_kind()
def test_the_value_alone(key):
    op = OPS[key]
    with platforms.chosen(**PLANS["blocks"]):
        for call in (jax.jit(op.call), op.call):
            assert_close(jax.tree.leaves(call(op.where, *op.args)), run(key).outputs)


@each_op(lambda op: op.may_be_unmasked)
def test_no_mask_is_a_mask_of_nothing(key):
    op = OPS[key]
    assert_close(unmasked(key)(op.args, cotangents_of(key)), run(key, np.ones_like(op.where))[:2])


@each_op(lambda op: op.by_default)
def test_the_program_of_accelerators(key):
    op = OPS[key]
    step = jax.jit(functools.partial(value_and_gradients, key))
    with platforms.chosen(**PLANS["accelerator"]):
        results = [step(op.where, polluted(key, op.where, x), cotangents_of(key, x)) for x in (0, np.nan)]
    assert_same_bits(*jax.device_get(results))
    assert_close(results[0], run(key, cotangents=cotangents_of(key, 0))[:2])


@pytest.mark.exhaustive
@each_kind()
def test_every_form_of_a_program(key):
    """Values and gradients: second derivatives are those of the plain form, or of tests of one loss."""
    op, (_, *others) = OPS[key], distinct_programs(key).values()
    expected = run(key, cotangents=cotangents_of(key, 0))[:2]
    for other in others:
        program = other.compile()
        results = [program(op.where, polluted(key, op.where, x), cotangents_of(key, x)) for x in (0, np.nan)]
        assert_same_bits(*jax.device_get(results))
        assert_close(results[0], expected)


@each_kind()
def test_in_a_vmap(key):
    op = OPS[key]
    moved = tuple(
        a[::-1] if kind in ("row", "of row", "label") else a for kind, a in zip(op.kinds, op.args, strict=True)
    )
    samples = (op.where, op.args), (op.where[::-1], moved)
    if not op.has_rows or "whole" in op.kinds:
        samples = samples[0], samples[0]
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *samples)
    fn = functools.partial(value_and_gradients, key, cotangents=cotangents_of(key))
    results = jax.jit(jax.vmap(fn))(*batch)
    for i, sample in enumerate(samples):
        assert_close(jax.tree.map(lambda a: a[i], results), run(key, *sample)[:2])  # noqa: B023


@each_op(lambda op: op.has_axis)
def test_along_another_axis(key):
    op = OPS[key]
    along = lambda kind, a: np.moveaxis(a, -1, 0) if kind == "row" else a  # noqa: E731
    args = tuple(map(along, op.kinds, op.args))
    where = np.moveaxis(op.where, -1, 0) if op.where.ndim > 1 else op.where
    layout = lambda kind, x: x.T if kind == "element" else x  # noqa: E731
    in_layout = lambda outputs: tuple(map(layout, op.outputs, outputs))  # noqa: E731
    cotangents = in_layout(cotangents_of(key))
    results = jax.jit(functools.partial(value_and_gradients, key, axis=0))(where, args, cotangents)
    outputs, gradients = jax.device_get(results)
    kinds = [op.kinds[i] for i in op.floats]
    gradients = tuple(g.T if kind == "row" else g for kind, g in zip(kinds, gradients, strict=True))
    assert_close((in_layout(outputs), gradients), run(key)[:2])


@each_kind(may_be_split)
def test_split_over_devices(key):
    op, program, args = OPS[key], *split(key, AxisType.Auto)
    program = program.lower().compile()
    assert_close(program(*args), run(key)[:2])
    if op.has_rows:
        assert "all-gather" not in program.as_text()


@pytest.mark.exhaustive
@each_kind(may_be_split)
def test_split_explicitly_over_devices(key):
    """What JAX may refuse, it refuses while it traces; and then it tells how results are split."""
    op, (program, _) = OPS[key], split(key, AxisType.Explicit)
    outputs, gradients = program.out_info
    of_rows = [gradient for i, gradient in zip(op.floats, gradients, strict=True) if op.kinds[i] in ("row", "of row")]
    for result in (*outputs, *of_rows) if op.has_rows else of_rows:
        assert result.sharding.spec[0] == "rows"


def split(key, kind):
    """The value and the gradients of an op with rows on two devices, traced, and its arguments."""
    op, mesh = OPS[key], jax.make_mesh((2,), ("rows",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        args = jax.device_put((op.where, polluted(key, op.where), cotangents_of(key)), split_rows(key, mesh))
        return jax.jit(functools.partial(value_and_gradients, key)).trace(*args), args


@pytest.mark.exhaustive
@each_kind()
def test_in_every_other_mode(key):
    op, finite = OPS[key], [np.isfinite(out) for out in run(key).outputs]
    modes = ["scan", "checkpoint"] + ["float64", "transposed", "donated"] * (
        op.by_default or key == "dot_product_attention"
    )
    fn, floats = function_of_floats(op, op.where, op.args)

    def finite_outputs(*floats):
        return [masksafe.mask_where(~f, out, 0) for out, f in zip(fn(*floats), finite, strict=True)]

    assert_consistent(finite_outputs, *floats, modes=modes)
