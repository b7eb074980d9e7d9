"""The recipes of the guides: sequences, draws from what a mask leaves, metrics, and policy losses."""

import ast
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close
from jax.sharding import AxisType, PartitionSpec
from pages import names_of
from tiers import parametrize

import masksafe
from masksafe.testing import assert_mask_safe

GARBAGE = [0.0, 1e30, np.inf, -np.inf, np.nan]
BINS, ROWS = 10, 64


def functions_of_the_guide(name):
    defines = lambda statement: isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef)  # noqa: E731
    return types.SimpleNamespace(**names_of(f"docs/guides/{name}.md", defines))


recipes, policies, experts = map(functions_of_the_guide, ("recipes", "rl_and_preference_tuning", "experts"))
assert_safe = functools.partial(assert_mask_safe, transforms=["jit"])

# The rows of sequences: all tokens, a hole inside, padding behind, padding before, one token, none.
TOKENS = np.array([[1, 1, 1, 1, 1], [1, 0, 0, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 0, 1], [0, 0, 1, 0, 0], [0] * 5], bool)
MASKED = ~TOKENS
SEGMENTS = np.array([[0, 0, 1, 1, 1], [0, -1, -1, 2, 2], [0, 1, -1, -1, -1], [-1, -1, 0, -1, 0], [-1, -1, 1, -1, -1]])
SEGMENTS = np.concatenate([SEGMENTS, np.full((1, 5), -1)])


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=(*TOKENS.shape, *shape)).astype(np.float32)


def assert_is(expected, fn, *arrays, masks=None, order=1):
    """What a function returns, whatever its arrays hold where they are masked."""
    assert_close(fn(*arrays), expected, 1e-5, 1e-6)
    masks = [MASKED.reshape(*MASKED.shape, *[1] * (x.ndim - 2)) for x in arrays] if masks is None else masks
    assert_safe(fn, *arrays, masked=dict(enumerate(masks)), order=order)


def by_row(formula, x):
    """The formula of the tokens of each row; 0 of none."""
    return np.array([formula(row[kept]) if kept.any() else 0 * row[0] for row, kept in zip(x, TOKENS, strict=True)])


# Sequences.


def test_experts_are_balanced_within_each_document():
    ids, experts = SEGMENTS.ravel(), np.random.default_rng(22).integers(-1, 3, (SEGMENTS.size, 2))
    probs = np.array(jax.nn.softmax(drawn(21, 3).reshape(-1, 3)))
    of_all = masksafe.losses.load_balancing_loss
    expected = [of_all(probs, experts, where=ids == n) for n in range(4) if (ids == n).any()]

    def loss(probs, experts):
        return recipes.balance_by_document(probs, experts, jnp.asarray(ids), most=4).value

    assert_is(np.mean(expected), loss, probs, experts, masks=[(ids < 0)[:, None]] * 2)


def recurrence(step, *arrays):
    """Row by row the states of a recurrence over the tokens: those of all positions, 0 at masked ones, and the last."""
    states = np.zeros(arrays[0].shape)
    last = np.zeros((len(states), *states.shape[2:]))
    for i, t in zip(*np.nonzero(TOKENS), strict=True):
        states[i, t] = last[i] = step(last[i], *(x[i, t] for x in arrays))
    return last, states


def test_a_recurrence_passes_over_what_is_masked():
    weights = np.random.default_rng(22).normal(size=(3, 3)).astype(np.float32)

    def run(x):
        return recipes.recur(lambda state, x: jnp.tanh(state @ weights + x), jnp.zeros((len(x), 3)), x, TOKENS)

    x = drawn(21, 3)
    np.testing.assert_array_equal(run(x)[1][MASKED], 0)
    assert_is(recurrence(lambda state, x: np.tanh(state @ weights + x), x), run, x)


def test_a_linear_recurrence_passes_over_what_is_masked():
    a, b = drawn(23, 2), drawn(24, 2)
    outputs = recipes.linear_recurrence(a, b, TOKENS)
    _, expected = recurrence(lambda state, a, b: a * state + b, a, b)
    assert_close(outputs[TOKENS], expected[TOKENS], 1e-5, 1e-6)
    masked = {0: MASKED[..., None], 1: MASKED[..., None]}
    assert_safe(lambda a, b: recipes.linear_recurrence(a, b, TOKENS), a, b, masked=masked, order=1)


