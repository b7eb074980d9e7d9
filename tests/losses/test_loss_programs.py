"""What the programs of the losses have in common: quiet checks, and one compilation for all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import masksafe
from masksafe import losses

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 5)).astype(np.float32)
SHARES = np.float32(RNG.dirichlet(np.ones(5), size=6))
MASK = (RNG.random((6, 5)) > 0.4) & (np.arange(6) != 2)[:, None]


@pytest.mark.parametrize("switch", [masksafe.forward_mode, functools.partial(masksafe.label_checks, "checkify")])
def test_masked_garbage_stays_hidden_from_float_checks(switch):
    """Which look at all that is computed: under a switch a mask of rows is applied to the logits as well."""
    logits, mask = jnp.ones((3, 4)).at[1].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0])), jnp.arange(3)[:, None] != 1

    def total(x):
        of_labels = losses.softmax_cross_entropy_with_integer_labels(x, jnp.zeros(3, int), where=mask)
        return jnp.sum(of_labels + losses.softmax_cross_entropy(x, jnp.eye(3, 4), where=mask))

    with switch():
        error, _ = jax.jit(checkify.checkify(jax.grad(total), errors=checkify.float_checks))(logits)
    error.throw()


def test_a_loss_is_compiled_once():
    count = 0

    def record(event, duration, **_):
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    calls = [lambda: losses.huber_loss(X, SHARES), lambda: losses.hinge_loss(X, SHARES, where=MASK)]
    calls += [lambda: losses.sigmoid_focal_loss(X, SHARES, alpha=0.5), lambda: losses.smooth_labels(SHARES, 0.1)]
    calls += [lambda: losses.kl_divergence(X, SHARES), lambda: losses.cosine_distance(X, SHARES)]
    for call in calls:
        call()
    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        for call in calls:
            call()
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
    assert count == 0


@pytest.mark.forms
def test_numbers_are_taken_without_jit_too():
    expected = losses.smooth_labels(SHARES, 0.1)
    with jax.disable_jit():
        np.testing.assert_allclose(losses.smooth_labels(SHARES, 0.1), expected, rtol=1e-6)
