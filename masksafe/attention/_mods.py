"""The user's functions of a pair of a query and a key: `score_mod`, which changes a logit, and `mask_mod`.

They are traced once, for one pair, and then applied to the pairs of a block. Arrays that they close over become
arguments, so that a derivative rule may use them and return their gradients.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, Literal
from jax.sharding import PartitionSpec

from masksafe._core.arguments import message
from masksafe._core.masks import first_of
from masksafe._core.programs import as_function, is_program, open_program
from masksafe._core.sharding import is_sharded, vary_with
from masksafe._core.typing import Array, Arrays
from masksafe.attention_masks import AttentionMask

_OP = "dot_product_attention"


class Program:
    """A traced function as a static argument: JAX finds the program that it compiled for an equal one.

    So a function that is made anew in each call is not compiled anew. Two are equal if their jaxprs have the same text,
    and the same things that the text does not show: constants of inner functions, and derivative rules.
    """

    def __init__(self, jaxpr: Jaxpr, is_captured: tuple[bool, ...]) -> None:
        self.jaxpr = jaxpr
        self.is_captured = is_captured  # whether each constant gets a gradient; the inputs follow the constants
        self._first_input = len(is_captured) - len(
            jaxpr.constvars
        )  # the arrays of a mask are inputs of the jaxpr as well
        self._key = str(jaxpr), is_captured, tuple(_hidden(jaxpr))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def uses(self) -> tuple[bool, ...]:
        """Which inputs have an effect."""
        used = {id(v) for equation in self.jaxpr.eqns for v in equation.invars} | set(map(id, self.jaxpr.outvars))
        return tuple(id(v) in used for v in self.jaxpr.invars[self._first_input :])


def _hidden(jaxpr: Jaxpr) -> Iterator[Any]:
    """The parts of a jaxpr that its text may not show; arrays by identity."""
    for equation in jaxpr.eqns:
        yield from (id(x.val) for x in equation.invars if isinstance(x, Literal) and np.ndim(x.val))
        for x in _parameters(equation):
            if is_program(x):
                inner, constants = open_program(x)
                yield from map(id, constants)
                yield from _hidden(inner)
            else:
                yield x if isinstance(x, Hashable) else id(x)


def _parameters(equation: Any) -> list[Any]:
    return jax.tree.leaves(list(equation.params.values()), is_leaf=is_program)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mod:
    """A user's function, with the arrays that it closes over."""

    captured: Arrays  # of floats, which get gradients
    others: Arrays
    program: Program = dataclasses.field(metadata={"static": True})

    def with_captured(self, captured: Arrays) -> "Mod":
        """The function, with other arrays in place of those captured."""
        return dataclasses.replace(self, captured=captured)

    def on_pair(self, captured: Arrays, *inputs: Any) -> Array:
        """The function of one pair, with other arrays in place of those captured."""
        kinds = {True: iter(captured), False: iter(self.others)}
        constants = [next(kinds[kind]) for kind in self.program.is_captured]
        (result,) = _evaluate(self.program.jaxpr, constants, inputs)
        if not any(self.program.uses):  # it has to vary over devices as the pairs do
            result = _varying_alike([result, *inputs])[0]
        return result


