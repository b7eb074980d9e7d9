"""Losses of real-valued predictions: what the comparison with optax does not cover."""

import jax
import numpy as np
import pytest

import masksafe
from masksafe.losses import cosine_distance, cosine_similarity, huber_loss, l2_loss, log_cosh, squared_error


@pytest.mark.parametrize("loss", [cosine_similarity, cosine_distance])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_a_vector_of_zeros_has_a_finite_gradient(loss, epsilon):
    @jax.jit
    def all_of(a, b):
        of = lambda a, b: loss(a, b, epsilon=epsilon).sum()  # noqa: E731
        return of(a, b), jax.grad(of, (0, 1))(a, b), jax.jvp(jax.grad(of), (a, b), (b, b))[1]

    value, gradients, product = all_of(np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32))
    assert value == (1 if loss is cosine_distance else 0)
    assert all(np.isfinite(x).all() for x in (*gradients, product))


def test_the_distance_of_nothing_is_zero():
    x = np.full((2, 3), np.nan, np.float32)
    np.testing.assert_array_equal(jax.jit(cosine_distance)(x, x, where=np.zeros((2, 1), bool)), 0)


@pytest.mark.parametrize("loss", [squared_error, l2_loss])
def test_shapes_that_differ_are_refused(loss):
    with pytest.raises(ValueError, match=f"{loss.__name__}: targets: got shape"):
        loss(np.zeros((3, 1)), np.zeros(3))


def test_delta_may_be_an_array():
    errors, delta = np.array([[0.5, 2.0], [3.0, 0.1]]), np.array([[1.0], [2.0]])
    expected = np.where(abs(errors) <= delta, errors**2 / 2, delta * (abs(errors) - delta / 2))
    np.testing.assert_allclose(huber_loss(errors, delta=delta), expected, rtol=1e-6)


@pytest.mark.parametrize("delta", [0, -1.0, float("nan"), float("inf")])
def test_a_delta_out_of_range_is_refused(delta):
    with pytest.raises(ValueError, match=r"^huber_loss: delta: got value .*; expected a number above 0 and finite"):
        huber_loss(np.ones(2, np.float32), delta=delta)


def test_an_array_of_deltas_is_reported_while_label_checks_are_on():
    errors, delta, mask = np.ones(3, np.float32), np.array([1.0, 0.0, np.nan]), np.array([True, True, False])
    with (
        masksafe.label_checks("raise"),
        pytest.raises(ValueError, match=r"huber_loss: 1 of 2 delta are not above 0 and finite; first at \(1,\): 0.0"),
    ):
        huber_loss(errors, delta=delta, where=mask)
    huber_loss(errors, delta=delta, where=mask)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="huber_loss: predictions: got dtype int32"):
        huber_loss(np.array([1, 2], np.int32))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log_cosh_keeps_its_digits(dtype):
    error = np.array([0, 1e-6, 1e-4, 1e-3, 0.1, 1, 3, 19, 20, 21, 80, 1e4])
    error = np.concatenate([error, -error]).astype(dtype)
    size = np.abs(error.astype(np.longdouble))
    expected = np.where(
        size < 1, np.log1p(2 * np.sinh(np.minimum(size, 1) / 2) ** 2), size + np.log1p(np.expm1(-2 * size) / 2)
    )
    with jax.enable_x64(dtype == np.float64):
        derivatives = log_cosh, jax.grad(log_cosh), jax.grad(jax.grad(log_cosh))
        loss, first, second = jax.jit(lambda e: [jax.vmap(fn)(e) for fn in derivatives])(error)
    rtol = 16 * np.finfo(dtype).eps
    np.testing.assert_allclose(loss, expected.astype(float), rtol=rtol)
    np.testing.assert_allclose(first, np.tanh(error.astype(float)), rtol=rtol)
    np.testing.assert_allclose(second, 1 / np.cosh(np.minimum(size.astype(float), 300)) ** 2, rtol=1e-4, atol=rtol)


@pytest.mark.parametrize("where", [None, np.array([[True] * 4, [True, True, False, True]])], ids=["unmasked", "masked"])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e19, 1e30])
def test_cosines_of_vectors_of_any_scale(scale, where):
    a, b = np.random.default_rng(0).normal(size=(2, 2, 4))
    x, y = (a * scale).astype(np.float32), (b / scale).astype(np.float32)
    slope = jax.grad(lambda x, y: cosine_similarity(x, y, where=where).sum(), (0, 1))
    cosine, distance, slopes, with_epsilon = jax.jit(
        lambda x, y: (
            *(fn(x, y, where=where) for fn in (cosine_similarity, cosine_distance)),
            slope(x, y),
            cosine_similarity(x, y, where=where, epsilon=1e-6),
        )
    )(x, y)
    a, b = (np.where(True if where is None else where, v, 0) for v in (a, b))
    norm_a, norm_b = (np.linalg.norm(v, axis=-1, keepdims=True) for v in (a, b))
    expected = (a / norm_a * b / norm_b).sum(-1)
    np.testing.assert_allclose(cosine, expected, rtol=1e-5)
    np.testing.assert_allclose(distance, 1 - expected, rtol=1e-5)
    of_a = (b / norm_b - a / norm_a * expected[:, None]) / norm_a
    np.testing.assert_allclose(slopes[0] * np.float32(scale), of_a, rtol=1e-4, atol=1e-6)
    factors = (np.minimum(norm * s / 1e-3, 1)[:, 0] for norm, s in ((norm_a, scale), (norm_b, 1 / scale)))
    np.testing.assert_allclose(with_epsilon, expected * np.prod(list(factors), 0), rtol=1e-5)


@pytest.mark.parametrize("epsilon", [1e-6, 1e-2, 1.0, 30.0])
@pytest.mark.parametrize("size", [3, 768])
def test_gradient_of_the_cosine_of_a_vector_of_zeros_is_limited_by_epsilon(epsilon, size):
    zeros, b = np.zeros((1, size), np.float32), np.random.default_rng(0).normal(size=(1, size)).astype(np.float32)
    cosine = lambda a: cosine_similarity(a, b, epsilon=epsilon).sum()  # noqa: E731
    expected = b / np.sqrt(max(np.square(b).sum(), epsilon)) / np.sqrt(epsilon)
    np.testing.assert_allclose(jax.grad(cosine)(zeros), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.jvp(cosine, (zeros,), (zeros + 1,))[1], expected.sum(), rtol=1e-3)
