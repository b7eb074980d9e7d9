"""Every op with `axis_name` takes one axis of a mesh or several: four devices in two axes, against one device."""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from comparisons import assert_close, with_gradients
from jax.sharding import AxisType, PartitionSpec
from tiers import parametrize

import masksafe
from masksafe import losses

RNG = np.random.default_rng(0)
ROWS, COLUMNS = 8, 12
X, Y = RNG.normal(size=(2, ROWS, COLUMNS)).astype(np.float32)
KEEP = RNG.random((ROWS, COLUMNS)) < 0.7
KEEP_ROWS = np.arange(ROWS) != 1
LABELS = np.array([0, 3, 11, 7, 5, 2, 8, 10])
IDS = np.array([0, 2, 1, 1, 0, 2, 2, 4])
KERNEL, BIAS = RNG.normal(size=(3, COLUMNS)).astype(np.float32), X[0]
QUERY, KEY, VALUE = RNG.normal(size=(3, 2, ROWS, 2, 4)).astype(np.float32)
OFTEN = np.abs(Y[0])


class Case(NamedTuple):
    """A call, in which the arrays are split along the axis beside them; None: each device has all of it."""

    arrays: dict[str, tuple[Any, int | None]]
    out: Any  # the axis along which a result is split, one for each of several
    options: dict[str, Any]


def case(out, arrays, **options):
    return Case(arrays, out, options)


ALONG_ROWS, ALONG_COLUMNS = ({"x": (X, axis), "where": (KEEP, axis)} for axis in (0, 1))
SEGMENTS = {"data": (X, 0), "segment_ids": (IDS, 0), "where": (KEEP_ROWS, 0)}
NORM = ALONG_COLUMNS | {"scale": (OFTEN, 0)}
PAIRS = {"x": (X, 0), "y": (Y, 0), "where": (KEEP_ROWS, 0)}
LAYER = {"features": (X[:, :3], None), "kernel": (KERNEL, 1), "bias": (BIAS, 0), "labels": (LABELS, None)}
LAYER |= {"where": (KEEP_ROWS, None), "class_mask": (np.arange(COLUMNS) != 9, 0)}
CASES = {
    "softmax_cross_entropy_with_integer_labels": case(
        (None, None),
        {"logits": (X, 1), "labels": (LABELS, None), "where": (KEEP | (np.arange(COLUMNS) == LABELS[:, None]), 1)}
        | {"class_weights": (OFTEN, 0)},
        **{"label_smoothing": 0.1, "z_loss": 0.01, "with_components": True},
    ),
    "linear_softmax_cross_entropy": case(None, LAYER | {"class_weights": (OFTEN, 0)}, label_smoothing=0.1, z_loss=0.01),
    "linear_log_probs": case((None,) * 4, LAYER, with_entropy=True, with_predictions=True),
    "dot_product_attention": case(1, {"query": (QUERY, 1), "key": (KEY, 1), "value": (VALUE, 1)}, is_causal=True),
    "info_nce_loss": case(None, PAIRS),
    "sigmoid_contrastive_loss": case(None, PAIRS),
    "load_balancing_loss": case(None, {"router_probs": (np.abs(X), 0), "expert_indices": (IDS[:, None], 0)}),
    **{name: case(None, ALONG_ROWS, axis=0) for name in ("sum", "mean", "max", "min", "var")},
    "var_mean": case((None, None), ALONG_ROWS, axis=0, correction=1),
    "layer_norm": case(1, NORM | {"bias": (BIAS, 0)}),
    "rms_norm": case(1, NORM),
    "standardize": case(1, ALONG_COLUMNS),
    "batch_norm": case((0, None, None), ALONG_ROWS),
    "group_norm": case(1, {"x": (X.reshape(2, 4, COLUMNS), 1)}, num_groups=2),
    **{f"segment_{name}": case(None, SEGMENTS, num_segments=5) for name in ("sum", "mean", "var", "max", "min")},
    "segment_logsumexp": case(None, SEGMENTS, num_segments=5, empty_value=0.0),
    **{f"segment_{name}": case(0, SEGMENTS, num_segments=5) for name in ("softmax", "log_softmax", "standardize")},
    "next_tokens": case((1, 1), {"tokens": (LABELS[None], 1), "segment_ids": (IDS[None], 1)}),
}
TESTED_ELSEWHERE = {"value_and_grad_of_mean"}  # tests/reductions/test_masked_mean.py


def op_of(name):
    return getattr(losses if name in losses.__all__ else masksafe, name)


def mesh_of_four():
    return jax.make_mesh((2, 2), ("x", "y"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])


def test_every_op_with_axis_name_is_here():
    public = {name: op_of(name) for name in (*masksafe.__all__, *losses.__all__)}
    takes_names = lambda op: callable(op) and "axis_name" in inspect.signature(op).parameters  # noqa: E731
    assert {name for name, op in public.items() if takes_names(op)} == CASES.keys() | TESTED_ELSEWHERE


BY_DEFAULT = "softmax_cross_entropy_with_integer_labels", "linear_softmax_cross_entropy", "dot_product_attention"


@parametrize("name", BY_DEFAULT, exhaustive=CASES)
def test_values_and_gradients_over_two_axes_are_those_of_one_device(name):
    """In another order than the mesh has them: the first name is the slowest, as in a `PartitionSpec`."""
    names, (arrays, out, options) = ("y", "x"), CASES[name]
    op = functools.partial(op_of(name), **options)

    def spec(axis):
        return PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, names)

    specs = {argument: spec(axis) for argument, (_, axis) in arrays.items()}
    out_specs = tuple(map(spec, out)) if isinstance(out, tuple) else spec(out)
    local = lambda arrays: op(**arrays, axis_name=names)  # noqa: E731
    split = jax.shard_map(local, mesh=mesh_of_four(), in_specs=(specs,), out_specs=out_specs)
    values = {argument: array for argument, (array, _) in arrays.items()}
    floats = {argument: x for argument, x in values.items() if x.dtype == np.float32 and argument != "class_weights"}
    others = {argument: x for argument, x in values.items() if argument not in floats}

    def results(fn):
        return with_gradients(lambda floats, others: fn(floats | others))(floats, others)

    expected = results(lambda arrays: op(**arrays))
    assert all(np.any(x) for x in jax.tree.leaves(expected))
    assert_close(results(split), expected)


@pytest.mark.parametrize("names", [("x", "rows"), ("x", "x"), (), ("x", 0)], ids=str)
def test_bad_names_are_refused(names):
    local = functools.partial(losses.softmax_cross_entropy_with_integer_labels, axis_name=names)
    specs = PartitionSpec(None, ("x", "y")), PartitionSpec()
    split = jax.shard_map(local, mesh=mesh_of_four(), in_specs=specs, out_specs=PartitionSpec())
    text = "axis_name: got value .*; expected an axis of the mesh of the jax.shard_map around the call, a tuple of them"
    with pytest.raises((TypeError, ValueError), match=f"^softmax_cross_entropy_with_integer_labels: {text}"):
        split(X, LABELS)
