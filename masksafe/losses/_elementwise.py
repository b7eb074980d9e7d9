"""The scheme of the losses that need no custom derivative rule.

Masked elements are replaced by 0 before the arithmetic, which is done in at least float32, and their results are
replaced by 0 after it. JAX's own derivatives for masked elements are then exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

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

    The result has the dtype to which JAX promotes `types`: arrays, numbers or dtypes.
    """
    shape = broadcast_shapes(op, **{name: x.shape for name, x in arguments.items()})
    mask = as_mask_of_elements_or_rows(op, where, shape, ())
    arrays = (wide_selected(x, mask) for x in broadcast_alike(arguments.values(), shape))
    return cast_to_promoted(types, nan_where_bad(selected(loss(*arrays), mask), bad))


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


def cast_to_promoted(types: Sequence[Any], x: Array) -> Array:
    """`x` in the dtype to which JAX promotes `types`; weakly typed, like a Python number, if the promoted type is."""
    dtype = jnp.result_type(*types)
    if not _is_weak(types, dtype):
        return x.astype(dtype)
    number = 0.0 if jnp.issubdtype(dtype, jnp.floating) else 0
    weak: Array = jnp.vectorize(lambda element: jax.lax.full_like(number, element))(x)
    return weak


def _is_weak(types: Sequence[Any], dtype: Any) -> bool:
    """Whether `dtype`, the promoted dtype of `types`, is weak: a narrow dtype takes precedence over it."""
    numbers = [x for x in types if isinstance(x, (int, float, jax.Array))]
    if not any(jax.typeof(x).weak_type for x in numbers):
        return False
    narrow = jnp.dtype(jnp.bfloat16 if jnp.issubdtype(dtype, jnp.floating) else jnp.int8)
    with jax.numpy_dtype_promotion("standard"):
        return bool(dtype != narrow and jnp.result_type(*types, narrow) == narrow)
