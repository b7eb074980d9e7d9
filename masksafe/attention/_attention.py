"""What surrounds a pass: devices, batch, sinks, derivatives, platforms, and problems solved at once or in turn.

Values and first derivatives in reverse mode come from the kernels, which skip dead blocks. Every other derivative,
forward mode and all second derivatives, is that of the plain form: the same blocks in loops of fixed length. JAX can
differentiate it to any order, and it holds no array over all pairs either.

A problem is the work of one key head of one sample. An accelerator wants all problems in one large product. On a CPU,
large problems are solved in turn: their blocks stay in the cache, and each problem skips the blocks that its own mask
excludes, not only those that the masks of all problems exclude.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from masksafe._core import platforms
from masksafe._core.derivatives import rule, with_derivatives_of
from masksafe._core.own_shard_map import along_devices
from masksafe._core.precision import wide_dtype, widened
from masksafe._core.row_blocks import as_bits, from_bits
from masksafe._core.sharding import Devices, may_loop, vary_with
from masksafe._core.tiles import Tile, divide, part, take
from masksafe._core.typing import Array, Pytree
from masksafe._core.unfolded import any_of
from masksafe._core.zeros import without_sign_of_zero
from masksafe.attention import _block
from masksafe.attention._block import Adjustments, Cotangents, Gradients, Inputs, Keys, Plan, Queries
from masksafe.attention._blocks import attend_in_blocks, is_one_block, pull_back_in_blocks, tiles_of
from masksafe.attention._kernels import attend_in_kernels, has_kernels
from masksafe.attention._merge import Partial, with_sinks
from masksafe.attention._pairs import AXES, Pairs, Problems, grouped_heads
from masksafe.attention._ring import run_forward, run_reverse
from masksafe.attention._rows import attend_by_rows, most_logits_at_once, pull_back_by_rows

# Devices and batch.


def attend(
    plan: Plan, q: Array, k: Array, v: Array, pairs: Pairs, scale: Array | None = None, sinks: Array | None = None
) -> tuple[Array, Array]:
    """Output and logsumexp for arrays with any batch dimensions; those over pairs are `[*batch, N, T, S]`.

    On a mesh whose explicit axes split batch or heads, each device solves the problems of its own. Queries and keys are
    whole, as are arrays that a mod closes over.
    """
    batch = [f"batch {axis}" for axis in range(q.ndim - 3)]
    by_axis = {"k": "heads", "g": "heads" if k.shape[-2] == 1 else None}
    of_fields: dict[str, Any] = {
        name: PartitionSpec(*batch, *(by_axis.get(axis) for axis in axes[1:])) for name, axes in AXES.items()
    }
    of_fields |= dict.fromkeys(("allowed", "bias"), PartitionSpec(*batch, "heads"))  # heads are grouped on the device
    of_fields |= dict.fromkeys(("score_mod", "mask_mod"), PartitionSpec())
    of_operands, args = PartitionSpec(*batch, None, "heads"), (q, k, v, pairs, scale, sinks)
    names = of_operands, of_operands, of_operands, Pairs(**of_fields), PartitionSpec(), PartitionSpec("heads")

    def on_device(
        _: Devices, q: Array, k: Array, v: Array, pairs: Pairs, scale: Array | None, sinks: Array | None
    ) -> tuple[Array, Array]:
        scaled = q if scale is None else _scaled_queries(q, scale)
        pairs = pairs._replace(allowed=grouped_heads(pairs.allowed, k.shape[-2]))
        out, lse = _attend_flattened(plan, scaled, k, v, pairs)
        out = out if sinks is None else with_sinks(out, lse, sinks)
        return out.astype(q.dtype), lse

    of_args = jax.tree.broadcast(names, args)
    return along_devices(on_device, Devices(), args, of_args, (of_operands, of_operands))


def _scaled_queries(q: Array, scale: Array) -> Array:
    """The queries times the scale, in the wide dtype."""
    wide = q.astype(wide_dtype(q.dtype))
    is_finite = jnp.isfinite(wide)  # a NaN in a padded query must not reach the gradient of the scale
    return jnp.where(is_finite, jnp.where(is_finite, wide, 0) * scale.astype(wide.dtype), wide)


def _attend_flattened(plan: Plan, q: Array, k: Array, v: Array, pairs: Pairs) -> tuple[Array, Array]:
    """For one batch dimension in place of any number."""
    batch = q.shape[:-3]
    if 0 in (*q.shape[:-1], *k.shape[:-1], v.shape[-1]):  # no query has a key, or there is no output
        dtype = wide_dtype(q.dtype)
        out_dtype = q.dtype if plan.rounds else dtype
        return jnp.zeros((*q.shape[:-1], v.shape[-1]), out_dtype), jnp.full(q.shape[:-1], -jnp.inf, dtype)
    if q.shape[-1] == 0:  # all products are 0, as those of a column of zeros
        q, k = (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)]) for x in (q, k))
    score_mod, mask_mod = pairs.score_mod, pairs.mask_mod  # whose arrays have no batch dimensions
    leaves, tree = jax.tree.flatten(pairs._replace(score_mod=None, mask_mod=None))

    def with_mods(leaves: Iterable[Array]) -> Any:
        return jax.tree.unflatten(tree, leaves)._replace(score_mod=score_mod, mask_mod=mask_mod)

    batch_shapes = [x.shape[: len(batch)] for x in leaves]
    if all(shape in (batch, (1,) * len(batch)) for shape in batch_shapes):

        def flatten(x: Array) -> Array:
            lead = x.shape[: len(batch)]
            return x if len(lead) == 1 else x.reshape(math.prod(lead), *x.shape[len(lead) :])

        flat = with_mods(map(flatten, leaves))
        adjustments = Adjustments(flat.bias, () if score_mod is None else score_mod.captured)
        inputs = Inputs(flatten(q), flatten(k), flatten(v), adjustments, Adjustments().of(flat))
        out, lse = _attention(plan, inputs)
        return out.reshape(*batch, *out.shape[1:]), lse.reshape(*batch, *lse.shape[1:])
    # An array that broadcasts over some but not all batch dimensions is not expanded: vmap one dimension at a time.
    axes = [0 if shape[0] == batch[0] else None for shape in batch_shapes]
    leaves = [x if axis == 0 else x[0] for x, axis in zip(leaves, axes, strict=True)]

    def attend_to_one(q: Array, k: Array, v: Array, leaves: list[Array]) -> tuple[Array, Array]:
        return _attend_flattened(plan, q, k, v, with_mods(leaves))

    return jax.vmap(attend_to_one, in_axes=(0, 0, 0, axes))(q, k, v, leaves)


# The op and its derivatives, for arrays in the user's layout.

_Result = tuple[Array, Array]


def _forward(plan: Plan, inputs: Inputs) -> tuple[_Result, tuple[Inputs, Partial]]:
    results = _evaluate(plan, _grouped(inputs))
    out = results.weighted.astype(inputs.q.dtype) if plan.rounds else results.weighted
    # The output is kept unrounded, since delta depends on it.
    return (out, _logsumexp(results)[..., 0]), (inputs, results)


def _reverse(plan: Plan, residuals: tuple[Inputs, Partial], cotangents: _Result) -> tuple[Any]:
    (inputs, results), (d_out, d_lse) = residuals, cotangents
    d = _pull_back(plan, _grouped(inputs), results, d_out, d_lse[..., None])
    d_adjustments = jax.tree.map(lambda d, x: d.reshape(x.shape), d.adjustments, inputs.adjustments)
    return (Inputs(d.query, d.key, d.value, d_adjustments, None),)  # type: ignore[arg-type]


def _value(plan: Plan, inputs: Inputs) -> _Result:
    """Output `[B, T, N, width of v]` and logsumexp `[B, T, N]`, wide, but the output if it is rounded.

    The bias of the inputs is `[B, N, T, S]` with size 1 where it broadcasts.
    """
    return _forward(plan._replace(is_differentiated=False), inputs)[0]


_attention = rule(_forward, _reverse, _value)


def _grouped(inputs: Inputs) -> Inputs:
    """With the bias as the kernels take it.

    It is brought to that form within the rule, which so keeps the user's own array for the reverse pass: a new one with
    a NaN under the mask would be an error with `jax_debug_nans`.
    """
    bias = grouped_heads(inputs.adjustments.bias, inputs.k.shape[2])
    return inputs._replace(adjustments=inputs.adjustments._replace(bias=bias))


def _logsumexp(results: Partial) -> Array:
    return results.largest + jnp.log(results.total)


def _evaluate_plainly(plan: Plan, inputs: Inputs) -> Partial:
    q, k, v = map(without_sign_of_zero, inputs[:3])  # that is, their cotangents
    return run_forward(_pass_forward, plan._replace(is_plain=True), inputs._replace(q=q, k=k, v=v))


@with_derivatives_of(_evaluate_plainly)
def _evaluate(plan: Plan, inputs: Inputs) -> Partial:
    return run_forward(_pass_forward, plan, inputs)


def _pull_back_plainly(plan: Plan, inputs: Inputs, results: Partial, d_out: Array, d_lse: Array) -> Gradients:
    wanted, _ = _find_wanted_queries(*map(lax.stop_gradient, (results.weighted, d_out, d_lse)))
    # A sound query without a cotangent may have one in a derivative.
    live = (results.largest != -jnp.inf) & (wanted | jnp.isfinite(results.weighted[..., :1]))
    inputs = _with_live_queries(inputs, live)

    def plain(q: Array, k: Array, v: Array, adjustments: Adjustments) -> tuple[Array, Array]:
        results = _evaluate_plainly(plan, Inputs(q, k, v, adjustments, inputs.pairs))
        return results.weighted, _logsumexp(results)

    _, reverse = jax.vjp(plain, *inputs[:-1])
    return Gradients(*reverse((jnp.where(live, d_out, 0).astype(d_lse.dtype), jnp.where(live, d_lse, 0))))


@with_derivatives_of(_pull_back_plainly)
def _pull_back(plan: Plan, inputs: Inputs, results: Partial, d_out: Array, d_lse: Array) -> Gradients:
    wanted, delta = _find_wanted_queries(results.weighted, d_out, d_lse)
    # What is bad makes all columns of an output NaN. The sum of exponentials tells as well, but XLA for a GPU would
    # compute it in one more pass over the logits.
    is_sound = jnp.isfinite(results.weighted[..., :1]) & jnp.isfinite(delta)
    d_lse, largest = (jnp.where(is_sound, x, jnp.nan) for x in (d_lse, results.largest))
    queries = Cotangents(inputs.q, d_out, d_lse, largest, jnp.where(is_sound, results.total, 1), delta)
    d = run_reverse(_pass_reverse, plan, queries, _with_live_queries(inputs, wanted))
    return d._replace(adjustments=jax.tree.map(lambda d, x: d.astype(x.dtype), d.adjustments, inputs.adjustments))


def _find_wanted_queries(out: Array, d_out: Array, d_lse: Array) -> tuple[Array, Array]:
    """Which queries have a cotangent that is not 0, and delta; both `[B, T, N, 1]`.

    A query with a NaN whose cotangents are all 0 takes no part in the reverse pass: such a NaN has been selected away
    after the op, as a loss does with padded queries.
    """
    wide = jnp.promote_types(out.dtype, d_lse.dtype)
    is_wanted = d_out != 0
    delta = jnp.sum(jnp.where(is_wanted, out.astype(wide) * d_out.astype(wide), 0), -1, keepdims=True) - d_lse
    return any_of(is_wanted, -1, keepdims=True) | (d_lse != 0), delta


def _with_live_queries(inputs: Inputs, live: Array) -> Inputs:
    """With pairs of which only those of live queries, `[B, T, N, 1]`, are unmasked."""
    live_queries = _block.queries_by_problem(live, inputs.k.shape[2])[..., 0]
    return inputs._replace(pairs=inputs.pairs._replace(live_queries=live_queries))


# The passes for the keys that a device holds, in the schedule that the platform wants.


def _pass_forward(plan: Plan, inputs: Inputs) -> Partial:
    """The wide output `[B, T, N, width of v]`, the largest logit and the sum of exponentials `[B, T, N, 1]`."""
    q, k, v, adjustments, pairs = inputs

    def solved(plan: Plan, steps: _Steps | None, tiles: Any, q: Array, k: Array, v: Array, pairs: Pairs) -> Any:
        def kernel(by_query: Any, by_key: Any, pairs: Pairs, carry: None) -> _Results:
            (q, is_query_sound), (k, v, is_key_sound) = by_query, by_key
            if not plan.on_accelerator:
                q, k, v = map(widened, (q, k, v))
            queries, keys = Queries.of(plan, q, is_query_sound), Keys.of(k, v, is_key_sound)
            if tiles is None or is_one_block(tiles):
                return attend_by_rows(plan, queries, keys, pairs), (), carry
            of_tile = functools.partial(take, keys, 2)
            return attend_in_blocks(plan, queries, of_tile, pairs, v.shape[-1], tiles), (), carry

        return _solve(kernel, steps, (q, _block.are_finite(q)), (k, v, _block.are_finite(k, v)), pairs)[0]

    def on_cpu(q: Array, k: Array, v: Array, pairs: Pairs) -> Any:
        if not plan.is_plain and _has_few_queries(plan, q, k, pairs):
            return _attend_sample_by_sample(plan, q, k, v, pairs)
        if not plan.is_plain and has_kernels(plan, q, k, pairs):
            return attend_in_kernels(plan, q, k, v, pairs)
        return solved(plan, _steps_on_cpu(plan, q, k, pairs), tiles_of(plan, q, k, pairs), q, k, v, pairs)

    def elsewhere(q: Array, k: Array, v: Array, pairs: Pairs) -> Any:
        there = plan._replace(on_accelerator=True)
        return solved(there, _steps_elsewhere(there, q, k, pairs), None, q, k, v, pairs)

    return Partial(*platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, q, k, v, adjustments.of(pairs)))


def _pass_reverse(plan: Plan, queries: Cotangents, inputs: Inputs) -> Gradients:
    """The cotangents of q, k and v, and those of the adjustments, which are wide.

    In a ring all are wide, and parts of sums, since other devices have more of the keys; the results are those of all.
    """
    q, k, v, adjustments, pairs = inputs
    of_q, of_k, of_v = (x.dtype if plan.ring is None else queries.d_lse.dtype for x in (q, k, v))

    def what_rows_need(queries: Cotangents) -> Cotangents:
        """Tiles with all keys of their queries need more in a ring only."""
        return Cotangents(*queries[:3]) if plan.ring is None else queries

    def solved(
        plan: Plan, steps: _Steps | None, tiles: Any, queries: Cotangents, k: Array, v: Array, *others: Any
    ) -> _Results:
        def kernel(by_query: Any, by_key: Any, pairs: Pairs, sums: Adjustments) -> _Results:
            if not plan.on_accelerator:
                by_query, by_key = jax.tree.map(widened, (by_query, by_key))
            args = plan, by_query.cleaned(plan), Keys.of(*by_key), pairs, sums
            by_rows = tiles is None or is_one_block(tiles)
            d = pull_back_by_rows(*args) if by_rows else pull_back_in_blocks(*args, tiles)
            return d.query.astype(of_q), (d.key.astype(of_k), d.value.astype(of_v)), d.adjustments

        return _solve(kernel, steps, queries, (k, v), *others)

    def on_cpu(queries: Cotangents, k: Array, v: Array, pairs: Pairs, sums: Adjustments) -> _Results:
        tiles = tiles_of(plan, queries.q, k, pairs)
        queries = what_rows_need(queries) if is_one_block(tiles) else queries
        steps = _steps_on_cpu(plan, queries.q, k, pairs, plan.sizes.reverse_at_once_logits)
        return solved(plan, steps, tiles, queries, k, v, pairs, sums)

    def elsewhere(queries: Cotangents, k: Array, v: Array, pairs: Pairs, sums: Adjustments) -> _Results:
        # Else XLA would find that the forward pass computes the same logits, and keep them all from there on.
        queries, k, v, pairs = lax.optimization_barrier((what_rows_need(queries), k, v, pairs))
        there = plan._replace(on_accelerator=True)
        return solved(there, _steps_elsewhere(there, queries.q, k, pairs), None, queries, k, v, pairs, sums)

    with jax.numpy_dtype_promotion("standard"):  # a bias may have 16 bits
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, queries.d_lse.dtype)), adjustments)
    args = queries, k, v, adjustments.of(pairs), vary_with(zeros, queries.d_lse)
    d_q, (d_k, d_v), sums = platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, *args)
    return Gradients(d_q, d_k, d_v, sums)


# Problems, at once or in turn.

_Results = tuple[Pytree, Pytree, Pytree]  # by query, by key, the carry


class _Steps(NamedTuple):
    """Of how many samples and key heads the problems are solved at a time: several samples have all their heads."""

    samples: int
    heads: int
    unroll: int = 1  # that of `lax.scan`


def _steps_on_cpu(plan: Plan, q: Array, k: Array, pairs: Pairs, most_logits: int | None = None) -> _Steps | None:
    """None for all at once. Samples that are worked on together have at most so many logits; None is any number."""
    num_problems, logits = k.shape[0] * k.shape[2], _number_of_logits(q, k)
    if not may_loop((q, k, pairs)) or num_problems == 1 or logits < plan.sizes.in_turn_logits_of_all:
        return None
    if logits >= num_problems * plan.sizes.in_turn_logits_of_one:
        return _Steps(1, 1)
    if most_logits is None or logits <= most_logits:
        return None
    return _Steps(_largest_divisor(k.shape[0], k.shape[0] * most_logits // logits), k.shape[2])


def _steps_elsewhere(plan: Plan, q: Array, k: Array, pairs: Pairs) -> _Steps | None:
    if not may_loop((q, k, pairs)):
        return None
    batch, _, num_key_heads, _ = k.shape
    most = most_logits_at_once(plan) * batch * num_key_heads // max(1, _number_of_logits(q, k))
    samples = _largest_divisor(batch, most // num_key_heads)
    heads = num_key_heads if most >= num_key_heads else _largest_divisor(num_key_heads, most)
    # Two steps in a body save launches; with more of them XLA would keep the logits of all.
    return None if (samples, heads) == (batch, num_key_heads) else _Steps(samples, heads, unroll=2)


def _number_of_logits(q: Array, k: Array) -> int:
    return math.prod(q.shape[:3]) * k.shape[1]


def _largest_divisor(n: int, most: int) -> int:
    """The largest divisor of `n` up to `most`, at least 1."""
    return max((d for d in range(1, min(n, most) + 1) if n % d == 0), default=1)


def _solve(
    kernel: Callable[[Pytree, Pytree, Pairs, Any], _Results],
    steps: _Steps | None,
    by_query: Pytree,
    by_key: Pytree,
    pairs: Pairs,
    carry: Any = None,
) -> _Results:
    """Runs `kernel` on arrays in the user's layout and returns its results in that layout.

    Args:
      kernel: a function of arrays by query `[B, K, G, T, n]`, arrays by key `[B, K, S, n]`, pairs and a carry, which
        returns arrays by query, arrays by key and the carry. Problems solved in turn hand the carry on.
      steps: None for all problems at once.
      by_query: arrays `[B, T, N, n]`.
      by_key: arrays `[B, S, K, n]`.
      pairs: what masks the pairs.
      carry: a pytree, for sums over problems.
    """
    batch, _, num_key_heads, _ = by_key[0].shape
    group = by_query[0].shape[2] // num_key_heads

    def solve(problems: Problems, carry: Any) -> tuple[Any, tuple[Pytree, Pytree]]:
        sample, head, samples, heads = problems.sample, problems.head, problems.samples, problems.heads
        first_query_head = head if group == 1 else head * group
        query_places = {0: (sample, samples), 2: (first_query_head, heads * group)}
        of_queries = jax.tree.map(lambda x: _block.queries_by_problem(part(x, query_places), heads), by_query)
        key_places = {0: (sample, samples), 2: (head, heads)}
        of_keys = jax.tree.map(lambda x: _block.keys_by_problem(part(x, key_places)), by_key)
        of_queries, of_keys, carry = kernel(of_queries, of_keys, pairs.only(problems), carry)
        return carry, (of_queries, of_keys)

    if steps is None:
        carry, results = solve(Problems(0, 0, batch, num_key_heads), carry)
    else:
        samples, heads, unroll = steps

        def step(carry: Any, n: Array) -> Any:
            if heads == num_key_heads:
                return solve(Problems(n * samples, 0, samples, heads), carry)
            steps_of_sample = jnp.int32(num_key_heads // heads)  # lax takes one dtype, and a Python number may be int64
            head = lax.rem(n, steps_of_sample)
            return solve(Problems(lax.div(n, steps_of_sample), head if heads == 1 else head * heads, 1, heads), carry)

        numbers = jnp.arange(batch * num_key_heads // (samples * heads), dtype=jnp.int32)
        carry, results = lax.scan(step, carry, numbers, unroll=unroll)
        # [steps, samples, heads, ...] to [B, K, ...], since either number is 1 or all
        results = jax.tree.map(lambda x: x.reshape(batch, num_key_heads, *x.shape[3:]), results)
    return jax.tree.map(_block.queries_by_user, results[0]), jax.tree.map(_block.keys_by_problem, results[1]), carry


# Few queries, as in decoding: reading the keys and values is the work. So one sample after another goes through its own
# live blocks of keys, of which each is cut from the user's arrays and cleaned when its turn comes: what no query of a
# sample sees is not even read, as the unused part of a cache of keys.


def _has_few_queries(plan: Plan, q: Array, k: Array, pairs: Pairs) -> bool:
    is_one_product = k.shape[0] == 1 and not jax.tree.leaves(pairs)  # on which both cores are faster
    if not may_loop((q, k, pairs)) or is_one_product:
        return False
    rows = q.shape[1] * q.shape[2] // k.shape[2]
    return rows <= plan.sizes.few_queries and k.shape[1] >= plan.sizes.fewest_keys_of_few_queries


def _attend_sample_by_sample(plan: Plan, q: Array, k: Array, v: Array, pairs: Pairs) -> Partial:
    num_queries, (_, num_keys, num_key_heads, width) = q.shape[1], k.shape
    of_keys = divide(num_keys, max(1, plan.sizes.key_block_elements // max(1, num_key_heads * width)))
    bits = as_bits(k), as_bits(v)

    def one_sample(i: Array) -> Partial:
        def keys_of(tile: Tile) -> Keys:
            cut = (part(x, {0: (i, 1), 1: (tile.start, tile.size)}) for x in bits)
            k_j, v_j = (widened(_block.keys_by_problem(from_bits(x, k.dtype))) for x in cut)
            return Keys.of(k_j, v_j, _block.are_finite(k_j, v_j))  # of so few keys one copy serves all uses

        own = pairs.only(Problems(i, 0, 1, num_key_heads))
        q_i = part(q, {0: (i, 1)})
        of_problems = (_block.queries_by_problem(x, num_key_heads) for x in (widened(q_i), _block.are_finite(q_i)))
        tiles = divide(num_queries, num_queries), of_keys
        return attend_in_blocks(plan, Queries.of(plan, *of_problems), keys_of, own, v.shape[-1], tiles)

    results = lax.map(one_sample, jnp.arange(k.shape[0], dtype=jnp.int32))
    return Partial(*(_block.queries_by_user(x[:, 0]) for x in results))