@parametrize("segments", [TOKENS], exhaustive=[SEGMENTS], ids=["sequences", "documents"])
def test_a_causal_convolution_sees_its_own_sequence_alone(segments):
    x, kernel = drawn(25, 2), np.random.default_rng(26).normal(size=(3, 2)).astype(np.float32)
    expected = np.zeros(x.shape)
    for i, t, k in np.ndindex(*TOKENS.shape, 3):
        if t >= k and TOKENS[i, t] and TOKENS[i, t - k] and segments[i, t] == segments[i, t - k]:
            expected[i, t] += x[i, t - k] * kernel[k]
    assert_is(expected, lambda x: recipes.causal_convolution(x, kernel, segments, TOKENS), x)


@parametrize(
    ("name", "pool"),
    [("mean_pool", lambda x: x.mean(0))],
    exhaustive=[("max_pool", lambda x: x.max(0)), ("last_pool", lambda x: x[-1])],
)
def test_pooling_is_that_of_the_tokens(name, pool):
    x = drawn(27, 2)
    assert_is(by_row(pool, x), functools.partial(getattr(recipes, name), mask=TOKENS), x)


def test_windows_are_pooled_without_padding():
    x, mask = np.pad(drawn(28, 2), ((0, 0), (0, 1), (0, 0))), np.pad(TOKENS, ((0, 0), (0, 1)))
    expected = np.zeros((6, 3, 2))
    for i, j in np.ndindex(6, 3):
        kept = x[i, 2 * j : 2 * j + 2][mask[i, 2 * j : 2 * j + 2]]
        expected[i, j] = kept.mean(0) if len(kept) else 0
    assert_is(expected, functools.partial(recipes.window_pool, mask=mask, size=2), x, masks=[~mask[..., None]])


def test_a_standard_deviation_has_a_gradient_at_equal_elements():
    x, fn = drawn(29), functools.partial(recipes.std, axis=1, where=TOKENS)
    np.testing.assert_array_equal(jax.grad(lambda x: fn(x).sum())(np.ones_like(x)), 0)
    assert_is(by_row(np.std, x), fn, x)


def test_advantages_end_with_an_episode_and_look_beyond_a_limit_of_time():
    rewards, values, next_values = drawn(30), drawn(31), drawn(32)
    terminated, truncated = np.zeros((2, *TOKENS.shape), bool)
    terminated[0, 1] = truncated[0, 3] = terminated[2, 1] = truncated[3, 4] = True
    fn = functools.partial(
        recipes.gae, terminated=terminated, truncated=truncated, mask=TOKENS, discount=0.9, decay=0.8
    )
    expected = np.zeros(TOKENS.shape)
    for i, t in itertools.product(range(6), reversed(range(5))):
        if TOKENS[i, t]:
            future = 0 if terminated[i, t] else next_values[i, t]
            ends = terminated[i, t] or truncated[i, t] or t == 4
            expected[i, t] = rewards[i, t] + 0.9 * future - values[i, t] + (0 if ends else 0.72 * expected[i, t + 1])
    assert_is(expected, fn, rewards, values, next_values, masks=[MASKED, MASKED, MASKED | terminated])


def test_late_interaction_sums_the_best_matches():
    x, y = drawn(33, 3), drawn(34, 3)[:4]
    expected = np.zeros((6, 4))
    for i, j in np.ndindex(6, 4):
        expected[i, j] = (x[i][TOKENS[i]] @ y[j][TOKENS[j]].T).max(1).sum()
    fn = functools.partial(recipes.late_interaction, x_mask=TOKENS, y_mask=TOKENS[:4])
    assert_is(expected, fn, x, y, masks=[MASKED[..., None], MASKED[:4, :, None]])
    nothing = fn(x, y, y_mask=np.zeros_like(TOKENS[:4]))
    np.testing.assert_array_equal(nothing, 0)


