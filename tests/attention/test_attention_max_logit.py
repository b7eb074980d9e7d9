"""The largest logit of each head that attention returns, in every form; the contract's table has the rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import attention, random_inputs, replaced
from comparisons import assert_close
from jax.sharding import AxisType, PartitionSpec
from tiers import parametrize

import masksafe

with_max = functools.partial(attention, return_max_logit=True)
CAUSAL = np.tri(6, 7, dtype=bool)


def largest(query, key, mask=True, change=lambda x: x):
    """Of logits in float64."""
    key = np.repeat(np.float64(key), query.shape[2] // key.shape[2], 2)
    x = np.einsum("btnh,bsnh->bnts", np.float64(query), key) / query.shape[3] ** 0.5
    return np.max(np.where(mask, change(x), -np.inf), (0, 2, 3))


OPTIONS = {
    "plain": ({}, {}),
    "causal": (dict(is_causal=True), dict(mask=CAUSAL)),
    "lengths": (
        dict(key_value_seq_lengths=np.int32([5, 0])),
        dict(mask=np.arange(7) < np.int32([5, 0]).reshape(2, 1, 1, 1)),
    ),
    "changed": (
        dict(
            scale=2.0 / 4**0.5,
            logit_soft_cap=1.5,
            bias=np.float32(0.5),
            score_mod=lambda x, *_: -x,
            sinks=np.float32([9, 9]),
        ),
        dict(change=lambda x: -(1.5 * np.tanh(2 * x / 1.5) + 0.5)),
    ),
}


@parametrize("name", ["causal", "changed"], exhaustive=OPTIONS)
def test_it_is_what_the_softmax_sees(form, name):
    """Beside the value and beside the gradient, which it does not change."""
    given, of_largest = OPTIONS[name]
    query, key, value = random_inputs()

    @jax.jit
    def run(*args):
        loss = lambda q: (lambda out, top: (jnp.sum(out), top))(*with_max(q, *args[1:], **given))  # noqa: E731
        (total, top), gradient = jax.value_and_grad(loss, has_aux=True)(args[0])
        plain = jax.value_and_grad(lambda q: jnp.sum(attention(q, *args[1:], **given)))(args[0])
        return with_max(*args, **given), top, (total, gradient), plain

    (out, top), beside_gradient, found, plain = run(query, key, value)
    expected = largest(query, key, **of_largest)
    assert out.shape == query.shape
    assert top.dtype == jnp.float32
    assert_close(top, expected, 1e-5)
    assert_close(beside_gradient, expected, 1e-5)
    assert_close(found, plain, 1e-5, 1e-6)


def test_it_is_the_last_result_and_has_no_gradient():
    inputs = random_inputs()
    out, lse, top = with_max(*inputs, return_residual=True)
    assert (out.shape, lse.shape, top.shape) == ((2, 6, 2, 4), (2, 6, 2), (2,))
    gradients = jax.grad(lambda *args: with_max(*args)[1].sum(), (0, 1, 2))(*inputs)
    assert all(not np.any(gradient) for gradient in gradients)
    with masksafe.forward_mode():
        assert not np.any(jax.jvp(lambda q: with_max(q, *inputs[1:])[1], inputs[:1], inputs[:1])[1])


def test_a_nan_shows_in_its_head_and_nothing_is_of_no_pair(form):
    query, key, value = random_inputs()
    bad = replaced(query, (1, 2, 0), np.nan)
    fn = jax.jit(lambda q, mask: with_max(q, key, value, mask=mask)[1])
    mask = np.ones((2, 2, 6, 7), bool)
    top = fn(bad, mask)
    assert np.isnan(top[0])
    assert_close(top[1], largest(query, key)[1], 1e-5)
    without = replaced(mask, (1, slice(None), 2), False)
    assert_close(fn(bad, without), largest(query, key, without), 1e-5)
    np.testing.assert_array_equal(fn(bad, ~mask), [-np.inf, -np.inf])
    np.testing.assert_array_equal(with_max(query[:, :0], key, value)[1], [-np.inf, -np.inf])


def test_each_element_of_a_vmap_has_its_own():
    query, key, value = random_inputs()
    stacked = np.stack([query, 3 * query])
    assert_close(
        jax.vmap(lambda q: with_max(q, key, value)[1])(stacked), np.stack([largest(q, key) for q in stacked]), 1e-5
    )


@parametrize("axis_name", [None], exhaustive=["time"])
def test_over_devices(axis_name):
    """The batch is split; or time, in a ring, in which a device knows the logits of its queries."""
    query, key, value = random_inputs(B=4, T=8, S=8)
    mesh = jax.make_mesh((4,), ("time",), (AxisType.Auto,))
    split = PartitionSpec(None, "time") if axis_name else PartitionSpec("time")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=split, out_specs=PartitionSpec())
    def on_each(q, k, v):
        return jax.lax.pmax(with_max(q, k, v, is_causal=True, axis_name=axis_name)[1], "time")

    expected = largest(query, key, np.tri(8, dtype=bool))
    assert_close(jax.jit(on_each)(query, key, value), expected, 1e-5)
    explicit = jax.make_mesh((4,), ("batch",), (AxisType.Explicit,))
    with jax.set_mesh(explicit):
        arrays = [jax.device_put(x, PartitionSpec("batch")) for x in (query, key, value)]
        assert_close(jax.jit(functools.partial(with_max, is_causal=True))(*arrays)[1], expected, 1e-5)


@pytest.mark.parametrize(
    ("implementation", "reason"),
    [
        ("cudnn", "For cuDNN, it has no largest logit"),
        ("splash", "For splash attention, it has no largest logit"),
        (jax.nn.dot_product_attention, "A function of yours is not called with return_max_logit"),
    ],
)
def test_kernels_that_are_named_refuse(implementation, reason):
    inputs = random_inputs(T=8, S=8, K=2, H=8, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=reason):
        with_max(*inputs, implementation=implementation)
