"""dot_product_attention on meshes with explicit axes: one device's answer, at the cost of a `jax.shard_map`."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import attention, below, by_formula, normals, other_derivatives, window
from comparisons import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import parametrize

B, T, S, N, H = 4, 8, 12, 8, 8
TABLE = jax.device_put(normals(N, T + S, seed=9))
SEGMENTS = dict(query_segment_ids=np.arange(T)[None] // 3, key_value_segment_ids=np.arange(S)[None] // 4)

# How queries are split, how keys and values, and the number of key heads.
SPLITS = {
    "groups of heads": (P("x", None, "y"), P("x"), 4),
    "batch and heads": (P("x", None, "y"), P("x", None, "y"), 8),
    "batch": (P("x"), P("x"), 8),
    "more devices than key heads": (P("x", None, "y"), P("x"), 2),
    "heads of one key head": (P(None, None, "y"), P(), 1),
    "queries alone": (P("y"), P(), 8),
    "keys alone": (P(), P("y"), 8),
    "time": (P("x", "y"), P("x", "y"), 8),
    "width": (P("x", None, None, "y"), P(None, None, None, "y"), 8),
    "width alone": (P(None, None, None, "y"), P(None, None, None, "y"), 8),
}
# With the floats among them, which get gradients.
MASKS = {
    "pairs": (
        dict(mask=normals(B, 1, T, S, seed=3) < 0.5),
        dict(bias=normals(1, N, 1, S, seed=4), scale=np.float32(0.3), sinks=normals(N, seed=5)),
    ),
    "structure": (
        dict(is_causal=True, local_window_size=5, key_value_seq_lengths=np.array([8, 0, 3, 5]), **SEGMENTS),
        {},
    ),
    "nothing": ({}, {}),
    "offsets": (dict(is_causal=True, causal_offset=np.array([4, 0, -3, 2]), logit_soft_cap=2.0), {}),
    "positions": (dict(is_causal=True, key_positions=np.arange(B * S).reshape(B, S) * 5 % 11), {}),
    "mods": (
        dict(
            score_mod=lambda x, b, h, q, k: x * (1 + b) - TABLE[h, q + k] * h,
            mask_mod=lambda b, h, q, k: (q + k + h + b) % 3 > 0,
            key_positions=np.arange(B * S).reshape(B, S) % S,
        ),
        {},
    ),
    "dropout": (dict(dropout_rate=0.3, dropout_key=jax.random.key(3)), {}),
}


def mesh_of(kinds=(AxisType.Explicit,) * 2):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)


def put(mesh, args, specs):
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]


def inputs_of(key_heads):
    shapes = (B, T, N, H), (B, S, key_heads, H), (B, S, key_heads, 4), (B, T, N, 4)
    return [normals(*shape, seed=i) for i, shape in enumerate(shapes)]


@functools.cache
def step_of(name):
    """One program on one device for many splits."""
    arguments, _ = MASKS[name]

    @jax.jit
    def step(query, key, value, d_out, floats):
        def loss(query, key, value, floats):
            out, lse = attention(query, key, value, return_residual=True, **arguments, **floats)
            return jnp.sum(out * d_out) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) * d_out[..., 0])

        return jax.value_and_grad(loss, (0, 1, 2, 3))(query, key, value, floats)

    return step


# Of masks that have an array for each of their axes those splits that group heads otherwise, or that split no problem.
WITH_PAIRS = "more devices than key heads", "time", "width", "width alone"


@parametrize(
    "split_and_masks",
    [("groups of heads", "pairs")],
    exhaustive=[*zip([*SPLITS][1:7], [*MASKS][1:], strict=True), *((split, "pairs") for split in WITH_PAIRS)],
    ids=", ".join,
)
def test_value_and_gradients_are_those_of_one_device(split_and_masks, many_blocks):
    split, name = split_and_masks
    of_queries, of_keys, key_heads = SPLITS[split]
    inputs, step, floats = inputs_of(key_heads), step_of(name), MASKS[name][1]
    mesh = mesh_of()
    sharded = put(mesh, inputs, (of_queries, of_keys, of_keys, P(*of_queries[:3])))
    with contextlib.nullcontext() if name == "pairs" else jax.set_mesh(mesh):
        value, gradients = step(*sharded, floats)
    assert_close((value, gradients), step(*inputs, floats))
    for gradient, x in zip(gradients, sharded[:3], strict=False):
        assert gradient.sharding.is_equivalent_to(x.sharding, x.ndim)


@pytest.mark.exhaustive
def test_other_derivatives_are_those_of_one_device():
    inputs, mesh = tuple(inputs_of(8)[:3]), mesh_of()
    derivatives = jax.jit(functools.partial(other_derivatives, functools.partial(attention, **MASKS["structure"][0])))
    live = window(T, S, 5, 0) & below([8, 0, 3, 5], S)[:, None, None]
    live &= SEGMENTS["key_value_segment_ids"] == SEGMENTS["query_segment_ids"].T
    formula = jax.jit(functools.partial(other_derivatives, functools.partial(by_formula, live)))
    expected = formula(inputs, tuple(map(np.cos, inputs)))
    with jax.set_mesh(mesh):
        split = tuple(put(mesh, inputs, (P("x", None, "y"),) * 3))
        assert_close(derivatives(split, tuple(map(jnp.cos, split))), expected, 1e-3, 1e-4)


@pytest.mark.exhaustive
def test_memory_and_collectives_are_those_of_a_shard_map():
    mesh, spec = jax.make_mesh((2, 2), ("x", "y")), P("x", None, "y")
    fn = functools.partial(attention, is_causal=True)
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((4, 1024, 4, 32), jnp.float32, sharding=NamedSharding(mesh, spec))
        by_hand = jax.shard_map(fn, in_specs=(spec,) * 3, out_specs=spec)
        step = lambda fn: jax.jit(jax.grad(lambda *args: jnp.sum(fn(*args) ** 2), (0, 1, 2)))  # noqa: E731
        ours, theirs = (step(f).lower(x, x, x).compile() for f in (fn, by_hand))
    memory = [program.memory_analysis().temp_size_in_bytes for program in (ours, theirs)]
    assert memory[0] <= 1.1 * memory[1]
    assert not any(name in ours.as_text() for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute"))
