"""Masks of attention that are functions of positions, for the argument `mask_mod` of `dot_product_attention`.

Each is called with the indices of a sample and a query head and the positions of a query and a key. `a & b`, `a | b`
and `~a` are masks again, and a function of one's own becomes one with `AttentionMask(function)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from masksafe._core.typing import ArrayLike

__all__ = ["AttentionMask", "causal", "chunked", "prefix", "window"]


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """A function `(batch, head, query_position, key_position) -> bool` that can be joined with others.

    Args:
      allows: says whether a query sees a key.

    Example:
      >>> from masksafe.attention_masks import AttentionMask, causal
      >>> every_other = AttentionMask(lambda batch, head, query, key: (query - key) % 2 == 0)
      >>> print((causal & every_other)(0, 0, 5, 3), (causal & ~every_other)(0, 0, 5, 3))
      True False
    """

    allows: Callable[..., Any]

    def __call__(self, batch: Any, head: Any, query_position: Any, key_position: Any) -> Any:
        return self.allows(batch, head, query_position, key_position)

    def __and__(self, other: Callable[..., Any]) -> AttentionMask:
        return AttentionMask(lambda *pair: jnp.logical_and(self(*pair), other(*pair)))

    def __or__(self, other: Callable[..., Any]) -> AttentionMask:
        return AttentionMask(lambda *pair: jnp.logical_or(self(*pair), other(*pair)))

    def __invert__(self) -> AttentionMask:
        return AttentionMask(lambda *pair: jnp.logical_not(self(*pair)))

    __rand__, __ror__ = __and__, __or__


causal = AttentionMask(lambda batch, head, query, key: key <= query)
"""A query sees the keys at its own position and before."""


def window(left: int, right: int = 0) -> AttentionMask:
    """A query sees the keys up to `left` positions before its own and up to `right` after it.

    Example:
      >>> from masksafe.attention_masks import window
      >>> print([bool(window(2)(0, 0, 5, key)) for key in range(8)])
      [False, False, False, True, True, True, False, False]
    """
    return AttentionMask(lambda batch, head, query, key: (query - key <= left) & (key - query <= right))


def chunked(size: ArrayLike) -> AttentionMask:
    """A query sees the keys of its own chunk, of which each has `size` positions, as in the chunked layers of Llama 4.

    Example:
      >>> from masksafe.attention_masks import causal, chunked
      >>> print([bool((causal & chunked(4))(0, 0, 6, key)) for key in range(8)])
      [False, False, False, False, True, True, True, False]
    """
    return AttentionMask(lambda batch, head, query, key: query // size == key // size)


def prefix(length: ArrayLike) -> AttentionMask:
    """A query sees the keys before position `length`, an integer, or integers `[batch]` for each sample its own.

    With `causal |` it is the mask of a prefix language model: a prompt that sees itself as a whole.

    Example:
      >>> from masksafe.attention_masks import causal, prefix
      >>> print([bool((causal | prefix(3))(0, 0, 1, key)) for key in range(5)])
      [True, True, True, False, False]
    """
    lengths = jnp.asarray(length)
    return AttentionMask(lambda batch, head, query, key: key < (lengths if lengths.ndim == 0 else lengths[batch]))
