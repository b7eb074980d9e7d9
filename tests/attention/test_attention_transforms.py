"""dot_product_attention against jax.nn, in JAX's transformations, on many devices, and what it holds in memory."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.test_util import check_grads
from test_attention import CASES, attention, blocks, few_of, many_blocks, random_inputs, shrink_blocks  # noqa: F401

import masksafe
from masksafe._core.tiles import divide
from masksafe.attention import _cudnn
from masksafe.attention._mask import Pairs, live_blocks


def assert_close(actual, expected, tolerance=2e-5):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance)


# Against jax.nn, where no query is dead.

T, S = 6, 7
JAX_NN = list(
    itertools.product(
        [(2, 2), (4, 2), (3, 1)],  # N, K
        [None, "BNTS", "11TS", "B11S", "1NT1"],  # bias
        [None, "BNTS", "B11S"],  # mask
        [False, True],  # is_causal
        [None, (2, 1), 3],  # local_window_size
        [False, True],  # lengths
    )
)


def jax_nn_arguments(heads, bias, mask, is_causal, window, lengths):
    N, K = heads
    sizes = {"B": 2, "N": N, "T": T, "S": S, "1": 1}
    arguments = dict(is_causal=is_causal, local_window_size=window)
    if mask is not None:
        drawn = jax.random.bernoulli(jax.random.key(1), 0.6, [sizes[c] for c in mask])
        # Every query keeps its own key, or the first one where all are causal or short.
        own = jnp.eye(T, S, dtype=bool) if "T" in mask else jnp.ones(S, bool)
        arguments["mask"] = drawn | own | (jnp.arange(S) == 0)
    if lengths:
        arguments |= dict(
            query_seq_lengths=jnp.array([5, 6], jnp.int32), key_value_seq_lengths=jnp.array([6, 7], jnp.int32)
        )
    if bias is not None:
        bias = jax.random.normal(jax.random.key(2), [sizes[c] for c in bias])
    return random_inputs(2, T, S, N, K), bias, arguments


@pytest.mark.parametrize("case", JAX_NN[::107], ids=str)
def test_equals_jax_nn(case, many_blocks):  # noqa: F811
    (query, key, value), bias, arguments = jax_nn_arguments(*case)
    weights = jax.random.normal(jax.random.key(3), query.shape)
    if arguments.get("query_seq_lengths") is not None:  # jax.nn's output is 0 there, its gradient is not
        weights *= (jnp.arange(T) < arguments["query_seq_lengths"][:, None])[..., None, None]

    def of(fn):
        loss = lambda *args: jnp.sum(fn(*args, **arguments) * weights)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2) if bias is None else (0, 1, 2, 3)))

    assert_close(of(attention)(query, key, value, bias), of(jax.nn.dot_product_attention)(query, key, value, bias))


@pytest.mark.slow
@pytest.mark.parametrize("case", JAX_NN, ids=str)
def test_equals_jax_nn_in_all_combinations(case):
    test_equals_jax_nn(case, None)


def test_without_a_batch_and_with_the_residual():
    query, key, value = (x[0] for x in random_inputs(1))
    arguments = dict(
        key_value_seq_lengths=jnp.array([5], jnp.int32), mask=jnp.ones((1, 1, 6, 7), bool), return_residual=True
    )
    actual = attention(query, key, value, **arguments)
    assert_close(actual, jax.nn.dot_product_attention(query, key, value, **arguments))


# Autodiff.

ARGUMENTS = dict(is_causal=True, causal_offset=-1, mask=jnp.arange(7) != 2)


def test_forward_mode(blocks):  # noqa: F811
    inputs = random_inputs()
    fn = functools.partial(attention, return_residual=False, logit_soft_cap=4.0, **ARGUMENTS)
    with masksafe.forward_mode():
        check_grads(fn, inputs, 2, ("fwd", "rev"), rtol=3e-2)


def test_forward_mode_of_the_logsumexp_and_the_bias(many_blocks):  # noqa: F811
    bias = jax.random.normal(jax.random.key(5), (2, 1, 6, 1))
    fn = lambda *args: attention(*args, is_causal=True, return_residual=True)  # noqa: E731
    with masksafe.forward_mode():
        check_grads(fn, (*random_inputs(), bias), 1, ("fwd",), rtol=2e-2)


def test_forward_mode_with_dropout(many_blocks):  # noqa: F811
    query, key, value = random_inputs()
    fn = functools.partial(attention, dropout_rate=0.3, dropout_key=jax.random.key(1), **ARGUMENTS)
    with masksafe.forward_mode():
        check_grads(fn, (query, key, value), 1, ("fwd",), rtol=2e-2)


def test_gradient_through_a_jvp(blocks):  # noqa: F811
    """What mean-flow and consistency models do: a forward derivative inside of a loss."""
    query, key, value = random_inputs()

    def loss(value):
        out, velocity = jax.jvp(lambda q: attention(q, key, value, **ARGUMENTS), (query,), (jnp.ones_like(query),))
        return jnp.sum((out - 0.3 * velocity) ** 2)

    with masksafe.forward_mode():
        check_grads(loss, (value,), 1, ("rev",), rtol=2e-2)


def test_hessian_and_reverse_over_reverse(blocks):  # noqa: F811
    query, key, value = random_inputs(1, 5, 5, 1)
    loss = lambda q: jnp.sum(attention(q, key, value, **ARGUMENTS | dict(mask=None)) ** 2)  # noqa: E731
    forward_over_reverse = jax.hessian(loss)(query)
    reverse_over_reverse = jax.jacrev(jax.grad(loss))(query)
    assert_close(forward_over_reverse, reverse_over_reverse)
    direction = jnp.cos(jnp.arange(query.size, dtype=jnp.float32)).reshape(query.shape)
    step = 1e-2
    difference = (jax.grad(loss)(query + step * direction) - jax.grad(loss)(query - step * direction)) / (2 * step)
    product = jnp.tensordot(forward_over_reverse, direction, query.ndim)
    np.testing.assert_allclose(product, difference, rtol=1e-2, atol=1e-3)
    assert (product[:, 0] == 0).all()  # the first query has no key


# Transformations.


@pytest.mark.parametrize("over", few_of(range(5), 0, 4))
def test_vmap_over_any_argument(over, many_blocks):  # noqa: F811
    query, key, value = random_inputs(3)
    bias = jax.random.normal(jax.random.key(5), (3, 1, 6, 7))
    lengths = jnp.array([7, 0, 4])
    args = [query[0], key[0], value[0], bias[0], lengths[:1]]
    stacked = [query, key, value, bias, lengths[:, None]][over]
    fn = lambda q, k, v, b, n: attention(q, k, v, b, key_value_seq_lengths=n, is_causal=True)  # noqa: E731
    grad = jax.grad(lambda *args: jnp.sum(fn(*args) ** 2), (0, 1, 2, 3))
    in_axes = [0 if i == over else None for i in range(5)]
    for op in (fn, grad):
        batched = jax.vmap(op, in_axes)(*args[:over], stacked, *args[over + 1 :])
        for i in range(3):
            one = op(*args[:over], stacked[i], *args[over + 1 :])
            assert_close(jax.tree.map(lambda x, i=i: x[i], batched), one)


@pytest.mark.parametrize("name", few_of(["segments", "pairs"], "segments"))
def test_jit_scan_and_remat(name, many_blocks):  # noqa: F811
    arguments, _ = CASES[name]
    query, key, value = random_inputs()
    loss = lambda q, k, v: jnp.sum(attention(q, k, v, **arguments) ** 2)  # noqa: E731
    expected = jax.grad(loss, (0, 1, 2))(query, key, value)
    assert_close(jax.jit(jax.grad(loss, (0, 1, 2)))(query, key, value), expected)
    assert_close(jax.grad(jax.checkpoint(loss), (0, 1, 2))(query, key, value), expected)
    scanned = lambda *args: jax.lax.scan(lambda c, _: (c + loss(*args), None), 0.0, None, 2)[0]  # noqa: E731
    assert_close(jax.grad(scanned, (0, 1, 2))(query, key, value), jax.tree.map(lambda g: 2 * g, expected))


def test_transposed_and_strided_inputs(many_blocks):  # noqa: F811
    query, key, value = random_inputs()
    expected = attention(query, key, value, **ARGUMENTS)
    np.testing.assert_allclose(attention(jnp.asarray(np.asfortranarray(query)), key, value, **ARGUMENTS), expected)
    keys = jnp.repeat(key, 2, axis=1)[:, ::2]
    np.testing.assert_allclose(attention(query, keys, value, **ARGUMENTS), expected)


def test_debug_nans_is_quiet_on_padding(blocks):  # noqa: F811
    query, key, value = random_inputs()
    padded = key.at[:, 4:].set(jnp.nan), value.at[:, 4:].set(jnp.nan)
    lengths = jnp.array([4, 0])
    with jax.debug_nans(True):
        loss = lambda *args: jnp.sum(attention(*args, key_value_seq_lengths=lengths) ** 2)  # noqa: E731
        for gradient in jax.grad(loss, (0, 1, 2))(query, *padded):
            assert np.isfinite(gradient).all()


def test_debug_nans_is_quiet_without_a_batch_and_with_a_bias_and_a_scale():
    query, key, value = (x[0] for x in random_inputs(1))
    mask = jnp.arange(7) != 3
    bias = jnp.zeros((2, 6, 7)).at[:, :, 3].set(jnp.nan)
    poisoned = key.at[3].set(jnp.nan)
    with jax.debug_nans(True):
        assert np.isfinite(attention(query, poisoned, value, bias, mask, scale=jnp.float32(0.5))).all()


@pytest.mark.parametrize("errors", [checkify.nan_checks, checkify.index_checks], ids=["nan", "index"])
def test_checkify_is_quiet_on_padding(errors, blocks):  # noqa: F811
    query, key, value = random_inputs()
    padded = key.at[:, 4:].set(jnp.nan), value.at[:, 4:].set(jnp.nan)
    loss = lambda *args: jnp.sum(attention(*args, mask=jnp.arange(7) < 4))  # noqa: E731
    error, _ = checkify.checkify(loss, errors=errors)(query, *padded)
    error.throw()


def test_symbolic_sizes():
    batch, time = jax.export.symbolic_shape("b, t")
    shapes = [jax.ShapeDtypeStruct((batch, time, 2, 4), jnp.float32)] * 3
    exported = jax.export.export(jax.jit(lambda q, k, v: attention(q, k, v, is_causal=True)))(*shapes)
    inputs = random_inputs(2, 7, 7, 2, 2)
    np.testing.assert_allclose(exported.call(*inputs), attention(*inputs, is_causal=True), rtol=1e-5, atol=1e-6)


# Many devices.

SPECS = {
    "batch": PartitionSpec("x"),
    "heads": PartitionSpec(None, None, "x"),
    "batch and heads": PartitionSpec("x", None, "y"),
    "queries": PartitionSpec(None, "x"),
}
SEGMENTS = jnp.arange(8)[None] // 3
SHARDED = [
    dict(bias=jnp.where(jnp.arange(8) < 5, 0.1, -jnp.inf) + jnp.zeros((8, 1))),
    dict(
        is_causal=True,
        mask=jnp.arange(8) != 5,
        query_segment_ids=SEGMENTS,
        key_value_segment_ids=SEGMENTS,
    ),
]


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("spec", few_of(SPECS, "batch"))
@pytest.mark.parametrize("arguments", SHARDED, ids=",".join)
def test_sharded_arrays_agree_with_one_device(axis_type, spec, arguments, many_blocks):  # noqa: F811
    if spec == "batch":
        arguments = arguments | dict(key_value_seq_lengths=jnp.array([8, 0, 3, 5, 8, 8, 1, 2]))
    inputs = random_inputs(8, 8, 8, 8, 4)
    loss = lambda q, k, v: jnp.sum(attention(q, k, v, **arguments) ** 2)  # noqa: E731
    expected = jax.value_and_grad(loss, (0, 1, 2))(*inputs)
    shape = {"batch": (8,), "heads": (4,), "batch and heads": (2, 4), "queries": (8,)}[spec]
    mesh = jax.make_mesh(shape, ("x", "y")[: len(shape)], (axis_type,) * len(shape))
    of_keys = PartitionSpec() if spec == "queries" else SPECS[spec]
    with jax.set_mesh(mesh):
        sharded = [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip(inputs, (SPECS[spec], of_keys, of_keys), strict=True)
        ]
        actual = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*sharded)
    assert_close(actual, expected)


@pytest.mark.parametrize("arguments", SHARDED, ids=",".join)
@pytest.mark.parametrize("replicated", few_of([(), (1, 2), (0,)], (1, 2)), ids=str)
def test_shard_map(arguments, replicated, many_blocks):  # noqa: F811
    inputs = random_inputs(8, 8, 8, 2, 2)
    mesh = jax.make_mesh((8,), ("x",))
    specs = tuple(PartitionSpec() if i in replicated else PartitionSpec("x") for i in range(3))
    inputs = [x[:1] if i in replicated else x for i, x in enumerate(inputs)]
    sharded = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(inputs, specs, strict=True)]
    whole = lambda *args: attention(*(jnp.broadcast_to(x, (8, *x.shape[1:])) for x in args), **arguments)  # noqa: E731
    split = jax.shard_map(
        lambda *args: attention(*args, **arguments), mesh=mesh, in_specs=specs, out_specs=PartitionSpec("x")
    )
    for fn in (lambda op: op, lambda op: jax.grad(lambda *args: jnp.sum(op(*args) ** 2), (0, 1, 2))):
        assert_close(jax.jit(fn(split))(*sharded), fn(whole)(*inputs))


# Programs.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lowers_for_cuda(dtype):
    query, key, value = random_inputs(2, 1200, 1300, 2, 1, 64, dtype=dtype)
    loss = lambda *args: attention(*args, is_causal=True).astype(jnp.float32).sum()  # noqa: E731
    jax.export.export(jax.jit(jax.value_and_grad(loss, (0, 1, 2))), platforms=["cuda"])(query, key, value)


def temporary_bytes(fn, *args):
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


MIB = 2**20
LONG = jax.ShapeDtypeStruct((1, 8192, 8, 64), jnp.float32)


@pytest.mark.parametrize(
    "arguments",
    few_of(
        [{}, {"is_causal": True}, {"local_window_size": 256}, {"key_value_seq_lengths": 4000}], {}, {"is_causal": True}
    ),
    ids=lambda a: ",".join(a) or "plain",
)
def test_memory_of_the_gradient(arguments):
    loss = lambda q, k, v: jnp.sum(attention(q, k, v, **arguments))  # noqa: E731
    assert temporary_bytes(jax.value_and_grad(loss, (0, 1, 2)), LONG, LONG, LONG) < 150e6


def test_mask_and_bias_are_not_expanded():
    mask = jax.ShapeDtypeStruct((1, 1, 8192, 8192), jnp.bool_)
    bias = jax.ShapeDtypeStruct((1, 1, 1, 8192), jnp.float32)
    loss = lambda q, k, v, b, m: jnp.sum(attention(q, k, v, b, m))  # noqa: E731
    assert temporary_bytes(jax.value_and_grad(loss, (0, 1, 2, 3)), LONG, LONG, LONG, bias, mask) < 150e6


def test_dropout_is_not_stored():
    key = jax.random.key(0)
    loss = lambda q, k, v: jnp.sum(attention(q, k, v, dropout_rate=0.1, dropout_key=key))  # noqa: E731
    assert temporary_bytes(jax.value_and_grad(loss, (0, 1, 2)), LONG, LONG, LONG) < 150e6


def test_forward_mode_and_second_derivatives_hold_no_array_over_pairs():
    def product(q, k, v):
        loss = lambda q: jnp.sum(attention(q, k, v, is_causal=True) ** 2)  # noqa: E731
        return jax.jvp(jax.grad(loss), (q,), (q,))[1]

    def forward(q, k, v):
        with masksafe.forward_mode():
            return jax.jvp(lambda q: attention(q, k, v, is_causal=True), (q,), (q,))

    over_pairs = 8 * 8192 * 8192 * 4
    assert temporary_bytes(forward, LONG, LONG, LONG) < over_pairs / 10
    assert temporary_bytes(product, LONG, LONG, LONG) < over_pairs / 4


# Blocks.


@pytest.mark.parametrize("name", few_of(CASES, "causal, dead rows", "window", "key lengths", "segments"))
@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_blocks_with_nothing_unmasked_are_skipped(name, size, monkeypatch):
    arguments, allowed = CASES[name]
    seen = {}
    original = live_blocks

    def spy(pairs: Pairs, queries, keys):
        seen.update(live=original(pairs, queries, keys), queries=queries, keys=keys)
        return seen["live"]

    monkeypatch.setattr("masksafe.attention._blockwise.live_blocks", spy)
    shrink_blocks(monkeypatch, size)
    monkeypatch.setattr("masksafe._core.platforms.IN_TURN_LOGITS_OF_ALL", 2**30)
    with jax.disable_jit():
        attention(*random_inputs(), **arguments)
    allowed = np.broadcast_to(allowed, (2, 2, 6, 7)).any((0, 1))
    for i, j in np.ndindex(seen["live"].shape):
        of_queries, of_keys = seen["queries"].size, seen["keys"].size
        rows, columns = slice(i * of_queries, (i + 1) * of_queries), slice(j * of_keys, (j + 1) * of_keys)
        has_some = allowed[rows, columns].any()
        assert not has_some or seen["live"][i, j]
        if name.split(",")[0] in ("causal", "window", "key lengths", "query lengths"):  # others may keep one in vain
            assert has_some == bool(seen["live"][i, j])


def test_segments_in_order_skip_all_other_blocks():
    ids = jnp.arange(64)[None] // 8
    live = live_blocks(Pairs(query_segments=ids, key_segments=ids), divide(64, 8), divide(64, 8))
    np.testing.assert_array_equal(live, np.eye(8, dtype=bool))


@pytest.mark.parametrize(("length", "target"), [(1, 4), (7, 4), (8, 4), (9, 4), (13, 4)])
def test_blocks_cover_everything_once(length, target):
    division = divide(length, target)
    spans = [division.tile(i) for i in range(division.number)]
    owned = [[n for n in range(int(s.start), int(s.start) + s.size) if n >= int(s.first)] for s in spans]
    assert [n for part in owned for n in part] == list(range(length))
    assert division.size <= target


# cuDNN. Its kernel is not at hand here: jax.nn's own form, whose dead queries average over masked keys and whose NaN
# under the mask reach everything as well, stands in for it.


@pytest.fixture
def fake_cudnn(monkeypatch):
    original = jax.nn.dot_product_attention

    def stand_in(*args, implementation, **arguments):
        assert implementation == "cudnn"
        return original(*args, implementation="xla", **arguments)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr(_cudnn, "_backend", lambda: "gpu")
    return functools.partial(attention, implementation="cudnn")


@pytest.mark.parametrize("name", ["causal", "key lengths", "query lengths", "pairs", "bias of -inf", "window"])
def test_contract_is_kept_around_cudnn(name, fake_cudnn):
    arguments, live = CASES[name]
    query, key, value = random_inputs(dtype=jnp.bfloat16)
    live = np.broadcast_to(live, (2, 2, 6, 7))
    dead_keys, dead_queries = ~live.any((1, 2))[..., None, None], ~live.any(3).transpose(0, 2, 1)[..., None]
    loss = lambda fn: jax.value_and_grad(  # noqa: E731
        lambda *args: jnp.sum(fn(*args, **arguments).astype(jnp.float32) ** 2), (0, 1, 2)
    )
    clean = loss(fake_cudnn)(query, key, value)
    assert_close(jax.tree.map(np.float32, clean), jax.tree.map(np.float32, loss(attention)(query, key, value)), 5e-2)
    poisoned = [jnp.where(m, jnp.nan, x) for m, x in ((dead_queries, query), (dead_keys, key), (dead_keys, value))]
    dirty = loss(fake_cudnn)(*poisoned)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (fake_cudnn(query, key, value, **arguments)[dead_queries[..., 0]] == 0).all()


def test_cudnn_hides_no_nan(fake_cudnn):
    query, key, value = random_inputs(1, 6, 6, 1, dtype=jnp.bfloat16)
    out = fake_cudnn(query, key, value.at[0, 3].set(jnp.nan), is_causal=True)
    np.testing.assert_array_equal(np.isnan(out)[0, :, 0].all(1), np.arange(6) >= 3)
    np.testing.assert_array_equal(np.isnan(out)[0, :, 0].any(1), np.arange(6) >= 3)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (dict(logit_soft_cap=2.0), "no logit_soft_cap"),
        (dict(causal_offset=1), "no causal_offset"),
        (dict(return_residual=True), "no gradient"),
        (dict(dropout_rate=0.1, dropout_key=jax.random.key(0)), "takes no key"),
    ],
)
def test_cudnn_refuses_what_it_has_not(arguments, reason, fake_cudnn):
    with pytest.raises(ValueError, match=f"^dot_product_attention: implementation: got value 'cudnn'.*{reason}"):
        fake_cudnn(*random_inputs(dtype=jnp.bfloat16), **arguments)
    with pytest.raises(ValueError, match="the dtype is float32, not float16 or bfloat16"):
        fake_cudnn(*random_inputs())
