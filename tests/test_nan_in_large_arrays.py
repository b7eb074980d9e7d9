"""An unmasked NaN shows in arrays of 4,096 elements and more, which XLA's CPU compiler may hand to a library.

The maxima of that library lose a NaN, and smaller arrays, as most tests have, do not reach it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe import losses

ROWS, CLASSES = 128, 64
X = np.random.default_rng(0).normal(size=(ROWS, CLASSES)).astype(np.float32)
LABELS, SOFT = np.zeros(ROWS, np.int32), np.full((ROWS, CLASSES), 1 / CLASSES, np.float32)
OPS = {
    "max": lambda x: masksafe.max(x, 1),
    "min": lambda x: masksafe.min(x, 1),
    "logsumexp": lambda x: masksafe.logsumexp(x, 1),
    "softmax": masksafe.softmax,
    "log_softmax": masksafe.log_softmax,
    "layer_norm": masksafe.layer_norm,
    "var": lambda x: masksafe.var(x, 1),
    "softmax_cross_entropy": lambda x: losses.softmax_cross_entropy(x, SOFT),
    "integer labels": lambda x: losses.softmax_cross_entropy_with_integer_labels(x, LABELS),
    "log_probs": lambda x: losses.log_probs(x, LABELS),
    "multiclass_hinge_loss": lambda x: losses.multiclass_hinge_loss(x, LABELS),
    "multiclass_sparsemax_loss": lambda x: losses.multiclass_sparsemax_loss(x, LABELS),
    "kl_divergence": lambda x: losses.kl_divergence(x, SOFT),
    "linear": lambda x: losses.linear_softmax_cross_entropy(x, jnp.ones((CLASSES, 96)), LABELS, reduction="none"),
}


@pytest.mark.parametrize("name", OPS)
def test_a_nan_shows_in_its_row(name):
    x = X.copy()
    x[5, 7] = np.nan

    @jax.jit
    def run(x):
        out, reverse = jax.vjp(OPS[name], x)
        return out, reverse(jnp.ones_like(out))[0]

    out, d_x = (np.isnan(result).reshape(ROWS, -1).any(1) for result in run(x))
    is_bad = np.arange(ROWS) == 5
    assert (out == is_bad).all()
    assert not d_x[~is_bad].any()
