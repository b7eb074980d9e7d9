"""dot_product_attention beyond its rows of the contract's table: what is bad, masks of a loss, shapes, sinks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, attention, causal, exact, normals, poisoned, random_inputs, replaced, with_gradients
from comparisons import assert_close, assert_same_bits
from tiers import parametrize

import masksafe

with_residual = functools.partial(attention, return_residual=True)
COTANGENTS = normals(2, 6, 2, 4, seed=6), normals(2, 6, 2, seed=7)
NAMES = "query", "key", "value", "bias"


def test_a_bias_of_minus_infinity_masks(form):
    live, inputs, run = CASES["bias of -inf"][1], random_inputs(), with_gradients(with_residual)
    bias = np.where(live, normals(*live.shape, seed=5), -np.inf).astype(np.float32)
    clean = run((*inputs, bias), COTANGENTS)
    expected, of_all = exact(*inputs, live, bias, d_out=COTANGENTS[0], d_lse=COTANGENTS[1])
    assert_close(clean, (expected, [of_all[name] for name in NAMES]))
    for garbage in (np.nan, np.inf, 3e38):
        assert_same_bits(run((*poisoned(inputs, live, garbage), bias), COTANGENTS), clean)


def test_keys_that_a_static_window_hides_from_a_block_are_left_out_and_no_others(form):
    arguments, live = CASES["window"]
    assert_close(attention(*random_inputs(), **arguments), exact(*random_inputs(), live)[0])


# What is not masked is not hidden.

ONE_SEGMENT, HALVES, INDEX = np.zeros((1, 6), np.int32), np.int32([[0, 0, 0, 1, 1, 1]]), np.arange(6)
D_OUT = normals(1, 6, 1, 4, seed=6)


def in_segments(*args, ids, offset):
    segments = dict(query_segment_ids=ids, key_value_segment_ids=ids)
    return with_residual(*args, is_causal=True, causal_offset=offset, **segments)


CLEAN = dict(zip(NAMES, (*random_inputs(1, 6, 6, 1), np.zeros((6, 6), np.float32)), strict=True))
RUN = with_gradients(in_segments)  # one program for each form


def run(ids=ONE_SEGMENT, offset=6, d_out=D_OUT, **bad):
    """Output and gradients `[6, 4]` of one sample and head for arguments of which one is bad."""
    rest = dict(ids=ids, offset=np.array(offset))
    (out, lse), gradients = RUN(tuple((CLEAN | bad).values()), (d_out, np.zeros((1, 6, 1), np.float32)), rest)
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(out).all(-1))
    return [np.asarray(x)[0, :, 0] for x in (out, *gradients[:3])]


def assert_bad_rows(arrays, *which):
    for array, expected in zip(arrays, which, strict=True):
        np.testing.assert_array_equal(np.isnan(array), np.broadcast_to(expected[:, None], (6, 4)))


SECOND_HALF, ALL = INDEX >= 3, INDEX >= 0
# Where an element is, what is masked, and which rows show it: of the output and of the gradients.
VISIBLE = [
    ("value", (0, 3, 0, 1), dict(offset=0), (SECOND_HALF, SECOND_HALF, ALL, ALL)),  # the last query sees every key
    ("key", (0, 4, 0, 0), dict(ids=HALVES), (SECOND_HALF,) * 4),
    ("query", (0, 4, 0, 0), dict(ids=HALVES), (INDEX == 4, INDEX == 4, SECOND_HALF, SECOND_HALF)),
]


def test_what_is_bad_shows_where_it_is_seen_and_nowhere_else(form):
    for bad in (np.nan, np.inf, -np.inf, 1e30):
        for name, index, masks, rows in VISIBLE:
            assert_bad_rows(run(**{name: replaced(CLEAN[name], index, bad)}, **masks), *rows)
    assert_bad_rows(run(bias=replaced(CLEAN["bias"], (2, 3), np.nan))[:1], INDEX == 2)
    found = run(d_out=replaced(np.zeros_like(D_OUT), (0, 3, 0, 1), np.nan))
    assert_bad_rows(found, INDEX < 0, INDEX == 3, INDEX >= 0, INDEX >= 0)


@parametrize(
    ("form", "length"),
    [("accelerator", 64)],
    exhaustive=[("cuda", 256), ("tpu", 128), ("accelerator", 32), ("cpu", 600)],
)
def test_a_nan_shows_in_every_form_at_lengths_for_which_xla_has_another_code(form, length, choose):
    """XLA's CPU compiler loses a NaN in the maximum of 64 numbers, and in the exp of a NaN that it knows."""
    choose(form=form, attention=dict(most_weights_kept=0))
    shape, index = (1, length, 1, 8), np.arange(length)
    inputs, d_out, bias = [normals(*shape, seed=n) for n in range(3)], np.ones(shape, np.float32), np.zeros(length)
    fn = lambda q, k, v, *, is_nan, bias: attention(  # noqa: E731
        q, k, v, jnp.where(is_nan[:, None], jnp.nan, bias), is_causal=True, implementation="xla"
    )
    step = with_gradients(fn)
    here, at = replaced(np.zeros(shape, bool), (0, 3, 0, 5), True), index == 3
    one, later, before, none, every = at, index >= 3, index <= 3, index < 0, index >= 0
    for name, rows in {
        "query": (one, one, before, before),
        "key": (later, later, every, every),
        "value": (later, later, every, every),
        "cotangent": (none, one, before, before),
        "bias": (one, one, before, before),
    }.items():
        *args, d = (
            np.where(here & (name == n), np.nan, x)
            for n, x in zip(("query", "key", "value", "cotangent"), (*inputs, d_out), strict=True)
        )
        rest = dict(is_nan=at & (name == "bias"), bias=np.float32(bias))
        out, gradients = step(tuple(map(np.float32, args)), np.float32(d), rest)
        for array, expected in zip((out, *gradients), rows, strict=True):
            np.testing.assert_array_equal(
                np.isnan(array[0, :, 0]), np.broadcast_to(expected[:, None], (length, 8)), name
            )


