"""Masks of attention that are functions of positions, for the argument `mask_mod` of `dot_product_attention`.

Each is called with the indices of a sample and a query head and the positions of a query and a key. `a & b`, `a | b`
and `~a` are masks again, and a function of one's own becomes one with `AttentionMask(function)`.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from masksafe._core.arguments import as_integer_array, message
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

    def __post_init__(self) -> None:
        if not callable(self.allows):
            raise TypeError(message("AttentionMask", "allows", f"type {type(self.allows).__name__}", "a function"))

    def __and__(self, other: Callable[..., Any]) -> AttentionMask:
        if not callable(other):
            return NotImplemented
        return AttentionMask(lambda *pair: jnp.logical_and(self(*pair), other(*pair)))

    def __or__(self, other: Callable[..., Any]) -> AttentionMask:
        if not callable(other):
            return NotImplemented
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
    for argument, width in (("left", left), ("right", right)):
        if not isinstance(width, numbers.Integral):
            raise TypeError(message("attention_masks.window", argument, f"value {width!r}", "an int"))
    return AttentionMask(lambda batch, head, query, key: (query - key <= left) & (key - query <= right))


def chunked(size: ArrayLike) -> AttentionMask:
    """A query sees the keys of its own chunk of `size` positions, an integer, as in the chunked layers of Llama 4.

    Example:
      >>> from masksafe.attention_masks import causal, chunked
      >>> print([bool((causal & chunked(4))(0, 0, 6, key)) for key in range(8)])
      [False, False, False, False, True, True, True, False]
    """
    positions = as_integer_array("attention_masks.chunked", "size", size)
    if isinstance(size, numbers.Integral) and size < 1:
        raise ValueError(message("attention_masks.chunked", "size", f"value {size}", "a positive integer"))
    return AttentionMask(lambda batch, head, query, key: query // positions == key // positions)


def prefix(length: ArrayLike) -> AttentionMask:
    """A query sees the keys before position `length`, an integer, or integers `[batch]` for each sample its own.

    With `causal |` it is the mask of a prefix language model: a prompt that sees itself as a whole.

    Example:
      >>> from masksafe.attention_masks import causal, prefix
      >>> print([bool((causal | prefix(3))(0, 0, 1, key)) for key in range(5)])
      [True, True, True, False, False]
    """
    lengths = as_integer_array("attention_masks.prefix", "length", length)
    return AttentionMask(lambda batch, head, query, key: key < (lengths if lengths.ndim == 0 else lengths[batch]))
