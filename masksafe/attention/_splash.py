r"""The executor for TPUs: splash attention, the kernel that ships with JAX.

Taken: in programs for one TPU, or inside of `jax.shard_map`, where `reason_against` finds nothing against it.
Why: rows move 14 to 30 times the bytes of its operands (2x4096x8x64, float32, compiled for a v5e, jax 0.12).
Left out: float16, a bias, an array as mask, functions of pairs, dropout, sinks, positions, a ring, fewer than 128
queries. Where the compiler splits arrays over devices, rows take its place.

Its kernels *select* a number in place of masked logits. So bad elements need no marks: a NaN in place of a bad query or
key shows in the queries that see it and in no other. A query that sees no key gets an average as its output, and that
number as its logsumexp, by which it is known.

The reverse pass gets clean operands, since its products contract over masked pairs. It computes the weights again, as
:math:`e^{x - \lambda}`. A query with :math:`\lambda = \infty` takes no part. A bad query gets a :math:`\lambda` below
all logits but above the number that masks: its unmasked pairs have infinite weights, whose products with 0 are NaN.

JAX's own rule for the kernels has no gradient of the logsumexp. So their functions are called here, which are private.
"""

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import call_site, platforms
from masksafe._core.arguments import message
from masksafe._core.sharding import has_symbolic_size
from masksafe._core.typing import Array
from masksafe.attention import _rows
from masksafe.attention._blocks import InBlocks
from masksafe.attention._contract import Cotangents, any_in_row, cleaned, is_good
from masksafe.attention._kernels import over_merged_batch
from masksafe.attention._merge import Partial
from masksafe.attention._pairs import Pairs, sees_any
from masksafe.attention._plan import Choice, Operands, Plan

_PATH = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_"
_REVERSE_PARAMETERS = (
    "q k v segment_ids sinks logsumexp do di bq bkv {}is_mqa mask_info mask_value attn_logits_soft_cap {}"
)
_REVERSE_PARAMETERS += "q_layout k_layout v_layout mask_function interpret"
_PARAMETERS = {
    "forward": "fwd_mask_info q k v segment_ids sinks mask_value is_mqa block_sizes residual_checkpoint_name "
    "save_residuals mask_function attn_logits_soft_cap interpret",
    "bwd_dkv": _REVERSE_PARAMETERS.format("bkv_compute ", "use_fused_bwd_kernel "),
    "bwd_dq": _REVERSE_PARAMETERS.format("", ""),
}

_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # the value of a masked logit; others are at least -2**124
_BELOW_ALL = -1e38
_FEWEST_QUERIES = 128  # fewer would be padded, and keys and values copied
_NO_QUERY, _NO_KEY = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).min + 1


def refusal(reason: str) -> str:
    """The error of a call that names splash attention."""
    hint = f"For splash attention, {reason}."
    return message("dot_product_attention", "implementation", "value 'splash'", "'xla' or None", hint)


