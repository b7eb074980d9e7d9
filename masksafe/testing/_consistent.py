"""Whether a function gives one answer, however JAX runs it."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from masksafe._core.arguments import message
from masksafe.testing._modes import MODES, Derive, Function
from masksafe.testing._trees import bits, generator, is_float, random_like, weighted_sum

CONSISTENCY_MODES = tuple(MODES)
"""The names of all modes in which `assert_consistent` can run a function."""

# Per dtype, how far two answers may be apart in units of the larger one.
_RELATIVE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


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

    The function is run in every mode, each result is compared with each other, and so are the gradients of a
    random linear combination of its outputs:

    ===================  ====================================================================================
    mode                 how the function is run
    ===================  ====================================================================================
    "op by op"           as a plain call
    "eager"              the same under `jax.disable_jit`
    "jit"                compiled
    "vmap"               in a batch along the first axis, behind the same arrays reversed along all axes
    "vmap, last axis"    in a batch along the last axis
    "scan"               in the second step of a scan, behind the same arrays reversed
    "value_and_grad"     the value that comes with the gradient, from the forward rules of custom derivatives
    "jvp"                the value that comes with the tangent, inside `masksafe.forward_mode`; left out if the
                         function is a `jax.custom_vjp` function of another library, which JAX refuses
    "checkpoint"         compiled under `jax.checkpoint`
    "transposed"         compiled, with every array transposed in memory, and transposed back inside
    "strided"            compiled, on NumPy arrays that are every other element of a larger one in Fortran order
    "donated"            compiled, and allowed to write over its arguments
    "disk"               on arguments that have been to disk and back (`numpy.savez`)
    "devices"            on every device of every platform (`jax.devices`)
    "sharded"            compiled, with the arrays split along their first axis and along their last one over the
                         devices of a platform, if there are several; an axis that does not divide stays whole
    "float64"            compiled on the CPU with all floats of the arguments widened to float64: the reference
    ===================  ====================================================================================

    Args:
      fn: any JAX function of `args` that returns an array or a pytree of arrays.
      *args: arrays or pytrees of arrays. Other leaves, such as Python numbers, are passed on as they are.
      rtol: how large the error of an element may be in units of the element. By default 1e-9 in float64, 1e-4 in
        float32, 1e-2 in float16, 5e-2 in bfloat16, for the narrowest float among arguments and results.
      atol: what is allowed on top; by default `rtol` times the largest element of the result, and a few roundings of
        the largest number among arguments and results, since a result of 0 is often their difference.
      grad: compare gradients too. If False, the function is not differentiated at all: "value_and_grad" and "jvp" are
        left out.
      modes: the modes to try, some of `masksafe.testing.CONSISTENCY_MODES`.
      seed: of the random weights of the outputs.

    Integers and booleans must be equal; NaN must meet NaN, and an infinity the same one. Gradients are those of real
    outputs with respect to real arguments. Arguments are copied to the default device first, and a function that is
    bound to devices of its own, by a `jax.shard_map` in it, is left alone by the modes that run on others.

    Two things are not a fault of the function: what it closes over is not widened in "float64", so that a scan may
    refuse it there, and random numbers may be others in float64: leave that mode out. And a function that computes
    in 16 bits between a float32 argument and a float32 result is as exact as 16 bits are: give `rtol`.

    Raises:
      AssertionError: if two modes disagree, or if a mode raises an error that another one does not. The text lists
        every disagreeing pair, with the maximal absolute and relative error, and the index of the worst element
        with the two values there. Modes with the same bits share a line.
      ValueError: for a mode that does not exist.

    Example:
      A layer norm over axis 1 whose hand-written rule was made for the last axis. It is right in every test of
      the forward pass, and wrong as soon as it is trained:

      >>> import jax, jax.numpy as jnp
      >>> from masksafe.testing import assert_consistent
      >>> @jax.custom_vjp
      ... def layer_norm(x):
      ...     return jax.nn.standardize(x, axis=1)
      >>> def forward(x):
      ...     return jax.nn.standardize(x, axis=-1), x
      >>> def reverse(x, d_y):
      ...     return jax.vjp(lambda x: jax.nn.standardize(x, axis=-1), x)[1](d_y)
      >>> layer_norm.defvjp(forward, reverse)
      >>> x = jnp.array([[[0.0, 5.0], [2.0, 1.0], [4.0, 0.0]]])
      >>> assert_consistent(layer_norm, x, modes=("jit", "vmap", "value_and_grad"))
      Traceback (most recent call last):
      ...
      AssertionError: The function does not give one answer.
        value, float32[1, 3, 2]:
          jit, vmap against value_and_grad: 6 of 6 elements differ, ...

    References:
      `chex.variants <https://chex.readthedocs.io/en/latest/api.html#variants>`_ runs a test in five such modes,
      without a comparison.
    """
    __tracebackhide__ = True
    if not set(modes) <= set(MODES):
        raise ValueError(message("assert_consistent", "modes", f"{list(modes)}", f"some of {CONSISTENCY_MODES}"))
    flat = _flatten(fn, args)
    runs = {"value": _run_all(flat, lambda f: f, [m for m in modes if grad or not MODES[m].is_derived])}
    if grad and flat.floats:
        derive = _gradient(flat, generator(seed))
        runs["gradient"] = _run_all(flat, derive, [m for m in modes if not MODES[m].is_derived])
    errors = [error for run in runs.values() for error in run.errors.values()]
    if errors and not runs["value"].results:
        raise errors[0]
    lines = [line for derivative, run in runs.items() for line in _report(run, flat, derivative, rtol, atol)]
    if lines:
        raise AssertionError("\n".join(["The function does not give one answer.", *lines])) from next(
            iter(errors), None
        )


