"""Losses of real-valued predictions: digits, vectors of zeros, and an array of deltas."""

import functools

import definitions
import jax
import numpy as np
import optax
import pytest
from tiers import parametrize

from masksafe._core import platforms
from masksafe.losses import cosine_distance, cosine_similarity, huber_loss, log_cosh, triplet_margin_loss


@parametrize("shape", [(1, 3)], exhaustive=[(3,)])
@parametrize("loss", [cosine_similarity], exhaustive=[cosine_distance])
@parametrize("epsilon", [0.0], exhaustive=[1e-3])
def test_a_vector_of_zeros_is_like_nothing_and_has_finite_derivatives(shape, loss, epsilon):
    @jax.jit
    def all_of(a, b):
        of = lambda a, b: loss(a, b, epsilon=epsilon).sum()  # noqa: E731
        return of(a, b), jax.grad(of, (0, 1))(a, b), jax.jvp(jax.grad(of), (a, b), (b, b))[1]

    zeros, ones = np.zeros(shape, np.float32), np.ones(shape, np.float32)
    for vectors in ((zeros, ones), (ones, zeros), (zeros, zeros)):
        value, gradients, product = all_of(*vectors)
        assert value == (1 if loss is cosine_distance else 0)
        assert np.isfinite(product).all()
        for gradient in gradients:
            assert np.isfinite(gradient).all() if epsilon else not gradient.any()
    value, *_ = all_of(1e-15 * ones, 1e15 * ones)  # vectors that are tiny are vectors
    if not epsilon:
        np.testing.assert_allclose(value, 0 if loss is cosine_distance else 1, rtol=1e-6, atol=1e-6)


@functools.partial(jax.jit, static_argnums=3)
def cosines(x, y, where, epsilon):
    cosine = lambda x, y: cosine_similarity(x, y, where=where).sum()  # noqa: E731
    each = (fn(x, y, where=where) for fn in (cosine_similarity, cosine_distance))
    return *each, jax.grad(cosine)(x, y), cosine_similarity(x, y, where=where, epsilon=epsilon)


@parametrize("scale", [1e-15], exhaustive=[1.0, 1e15])
def test_cosines_of_vectors_of_several_scales(scale):
    for mask in (np.ones((2, 4), bool), np.array([[True] * 4, [True, True, False, True]])):
        a, b = np.random.default_rng(0).normal(size=(2, 2, 4))
        x, y = (a * scale).astype(np.float32), (b / scale).astype(np.float32)
        cosine, distance, slope, with_epsilon = cosines(x, y, mask, 1e-6)
        a, b = (np.where(mask, v, 0) for v in (a, b))
        norm_a, norm_b = (np.linalg.norm(v, axis=-1, keepdims=True) for v in (a, b))
        expected = (a / norm_a * b / norm_b).sum(-1)
        np.testing.assert_allclose(cosine, expected, rtol=1e-5)
        np.testing.assert_allclose(distance, 1 - expected, rtol=1e-5)
        of_a = (b / norm_b - a / norm_a * expected[:, None]) / norm_a
        np.testing.assert_allclose(slope * np.float32(scale), of_a, rtol=1e-4, atol=1e-6)
        factors = (np.minimum(norm * s / 1e-3, 1)[:, 0] for norm, s in ((norm_a, scale), (norm_b, 1 / scale)))
        np.testing.assert_allclose(with_epsilon, expected * np.prod(list(factors), 0), rtol=1e-5)


@parametrize("epsilon", [1e-2], exhaustive=[1e-6, 30.0])
@parametrize("size", [3], exhaustive=[768])
def test_gradient_of_the_cosine_of_a_vector_of_zeros_is_limited_by_epsilon(epsilon, size):
    zeros, b = np.zeros((1, size), np.float32), np.random.default_rng(0).normal(size=(1, size)).astype(np.float32)
    cosine = lambda a: cosine_similarity(a, b, epsilon=epsilon).sum()  # noqa: E731
    expected = b / np.sqrt(max(np.square(b).sum(), epsilon)) / np.sqrt(epsilon)
    gradient, slope = jax.jit(lambda a: (jax.grad(cosine)(a), jax.jvp(cosine, (a,), (a + 1,))[1]))(zeros)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    np.testing.assert_allclose(slope, expected.sum(), rtol=1e-3)


def test_delta_may_be_an_array():
    errors, delta = np.array([[0.5, 2.0], [3.0, 0.1]]), np.array([[1.0], [2.0]])
    np.testing.assert_allclose(huber_loss(errors, delta=delta), [[0.125, 1.5], [4.0, 0.005]], rtol=1e-6)


@parametrize(
    ("ours", "peer", "exact"),
    [(log_cosh, optax.log_cosh, lambda x, y: np.logaddexp(x - y, y - x) - np.log(2))],
    exhaustive=[
        (huber_loss, optax.huber_loss, definitions.huber),
        (cosine_similarity, optax.cosine_similarity, lambda *sides: [*map(definitions.cosine, *sides)]),
    ],
)
def test_the_error_is_that_of_the_peer(ours, peer, exact):
    x, y = np.random.default_rng(0).normal(size=(2, 64, 16), scale=3).astype(np.float32)
    desired = exact(*map(np.float64, (x, y)))
    of_ours, of_peer = (np.abs(np.asarray(z) - desired).max() for z in jax.jit(lambda *a: (ours(*a), peer(*a)))(x, y))
    assert of_ours <= max(2 * of_peer, 4 * np.finfo(np.float32).eps * max(1, np.abs(desired).max()))


def test_derivatives_of_log_cosh():
    error = np.array([0, 1e-6, 1e-3, 0.1, 1, 3, 20, 80, 1e4], np.float32)
    error = np.concatenate([error, -error])
    derivatives = jax.grad(log_cosh), jax.grad(jax.grad(log_cosh))
    first, second = jax.jit(lambda e: [jax.vmap(fn)(e) for fn in derivatives])(error)
    np.testing.assert_allclose(first, np.tanh(error), atol=1e-6)
    np.testing.assert_allclose(second, 1 / np.cosh(np.clip(error, -40, 40)) ** 2, atol=1e-6)


@pytest.mark.optimised
@pytest.mark.skipif(not platforms.choices().has_fusion_library, reason="elsewhere rows are taken in blocks")
@parametrize("loss, number", [(cosine_similarity, 2)], exhaustive=[(triplet_margin_loss, 3)])
def test_no_16_bit_array_is_widened_in_memory(loss, number):
    vectors = [jax.ShapeDtypeStruct((1024, 1024), "bfloat16")] * number
    gradient = jax.value_and_grad(lambda *vectors: loss(*vectors).sum())
    for fn in (loss, gradient):
        program = jax.jit(fn).lower(*vectors).compile()
        assert program.memory_analysis().temp_size_in_bytes < 2**20  # an array in float32 has 2**22
