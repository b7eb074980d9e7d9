"""Rule 8. 16 bits are accumulated in float32 and rounded once; float64 stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program import PLANS, each_kind, each_op, of_definition
from table import OPS

import masksafe
from masksafe._core import platforms

pytestmark = pytest.mark.optimised

ROUNDINGS = 0.51  # of the result; what is computed in float32 adds next to nothing


def as_dtype(args, dtype):
    return tuple(a.astype(jnp.dtype(dtype)) if a.dtype.kind == "f" else a for a in args)


# These return float32 by design: losses and log-probabilities of labels, and statistics.
WIDE = {name for name in dir(masksafe.losses) if name.startswith(("linear_", "multiclass_", "ctc_"))}
WIDE |= {"log_probs", "load_balancing_loss", "info_nce_loss", "sigmoid_contrastive_loss", "MaskedMean"}
WIDE |= {"dot_product_attention, largest logit"}
WIDE -= {"multiclass_generalized_dice_loss"}
WIDE_OUTPUTS = {"batch_norm": (1, 2), "dot_product_attention": (1,)}


@each_op()
def test_bfloat16_is_rounded_once(key):
    assert_is_rounded_once(key, "bfloat16")


@pytest.mark.exhaustive
@each_kind()
def test_float16_is_rounded_once(key):
    assert_is_rounded_once(key, "float16")


def assert_is_rounded_once(key, dtype):
    op = OPS[key]
    args, eps = as_dtype(op.args, dtype), float(jnp.finfo(dtype).eps)
    with platforms.chosen(**PLANS["blocks"]):
        outputs = jax.tree.leaves(jax.jit(op.call)(op.where, *args))
    for k, (actual, expected) in enumerate(zip(outputs, of_definition(key, args=args), strict=True)):
        is_wide = not WIDE.isdisjoint({key, op.name}) or k in WIDE_OUTPUTS.get(op.name, ())
        assert actual.dtype == ("float32" if is_wide else dtype)
        np.testing.assert_allclose(np.float64(actual), expected, rtol=ROUNDINGS * eps, atol=1e-6)


@pytest.mark.exhaustive
@each_op()
def test_float64_stays_in_every_step(key):
    op = OPS[key]
    with jax.enable_x64(True), platforms.chosen(**PLANS["blocks"]):
        jaxpr, outputs = jax.make_jaxpr(op.call, return_shape=True)(op.where, *as_dtype(op.args, "float64"))
    assert {out.dtype.name for out in jax.tree.leaves(outputs)} == {"float64"}
    # The table has class weights in float32.
    assert "f32[" not in str(jaxpr) or key.startswith("linear_softmax_cross_entropy, ")


@pytest.mark.exhaustive
@each_kind()
def test_float64_has_its_digits(key):
    op = OPS[key]
    with jax.enable_x64(True), platforms.chosen(**PLANS["blocks"]):
        outputs = jax.tree.leaves(jax.jit(op.call)(op.where, *as_dtype(op.args, "float64")))
    for actual, expected in zip(outputs, of_definition(key), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)
