"""Losses of routers: their peers' numbers, parts that add up, devices, memory. The table has the contract."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
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
EVERY = np.ones_like(MASK)


def forms(*values):
    return pytest.param(*values, marks=pytest.mark.forms)


def whole():
    return LOSS(PROBS, INDICES, MASK)


def test_unsigned_indices():
    probs, indices = PROBS[0], INDICES[0].astype(np.uint32)
    for where in None, MASK[3]:
        expected = load_balancing_loss(probs, INDICES[0], where=where)
        np.testing.assert_array_equal(load_balancing_loss(probs, indices, where=where), expected)


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


def megatron(probs, indices):
    probs, indices = flat(probs, indices)
    tokens_per_expert = one_hot(indices).sum((0, 1))
    return jnp.sum(probs.sum(0) * tokens_per_expert) * EXPERTS / (len(probs) ** 2 * indices.shape[-1])


def maxtext(probs, indices):
    """Of each sequence the mean mask of each expert times its mean probability; the mean over both."""
    density, density_of_probs = one_hot(indices).sum(2).mean(1), probs.mean(1)
    return jnp.mean(density * density_of_probs) * EXPERTS**2


def deepseek_v3(probs, indices):
    """Equations 17 to 20, the mean over sequences."""
    counts = one_hot(indices).sum((1, 2))
    return jnp.mean(jnp.sum(EXPERTS / (K * TIME) * counts * probs.mean(1), -1))


def by_sequence(probs, indices):
    return jnp.mean(jax.vmap(load_balancing_loss)(probs, indices))


PEERS = {
    switch_transformer: lambda probs, indices: load_balancing_loss(probs, indices[..., :1]),
    mixtral: lambda probs, indices: K * load_balancing_loss(probs, indices),
    megatron: load_balancing_loss,
    maxtext: lambda probs, indices: K * by_sequence(probs, indices),
    deepseek_v3: by_sequence,
}


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.__name__)
def test_factor_that_leads_to_the_number_of(peer):
    ours, theirs = (jax.jit(jax.value_and_grad(fn))(PROBS, INDICES) for fn in (PEERS[peer], peer))
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5)


def test_mean_over_sequences_of_which_some_are_padding():
    of_sequences = jax.vmap(load_balancing_loss)(PROBS, INDICES, where=MASK)
    alone = [LOSS(PROBS[b], INDICES[b], MASK[b])[0] for b in range(BATCH)]
    np.testing.assert_allclose(of_sequences, alone, rtol=1e-6)
    mean = masksafe.mean(of_sequences, where=MASK.any(1))
    np.testing.assert_allclose(mean, np.sum(alone) / MASK.any(1).sum(), rtol=1e-6)


def test_is_1_if_balanced_and_the_number_of_experts_if_all_go_to_one():
    even = np.full((EXPERTS, EXPERTS), 1 / EXPERTS, np.float32)
    assert load_balancing_loss(even, np.arange(EXPERTS)[:, None]) == pytest.approx(1)
    assert load_balancing_loss(np.eye(EXPERTS, dtype=np.float32)[[2, 2, 2]], np.full((3, 1), 2)) == EXPERTS


# Padding, dropped assignments, indices out of range.


def test_padding_that_is_counted_is_another_loss():
    """As many padded tokens as others, which all look alike, so that the router sends them to one expert."""
    probs = np.float32([[0.4, 0.2, 0.2, 0.2], [0.2, 0.4, 0.2, 0.2], [0.3, 0.1, 0.5, 0.1], [0.3, 0.1, 0.1, 0.5]])
    probs = np.concatenate([probs, np.tile(np.float32([0.91, 0.03, 0.03, 0.03]), (4, 1))])
    indices, where = np.argmax(probs, -1)[:, None], np.arange(8) < 4
    assert load_balancing_loss(probs, indices) == pytest.approx(1.7, abs=0.05)
    assert load_balancing_loss(probs, indices, where=where) == pytest.approx(1.0)
    assert load_balancing_loss(probs[:4], indices[:4]) == pytest.approx(1.0)


def test_padding_changes_no_bit():
    clean = LOSS(np.where(MASK[..., None], PROBS, 0), np.where(MASK[..., None], INDICES, 0), MASK)
    statistics = jax.jit(RouterStatistics.of)
    expected = statistics(PROBS, INDICES, where=MASK)
    assert not clean[1][~MASK].any()
    for garbage, index in ((np.nan, -100), (np.inf, EXPERTS), (-3e38, 2**31 - 1), (1e30, 3)):
        probs, indices = (
            np.where(MASK[..., None], PROBS, np.float32(garbage)),
            np.where(MASK[..., None], INDICES, index),
        )
        chex.assert_trees_all_equal(LOSS(probs, indices, MASK), clean)
        chex.assert_trees_all_equal(statistics(probs, indices, where=MASK), expected)


def test_a_dropped_assignment_counts_nowhere():
    """Neither in the assignments to an expert nor in their number; its token still counts in the probabilities."""
    dropped = INDICES.copy()
    dropped[0, :, 1] = dropped[3, 2] = -1
    counts = np.bincount(dropped[MASK & (dropped >= 0).any(-1)].clip(-1).ravel() + 1, minlength=EXPERTS + 1)[1:]
    shares = counts / counts.sum()
    value, gradient = LOSS(PROBS, dropped, MASK)
    np.testing.assert_allclose(value, EXPERTS * np.sum(shares * PROBS[MASK].mean(0)), rtol=1e-6)
    np.testing.assert_allclose(gradient, np.where(MASK[..., None], EXPERTS * shares / MASK.sum(), 0), rtol=1e-6)
    value, gradient = LOSS(PROBS, np.full_like(INDICES, -1), MASK)
    assert value == 0
    assert not gradient.any()


@pytest.mark.parametrize("index", [-2, EXPERTS, 2**31 - 1])
def test_an_index_out_of_range_is_nan(index):
    indices = INDICES.copy()
    indices[3, 2, 1] = index
    value, gradient = LOSS(PROBS, indices, MASK)
    assert np.isnan(value)
    np.testing.assert_array_equal(np.isnan(gradient), np.broadcast_to(MASK[..., None], PROBS.shape))
    statistics = RouterStatistics.of(PROBS, indices, where=MASK)
    assert np.isnan((statistics + RouterStatistics.of(PROBS, INDICES)).loss)
    indices[3, 2, 1], indices[2, 0, 0] = INDICES[3, 2, 1], index  # a padded token
    chex.assert_trees_all_equal(LOSS(PROBS, indices, MASK), whole())


def test_an_index_of_64_bits_does_not_wrap_to_an_expert():
    assert np.isnan(load_balancing_loss(PROBS, INDICES.astype(np.int64) + 2**32))


@pytest.mark.parametrize("transform", [lambda fn: fn, forms(jax.jit)], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ["load_balancing_loss", forms("RouterStatistics.of")])
def test_label_checks(transform, name):
    fn = load_balancing_loss if name == "load_balancing_loss" else RouterStatistics.of
    bad, dropped, padded = INDICES.copy(), INDICES.copy(), INDICES.copy()
    bad[3, 2, 1], dropped[3, 2, 1], padded[2, 0, 0] = EXPERTS, -1, 99
    message = rf"{name}: 1 of 22 expert_indices are outside \[0, 5\), and not -1; first at \(3, 2, 1\): 5"
    call = transform(lambda indices: fn(PROBS, indices, where=MASK))
    with masksafe.label_checks("raise"):
        jax.block_until_ready((call(dropped), call(padded)))
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(call(bad))
    with masksafe.label_checks("checkify"):
        error, _ = jax.jit(checkify.checkify(lambda indices: fn(PROBS, indices, where=MASK)))(bad)
    assert re.search(message, error.get())


# Parts.


def parts(of=RouterStatistics.of):
    return [of(probs, indices, where=where) for probs, indices, where in zip(PROBS, INDICES, MASK, strict=True)]


def test_the_mean_of_the_losses_of_parts_is_not_the_loss_but_statistics_add_up():
    of_parts, expected = parts(jax.jit(RouterStatistics.of)), whole()[0]
    for together in (sum(of_parts), sum(of_parts[1:], of_parts[0]), 0 + of_parts[0] + sum(of_parts[:0:-1])):
        np.testing.assert_allclose(together.loss, expected, rtol=1e-6)
    assert abs(np.mean([part.loss for part in of_parts]) - expected) > 0.1
    assert (of_parts[2].loss, *of_parts[2].share.total) == (0, 0, 0, 0, 0, 0)
    with pytest.raises(TypeError, match="unsupported operand"):
        of_parts[0] + 1


def test_gradient_of_added_parts_is_that_of_the_whole():
    def loss(probs):
        return sum(RouterStatistics.of(*part) for part in zip(probs, INDICES, strict=True)).loss

    chex.assert_trees_all_close(jax.jit(jax.value_and_grad(loss))(PROBS), LOSS(PROBS, INDICES, EVERY), rtol=1e-6)


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
    mesh, axes = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2), tuple(a for a in spec if a)

    def of_part(probs, indices, where):
        if how == "psum":
            return RouterStatistics.of(probs, indices, where=where).psum(axes).loss
        return load_balancing_loss(probs, indices, where=where, axis_name=axes)

    fn = jax.shard_map(of_part, mesh=mesh, in_specs=(spec, spec, spec), out_specs=P())
    chex.assert_trees_all_close(jax.jit(jax.value_and_grad(fn))(PROBS, INDICES, MASK), whole(), rtol=1e-5, atol=1e-7)


def test_statistics_of_each_device_leave_a_shard_map():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    of_part = lambda *part: jax.tree.map(lambda x: x[None], RouterStatistics.of(*part[:2], where=part[2]))  # noqa: E731
    of_devices = jax.jit(jax.shard_map(of_part, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(PROBS, INDICES, MASK)
    together = jax.tree.map(lambda x: jnp.sum(x, 0, dtype=x.dtype), of_devices)
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


# Dtypes, shapes, memory, arguments.


@pytest.mark.parametrize("dtype", ["bfloat16", forms("float16")])
def test_16_bits_are_summed_in_float32(dtype):
    probs = jnp.tile(jnp.asarray(PROBS, dtype), (1, 500, 1))  # 3000 tokens: sums of 16 bits would stand still
    indices, where = np.tile(INDICES, (1, 500, 1)), np.tile(MASK, (1, 500))
    value, gradient = LOSS(probs, indices, where)
    assert (value.dtype, gradient.dtype) == (np.float32, jnp.dtype(dtype))
    expected, expected_gradient = LOSS(probs.astype(np.float32), indices, where)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(np.float32(gradient), expected_gradient, rtol=1e-2)


@pytest.mark.forms
def test_64_bits():
    with jax.enable_x64(True):
        args = np.asarray(PROBS, np.float64), INDICES.astype(np.int64), MASK
        value, gradient = LOSS(*args)
        of_parts = sum(RouterStatistics.of(*part) for part in zip(*args[:2], strict=True)).loss
        assert value.dtype == gradient.dtype == of_parts.dtype == np.float64
        counts = np.bincount(INDICES[MASK].ravel(), minlength=EXPERTS)
        shares = counts / counts.sum()
        np.testing.assert_allclose(value, EXPERTS * np.sum(shares * args[0][MASK].mean(0)), rtol=1e-14)
        np.testing.assert_allclose(gradient[MASK], np.tile(EXPERTS * shares / MASK.sum(), (MASK.sum(), 1)), rtol=1e-14)
        assert router_z_loss(args[0]).dtype == np.float64


@pytest.mark.parametrize("where", [MASK[0], MASK[:1], MASK[:, :1], np.True_, [True] * TIME], ids=np.shape)
def test_where_broadcasts_to_the_tokens(where):
    ours = load_balancing_loss(PROBS, INDICES, where=where)
    np.testing.assert_allclose(ours, LOSS(PROBS, INDICES, np.broadcast_to(where, MASK.shape))[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("probs", "indices"),
    [((0, EXPERTS), (0, K)), forms((3, EXPERTS), (3, 0)), forms((3, 0), (3, K)), forms((2, 0, EXPERTS), (2, 0, K))],
)
def test_nothing_is_0(probs, indices):
    value, gradient = jax.value_and_grad(load_balancing_loss)(np.ones(probs, np.float32), np.full(indices, -1))
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros(probs))


def test_one_token_without_other_axes():
    np.testing.assert_allclose(load_balancing_loss(np.float32([0.5, 0.25, 0.25]), np.array([0])), 1.5)


def test_second_derivatives_and_forward_mode():
    """The loss is linear in the probabilities."""
    loss = lambda probs: load_balancing_loss(probs, INDICES[0])  # noqa: E731
    tangent = np.cos(PROBS[0])
    along, hessian = jax.jit(lambda x, t: (jax.jvp(loss, (x,), (t,))[1], jax.hessian(loss)(x)))(PROBS[0], tangent)
    np.testing.assert_allclose(along, np.sum(jax.grad(loss)(PROBS[0]) * tangent), rtol=1e-5)
    assert not hessian.any()


def test_strict_flags():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        value = LOSS(PROBS.astype(jnp.bfloat16), INDICES.astype(np.int8), MASK[:1])[0]
        whole_of_parts = sum(parts())
        z_loss = router_z_loss(LOGITS.astype(jnp.bfloat16), where=MASK)
    assert np.isfinite(value)
    assert np.isfinite(whole_of_parts.loss)
    assert z_loss.dtype == jnp.bfloat16


def test_no_array_of_tokens_by_assignments_by_experts():
    tokens, k, experts = 4096, 8, 64
    shapes = ((tokens, experts), np.float32), ((tokens, k), np.int32), ((tokens,), np.bool_)
    lowered = LOSS.lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    sizes = [math.prod(map(int, text[:-1].split("x"))) for text in re.findall(r"tensor<((?:\d+x)+)", lowered.as_text())]
    assert max(sizes) == tokens * experts
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 3 * tokens * experts * 4


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: load_balancing_loss(INDICES, INDICES), TypeError, "router_probs: got dtype int32"),
        (lambda: load_balancing_loss(PROBS, PROBS), TypeError, "load_balancing_loss: expert_indices: got dtype float"),
        (lambda: load_balancing_loss(PROBS, INDICES[0]), ValueError, r"expert_indices: got shape \(6, 2\); expected"),
        (lambda: load_balancing_loss(PROBS, INDICES[:, :5]), ValueError, r"expert_indices: got shape \(4, 5, 2\)"),
        (lambda: load_balancing_loss(PROBS, INDICES[..., 0]), ValueError, r"expert_indices: got shape \(4, 6\)"),
        (lambda: load_balancing_loss(np.float32(1), np.int32(0)), ValueError, "load_balancing_loss: expert_indices"),
        (lambda: load_balancing_loss(PROBS, INDICES, where=MASK * 1.0), TypeError, "where: got dtype float"),
        (lambda: load_balancing_loss(PROBS, INDICES, where=MASK[..., None]), ValueError, "the shape of the tokens"),
        (lambda: load_balancing_loss(PROBS, INDICES, axis_name="x"), ValueError, "axis_name: got value 'x'"),
        (lambda: load_balancing_loss(PROBS, INDICES, axis_name=3), TypeError, "axis_name: got value 3"),
        (lambda: load_balancing_loss(PROBS, INDICES, mask=MASK), TypeError, "mask: .* expected the keyword where"),
        (lambda: RouterStatistics.of(PROBS, INDICES[0]), ValueError, "RouterStatistics.of: expert_indices: got shape"),
        (lambda: RouterStatistics.of(PROBS, INDICES).psum("x"), ValueError, "psum: axis_name: got value 'x'"),
        (lambda: router_z_loss(INDICES), TypeError, "router_z_loss: router_logits: got dtype int32"),
        (lambda: router_z_loss(LOGITS, axis=3), ValueError, "router_z_loss: axis: got value 3"),
        (lambda: router_z_loss(LOGITS, where=MASK[0]), ValueError, r"router_z_loss: where: got shape \(6,\)"),
        (lambda: router_z_loss(LOGITS, where=MASK[:, :5]), ValueError, r"router_z_loss: where: got shape \(4, 5\)"),
        (lambda: router_z_loss(LOGITS, where=1.0), TypeError, "router_z_loss: where: got dtype float32"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


# router_z_loss.


def z_loss_by_jax(logits, where, axis=-1):
    """The formula; what is masked has to be harmless."""
    return jnp.where(jnp.any(where, axis), jax.nn.logsumexp(logits, axis, where=where) ** 2, 0)


@pytest.mark.parametrize("axis", [-1, forms(0), forms((0, 2))])
@pytest.mark.parametrize("masks", ["tokens", "experts", forms("nothing")])
def test_z_loss_is_the_square_of_the_logsumexp(axis, masks):
    of_rows = functools.reduce(lambda mask, a: np.take(mask, [0], a), np.atleast_1d(axis), np.cos(9 * LOGITS) > 0)
    at_rank = {"tokens": of_rows, "experts": np.cos(5 * LOGITS) > 0, "nothing": np.ones((1, 1, 1), bool)}[masks]
    at_rank = np.array(at_rank)
    if masks == "experts":
        at_rank[:, 1] = axis != -1  # rows with nothing left
    where = {"tokens": np.squeeze(of_rows, axis), "experts": at_rank, "nothing": None}[masks]
    cotangent = jnp.cos(jnp.arange(LOGITS.size))

    def value_and_grad(fn, logits):
        def total(logits):
            loss = fn(logits)
            return jnp.sum(loss * cotangent[: loss.size].reshape(loss.shape)), loss

        (_, loss), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(logits)
        return loss, gradient

    hidden = ~np.broadcast_to(at_rank, LOGITS.shape)
    ours = value_and_grad(lambda x: router_z_loss(x, axis=axis, where=where), np.where(hidden, np.nan, LOGITS))
    by_jax = lambda x: z_loss_by_jax(x, np.broadcast_to(at_rank, x.shape), axis)  # noqa: E731
    loss, gradient = value_and_grad(by_jax, LOGITS)
    chex.assert_trees_all_close(ours, (loss, np.where(hidden, 0, np.nan_to_num(gradient))), rtol=1e-5, atol=1e-6)
    assert not ours[1][hidden].any()


def test_mean_z_loss_of_unmasked_tokens():
    mean = masksafe.mean(router_z_loss(np.where(MASK[..., None], LOGITS, np.nan), where=MASK), where=MASK)
    np.testing.assert_allclose(mean, np.mean(jax.nn.logsumexp(LOGITS[MASK], -1) ** 2), rtol=1e-6)


@pytest.mark.forms
@pytest.mark.parametrize("dtype", ["bfloat16", forms("float16")])
def test_z_loss_of_16_bits_is_rounded_once(dtype):
    logits = (4 * LOGITS).astype(jnp.dtype(dtype))
    loss, gradient = router_z_loss(logits), jax.grad(lambda x: jnp.sum(router_z_loss(x)))(logits)
    expected = z_loss_by_jax(logits.astype(np.float32), np.ones(LOGITS.shape, bool))
    assert loss.dtype == gradient.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(loss, expected.astype(dtype))
    assert np.isfinite(np.float32(gradient)).all()


def test_z_loss_of_no_experts_is_0_and_a_large_logit_does_not_overflow():
    assert not router_z_loss(np.zeros((2, 0), np.float32)).any()
    np.testing.assert_allclose(router_z_loss(np.float32([[1e4, 1e4]])), [(1e4 + np.log(2)) ** 2], rtol=1e-6)
    assert router_z_loss(np.float32([[-np.inf, 2.0]])) == 4
