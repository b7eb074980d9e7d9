"""Values and gradients of every output of a row of logits, one of which lies 10, 20 or 40 above all others.

All gradients are as small as the other probabilities, down to 4e-18. One that is a difference of terms that are not as
small has no digit left, and still passes every test whose tolerance is absolute. The references have 80 digits.
"""

import decimal
import functools
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe import losses

LOGITS = np.float32([[0, -gap, -gap - 0.75, -gap + 0.5] for gap in (10, 20, 40)])
EPS = np.finfo(np.float32).eps
TARGETS, TARGET_LOGITS = np.float32([0.5, 0.25, 0.25, 0]), np.float32([0, -2, -1, -3])
SHARE = 0.125  # of smoothing and of the z-loss
KERNEL = np.eye(4, dtype=np.float32)  # logits are features


def rows(fn, *args, **options):
    return lambda x: fn(x, *(np.broadcast_to(a, (len(x), *np.shape(a))) for a in args), **options)


def second(fn):
    return lambda x: fn(x)[1]


def divergence(direction):
    return lambda x: losses.linear_kl_divergence(
        x, KERNEL, np.broadcast_to(TARGET_LOGITS, x.shape), KERNEL, direction=direction, reduction="none"
    )


# The definitions, of a list of numbers of 80 digits.


def total(*lists):
    """The sum of the products."""
    return sum(functools.reduce(lambda a, b: a * b, terms) for terms in zip(*lists, strict=True))


def lse(x):
    return sum(v.exp() for v in x).ln()


def log_p(x):
    return [v - lse(x) for v in x]


def p(x):
    return [v.exp() for v in log_p(x)]


def kl(log_a, log_b):
    return sum(a.exp() * (a - b) for a, b in zip(log_a, log_b, strict=True))


def jensen_shannon(x):
    both = log_p(map_exact(TARGET_LOGITS)), log_p(x)
    middle = [((a.exp() + b.exp()) / 2).ln() for a, b in zip(*both, strict=True)]
    return sum(kl(log, middle) for log in both) / 2


def map_exact(x):
    return [Decimal(float(v)) for v in x]


def cross_entropy(targets, x):
    return -total(map_exact(targets), log_p(x))


def smoothed(targets):
    return [(1 - SHARE) * t + SHARE / 4 for t in targets]


FIRST, OTHER = np.eye(4)[:2]
integer, of_targets = losses.softmax_cross_entropy_with_integer_labels, losses.softmax_cross_entropy
linear = functools.partial(losses.linear_softmax_cross_entropy, reduction="none")
log_probs = functools.partial(losses.log_probs, with_entropy=True)
linear_log_probs = functools.partial(losses.linear_log_probs, with_entropy=True)
on_kernel = lambda fn, label, **options: lambda x: fn(x, KERNEL, np.full(len(x), label), **options)  # noqa: E731
share = Decimal(SHARE)

# What is computed, and its definition.
OUTPUTS = {
    "cross-entropy": (rows(integer, 1), lambda x: cross_entropy(OTHER, x)),
    "label smoothing": (rows(integer, 0, label_smoothing=SHARE), lambda x: cross_entropy(smoothed(FIRST), x)),
    "z-loss": (rows(integer, 1, z_loss=SHARE), lambda x: cross_entropy(OTHER, x) + share * lse(x) ** 2),
    "soft labels": (rows(of_targets, TARGETS), lambda x: cross_entropy(TARGETS, x)),
    "PolyLoss": (
        rows(losses.poly_loss_cross_entropy, TARGETS),
        lambda x: cross_entropy(TARGETS, x) + 2 * (1 - total(map_exact(TARGETS), p(x))),
    ),
    "entropy": (second(rows(log_probs, 0)), lambda x: -total(p(x), log_p(x))),
    "logsumexp": (functools.partial(masksafe.logsumexp, axis=-1), lse),
    "KL divergence": (
        lambda x: rows(losses.kl_divergence, TARGETS)(masksafe.log_softmax(x)),
        lambda x: total(map_exact(TARGETS[:3]), map_exact(np.log(np.float64(TARGETS[:3])))) + cross_entropy(TARGETS, x),
    ),
    "ranking": (rows(losses.ranking_softmax_loss, TARGETS, reduce_fn=None), lambda x: cross_entropy(TARGETS, x)),
    "linear cross-entropy": (on_kernel(linear, 1), lambda x: cross_entropy(OTHER, x)),
    "linear label smoothing": (
        on_kernel(linear, 0, label_smoothing=SHARE),
        lambda x: cross_entropy(smoothed(FIRST), x),
    ),
    "linear entropy": (second(on_kernel(linear_log_probs, 0)), lambda x: -total(p(x), log_p(x))),
    "linear KL divergence": (divergence("forward"), lambda x: kl(log_p(map_exact(TARGET_LOGITS)), log_p(x))),
}
# Differences of numbers about 1 by what they are: one minus the probability, or a logarithm minus its mean.
DIFFERENCES = {
    "cross-entropy of the first class": (rows(integer, 0), lambda x: cross_entropy(FIRST, x)),
    "PolyLoss of the first class": (
        rows(losses.poly_loss_cross_entropy, np.float32(FIRST)),
        lambda x: cross_entropy(FIRST, x) + 2 * (1 - p(x)[0]),
    ),
    "square of the logsumexp": (losses.router_z_loss, lambda x: lse(x) ** 2),
    "component of the z-loss": (
        second(rows(integer, 0, z_loss=SHARE, with_components=True)),
        lambda x: share * lse(x) ** 2,
    ),
    "linear cross-entropy of the first class": (on_kernel(linear, 0), lambda x: cross_entropy(FIRST, x)),
    "linear reverse KL divergence": (
        divergence("reverse"),
        lambda x: kl(log_p(x), log_p(map_exact(TARGET_LOGITS))),
    ),
    "linear Jensen-Shannon divergence": (divergence("jensen_shannon"), jensen_shannon),
}


@functools.cache
def computed():
    """Values and gradients of all outputs, by one program."""

    def of_all(x):
        grad = lambda fn: jax.grad(lambda x: jnp.sum(fn(x)))(x)  # noqa: E731
        return {name: (fn(x), grad(fn)) for name, (fn, _) in (OUTPUTS | DIFFERENCES).items()}

    return jax.device_get(jax.jit(of_all)(LOGITS))


def exact(definition, x):
    """The value, and the gradient by central differences."""
    step = Decimal(10) ** -25
    moved = lambda i, by: definition([v + by * (i == j) for j, v in enumerate(x)])  # noqa: E731
    return float(definition(x)), [float((moved(i, step) - moved(i, -step)) / (2 * step)) for i in range(len(x))]


@pytest.mark.parametrize("name", OUTPUTS | DIFFERENCES)
def test_gradients_keep_their_digits(name):
    with decimal.localcontext(prec=80):
        expected = [exact((OUTPUTS | DIFFERENCES)[name][1], map_exact(x)) for x in LOGITS]
    values, gradients = (np.array(x) for x in zip(*expected, strict=True))
    smallest = 1 if name in DIFFERENCES else 0

    def assert_close(actual, expected, scale):
        assert (np.abs(actual - expected) <= 8 * EPS * np.maximum(scale, smallest)).all(), (actual, expected)

    assert_close(computed()[name][0], values, np.maximum(1, np.abs(values)))
    assert_close(computed()[name][1], gradients, np.abs(gradients).max(1, keepdims=True))
