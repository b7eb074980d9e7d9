"""Labels and masks of sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import parametrize

import masksafe

RNG = np.random.default_rng(0)
B, T = 2, 16
TOKENS = RNG.integers(1, 100, (B, T))
IDS = np.sort(RNG.integers(0, 4, (B, T)), 1)
WHERE = np.arange(T) < np.array([[13], [0]])


def by_hand(tokens, ids, where, steps):
    """Token by token."""
    labels, mask = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
    for b, t in np.ndindex(tokens.shape):
        if t + steps < tokens.shape[1] and ids[b, t] == ids[b, t + steps] and where[b, t] and where[b, t + steps]:
            labels[b, t], mask[b, t] = tokens[b, t + steps], True
    return labels, mask


def assert_same(results, expected):
    jax.tree.map(np.testing.assert_array_equal, tuple(results), tuple(map(np.array, expected)))


@parametrize("steps", [3], exhaustive=[1, T - 1, T, T + 5])
def test_the_token_some_steps_further_on(steps):
    for ids, where in ((None, None), (IDS, None), (None, WHERE), (IDS, WHERE), (IDS[:1], WHERE[1:]), (IDS[0], None)):
        expected_ids = np.broadcast_to(0 if ids is None else ids, (B, T))
        expected_where = np.broadcast_to(True if where is None else where, (B, T))
        results = masksafe.next_tokens(TOKENS, ids, steps=steps, where=where)
        assert_same(results, by_hand(TOKENS, expected_ids, expected_where, steps))


def test_a_number_that_comes_back_in_its_row_counts_as_one_document():
    labels, mask = masksafe.next_tokens(np.array([5, 6, 7]), np.array([1, 2, 1]), steps=2)
    assert_same((labels, mask), ([7, 0, 0], [True, False, False]))


def test_no_array_of_the_size_of_the_tokens_is_kept():
    tokens, where = (jax.ShapeDtypeStruct((256, 2048), dtype) for dtype in (jnp.int32, jnp.bool_))
    # jax 0.10 keeps what the mask is made of, for the labels.
    most = 256 if jax.__version_info__ >= (0, 12) else 1.01 * 4 * tokens.size
    for args in ((tokens,), (tokens, tokens), (tokens, None, where), (tokens, tokens, where)):
        labels = jax.jit(lambda tokens, ids=None, where=None: masksafe.next_tokens(tokens, ids, where=where))
        program = labels.lower(*args).compile()
        assert program.memory_analysis().temp_size_in_bytes <= most


def test_garbage_in_padding_changes_nothing():
    garbage = np.where(WHERE, TOKENS, -(2**31))
    expected = masksafe.next_tokens(TOKENS, IDS, where=WHERE)
    assert_same(masksafe.next_tokens(garbage, np.where(WHERE, IDS, 2**31 - 1), where=WHERE), expected)


def test_labels_have_the_dtype_of_tokens():
    for dtype in ("uint8", "uint16", "int32", "uint32"):
        largest = np.array([1, 0, np.iinfo(dtype).max], dtype)
        labels, mask = masksafe.next_tokens(largest)
        assert labels.dtype == dtype
        assert_same((labels, mask), ([0, np.iinfo(dtype).max, 0], [True, True, False]))


def over_time(names, shape, **options):
    """`next_tokens` of arrays whose time these axes of a mesh split."""
    axes, split = ("x", "y")[: len(shape)], P(None, names)
    mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(shape))

    def on_each(tokens, ids, where=None):
        return masksafe.next_tokens(tokens, ids, where=where, axis_name=names, **options)

    return jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=split, out_specs=(split, split)))


@parametrize("steps", [6], exhaustive=[1, 4, 9, 40])
def test_time_over_devices(steps):
    mapped = over_time("x", (4,), steps=steps)
    for dtype in ("int32", "uint32")[: 2 if steps == 6 else 1]:
        tokens = (TOKENS + (2**31 if dtype == "uint32" else 0)).astype(dtype)
        assert_same(mapped(tokens, IDS, WHERE), by_hand(tokens, IDS, WHERE, steps))


@parametrize("names", [("y", "x")], exhaustive=[("x", "y")])
def test_time_over_two_axes_of_a_mesh(names):
    """Of one document: where it ends, nothing but the number of devices tells."""
    mapped, ids = over_time(names, (2, 4), steps=3), np.zeros((B, T), int)
    assert_same(mapped(TOKENS, ids), by_hand(TOKENS, ids, np.ones((B, T), bool), 3))


def test_one_exchange_of_the_first_tokens_of_the_next_device():
    text = over_time("x", (4,)).lower(TOKENS, IDS).as_text()
    (exchange,) = [line for line in text.splitlines() if "collective_permute" in line]
    assert f"tensor<2x{B}x1xi32>" in exchange


@parametrize("spec", [P("x", "y")], exhaustive=[P("x"), P(None, "y")], ids=str)
@parametrize("kind", [AxisType.Auto], exhaustive=[AxisType.Explicit], ids=str)
def test_tokens_split_over_a_mesh(spec, kind):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        tokens, ids, where = (jax.device_put(a, NamedSharding(mesh, spec)) for a in (TOKENS, IDS, WHERE))
        step = jax.jit(lambda *args: masksafe.next_tokens(*args[:2], steps=2, where=args[2]))
        program = step.lower(tokens, ids, where).compile()
        results = program(tokens, ids, where)
        whole = step(tokens, ids[:1] if spec[0] is None else ids, where)
    assert "all-gather" not in program.as_text()
    assert_same(results, by_hand(TOKENS, IDS, WHERE, 2))
    assert whole[0].shape == (B, T)


def test_in_a_vmap():
    results = jax.vmap(masksafe.next_tokens)(TOKENS, IDS)
    assert_same(results, masksafe.next_tokens(TOKENS, IDS))


LENGTHS = np.array([3, 4])
REFUSED = [
    ("next_tokens", {"tokens": np.zeros((B, T), np.float32)}, TypeError, "tokens: got dtype float32"),
    ("next_tokens", {"tokens": 1}, ValueError, r"tokens: got shape \(\)"),
    ("next_tokens", {"segment_ids": np.zeros((B, T), np.float32)}, TypeError, "segment_ids: got dtype float32"),
    ("next_tokens", {"segment_ids": np.zeros(3, int)}, ValueError, r"segment_ids: got shape \(3,\)"),
    ("next_tokens", {"where": WHERE.astype(int)}, TypeError, "where: got dtype"),
    ("next_tokens", {"where": np.ones(3, bool)}, ValueError, r"where: got shape \(3,\)"),
    ("next_tokens", {"steps": 0}, ValueError, "steps: got value 0; expected an int of at least 1"),
    ("next_tokens", {"steps": 1.5}, TypeError, "steps: got type float"),
    ("next_tokens", {"axis_name": "x"}, ValueError, "axis_name: got value 'x'"),
    ("length_mask", {"lengths": np.zeros(2, np.float32)}, TypeError, "lengths: got dtype float32"),
    ("length_mask", {"size": -1}, ValueError, "size: got value -1"),
    ("length_mask", {"lengths": LENGTHS}, ValueError, r"1 of 2 lengths are outside \[0, 3\]; first at \(1,\): 4"),
]


@pytest.mark.parametrize(("op", "wrong", "error", "text"), REFUSED)
def test_refusals(op, wrong, error, text):
    right = {"next_tokens": {"tokens": TOKENS}, "length_mask": {"lengths": LENGTHS - 1, "size": 3}}[op]
    with masksafe.label_checks("raise"):
        getattr(masksafe, op)(**right)
        with pytest.raises(error, match=f"^{op}: {text}"):
            getattr(masksafe, op)(**right | wrong)


def test_symbolic_sizes():
    (time,) = jax.export.symbolic_shape("time")
    tokens = jax.ShapeDtypeStruct((time,), jnp.int32)
    both = jax.jit(lambda x: (masksafe.next_tokens(x, steps=2)[0], masksafe.length_mask(np.array([1]), x.shape[0])))
    labels, mask = jax.export.export(both)(tokens).call(np.array([4, 5, 6], np.int32))
    np.testing.assert_array_equal(labels, [6, 0, 0])
    np.testing.assert_array_equal(mask, [[True, False, False]])


# Lengths.


def test_a_mask_of_lengths():
    lengths = np.array([[0, 3], [5, 9]], np.uint8)
    expected = np.arange(300) < lengths[..., None]
    np.testing.assert_array_equal(masksafe.length_mask(lengths, 300), expected)
    np.testing.assert_array_equal(jax.jit(masksafe.length_mask, static_argnums=1)(lengths, 300), expected)
    np.testing.assert_array_equal(masksafe.length_mask(np.array([-1, 2**33]), 2), [[False, False], [True, True]])
    assert masksafe.length_mask(2, 3).shape == (3,)
    with pytest.raises(TypeError, match=r"^length_mask: size: got a traced array"):
        jax.jit(masksafe.length_mask)(lengths, 3)
