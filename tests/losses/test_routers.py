"""Losses of routers: their peers' numbers, parts that add up, devices, memory. The table has the contract."""

import functools
import itertools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import masksafe
from masksafe import MaskedMean
from masksafe.losses import RouterStatistics, load_balancing_loss, router_z_loss

BATCH, TIME, EXPERTS, K = 4, 6, 5, 2
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(BATCH, TIME, EXPERTS)).astype(np.float32)
PROBS = np.asarray(jax.nn.softmax(LOGITS))
INDICES = np.argsort(-LOGITS, -1)[..., :K].astype(np.int32)
MASK = np.arange(TIME) < np.array([6, 1, 0, 4])[:, None]
LOSS = jax.jit(jax.value_and_grad(lambda probs, indices, where: load_balancing_loss(probs, indices, where=where)))


def forms(*values):
    return pytest.param(*values, marks=pytest.mark.forms)


def whole():
    return LOSS(PROBS, INDICES, MASK)


# The numbers of others, from their definitions, with one-hot arrays of tokens x k x experts.


def one_hot(indices):
    return jax.nn.one_hot(indices, EXPERTS)


def flat(probs, indices):
    return probs.reshape(-1, EXPERTS), indices.reshape(-1, indices.shape[-1])


def switch_transformer(probs, indices):
    """The share of the tokens that each expert gets, times its mean probability, of tokens with one expert."""
    probs, indices = flat(probs, indices[..., :1])
    return EXPERTS * jnp.sum(one_hot(indices[:, 0]).mean(0) * probs.mean(0))


def mixtral(probs, indices):
    """The mean mask of each choice and expert, times the mean probability of the expert, summed over both."""
    probs, indices = flat(probs, indices)
    return EXPERTS * jnp.sum(one_hot(indices).mean(0) * probs.mean(0))


def deepseek_v3(probs, indices):
    """Equations 17 to 20, the mean over sequences."""
    counts = one_hot(indices).sum((1, 2))
    return jnp.mean(jnp.sum(EXPERTS / (K * TIME) * counts * probs.mean(1), -1))


def by_sequence(probs, indices):
    return jnp.mean(jax.vmap(load_balancing_loss)(probs, indices))


PEERS = {
    switch_transformer: lambda probs, indices: load_balancing_loss(probs, indices[..., :1]),
    mixtral: lambda probs, indices: K * load_balancing_loss(probs, indices),
    deepseek_v3: by_sequence,
}


def test_factors_that_lead_to_the_numbers_of_others():
    @jax.jit
    def of_all(probs):
        return {peer.__name__: [jax.value_and_grad(fn)(probs, INDICES) for fn in (PEERS[peer], peer)] for peer in PEERS}

    for ours, theirs in of_all(PROBS).values():
        chex.assert_trees_all_close(ours, theirs, rtol=1e-5)


# Indices out of range.


def test_unsigned_indices():
    probs, indices = PROBS[0], INDICES[0].astype(np.uint32)
    for where in None, MASK[3]:
        expected = load_balancing_loss(probs, INDICES[0], where=where)
        np.testing.assert_array_equal(load_balancing_loss(probs, indices, where=where), expected)


def test_an_index_out_of_range_is_nan():
    for index in (-2, EXPERTS, 2**31 - 1):
        indices = INDICES.copy()
        indices[3, 2, 1] = index
        value, gradient = LOSS(PROBS, indices, MASK)
        assert np.isnan(value)
        np.testing.assert_array_equal(np.isnan(gradient), np.broadcast_to(MASK[..., None], PROBS.shape))
        statistics = RouterStatistics.of(PROBS, indices, where=MASK)
        assert np.isnan((statistics + RouterStatistics.of(PROBS, INDICES)).loss)
    wide = INDICES.astype(np.int64) + 2**32  # which would be those of experts if they were cut
    assert np.isnan(load_balancing_loss(PROBS, wide))


def test_checks_of_statistics_name_them():
    """Those of the loss are in the table of reports."""
    bad = np.where(MASK[..., None], EXPERTS, INDICES)
    with masksafe.label_checks("raise"), pytest.raises(ValueError, match=r"^RouterStatistics\.of: 22 of 22 expert_ind"):
        RouterStatistics.of(PROBS, bad, where=MASK)
    with pytest.raises(ValueError, match=r"^RouterStatistics\.of: expert_indices: got shape"):
        RouterStatistics.of(PROBS, INDICES[0])
    with pytest.raises(ValueError, match="psum: axis_name: got value 'x'"):
        RouterStatistics.of(PROBS, INDICES).psum("x")


