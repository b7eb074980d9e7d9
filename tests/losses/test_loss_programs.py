"""The losses that a CPU computes in blocks of rows: the same results in blocks and in one pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import masksafe
from masksafe import losses
from masksafe._core import platforms

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 5)).astype(np.float32)
SHARES = np.float32(RNG.dirichlet(np.ones(5), size=6))
LABELS = np.array([0, 1, 2, 3, 4, 0])
MASKS = {
    "rows": np.array([True, False, True, True, False, True])[:, None],
    "elements": (RNG.random((6, 5)) > 0.4) & (np.arange(6) != 2)[:, None],
}
ARGUMENTS = {
    losses.kl_divergence: (X, SHARES),
    losses.generalized_kl_divergence: (X, SHARES),
    losses.kl_divergence_with_log_targets: (X, np.log(SHARES)),
    losses.multiclass_hinge_loss: (X, LABELS),
    losses.multiclass_perceptron_loss: (X, LABELS),
    losses.multiclass_sparsemax_loss: (X, LABELS),
    losses.poly_loss_cross_entropy: (X, SHARES),
    losses.cosine_similarity: (X, SHARES),
}


def results(loss, mask):
    """Value, gradients and a Hessian's product with a vector, with garbage under the mask."""
    arrays = [a if a.dtype.kind == "i" else jnp.where(mask, a, jnp.nan) for a in ARGUMENTS[loss]]
    floats, others = arrays[: 2 - (arrays[1].dtype.kind == "i")], arrays[2 - (arrays[1].dtype.kind == "i") :]

    @jax.jit
    def run(*floats):
        total = lambda *floats: jnp.sum(jnp.sin(of_rows(*floats).astype(jnp.float32)))  # noqa: E731
        of_rows = lambda *floats: loss(*floats, *others, where=mask)  # noqa: E731
        gradient = jax.grad(total, argnums=tuple(range(len(floats))))
        ones = tuple(jnp.ones_like(x) for x in floats)
        return of_rows(*floats), gradient(*floats), jax.jvp(gradient, floats, ones)[1]

    return run(*floats)


@pytest.mark.parametrize("loss", ARGUMENTS, ids=lambda loss: loss.__name__)
def test_blocks_of_rows_change_nothing(loss):
    for mask in MASKS.values():
        expected = results(loss, mask)
        with platforms.chosen(row_block_elements=10):
            actual = results(loss, mask)
        with platforms.chosen(form="elsewhere"):
            elsewhere = results(loss, mask)
        for other in (actual, elsewhere):
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), other, expected)
        for gradient in jax.tree.leaves(expected[1:]):
            np.testing.assert_array_equal(np.where(mask, 0, gradient), 0)


SPECIAL = np.array(
    [[0, 1, -np.inf], [np.inf, 0, 1], [np.nan, 0, 1], [2, 2, 2], [-np.inf, -np.inf, -np.inf], [40, 0, 1]]
)
SPECIAL = np.float32(np.repeat(SPECIAL, 3, axis=0))
SHARES_OF_SPECIAL = np.float32(np.tile([[1, 0, 0], [0, 0.5, 0.5], [0.2, 0.3, 0.5]], (6, 1)))
LABELS_OF_SPECIAL = np.tile([0, 1, 2], 6)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (losses.softmax_cross_entropy, SHARES_OF_SPECIAL),
        (losses.softmax_cross_entropy_with_integer_labels, LABELS_OF_SPECIAL),
        (losses.poly_loss_cross_entropy, SHARES_OF_SPECIAL),
        (losses.ranking_softmax_loss, SHARES_OF_SPECIAL),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_arithmetic_gives_what_selections_give(loss, targets):
    of_rows = functools.partial(loss, reduce_fn=None) if loss is losses.ranking_softmax_loss else loss
    expected = of_rows(SPECIAL, targets)
    with platforms.chosen(elements_of_row_in_cache=range(1, 2**15), counts_more_as_arithmetic=True):
        np.testing.assert_allclose(of_rows(SPECIAL, targets), expected, rtol=1e-6)


def test_a_rounded_input_is_computed_in_float32_in_blocks(choose):
    choose(row_block_elements=10)
    for loss, arrays in ARGUMENTS.items():
        narrow = [a if a.dtype.kind == "i" else jnp.asarray(a, jnp.bfloat16) for a in arrays]
        wide = [a if a.dtype.kind == "i" else jnp.asarray(a, jnp.float32) for a in narrow]
        actual = jax.jit(loss)(*narrow)
        np.testing.assert_array_equal(actual, jax.jit(loss)(*wide).astype(actual.dtype))


