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
from masksafe._core.tiles import Tile, even_size
from masksafe.attention import _blocks
from masksafe.attention._pairs import Pairs, Side, may_see
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


@parametrize(("name", "size"), [("causal", 1)], exhaustive=[*zip(CASES, itertools.cycle((1, 2, 4)), strict=False)][1:])
def test_blocks_with_nothing_unmasked_are_skipped(name, size, choose, monkeypatch):
    arguments, allowed = CASES[name]
    firsts, original = [], _blocks.block_of

    def spy(plan, own, places, *rest):
        firsts.append([int(places[axis].first) for axis in "ts"])
        return original(plan, own, places, *rest)

    monkeypatch.setattr(_blocks, "block_of", spy)
    shrink_blocks(choose, size, in_turn_logits_of_all=2**30)
    choose(form="cpu", executors_left_out=("formula",))
    with jax.disable_jit():
        attention(*random_inputs(), **arguments)
    allowed = allowed.any((0, 1))
    queries, keys = (even_size(n, size) for n in allowed.shape)
    is_exact = name.split(",")[0] in ("causal", "window", "key lengths", "query lengths") and "segments" not in name
    is_exact &= allowed.shape[0] % queries == 0 == allowed.shape[1] % keys
    for t, s in itertools.product(range(0, allowed.shape[0], queries), range(0, allowed.shape[1], keys)):
        has_some, is_visited = allowed[t : t + queries, s : s + keys].any(), [t, s] in firsts
        assert is_visited or not has_some
        if is_exact:  # others may keep one in vain
            assert has_some or not is_visited


def test_queries_without_cotangents_skip_blocks_of_the_reverse_pass(choose, monkeypatch):
    """Padding behind a causal mask needs no other mask, if the loss has one."""
    firsts, original = [], _blocks.block_of

    def spy(plan, own, places, *rest):
        firsts.append(int(places["t"].first))
        return original(plan, own, places, *rest)

    shrink_blocks(choose, 2)
    choose(form="cpu", executors_left_out=("formula",))
    with jax.disable_jit():
        _, pull_back = jax.vjp(functools.partial(attention, is_causal=True), *random_inputs(1, 6, 6))
        monkeypatch.setattr(_blocks, "block_of", spy)
        pull_back(jnp.zeros((1, 6, 2, 4)).at[:, 2:4].set(1))
    assert set(firsts) == {2}


def test_segments_in_order_skip_all_other_blocks():
    ids = jnp.arange(64)[None] // 8
    plan, side = Plan(1.0, None, 0.0, None, platforms.AttentionSizes()), Side(segment=ids)
    for i, j in np.ndindex(8, 8):
        places = {axis: Tile(8 * start, 8, 8 * start, False) for axis, start in (("t", i), ("s", j))}
        assert bool(may_see(plan, Pairs(side, side).at(places), places)) == (i == j)
