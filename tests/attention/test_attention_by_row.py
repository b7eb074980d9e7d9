"""The form of attention for an accelerator, run on the CPU: values, derivatives, garbage under the mask, shardings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    CASES,
    assert_close,
    attention,
    by_rows,
    causal,
    exact,
    few_of,
    normals,
    random_inputs,
    replaced,
    with_gradients,
)
from jax.sharding import AxisType, PartitionSpec

import masksafe


@pytest.fixture(autouse=True, params=["tiles", pytest.param("at once", marks=pytest.mark.slow)])
def by_row(request, choose):
    """Tiles of few queries, one sample and head at a time, or all at once."""
    if request.param == "tiles":
        by_rows(choose)
    else:
        choose(form="elsewhere")


def gradients_of(expected, *names):
    return [expected[name] for name in names]


@pytest.mark.parametrize("name", few_of(CASES, "causal", "window", "segments", "bias of -inf"))
def test_values_gradients_and_garbage(name):
    arguments, live = CASES[name]
    inputs, cotangents = random_inputs(), (normals(2, 6, 2, 4, seed=6), normals(2, 6, 2, seed=7))
    bias = np.asarray(arguments.get("bias", 0.0))
    run = with_gradients(functools.partial(attention, return_residual=True, logit_soft_cap=3.0, **arguments))
    outputs, gradients = run(inputs, cotangents)
    bias = np.where(live, bias, 0)
    expected, of_all = exact(*inputs, live, bias, soft_cap=3.0, d_out=cotangents[0], d_lse=cotangents[1])
    assert_close(outputs, expected)
    assert_close(gradients, gradients_of(of_all, "query", "key", "value"))
    of_queries, of_keys = ~live.any((1, 3))[..., None, None], ~live.any((1, 2))[..., None, None]
    for garbage in (np.nan, -np.inf, 3e38):
        filled = [
            np.where(m, np.float32(garbage), x) for x, m in zip(inputs, (of_queries, of_keys, of_keys), strict=True)
        ]
        jax.tree.map(np.testing.assert_array_equal, run(filled, cotangents), (outputs, gradients))


@pytest.mark.parametrize("name", few_of(CASES, "causal", "window", "segments"))
def test_a_bad_element_shows_where_it_is_seen_and_nowhere_else(name):
    arguments, live = CASES[name]
    inputs, d_out = random_inputs(width=40), normals(2, 6, 2, 40, seed=6)
    run = with_gradients(functools.partial(attention, **arguments))
    bad_value = [*inputs[:2], replaced(inputs[2], np.s_[0, 1, 0, 35], np.inf)]
    out, (d_query, _, _) = run(bad_value, d_out)
    sees = np.moveaxis(live[:, :, :, 1], 1, 2) & (np.arange(2) == 0)[:, None, None]
    assert (np.isnan(out) == sees[..., None]).all()
    assert (np.isnan(d_query) == sees[..., None]).all()
    bad_key = [inputs[0], replaced(inputs[1], np.s_[0, 1, 0, 2], -np.inf), inputs[2]]
    assert (np.isnan(run(bad_key, d_out)[0]) == sees[..., None]).all()
    _, (_, _, d_value) = run(inputs, replaced(d_out, np.s_[0, 3, 1, 37], np.nan))
    seen = live[:, 1, 3] & (np.arange(2) == 0)[:, None]
    assert (np.isnan(d_value) == seen[:, :, None, None]).all()


def test_gradient_of_a_bias_over_all_pairs_or_fewer():
    inputs, d_out = random_inputs(B=2, N=4, K=2), normals(2, 6, 4, 4, seed=6)
    for shape in ((1, 4, 6, 7), (2, 1, 6, 1)):
        bias = normals(*shape, seed=5)
        _, gradients = with_gradients(functools.partial(attention, is_causal=True))((*inputs, bias), d_out)
        _, of_all = exact(*inputs, causal(6, 7), bias, d_out=d_out)
        full = (1,) * (4 - len(shape)) + shape
        axes = tuple(i for i in range(4) if full[i] == 1)
        assert_close(gradients[3], of_all["bias"].sum(axes, keepdims=True).reshape(shape))
        assert_close(gradients[:3], gradients_of(of_all, "query", "key", "value"))


def test_16_bit_gradients_are_as_good_as_those_of_jax_nn():
    query, key, value = random_inputs(1, 64, 64, 1, 1, 32)
    inputs = [x.astype(jnp.bfloat16) for x in (query, key + 3, value + 30)]
    d_out = normals(1, 64, 1, 32, seed=6).astype(jnp.bfloat16)
    _, expected = exact(*inputs, d_out=d_out)

    def errors(fn):
        _, gradients = with_gradients(fn)(inputs, d_out)
        differences = (np.asarray(g, np.float64) - expected[n] for g, n in zip(gradients, expected, strict=False))
        return np.array([np.sqrt(np.mean(difference**2)) for difference in differences])

    assert (errors(attention) <= 1.1 * errors(jax.nn.dot_product_attention)).all()


def test_small_weights_of_float16_keep_their_digits():
    keys = 4096
    value = normals(1, keys, 1, 2).astype(np.float16)
    out = attention(np.zeros((1, 1, 1, 2), np.float16), np.zeros((1, keys, 1, 2), np.float16), value)
    np.testing.assert_allclose(out[0, 0, 0], value.astype(np.float64).mean((0, 1, 2)), atol=2e-5)


@pytest.mark.slow
def test_second_derivatives_and_vmap():
    query, key, value = random_inputs(1)
    fn = functools.partial(attention, is_causal=True, key_value_seq_lengths=np.array([5]))
    loss = lambda q: jnp.sum(fn(q, key, value) ** 2)  # noqa: E731
    along = normals(*query.shape, seed=8)
    gradient = jax.jit(jax.grad(loss))
    expected = (gradient(query + 4e-3 * along) - gradient(query - 4e-3 * along)) / 8e-3
    forward_over_reverse = jax.jvp(jax.grad(loss), (query,), (along,))[1]
    assert_close(forward_over_reverse, expected, 3e-3)
    assert_close(jax.grad(lambda q: jnp.vdot(jax.grad(loss)(q), along))(query), expected, 3e-3)
    with masksafe.forward_mode():
        slope = jax.jvp(loss, (query,), (along,))[1]
    np.testing.assert_allclose(slope, np.vdot(gradient(query), along), rtol=1e-4)
    stacked = np.stack([query, 2 * query])
    assert_close(jax.vmap(jax.grad(loss))(stacked), np.stack([gradient(x) for x in stacked]))


@pytest.mark.slow
def test_explicit_mesh_and_shard_map():
    inputs = random_inputs(B=4)
    fn = functools.partial(
        attention,
        is_causal=True,
        query_segment_ids=np.zeros((1, 6), np.int32),
        key_value_segment_ids=np.zeros((1, 7), np.int32),
    )
    loss = lambda *args: jnp.sum(fn(*args) ** 2)  # noqa: E731
    expected = jax.grad(loss, (0, 1, 2))(*inputs)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec("data"))) for x in inputs]
        assert_close(jax.jit(jax.grad(loss, (0, 1, 2)))(*sharded), expected)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    mapped = jax.shard_map(jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=spec, out_specs=spec)
    assert_close(jax.jit(mapped)(*inputs), expected)


def test_symbolic_sizes():
    b, t = jax.export.symbolic_shape("b, t")
    fn = lambda q, k, v, ids: attention(q, k, v, is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids)  # noqa: E731
    shapes = [jax.ShapeDtypeStruct((b, t, n, 4), jnp.float32) for n in (2, 1, 1)]
    exported = jax.export.export(jax.jit(fn))(*shapes, jax.ShapeDtypeStruct((b, t), jnp.int32))
    inputs, ids = random_inputs(T=6, S=6), np.array([[0, 0, 1, 1, 1, 1]] * 2)
    live = causal(6, 6) & (ids[:, None, :, None] == ids[:, None, None, :])
    assert_close(exported.call(*inputs, ids.astype(np.int32)), exact(*inputs, live)[0])
