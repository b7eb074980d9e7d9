"""What type checkers are told of results that depend on a flag. mypy reads this file; run, it shows that it is true."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import pytest

import masksafe
from masksafe import MaskedMean, losses, value_and_grad_of_mean

HEADS, X, KERNEL, LABELS = jnp.ones((1, 2, 1, 4)), jnp.ones((2, 4)), jnp.ones((4, 3)), jnp.array([0, 2])
Pair = tuple[jax.Array, jax.Array]


@pytest.mark.parametrize("flag", [True, False])
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


def mean_loss(params: dict[str, jax.Array], x: jax.Array, *, factor: int) -> MaskedMean:
    return MaskedMean.of(params["kernel"] * x * factor)


def with_aux(params: jax.Array, x: jax.Array) -> tuple[MaskedMean, int]:
    return MaskedMean.of(params * x), 1


@pytest.mark.parametrize("has_aux", [True])
def test_arguments_and_results_of_a_mean_are_those_of_the_function(has_aux: bool) -> None:
    x, params = X.astype(float), {"kernel": X}
    assert_type(value_and_grad_of_mean(mean_loss)(params, x, factor=1), tuple[jax.Array, Any])
    step = value_and_grad_of_mean(with_aux, has_aux=True, microbatches=2)
    assert_type(step(x, x), tuple[tuple[jax.Array, int], Any])
    assert_type(value_and_grad_of_mean(with_aux, 0, has_aux)(x, x), tuple[Any, Any])
    assert_type(MaskedMean.sum([MaskedMean.of(x)]).value, jax.Array)
    with pytest.raises(TypeError):
        value_and_grad_of_mean(mean_loss)(params, x, factor="1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
