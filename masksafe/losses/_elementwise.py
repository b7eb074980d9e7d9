"""The scheme of the losses that need no custom derivative rule.

Masked elements are replaced by 0 before the arithmetic, which is done in at least float32, and their results are
replaced by 0 after it. JAX's own derivatives for masked elements are then exactly 0.

The arithmetic is jitted: in eager code it is then one call rather than one for each operation, and the NaN of masked
elements stay hidden even from jax_debug_nans. The functions in it are static arguments, by which the compiled code is
found again, so they must not be made anew in each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from masksafe._core.arguments import broadcast_shapes
from masksafe._core.label_checks import check_elements, nan_where_bad
from masksafe._core.masks import selected
from masksafe._core.sharding import is_sharded
from masksafe._core.typing import Array, ArrayLike
from masksafe.losses._layout import as_mask_of_elements_or_rows, wide_selected


def elementwise_loss(
    op: str,
    where: ArrayLike | None,
    types: Sequence[Any],
    loss: Callable[..., Array],
    *,
    bad: Array | None = None,
    **arguments: Array,
) -> Array:
    """`loss` of each element of the arguments, which broadcast together; 0 where masked, NaN where `bad`.

    The result has the dtype to which JAX promotes `types`: arrays, numbers or dtypes. `loss` gets the arguments by
    name.
    """
    shape = broadcast_shapes(op, **{name: x.shape for name, x in arguments.items()})
    mask = as_mask_of_elements_or_rows(op, where, shape, ())
    config = _Config(loss, tuple(arguments), shape, promoted(types))
    result: Array = _evaluate(config, tuple(arguments.values()), mask, bad)
    return result


class _Config(NamedTuple):
    """The static arguments."""

    loss: Callable[..., Array]
    names: tuple[str, ...]  # of its arguments
    shape: tuple[int, ...]
    type: Promoted


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(config: _Config, arguments: tuple[Array, ...], mask: Array | None, bad: Array | None) -> Array:
    arrays = [wide_selected(x, mask) for x in broadcast_alike(arguments, config.shape)]
    loss = selected(config.loss(**dict(zip(config.names, arrays, strict=True))), mask)
    return config.type.cast(nan_where_bad(loss, bad))


def bad_elements(
    op: str, where: ArrayLike | None, is_valid: Callable[[Array], Array], otherwise: str, **arguments: Array
) -> Array | None:
    """Which of the labels, the last of the arguments, are invalid, if label checks are on; see `check_elements`."""
    shape = broadcast_shapes(op, **{name: x.shape for name, x in arguments.items()})
    labels = jnp.broadcast_to(list(arguments.values())[-1], shape)
    return check_elements(op, labels, as_mask_of_elements_or_rows(op, where, shape, ()), is_valid, otherwise)


def broadcast_alike(arrays: Iterable[Array], shape: tuple[int, ...]) -> list[Array]:
    """The arrays broadcast to `shape`, and split over the explicit axes of a mesh like the first one that is split."""
    whole = [jnp.broadcast_to(x, shape) for x in arrays]
    specs = [jax.typeof(x).sharding.spec for x in whole]
    spec = next((spec for spec, x in zip(specs, whole, strict=True) if is_sharded(x)), None)
    if spec is None:
        return whole
    return [x if present == spec else jax.sharding.reshard(x, spec) for present, x in zip(specs, whole, strict=True)]


class Promoted(NamedTuple):
    """A promoted type; weak, like that of a Python number, if a narrow dtype takes precedence over it."""

    dtype: Any
    is_weak: bool

    def cast(self, x: Array) -> Array:
        """`x` in this type."""
        if not self.is_weak:
            return x.astype(self.dtype)
        number = 0.0 if jnp.issubdtype(self.dtype, jnp.floating) else 0
        weak: Array = jnp.vectorize(lambda element: jax.lax.full_like(number, element))(x)
        return weak


def promoted(types: Sequence[Any]) -> Promoted:
    """The type to which JAX promotes `types`: arrays, numbers or dtypes."""
    dtype = jnp.result_type(*types)
    return Promoted(dtype, _is_weak(types, dtype))


def _is_weak(types: Sequence[Any], dtype: Any) -> bool:
    """Whether `dtype`, the promoted dtype of `types`, is weak."""
    numbers = [x for x in types if isinstance(x, (int, float, jax.Array))]
    if not any(jax.typeof(x).weak_type for x in numbers):
        return False
    narrow = jnp.dtype(jnp.bfloat16 if jnp.issubdtype(dtype, jnp.floating) else jnp.int8)
    with jax.numpy_dtype_promotion("standard"):
        return bool(dtype != narrow and jnp.result_type(*types, narrow) == narrow)
