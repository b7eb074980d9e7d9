"""The pattern of the losses that need no custom derivative rule.

Masked elements are replaced by 0 before the arithmetic, which is done in at least float32, and their results are
replaced by 0 after it. JAX's own derivatives for masked elements are then exactly 0.

The arithmetic is jitted: in eager code it is then one call rather than one for each operation, and the NaN of masked
elements stay hidden even from jax_debug_nans. Its functions are static arguments and part of the key of the
compiled code, so they must not be made anew in each call.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from masksafe._core.arguments import broadcast_shapes
from masksafe._core.derivatives import elementwise
from masksafe._core.label_checks import check_elements, check_numbers, nan_where_bad
from masksafe._core.masks import either, read_mask, selected
from masksafe._core.precision import promoted, with_wide_numbers
from masksafe._core.sharding import is_sharded
from masksafe._core.typing import Array, ArrayLike, Arrays, jitted
from masksafe.losses._layout import wide_selected


class Check(NamedTuple):
    """What a label has to be, while label checks are on."""

    argument: str  # the name of the argument that holds the labels
    is_valid: Callable[[Array], Array]
    otherwise: str  # a description of invalid labels


def elementwise_loss(
    op: str,
    where: ArrayLike | None,
    types: tuple[Any, ...],
    loss: Callable[..., Array],
    *,
    check: Check | None = None,
    ranges: Any = MappingProxyType({}),
    **arguments: Any,
) -> Array:
    """`loss` of each element of the arguments, which broadcast together; 0 where masked, NaN where a label is bad.

    The result has the dtype to which JAX promotes `types`: names of arguments, numbers or dtypes. `loss` gets the
    arguments by name. They are arrays or, for speed, Python numbers; `ranges` says which numbers an argument may hold.
    """
    shape = broadcast_shapes(op, **{name: np.shape(x) for name, x in arguments.items()})
    mask = read_mask(op, where, shape, "the input", "elements or rows", ())
    found = [check_numbers(op, name, arguments[name], ranges[name], shape, mask) for name in ranges]
    if check is not None:
        found.append(check_elements(op, arguments[check.argument], shape, mask, check.is_valid, check.otherwise))
    bad = functools.reduce(either, found, None)
    config = _Elementwise(loss, tuple(arguments), shape, types)
    return _evaluate(config, tuple(arguments.values()), mask, bad)


class _Elementwise(NamedTuple):
    """The static arguments."""

    loss: Callable[..., Array]
    names: tuple[str, ...]  # of its arguments
    shape: tuple[int, ...]
    types: tuple[Any, ...]


@jitted(0)
def _evaluate(config: _Elementwise, arguments: Arrays, mask: Array | None, bad: Array | None) -> Array:
    arrays = [wide_selected(x, mask) for x in broadcast_alike(with_wide_numbers(*arguments), config.shape)]
    loss_of = elementwise(lambda *arrays: config.loss(**dict(zip(config.names, arrays, strict=True))))
    loss = selected(loss_of(*arrays), mask)
    named = dict(zip(config.names, arguments, strict=True))
    return as_promoted([named.get(t, t) for t in config.types], nan_where_bad(loss, bad))


def broadcast_alike(arrays: Iterable[Array], shape: tuple[int, ...]) -> list[Array]:
    """The arrays broadcast to `shape`, and split over the explicit axes of a mesh like the first one that is split."""
    whole = [jnp.broadcast_to(x, shape) for x in arrays]
    split = next((jax.typeof(x).sharding for x in whole if is_sharded(x)), None)
    if split is None:
        return whole
    return [x if jax.typeof(x).sharding == split else jax.sharding.reshard(x, split) for x in whole]


def as_promoted(types: Sequence[Any], x: Array) -> Array:
    """`x` in the type to which JAX promotes `types`: arrays, numbers or dtypes; weak if theirs is."""
    dtype = promoted(*types)
    with jax.numpy_dtype_promotion("standard"):
        _, is_weak = jax.dtypes.result_type(*types, return_weak_type_flag=True)
    if not is_weak:
        return x.astype(dtype)
    number = 0.0 if jnp.issubdtype(dtype, jnp.floating) else 0
    return jnp.vectorize(lambda element: jax.lax.full_like(number, element))(x)