def test_what_is_too_large_for_a_product_is_bad_whatever_it_is_multiplied_by(form):
    """So that no form tells another answer. With a head of width 4 the limit is 2.3e18."""
    small = {name: np.float32(1e-19) * CLEAN[name] for name in NAMES[:3]}
    for name, index, masks, rows in VISIBLE:
        others = {other: small[other] for other in NAMES[:3] if other != name}
        for large, bad_rows in ((2.2e18, [INDEX < 0] * 4), (2.4e18, rows), (-2.4e18, rows)):
            found = run(**others, **{name: replaced(CLEAN[name], index, large)}, **masks)
            assert_bad_rows(found, *bad_rows)
    for name in ("key", "query"):
        huge = {name: np.clip(CLEAN[name], -1, 1) * np.float32(2.2e18)}
        inputs = CLEAN | {"query": small["query"], "key": small["key"]} | huge
        (out, _), expected = exact(*list(inputs.values())[:3], d_out=D_OUT)
        found = run(**{n: inputs[n] for n in ("query", "key")})
        assert_close(found[0], out[0, :, 0])
        for gradient, n in zip(found[1:], NAMES[:3], strict=True):
            largest = np.abs(expected[n]).max()
            np.testing.assert_allclose(gradient, expected[n][0, :, 0], rtol=1e-4, atol=1e-5 * largest)


@parametrize(("dtype", "is_static"), [(jnp.bfloat16, False)], exhaustive=[(jnp.bfloat16, True), (np.float32, True)])
def test_queries_are_too_large_with_or_without_the_scale(dtype, is_static):
    query, key, value = random_inputs(1, 6, 6, 1, dtype=dtype)
    attend = jax.jit(lambda scale, *args: attention(*args, scale=scale), static_argnums=[0] * is_static)
    for size, scale, is_bad in ((1e17, 1.0, False), (1e17, 100.0, True), (1e19, 0.01, True), (1e17, -100.0, True)):
        out = attend(scale, replaced(query, (0, 4, 0, 0), size), key, value)[0, :, 0]
        np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(((INDEX == 4) & is_bad)[:, None], out.shape))


@jax.jit
def tangents_of(args, directions, ids, offset, is_real):
    """Of output, logsumexp and, outside of forward mode, of the gradients; the loss may mask queries."""
    fn = functools.partial(in_segments, ids=ids, offset=offset)

    def gradients(*args):
        loss = lambda *args: jnp.sum(jnp.where(is_real, fn(*args)[0], 0) ** 2)  # noqa: E731
        return jax.grad(loss, range(4))(*args)

    with masksafe.forward_mode():
        results = jax.jvp(fn, args, directions)[1]
    return *results, *jax.jvp(gradients, args, directions)[1]


DIRECTIONS = {name: np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape) for name, x in CLEAN.items()}
EVERY = np.ones((6, 1, 1), bool)


def tangents(ids=ONE_SEGMENT, offset=6, is_real=EVERY, args=CLEAN, **bad):
    directions = tuple((DIRECTIONS | bad).values())
    out, lse, *gradients = tangents_of(tuple(args.values()), directions, ids, np.array(offset), is_real)
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(out).all(-1))
    return [np.asarray(x)[0, :, 0] for x in (out, *gradients[:3])]


