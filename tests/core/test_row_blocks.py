"""Rows in blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe import losses

ROWS = 8
LABELS = np.zeros(ROWS, int)

OPS = {
    "var": lambda x, where: masksafe.var(x, axis=-1, where=where),
    "standardize": lambda x, where: masksafe.standardize(x, where=where),
    "l2_normalize": lambda x, where: masksafe.l2_normalize(x, where=where),
    "layer_norm": lambda x, where: masksafe.layer_norm(x, where=where),
    "rms_norm": lambda x, where: masksafe.rms_norm(x, where=where),
    "soft labels": lambda x, where: losses.softmax_cross_entropy(x, x, where=where),
    "integer labels": lambda x, where: losses.softmax_cross_entropy_with_integer_labels(x, LABELS, where=LABELS > 0),
    "kl_divergence": lambda x, where: losses.kl_divergence(x, x, where=where),
    "convex_kl_divergence": lambda x, where: losses.convex_kl_divergence(x, x, where=where),
    "cosine_similarity": lambda x, where: losses.cosine_similarity(x, x, where=where),
}


@pytest.mark.parametrize("name", OPS)
def test_many_rows_of_no_elements(name, choose):
    choose(row_block_elements=1, most_elements_in_one_pass=2)
    x = jnp.zeros((ROWS, 0))
    for where in (None, jnp.ones(x.shape, bool)):
        out, pull_back = jax.vjp(lambda x: OPS[name](x, where), x)  # noqa: B023
        assert pull_back(out)[0].shape == x.shape
        np.testing.assert_array_equal(out, np.zeros(out.shape))
