"""Rule 8. 16 bits are accumulated in float32 and rounded once; float64 stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program import PLANS, each_op, of_definition
from table import OPS
from tiers import parametrize

import masksafe
from masksafe._core import platforms

pytestmark = pytest.mark.optimised

ROUNDINGS = 0.51  # of the result; what is computed in float32 adds next to nothing


def as_dtype(args, dtype):
    return tuple(a.astype(jnp.dtype(dtype)) if a.dtype.kind == "f" else a for a in args)


# These return float32 by design: losses and log-probabilities of labels, and statistics.
WIDE = {name for name in dir(masksafe.losses) if name.startswith(("linear_", "multiclass_", "ctc_"))}
WIDE |= {"log_probs", "load_balancing_loss", "info_nce_loss", "sigmoid_contrastive_loss", "MaskedMean"}
WIDE -= {"multiclass_generalized_dice_loss"}
WIDE_OUTPUTS = {"batch_norm": (1, 2), "dot_product_attention": (1,)}


@each_op()
@parametrize("dtype", ["bfloat16"], exhaustive=["float16"])
def test_16_bits_are_rounded_once(key, dtype):
    op = OPS[key]
    args, eps = as_dtype(op.args, dtype), float(jnp.finfo(dtype).eps)
    with platforms.chosen(**PLANS["blocks"]):
        outputs = jax.tree.leaves(jax.jit(op.call)(op.where, *args))
    for k, (actual, expected) in enumerate(zip(outputs, of_definition(key, args=args), strict=True)):
        is_wide = op.name in WIDE or k in WIDE_OUTPUTS.get(op.name, ())
        assert actual.dtype == ("float32" if is_wide else dtype)
        np.testing.assert_allclose(np.float64(actual), expected, rtol=ROUNDINGS * eps, atol=1e-6)


@each_op()
@pytest.mark.exhaustive
def test_float64_stays(key):
    op = OPS[key]
    with jax.enable_x64(True), platforms.chosen(**PLANS["blocks"]):
        outputs = jax.tree.leaves(jax.jit(op.call)(op.where, *as_dtype(op.args, "float64")))
    for actual, expected in zip(outputs, of_definition(key), strict=True):
        assert actual.dtype == "float64"
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)
