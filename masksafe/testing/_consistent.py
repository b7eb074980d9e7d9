"""Whether a function gives the same answer however JAX runs it."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from masksafe._core.arguments import message
from masksafe.testing import _closeness, _trees
from masksafe.testing._modes import MODES, Function, Transform
from masksafe.testing._trees import is_float, only_floats

_OP = "assert_consistent"

CONSISTENCY_MODES = tuple(MODES)
"""The names of all modes in which `assert_consistent` can run a function."""


def assert_consistent(
    fn: Callable[..., Any],
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
    grad: bool = True,
    modes: Sequence[str] = CONSISTENCY_MODES,
    seed: int = 0,
) -> None:
    """Asserts that a function gives one answer, to rounding, however it is run.

    All results are compared with each other, and so are the gradients of a random linear combination of the outputs:

    ===================  ====================================================================================
    mode                 how the function is run
    ===================  ====================================================================================
    "op by op"           as a plain call
    "eager"              as a plain call under `jax.disable_jit`
    "jit"                compiled
    "vmap"               in a batch along the first axis, after the same arrays reversed along all axes
    "vmap, last axis"    in a batch along the last axis
    "scan"               in the second step of a scan, after the same arrays reversed
    "value_and_grad"     for the value that comes with the gradient, from the forward rules of custom derivatives
    "jvp"                for the value that comes with the tangent, inside `masksafe.forward_mode`
    "checkpoint"         compiled under `jax.checkpoint`
    "transposed"         compiled, with every array transposed in memory, and transposed back inside
    "strided"            compiled, on NumPy arrays that are every other element of a larger one in Fortran order
    "donated"            compiled, and allowed to write over its arguments
    "disk"               on arguments that were saved and loaded (`numpy.savez`)
    "devices"            on every device of every platform (`jax.local_devices`)
    "sharded"            compiled, with the arrays split over the devices of a platform, along the first or last axis
    "float64"            compiled on the CPU with all floats of the arguments widened to float64: the reference
    ===================  ====================================================================================

    Integers and booleans must be equal; NaN must match NaN, and an infinity the same infinity: a
    NaN in every mode passes. (`assert_mask_safe` fails on it.)

    Args:
      fn: any JAX function of `args` that returns an array or a pytree of arrays.
      *args: arrays or pytrees of arrays. Other leaves, such as Python numbers, are passed on as they are.
      rtol: the allowed error of an element relative to its size. By default 1e-9 for float64, 1e-4 for float32, 1e-2
        for float16 and 5e-2 for bfloat16, whichever of these is the narrowest among arguments and results. Set it for
        a function that computes in 16 bits between a float32 argument and a float32 result.
      atol: the absolute error allowed on top. By default `rtol` times the largest element of the result, plus a few
        roundings of the largest number among arguments and results.
      grad: compare gradients too. If False, the function is not differentiated at all: "value_and_grad" and "jvp" are
        left out.
      modes: the modes to try, two or more of `masksafe.testing.CONSISTENCY_MODES`; "devices" and "sharded" run the
        function in several ways and may stand alone.
      seed: the seed of the random weights of the outputs.

    Raises:
      AssertionError: if two modes disagree, or if one mode raises an error and another does not. The text lists every
        pair that disagrees, with its largest errors, and the index of the largest with both values.
      ValueError: also if nothing would be compared, or if other processes hold a part of an argument.

    Example:
      >>> import jax.numpy as jnp
      >>> from masksafe.testing import assert_consistent
      >>> def variance(x):  # a difference of two large numbers
      ...     return jnp.mean(x**2) - jnp.mean(x) ** 2
      >>> assert_consistent(variance, jnp.array([4000.1, 4000.3]), modes=("jit", "float64"))
      Traceback (most recent call last):
      ...
      AssertionError: The function does not give one answer...
    """
    __tracebackhide__ = True
    if not set(modes) <= set(MODES):
        raise ValueError(message(_OP, "modes", f"{list(modes)}", f"some of {CONSISTENCY_MODES}"))
    if len(set(modes)) < 2 and not any(MODES[m].has_many_ways for m in modes):
        raise ValueError(message(_OP, "modes", f"{list(modes)}", "two or more, which can be compared"))
    _trees.check_tolerances(_OP, rtol=rtol, atol=atol)
    _trees.check_addressable(_OP, args=args)
    flat_fn, named = _flatten(fn, args)
    arrays = [*named.values()]
    undifferentiated = [m for m in modes if not MODES[m].is_derived]
    runs = {"value": _run_modes(flat_fn, arrays, lambda f: f, modes if grad else undifferentiated)}
    if grad and any(map(is_float, arrays)):
        gradient = _gradient([*named], _trees.generator(seed))
        runs["gradient"] = _run_modes(flat_fn, arrays, gradient, undifferentiated)
    errors = [error for run in runs.values() for error in run.errors.values()]
    if not runs["value"].results:
        if errors:
            raise errors[0]
        raise ValueError(message(_OP, "fn", "no output in these modes", "an array or a pytree of arrays"))
    lines = [line for derivative, run in runs.items() for line in _report(run, arrays, derivative, rtol, atol)]
    if lines:
        cause = errors[0] if errors else None
        raise AssertionError("\n".join(["The function does not give one answer.", *lines])) from cause


# From a function of pytrees to a function of a flat list of arrays.


def _flatten(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Function, dict[str, Any]]:
    """The function of the arrays among the arguments, and these arrays by names such as "argument 0['w']"."""
    paths, tree = jax.tree_util.tree_flatten_with_path(args)
    leaves = [leaf for _, leaf in paths]
    positions = [i for i, leaf in enumerate(leaves) if _is_numeric(leaf)]

    def flat_fn(*arrays: Any) -> dict[str, Any]:
        new = dict(zip(positions, arrays, strict=True))
        outputs = fn(*jax.tree.unflatten(tree, [new.get(i, leaf) for i, leaf in enumerate(leaves)]))
        # The name of a sole output is empty, others are such as "output['x']".
        named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(outputs)}
        return {path and f"output{path}": _as_array(leaf) for path, leaf in named.items()}

    places = {i: (paths[i][0][0].idx, jax.tree_util.keystr(paths[i][0][1:])) for i in positions}
    return flat_fn, {f"argument {n}{rest}": jnp.asarray(np.asarray(leaves[i])) for i, (n, rest) in places.items()}


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and not _trees.is_key(leaf)


def _as_array(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _trees.is_key(leaf) else jnp.asarray(leaf)


def _gradient(names: list[str], rng: np.random.Generator) -> Transform:
    """From a function to the gradients of a random linear combination of its outputs, by the names of its arrays."""
    weights: dict[str, Any] = {}  # drawn on the first call, when the outputs are known

    def transform(fn: Function) -> Function:
        def combination(floats: list[Any], arrays: list[Any]) -> Any:
            outputs = fn(*_trees.replace_floats(arrays, floats))
            if not weights:
                weights.update(_trees.random_like(outputs, rng))
            return _trees.weighted_sum(outputs, weights)

        def gradient(*arrays: Any) -> dict[str, Any]:
            gradients = jax.grad(combination)(only_floats(list(arrays)), list(arrays))
            return {name: g for name, g in zip(names, gradients, strict=True) if g is not None}

        return gradient

    return transform


# Running and comparing. A mode stands for one or several ways to run; results are NumPy arrays by output and way.


class _Run(NamedTuple):
    results: dict[str, dict[str, np.ndarray]]
    ways: dict[str, list[str]]  # of each mode
    errors: dict[str, Exception]


def _run_modes(fn: Function, arrays: list[Any], derivative: Transform, modes: Sequence[str]) -> _Run:
    run = _Run({}, {}, {})
    for name in modes:
        mode = MODES[name]
        try:
            for way, results in mode.run(derivative(mode.before_gradient(fn)), arrays):
                run.ways.setdefault(name, []).append(way or name)
                for output, result in results.items():
                    run.results.setdefault(output, {})[way or name] = np.asarray(result)
        except Exception as error:  # any error counts: another mode may not raise it
            if "incompatible devices" not in str(error):
                run.errors[name] = error
    return run


def _report(run: _Run, arrays: list[Any], derivative: str, rtol: float | None, atol: float | None) -> list[str]:
    texts = {mode: f"{type(error).__name__}: {error}".splitlines()[:3] for mode, error in run.errors.items()}
    lines = [f"  {derivative}: {mode} raises " + "\n      ".join(text) for mode, text in texts.items()]
    allowed = _allowed_error(arrays, run, rtol, atol)
    title = "gradient with respect to" if derivative == "gradient" else derivative
    for output, results in run.results.items():
        pairs = itertools.combinations(_different(results, run.ways).items(), 2)
        differing = [f"    {line}" for one, other in pairs if (line := _difference(*one, *other, allowed))]
        if differing:
            result = next(iter(results.values()))
            lines += [f"  {f'{title} {output}'.strip()}, {result.dtype}{list(result.shape)}:", *differing]
    return lines


def _different(results: dict[str, np.ndarray], modes: dict[str, list[str]]) -> dict[str, np.ndarray]:
    """The results that differ in bits, by the names of the ways that gave them; a mode stands for all of its ways."""
    groups: dict[Any, list[str]] = {}
    for way, result in results.items():
        groups.setdefault((result.dtype, result.shape, _trees.bits(result).tobytes()), []).append(way)
    different: dict[str, np.ndarray] = {}
    for group in groups.values():
        names: list[str] = []
        for mode, ways in modes.items():
            names += [mode] if set(ways) <= set(group) else [way for way in ways if way in group]
        different[", ".join(names)] = results[group[0]]
    return different


_Allowed = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]


def _allowed_error(arrays: list[Any], run: _Run, rtol: float | None, atol: float | None) -> _Allowed:
    """The error that is allowed of two results, from these and the sizes of their elements."""
    arrays = [np.asarray(a) for a in arrays] + [r for results in run.results.values() for r in results.values()]
    dtypes = _closeness.float_dtypes(arrays)
    relative = _closeness.default_relative(dtypes) if rtol is None else rtol
    noise = 16 * _closeness.widest_rounding(dtypes) * max(map(_closeness.largest, arrays), default=0.0)

    def allowed(a: np.ndarray, b: np.ndarray, sizes: np.ndarray) -> Any:
        absolute = relative * max(map(_closeness.largest, (a, b))) + noise if atol is None else atol
        return absolute + relative * sizes

    return allowed


def _difference(one: str, a: np.ndarray, other: str, b: np.ndarray, allowed: _Allowed) -> str | None:
    """A line about the difference of two results, or None if they agree."""
    if a.shape != b.shape:
        return f"{one} against {other}: shape {a.shape} against {b.shape}"
    if a.dtype != b.dtype and "float64" not in (one, other):
        return f"{one} against {other}: dtype {a.dtype} against {b.dtype}"
    error, size = _closeness.distance_and_size(a, b)
    wrong = error > allowed(a, b, size) if jnp.issubdtype(a.dtype, jnp.inexact) else a != b
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.unravel_index(np.argmax(np.where(wrong, error, -1)), error.shape))
    relative_error = np.divide(error, size, out=np.zeros_like(error), where=size > 0).max()
    return (
        f"{one} against {other}: {wrong.sum()} of {wrong.size} elements differ, "
        f"max absolute error {error.max():.3g}, relative {relative_error:.3g}; "
        f"worst at index {index}: {a[index]} against {b[index]}"
    )