def test_a_bad_tangent_shows_where_it_is_seen_and_nowhere_else(form):
    """In tangents of the output, and in those of the gradients."""
    for bad in (np.nan, np.inf):
        for name, index, masks, rows in VISIBLE:
            assert_bad_rows(tangents(**{name: replaced(DIRECTIONS[name], index, bad)}, **masks), *rows)
    assert_bad_rows(tangents(bias=replaced(DIRECTIONS["bias"], (2, 3), np.nan))[:1], INDEX == 2)


def test_padded_queries_have_no_gradient_if_the_loss_has_a_mask(form):
    real = (INDEX < 4)[:, None, None]
    d_out = np.where(real, D_OUT, 0)
    padded, unpadded = (run(d_out=d_out, query=np.where(real, CLEAN["query"], x)) for x in (np.float32(np.nan), 0))
    assert_same_bits(padded[1:], unpadded[1:])
    assert not padded[1][4:].any()


def test_padded_queries_have_no_second_derivative_if_the_loss_has_a_mask(form):
    """Neither a NaN in the padding nor one in its tangents; in a causal mask only padded queries see padded keys."""
    real = (INDEX < 4)[:, None, None]
    clean = tangents(offset=0, is_real=real)[1:]
    for names in (NAMES[:1], NAMES[:3]):
        padded = {name: np.where(real, CLEAN[name], np.float32(np.nan)) for name in names}
        directions = {name: np.where(real, DIRECTIONS[name], np.float32(np.nan)) for name in names}
        assert_same_bits(tangents(offset=0, is_real=real, **directions)[1:], clean)
        found = tangents(offset=0, is_real=real, args=CLEAN | padded)[1:]
        assert_close([x[:4] for x in found], [x[:4] for x in clean])
        assert all(np.isfinite(x).all() for x in found)


@jax.jit
def reverse_over_reverse(args, directions, mask, is_real):
    """For directions of the gradients by queries, keys, values, a bias and maybe sinks; the loss may mask queries."""

    def loss(*args):
        out = attention(*args[:4], mask, sinks=args[4] if len(args) > 4 else None)
        return jnp.sum(jnp.sin(jnp.where(is_real, out, 0)))

    return jax.vjp(jax.grad(loss, range(len(args))), *args)[1](directions)


def test_padded_queries_have_no_reverse_over_reverse_derivative_if_the_loss_has_a_mask(form):
    mask, real = causal(6, 6), (INDEX < 4)[:, None, None]

    def with_padding(arrays, x, names=NAMES):
        is_real = {name: real[..., 0] if name == "bias" else real for name in names}
        return arrays | {name: np.where(r, arrays[name], np.float32(x)) for name, r in is_real.items()}

    directions = tuple(with_padding(DIRECTIONS, 0).values())  # of gradients that are 0 there
    clean = reverse_over_reverse(tuple(CLEAN.values()), directions, mask, real)
    for names in (NAMES[:1], NAMES[1:3], NAMES):
        bad = with_padding(CLEAN, np.nan, names)
        found = reverse_over_reverse(tuple(bad.values()), directions, mask, real)
        assert all(np.isfinite(x).all() for x in found)
        assert_close([x[:, :4] for x in found[:3]], [x[:, :4] for x in clean[:3]])


def test_the_cotangent_of_a_masked_gradient_is_in_no_second_derivative(form):
    """A query, a key and its value, and elements of a bias are masked; an unmasked one shows."""
    mask = np.broadcast_to(INDEX != 2, (6, 6)) & (INDEX != 4)[:, None] & ~np.eye(6, dtype=bool)
    hidden = [(~mask.any(axis))[:, None, None] for axis in (1, 0, 0)] + [~mask]
    sinks = [np.float32([0.5])] * (form == "blocks of keys")  # which count outside of the forms: one tells of all

    def results(directions):
        return reverse_over_reverse((*CLEAN.values(), *sinks), (*directions, *sinks), mask, EVERY)

    directions = list(DIRECTIONS.values())
    clean = results(directions)
    for garbage in (np.nan, np.inf, -np.inf, 3e38):
        dirty = [np.where(h, np.float32(garbage), d) for h, d in zip(hidden, directions, strict=True)]
        assert_same_bits(results(dirty), clean)
    for n in range(4):
        seen = np.argwhere(~np.broadcast_to(hidden[n], directions[n].shape))[0]
        bad = [*directions[:n], replaced(directions[n], tuple(seen), np.nan), *directions[n + 1 :]]
        assert any(np.isnan(x).any() for x in results(bad))


# Shapes.


