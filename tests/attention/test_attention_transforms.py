"""dot_product_attention in JAX's transformations, on many devices, and what it holds in memory."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, attention, causal, exact, normals, random_inputs, shrink_blocks, with_gradients
from comparisons import assert_close
from jax.sharding import NamedSharding, PartitionSpec
from tiers import parametrize

import masksafe
from masksafe._core import platforms
from masksafe._core.tiles import divide
from masksafe.attention._pairs import Pairs, unmasked_tiles
from masksafe.attention._plan import Plan

# Many devices.


@parametrize("replicated", [(1, 2)], exhaustive=[(0,)], ids=str)
def test_shard_map(replicated, many_blocks):
    """The gradients of what all devices share are sums over them."""
    ids, of_keys = np.arange(8)[None] // 3, np.arange(8) != 5
    fn = functools.partial(attention, is_causal=True, mask=of_keys, query_segment_ids=ids, key_value_segment_ids=ids)
    live = causal(8, 8) & of_keys & (ids == ids.T)
    specs = tuple(PartitionSpec() if i in replicated else PartitionSpec("x") for i in range(3))
    inputs = [x[:1] if i in replicated else x for i, x in enumerate(random_inputs(8, 8, 8, 2, 2))]
    d_out, mesh = normals(8, 8, 2, 4, seed=6), jax.make_mesh((8,), ("x",))
    sharded = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(inputs, specs, strict=True)]
    split = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("x"))
    out, gradients = with_gradients(split)(sharded, d_out)
    (expected, _), of_all = exact(*(np.broadcast_to(x, (8, *x.shape[1:])) for x in inputs), live, d_out=d_out)
    assert_close(out, expected)
    for i, argument in enumerate(("query", "key", "value")):
        total = of_all[argument].sum(0, keepdims=True) if i in replicated else of_all[argument]
        assert_close(gradients[i], total)


def test_the_device_in_the_key_draws_another_dropout_on_each():
    def fn(key, *qkv):
        return attention(*qkv, dropout_rate=0.5, dropout_key=jax.random.fold_in(key, jax.lax.axis_index("x")))

    mesh, whole = jax.make_mesh((2,), ("x",)), PartitionSpec()
    split = jax.shard_map(fn, mesh=mesh, in_specs=(whole,) * 4, out_specs=PartitionSpec("x"))
    out = np.asarray(jax.jit(split)(jax.random.key(0), *random_inputs(1)))
    assert (out[0] != out[1]).any()


# Programs.


def temporary_bytes(fn, *args):
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


T = 4096
LONG = jax.ShapeDtypeStruct((1, T, 8, 64), jnp.float32)
OF_PAIRS = {"mask": jax.ShapeDtypeStruct((1, 1, T, T), bool), "bias": jax.ShapeDtypeStruct((1, 1, 1, T), jnp.float32)}
ALL_MASKS = dict(local_window_size=256, key_value_seq_lengths=T // 2, dropout_rate=0.1, dropout_key=jax.random.key(0))


@pytest.mark.exhaustive
@pytest.mark.optimised
@pytest.mark.parametrize(
    ("arguments", "static"), [({}, {}), ({}, dict(is_causal=True)), (OF_PAIRS, ALL_MASKS)], ids=str
)
def test_the_gradient_holds_no_array_over_pairs(arguments, static):
    loss = lambda qkv, arguments: jnp.sum(attention(*qkv, **arguments, **static))  # noqa: E731
    assert temporary_bytes(jax.value_and_grad(loss), (LONG,) * 3, arguments) < 60e6


@pytest.mark.slow
@pytest.mark.optimised
def test_forward_mode_and_second_derivatives_hold_no_array_over_pairs():
    def product(q, k, v):
        loss = lambda q: jnp.sum(attention(q, k, v, is_causal=True) ** 2)  # noqa: E731
        return jax.jvp(jax.grad(loss), (q,), (q,))[1]

    def forward(q, k, v):
        with masksafe.forward_mode():
            return jax.jvp(lambda q: attention(q, k, v, is_causal=True), (q,), (q,))

    over_pairs = 8 * T * T * 4
    assert temporary_bytes(forward, LONG, LONG, LONG) < over_pairs / 10
    assert temporary_bytes(product, LONG, LONG, LONG) < over_pairs * 0.3


# Blocks.


class SeenError(Exception):
    """Ends a call as soon as its blocks are known."""


@parametrize(("name", "size"), [("causal", 1)], exhaustive=[*zip(CASES, itertools.cycle((1, 2, 4)), strict=False)][1:])
def test_blocks_with_nothing_unmasked_are_skipped(name, size, choose, monkeypatch):
    arguments, allowed = CASES[name]

    def spy(plan, pairs, queries, keys):
        raise SeenError(unmasked_tiles(plan, pairs, queries, keys), queries, keys)

    monkeypatch.setattr("masksafe.attention._schedule.unmasked_tiles", spy)
    shrink_blocks(choose, size, in_turn_logits_of_all=2**30)
    with jax.disable_jit(), pytest.raises(SeenError) as caught:
        attention(*random_inputs(), **arguments)
    live, queries, keys = caught.value.args
    assert live.shape == (queries.number, keys.number)
    allowed = allowed.any((0, 1))
    for i, j in np.ndindex(live.shape):
        rows, columns = slice(i * queries.size, (i + 1) * queries.size), slice(j * keys.size, (j + 1) * keys.size)
        has_some = allowed[rows, columns].any()
        assert not has_some or live[i, j]
        is_exact = name.split(",")[0] in ("causal", "window", "key lengths", "query lengths")
        if is_exact and "segments" not in name:  # others may keep one in vain
            assert has_some == bool(live[i, j])


def test_segments_in_order_skip_all_other_blocks():
    ids = jnp.arange(64)[None] // 8
    plan, pairs = Plan(1.0, None, 0.0, None, platforms.AttentionSizes()), Pairs(query_segments=ids, key_segments=ids)
    live = unmasked_tiles(plan, pairs, divide(64, 8), divide(64, 8))
    np.testing.assert_array_equal(live, np.eye(8, dtype=bool))
