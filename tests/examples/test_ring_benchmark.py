"""The benchmark of ring attention: its candidates compute the same."""

import numpy as np
import pytest
import ring_attention

SHAPE = ring_attention.SIZES["tiny"]


@pytest.mark.slow
def test_candidates_agree():
    for mask in ("none", "causal, zigzag"):
        work = ring_attention.prepare(mask, SHAPE)
        found = [np.asarray(fn(*work.args)) for fn in work.functions.values()]
        np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)