# Parts.


def parts(of=RouterStatistics.of, probs=PROBS):
    return [of(p, indices, where=where) for p, indices, where in zip(probs, INDICES, MASK, strict=True)]


def test_the_mean_of_the_losses_of_parts_is_not_the_loss_but_statistics_add_up():
    of_parts = parts(jax.jit(RouterStatistics.of))
    for together in (sum(of_parts), sum(of_parts[1:], of_parts[0]), 0 + of_parts[0] + sum(of_parts[:0:-1])):
        np.testing.assert_allclose(together.loss, whole()[0], rtol=1e-6)
    assert abs(np.mean([part.loss for part in of_parts]) - whole()[0]) > 0.1
    assert (of_parts[2].loss, *of_parts[2].share.total) == (0, 0, 0, 0, 0, 0)
    with pytest.raises(TypeError, match="unsupported operand"):
        of_parts[0] + 1


def test_gradient_of_added_parts_is_that_of_the_whole():
    of_sum = jax.value_and_grad(lambda probs: sum(parts(probs=probs)).loss)
    chex.assert_trees_all_close(jax.jit(of_sum)(PROBS), whole(), rtol=1e-6)


def test_is_a_pytree_for_jit_vmap_scan_and_map():
    of = lambda probs, indices, where: RouterStatistics.of(probs, indices, where=where)  # noqa: E731
    args, expected = (PROBS, INDICES, MASK), whole()[0]

    @jax.jit
    def all_ways(*args):
        of_rows = jax.vmap(of)(*args)
        zero = jax.tree.map(jnp.zeros_like, of(*(x[0] for x in args)))
        in_turn, _ = lax.scan(lambda total, part: (total + of(*part), None), zero, args)
        return of_rows, jax.tree.map(lambda x: jnp.sum(x, 0, dtype=x.dtype), of_rows), in_turn

    of_rows, mapped, in_turn = all_ways(*args)
    np.testing.assert_allclose(of_rows.loss, [part.loss for part in parts()], rtol=1e-6)
    for together in (mapped, in_turn):
        assert isinstance(together, RouterStatistics)
        np.testing.assert_allclose(together.loss, expected, rtol=1e-6)


# What trains with micro-batches: the shares have no gradient, so with those of the whole batch the loss is a mean over
# tokens.

FEATURES = RNG.normal(size=(8, TIME, 3)).astype(np.float32)
IS_TOKEN = np.arange(TIME) < np.array([6, 1, 0, 3, 0, 0, 5, 2])[:, None]  # some parts of four have nothing left
KERNEL = RNG.normal(size=(3, EXPERTS)).astype(np.float32)


def routed(kernel, features):
    probs = jax.nn.softmax(features @ kernel)
    return probs, lax.top_k(probs, K)[1]


def statistics_of(kernel, features, where):
    return RouterStatistics.of(*routed(kernel, features), where=where)


def loss_with_shares(kernel, features, where, shares):
    probs, indices = routed(kernel, features)
    per_token = EXPERTS * probs @ shares
    return MaskedMean.of(per_token, where), RouterStatistics.of(probs, indices, where=where)


def in_two_passes(kernel, features, where, microbatches, axis_name=None):
    options = {"has_aux": True, "microbatches": microbatches, "axis_name": axis_name}
    step = masksafe.value_and_grad_of_mean(loss_with_shares, in_axes=(None, 0, 0, None), **options)
    shares = statistics_of(kernel, features, where).psum(axis_name).share.value
    return step(kernel, features, where, shares)


@functools.cache
def of_the_whole_batch():
    of_kernel = lambda kernel: statistics_of(kernel, FEATURES, IS_TOKEN).loss  # noqa: E731
    return jax.jit(jax.value_and_grad(of_kernel))(KERNEL)


@pytest.mark.parametrize("microbatches", [4, forms(1), forms(8)])
def test_a_mean_with_the_shares_of_the_whole_batch_has_its_gradient(microbatches):
    (value, aux), gradient = jax.jit(in_two_passes, static_argnums=3)(KERNEL, FEATURES, IS_TOKEN, microbatches)
    chex.assert_trees_all_close((value, gradient), of_the_whole_batch(), rtol=1e-5, atol=1e-6)
    assert isinstance(aux, RouterStatistics)  # of the whole batch too, not one for each part
    assert aux.share.count.tolist() == [K * IS_TOKEN.sum()] * EXPERTS
    np.testing.assert_allclose(aux.loss, value, rtol=1e-5)


