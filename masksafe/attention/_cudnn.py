r"""cuDNN's attention kernel, reached through `jax.nn`, with the contract kept around it.

cuDNN gives a masked pair the weight 0, but its products still contract over the pair, and 0 times NaN is NaN. A query
that sees no key gets an average over masked keys, or a NaN. `jax.nn` turns an array that masks into a finite bias,
which a huge number under the mask outweighs.

Cleaning the arrays before the kernel would cost more than the kernel reads and writes. So it runs on the arrays as they
are, and the results are looked at, which costs one pass over them. Garbage that is finite has done nothing: its weight
is 0. Everything else shows, but for elements of bfloat16 that are too large for products, which that pass looks for:

* A NaN in any array, and an infinity in a value, makes a result NaN or infinite.
* An infinity in a query makes its logsumexp so, even if all its logits are :math:`-\infty`.
* A key whose logit is :math:`-\infty` has weight 0, so infinities of keys are looked for in the keys themselves.
* Where an array masks, a bound of the products and the logsumexp tell whether a masked pair could have a weight.

Only then are the arrays cleaned and the kernel called again: what it makes of clean arrays is, bit for bit, what it
makes of finite garbage. The blockwise form, which keeps the contract by itself, is run beside it and says which
elements are NaN. Both are in a loop that runs at most once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.layout import Layout, with_layout_constraint

from masksafe._core import platforms, sharding
from masksafe._core.derivatives import rule_of_kernels
from masksafe._core.masks import both, selected
from masksafe._core.switches import forward_mode
from masksafe._core.tiles import once_if, whole
from masksafe._core.typing import Array
from masksafe._core.unfolded import any_of
from masksafe.attention._attention import attend
from masksafe.attention._block import Plan, are_bounded, cleaned
from masksafe.attention._pairs import Pairs, block_of, grouped_heads, seen_keys, seen_positions

_T = TypeVar("_T")

Saved = list[Array]  # what the kernel keeps for its reverse pass; the last one is `is_bad`


class Config(NamedTuple):
    """The static parameters."""

    plan: Plan
    otherwise: str | None  # the error where the program is lowered for another platform; None runs `attend` there


class Masks(NamedTuple):
    """The arrays that mask pairs. None masks nothing."""

    mask: Array | None  # [B or 1, N or 1, T or 1, S or 1]
    query_lengths: Array | None  # [B]
    key_lengths: Array | None  # [B]


class Operands(NamedTuple):
    """The arrays that have gradients, or their gradients."""

    query: Array  # [B, T, N, H]
    key: Array  # [B, S, K, H]
    value: Array  # [B, S, K, H]
    bias: Array | None  # [B or 1, N or 1, T or 1, S or 1]


def as_masks(mask: Array | None, lengths: tuple[Array | None, Array | None], q: Array, k: Array) -> Masks:
    """From arrays in the public function's form, `[*batch or 1s, ...]`; with both lengths or none."""
    if lengths[0] is None and lengths[1] is None:
        return Masks(mask, None, None)
    lengths_and_sizes = zip(lengths, (q.shape[-3], k.shape[-3]), strict=True)
    clipped = [jnp.int32(size) if x is None else jnp.clip(x[..., 0], 0, size) for x, size in lengths_and_sizes]
    return Masks(mask, *(jnp.broadcast_to(x, q.shape[:-3]) for x in clipped))


# When it can run.


