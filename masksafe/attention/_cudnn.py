r"""The executor for CUDA: cuDNN's attention kernel, reached through `jax.nn`, as a kernel of the contract.

Taken: in programs for CUDA, where `reason_against` finds nothing against it; by default not where arrays may be split.
Why: rows took 6.5 to 8 times as long (8x1024x16x64, bfloat16, packed and causal; an H100, jax 0.11.2).
Left out: float32, sinks, a soft cap, functions of logits, dropout, a ring, odd sizes, the logsumexp, the largest
logit.

It has a causal mask with a left window, and lengths. All other masks become one array of pairs, added to the logits.
`jax.nn` would add -2**41, which large logits outweigh; here it is -2**126, which no logit outweighs.

With such an array, 64 more keys than a multiple of 128 and a logsumexp below -88.7, cuDNN gives NaN as gradients of
queries (pytorch#196678, cudnn-frontend#628). So there the array masks 64 more keys, in values too, whose bits do not
depend on being differentiated. They are written where keys and values are cleaned; blocks would move several times the
bytes. With one query, gradients of keys and values may be NaN (cudnn-frontend#1072): no odd number is taken.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms, sharding
from masksafe._core.arguments import message
from masksafe._core.typing import Array
from masksafe.attention._kernels import InContract, Kernel
from masksafe.attention._pairs import Pairs, all_unmasked, by_heads, by_user
from masksafe.attention._plan import Choice, Operands, Plan

_MASKED = -(2.0**126)
_LARGE, _HUGE = 2.0**20, 2.0**29  # of a bias
_ONE_ARRAY = "query_segments", "query_positions", "key_positions", "offset", "mask_mod"


def refusal(reason: str) -> str:
    """The error of a call that names cuDNN."""
    return message("dot_product_attention", "implementation", "value 'cudnn'", "'xla' or None", f"For cuDNN, {reason}.")


def reason_against(plan: Plan, given: dict[str, Any], is_named: bool, return_residual: bool) -> str | None:
    """Why cuDNN cannot run with these arguments, or None; known while tracing.

    Unless the user has named it, it is not taken where it might fail: for arrays that the compiler may split over
    devices, of which cuDNN's call takes few layouts.

    Args:
      plan: the static parameters.
      given: all arrays and functions that the user gave, by their names.
      is_named: whether the user has named cuDNN.
      return_residual: whether the logsumexp is asked for.
    """
    q, k, v, bias = given["q"], given["k"], given["v"], given.get("bias")
    if q.dtype not in (jnp.float16, jnp.bfloat16):  # first, since the other questions would delay an eager call
        return f"the dtype is {q.dtype}, not float16 or bfloat16"
    num_queries, num_keys, width = q.shape[-3], k.shape[-3], q.shape[-1]
    arrays = [given[name] for name in ("q", "k", "v", "bias", "mask") if name in given]
    names, has_symbolic_size = given.keys(), any(map(sharding.has_symbolic_size, arrays))
    masks_by_array = not names.isdisjoint({"mask", "bias", *_ONE_ARRAY}) or not _knows(
        plan, names, num_queries, num_keys
    )
    reasons = {
        "the value's width is not the query's": v.shape[-1] != width,
        f"the width {width} is not a multiple of 8": width % 8 != 0,
        f"there are {q.ndim - 3} batch dimensions, not at most one": q.ndim > 4,
        "a size is symbolic": has_symbolic_size,
        "an array is empty": 0 in q.shape + k.shape,
        "the number of queries or of keys is odd": num_queries % 2 == 1 or num_keys % 2 == 1,
        "the scale is not a number": "scale" in given,
        "it has no sinks": "sinks" in given,
        "it has no score_mod": "score_mod" in given,
        "it has no axis_name": plan.ring is not None,
        "it has no logit_soft_cap": plan.soft_cap is not None,
        "its dropout takes no key": "dropout_key" in given,
        "its logsumexp is rounded to 16 bits and has no gradient": return_residual,
        "it has no largest logit": plan.needs_max,
        "the bias has another dtype than the query": bias is not None and bias.dtype != q.dtype,
        "the bias is not one for all queries and keys": bias is not None and bias.shape[-2:] != (num_queries, num_keys),
        "no number of float16 is low enough to mask a pair": masks_by_array and q.dtype == jnp.float16,
        "the array of masked pairs would be too large": masks_by_array
        and names.isdisjoint({"mask", "bias"})  # which the user has in this size, or nearly
        and not has_symbolic_size
        and _pairs_in_array(given) > platforms.choices().attention.most_pairs_in_one_array,
        "the compiler may split the arrays over a mesh": not is_named
        and any(map(sharding.is_on_automatic_mesh, arrays)),
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    found = found or _refusal_of_jax(width, q.dtype)
    return found or ("a GPU here is older than compute capability 8.0" if _has_old_gpu() else None)


def _knows(plan: Plan, names: Any, num_queries: int, num_keys: int) -> bool:
    """Whether cuDNN can apply the reach by itself, beside the other masks."""
    if plan.reach is None:
        return True
    left, right = plan.reach
    if right != 0 or not names.isdisjoint({"query_positions", "key_positions", "offset"}):
        return False
    return left is None or (left >= 0 and num_queries <= num_keys and names.isdisjoint({*_MASKS_BESIDE_WINDOWS}))


_MASKS_BESIDE_WINDOWS = "mask", "bias", "query_lengths", "key_lengths", *_ONE_ARRAY


def _pairs_in_array(given: dict[str, Any]) -> int:
    """How many elements the array of masked pairs has; it has heads only if a function may tell them apart."""
    q, k = given["q"], given["k"]
    batch = q.shape[0] if q.ndim == 4 else 1
    return batch * (q.shape[-2] if "mask_mod" in given else 1) * q.shape[-3] * k.shape[-3]


@functools.cache
def _has_old_gpu() -> bool:
    try:
        gpus = jax.local_devices(backend="cuda")
    except RuntimeError:  # there is none
        return False
    return any(float(gpu.compute_capability) < 8 for gpu in gpus)


@functools.cache
def _refusal_of_jax(width: int, dtype: Any) -> str | None:
    """Why `jax.nn` does not trace cuDNN's kernel for this width: no cuDNN, or a GPU that it is too wide for."""
    x = jax.ShapeDtypeStruct((1, 2, 1, width), dtype)
    call = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(lambda x: jax.vjp(call, x, x, x)[1](x), x)
    except RuntimeError as error:
        return f"JAX reports: {error}".rstrip(".")
    return None


