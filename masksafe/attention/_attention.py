"""What surrounds an executor of attention: devices, batch, sinks, derivatives, and the choice for each platform.

Values and first derivatives in reverse mode come from executors. Forward mode and second derivatives come from the
plain form: rows of blocks, in loops of fixed length. JAX can differentiate it to any order, and it has no array over
all pairs either.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from masksafe._core import platforms
from masksafe._core.derivatives import rule_with_plain_form
from masksafe._core.linear import finite_or_zero, with_tangent_of, without_sign_of_zero
from masksafe._core.per_device import along_devices
from masksafe._core.precision import wide_dtype
from masksafe._core.run_time import any_of
from masksafe._core.sharding import AxisName, Devices
from masksafe._core.switches import finds_nans
from masksafe._core.typing import Array
from masksafe.attention import _blocks, _cudnn, _rows, _splash
from masksafe.attention._arguments import Arrays, whole
from masksafe.attention._contract import cleaned, in_plain_reverse, is_good
from masksafe.attention._executors import executors_of
from masksafe.attention._merge import with_sinks
from masksafe.attention._mods import Mod
from masksafe.attention._pairs import AXES, Pairs, by_heads, with_bias
from masksafe.attention._plan import Choice, Executor, Kernels, Operands, Plan

_ELSEWHERE = "the program is lowered for another platform than "

# Devices and batch.


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def attend(
    plan: Plan, axis_name: AxisName, kernels: Kernels, is_checkified: bool, arrays: Arrays
) -> tuple[Array, Array, Array | None]:
    """Output, logsumexp and largest logits for arrays with any batch dimensions, as one program for an eager call.

    On a mesh whose explicit axes split batch or heads, each device solves its own problems. It has all queries and
    keys, and all of the arrays that a mod closes over. `is_checkified` makes the program under checkify another one.
    """
    x, pairs = whole(axis_name, arrays)
    batch = [f"batch {axis}" for axis in range(x.q.ndim - 3)]
    by_axis = {"k": "heads", "g": "heads" if x.k.shape[-2] == 1 else None}
    fields: Any = jax.tree.map(lambda axes: PartitionSpec(*batch, *(by_axis.get(axis) for axis in axes[1:])), AXES)
    over_pairs = PartitionSpec(*batch, "heads")  # heads are grouped on the device
    fields = fields._replace(allowed=over_pairs, score_mod=PartitionSpec(), mask_mod=PartitionSpec())
    by_head = PartitionSpec(*batch, None, "heads")
    operands: Any = Operands(*3 * (by_head,), over_pairs)  # type: ignore[arg-type]
    names, number_of_others = (operands, fields, PartitionSpec(), PartitionSpec("heads")), 1 + plan.needs_max
    args = x, pairs, arrays.scale, arrays.sinks

    def on_device(_: Devices, x: Operands, pairs: Pairs, scale: Array | None, sinks: Array | None) -> tuple[Array, ...]:
        dtype, wide, batch = x.q.dtype, wide_dtype(x.q.dtype), x.q.shape[:-3]
        if 0 in (*x.q.shape[:-1], *x.k.shape[:-1], x.v.shape[-1]):  # no query has a key, or there is no output
            o = jnp.zeros((*x.q.shape[:-1], x.v.shape[-1]), dtype)
            return o, *[jnp.full(x.q.shape[:-1], -jnp.inf, wide)] * number_of_others
        if scale is not None:
            x = x._replace(q=_product(x.q.astype(wide), scale.astype(wide)))
        results = _by_platform(plan, kernels, *_flattened(x, pairs))
        o, lse, *largest = (a.reshape(*batch, *a.shape[1:]) for a in results)
        o = o if sinks is None else with_sinks(o, lse, sinks)
        return o.astype(dtype), lse, *largest

    names = jax.tree.broadcast(names, args)
    of_results = (by_head,) * (1 + number_of_others)
    o, lse, *largest = along_devices(on_device, Devices(), args, names, of_results, check_vma=plan.function is None)
    return o, lse, _of_heads(lse, *largest) if largest else None


def _of_heads(lse: Array, largest: Array) -> Array:
    """The largest logit `[N]` of each head, from those of queries `[..., T, N]`; NaN where the logsumexp of one is."""
    axes = range(lse.ndim - 1)
    is_bad = any_of(jnp.isnan(lse), axes)  # XLA loses a NaN in a maximum on a CPU
    return jax.lax.stop_gradient(jnp.where(is_bad, jnp.nan, jnp.max(largest, tuple(axes), initial=-jnp.inf)))


@jax.custom_jvp
def _product(q: Array, scale: Array) -> Array:
    """The products; a bad element stays bad, whatever the scale is."""
    return jnp.where(is_good(q), q * scale, jnp.inf)


@_product.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (q, scale), (dq, d_scale) = primals, tangents
    # A NaN in a padded query, or among its tangents, must not reach the gradient of the scale; a tangent stays NaN.
    clean = finite_or_zero(with_tangent_of(q, cleaned(q)))
    return _product(q, scale), finite_or_zero(dq) * scale + 0 * dq + clean * d_scale


def _nan_as_infinity(x: Array) -> Array:
    """`x` with infinity for NaN, which is as bad, but under a mask no alarm; the derivative is the identity."""
    return with_tangent_of(x, jnp.where(jnp.isnan(x), jnp.asarray(jnp.inf, x.dtype), x))


def _flattened(x: Operands, pairs: Pairs) -> tuple[Operands, Pairs]:
    """The arrays with the batch dimensions merged into one."""
    num_batch_dimensions, batch, mod = x.q.ndim - 3, x.q.shape[:-3], pairs.score_mod
    pairs = pairs._replace(allowed=by_heads(pairs.allowed, x.k.shape[-2]))
    if x.q.shape[-1] == 0:  # all products are 0, as with a column of zeros
        q, k = (jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, 1)]) for a in x[:2])
        x = x._replace(q=q, k=k)

    def flatten(a: Any) -> Any:
        """A batch dimension along which `a` broadcasts is expanded, unless it broadcasts along all of them."""
        if isinstance(a, Mod) or num_batch_dimensions == 1:  # the arrays of a mod have no batch dimensions
            return a
        lead, rest = a.shape[:num_batch_dimensions], a.shape[num_batch_dimensions:]
        lead = lead if lead == (1,) * num_batch_dimensions else batch
        return jnp.broadcast_to(a, (*lead, *rest)).reshape(math.prod(lead), *rest)

    x, pairs = jax.tree.map(flatten, (x, pairs), is_leaf=lambda a: isinstance(a, Mod))
    return x._replace(captured=() if mod is None else mod.captured), pairs


def _by_platform(plan: Plan, kernels: Kernels, x: Operands, pairs: Pairs) -> tuple[Array, ...]:
    """What an executor returns, wide, except an output that is rounded."""
    if finds_nans():  # the reverse pass may keep these arrays
        q, k, v, bias = jax.tree.map(_nan_as_infinity, x[:4])
        x = x._replace(q=q, k=k, v=v, bias=bias)
    configs, with_bias_of_blocks = {}, with_bias(x, pairs)
    for platform in (None, "cpu", "cuda", "tpu"):
        there = plan._replace(on_accelerator=platform != "cpu")
        configs[platform] = Config(there, *executors_of(platform, Choice(there, kernels, x, with_bias_of_blocks)))
    default = functools.partial(_attend, configs[None])
    others = {p: c for p, c in configs.items() if p is not None and c[1:] != configs[None][1:]}
    branches = {p: functools.partial(_attend, c) for p, c in others.items()}
    if kernels.cudnn or kernels.splash:  # by name
        refusal = _splash.refusal(_ELSEWHERE + "a TPU") if kernels.splash else _cudnn.refusal(_ELSEWHERE + "CUDA")

        def refused(x: Operands, pairs: Pairs) -> tuple[Array, ...]:
            return default(x._replace(q=platforms.refused_when_lowered(refusal, x.q)), pairs)

        named = "tpu" if kernels.splash else "cuda"
        return platforms.by_platform(refused, x, pairs, **{named: branches[named]})
    return platforms.by_platform(default, x, pairs, **branches)


# The op and its derivatives.


class Config(NamedTuple):
    """The static parameters."""

    plan: Plan
    values: Executor  # for values alone
    gradients: Executor


def _rounded(plan: Plan, x: Operands, results: tuple[Array, ...]) -> tuple[Array, ...]:
    o, *others = results
    return (o.astype(x.q.dtype) if plan.rounds else o), *others


def _value(config: Config, x: Operands, pairs: Pairs) -> tuple[Array, ...]:
    return _rounded(config.plan, x, config.values.value(config.plan, x, pairs))


def _forward(config: Config, x: Operands, pairs: Pairs) -> tuple[tuple[Array, ...], Any]:
    results, residuals = config.gradients.forward(config.plan, x, pairs)
    return _rounded(config.plan, x, results), residuals


def _reverse(config: Config, args: tuple[Operands, Pairs], residuals: Any, d: tuple[Array, ...]) -> tuple[Any, Any]:
    x, pairs = args
    dx = config.gradients.reverse(config.plan, x, pairs, residuals, d[:2])  # type: ignore[arg-type]
    return jax.tree.map(lambda d, a: d.astype(a.dtype).reshape(a.shape), dx, x), jax.tree.map(lambda _: None, pairs)


def _plain(config: Config, x: Operands, pairs: Pairs) -> tuple[Array, ...]:
    q, k, v = map(without_sign_of_zero, x[:3])  # in their cotangents
    plan, x = config.plan._replace(is_plain=True), x._replace(q=q, k=k, v=v)
    results = _blocks.results(_rows.table, plan, x, pairs).results(plan.needs_max)
    o, lse, *largest = _rounded(plan, x, results)
    # A cotangent of a query without a key may be NaN.
    return jnp.where(lse[..., None] == -jnp.inf, 0, o), jnp.where(lse == -jnp.inf, -jnp.inf, lse), *largest


def _in_plain_reverse(config: Config, args: tuple[Operands, Pairs], residuals: Any, d: tuple[Array, ...]) -> Any:
    args, d_results = in_plain_reverse(args, d[:2], *config.gradients.marks(jax.lax.stop_gradient(residuals)))  # type: ignore[arg-type]
    return args, (*d_results, *d[2:])


_attend = rule_with_plain_form(_forward, _reverse, None, _value, _plain, _in_plain_reverse)
