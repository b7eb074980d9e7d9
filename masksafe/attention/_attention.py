"""What surrounds a pass of attention: devices, batch, sinks, derivatives, and the choice for each platform.

Values and first derivatives in reverse mode come from kernels and from blocks that skip masked tiles. Forward
mode and second derivatives come from the plain form: the same blocks, in loops of fixed length. JAX can differentiate
it to any order, and it has no array over all pairs either.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from masksafe._core import platforms
from masksafe._core.derivatives import rule_with_plain_form
from masksafe._core.linear import finite_or_zero, with_tangent_of, without_sign_of_zero
from masksafe._core.masks import either
from masksafe._core.per_device import along_devices
from masksafe._core.precision import wide_dtype
from masksafe._core.sharding import Devices
from masksafe._core.switches import finds_nans
from masksafe._core.typing import Array
from masksafe.attention import _callable, _contract, _cudnn, _formula, _schedule, _splash
from masksafe.attention._block import Rows
from masksafe.attention._contract import are_good, cleaned
from masksafe.attention._merge import Partial, with_sinks
from masksafe.attention._pairs import AXES, Pairs, by_heads, by_key_head
from masksafe.attention._plan import Kernels, Operands, Plan
from masksafe.attention._ring import run_forward, run_reverse

_ELSEWHERE = "the program is lowered for another platform than "

# Devices and batch.


def attend(
    plan: Plan,
    kernels: Kernels,
    x: Operands,
    pairs: Pairs,
    scale: Array | None = None,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """Output and logsumexp for arrays with any batch dimensions; arrays over pairs are `[*batch, N, T, S]`.

    On a mesh whose explicit axes split batch or heads, each device solves its own problems. It has all queries and
    keys, and all of the arrays that a mod closes over.
    """
    batch = [f"batch {axis}" for axis in range(x.q.ndim - 3)]
    by_axis = {"k": "heads", "g": "heads" if x.k.shape[-2] == 1 else None}
    fields: dict[str, Any] = {
        name: PartitionSpec(*batch, *(by_axis.get(axis) for axis in axes[1:])) for name, axes in AXES.items()
    }
    over_pairs = PartitionSpec(*batch, "heads")  # heads are grouped on the device
    fields |= {"allowed": over_pairs, "bias": over_pairs, "score_mod": PartitionSpec(), "mask_mod": PartitionSpec()}
    by_head = PartitionSpec(*batch, None, "heads")
    operands: Any = Operands(*3 * (by_head,), over_pairs)  # type: ignore[arg-type]
    names = operands, Pairs(**fields), PartitionSpec(), PartitionSpec("heads")
    args = x, pairs, scale, sinks

    def on_device(
        _: Devices, x: Operands, pairs: Pairs, scale: Array | None, sinks: Array | None
    ) -> tuple[Array, Array]:
        dtype, num_key_heads = x.q.dtype, x.k.shape[-2]
        pairs = pairs._replace(allowed=by_heads(pairs.allowed, num_key_heads))
        if scale is not None and num_key_heads:
            # A NaN in a padded query must not reach the gradient of the scale.
            pairs = pairs._replace(bad_queries=by_key_head(~are_good(x.q), num_key_heads))
            wide = wide_dtype(dtype)
            x = x._replace(q=_product(cleaned(x.q.astype(wide)), scale.astype(wide)))
        o, lse = _attend_flattened(plan, kernels, x, pairs)
        o = o if sinks is None else with_sinks(o, lse, sinks)
        return o.astype(dtype), lse

    names = jax.tree.broadcast(names, args)
    return along_devices(on_device, Devices(), args, names, (by_head, by_head), check_vma=plan.function is None)


@jax.custom_jvp
def _product(q: Array, scale: Array) -> Array:
    return q * scale


@_product.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (q, scale), (dq, d_scale) = primals, tangents
    # A NaN among the tangents of padded queries must not reach the gradient of the scale either, but stays one.
    return q * scale, finite_or_zero(dq) * scale + 0 * dq + finite_or_zero(q) * d_scale


def _nan_as_infinity(x: Array) -> Array:
    """`x` with infinity for NaN, which is as bad, but under a mask no alarm; the derivative is the identity."""
    return with_tangent_of(x, jnp.where(jnp.isnan(x), jnp.asarray(jnp.inf, x.dtype), x))


def _attend_flattened(plan: Plan, kernels: Kernels, x: Operands, pairs: Pairs) -> tuple[Array, Array]:
    """`attend` with the batch dimensions merged into one."""
    q, k, v = x[:3]
    batch = q.shape[:-3]
    if 0 in (*q.shape[:-1], *k.shape[:-1], v.shape[-1]):  # no query has a key, or there is no output
        dtype = wide_dtype(q.dtype)
        o_dtype = q.dtype if plan.rounds else dtype
        return jnp.zeros((*q.shape[:-1], v.shape[-1]), o_dtype), jnp.full(q.shape[:-1], -jnp.inf, dtype)
    if q.shape[-1] == 0:  # all products are 0, as with a column of zeros
        q, k = (jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, 1)]) for a in (q, k))
        x = x._replace(q=q, k=k)

    def flatten(a: Array) -> Array:
        """A batch dimension along which `a` broadcasts is expanded, unless it broadcasts along all of them."""
        lead, rest = a.shape[: len(batch)], a.shape[len(batch) :]
        lead = lead if lead == (1,) * len(batch) else batch
        return a if len(batch) == 1 else jnp.broadcast_to(a, (*lead, *rest)).reshape(math.prod(lead), *rest)

    score_mod, mask_mod = pairs.score_mod, pairs.mask_mod  # whose arrays have no batch dimensions
    x, pairs = jax.tree.map(flatten, (x, pairs._replace(score_mod=None, mask_mod=None)))
    x = x._replace(captured=() if score_mod is None else score_mod.captured)
    o, lse = _by_platform(plan, kernels, x, pairs._replace(score_mod=score_mod, mask_mod=mask_mod))
    return o.reshape(*batch, *o.shape[1:]), lse.reshape(*batch, *lse.shape[1:])


def _by_platform(plan: Plan, kernels: Kernels, x: Operands, pairs: Pairs) -> tuple[Array, Array]:
    """The output `[B, T, N, width of v]` and the logsumexp `[B, T, N]`, wide, except an output that is rounded."""
    if finds_nans():  # the reverse pass may keep these arrays
        q, k, v, bias = jax.tree.map(_nan_as_infinity, x[:4])
        x = x._replace(q=q, k=k, v=v, bias=bias)
    reason = None if kernels.splash is None else _splash.reason_against(plan, x, pairs, is_named=kernels.splash)
    if kernels.splash and reason is not None:
        raise ValueError(_splash.refusal(reason))
    bad_queries = either(pairs.bad_queries, by_key_head(~are_good(x.q, plan.scale), x.k.shape[2]))
    pairs = pairs._replace(bad_queries=bad_queries, bad_keys=_contract.bad_keys(x.k, x.v))
    if plan.function is not None:
        return _contract.attend(_callable.UsersKernel.of(plan, x, pairs), _plain, plan, x, pairs)
    in_blocks = functools.partial(_in_blocks, plan)
    branches: dict[str, Any] = {}
    if kernels.cudnn is not None:
        kernel = _cudnn.CuDNN.of(plan, x, pairs)
        branches["cuda"] = functools.partial(_contract.attend, kernel, _plain, plan)
    if kernels.splash is not None and reason is None:
        forward = _not_on_devices if kernels.splash else _forward
        branches["tpu"] = functools.partial(_splash.attend, _splash.Blocks(forward, _reverse, _plain), plan)
    if (formula := _formula.with_weights_kept(plan, x, pairs)) is not None:
        branches["cpu"] = functools.partial(_contract.attend, formula, _plain, plan)
    if kernels.cudnn or kernels.splash:  # by name
        refusal = _splash.refusal(_ELSEWHERE + "a TPU") if kernels.splash else _cudnn.refusal(_ELSEWHERE + "CUDA")

        def refused(x: Operands, pairs: Pairs) -> tuple[Array, Array]:
            return in_blocks(x._replace(q=platforms.refused_when_lowered(refusal, x.q)), pairs)

        named = "tpu" if kernels.splash else "cuda"
        return platforms.by_platform(refused, x, pairs, **{named: branches[named]})
    return platforms.by_platform(in_blocks, x, pairs, **branches)


def _not_on_devices(*_: Any) -> Any:
    raise ValueError(_splash.refusal("the compiler splits the arrays over devices"))


# In blocks: the op and its derivatives.


def _forward(plan: Plan, x: Operands, pairs: Pairs) -> tuple[tuple[Array, Array], Partial]:
    results = run_forward(_pass_forward, plan, x, pairs) if plan.ring else _pass_forward(plan, x, pairs)
    # The residual output is not rounded, since delta depends on it.
    return (results.o.astype(x.q.dtype) if plan.rounds else results.o, results.lse), results


def _value(plan: Plan, x: Operands, pairs: Pairs) -> tuple[Array, Array]:
    return _forward(plan._replace(is_differentiated=False), x, pairs)[0]


def _plain(plan: Plan, x: Operands, pairs: Pairs) -> tuple[Array, Array]:
    q, k, v = map(without_sign_of_zero, x[:3])  # in their cotangents
    o, lse = _forward(plan._replace(is_plain=True), x._replace(q=q, k=k, v=v), pairs)[0]
    # A cotangent of a query without a key may be NaN.
    return jnp.where(lse[..., None] == -jnp.inf, 0, o), jnp.where(lse == -jnp.inf, -jnp.inf, lse)


def _reverse(plan: Plan, args: tuple[Operands, Pairs], results: Partial, d: tuple[Array, Array]) -> tuple[Any, Any]:
    (x, pairs), (do, dlse) = args, (d[0], d[1][..., None])
    needed = _contract.are_needed(*d) & (results.m != -jnp.inf)
    # A bad element makes all columns of an output NaN. The sum of exponentials would be NaN too, but XLA for a GPU
    # would compute it in one more pass over the logits.
    is_good = jnp.isfinite(results.o[..., :1]) & _contract.are_cotangents_good(*d)[..., None]
    used = needed & is_good
    do, dlse = jnp.where(used, do, 0), jnp.where(used, dlse, 0)
    wide = dlse.dtype
    delta = jnp.sum(jnp.where(used, results.o.astype(wide) * do.astype(wide), 0), -1, keepdims=True) - dlse
    m = jnp.where(used, results.m, jnp.where(needed, 0, jnp.inf))
    rows = Rows(do, dlse, m, jnp.where(used, results.l, 1), delta)
    bad, unneeded = (by_key_head(a[..., 0], x.k.shape[2]) for a in (needed & ~is_good, ~needed))
    pairs = pairs._replace(bad_queries=bad, bad_keys=None, unneeded=unneeded)
    dx = run_reverse(_pass_reverse, plan, x, rows, pairs) if plan.ring else _pass_reverse(plan, x, rows, pairs)
    return jax.tree.map(lambda d, a: d.astype(a.dtype).reshape(a.shape), dx, x), jax.tree.map(lambda _: None, pairs)


def _in_plain_reverse(_: Plan, args: tuple[Operands, Pairs], results: Partial, d: tuple[Array, Array]) -> Any:
    o, m = lax.stop_gradient((results.o[..., :1], results.m))
    return _contract.in_plain_reverse(args, d, ~jnp.isfinite(o)[..., 0], (m == -jnp.inf)[..., 0])


_in_blocks = rule_with_plain_form(_forward, _reverse, None, _value, _plain, _in_plain_reverse)


# The passes for the keys of one device, in the schedule of the platform.


def _with_bias(x: Operands, pairs: Pairs) -> Pairs:
    """The pairs with the bias in the layout of the blocks, and with the arrays that `score_mod` captured.

    This happens inside the rule, so that the residual is the user's own array: a new array with a NaN under the mask
    would be an error with `jax_debug_nans`.
    """
    mod = None if pairs.score_mod is None else pairs.score_mod.with_captured(x.captured)
    return pairs._replace(bias=by_heads(x.bias, x.k.shape[2]), score_mod=mod)


def _pass_forward(plan: Plan, x: Operands, pairs: Pairs) -> Partial:
    """The wide output `[B, T, N, width of v]`, with `m` and `l` `[B, T, N, 1]`."""

    def on_cpu(x: Operands, pairs: Pairs) -> Partial:
        pairs = _with_bias(x, pairs)
        schedule = _schedule.schedule_on_cpu(plan, x, pairs)
        if not schedule.cuts_keys and (formula := _formula.for_values(plan, x, pairs, schedule)) is not None:
            return _contract.value(formula, plan, x, pairs)
        return _schedule.attend(plan, schedule, x, pairs)

    def elsewhere(x: Operands, pairs: Pairs) -> Partial:
        pairs, there = _with_bias(x, pairs), plan._replace(on_accelerator=True)
        return _schedule.attend(there, _schedule.schedule_elsewhere(there, x, pairs), x, pairs)

    return Partial(*platforms.by_platform(elsewhere, x, pairs, cpu=on_cpu))


def _pass_reverse(plan: Plan, x: Operands, rows: Rows, pairs: Pairs) -> Operands:
    """The cotangents; in a ring they are wide parts of sums, since other devices have more keys."""

    def on_cpu(x: Operands, rows: Rows, pairs: Pairs) -> Operands:
        pairs = _with_bias(x, pairs)
        schedule = _schedule.schedule_on_cpu(plan, x, pairs, in_reverse=True)
        rows = (
            Rows(*rows[:2]) if schedule.is_one_block and not plan.ring else rows
        )  # the block computes the softmax again
        return _schedule.pull_back(plan, schedule, x, rows, pairs)

    def elsewhere(x: Operands, rows: Rows, pairs: Pairs) -> Operands:
        there = plan._replace(on_accelerator=True)
        rows = rows if plan.ring else Rows(*rows[:2])
        # Otherwise XLA would see that the forward pass computes the same logits, and keep all of them.
        x, rows, pairs = lax.optimization_barrier((x, rows, pairs))
        pairs = _with_bias(x, pairs)
        return _schedule.pull_back(there, _schedule.schedule_elsewhere(there, x, pairs), x, rows, pairs)

    return Operands(*platforms.by_platform(elsewhere, x, rows, pairs, cpu=on_cpu))