def reason_against(config: Config, given: dict[str, Array], return_residual: bool) -> str | None:
    """Why cuDNN cannot run with these arguments, or None; known when they are traced.

    Unless the user has named it, it is not taken where it only might fail: for arrays that the compiler splits over
    devices as it likes, of which cuDNN's call takes few layouts.

    Args:
      config: the static parameters. An error for other platforms says that the user has named cuDNN.
      given: all arrays and functions that the user gave, by their names.
      return_residual: whether the logsumexp is asked for.
    """
    q, k, v, bias = given["q"], given["k"], given["v"], given.get("bias")
    if q.dtype not in (jnp.float16, jnp.bfloat16):  # first, since the other questions would delay an eager call
        return f"the dtype is {q.dtype}, not float16 or bfloat16"
    num_queries, num_keys, width = q.shape[-3], k.shape[-3], q.shape[-1]
    arrays = [given[name] for name in ("q", "k", "v", "bias", "mask") if name in given]
    is_unnamed, names = config.otherwise is None, given.keys()
    has_window, (left, right) = config.plan.window is not None, config.plan.window or (0, 0)
    reasons = {
        "the value's width is not the query's": v.shape[-1] != width,
        f"the width {width} is not a multiple of 8": width % 8 != 0,
        f"there are {q.ndim - 3} batch dimensions, not at most one": q.ndim > 4,
        "a size is symbolic": any(map(sharding.has_symbolic_size, arrays)),
        "an array is empty": 0 in q.shape + k.shape,
        "the number of queries or of keys is odd": num_queries % 2 == 1 or num_keys % 2 == 1,
        "the scale is not a number": "scale" in given,
        "it has no causal_offset": "offset" in given,
        "it has no positions": not names.isdisjoint({"query_positions", "key_positions"}),
        "it has no sinks": "sinks" in given,
        "it has no score_mod and no mask_mod": not names.isdisjoint({"score_mod", "mask_mod"}),
        "it has no axis_name": config.plan.ring is not None,
        "it has no segments": "query_segments" in given,
        "it has no logit_soft_cap": config.plan.soft_cap is not None,
        "its dropout takes no key": "dropout_key" in given,
        "its logsumexp is rounded to 16 bits and has no gradient": return_residual,
        "its window has a left side only": left < 0 or right < 0 or (right > 0 and not config.plan.is_causal),
        "its window takes no mask, bias or lengths": has_window and not names.isdisjoint({"bias", *Masks._fields}),
        "its window takes no more queries than keys": has_window and num_queries > num_keys,
        "the bias has another dtype than the query": bias is not None and bias.dtype != q.dtype,
        "the bias is not one for all queries and keys": bias is not None and bias.shape[-2:] != (num_queries, num_keys),
        "an array is split over an explicit mesh": any(map(sharding.is_sharded, arrays)),
        "the compiler may split the arrays over a mesh": is_unnamed and any(map(sharding.is_on_automatic_mesh, arrays)),
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    found = found or _refusal_of_jax(width, q.dtype)
    return found or ("a GPU here is older than compute capability 8.0" if _has_old_gpu() else None)


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


# The op.


@functools.partial(jax.jit, static_argnums=0)
def attention(config: Config, operands: Operands, masks: Masks) -> Array:
    """The output `[*batch, T, N, H]`, by cuDNN if the program is lowered for CUDA."""
    if operands.query.ndim == 3:
        return attention(config, *jax.tree.map(lambda x: x[None], (operands, masks)))[0]

    def elsewhere(operands: Operands, masks: Masks) -> Array:
        if config.otherwise is not None:
            return platforms.refused_when_lowered(config.otherwise, operands.query)
        return _in_blocks(config, operands, masks)[0]

    return platforms.on_cuda_or_elsewhere(functools.partial(_attention, config), elsewhere, operands, masks)


def _in_blocks(config: Config, operands: Operands, masks: Masks) -> tuple[Array, Array]:
    """The output and the logsumexp `[B, T, N]`, with the contract kept."""
    q, k, v, bias = operands
    pairs = _intervals(config, operands, masks)._replace(bias=bias, allowed=masks.mask)
    return attend(config.plan, q, k, v, pairs)


# Values and first derivatives in reverse mode come from cuDNN; every other derivative is that of the blockwise form.


def _plain(config: Config, operands: Operands, masks: Masks) -> Array:
    with forward_mode():
        return _in_blocks(config, operands, masks)[0]


def _forward(config: Config, operands: Operands, masks: Masks) -> tuple[Array, tuple[Array, Saved]]:
    @_over_vmap
    def whole_batch(operands: Operands, masks: Masks) -> tuple[Array, Saved]:
        out, lse, saved = _run_kernel(config, operands, masks)
        sees_any = _queries_that_see_any(config, operands, masks)
        out, lse = selected(out, sees_any), selected(lse, sees_any)
        is_query_sound, is_key_sound = _are_sound(config, operands)
        is_query_sound &= jnp.isfinite(out) & (jnp.abs(lse) < _limit(operands, masks))
        is_sound = _all_true(is_query_sound, is_key_sound)
        is_bad = ~(is_sound & _products_are_small(config, operands, masks))
        out = _repaired_if(is_bad, out, functools.partial(_repair_output, config), operands, masks)
        return out, [*saved, jnp.broadcast_to(is_bad, out.shape[:1])]

    out, saved = whole_batch(operands, masks)
    return out, (out, saved)


def _in_small_tiles(config: Config) -> Config:
    """For the repairs, whose memory is reserved even if nothing is repaired.

    Nor are they to make the program large: with a band, each part of the queries would have kernels of its own.
    """
    sizes = config.plan.sizes
    sizes = sizes._replace(row_tile_logits=sizes.repair_row_tile_logits)
    return config._replace(plan=config.plan._replace(sizes=sizes, band=None))


def _repair_output(config: Config, operands: Operands, masks: Masks) -> Array:
    exact, lse = _in_blocks(_in_small_tiles(config), operands, masks)
    _, again, _, is_usable = _run_again(config, operands, masks, lse)
    return _preferred(is_usable & jnp.isfinite(lse)[..., None], again, exact)


def _run_again(config: Config, operands: Operands, masks: Masks, lse: Array) -> tuple[Operands, Array, Saved, Array]:
    """The arrays cleaned, the kernel's output for them, what its reverse pass needs, and whether these are usable.

    They are if no masked pair had a weight; `lse` is that of the blockwise form.
    """
    clean = _cleaned(config, operands, masks)
    again, again_lse, saved = _run_kernel(config, clean, masks)
    seen_lse = jnp.where(jnp.isfinite(lse)[..., None], again_lse, 0)
    is_usable = jnp.all(jnp.abs(seen_lse) < _limit(clean, masks)) & _products_are_small(config, clean, masks)
    return clean, again, saved, is_usable


def _preferred(is_usable: Array, again: Array, exact: Array) -> Array:
    """The kernel's second result, unless the blockwise form knows better."""
    return jnp.where(is_usable & jnp.isfinite(again) & jnp.isfinite(exact), again, exact)


def _reverse(
    config: Config, args: tuple[Operands, Masks], residuals: tuple[Array, Saved], d_out: Array
) -> tuple[Operands, Masks]:
    @_over_vmap
    def whole_batch(operands: Operands, masks: Masks, out: Array, saved: Saved, d_out: Array) -> Operands:
        *saved, was_bad = saved
        d_out = selected(d_out, _queries_that_see_any(config, operands, masks))
        gradients = _pull_back_kernel(config, operands, masks, out, saved, d_out)
        is_sound = jax.tree.map(jnp.isfinite, gradients)
        are_sound = _all_true(is_sound.query, is_sound.key & is_sound.value)
        are_sound = are_sound if is_sound.bias is None else are_sound & jnp.all(is_sound.bias)
        repair = functools.partial(_repair_gradients, config)
        return _repaired_if(jnp.any(was_bad) | ~are_sound, gradients, repair, operands, masks, d_out)

    return whole_batch(*args, *residuals, d_out), Masks(None, None, None)


_attention = rule_of_kernels(_forward, _reverse, lambda config, args, *_: args, plain=_plain)


def _repair_gradients(config: Config, operands: Operands, masks: Masks, d_out: Array) -> Operands:
    in_blocks = functools.partial(_in_blocks, _in_small_tiles(config), masks=masks)
    (_, lse), reverse = jax.vjp(in_blocks, operands)
    (exact,) = reverse((d_out, jnp.zeros_like(lse)))
    clean, again_out, saved, is_usable = _run_again(config, operands, masks, lse)
    clean_d_out = jnp.where(jnp.isfinite(d_out) & jnp.isfinite(lse)[..., None], d_out, 0)
    again = _pull_back_kernel(config, clean, masks, again_out, saved, clean_d_out)
    return Operands(*jax.tree.map(functools.partial(_preferred, is_usable), again, exact))


def _repaired_if(is_bad: Array, results: _T, repair: Callable[..., _T], *args: Any) -> _T:
    """`repair(*args)` if the scalar `is_bad` holds, else `results`, at no cost."""

    def again(results: _T) -> Any:
        # XLA must not move work out of the loop, nor choose layouts outside for the sake of the loop.
        held_args, _ = lax.optimization_barrier((args, results))
        return _in_row_major(repair(*_in_row_major(held_args)))

    return once_if(is_bad, again, results)


def _in_row_major(tree: Any) -> Any:
    return jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if x.ndim > 1 else x, tree)