# The function of a flat list of arrays.


class _Flat(NamedTuple):
    fn: Function
    arrays: list[Any]
    names: list[str]
    floats: list[int]


def _flatten(fn: Callable[..., Any], args: tuple[Any, ...]) -> _Flat:
    paths, tree = jax.tree_util.tree_flatten_with_path(args)
    leaves = [leaf for _, leaf in paths]
    positions = [i for i, leaf in enumerate(leaves) if _is_numeric(leaf)]

    def of_arrays(*arrays: Any) -> dict[str, Any]:
        new = dict(zip(positions, arrays, strict=True))
        outputs = fn(*jax.tree.unflatten(tree, [new.get(i, leaf) for i, leaf in enumerate(leaves)]))
        return {_name("output", path): _as_array(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(outputs)}

    arrays = [jnp.asarray(np.asarray(leaves[i])) for i in positions]
    names = [_name("argument ", paths[i][0]) for i in positions]
    return _Flat(of_arrays, arrays, names, [i for i, a in enumerate(arrays) if is_float(a)])


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and not _is_key(leaf)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _as_array(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf)


def _name(what: str, path: tuple[Any, ...]) -> str:
    """Such as "argument 0['w']", or nothing for the only output."""
    if what == "output":
        return f"output{jax.tree_util.keystr(path)}" if path else ""
    return f"argument {path[0].idx}{jax.tree_util.keystr(path[1:])}"


def _gradient(flat: _Flat, rng: np.random.Generator) -> Derive:
    """From a function to the gradients of a random linear combination of its outputs."""
    weights: dict[str, Any] = {}  # drawn when the outputs are first seen, and then kept

    def combined(outputs: dict[str, Any]) -> Any:
        if not weights:
            weights.update(random_like(outputs, rng))
        return weighted_sum(outputs, weights, dict.fromkeys(outputs, True))

    def derive(fn: Function) -> Function:
        def gradient(*arrays: Any) -> dict[str, Any]:
            def combination(chosen: list[Any]) -> Any:
                new = dict(zip(flat.floats, chosen, strict=True))
                return combined(fn(*(new.get(i, a) for i, a in enumerate(arrays))))

            gradients = jax.grad(combination)([arrays[i] for i in flat.floats])
            return {flat.names[i]: g for i, g in zip(flat.floats, gradients, strict=True)}

        return gradient

    return derive


# Running and comparing. Results are NumPy arrays, by output and then by way.


class _Run(NamedTuple):
    results: dict[str, dict[str, np.ndarray]]
    ways: dict[str, list[str]]  # of each mode
    errors: dict[str, Exception]


def _run_all(flat: _Flat, derive: Derive, modes: Sequence[str]) -> _Run:
    run = _Run({}, {}, {})
    for mode in modes:
        try:
            for way, results in MODES[mode].run(flat.fn, flat.arrays, derive):
                run.ways.setdefault(mode, []).append(way)
                for output, result in results.items():
                    run.results.setdefault(output, {})[way] = np.asarray(result)
        except Exception as error:  # whatever it is: another mode may not raise it
            if "incompatible devices" not in str(error):
                run.errors[mode] = error
    return run


def _report(run: _Run, flat: _Flat, derivative: str, rtol: float | None, atol: float | None) -> list[str]:
    lines = [f"  {derivative}: {mode} raises {_first_lines(error)}" for mode, error in run.errors.items()]
    tolerance = _tolerance(flat, run, rtol, atol)
    for output, results in run.results.items():
        pairs = itertools.combinations(_groups(results, run.ways), 2)
        differing = [f"    {line}" for one, other in pairs if (line := _difference(one, other, tolerance))]
        if differing:
            result = next(iter(results.values()))
            lines += [f"  {_title(derivative, output)}, {result.dtype}{list(result.shape)}:", *differing]
    return lines


def _first_lines(error: Exception) -> str:
    lines = (str(error).splitlines() or [""])[:3]
    return "\n      ".join([f"{type(error).__name__}: {lines[0]}", *lines[1:]])


def _title(derivative: str, output: str) -> str:
    """Such as "value output['x']" or "gradient with respect to argument 0"."""
    relation = " with respect to" if derivative == "gradient" else ""
    return f"{derivative}{relation} {output}".strip()


class _Group(NamedTuple):
    """The ways that gave the same bits."""

    ways: list[str]  # with the mode in place of its ways where it is whole
    result: np.ndarray

    def __str__(self) -> str:
        return ", ".join(self.ways)


def _groups(results: dict[str, np.ndarray], modes: dict[str, list[str]]) -> list[_Group]:
    ways: dict[Any, list[str]] = {}
    for way, result in results.items():
        ways.setdefault((result.dtype, result.shape, bits(result).tobytes()), []).append(way)
    return [_Group(_summary(group, modes), results[group[0]]) for group in ways.values()]


def _summary(group: list[str], modes: dict[str, list[str]]) -> list[str]:
    names: list[str] = []
    for mode, ways in modes.items():
        names += [mode] if set(ways) <= set(group) else [way for way in ways if way in group]
    return names


class _Tolerance(NamedTuple):
    relative: float
    absolute: float | None  # None is relative to the largest element of the result
    noise: float  # on top of that


def _tolerance(flat: _Flat, run: _Run, rtol: float | None, atol: float | None) -> _Tolerance:
    arrays = [np.asarray(a) for a in flat.arrays] + [r for results in run.results.values() for r in results.values()]
    dtypes = [jnp.finfo(a.dtype).dtype for a in arrays if jnp.issubdtype(a.dtype, jnp.inexact)]
    widest_rounding = max((float(jnp.finfo(d).eps) for d in dtypes), default=0.0)
    relative = max((_RELATIVE.get(d.name, 10 * widest_rounding) for d in dtypes), default=0.0)
    noise = 16 * widest_rounding * max((_largest(a) for a in arrays), default=0.0)
    return _Tolerance(relative if rtol is None else rtol, atol, noise if atol is None else 0.0)


def _largest(array: np.ndarray) -> float:
    """The magnitude of the largest finite element."""
    wide = np.abs(array.astype(np.complex128 if np.iscomplexobj(array) else np.float64))
    return float(wide[np.isfinite(wide)].max(initial=0))


def _difference(one: _Group, other: _Group, tolerance: _Tolerance) -> str | None:
    """What differs between two results, if anything does."""
    a, b = one.result, other.result
    if a.shape != b.shape:
        return f"{one} against {other}: shape {a.shape} against {b.shape}"
    if a.dtype != b.dtype and ["float64"] not in (one.ways, other.ways):
        return f"{one} against {other}: dtype {a.dtype} against {b.dtype}"
    error, size = _error(a, b)
    wrong = a != b
    if jnp.issubdtype(a.dtype, jnp.inexact):
        absolute = tolerance.relative * max(map(_largest, (a, b))) if tolerance.absolute is None else tolerance.absolute
        wrong = error > absolute + tolerance.noise + tolerance.relative * size
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.unravel_index(np.argmax(np.where(wrong, error, -1)), error.shape))
    relative_error = np.divide(error, size, out=np.zeros_like(error), where=size > 0).max()
    return (
        f"{one} against {other}: {wrong.sum()} of {wrong.size} elements differ, "
        f"max absolute error {error.max():.3g}, relative {relative_error:.3g}; "
        f"worst at index {index}: {a[index]} against {b[index]}"
    )


def _error(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How far apart the elements are, infinitely so where only one of them is NaN or infinite; and their size."""
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    distance = np.abs(np.where(finite, a, 0) - np.where(finite, b, 0))
    size = np.maximum(np.abs(np.where(finite, a, 0)), np.abs(np.where(finite, b, 0)))
    return np.where(same, 0.0, np.where(finite, distance, np.inf)), size