def test_the_loss_of_events_is_that_of_the_samples_there_are():
    scores, mask = np.random.default_rng(35).normal(size=8).astype(np.float32), np.arange(8) % 3 != 0
    has_event = np.array([1, 1, 0, 1, 1, 0, 1, 1], bool)
    left, events = np.float64(scores)[mask], has_event[mask]
    at_risk = np.log(np.cumsum(np.exp(left)))
    fn = functools.partial(recipes.cox_loss, has_event=has_event, mask=mask)
    assert_is(np.mean((at_risk - left)[events]), fn, scores, masks=[~mask])
    assert recipes.cox_loss(scores, has_event, np.zeros(8, bool)) == 0


def test_the_overlap_of_boxes_is_that_of_those_there_are():
    corners = np.random.default_rng(36).uniform(size=(2, 6, 2, 2)).astype(np.float32)
    x, y = np.concatenate([corners.min(2), corners.max(2) + 0.1], -1)
    mask = np.arange(6) < 4

    def loss(a, b):
        sides = lambda low, high: np.prod(np.maximum(high - low, 0))  # noqa: E731
        common = sides(np.maximum(a[:2], b[:2]), np.minimum(a[2:], b[2:]))
        union = sides(a[:2], a[2:]) + sides(b[:2], b[2:]) - common
        around = sides(np.minimum(a[:2], b[:2]), np.maximum(a[2:], b[2:]))
        return 1 - common / union + (around - union) / around

    expected = np.mean([loss(*pair) for pair in zip(x[:4], y[:4], strict=True)])
    assert_is(expected, functools.partial(recipes.giou_loss, mask=mask), x, y, masks=[~mask[:, None]] * 2)


# Experts, on one device and on four.


def on_four_devices(fn, **specs):
    """`fn` of arrays that are split along their first axis, unless a spec says otherwise."""
    mesh, split = jax.make_mesh((4,), ("d",), (AxisType.Auto,)), PartitionSpec("d")

    def run(*args, **named):
        in_specs = tuple(split for _ in args), {name: specs.get(name, split) for name in named}
        call = lambda args, named: fn(*args, **named)  # noqa: E731
        return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=specs.get("out", split)))(
            args, named
        )

    return run


@pytest.fixture(scope="module")
def routed():
    """Outputs `[8, 2, 3]`, weights, which assignments are kept, logits `[8, 4]` and the experts, padded by -1."""
    rng = np.random.default_rng(37)
    is_kept = np.array([[1, 1], [1, 0], [0, 0], [0, 1], [1, 1], [1, 1], [0, 0], [1, 0]], bool)
    chosen = np.where(is_kept, np.argsort(rng.random((8, 4)))[:, :2], -1)
    outputs, weights, logits = (rng.random(shape).astype(np.float32) for shape in ((8, 2, 3), (8, 2), (8, 4)))
    return outputs, weights, is_kept, logits, chosen


def test_dropped_assignments_add_nothing(routed):
    outputs, weights, is_kept, *_ = routed
    expected = (outputs * weights[..., None] * is_kept[..., None]).sum(1)
    fn = functools.partial(experts.combine, is_kept=is_kept)
    assert_is(expected, fn, outputs, weights, masks=[~is_kept[..., None], ~is_kept])
    assert_close(on_four_devices(experts.combine)(outputs, weights, is_kept), expected, 1e-5)


def test_a_replayed_router_weighs_the_experts_of_then(routed):
    *_, logits, chosen = routed
    exps = np.where(chosen >= 0, np.exp(np.take_along_axis(logits, np.maximum(chosen, 0), 1)), 0)
    expected = exps / np.maximum(exps.sum(1, keepdims=True), 1e-30)
    assert_close(experts.replayed_weights(logits, chosen), expected, 1e-5)
    assert_close(on_four_devices(experts.replayed_weights)(logits, chosen), expected, 1e-5)
    masked = ~(np.arange(4) == chosen[..., None]).any(1)
    assert_is(expected, functools.partial(experts.replayed_weights, chosen=chosen), logits, masks=[masked])