def _over_vmap(fn: Callable[..., _T]) -> Callable[..., _T]:
    """`fn` of operands and masks; under `jax.vmap`, of the whole batch at once, or in turn where arrays mask the pairs.

    `jax.nn`'s own rule for `jax.vmap` takes few kinds of batches. Arrays over pairs are not repeated for every element.
    """
    op = custom_vmap(fn)

    @op.def_vmap
    def over_batch(number: int, is_batched: Any, *args: Any) -> Any:
        batch = args[0].query.shape[-4]

        def element(i: Array) -> Any:
            return op(*jax.tree.map(lambda x, flag: x[i] if flag else x, args, tuple(is_batched)))

        def merged(x: Array, flag: bool) -> Array:
            x = x if flag else x[None]
            return jnp.broadcast_to(x, (number, batch, *x.shape[2:])).reshape(number * batch, *x.shape[2:])

        if _has_arrays(*args[:2]):
            results = lax.map(element, jnp.arange(number))
        else:
            results = op(*jax.tree.map(merged, args, tuple(is_batched)))
            results = jax.tree.map(lambda x: x.reshape(number, batch, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return op


# The kernel.


def _run_kernel(config: Config, operands: Operands, masks: Masks) -> tuple[Array, Array, Saved]:
    """The output and the logsumexp `[B, T, N, 1]` with cuDNN's faults, and what the reverse pass needs besides.

    `jax.nn` rounds the logsumexp to 16 bits.
    """
    operands, masks = _for_kernel(operands, masks)
    (out, lse), pull_back = jax.vjp(lambda operands: _call(config, operands, masks), operands)
    saved, _ = _split(pull_back, (operands, masks, out))
    return _varying_with((out, lse.astype(jnp.float32)[..., None], saved), (operands, masks))


def _pull_back_kernel(
    config: Config, operands: Operands, masks: Masks, out: Array, saved: Saved, d_out: Array
) -> Operands:
    """The kernel's gradients; exactly 0 for what takes no part, which the kernel may leave unwritten."""
    known = *_for_kernel(operands, masks), out
    joins = []

    def trace(operands: Operands, masks: Masks, _: Array) -> None:
        (out, _), pull_back = jax.vjp(lambda operands: _call(config, operands, masks), operands)
        joins.append(_split(pull_back, (operands, masks, out))[1])

    jax.eval_shape(trace, *known)
    (gradients,) = joins[0](saved, known)((d_out, jnp.zeros_like(d_out[..., 0])))
    return _zero_where_masked(config, operands, masks, _varying_with(gradients, (operands, masks, d_out)))


def _varying_with(tree: _T, others: Any) -> _T:
    """Inside `jax.shard_map` the results of the kernel do not vary by themselves."""
    return sharding.vary_with(tree, others) if jax.sharding.get_abstract_mesh().manual_axes else tree


def _call(config: Config, operands: Operands, masks: Masks) -> tuple[Array, Array]:
    return jax.nn.dot_product_attention(
        *operands,
        masks.mask,
        scale=config.plan.scale,
        is_causal=config.plan.is_causal or config.plan.window is not None,
        query_seq_lengths=masks.query_lengths,
        key_value_seq_lengths=masks.key_lengths,
        local_window_size=config.plan.window and (config.plan.window[0], 0),
        implementation="cudnn",
        return_residual=True,
    )


def _for_kernel(operands: Operands, masks: Masks) -> tuple[Operands, Masks]:
    """With the bias that masks as a mask, and the mask for all queries and keys."""
    mask = _allowed_by_arrays(operands, masks)
    if mask is None:
        return operands, masks
    mask = jnp.broadcast_to(mask, (*mask.shape[:2], operands.query.shape[1], operands.key.shape[1]))
    return operands._replace(bias=_unmasked_bias(operands.bias, mask)), masks._replace(mask=mask)


def _unmasked_bias(bias: Array | None, mask: Array) -> Array | None:
    """The bias or its gradient, 0 where all pairs that share it are masked."""
    if bias is None:
        return None
    shared = [axis for axis in (0, 1) if bias.shape[axis] == 1]
    return jnp.where(any_of(mask, shared, keepdims=True), bias, 0)


def _split(pull_back: Any, known: Any) -> tuple[Saved, Callable[[Saved, Any], Any]]:
    """The arrays that a pull-back holds besides those of `known`, and a function that puts it together again."""
    leaves, tree = jax.tree.flatten(pull_back)
    places = [next((n for n, x in enumerate(jax.tree.leaves(known)) if x is leaf), None) for leaf in leaves]
    empty = {n: (leaf.shape, leaf.dtype) for n, leaf in enumerate(leaves) if leaf.size == 0}
    saved = [leaf for n, leaf in enumerate(leaves) if places[n] is None and n not in empty]

    def join(saved: Saved, known: Any) -> Any:
        rest, known = iter(saved), jax.tree.leaves(known)
        leaves = [
            jnp.zeros(*empty[n]) if n in empty else next(rest) if place is None else known[place]
            for n, place in enumerate(places)
        ]
        return jax.tree.unflatten(tree, leaves)

    return saved, join


# What the results tell.


def _all_true(by_query: Array, by_key: Array) -> Array:
    """Whether all elements hold, of an array `[B, T, N, H]` and of one `[B, S, K, H]`.

    In self-attention a key head is compared with the query heads that share it, so that XLA makes one pass of it all.
    """
    batch, num_keys, key_heads, width = by_key.shape
    if by_query.shape[1] != num_keys:
        return jnp.all(by_query) & jnp.all(by_key)
    return jnp.all(by_query.reshape(batch, num_keys, key_heads, -1, width) & by_key[..., None, :])


def _are_sound(config: Config, operands: Operands) -> tuple[Array | bool, Array]:
    """Which queries, and which keys with their values, are not bad, but for what shows in the results.

    No float16 is too large for a product: there queries and values need not be read.
    """
    q, k, v = operands[:3]
    is_key_sound = are_bounded(k)
    if q.dtype == jnp.float16:
        return True, is_key_sound
    return are_bounded(q, config.plan.scale), is_key_sound & are_bounded(v)


def _limit(operands: Operands, masks: Masks) -> float:
    """Logits below this cannot be outweighed by masked pairs, nor those below minus this be unmasked ones.

    cuDNN's structural masks put -inf, or in older versions -2**30, in place of a logit; for arrays `jax.nn` adds -2**41
    in bfloat16, -2**15 in float16.
    """
    return 2.0**13 if _has_arrays(operands, masks) and operands.query.dtype == jnp.float16 else 2.0**29


def _products_are_small(config: Config, operands: Operands, masks: Masks) -> Array | bool:
    """Whether no logit of a pair that an array masks can exceed the limit: it is at most the product of the norms."""
    if not _has_arrays(operands, masks):
        return True
    largest_q, largest_k = (jnp.sqrt(jnp.max(jnp.sum(jnp.square(x.astype(jnp.float32)), -1))) for x in operands[:2])
    return abs(config.plan.scale) * largest_q * largest_k < _limit(operands, masks)


# What is masked.


def _intervals(config: Config, operands: Operands, masks: Masks) -> Pairs:
    """The structural masks; made again where they are needed, so that no loop has to carry them."""
    num_queries, num_keys = operands.query.shape[-3], operands.key.shape[-3]
    index = jnp.arange(num_queries, dtype=jnp.int32).reshape((1,) * (operands.query.ndim - 3) + (num_queries,))
    bounds = seen_positions(index, config.plan.is_causal, config.plan.window)
    lengths = [None if x is None else x[..., None] for x in masks[1:]]
    return Pairs(*seen_keys(num_queries, num_keys, *bounds, *lengths))


def _allowed_by_arrays(operands: Operands, masks: Masks) -> Array | None:
    """Where neither the mask nor a bias of -inf excludes a pair."""
    return both(masks.mask, None if operands.bias is None else operands.bias != -jnp.inf)


def _unmasked_pairs(config: Config, operands: Operands, masks: Masks) -> Array:
    """`[B, K, G, T, S]` up to broadcasting; XLA fuses it into the reductions over it."""
    q, k = operands[:2]
    grouped = grouped_heads(_allowed_by_arrays(operands, masks), k.shape[2])
    pairs = _intervals(config, operands, masks)._replace(allowed=grouped)
    mask = block_of(pairs, whole(q.shape[1]), whole(k.shape[1])).mask
    assert mask is not None
    return jnp.broadcast_to(mask, (*mask.shape[:3], q.shape[1], k.shape[1]))


def _has_arrays(operands: Operands, masks: Masks) -> bool:
    return operands.bias is not None or masks.mask is not None


def _queries_that_see_any(config: Config, operands: Operands, masks: Masks) -> Array | None:
    """`[B or 1, T, N or 1, 1]`; None if every query sees a key, as with no mask but the causal one or a window."""
    if _has_arrays(operands, masks):
        q, k = operands[:2]
        sees_any = any_of(_unmasked_pairs(config, operands, masks), -1)
        sees_any = jnp.broadcast_to(sees_any, (sees_any.shape[0], k.shape[2], q.shape[2] // k.shape[2], q.shape[1]))
        return jnp.moveaxis(sees_any.reshape(sees_any.shape[0], q.shape[2], q.shape[1], 1), 1, 2)
    first, end = _intervals(config, operands, masks)[:2]
    if masks.key_lengths is None or end is None:
        return None
    return (end > (0 if first is None else first))[..., None, None]


def _keys_that_are_seen(config: Config, operands: Operands, masks: Masks) -> Array | None:
    """`[B or 1, S, K or 1, 1]`; None if every key is."""
    q, k = operands[:2]
    if _has_arrays(operands, masks):
        return jnp.swapaxes(any_of(_unmasked_pairs(config, operands, masks), (2, 3)), 1, 2)[..., None]
    first, end = _intervals(config, operands, masks)[:2]
    if end is None or (masks.key_lengths is None and q.shape[1] >= k.shape[1]):
        return None
    end = jnp.max(end if first is None else jnp.where(first < end, end, 0), 1)  # they overlap, from the first key on
    return (jnp.arange(k.shape[1], dtype=jnp.int32) < end[:, None])[..., None, None]


def _zero_where_masked(config: Config, operands: Operands, masks: Masks, gradients: Operands) -> Operands:
    sees_any, is_seen = _queries_that_see_any(config, operands, masks), _keys_that_are_seen(config, operands, masks)
    d_q, d_k, d_v, d_bias = gradients
    if d_bias is not None and (config.plan.is_causal or masks.key_lengths is not None):
        pairs = _unmasked_pairs(config, operands, masks)
        d_bias = _unmasked_bias(d_bias, pairs.reshape(pairs.shape[0], -1, *pairs.shape[3:]))
    elif d_bias is not None:
        d_bias = jnp.where(operands.bias == -jnp.inf, 0, d_bias)  # the weight 0 may have made -0 of it
    return Operands(selected(d_q, sees_any), selected(d_k, is_seen), selected(d_v, is_seen), d_bias)


def _cleaned(config: Config, operands: Operands, masks: Masks) -> Operands:
    """With 0 for bad elements, for queries that see no key and for keys that no query sees."""
    q, k, v = cleaned(operands.query, config.plan.scale), cleaned(operands.key), cleaned(operands.value)
    bias = operands.bias
    if bias is not None:
        bias = selected(bias, jnp.isfinite(bias) | (bias == -jnp.inf))  # which still masks
    return _zero_where_masked(config, operands, masks, Operands(q, k, v, None))._replace(bias=bias)