def reason_against(plan: Plan, given: dict[str, Any], is_named: bool) -> str | None:
    """Why splash attention cannot compute this on a TPU, or None; known while tracing.

    Args:
      plan: the static parameters.
      given: all arrays and functions that the user gave, by their names.
      is_named: whether the user has named it.
    """
    (num_queries, num_keys), (left, right) = (given[n].shape[-3] for n in "qk"), plan.reach or (None, 0)
    segments = [given[name] for name in ("query_segments", "key_segments") if name in given]
    reasons = {
        f"the dtype is {given['k'].dtype}, not bfloat16 or float32": given["k"].dtype
        not in (jnp.bfloat16, jnp.float32),
        "it has no axis_name": plan.ring is not None,
        "it has no largest logit": plan.needs_max,
        "it has no array over pairs as mask": "mask" in given,
        "it has no bias": "bias" in given,
        "it has no score_mod": "score_mod" in given,
        "it has no mask_mod": "mask_mod" in given,
        "it has no dropout": "dropout_key" in given,
        "its output is rounded before sinks could count": "sinks" in given,
        "the scale is not a number": "scale" in given,
        "there are positions, or an offset that is not a number": not given.keys().isdisjoint(
            {"query_positions", "key_positions", "offset"}
        ),
        "a size is symbolic": any(has_symbolic_size(given[name]) for name in "qkv"),
        "segment ids have more than 32 bits": any(s.dtype.itemsize > 4 for s in segments),
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    if found is None and num_queries < _FEWEST_QUERIES:
        found = f"there are {num_queries} queries, fewer than {_FEWEST_QUERIES}"
    elif found is None and not (-num_queries < right and (left is None or -num_keys < left)):
        found = "no query sees a key"
    return found or ("this version of JAX has other kernels" if is_named and not has_functions() else None)


@functools.cache
def has_functions() -> bool:
    """Whether this JAX has the kernels' functions with the parameters that are passed here."""
    try:
        found = {name: " ".join(inspect.signature(_function(name)).parameters) for name in _PARAMETERS}
    except (ImportError, AttributeError):
        return False
    return found == _PARAMETERS


def _can_run() -> bool:
    """`has_functions`, asked where a program is lowered for a TPU: there a user should know what blocks cost."""
    if not has_functions():
        _warn()
    return has_functions()


@functools.cache  # once
def _warn() -> None:
    text = (
        f"jax {jax.__version__} has other kernels of splash attention than this version of masksafe calls. So "
        "dot_product_attention takes blocks in programs for a TPU, which move up to ten times the bytes. Install a "
        "newer masksafe, or jax 0.12; or pass a kernel of your own as `implementation`."
    )
    frame = call_site.frame_of_user()
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


def _kernels() -> Any:
    return importlib.import_module(_PATH + "kernel")  # when a program is lowered for a TPU: it takes half a second


def _function(name: str) -> Any:
    return getattr(_kernels(), f"_splash_attention_{name}")


def choose(choice: Choice) -> "Splash | None":
    """The executor, if `reason_against` found nothing against it."""
    if choice.kernels.splash is None:
        return None
    in_blocks = None if choice.kernels.splash else _rows.choose(choice)
    return Splash(in_blocks, platforms.choices().interprets)


class Splash(NamedTuple):
    """The executor."""

    in_blocks: InBlocks | None  # where the compiler splits arrays over devices; None if the user has named the kernels
    interprets: Any

    def _on_one_device(self, kernels: Callable[..., Any], in_blocks: Callable[..., Any], likes: Any) -> Any:
        """A function of arrays `[B, ...]` by kernels where they can run; its results have the types of `likes`."""

        def otherwise(*args: Any) -> Any:
            if self.in_blocks is None:
                raise ValueError(refusal("the compiler splits the arrays over devices"))
            return in_blocks(*args)

        def run(*args: Any) -> Any:
            return platforms.on_one_device(kernels, otherwise, _can_run, likes(*args), *args)

        return over_merged_batch(run)

    def _attend(self, plan: Plan, needs_lse: bool, x: Operands, pairs: Pairs) -> tuple[Array, Array]:
        def in_blocks(x: Operands, pairs: Pairs) -> Any:
            o, lse = self.in_blocks.value(plan, x, pairs)  # type: ignore[union-attr]
            return o.astype(x.q.dtype), lse

        def likes(x: Operands, _: Pairs) -> Any:
            lse = jnp.zeros_like(x.q[..., 0], jnp.float32)
            return jnp.broadcast_to(lse[..., None].astype(x.q.dtype), (*lse.shape, x.v.shape[-1])), lse

        return self._on_one_device(functools.partial(_run, plan, self.interprets, needs_lse), in_blocks, likes)(
            x, pairs
        )

    def value(self, plan: Plan, x: Operands, pairs: Pairs) -> tuple[Array, Array]:
        num_queries, num_keys = _sizes(x)
        left, right = plan.reach or (None, 0)
        sees_itself = plan.shares_segments and num_queries == num_keys and right >= 0 and (left is None or left >= 0)
        masks = pairs.queries.length, pairs.keys.length, None if sees_itself else pairs.queries.segment
        unsegmented = pairs._replace(
            queries=pairs.queries._replace(segment=None), keys=pairs.keys._replace(segment=None)
        )
        may_be_empty = (
            any(a is not None for a in masks) or sees_any(plan, unsegmented, num_queries, num_keys) is not None
        )
        return self._attend(plan, plan.needs_lse or may_be_empty, x, pairs)

    def forward(self, plan: Plan, x: Operands, pairs: Pairs) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        results = self._attend(plan, True, x, pairs)
        return results, results

    def reverse(self, plan: Plan, x: Operands, pairs: Pairs, results: Any, d: tuple[Array, Array]) -> Operands:
        def in_blocks(x: Operands, pairs: Pairs, results: tuple[Array, Array], d: tuple[Array, Array]) -> Any:
            o, lse = results[0], results[1][..., None]
            dx = self.in_blocks.reverse(plan, x, pairs, Partial(o[..., :1], lse, lse), d)  # type: ignore[union-attr]
            return jax.tree.map(lambda d, a: d.astype(a.dtype), dx, x)

        kernels = functools.partial(_pull_back, plan, self.interprets)
        return self._on_one_device(kernels, in_blocks, lambda x, *_: x)(x, pairs, results, d)

    def marks(self, results: tuple[Array, Array]) -> tuple[Array, Array]:
        return jnp.isnan(results[1]), results[1] == -jnp.inf


# On one device. Arrays of the kernels are [B, heads, time, width], and time is a multiple of a block.


def _sizes(x: Operands) -> tuple[int, int]:
    return x.q.shape[1], x.k.shape[1]


def _block_size(length: int) -> int:
    """The size of a block. Large blocks are faster, unless the last one is padded too much."""
    return next((size for size in (512, 256) if -length % size <= length // 8), 128)


def _heads_first(x: Array, fill: float = 0) -> Array:
    """`[B, time, heads, ...]` in the layout of the kernels, padded to whole blocks."""
    padding = [(0, 0)] * x.ndim
    padding[2] = 0, -x.shape[1] % _block_size(x.shape[1])
    return jnp.pad(jnp.swapaxes(x, 1, 2), padding, constant_values=fill)


def _time_first(x: Array, length: int) -> Array:
    return jnp.swapaxes(x[:, :, :length], 1, 2)


@functools.cache
def _mask(reach: Any, sizes: tuple[int, int], in_reverse: bool) -> Any:
    """The unmasked blocks of a static mask, which takes seconds for long sequences, and its function of a pair."""
    masks, infos = (importlib.import_module(_PATH + name) for name in ("mask", "mask_info"))
    blocks = tuple(map(_block_size, sizes))
    shape = tuple(size + -size % block for size, block in zip(sizes, blocks, strict=True))
    mask = masks.MultiHeadMask([masks.FullMask(shape) if reach is None else masks.LocalMask(shape, reach, 0)])
    return (infos.process_mask_dkv if in_reverse else infos.process_mask)(mask, blocks)


def _segments(pairs: Pairs, x: Operands) -> Any:
    """Segments for the kernels, in which no query sees a key beyond a length or in the padding of a block."""
    given = pairs.queries.length, pairs.keys.length, pairs.queries.segment
    if all(a is None for a in given) and x.k.shape[1] % _block_size(x.k.shape[1]) == 0:
        return None

    def padded_ids(length: int, segments: Array | None, lengths: Array | None, none: int) -> Array:
        ids = jnp.zeros((1, length), jnp.int32) if segments is None else segments.astype(jnp.int32)
        ids = jnp.maximum(ids, _NO_KEY + 1)
        if lengths is not None:
            ids = jnp.where(jnp.arange(length) < lengths[:, None], ids, none)
        ids = jnp.pad(ids, ((0, 0), (0, -length % _block_size(length))), constant_values=none)
        return jnp.broadcast_to(ids, (x.q.shape[0], ids.shape[1]))

    num_queries, num_keys = _sizes(x)
    queries = padded_ids(num_queries, pairs.queries.segment, pairs.queries.length, _NO_QUERY)
    return _kernels().SegmentIds(queries, padded_ids(num_keys, pairs.keys.segment, pairs.keys.length, _NO_KEY))


def _scaled(q: Array, plan: Plan, bad: float) -> Array:
    return jnp.where(is_good(q, plan.scale), q.astype(jnp.float32) * plan.scale, bad).astype(q.dtype)


def _run(plan: Plan, interprets: Any, needs_lse: bool, x: Operands, pairs: Pairs) -> tuple[Array, Array]:
    sizes, q = _sizes(x), _scaled(x.q, plan, jnp.nan)
    # One NaN in a key is enough. Element by element, k and v are read once.
    has_good_value = is_good(x.v) if x.v.shape == x.k.shape else ~any_in_row(~is_good(x.v))[..., None]
    k = jnp.where(is_good(x.k) & has_good_value, x.k, jnp.nan)
    mask_info, mask_function = _mask(plan.reach, sizes, False)
    blocks, options = _kernels().BlockSizes(*map(_block_size, sizes)), (plan.soft_cap, interprets)
    rest = None, _MASKED, False, blocks, None, needs_lse, mask_function, *options
    run: Any = jax.vmap(lambda *args: _function("forward")(mask_info, *args, *rest))
    results = run(*map(_heads_first, (q, k, cleaned(x.v))), _segments(pairs, x))
    if not needs_lse:
        o = _time_first(results, sizes[0])
        return o, jnp.zeros(o.shape[:-1], jnp.float32)
    o, (lse,) = results
    is_empty = lse < _BELOW_ALL
    o, lse = jnp.where(is_empty[..., None], 0, o), jnp.where(is_empty, -jnp.inf, lse)
    return _time_first(o, sizes[0]), _time_first(lse, sizes[0])


def _pull_back(
    plan: Plan, interprets: Any, x: Operands, pairs: Pairs, results: Any, d: tuple[Array, Array]
) -> Operands:
    sizes, (o, lse) = _sizes(x), results
    found = Cotangents.of(*d, jnp.isnan(lse)[..., None], (lse == -jnp.inf)[..., None], o)
    lse = jnp.where(found.used[..., 0], lse, jnp.where(found.needed[..., 0], _BELOW_ALL, jnp.inf))
    bq, bkv = map(_block_size, sizes)
    options = dict.fromkeys(("q_layout", "k_layout", "v_layout"), _kernels().QKVLayout.HEAD_DIM_MINOR)
    options |= {"bq": bq, "bkv": bkv, "is_mqa": False, "mask_value": _MASKED}
    options |= {"attn_logits_soft_cap": plan.soft_cap, "interpret": interprets}

    def pull_back(name: str, in_reverse: bool, args: Any, **own: Any) -> Any:
        mask_info, mask_function = _mask(plan.reach, sizes, in_reverse)
        args = *args[:4], None, *args[4:]  # no sinks
        return _function(name)(*args, mask_info=mask_info, mask_function=mask_function, **options, **own)

    def both(*args: Any) -> tuple[Array, Array, Array]:
        _, dk, dv = pull_back("bwd_dkv", True, args, bkv_compute=bkv, use_fused_bwd_kernel=False)
        return pull_back("bwd_dq", False, args), dk, dv

    # Otherwise XLA would scale queries once for both passes, and store the result.
    q = _scaled(lax.optimization_barrier(x.q), plan, 0)
    operands = map(_heads_first, (q, cleaned(x.k), cleaned(x.v)))
    assert found.delta is not None
    rows = _heads_first(lse, jnp.inf), _heads_first(found.do), _heads_first(found.delta[..., 0])
    over_batch: Any = jax.vmap(both)
    dq, dk, dv = over_batch(*operands, _segments(pairs, x), *rows)
    dq = (_time_first(dq, sizes[0]).astype(jnp.float32) * plan.scale).astype(x.q.dtype)
    return x._replace(q=dq, k=_time_first(dk, sizes[1]), v=_time_first(dv, sizes[1]))
