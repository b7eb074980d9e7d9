"""Masks of attention that are functions of positions, for the argument `mask_mod` of `dot_product_attention`.

Each is called with the indices of a sample and a query head and the positions of a query and a key. `a & b`, `a | b`
and `~a` are masks again, and a function of one's own becomes one with `AttentionMask(function)`. Python's `and`, `or`
and `not` are refused: they would take one of the two masks for the other.

Masks can be compared and hashed, by what they hold, and pickled if their functions can. They are pytrees, whose leaves
are their arrays and functions of one's own.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from masksafe._core.arguments import as_integer_array, check_is_known, message
from masksafe._core.typing import Array, ArrayLike

_T = TypeVar("_T")

__all__ = ["AttentionMask", "causal", "chunked", "prefix", "window"]


@dataclass_transform(eq_default=False, frozen_default=True)
def _pytree(cls: type[_T]) -> type[_T]:
    """Makes a frozen dataclass that is a pytree, of which static fields are part of the structure.

    As a node of its own kind: two of `jax.tree_util.register_dataclass` are equal if their fields are, whatever their
    classes, and a jitted function would take the program of one for the other.
    """
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    arrays, static = (
        [f.name for f in dataclasses.fields(cls) if f.metadata.get("static", False) == is_static]  # type: ignore[arg-type]
        for is_static in (False, True)
    )

    def flatten(x: _T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(x, name) for name in arrays), tuple(getattr(x, name) for name in static)

    def unflatten(statics: tuple[Any, ...], children: tuple[Any, ...]) -> _T:
        x = object.__new__(cls)  # without __init__, since JAX may put anything in the place of an array
        for name, value in zip([*arrays, *static], [*children, *statics], strict=True):
            object.__setattr__(x, name, value)
        return x

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


@_pytree
class AttentionMask:
    """A function `(batch, head, query_position, key_position) -> bool` that can be joined with others.

    Args:
      allows: says whether a query sees a key.

    Example:
      >>> from masksafe.attention_masks import AttentionMask, causal
      >>> even = AttentionMask(lambda batch, head, query, key: (query - key) % 2 == 0)
      >>> print((causal & even)(0, 0, 5, 3), (causal & ~even)(0, 0, 5, 3))
      True False
    """

    allows: Callable[..., Any]

    def __call__(self, batch: Any, head: Any, query_position: Any, key_position: Any) -> Any:
        return self.allows(batch, head, query_position, key_position)

    def __post_init__(self) -> None:
        if not callable(self.allows):
            raise TypeError(message("AttentionMask", "allows", f"type {type(self.allows).__name__}", "a function"))

    def __and__(self, other: Callable[..., Any]) -> AttentionMask:
        return AttentionMask(_Joined((self, other), "logical_and")) if callable(other) else NotImplemented

    def __or__(self, other: Callable[..., Any]) -> AttentionMask:
        return AttentionMask(_Joined((self, other), "logical_or")) if callable(other) else NotImplemented

    def __invert__(self) -> AttentionMask:
        return AttentionMask(_Joined((self,), "logical_not"))

    __rand__, __ror__ = __and__, __or__

    def __bool__(self) -> NoReturn:
        raise TypeError("AttentionMask: a mask is neither true nor false. Use | and & and ~ in place of or, and, not.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttentionMask) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())

    def _content(self) -> Hashable:
        leaves, kind = jax.tree.flatten(self)
        return kind, *map(_content_of_leaf, leaves)


def _content_of_leaf(x: Any) -> Hashable:
    """What decides whether two leaves are equal: for an array its numbers, unless it is traced."""
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        return x.dtype.name, x.shape, np.asarray(x).tobytes()
    try:
        hash(x)
    except TypeError:  # a tracer, or an object that holds an array
        return id(x)
    return x


# The functions are objects, since functions within functions can be neither compared nor pickled. Static fields are
# constants of the compiled program, and arrays its arguments.


def _static() -> Any:
    return dataclasses.field(metadata={"static": True})


@_pytree
class _Joined:
    masks: tuple[Callable[..., Any], ...]
    operation: str = _static()  # the name of a function of jax.numpy, which cannot be pickled itself

    def __call__(self, *pair: Any) -> Any:
        return getattr(jnp, self.operation)(*(mask(*pair) for mask in self.masks))


@_pytree
class _Causal:
    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query


@_pytree
class _Window:
    left: int = _static()
    right: int = _static()

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query - key <= self.left) & (key - query <= self.right)


@_pytree
class _Chunked:
    size: Array

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query // self.size == key // self.size


@_pytree
class Prefix:
    """The function of a `prefix` mask."""

    length: Array

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key < (self.length if self.length.ndim == 0 else self.length[batch])


causal = AttentionMask(_Causal())
"""The mask in which a query sees the keys at its own position and before."""


def window(left: int, right: int = 0) -> AttentionMask:
    """A query sees the keys up to `left` positions before its own and up to `right` after it.

    Args:
      left: an int. Either may be negative, but not their sum: -1 does not mean a window without an end, as it does for
        FlashAttention. A number as large as the longest sequence does.
      right: an int.

    Returns:
      An `AttentionMask`.

    Example:
      >>> from masksafe.attention_masks import window
      >>> print([bool(window(2)(0, 0, 5, key)) for key in range(8)])
      [False, False, False, True, True, True, False, False]
    """
    return AttentionMask(_Window(*as_window("attention_masks.window", "left and right", (left, right))))


def as_window(op: str, argument: str, window: Sequence[Any]) -> tuple[int, int]:
    """How far a query sees to the left and to the right; one of the two may be negative."""
    for n in window:
        check_is_known(op, argument, n, "an int or a tuple of two ints")
    if len(window) != 2 or any(not isinstance(n, numbers.Integral) or isinstance(n, bool) for n in window):
        raise TypeError(message(op, argument, f"value {window!r}", "an int or a tuple of two ints"))
    left, right = map(int, window)
    if left + right < 0:
        hint = "-1 does not mean a window without an end; a number as large as the longest sequence does."
        raise ValueError(message(op, argument, f"value {(left, right)}", "left + right of at least 0", hint))
    return left, right


def chunked(size: ArrayLike) -> AttentionMask:
    """A query sees the keys of its own chunk, as in the chunked layers of Llama 4.

    Args:
      size: the number of positions of a chunk, a positive integer; a scalar array will do.

    Returns:
      An `AttentionMask`.

    Example:
      >>> from masksafe.attention_masks import causal, chunked
      >>> print([bool((causal & chunked(4))(0, 0, 6, key)) for key in range(8)])
      [False, False, False, False, True, True, True, False]
    """
    op = "attention_masks.chunked"
    positions = as_integer_array(op, "size", size)
    if positions.ndim:
        raise ValueError(message(op, "size", f"shape {positions.shape}", "one integer for all samples"))
    # A JAX array is not checked: that would wait for its computation.
    if not isinstance(size, jax.Array) and np.min(size) < 1:
        raise ValueError(message(op, "size", f"value {size}", "a positive integer"))
    return AttentionMask(_Chunked(positions))


def prefix(length: ArrayLike) -> AttentionMask:
    """A query sees the keys before position `length`.

    `causal | prefix(length)` is the mask of a prefix language model, whose prompt sees itself as a whole.

    Args:
      length: an integer, or integers `[batch]`, one for each sample, all batch dimensions together;
        `dot_product_attention` refuses another number of them. Inside of `jax.vmap` the samples are those of one
        element, and inside of `jax.shard_map` those of one device: map or split the lengths like the queries.

    Returns:
      An `AttentionMask`.

    Example:
      >>> from masksafe.attention_masks import causal, prefix
      >>> print([bool((causal | prefix(3))(0, 0, 1, key)) for key in range(5)])
      [True, True, True, False, False]
    """
    op = "attention_masks.prefix"
    # A copy: JAX may use the memory of a NumPy array, and the mask is used later.
    lengths = as_integer_array(op, "length", np.array(length) if isinstance(length, np.ndarray) else length)
    if lengths.ndim > 1:
        raise ValueError(message(op, "length", f"shape {lengths.shape}", "an integer, or integers [batch]"))
    if not isinstance(length, jax.Array) and np.min(length, initial=0) < 0:
        raise ValueError(message(op, "length", f"value {length}", "a non-negative integer"))
    return AttentionMask(Prefix(lengths))


def check_samples(op: str, argument: str, mask: AttentionMask, samples: int) -> None:
    """Refuses a mask that holds lengths of another number of samples."""
    for leaf in jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, Prefix)):
        if isinstance(leaf, Prefix) and leaf.length.shape not in ((), (samples,)):
            found = f"a prefix mask of {leaf.length.size} lengths"
            expected = f"one length, or {samples}, one for each sample"
            hint = "Inside jax.vmap and jax.shard_map, samples are those of one element or one device."
            raise ValueError(message(op, argument, found, expected, hint))
