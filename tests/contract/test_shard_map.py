"""Rule 7 in `jax.shard_map`, where the mask is split over devices and the data are not, or the other way round.

JAX sums the gradient of what is not split over the devices. Most of what may be wrong JAX refuses while it traces.
"""

import functools

import jax
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, PartitionSpec
from program import (
    PLANS,
    Results,
    assert_close,
    assert_same_second_derivative,
    cotangents_of,
    directions_of,
    each_kind,
    each_op,
    polluted,
    program_of,
    run,
    value_and_gradients,
)
from table import OPS
from tiers import parametrize

import masksafe
from masksafe._core import platforms


def in_shard_map(fn, key, masks, args, *, mask=False, floats=False, integers=False, jit=jax.jit):
    """`fn` of a mask, arguments, cotangents and directions on two devices. What is split has one more axis for them."""
    op, mesh = OPS[key], jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    of_args = tuple(floats if a.dtype.kind == "f" else integers for a in op.args)
    is_split = mask, of_args, (True,) * len(cotangents_of(key)), tuple(of_args[i] for i in op.floats)
    given = masks, args, twice(cotangents_of(key)), twice(directions_of(key))
    given = jax.tree.map(lambda a, split: a if split else a[0], given, is_split)
    specs = jax.tree.map(lambda split: PartitionSpec(*["devices"][:split]), is_split)

    def on_device(*given):
        results = fn(*jax.tree.map(lambda a, split: a[0] if split else a, given, is_split))
        return jax.tree.map(lambda a: a[None], results)

    with platforms.chosen(**PLANS["blocks"]):
        return jit(jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("devices")))(*given)


def twice(tree):
    return jax.tree.map(lambda a: np.stack([a, a]), tree)


def trace(key, where, **splits):
    jit = lambda fn: functools.partial(jax.eval_shape, fn)  # noqa: E731
    in_shard_map(program_of(key), key, twice(where), twice(OPS[key].args), jit=jit, **splits)


def masks_of(key):
    """That of the table, and one of rows, where the op takes it."""
    where = OPS[key].where
    has_rows = where.ndim == 2 and not key.startswith(("ctc_loss", "group_norm, positions"))
    return [where, where.any(1, keepdims=True)] if has_rows else [where]


@pytest.mark.exhaustive
@each_op()
def test_every_op_takes_every_split(key):
    op = OPS[key]
    for where in masks_of(key):
        trace(key, where, mask=True)
        trace(key, where, floats=True, integers=True)
    if len(op.nothing) == 1 and any(a.dtype.kind == "i" for a in op.args):  # one output, which depends on them
        trace(key, op.where, integers=True)


def test_ops_whose_derivatives_have_a_mask_or_a_loop_of_their_own():
    for key in ("segment_logsumexp", "segment_var", "segment_standardize", "router_z_loss", "triplet_margin_loss"):
        trace(key, masks_of(key)[1], mask=True)
    trace("layer_norm", OPS["layer_norm"].where, floats=True)
    trace("ctc_loss", OPS["ctc_loss"].where, integers=True)


@parametrize("kind", ["checkify"], exhaustive=["forward_mode"])
def test_attention_by_plain_rules(kind):
    key = "dot_product_attention"
    mode = masksafe.forward_mode() if kind == "forward_mode" else masksafe.label_checks(kind)
    with mode:
        gradients = lambda where, args, cotangents, _: value_and_gradients(key, where, args, cotangents)  # noqa: E731
        jit = lambda fn: functools.partial(jax.eval_shape, checkify.checkify(fn))  # noqa: E731
        in_shard_map(gradients, key, twice(OPS[key].where), twice(OPS[key].args), mask=True, jit=jit)


def summed(tree):
    return jax.tree.map(lambda a: np.repeat(a.sum(0, keepdims=True), 2, 0), tree)


@each_kind(lambda op: op.name != "dot_product_attention")
def test_the_numbers_are_those_of_each_device(key):
    check_numbers(key)


@pytest.mark.exhaustive
def test_the_numbers_of_attention_are_those_of_each_device():
    check_numbers("dot_product_attention")


def check_numbers(key):
    """JAX adds up the gradients of what is not split."""
    where, args, garbage = OPS[key].where, OPS[key].args, polluted(key, OPS[key].where)
    without_first = np.concatenate([np.zeros_like(where[:1]), where[1:]])
    clean, other = run(key), run(key, without_first)

    def check(found, expected):
        assert_close(found[:2], expected[:2])
        jax.tree.map(assert_same_second_derivative, jax.device_get(tuple(found[2:])), tuple(expected[2:4]))

    program, masks = program_of(key), np.stack([where, without_first])
    outputs, gradients, tangents, slopes, _ = jax.tree.map(lambda *a: np.stack(a), clean, other)
    expected = Results(outputs, summed(gradients), tangents, summed(slopes))
    check(in_shard_map(program, key, masks, twice(garbage), mask=True)[:4], expected)
    both = jax.tree.map(lambda *a: np.stack(a), args, garbage)
    check(in_shard_map(program, key, twice(where), both, floats=True, integers=True)[:4], twice(clean))
