"""What docs/migrating.md says to write: the values and gradients of the formula that it replaces, safe under masks.

The code is that of the page.
"""

import functools
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from comparisons import assert_close, with_gradients
from tiers import parametrize

import masksafe
from masksafe.testing import assert_mask_safe

PAGE = (Path(__file__).parents[1] / "docs/migrating.md").read_text("utf8")
RNG = np.random.default_rng(0)
MASK = np.array([[1, 1, 0, 1, 0], [0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], bool)
V, N, S, T, Z = 7, 4, 0.1, 0.7, 0.3
IDS = np.array([0, 2, 2, 0, 2])  # segments 1 and 3 are empty


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def per_token(*shape):
    return floats(*MASK.shape, *shape)


CLASS_WEIGHTS = RNG.uniform(0.5, 2, V).astype(np.float32)
TOKENS = np.where(MASK, RNG.integers(0, V, MASK.shape), 0)
LOGITS, FEATURES, KERNEL = per_token(V), per_token(3), floats(3, V)


# The formulas, as the other libraries have them.


def t5x_cross_entropy(logits, targets, z=0.0):
    log_z = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
    loss = -jnp.sum(targets * (logits - log_z), axis=-1) + z * jnp.square(log_z[..., 0])
    return loss * MASK


def with_z_loss(logits, labels, z=Z):
    return t5x_cross_entropy(logits, jax.nn.one_hot(labels, V), z)


def flax_smoothed(logits, labels):
    return t5x_cross_entropy(logits, jnp.where(jax.nn.one_hot(labels, V) == 1, 1 - S, S / (V - 1)))


def padded_cross_entropy(logits, labels):
    return with_z_loss(jnp.where(jnp.arange(V) < N, logits, -1e9), labels, 0)


def selective_log_softmax(logits, tokens):
    return jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0] - jax.nn.logsumexp(logits, -1)


def masked_mean(x, mask):
    return jnp.sum(x * mask) / jnp.sum(mask)


def masked_whiten(x, mask):
    mean = masked_mean(x, mask)
    number = jnp.sum(mask)
    variance = masked_mean((x - mean) ** 2, mask) * number / (number - 1)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-8) * mask


def mean_of_sequences(loss):
    tokens = jnp.sum(MASK, -1)
    return jnp.sum(jnp.sum(loss * MASK, -1) / jnp.maximum(tokens, 1)) / jnp.sum(tokens > 0)


def mean_of_packed_sequences(loss, ids):
    is_of = (ids[:, None] == np.arange(1, 3)[:, None]) & MASK[:, None]  # 0 is padding
    tokens = jnp.sum(is_of, -1)
    return jnp.sum(jnp.sum(loss[:, None] * is_of, -1) / jnp.maximum(tokens, 1)) / jnp.sum(tokens > 0)


def weighted_like_torch(logits, labels):
    costs = -jax.nn.log_softmax(logits) * CLASS_WEIGHTS
    of_label = jnp.take_along_axis(costs, labels[..., None], -1)[..., 0]
    losses = (1 - S) * of_label + S * jnp.mean(costs, -1)
    return jnp.sum(losses * MASK) / jnp.sum(jnp.asarray(CLASS_WEIGHTS)[labels] * MASK)


def entropy(logits):
    log_p = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_p) * log_p, -1)


def policy_gradient_loss(logits, a, adv, w):
    return jnp.mean(-selective_log_softmax(logits, a) * jax.lax.stop_gradient(adv) * w)


def segment_max_or_constant(x):
    number = jax.ops.segment_sum(jnp.ones(x.shape, int), IDS, N)
    return jnp.where(number > 0, jax.ops.segment_max(x, IDS, N), jnp.zeros((), x.dtype))


# Attention, of samples that have a key each.

KEYS = MASK[:3, None, None]
Q, K, V_ = (floats(3, 5, 2, 4) for _ in range(3))
PAIR_BIAS = floats(2, 5, 5)


def weights_of(q, k, bias=0, scale=0.5):
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale + bias
    return jax.nn.softmax(jnp.where(KEYS, logits, -1e9))


def attention(q, k, v, bias=0, scale=0.5):
    return jnp.einsum("bhqk,bkhd->bqhd", weights_of(q, k, bias, scale), v)


def balancing_loss_of_flaxformer(p, i):
    """The mean over the groups that have a token."""
    number, tokens = p.shape[-1], jnp.maximum(MASK.sum(-1), 1)[:, None]
    chosen = jax.nn.one_hot(i, number).max(-2) * MASK[..., None]
    of_group = jnp.sum(chosen.sum(1) / tokens * (p * MASK[..., None]).sum(1) / tokens, -1) * number
    return masked_mean(of_group, MASK.any(1))


class Row(NamedTuple):
    start: str  # of the first column of a row of the page
    formula: object  # which stands there
    arguments: dict
    masked: dict = {}  # noqa: RUF012
    constants: dict = {}  # noqa: RUF012


