"""The integer loss on logits whose classes `jax.shard_map` splits over the devices: one device's answer on eight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close
from jax.sharding import AxisType, PartitionSpec
from tiers import parametrize

import masksafe
from masksafe.losses import softmax_cross_entropy_with_integer_labels as integer

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(6, 12)).astype(np.float32) * 4
LABELS = np.array([0, 5, 11, 3, 7, 8])
WEIGHTS = np.array([1.0, -2.0, 0.5, 0.0, 3.0, 1.0], np.float32)
ROWS = np.array([True, False, True, True, True, False])
CLASSES = RNG.random((6, 12)) < 0.6
CLASSES[4] = False  # a row with nothing left
CLASSES[0, 0] = False  # and a label whose class is masked
EVERY_CLASS = np.ones_like(CLASSES)
BY_ROW, BY_BOTH = PartitionSpec("rows"), PartitionSpec("rows", "classes")


def mesh_of(rows, classes):
    return jax.make_mesh((rows, classes), ("rows", "classes"), axis_types=(AxisType.Auto,) * 2)


def split(fn, mask=None):
    """`fn(logits, labels, mask)` with the rows of all, and the classes of the logits, split over eight devices."""
    mask_spec = BY_BOTH if mask is not None and mask.ndim == 2 else BY_ROW
    in_specs = BY_BOTH, BY_ROW, mask_spec
    return jax.shard_map(fn, mesh=mesh_of(2, 4), in_specs=in_specs, out_specs=BY_ROW)


def integer_with_mask(x, y, w, **axis_name):
    return integer(x, y, where=w, **axis_name)


local_loss = functools.partial(integer_with_mask, axis_name="classes")


def value_and_gradient(loss, x, *args):
    value, reverse = jax.vjp(lambda x: loss(x, *args), x)
    return value, reverse(jnp.asarray(WEIGHTS, value.dtype))[0]


@jax.jit
def on_eight_devices_and_on_one(x, y, mask):
    return [value_and_gradient(loss, x, y, mask) for loss in (split(local_loss, mask), integer_with_mask)]


@parametrize(("dtype", "mask"), [("float32", CLASSES)], exhaustive=[("bfloat16", ROWS), ("float16", None)])
def test_value_and_gradient_are_those_of_one_device(dtype, mask):
    """With garbage under the mask."""
    left = np.ones_like(CLASSES) if mask is None else np.broadcast_to(mask.T, CLASSES.T.shape).T
    logits, labels = np.where(left, LOGITS, np.nan).astype(dtype), np.where(left.any(1), LABELS, -100)
    actual, expected = on_eight_devices_and_on_one(logits, labels, mask)
    assert [x.dtype for x in actual] == [x.dtype for x in expected] == [dtype, dtype]
    assert_close(actual, expected, rtol=1e-6 if dtype == "float32" else 1e-2)


ROW_2 = {  # what it holds, and its label
    "label -1": ({}, -1),
    "label too large": ({}, 12),
    "NaN on another device than the label": ({4: np.nan}, 2),
    "NaN at the label": ({2: np.nan}, 2),
    "+inf on another device": ({4: np.inf}, 2),
    "+inf at the label": ({2: np.inf}, 2),
    "-inf at the label": ({2: -np.inf}, 2),
    "-inf on all other devices": (dict.fromkeys(range(3, 12), -np.inf), 2),
    "-inf everywhere": (dict.fromkeys(range(12), -np.inf), 2),
    "a sure model": ({2: 60.0}, 2),
    "the lowest float": (dict.fromkeys(range(12), np.finfo(np.float32).min), 2),
}


def test_what_is_not_finite_shows_in_its_own_row_only():
    for row, label in ROW_2.values():
        logits, labels = LOGITS.copy(), LABELS.copy()
        logits[2, list(row)], labels[2] = list(row.values()), label
        assert_close(*on_eight_devices_and_on_one(logits, labels, EVERY_CLASS), rtol=1e-6)


def test_class_weights_are_split_like_the_classes():
    class_weights, options = np.abs(RNG.normal(size=12)).astype(np.float32), {"label_smoothing": 0.1, "z_loss": 0.01}
    class_weights[LABELS[1]], class_weights[0] = 0, np.nan  # the class of a label that is masked
    specs = BY_BOTH, BY_ROW, BY_BOTH, PartitionSpec("classes")
    loss = lambda x, y, w, v, **names: integer(x, y, where=w, class_weights=v, **options, **names)  # noqa: E731
    local = functools.partial(loss, axis_name="classes")
    local = jax.shard_map(local, mesh=mesh_of(2, 4), in_specs=specs, out_specs=BY_ROW)
    mask = CLASSES & (np.arange(12) > 0)
    both = jax.jit(lambda x: [value_and_gradient(fn, x, LABELS, mask, class_weights) for fn in (local, loss)])
    actual, expected = both(LOGITS)
    assert_close(actual, expected, rtol=1e-6)
    assert not np.isnan(expected[0]).any()


def test_a_loss_inside_that_is_the_same_on_all_devices_trains_alike():
    def step(x, y):
        return jax.value_and_grad(lambda x: jax.lax.pmean(integer(x, y, axis_name="classes").mean(), "rows"))(x)

    in_specs, out_specs = (BY_BOTH, BY_ROW), (PartitionSpec(), BY_BOTH)
    inside = jax.shard_map(step, mesh=mesh_of(2, 4), in_specs=in_specs, out_specs=out_specs)
    plain = jax.value_and_grad(lambda x: integer(x, LABELS).mean())
    assert_close(*jax.jit(lambda x: (inside(x, jnp.asarray(LABELS)), plain(x)))(LOGITS), rtol=1e-6, atol=1e-7)


@parametrize("order", [2], exhaustive=[1])
def test_second_derivatives_and_forward_mode(order):
    mask = CLASSES.copy()
    mask[np.arange(6), LABELS] |= CLASSES.any(1)

    def along(loss, x):
        total = lambda x: loss(x, LABELS, mask) @ WEIGHTS  # noqa: E731
        if order == 2:
            return jax.jvp(jax.grad(total), (x,), (jnp.cos(x),))[1]
        with masksafe.forward_mode():
            return jax.jvp(total, (x,), (jnp.cos(x),))[1]

    both = jax.jit(lambda x: [along(loss, x) for loss in (split(local_loss, mask), integer_with_mask)])
    assert_close(*both(LOGITS), rtol=1e-4, atol=1e-5)


def test_several_axes_of_classes_split_along_the_first():
    loss, specs = functools.partial(integer, axis=(1, 2)), (PartitionSpec("rows", "classes"), BY_ROW)
    local = functools.partial(loss, axis_name="classes")
    local = jax.shard_map(local, mesh=mesh_of(2, 4), in_specs=specs, out_specs=BY_ROW)
    both = jax.jit(lambda x, y: [value_and_gradient(fn, x, y) for fn in (local, loss)])
    assert_close(*both(LOGITS.reshape(6, 4, 3), LABELS), rtol=1e-6)


def test_label_checks_know_the_classes_and_the_masks_of_all_devices():
    """They are silent on good labels."""
    good = CLASSES | (np.arange(12) == LABELS[:, None])
    step = jax.jit(split(local_loss, good))
    with masksafe.label_checks("raise"):
        loss = jax.block_until_ready(step(LOGITS, LABELS, good))
        with pytest.raises(Exception, match=r"labels are outside \[0, 12\)"):
            jax.block_until_ready(step(LOGITS, np.where(ROWS, LABELS, 12), good))
        with pytest.raises(Exception, match="labels are at a masked class"):
            jax.block_until_ready(step(LOGITS, LABELS, CLASSES))
    np.testing.assert_allclose(loss, on_eight_devices_and_on_one(LOGITS, LABELS, good)[1][0], rtol=1e-6)