def test_the_experts_of_devices_add_up_to_all():
    rng = np.random.default_rng(38)
    rows, kernels = rng.normal(size=(12, 3)).astype(np.float32), rng.normal(size=(8, 3, 2)).astype(np.float32)
    sizes = np.int32([1, 0, 3, 2, 0, 1, 2, 1])  # the last two rows are in no group
    expected = np.zeros((12, 2))
    for row, expert in enumerate(np.repeat(np.arange(8), sizes)):
        expected[row] = rows[row] @ kernels[expert]
    whole = {"rows": PartitionSpec(), "sizes": PartitionSpec(), "out": PartitionSpec()}

    def on_each(rows, kernels, sizes):
        first = jax.lax.axis_index("d") * len(kernels)
        return jax.lax.psum(experts.of_own_experts(rows, kernels, sizes, first), "d")

    assert_close(on_four_devices(on_each, **whole)(rows=rows, kernels=kernels, sizes=sizes), expected, 1e-5)


def test_the_bias_moves_towards_an_even_share(routed):
    *_, logits, chosen = routed
    probs, mask = np.asarray(jax.nn.softmax(logits)), np.arange(8) != 4
    share = np.bincount(chosen[mask & (chosen >= 0).any(1)].ravel() + 1, minlength=5)[1:]
    expected = 0.001 * np.sign(np.mean(share) - share)
    of = masksafe.losses.RouterStatistics.of

    def on_each(probs, chosen, mask):
        return experts.moved_bias(jnp.zeros(4), of(probs, chosen, where=mask).psum("d"))

    assert_close(experts.moved_bias(jnp.zeros(4), of(probs, chosen, where=mask)), expected, 1e-5)
    assert_close(on_four_devices(on_each, out=PartitionSpec())(probs, chosen, mask), expected, 1e-5)
    np.testing.assert_array_equal(experts.moved_bias(jnp.ones(4), of(probs, chosen, where=mask & False)), 1)


# Sampling.


@pytest.fixture(scope="module")
def categorical():
    """Logits `[4, 6]` and what is left of each row: all, some, one, nothing."""
    where = np.array([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]], bool)
    return np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32), where


@functools.partial(jax.jit, static_argnums=3)
def draws(key, logits, where, number):
    return recipes.sample(key, jnp.broadcast_to(logits, (number, *logits.shape)), where)


def test_draws_are_as_frequent_as_the_softmax_says(categorical):
    logits, where = categorical
    number = 20000
    drawn = np.asarray(draws(jax.random.key(0), jnp.where(where, logits, jnp.nan), where, number))
    expected = number * np.asarray(masksafe.softmax(logits, where=where), np.float64)
    for row in range(3):
        counts = np.bincount(drawn[:, row], minlength=6)
        assert counts[~where[row]].sum() == 0
        left = where[row]
        # A chi-square of 5 degrees of freedom at most; 1 in 10000 keys would exceed it.
        assert ((counts - expected[row])[left] ** 2 / expected[row][left]).sum() < 26


def test_garbage_changes_no_draw_and_a_row_with_nothing_left_has_none(categorical):
    logits, where = categorical
    drawn = [draws(jax.random.key(1), np.where(where, logits, x).astype(np.float32), where, 100) for x in GARBAGE]
    for other in drawn[1:]:
        np.testing.assert_array_equal(other, drawn[0])
    assert (drawn[0][:, 3] == -1).all()


def test_an_unmasked_nan_stays_in_sight():
    logits, where = jnp.array([1.0, jnp.nan, 2.0, 3.0]), jnp.array([True, True, True, False])
    for mask in (where, recipes.top_k(logits, where, 1), recipes.nucleus(logits, where, 0.5)):
        drawn = recipes.sample(jax.random.key(3), logits, mask)
        assert jnp.isnan(masksafe.losses.log_probs(logits, drawn, where=mask))


def most_probable(logits, where, is_enough):
    """The shortest list of the most probable classes that is enough, and what ties with the last of them."""
    kept = np.zeros(len(logits), bool)
    probs = np.where(where, np.exp(logits.astype(np.float64)), 0)
    probs = probs / max(probs.sum(), 1e-300)
    for least in sorted(set(probs[where]), reverse=True):
        if not is_enough(kept, probs):
            kept |= where & (probs >= least)
    return kept


