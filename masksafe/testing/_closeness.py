"""When two results are the same to rounding."""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from masksafe.testing import _trees

# For each dtype, the allowed difference of two answers relative to the larger one.
_RELATIVE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


def float_dtypes(arrays: Iterable[np.ndarray]) -> list[np.dtype]:
    """The dtypes of floats among those of the arrays, of complex numbers those of their parts."""
    return [jnp.finfo(a.dtype).dtype for a in arrays if jnp.issubdtype(a.dtype, jnp.inexact)]


def widest_rounding(dtypes: Iterable[np.dtype]) -> float:
    """The relative size of one rounding in the narrowest of the dtypes."""
    return max((float(jnp.finfo(d).eps) for d in dtypes), default=0.0)


def default_relative(dtypes: Iterable[np.dtype]) -> float:
    """The allowed difference relative to the larger answer, of the narrowest of the dtypes."""
    dtypes = [*dtypes]
    return max((_RELATIVE.get(d.name, 10 * widest_rounding(dtypes)) for d in dtypes), default=0.0)


def largest(array: np.ndarray) -> float:
    """The magnitude of the largest finite element."""
    sizes = np.abs(_trees.as_double(array))
    return float(sizes[np.isfinite(sizes)].max(initial=0))


def distance_and_size(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distance of the elements, infinite where only one of them is NaN or infinite; and the size of the larger."""
    a, b = _trees.as_double(a), _trees.as_double(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = np.where(finite, a, 0), np.where(finite, b, 0)
    return np.where(same, 0.0, np.where(finite, np.abs(a - b), np.inf)), np.maximum(np.abs(a), np.abs(b))
