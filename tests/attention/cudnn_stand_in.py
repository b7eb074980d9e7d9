"""A stand-in for cuDNN's attention kernel, with its faults, for machines that have none.

Like the kernel it is called through `jax.nn.dot_product_attention`, and has a reverse rule of its own.

* A masked pair has weight 0, but the products contract over it: 0 times NaN is NaN.
* A query that sees no key gets an average over masked keys.
* Queries and keys beyond the lengths are not written; what is found there is 7 here.
* An array that masks becomes a finite bias, as in `jax.nn`.
* With an array, and 64 more keys than a multiple of 128, gradients of queries with a logsumexp below -88.7 are NaN.
* Key heads are shared by groups of query heads, weights are rounded to the dtype of the values.
* `jax.vmap` may not go over it: `jax.nn` takes a batch in front alone, and older versions only one of all arrays.
"""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.custom_batching import custom_vmap

from masksafe._core import platforms
from masksafe.attention import _cudnn

UNWRITTEN = 7


@contextlib.contextmanager
def installed():
    """CuDNN seems to be there, and every program to be lowered for CUDA."""
    with pytest.MonkeyPatch.context() as patch, platforms.chosen(form="cuda"):
        patch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
        patch.setattr(_cudnn, "_refusal_of_jax", lambda *_: None)
        patch.setattr(_cudnn, "_has_old_gpu", lambda: False)
        yield


class Structure(NamedTuple):
    scale: float
    is_causal: bool
    left: int | None


def dot_product_attention(query, key, value, bias=None, mask=None, *, implementation, return_residual=False, **options):
    """In the form of `jax.nn.dot_product_attention`."""
    assert implementation == "cudnn"
    T, S = query.shape[1], key.shape[1]
    assert T % 2 == S % 2 == 0
    assert query.dtype in (jnp.float16, jnp.bfloat16)
    assert query.ndim == 4
    for x in (bias, mask):
        assert x is None or x.shape[-2:] == (T, S)
    if mask is not None:
        masked = jnp.asarray(-2 << (40 if query.dtype == jnp.bfloat16 else 14), query.dtype)
        masked = jnp.where(mask, jnp.zeros((), query.dtype), masked)
        bias = masked if bias is None else bias + masked
    lengths, window = options["query_seq_lengths"], options["local_window_size"]
    lengths = None if lengths is None else (lengths, options["key_value_seq_lengths"])
    assert window is None or (options["is_causal"] and window[1] == 0)
    structure = Structure(options["scale"], options["is_causal"], None if window is None else window[0])
    out, lse = _attend(structure, query, key, value, bias, lengths)
    return (out, lse.astype(query.dtype)) if return_residual else out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(structure, q, k, v, bias, lengths):
    return _forward(structure, q, k, v, bias, lengths)[0]


@custom_vmap
def _without_vmap(*arrays):
    return arrays


@_without_vmap.def_vmap
def _(*_):
    raise AssertionError("The kernel is called under jax.vmap.")


def _forward(structure, q, k, v, bias, lengths):
    q, k, v = _without_vmap(q, k, v)
    out, lse = _results(structure, q, k, v, bias, lengths)
    if lengths is not None:
        out, lse = _unwritten_beyond(lengths[0], out), _unwritten_beyond(lengths[0], lse)
    return (out, lse), (q, k, v, bias, lengths)


def _reverse(structure, residuals, cotangents):
    q, k, v, bias, lengths = residuals
    q, k, v = _without_vmap(q, k, v)
    _, pull_back = jax.vjp(lambda *args: _results(structure, *args, lengths)[0], q, k, v, bias)
    *gradients, d_bias = pull_back(cotangents[0])
    if bias is not None and k.shape[1] % 128 == 64:
        lse = _results(structure, q, k, v, bias, lengths)[1]
        gradients[0] = jnp.where((lse < -88.7)[..., None], jnp.nan, gradients[0])
    if lengths is not None:
        gradients = [_unwritten_beyond(n, x) for n, x in zip((lengths[0], *2 * (lengths[1],)), gradients, strict=True)]
    return (*gradients, d_bias, None)


_attend.defvjp(_forward, _reverse)


def _results(structure, q, k, v, bias, lengths):
    """The output and the logsumexp `[B, T, N]`."""
    wide = jnp.float32
    x = structure.scale * jnp.einsum("btnh,bsnh->bnts", q.astype(wide), _by_query_head(k, q).astype(wide))
    if bias is not None:
        x += bias.astype(wide)
    t, s = (jax.lax.broadcasted_iota(jnp.int32, (1, 1, *x.shape[2:]), axis) for axis in (2, 3))
    if structure.is_causal:
        x = jnp.where(s <= t, x, -1e30)
    if structure.left is not None:
        x = jnp.where(s >= t - structure.left, x, -1e30)
    if lengths is not None:
        x = jnp.where(s < lengths[1].astype(jnp.int32)[:, None, None, None], x, -1e30)
    largest = jnp.max(jnp.where(jnp.isnan(x), -jnp.inf, x), -1, keepdims=True)  # as the hardware's maximum does
    exps = jnp.exp(x - jax.lax.stop_gradient(largest))
    total = exps.sum(-1, keepdims=True)
    p = (exps / total).astype(q.dtype)
    out = jnp.einsum("bnts,bsnh->btnh", p, _by_query_head(v, q), preferred_element_type=wide)
    return out.astype(q.dtype), jnp.moveaxis((largest + jnp.log(total))[..., 0], 1, 2)


def _by_query_head(x, q):
    return jnp.repeat(x, q.shape[2] // x.shape[2], 2)


def _unwritten_beyond(lengths, x):
    is_written = jnp.arange(x.shape[1], dtype=lengths.dtype)[None] < lengths[:, None]
    return jnp.where(is_written.reshape(*is_written.shape, *[1] * (x.ndim - 2)), x, jnp.asarray(UNWRITTEN, x.dtype))