def _evaluate(jaxpr: Jaxpr, constants: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        number = len(jaxpr.constvars)
        return tuple(as_function(jaxpr, constants[:number])(*constants[number:], *inputs))
    # On a mesh the types say how arrays are split, and may be others than where the function was traced. In shard_map,
    # all inputs of an operation have to vary over the same axes.
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True))

    def value(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for equation in jaxpr.eqns:
        arguments = _varying_alike([value(x) for x in equation.invars])
        inner, primitive = equation.params.get("jaxpr"), equation.primitive
        if primitive.name in _RETYPINGS:  # JAX refuses it for an array that varies more here than where it was traced
            results: Sequence[Any] = arguments
        elif primitive.name == "jit" and is_program(inner):
            results = _evaluate(*open_program(inner), arguments)
        else:
            try:
                found = primitive.bind(*arguments, **primitive.get_bind_params(equation.params))
            except (TypeError, ValueError) as error:
                if not any(map(is_program, _parameters(equation))):
                    raise
                raise ValueError(_REFUSAL_ON_A_MESH.format(primitive.name)) from error
            results = found if primitive.multiple_results else [found]
        values |= zip(equation.outvars, results, strict=True)
    return [value(x) for x in jaxpr.outvars]


_RETYPINGS = ("pvary", "pcast")

_REFUSAL_ON_A_MESH = (
    f"{_OP}: score_mod or mask_mod: got a function with {{}}; expected one without control flow and "
    "rules of derivatives of its own, as arrays are split over an explicit mesh or jax.shard_map checks how they vary. "
    "There, check_vma=False allows it."
)

_REFUSAL_BESIDE_MANUAL_AXES = message(
    _OP,
    "score_mod",
    "a function, inside a jax.shard_map over some of the axes of an explicit mesh, of which others split the arrays",
    "a jax.shard_map over these axes as well, or None",
)


def _varying_alike(values: Sequence[Any]) -> list[Array]:
    arrays = list(map(jnp.asarray, values))
    return list(vary_with(arrays, arrays)) if jax.sharding.get_abstract_mesh().manual_axes else arrays


def trace(argument: str, fn: Any, logit_dtype: Any = None) -> Mod | None:
    """The user's function, traced for one pair: a `mask_mod` if `logit_dtype` is None, else a `score_mod`."""
    if fn is None:
        return None
    if not callable(fn):
        raise TypeError(message(_OP, argument, f"type {type(fn).__name__}", "a function, or None"))
    is_mask = logit_dtype is None
    indices = [jax.ShapeDtypeStruct((), jnp.int32)] * len(_INDICES)
    if isinstance(fn, AttentionMask) and is_mask:
        arrays = jax.tree.leaves(fn)
        if all(isinstance(x, jax.Array) for x in arrays):  # it contains no function of the user
            return Mod((), tuple(arrays), _program_of_mask(_call_mask.trace(fn, *indices).jaxpr))
    _check_parameters(argument, fn, _INDICES if is_mask else ["logit", *_INDICES])
    inputs = indices if is_mask else [jax.ShapeDtypeStruct((), logit_dtype), *indices]
    try:
        closed, result = jax.make_jaxpr(fn, return_shape=True)(*inputs)
    except jax.errors.TracerBoolConversionError as error:
        hint = "Write &, | and ~ (or jnp.logical_and, ...), and jnp.where in place of if."
        found = "a function that asks whether a traced value is true, as and, or, not and if do"
        raise TypeError(message(_OP, argument, found, "one that computes with arrays alone", hint)) from error
    _check_result(argument, result, is_mask)
    constants = list(map(jnp.asarray, closed.consts))
    is_captured = tuple(bool(jnp.issubdtype(x.dtype, jnp.inexact)) for x in constants)
    captured, others = (
        tuple(x for x, kind in zip(constants, is_captured, strict=True) if kind == is_float)
        for is_float in (True, False)
    )
    return Mod(captured, others, Program(closed.jaxpr, is_captured))


@jax.jit
def _call_mask(mask: AttentionMask, *pair: Any) -> Any:
    return mask(*pair)


@functools.lru_cache(maxsize=256)
def _program_of_mask(traced: Any) -> Program:
    """The program of a mask without a function of the user, which JAX traces once; its arrays come first."""
    return Program(traced.jaxpr, (False,) * (len(traced.jaxpr.invars) - len(_INDICES)))


_INDICES = ["batch", "head", "query_position", "key_position"]


def _check_parameters(argument: str, fn: Callable[..., Any], names: list[str]) -> None:
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some functions have no signature
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        expected = f"one that can be called as ({', '.join(names)})"
        raise TypeError(message(_OP, argument, f"a function of {signature}", expected)) from error


def _check_result(argument: str, result: Any, is_mask: bool) -> None:
    expected = "one boolean for each pair" if is_mask else "one float for each pair"
    if not isinstance(result, jax.ShapeDtypeStruct):
        raise TypeError(message(_OP, argument, f"a result of type {type(result).__name__}", expected))
    if result.shape != ():
        hint = "It is called for one pair, with numbers."
        raise ValueError(message(_OP, argument, f"a result of shape {result.shape}", expected, hint))
    if not jnp.issubdtype(result.dtype, jnp.bool_ if is_mask else jnp.floating):
        raise TypeError(message(_OP, argument, f"a result of dtype {result.dtype}", expected))


# Applied to the pairs of a block.

# For each axis of a block of pairs, the `in_axes` of the indices of sample, head, query and key: None for an index that
# does not go along it, 0 for the first of the remaining axes.
_INDICES_ALONG = (
    (0, None, 0, 0),
    (None, 0, None, None),
    (None, 0, None, None),
    (None, None, 0, None),
    (None,) * 3 + (0,),
)
Indices = tuple[Array, Array, Array, Array]  # [B], [K, G], [B, T], [B, S]


def _over_axes(fn: Callable[..., Array], axes: Sequence[tuple[int | None, ...]]) -> Callable[..., Array]:
    """`fn` of a pair, mapped over axes of a block, from the outermost on; each axis has its `in_axes`."""
    for in_axes in reversed(axes):
        fn = jax.vmap(fn, in_axes)
    return fn


def mask_of(mod: Mod, indices: Indices) -> Array:
    """The booleans of a `mask_mod` `[B, K, G, T, S]`, with size 1 on axes along which they cannot differ."""
    uses = mod.program.uses
    # Whole on an explicit mesh: JAX refuses a look-up by indices that are split.
    whole = [jax.sharding.reshard(x, PartitionSpec()) if is_sharded(x) else x for x in indices]
    used = [x if is_used else 0 for x, is_used in zip(whole, uses, strict=True)]
    along = [
        tuple(a if is_used else None for a, is_used in zip(in_axes, uses, strict=True)) for in_axes in _INDICES_ALONG
    ]
    differing = [in_axes for in_axes in along if set(in_axes) != {None}]
    result = _over_axes(functools.partial(mod.on_pair, mod.captured), differing)(*used)
    return jnp.expand_dims(result, [i for i, in_axes in enumerate(along) if set(in_axes) == {None}])


def modified(mod: Mod, captured: Arrays, x: Array, indices: Indices) -> Array:
    """The logits of a block after `score_mod`."""

    def on_block(x: Array, captured: Arrays, *indices: Array) -> Array:
        fn = _over_axes(functools.partial(mod.on_pair, captured), [(0, *in_axes) for in_axes in _INDICES_ALONG])
        return fn(x, *indices).astype(x.dtype)

    return _with_automatic_axes(on_block, x, captured, *indices)


def modified_where(mod: Mod, captured: Arrays, x: Array, indices: Indices, mask: Array) -> Array:
    """The same, but a masked pair has no part in its derivatives.

    An unmasked pair of the block replaces it, so that the function never sees a masked pair. In a block without an
    unmasked pair, captured arrays get no gradient.
    """

    def on_block(x: Array, captured: Arrays, mask: Array, *indices: Array) -> Array:
        sample, head, query, key = indices
        samples, heads = sample[:, None, None, None, None], head[None, ..., None, None]
        arrays = x, samples, heads, query[:, None, None, :, None], key[:, None, None, None]
        mask = jnp.broadcast_to(mask, x.shape)
        _, is_first = first_of(mask)

        def only_unmasked(array: Array) -> Array:
            array = jnp.broadcast_to(array, x.shape)
            return jnp.where(mask, array, jnp.sum(jnp.where(is_first, array, 0), dtype=array.dtype))

        has_unmasked = jnp.any(mask)
        captured = tuple(jnp.where(has_unmasked, a, lax.stop_gradient(a)) for a in captured)
        fn = _over_axes(functools.partial(mod.on_pair, captured), [(0,) * len(arrays)] * x.ndim)
        return fn(*map(only_unmasked, arrays)).astype(x.dtype)

    return _with_automatic_axes(on_block, x, captured, mask, *indices)


def _with_automatic_axes(fn: Callable[..., Array], x: Array, *arguments: Any) -> Array:
    """`fn(x, *arguments)`, where the compiler splits its arrays if the logits `x` are split over an explicit mesh.

    JAX requires the sharding of a look-up in an array, which the user's function does not give.
    """
    if not is_sharded(x):
        return fn(x, *arguments)
    if jax.sharding.get_abstract_mesh().manual_axes:  # where JAX has no `auto_axes`
        raise ValueError(_REFUSAL_BESIDE_MANUAL_AXES)
    return jax.sharding.auto_axes(fn, out_sharding=jax.typeof(x).sharding)(x, *arguments)
