"""What type checkers are told of results that depend on a flag. mypy reads this file; run, it shows that it is true."""

from typing import assert_type

import jax
import jax.numpy as jnp
import pytest

import masksafe
from masksafe import losses

HEADS, X, KERNEL, LABELS = jnp.ones((1, 2, 1, 4)), jnp.ones((2, 4)), jnp.ones((4, 3)), jnp.array([0, 2])
Pair = tuple[jax.Array, jax.Array]


@pytest.mark.forms
@pytest.mark.parametrize("flag", [False, True])
def test_a_flag_that_is_only_known_to_be_a_bool(flag: bool) -> None:
    results = (
        assert_type(masksafe.dot_product_attention(HEADS, HEADS, HEADS, return_residual=flag), jax.Array | Pair),
        assert_type(masksafe.logsumexp(X, return_sign=flag), jax.Array | Pair),
        assert_type(losses.log_probs(X, LABELS, with_entropy=flag), jax.Array | Pair),
        assert_type(losses.linear_log_probs(X, KERNEL, LABELS, with_entropy=flag), jax.Array | Pair),
        assert_type(
            losses.linear_softmax_cross_entropy(X, KERNEL, LABELS, with_components=flag),
            jax.Array | Pair,
        ),
    )
    assert [isinstance(result, tuple) for result in results] == [flag] * len(results)


def test_a_flag_that_is_known() -> None:
    assert_type(masksafe.dot_product_attention(HEADS, HEADS, HEADS), jax.Array)
    assert_type(masksafe.dot_product_attention(HEADS, HEADS, HEADS, return_residual=True), Pair)
    assert_type(losses.log_probs(X, LABELS, with_entropy=False), jax.Array)
    assert_type(losses.log_probs(X, LABELS, with_entropy=True), Pair)