def choose(choice: Choice) -> InContract | None:
    """The executor, if `reason_against` found nothing against it."""
    return None if choice.kernels.cudnn is None else InContract(CuDNN.of(choice.plan, choice.x, choice.pairs))


@dataclasses.dataclass(frozen=True)
class CuDNN(Kernel):
    """The kernel, with the masks that it applies by itself."""

    merges_batches: ClassVar[bool] = True

    is_causal: bool
    left: int | None
    has_array: bool
    has_bias: bool

    @classmethod
    def of(cls, plan: Plan, x: Operands, pairs: Pairs) -> "CuDNN":
        queries, keys = pairs.queries, pairs.keys
        given = {"mask": pairs.allowed, "bias": x.bias, "mask_mod": pairs.mask_mod, "query_segments": queries.segment}
        given |= {"query_positions": queries.position, "key_positions": keys.position}
        given |= {"query_lengths": queries.length, "key_lengths": keys.length}
        names = {name for name, value in given.items() if value is not None}
        knows_reach = _knows(plan, names, x.q.shape[1], x.k.shape[1])
        has_array = not knows_reach or not names.isdisjoint({"mask", "bias", *_ONE_ARRAY})
        left, _ = plan.reach or (None, 0)
        is_causal = knows_reach and plan.reach is not None
        return cls(is_causal, left if is_causal else None, has_array, x.bias is not None)

    def prepare(self, plan: Plan, x: Operands, pairs: Pairs, sees_any: Any) -> Any:
        """The arguments of `jax.nn`, of which each sample has at least one key."""
        (batch, num_queries, heads, _), (_, num_keys, key_heads, _) = x.q.shape, x.k.shape
        lengths = None
        if not (pairs.queries.length is None and pairs.keys.length is None):
            given = (pairs.queries.length, num_queries), (pairs.keys.length, num_keys)
            clipped = (jnp.int32(size) if n is None else jnp.clip(n, 1, size) for n, size in given)
            lengths = tuple(jnp.broadcast_to(n, (batch,)) for n in clipped)
        if not self.has_array:
            return x.q, x.k, x.v, None, lengths
        known = pairs._replace(
            queries=pairs.queries._replace(length=None),
            keys=pairs.keys._replace(length=None),
            bias=by_heads(x.bias, key_heads),
        )
        mask = all_unmasked(plan._replace(reach=None) if self.is_causal else plan, known, num_queries, num_keys)
        assert mask is not None
        mask = mask if sees_any is None else mask | ~sees_any[..., None]
        bias: Any = jnp.zeros((), x.q.dtype)
        if known.bias is not None:
            bias = jnp.where(jnp.isfinite(known.bias), known.bias, 0)
            # Large numbers are shifted, which changes no weight, so that none is as low as a mask.
            top = lax.stop_gradient(jnp.max(jnp.where(mask, bias, -jnp.inf), -1, keepdims=True))
            bias = jnp.clip(bias - jnp.where(jnp.abs(top) > _LARGE, top, 0), -_HUGE, _HUGE).astype(x.q.dtype)
        array = by_user(jnp.where(mask, bias, jnp.asarray(_MASKED, x.q.dtype)), key_heads, heads, num_queries, num_keys)
        if num_keys % 128 != 64:
            return x.q, x.k, x.v, array, lengths
        k, v = (jnp.pad(a, ((0, 0), (0, 64), (0, 0), (0, 0))) for a in (x.k, x.v))
        return x.q, k, v, jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, 64)), constant_values=_MASKED), lengths

    def run_for_reverse(self, plan: Plan, prepared: Any) -> tuple[Array, Array]:
        """With a mask in place of a bias `jax.nn` computes no gradient of the bias, which takes as long as the rest."""
        return self.run(plan, prepared, masks_alone=not self.has_bias)

    def run(self, plan: Plan, prepared: Any, *, masks_alone: bool = False) -> tuple[Array, Array]:
        """The output `[B, T, N, H]`; the kernel's logsumexp is not taken."""
        q, k, v, bias, lengths = prepared
        mask = bias == 0 if masks_alone and bias is not None else None
        o = jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias if mask is None else None,
            mask,
            scale=plan.scale,
            is_causal=self.is_causal,
            query_seq_lengths=lengths and lengths[0],
            key_value_seq_lengths=lengths and lengths[1],
            local_window_size=None if self.left is None else (self.left, 0),
            implementation="cudnn",
        )
        if jax.sharding.get_abstract_mesh().manual_axes:  # there its results do not vary over devices
            o = sharding.vary_with(o, prepared)
        return o, jnp.zeros_like(o[..., 0], jnp.float32)