# Arguments, and what is masked of them.
OF_X = {"x": per_token()}, {"x": MASK}
OF_LOSS = {"loss": per_token()}, {"loss": MASK}
OF_PACKED = OF_LOSS[0] | {"ids": RNG.integers(0, 3, MASK.shape)}, OF_LOSS[1] | {"ids": MASK}
OF_LOGITS = {"logits": LOGITS, "labels": TOKENS}, {"logits": MASK[..., None], "labels": MASK}
OF_LINEAR = {"features": FEATURES, "kernel": KERNEL, "labels": TOKENS}, {"features": MASK[..., None], "labels": MASK}
OF_PADDED = OF_LINEAR[0] | {"labels": TOKENS % N}, OF_LINEAR[1] | {"kernel": np.arange(V) < N}
OF_STEPS = {"logits": LOGITS[0], "a": TOKENS[0]}, {"logits": MASK[0][:, None], "a": MASK[0]}
WEIGHTED_STEPS = OF_STEPS[0] | {"adv": floats(5)}, OF_STEPS[1] | {"adv": MASK[0]}


OF_PAIRS = {"q": Q, "k": K, "v": V_}, dict.fromkeys("kv", MASK[:3, :, None, None])
ROUTED = {"p": jax.nn.softmax(LOGITS), "i": np.argsort(LOGITS)[..., :2]}, {"p": MASK[..., None], "i": MASK[..., None]}


def of_logits(name):
    """Logits, and labels of this name."""
    return [{"logits": x["logits"], name: x["labels"]} for x in OF_LOGITS]


def linear(formula):
    return lambda features, kernel, labels: formula(features @ kernel, labels)


def right(logits, labels):
    return masked_mean(jnp.argmax(logits, -1) == labels, MASK)


def log_probs_at_a_temperature(logits, tokens):
    return selective_log_softmax(logits / T, tokens) * MASK


def largest(x):
    return jnp.max(x, initial=0, where=MASK)


MAX, SEGMENT_MAX = "`jnp.max(x, initial=0, where=mask)`", "`jraph.segment_max_or_constant("
WEIGHTS = {"w": 1.5 * MASK[0]}
ROWS = {
    "mean": Row("`(loss * mask).sum()", lambda loss: masked_mean(loss, MASK), {"loss": per_token()}, {"loss": MASK}),
    "std": Row("`jnp.std(x, where=mask)`", lambda x: jnp.std(x, where=MASK), *OF_X),
    "max": Row(MAX, largest, *OF_X),
    "max of integers": Row(MAX, largest, {"x": -TOKENS - 1}, {"x": MASK}),
    "z-loss": Row("`cross_entropy_with_logits(logits", with_z_loss, *OF_LOGITS),
    "z-loss of a linear layer": Row("`cross_entropy_with_logits(features", linear(with_z_loss), *OF_LINEAR),
    "smoothing": Row("labels of `1 - s` and `s / (V - 1)`, as", flax_smoothed, *OF_LOGITS),
    "smoothing before a linear layer": Row(
        "labels of `1 - s` and `s / (V - 1)`, and", linear(flax_smoothed), *OF_LINEAR
    ),
    "padded vocabulary": Row("`jnp.where(jnp.arange(V) < n", linear(padded_cross_entropy), *OF_PADDED),
    "accuracy": Row("`jnp.argmax(features @ kernel, -1) == labels`", linear(right), *OF_LINEAR),
    "log-probabilities": Row("`selective_log_softmax(", log_probs_at_a_temperature, *of_logits("tokens")),
    "sum and mean": Row(
        "`jnp.sum(x * mask)`, `masked_mean(", lambda x: (jnp.sum(x * MASK), masked_mean(x, MASK)), *OF_X
    ),
    "mean of sequences": Row('`aggregate_loss(loss, mask, "sequence', mean_of_sequences, *OF_LOSS),
    "mean of packed sequences": Row(
        "`aggregate_loss(...)` of tunix with `segment_ids=ids", mean_of_packed_sequences, *OF_PACKED
    ),
    "class weights": Row(
        "`F.cross_entropy(logits, labels, weight=w", weighted_like_torch, *OF_LOGITS, {"w": jnp.asarray(CLASS_WEIGHTS)}
    ),
    "whitening": Row("`masked_whiten(x, mask)`", lambda x: masked_whiten(x, MASK), *OF_X),
    "categorical": Row(
        "`distrax.Categorical(logits)",
        lambda logits, action: (selective_log_softmax(logits, action) * MASK, entropy(logits) * MASK),
        *of_logits("action"),
    ),
    "policy gradient": Row(
        "`rlax.policy_gradient_loss(", functools.partial(policy_gradient_loss, w=WEIGHTS["w"]), *WEIGHTED_STEPS, WEIGHTS
    ),
    "entropy": Row(
        "`rlax.entropy_loss(", lambda logits, a: -jnp.mean(entropy(logits) * MASK[0]), *OF_STEPS, {"w": 1.0 * MASK[0]}
    ),
    "softmax of -1e9": Row(
        "`jax.nn.softmax(jnp.where(mask, x, -1e9))` |",
        lambda x: jax.nn.softmax(jnp.where(MASK[:3], x, -1e9)),
        {"x": floats(3, 5)},
        {"x": MASK[:3]},
        {"mask": MASK[:3]},
    ),
    "attention of -1e9": Row(
        "`jax.nn.softmax(jnp.where(mask, x, -1e9))` between", attention, *OF_PAIRS, {"mask": KEYS}
    ),
    "attention of a bias": Row("`jnp.where(mask, 0, -1e9)`, added", attention, *OF_PAIRS, {"mask": KEYS}),
    "scaled before": Row(
        "queries that are scaled", lambda q, k, v: attention(q, k, v, 0, 1), *OF_PAIRS, {"mask": KEYS}
    ),
    "pair bias": Row(
        "a bias `[N, T, S]`",
        lambda q, k, v, bias: attention(q, k, v, bias),
        OF_PAIRS[0] | {"bias": PAIR_BIAS},
        OF_PAIRS[1],
        {"mask": KEYS},
    ),
    "largest of -1e9": Row(
        "`jnp.max(jnp.where(mask, x, -1e9), 1)`",
        lambda x: jnp.where(MASK.any(1), jnp.max(jnp.where(MASK, x, -1e9), 1), 0),
        *OF_X,
    ),
    "weights of attention": Row(
        "`dot_product_attention_weights(",
        weights_of,
        {"q": Q, "k": K},
        {"k": MASK[:3, :, None, None]},
        {"mask": KEYS, "is_query": np.ones((3, 5, 1, 1), bool), "is_key": MASK[:3, :, None, None]},
    ),
    "load balancing": Row("`_load_balancing_loss(p, i)`", balancing_loss_of_flaxformer, *ROUTED, {"k": 2}),
    "segments": Row(SEGMENT_MAX, segment_max_or_constant, {"x": floats(5, 3)}),
    "segments of integers": Row(SEGMENT_MAX, segment_max_or_constant, {"x": TOKENS.T - 9}),
}