def test_poly_loss_keeps_the_digits_of_a_certain_row():
    logits, labels = jnp.array([[30.0, 0.0, -1.0]]), jnp.array([[1.0, 0.0, 0.0]])
    exact = np.log1p(np.exp(-30.0) + np.exp(-31.0))
    value, gradient = jax.jit(jax.value_and_grad(lambda x: losses.poly_loss_cross_entropy(x, labels).sum()))(logits)
    np.testing.assert_allclose(value, exact - 2 * np.expm1(-exact), rtol=1e-6)
    np.testing.assert_allclose(gradient[0, 0], 3 * np.expm1(-exact), rtol=1e-6)


def test_the_weight_of_poly_loss_has_a_gradient_and_broadcasts():
    loss = lambda epsilon: losses.poly_loss_cross_entropy(X, SHARES, epsilon=epsilon)  # noqa: E731
    missing = jnp.sum(SHARES * (1 - jax.nn.softmax(X)), -1)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda e: loss(e).sum()))(2.0), missing.sum(), rtol=1e-5)
    np.testing.assert_allclose(loss(2), loss(jnp.full(6, 2.0)), rtol=1e-6)
    several = loss(jnp.array([[1.0], [2.0]]))
    np.testing.assert_allclose(several, jnp.stack([loss(1.0), loss(2.0)]), rtol=1e-5)


def test_cosine_of_vectors_of_zeros_and_of_tiny_vectors():
    similarity = jax.jit(jax.value_and_grad(lambda a, b: losses.cosine_similarity(a, b).sum(), (0, 1)))
    zero, unit = jnp.zeros(3), jnp.array([1.0, 0.0, 0.0])
    for a, b in ((zero, unit), (unit, zero), (zero, zero)):
        value, gradients = similarity(a, b)
        assert value == 0
        np.testing.assert_array_equal(gradients, 0)
    value, _ = similarity(1e-15 * unit, 1e15 * unit)
    np.testing.assert_allclose(value, 1, rtol=1e-6)


def test_a_nan_is_seen_by_the_cosine_of_its_row_only():
    a = X.copy()
    a[1, 2] = np.nan
    similarity = jax.jit(losses.cosine_similarity)(a, SHARES)
    np.testing.assert_array_equal(np.isnan(similarity), np.arange(6) == 1)


def test_a_log_target_too_small_for_a_float_costs_nothing():
    log_p, log_t = jnp.array([0.0, -jnp.inf]), jnp.array([0.0, -200.0])
    assert jax.jit(losses.kl_divergence_with_log_targets)(log_p, log_t) == 0


def test_masked_nan_stays_hidden_from_debug_nans():
    mask = MASKS["elements"]
    with jax.debug_nans(True):
        for loss in (losses.squared_error, losses.log_cosh, losses.sigmoid_binary_cross_entropy):
            x = np.where(mask, X, np.nan)
            assert np.isfinite(loss(x, SHARES, where=mask)).all()
        with pytest.raises(FloatingPointError):
            losses.squared_error(np.where(mask, X, np.nan), SHARES)


def test_masked_garbage_stays_hidden_from_float_checks():
    logits, mask = jnp.ones((3, 4)).at[1].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0])), jnp.arange(3)[:, None] != 1
    for loss, targets in [
        (losses.softmax_cross_entropy_with_integer_labels, jnp.zeros(3, int)),
        (losses.softmax_cross_entropy, jnp.eye(3, 4)),
    ]:
        step = jax.jit(jax.grad(lambda x, t, loss=loss: loss(x, t, where=mask).sum()))
        error, _ = checkify.checkify(step, errors=checkify.float_checks)(logits, targets)
        error.throw()


def test_an_elementwise_loss_is_compiled_once():
    count = 0

    def record(event, duration, **_):
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    calls = [lambda: losses.huber_loss(X, SHARES), lambda: losses.hinge_loss(X, SHARES, where=MASKS["elements"])]
    calls += [lambda: losses.sigmoid_focal_loss(X, SHARES, alpha=0.5), lambda: losses.smooth_labels(SHARES, 0.1)]
    calls += [lambda: masksafe.losses.kl_divergence(X, SHARES), lambda: losses.cosine_distance(X, SHARES)]
    for call in calls:
        call()
    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        for call in calls:
            call()
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
    assert count == 0