@pytest.mark.forms
def test_micro_batches_on_each_device():
    def on_each(kernel, features, where):
        (value, aux), gradient = in_two_passes(kernel, features, where, 2, "data")
        return value, aux.loss, gradient

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    over_devices = jax.shard_map(on_each, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    value, of_aux, gradient = jax.jit(over_devices)(KERNEL, FEATURES, IS_TOKEN)
    chex.assert_trees_all_close((value, gradient), of_the_whole_batch(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_aux, value, rtol=1e-5)


# Devices.


@pytest.mark.parametrize("how", ["axis_name", forms("psum")])
@pytest.mark.parametrize("spec", [P("x"), forms(P(None, "x")), forms(P("y", "x"))], ids=str)
def test_over_devices_is_that_of_the_whole_with_its_gradient(how, spec):
    """And the statistics of each device may leave the `jax.shard_map`."""
    mesh, axes = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2), tuple(a for a in spec if a)

    def of_part(probs, indices, where):
        statistics = RouterStatistics.of(probs, indices, where=where)
        own = jax.tree.map(lambda x: x[None], statistics)
        if how == "psum":
            return statistics.psum(axes).loss, own
        return load_balancing_loss(probs, indices, where=where, axis_name=axes), own

    fn = jax.shard_map(of_part, mesh=mesh, in_specs=(spec, spec, spec), out_specs=(P(), P(axes)))
    (value, own), gradient = jax.jit(jax.value_and_grad(fn, has_aux=True))(PROBS, INDICES, MASK)
    chex.assert_trees_all_close((value, gradient), whole(), rtol=1e-5, atol=1e-7)
    together = jax.tree.map(lambda x: jnp.sum(x, 0, dtype=x.dtype), own)
    np.testing.assert_allclose(together.loss, whole()[0], rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Explicit, forms(AxisType.Auto)], ids=str)
@pytest.mark.parametrize("spec", [P("x", "y"), forms(P("x")), forms(P(None, "y")), forms(P(("x", "y")))], ids=str)
def test_tokens_split_on_a_mesh(kind, spec):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    args = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (PROBS, INDICES, MASK)]
    with jax.set_mesh(mesh):
        value, gradient = LOSS(*args)
    chex.assert_trees_all_close((np.asarray(value), np.asarray(gradient)), whole(), rtol=1e-5, atol=1e-7)
    assert gradient.sharding.is_equivalent_to(args[0].sharding, 3)


# Dtypes, shapes, memory.


def test_where_broadcasts_to_the_tokens():
    for where in (MASK[0], MASK[:1], MASK[:, :1], np.True_, [True] * TIME):
        ours = load_balancing_loss(PROBS, INDICES, where=where)
        expected, _ = LOSS(PROBS, INDICES, np.broadcast_to(where, MASK.shape))
        np.testing.assert_allclose(ours, expected, rtol=1e-6)
    np.testing.assert_allclose(load_balancing_loss(np.float32([0.5, 0.25, 0.25]), np.array([0])), 1.5)  # one token


@pytest.mark.parametrize(
    ("probs", "indices"),
    [((3, EXPERTS), (3, K)), *itertools.starmap(forms, [((0, 5), (0, 2)), ((3, 5), (3, 0)), ((3, 0), (3, 2))])],
)
def test_no_assignment_is_0(probs, indices):
    value, gradient = jax.value_and_grad(load_balancing_loss)(np.ones(probs, np.float32), np.full(indices, -1))
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros(probs))


def test_no_array_of_tokens_by_assignments_by_experts():
    tokens, k, experts = 4096, 8, 64
    shapes = ((tokens, experts), np.float32), ((tokens, k), np.int32), ((tokens,), np.bool_)
    lowered = LOSS.lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    sizes = [math.prod(map(int, text[:-1].split("x"))) for text in re.findall(r"tensor<((?:\d+x)+)", lowered.as_text())]
    assert max(sizes) == tokens * experts
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 3 * tokens * experts * 4


# router_z_loss: what the contract's table does not try.


def test_z_loss_of_no_experts_is_0_and_a_large_logit_does_not_overflow():
    assert not router_z_loss(np.zeros((2, 0), np.float32)).any()
    np.testing.assert_allclose(router_z_loss(np.float32([[1e4, 1e4]])), [(1e4 + np.log(2)) ** 2], rtol=1e-6)
    assert router_z_loss(np.float32([[-np.inf, 2.0]])) == 4