@parametrize(("T", "S", "N"), [(3, 0, 2)], exhaustive=[(0, 3, 2), (0, 0, 2), (3, 4, 0)])
def test_empty_arrays(T, S, N):
    inputs = random_inputs(2, T, S, N, N, width=5)
    cotangents = normals(2, T, N, 5), normals(2, T, N)
    (out, lse), gradients = with_gradients(functools.partial(with_residual, is_causal=True))(inputs, cotangents)
    assert (out.shape, lse.shape) == ((2, T, N, 5), (2, T, N))
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()
    for gradient, x in zip(gradients, inputs, strict=True):
        assert gradient.shape == x.shape
        assert (gradient == 0).all()


@parametrize("mask_batch", [(1, 2)], exhaustive=[(3, 1), (2,), ()], ids=str)
def test_extra_batch_dimensions(mask_batch):
    inputs = random_inputs(6)
    mask = np.random.default_rng(1).random((*mask_batch, 1, 6, 7)) < 0.5
    bias, cotangents = normals(2, 1, 1, 7, seed=5), (normals(6, 6, 2, 4, seed=6), normals(6, 6, 2, seed=7))
    apart = functools.partial(jax.tree.map, lambda x: x.reshape(3, 2, *x.shape[1:]))
    actual = with_gradients(lambda *args: with_residual(*args, mask))((*apart(inputs), bias), apart(cotangents))
    live = np.broadcast_to(mask, (3, 2, 2, 6, 7)).reshape(6, 2, 6, 7)
    expected, of_all = exact(*inputs, live, np.tile(bias, (3, 1, 1, 1)), d_out=cotangents[0], d_lse=cotangents[1])
    *of_inputs, d_bias = apart([of_all[name] for name in NAMES])
    assert_close(actual, (apart(expected), (*of_inputs, d_bias.sum((0, 2, 3), keepdims=True)[0])))


@parametrize("shape", [(2, 1, 1, 7)], exhaustive=[(2, 1, 6, 1), (1, 2, 6, 7), (6, 7), (7,)], ids=str)
def test_masks_and_biases_broadcast(shape):
    inputs, scale, bias = random_inputs(), np.float32(0.3), normals(*shape, seed=3)
    mask = np.random.default_rng(2).random(shape) < 0.5
    run = with_gradients(lambda q, k, v, bias, scale: with_residual(q, k, v, bias, mask, scale=scale))
    expected, of_all = exact(*inputs, mask, bias, scale, d_out=COTANGENTS[0], d_lse=COTANGENTS[1])
    shared = tuple(n for n, size in enumerate((1,) * (4 - len(shape)) + shape) if size == 1)
    of_all["bias"] = of_all["bias"].sum(shared, keepdims=True).reshape(shape)
    actual = run((*inputs, bias, scale), COTANGENTS)
    assert_close(actual, (expected, [of_all[name] for name in (*NAMES, "scale")]), 1e-4)


def test_heads_of_width_0():
    """All logits are 0."""
    inputs = np.zeros((2, 6, 2, 0), np.float32), np.zeros((2, 7, 1, 0), np.float32), random_inputs()[2]
    out, gradients = with_gradients(functools.partial(attention, is_causal=True))(inputs, COTANGENTS[0])
    columns = (np.zeros((*x.shape[:3], 1)) for x in inputs[:2])
    expected, of_all = exact(*columns, inputs[2], causal(6, 7), d_out=COTANGENTS[0])
    assert_close((out, gradients[2]), (expected[0], of_all["value"]))
    assert [x.shape for x in gradients[:2]] == [x.shape for x in inputs[:2]]


# Sinks.

SINKS = np.float32([0.5, -1.0])


def test_sinks_count_only_for_queries_that_take_part():
    """By a causal mask the first two see nothing; of the last two the loss wants nothing."""
    inputs, of_queries = random_inputs(), np.arange(6)[:, None, None]
    attend = functools.partial(attention, is_causal=True, causal_offset=-2)
    run = with_gradients(lambda *args: attend(*args[:3], sinks=args[3]))
    d_out = np.where(of_queries < 4, normals(2, 6, 2, 4, seed=6), 0)
    clean = run((*inputs, SINKS), d_out)
    assert not np.asarray(clean[0])[:, :2].any()
    few, padded = (of_queries < 2), (of_queries >= 4)
    dirty = np.where(few | padded, np.float32(np.nan), inputs[0]), *inputs[1:], SINKS
    out, gradients = run(dirty, np.where(few, np.float32(np.nan), d_out))
    assert_same_bits((out[:, :4], gradients), (clean[0][:, :4], clean[1]))


@pytest.mark.exhaustive
def test_a_sink_takes_all_weight_or_none():
    inputs, attend = random_inputs(), functools.partial(attention, is_causal=True, causal_offset=-2)
    all_or_nothing = attend(*inputs, sinks=np.float32([-np.inf, np.inf]))
    np.testing.assert_array_equal(all_or_nothing, np.asarray(attend(*inputs)) * np.float32([1, 0])[:, None])