def code_of(start):
    """The second column of the only row whose first one starts so: statements, and expressions at the end."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {start}")]
    return re.findall(r"`([^`]+)`", line.split(" | ")[1])


def ours(row):
    statements = [code for code in code_of(row.start) if re.match(r"[\w, ]+ = ", code)]
    results = [code for code in code_of(row.start) if code not in statements and "(" in code]

    def fn(*args):
        names = {"jax": jax, "jnp": jnp, "masksafe": masksafe, "losses": masksafe.losses, "mask": MASK}
        names |= {"V": V, "s": S, "t": T, "z": Z, "ids": IDS, "n": N} | row.constants
        names |= dict(zip(row.arguments, args, strict=True))
        for statement in statements:
            exec(statement, names)
        values = tuple(eval(result, names) for result in results)
        return values if len(values) > 1 else values[0]

    return fn


@parametrize("name", ["mean"], exhaustive=ROWS)
def test_the_row_has_the_values_and_gradients_of_the_formula(name):
    row = ROWS[name]
    arguments = tuple(map(jnp.asarray, row.arguments.values()))
    floating = tuple(i for i, a in enumerate(arguments) if jnp.issubdtype(a.dtype, jnp.floating))
    both = ours(row), row.formula
    actual, expected = (with_gradients(fn, floating)(*arguments) if floating else fn(*arguments) for fn in both)
    assert jax.tree.map(jnp.result_type, actual) == jax.tree.map(jnp.result_type, expected)
    assert_close(actual, expected, 2e-5, 1e-6)


@parametrize("name", ["mean"], exhaustive=[name for name, row in ROWS.items() if row.masked])
def test_garbage_under_the_mask_changes_nothing(name):
    row = ROWS[name]
    masked = {i: ~row.masked[a] for i, a in enumerate(row.arguments) if a in row.masked}
    assert_mask_safe(ours(row), *row.arguments.values(), masked=masked, order=1, transforms=["jit"])


def test_a_standard_deviation_of_equal_elements_or_of_nothing_has_a_gradient_of_zero():
    fn = jax.jit(jax.value_and_grad(ours(ROWS["std"])))
    value, gradient = fn(np.full(MASK.shape, 3.0, np.float32))
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)
    assert jnp.isnan(fn(np.where(MASK, np.nan, 0.0).astype(np.float32))[0])


def test_an_action_out_of_range_is_nan_as_the_page_says():
    row = ROWS["categorical"]
    log_prob, _ = ours(row)(row.arguments["logits"], np.where(MASK, V, -1))
    np.testing.assert_array_equal(np.isnan(log_prob), MASK)
