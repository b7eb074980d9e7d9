"""What the programs of the losses have in common: quiet checks, and one compilation for all."""

import jax
import numpy as np

from masksafe import losses

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 5)).astype(np.float32)
SHARES = np.float32(RNG.dirichlet(np.ones(5), size=6))
MASK = (RNG.random((6, 5)) > 0.4) & (np.arange(6) != 2)[:, None]


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
