"""Rows in blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import few_of

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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", few_of(OPS, "softmax", "layer_norm", "integer labels", "cosine_similarity"))
def test_many_rows_of_no_elements(name, masked, choose):
    choose(row_block_elements=1, most_elements_in_one_pass=2)
    x = jnp.zeros((ROWS, 0))
    out, pull_back = jax.vjp(lambda x: OPS[name](x, jnp.ones(x.shape, bool) if masked else None), x)
    assert pull_back(out)[0].shape == x.shape
    np.testing.assert_array_equal(out, np.zeros(out.shape))
