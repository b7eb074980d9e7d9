"""Losses of routers: parts that add up, devices, memory. The table has the contract."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import parametrize

import masksafe
from masksafe.losses import RouterStatistics, load_balancing_loss, router_z_loss

BATCH, TIME, EXPERTS, K = 4, 6, 5, 2
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(BATCH, TIME, EXPERTS)).astype(np.float32)
PROBS = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
INDICES = np.argsort(-LOGITS, -1)[..., :K].astype(np.int32)
MASK = np.arange(TIME) < np.array([6, 1, 0, 4])[:, None]
LOSS = jax.jit(jax.value_and_grad(lambda probs, indices, where: load_balancing_loss(probs, indices, where=where)))


def whole():
    return LOSS(PROBS, INDICES, MASK)


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
    unsigned = load_balancing_loss(PROBS, INDICES.astype(np.uint32), where=MASK)
    np.testing.assert_allclose(unsigned, whole()[0], rtol=1e-6)


def test_checks_of_statistics_name_them():
    """Those of the loss are in the table of reports."""
    bad = np.where(MASK[..., None], EXPERTS, INDICES)
    with masksafe.label_checks("raise"), pytest.raises(ValueError, match=r"^RouterStatistics\.of: 22 of 22 expert_ind"):
        RouterStatistics.of(PROBS, bad, where=MASK)
    with pytest.raises(ValueError, match=r"^RouterStatistics\.of: expert_indices: got shape"):
        RouterStatistics.of(PROBS, INDICES[0])
    with pytest.raises(ValueError, match="psum: axis_name: got value 'x'"):
        RouterStatistics.of(PROBS, INDICES).psum("x")


def test_the_mean_of_the_losses_of_parts_is_not_the_loss_but_statistics_add_up():
    of_parts = [*map(jax.jit(lambda p, i, where: RouterStatistics.of(p, i, where=where)), PROBS, INDICES, MASK)]
    for together in (sum(of_parts), sum(of_parts[1:], of_parts[0]), 0 + of_parts[0] + sum(of_parts[:0:-1])):
        np.testing.assert_allclose(together.loss, whole()[0], rtol=1e-6)
    assert abs(np.mean([part.loss for part in of_parts]) - whole()[0]) > 0.1
    assert (of_parts[2].loss, *of_parts[2].share.total) == (0, 0, 0, 0, 0, 0)
    with pytest.raises(TypeError, match="unsupported operand"):
        of_parts[0] + 1


@parametrize("how", ["axis_name"], exhaustive=["psum"])
@parametrize("spec", [P("x")], exhaustive=[P("y", "x")], ids=str)
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


@parametrize("kind", [AxisType.Explicit], exhaustive=[AxisType.Auto], ids=str)
@parametrize("spec", [P("x", "y")], exhaustive=[P(("x", "y"))], ids=str)
def test_tokens_split_on_a_mesh(kind, spec):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    args = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (PROBS, INDICES, MASK)]
    with jax.set_mesh(mesh):
        value, gradient = LOSS(*args)
    chex.assert_trees_all_close((np.asarray(value), np.asarray(gradient)), whole(), rtol=1e-5, atol=1e-7)
    assert gradient.sharding.is_equivalent_to(args[0].sharding, 3)


def test_where_broadcasts_to_the_tokens():
    masks = MASK[0], MASK[:, :1], [True] * TIME
    of_each = jax.jit(lambda p: [load_balancing_loss(p, INDICES, where=where) for where in masks])(PROBS)
    for where, ours in zip(masks, of_each, strict=True):
        expected, _ = LOSS(PROBS, INDICES, np.broadcast_to(where, MASK.shape))
        np.testing.assert_allclose(ours, expected, rtol=1e-6)
    np.testing.assert_allclose(load_balancing_loss(np.float32([0.5, 0.25, 0.25]), np.array([0])), 1.5)  # one token


@parametrize(
    ("probs", "indices"), [((3, 5), (3, 2))], exhaustive=[((0, 5), (0, 2)), ((3, 5), (3, 0)), ((3, 0), (3, 2))]
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
