"""The benchmark of ring attention: what it says that a device receives and holds."""

import numpy as np
import pytest
import ring_attention
from measure import VALUE

SHAPE = ring_attention.SIZES["tiny"]
PART = np.prod(SHAPE) * 4 / ring_attention.DEVICES / 2**20  # MiB of the keys of a device


@pytest.mark.parametrize("candidate", ring_attention.CANDIDATES)
def test_each_device_receives_the_keys_and_values_of_all_others(candidate):
    received, _ = ring_attention.compiled("none", SHAPE, candidate, VALUE)
    np.testing.assert_allclose(received, 2 * (ring_attention.DEVICES - 1) * PART)


@pytest.mark.slow
def test_candidates_agree():
    for mask in ("none", "causal, zigzag"):
        work = ring_attention.prepare(mask, SHAPE)
        found = [np.asarray(fn(*work.args)) for fn in work.functions.values()]
        np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)
