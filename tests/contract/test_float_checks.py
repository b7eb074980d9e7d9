"""The checks of floats and of indices that checkify adds: none of them fails for what is masked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from program import cotangents_of, each_kind, filled, value_and_gradients
from table import OPS
from tiers import parametrize

import masksafe
from masksafe import losses

HUGE = np.finfo(np.float32).max
# The table's labels of these are no distributions, which label checks report.
FREE_LABELS = "softmax_cross_entropy", "poly_loss_cross_entropy"
ROWS, LABELS = np.array([True, False, True]), np.array([2, -1, 0])
WEIGHTS = np.float32([1, np.nan, 2])
KERNEL = np.where(np.arange(5) < 4, np.ones((3, 5), np.float32), np.float32(np.nan))


@each_kind()
def test_what_is_masked_fails_no_check(key):
    op, errors, garbage = OPS[key], checkify.all_checks, ((np.nan, -1), (np.inf, -100), (HUGE, 2**31 - 1))
    if op.name == "dot_product_attention":
        errors -= checkify.index_checks  # JAX fails to check indices inside of `jax.checkpoint` (jax 0.12)
    if op.name.startswith("segment_"):  # ids are masked by what they are: others than these are reported
        garbage = [(value, -1) for value, _ in garbage]
    switch = masksafe.forward_mode() if op.name in FREE_LABELS else masksafe.label_checks("checkify")
    with switch:
        check = jax.jit(checkify.checkify(functools.partial(value_and_gradients, key), errors))
        for value, label in garbage:
            args = filled(key, op.where, lambda a: value if a.dtype.kind == "f" else label)  # noqa: B023
            assert check(op.where, args, cotangents_of(key))[0].get() is None


@parametrize("name", ["segment_var"], exhaustive=["var", "segment_mean", "mean", "layer_norm", "batch_norm"])
def test_a_weight_of_0_fails_no_check(name):
    key = f"{name}, weights of 0"
    op = OPS[key]
    with masksafe.label_checks("checkify"):
        check = jax.jit(checkify.checkify(functools.partial(value_and_gradients, key), checkify.float_checks))
        for value in (np.nan, np.inf):  # the derivative by the weight of a large number may overflow
            args = filled(key, op.where, lambda a: value if a.dtype.kind == "f" else -1)  # noqa: B023
            assert check(op.where, args, cotangents_of(key))[0].get() is None


def _of_targets(features):
    # A masked target, and a token of which all are masked.
    log_probs = np.log(np.float32([[0.5, np.nan], [np.nan, np.nan], [0.5, 0.25]]))
    classes, where = np.int32([[0, 9], [9, 9], [1, 3]]), np.isfinite(log_probs)
    return losses.linear_kl_divergence_with_top_k_targets(features, KERNEL[:, :4], log_probs, classes, where=where)


OPTIONS = {
    "class weights and label_smoothing": lambda x: losses.softmax_cross_entropy_with_integer_labels(
        x, LABELS, where=ROWS[:, None] & (np.arange(3) != 1), label_smoothing=0.1, class_weights=WEIGHTS
    ),
    "z_loss": lambda x: losses.softmax_cross_entropy_with_integer_labels(x, LABELS, where=ROWS[:, None], z_loss=0.1),
    "class_mask and label_smoothing": lambda x: losses.linear_softmax_cross_entropy(
        x, KERNEL, LABELS, where=ROWS, class_mask=jnp.arange(5) < 4, label_smoothing=0.1
    ),
    "class weights and class_mask": lambda x: losses.linear_softmax_cross_entropy(
        x, KERNEL, LABELS, where=ROWS, class_mask=np.arange(5) < 4, label_smoothing=0.1, class_weights=KERNEL[0]
    ),
    "class weights of pixels": lambda x: losses.dice_loss(
        x, np.eye(3), where=ROWS[:, None] & (np.arange(3) != 1), class_weights=WEIGHTS, reduction="none"
    ),
    "masked targets": _of_targets,
    "epsilon": lambda x: losses.poly_loss_cross_entropy(x, np.eye(3), epsilon=WEIGHTS, where=ROWS),
}


@parametrize("options", ["z_loss"], exhaustive=OPTIONS)
def test_options_fail_no_check(options):
    loss = lambda x: masksafe.mean(OPTIONS[options](x))  # noqa: E731
    with masksafe.label_checks("checkify"):
        check = jax.jit(checkify.checkify(jax.value_and_grad(loss), checkify.all_checks))
        assert check(jnp.where(ROWS[:, None], 1.0, jnp.full((3, 3), jnp.nan)))[0].get() is None


def test_segments_of_several_sequences_fail_no_check():
    ids, where = np.array([[0, 7, 7], [1, 1, -1]]), np.array([[True, False, True], [True, True, False]])
    x, weights = np.where(where, np.float32([[[0, 5, 1], [1, 3, 0]], [[1, 1, 2], [2, 4, 1]]]), np.float32(np.nan))
    mean = lambda x: masksafe.MaskedMean.of(x, where, weights=weights, by="segment", segment_ids=ids).value  # noqa: E731
    error, (value, _) = jax.jit(checkify.checkify(jax.value_and_grad(mean), checkify.all_checks))(x)
    assert error.get() is None
    np.testing.assert_allclose(value, (0 + 1 + 14 / 6) / 3, rtol=1e-6)


def test_what_is_not_masked_fails_a_check():
    op = OPS["softmax_cross_entropy_with_integer_labels"]
    args = np.where(op.where & (np.arange(6) == 2)[:, None], np.nan, op.args[0]), op.args[1]
    with masksafe.label_checks("checkify"):
        error, _ = jax.jit(checkify.checkify(op.call, checkify.all_checks))(op.where, *args)
    assert error.get().startswith("nan generated by")
