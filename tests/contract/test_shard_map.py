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
from test_flags import assert_no_dtype_grew, beside_64_bits, strict_flags
from tiers import parametrize

import masksafe
from masksafe._core import platforms


def in_shard_map(fn, key, masks, args, cotangents=None, *, mask="", floats="", integers="", jit=jax.jit):
    """`fn` of a mask, arguments, cotangents and directions, split over the axes of a mesh of that name.

    An axis has two devices, and what is split over it one more axis for them.
    """
    op, names = OPS[key], sorted({mask, floats, integers} - {""})
    mesh = jax.make_mesh((2,) * len(names), tuple(names), axis_types=(AxisType.Auto,) * len(names))
    over = lambda *names: PartitionSpec(names) if any(names) else PartitionSpec()  # noqa: E731
    of_args = tuple(over(floats if a.dtype.kind == "f" else integers) for a in op.args)
    cotangents = cotangents_of(key) if cotangents is None else cotangents
    specs = over(mask), of_args, (over(*names),) * len(cotangents), tuple(of_args[i] for i in op.floats)
    given = masks, args, stacked(cotangents, 2 ** len(names)), stacked(directions_of(key))
    given = jax.tree.map(lambda a, spec: a if any(spec) else a[0], given, specs)

    def on_device(*given):
        results = fn(*jax.tree.map(lambda a, spec: a[0] if any(spec) else a, given, specs))
        return jax.tree.map(lambda a: a[None], results)

    with platforms.chosen(**PLANS["blocks"]):
        return jit(jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=over(*names)))(*given)


def stacked(tree, times=2):
    return jax.tree.map(lambda a: np.stack([a] * times), tree)


def shapes(fn):
    return functools.partial(jax.eval_shape, fn)


def trace(key, where, **splits):
    in_shard_map(program_of(key), key, stacked(where), stacked(OPS[key].args), jit=shapes, **splits)


def masks_of(key):
    """That of the table, and one of rows, where the op takes it."""
    where = OPS[key].where
    has_rows = where.ndim == 2 and not key.startswith(("ctc_loss", "group_norm, positions"))
    return [where, where.any(1, keepdims=True)] if has_rows else [where]


@pytest.mark.exhaustive
@each_op()
def test_every_op_takes_a_mask_that_is_split_otherwise(key):
    """Beside 64 bits, where no dtype grows. Outputs vary over both axes; a gradient is a sum over one of them."""
    op = OPS[key]

    def gradients(where, args, cotangents, _):
        return value_and_gradients(key, where, args, cotangents)

    with strict_flags():
        _, args, cotangents = beside_64_bits(key, op.args)
        splits = {"mask": "masks", "integers": "masks", "floats": "data"}
        for where in masks_of(key) if op.stands_for else [op.where]:
            results = in_shard_map(gradients, key, stacked(where), stacked(args), cotangents, **splits, jit=shapes)
            assert_no_dtype_grew(key, *results)


# An op of each family that has no kind of its own, and is not below.
OF_OTHER_FAMILIES = "dice_loss", "group_norm", "MaskedMean", "load_balancing_loss", "ragged_dot", "merge_attention"


@pytest.mark.exhaustive
@each_op(lambda op: op.stands_for or (op.name in OF_OTHER_FAMILIES and op is OPS[op.name]))
def test_every_derivative_takes_a_mask_that_is_split(key):
    trace(key, masks_of(key)[-1], mask="devices")


def test_ops_whose_derivatives_have_a_mask_or_a_loop_of_their_own():
    for key in ("segment_logsumexp", "segment_var", "segment_standardize", "router_z_loss", "triplet_margin_loss"):
        trace(key, masks_of(key)[1], mask="devices")
    trace("layer_norm", OPS["layer_norm"].where, floats="devices")
    trace("ctc_loss", OPS["ctc_loss"].where, integers="devices")


@parametrize("kind", ["checkify"], exhaustive=["forward_mode"])
def test_attention_by_plain_rules(kind):
    key = "dot_product_attention"
    mode = masksafe.forward_mode() if kind == "forward_mode" else masksafe.label_checks(kind)
    with mode:
        gradients = lambda where, args, cotangents, _: value_and_gradients(key, where, args, cotangents)  # noqa: E731
        jit = lambda fn: shapes(checkify.checkify(fn))  # noqa: E731
        in_shard_map(gradients, key, stacked(OPS[key].where), stacked(OPS[key].args), mask="devices", jit=jit)


@each_kind(lambda op: op.name != "dot_product_attention")
def test_the_numbers_are_those_of_each_device(key):
    check_numbers(key)


@pytest.mark.exhaustive
def test_the_numbers_of_attention_are_those_of_each_device():
    check_numbers("dot_product_attention")


def check_numbers(key):
    """JAX adds up gradients over the devices with other masks; on half of them garbage is under both masks."""
    where, args = OPS[key].where, OPS[key].args
    masks = np.stack([where, np.concatenate([np.zeros_like(where[:1]), where[1:]])])
    both = jax.tree.map(lambda *a: np.stack(a), args, polluted(key, where))
    splits = {"mask": "masks", "floats": "data", "integers": "data"}
    found = jax.device_get(in_shard_map(program_of(key), key, masks, both, **splits))
    results = [run(key, mask) for mask in masks]
    of_all = jax.tree.map(np.add, *results)
    for device in range(4):
        outputs, gradients, tangents, slopes, _ = jax.tree.map(lambda a: a[device], found)  # noqa: B023
        assert_close((outputs, gradients), (results[device % 2].outputs, of_all.gradients))
        expected = results[device % 2].tangents, of_all.forward_over_reverse
        jax.tree.map(assert_same_second_derivative, (tangents, slopes), expected)