@parametrize(
    ("recipe", "argument", "is_enough"),
    [("top_k", 2, lambda kept, probs: kept.sum() >= 2)],
    exhaustive=[("nucleus", 0.55, lambda kept, probs: probs[kept].sum() >= 0.55)],
)
def test_the_most_probable_classes_are_kept(recipe, argument, is_enough, categorical):
    logits, where = categorical
    tied = np.array([[0.5, 1, 1, 1, 0, 0.25]], np.float32)  # no two of the three come first
    logits, where = np.concatenate([logits, tied, tied]), np.concatenate([where, where[:1], ~where[1:2]])
    expected = [most_probable(*row, is_enough) for row in zip(logits, where, strict=True)]
    run = jax.jit(getattr(recipes, recipe), static_argnums=2)
    for garbage in GARBAGE:
        kept = run(np.where(where, logits, garbage).astype(np.float32), where, argument)
        np.testing.assert_array_equal(kept, expected)


# Metrics.


@pytest.fixture(scope="module")
def evaluation():
    """Logits `[797, 10]` in float64, and labels."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (797, 10))
    return logits, np.where(rng.random(797) < 0.7, logits.argmax(1), rng.integers(10, size=797))


def exact_report(logits, labels):
    """In float64, of data without padding."""
    exps = np.exp(logits - logits.max(1, keepdims=True))
    probs = exps / exps.sum(1, keepdims=True)
    is_right = probs.argmax(1) == labels
    top_3 = np.argsort(-probs, axis=1, kind="stable")[:, :3]
    bin_of = np.minimum((probs.max(1) * BINS).astype(int), BINS - 1)
    gaps = [np.sum((is_right - probs.max(1))[bin_of == i]) for i in range(BINS)]
    return {
        "accuracy": is_right.mean(),
        "top-3 accuracy": (top_3 == labels[:, None]).any(1).mean(),
        "perplexity": np.exp(-np.log(probs[np.arange(len(labels)), labels]).mean()),
        "calibration error": np.abs(gaps).sum() / len(labels),
    }


def uneven_batches(logits, labels, garbage):
    """Batches of as many rows, of which 0 to all are data, the rest garbage with labels of -100."""
    sizes = itertools.cycle([40, 1, 0, ROWS, 23])
    start = 0
    while start < len(labels):
        part = slice(start, start + next(sizes))
        behind = ROWS - len(labels[part])
        yield (
            np.pad(logits[part].astype(np.float32), ((0, behind), (0, 0)), constant_values=garbage),
            np.pad(labels[part], (0, behind), constant_values=-100),
        )
        start = part.stop


metrics = jax.jit(lambda logits, labels: recipes.metrics(logits, labels, BINS))


@parametrize("garbage", [np.nan], exhaustive=[np.inf])
def test_metrics_of_padded_batches_are_those_of_the_data(garbage, evaluation):
    means = recipes.total([metrics(*batch) for batch in uneven_batches(*evaluation, garbage)])
    assert means["loss"].count == means["accuracy by bin"].count.sum() == len(evaluation[1])
    found, expected = recipes.report(means), exact_report(*evaluation)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def test_an_unmasked_nan_shows_in_losses_and_calibration(evaluation):
    (logits, labels), *_ = uneven_batches(*evaluation, 0.0)
    logits[0, 0] = np.nan
    found = recipes.report(metrics(logits, labels))
    assert jnp.isnan(found["perplexity"])
    assert jnp.isnan(found["calibration error"])


# Policies.


def test_advantages_in_a_group_are_those_of_the_answers_there_are():
    rewards = np.array(
        [[1.0, 0.0, 0.5], [3.0, 1.0, 7.0], [2.0, 2.0, 2.0], [4.0, 4.0, 9.0], [5.0, 1.0, 1.0], [1.0, 2.0, 3.0]]
    )
    where = np.array([[1, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 1], [0, 0, 0]], bool)
    expected = np.zeros(rewards.shape)
    for row, group, left in zip(expected, rewards, where, strict=True):
        if left.sum() > 1:  # a single answer has nothing to be compared with
            row[left] = (group[left] - group[left].mean()) / (group[left].std(ddof=1) + 1e-4)
    rewards = rewards.astype(np.float32)
    relative = functools.partial(policies.group_relative, mask=where)
    assert_is(expected, relative, rewards, masks=[~where], order=2)
    assert jnp.isfinite(jax.jit(jax.jacrev(relative))(rewards)).all()
