"""One program for each op and plan, of which the mask, the arrays and the cotangents are arguments."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import definitions
import jax
import jax.numpy as jnp
import numpy as np
from comparisons import assert_same_bits
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from table import OPS, Op
from tiers import optimised_jit, parametrize

import masksafe
from masksafe._core import platforms

# The forms of a program. On a CPU arrays as small as those of the table would be one block.
PLANS: dict[str, dict[str, Any]] = {
    "blocks": {
        "row_block_elements": 8,
        "most_elements_in_one_pass": 16,
        "linear": {"class_tile_elements": 6},
        "attention": {
            **dict.fromkeys(("query_tile", "key_tile", "key_tile_if_nothing_is_skipped", "fewest_queries"), 2),
            **dict.fromkeys(("in_turn_logits_of_one", "in_turn_logits_of_all"), 1),
            "few_queries": 0,
            "most_weights_kept": 0,
            **{"row_tile_logits_of_derivatives": 21, "skipping_row_tile_logits": 16, "alignment": 2},
        },
    },
    "accelerator": {
        "form": "accelerator",
        "attention": {"row_tile_logits": 21, "skipping_row_tile_logits": 16, "alignment": 2},
        "linear": {"least_logits": 2, "most_logits": 2, "least_tokens_if_masked": 2, "most_tokens_of_one_block": 2},
    },
    "one pass": {},
    "one kernel": {"row_block_elements": 1, "most_elements_in_one_pass": 2, "has_fusion_library": True},
}


class Results(NamedTuple):
    """The outputs of an op, and their derivatives for some cotangents."""

    outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]  # by the floats
    tangents: tuple[Any, ...] = ()  # of the outputs, in forward mode, along the directions
    forward_over_reverse: tuple[Any, ...] = ()  # the derivatives of the gradients along the directions
    reverse_over_reverse: tuple[Any, ...] = ()  # the same, in a program of its own; only with `all_modes`


def each_op(
    condition: Callable[[Op], Any] = lambda op: True, by_weights: bool = False, by_default: bool = False
) -> Any:
    """Parameters: the keys of those ops, with which the names of tests end; few of them run by default, or all.

    The rows whose mask is a weight of 0 are of tests `by_weights` alone, which look at values and at derivatives.
    Refusals and devices are no question of weights.
    """
    ops = {key: op for key, op in OPS.items() if condition(op) and (by_weights or not key.endswith(" of 0"))}
    few = [key for key, op in ops.items() if by_default or op.by_default]
    return parametrize("key", few, exhaustive=[key for key in ops if key not in few])


def each_kind(condition: Callable[[Op], Any] = lambda op: True) -> Any:
    """Parameters: one op of each kind, for tests that compile other programs than `run`."""
    return each_op(lambda op: op.stands_for and condition(op))


def jit_as_users_do(key: str, fn: Any) -> Any:
    """With XLA's optimisations for one op of each kind; attention has large programs, and such tests of its own."""
    op = OPS[key]
    return optimised_jit(fn) if op.stands_for and op.name != "dot_product_attention" else jax.jit(fn)


def run(
    key: str,
    where: Any = None,
    args: Any = None,
    plan: str = "blocks",
    cotangents: Any = None,
    all_modes: bool = False,
    directions: Any = None,
) -> Results:
    """The results of a mask and arrays, by default those of the table."""
    op = OPS[key]
    where, args = op.where if where is None else where, op.args if args is None else args
    directions = directions_of(key) if directions is None else directions
    cotangents = cotangents_of(key) if cotangents is None else cotangents
    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with platforms.chosen(**PLANS[plan]), strict[0], strict[1]:
        given = where, tuple(args), cotangents, directions
        results: Results = program_of(key)(*given)
        reverse = reverse_over_reverse_of(key)(*given) if all_modes else ()
        results, reverse = jax.device_get((results, reverse))
    return results._replace(reverse_over_reverse=reverse)


@functools.cache
def program_of(key: str) -> Any:
    def results(where: Any, args: Any, cotangents: Any, directions: Any) -> Results:
        of_floats, floats = function_of_floats(OPS[key], where, args)
        outputs, pull_back = jax.vjp(of_floats, *floats)
        with masksafe.forward_mode():
            tangents = jax.jvp(of_floats, floats, directions)[1]
        forward = jax.jvp(bent_gradients(of_floats, cotangents), floats, directions)[1]
        return Results(outputs, pull_back(cotangents), tangents, forward)

    return jit_as_users_do(key, results)


@functools.cache
def reverse_over_reverse_of(key: str) -> Any:
    def derivatives(where: Any, args: Any, cotangents: Any, directions: Any) -> Any:
        of_floats, floats = function_of_floats(OPS[key], where, args)
        return jax.vjp(bent_gradients(of_floats, cotangents), *floats)[1](directions)

    return jit_as_users_do(key, derivatives)


@functools.cache
def gradients_of_a_jvp(key: str) -> Any:
    """By the floats and by the directions, in forward mode."""

    def gradients(where: Any, args: Any, cotangents: Any, directions: Any) -> Any:
        of_floats, floats = function_of_floats(OPS[key], where, args)
        with masksafe.forward_mode():
            along = functools.partial(jax.jvp, of_floats)
            return jax.vjp(along, floats, directions)[1]((cotangents, cotangents))

    return jax.jit(gradients)


def bent_gradients(of_floats: Any, cotangents: Any) -> Any:
    """Those of which second derivatives are taken: their cotangents depend on the outputs."""

    def gradients(*floats: Any) -> Any:
        outputs, pull_back = jax.vjp(of_floats, *floats)
        bent = (1 + definitions.BEND * masksafe.mask_where(~jnp.isfinite(out), out, 0) for out in outputs)
        return pull_back(tuple(c * b.astype(c.dtype) for c, b in zip(cotangents, bent, strict=True)))

    return gradients


def function_of_floats(op: Op, where: Any, args: Any, **options: Any) -> tuple[Any, Any]:
    """The outputs of an op, always a tuple, as a function of its floats; and these."""

    def outputs(*floats: Any) -> tuple[Any, ...]:
        new = dict(zip(op.floats, floats, strict=True))
        return tuple(jax.tree.leaves(op.call(where, *(new.get(i, a) for i, a in enumerate(args)), **options)))

    return outputs, tuple(args[i] for i in op.floats)


def value_and_gradients(key: str, where: Any, args: Any, cotangents: Any, **options: Any) -> tuple[Any, Any]:
    """The first two of the `Results`, for other programs than that of `run`."""
    of_floats, floats = function_of_floats(OPS[key], where, args, **options)
    outputs, pull_back = jax.vjp(of_floats, *floats)
    return outputs, pull_back(cotangents)


OTHERWISE_SPLIT = "dot_product_attention", "merge_attention", "ragged_dot"  # by tests of their own


def may_be_split(op: Op) -> bool:
    return len(op.where) % 2 == 0 and op.name not in OTHERWISE_SPLIT


def split_rows(key: str, mesh: Mesh) -> tuple[Any, Any, Any]:
    """How the axis "rows" of a mesh splits mask, arguments and cotangents of an op."""
    op = OPS[key]

    def split(is_split: bool) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*["rows"][:is_split]))

    cotangents = tuple(split(c.shape[:1] == op.where.shape[:1]) for c in cotangents_of(key))
    return split(True), tuple(split(kind in ("row", "of row", "label")) for kind in op.kinds), cotangents


@functools.cache
def distinct_programs(key: str) -> dict[str, Any]:
    """By the plan, lowered, but for plans that make no other program than one before them; "blocks" is the first."""
    op, programs = OPS[key], {}
    for plan in PLANS:
        with platforms.chosen(**PLANS[plan]):
            step = jax.jit(functools.partial(value_and_gradients, key))
            program = step.lower(op.where, op.args, cotangents_of(key))
        programs.setdefault(program.as_text(), (plan, program))
    return dict(programs.values())


@functools.cache
def unmasked(key: str) -> Any:
    """Jitted: the value and the gradients without a mask, of the arguments and the cotangents."""

    def results(args: Any, cotangents: Any) -> Any:
        with platforms.chosen(**PLANS["blocks"]):
            where = None if OPS[key].may_be_unmasked else np.ones_like(OPS[key].where)
            return value_and_gradients(key, where, args, cotangents)

    return jax.jit(results)


def direction(i: int, x: np.ndarray) -> np.ndarray:
    return np.cos(np.arange(x.size) + i + 1).reshape(x.shape).astype(x.dtype)


def directions_of(key: str) -> tuple[np.ndarray, ...]:
    return tuple(direction(i, OPS[key].args[i]) for i in OPS[key].floats)


@functools.cache
def shapes_of(key: str) -> tuple[Any, ...]:
    op = OPS[key]
    return tuple(jax.tree.leaves(jax.eval_shape(lambda w, *args: op.call(w, *args), op.where, *op.args)))


def of_definition(key: str, where: Any = None, args: Any = None) -> tuple[Any, ...]:
    """The outputs of the definition, by default of the mask and the arrays of the table."""
    op = OPS[key]
    wide = (np.asarray(a, np.float64) if a.dtype.kind != "i" else a for a in (op.args if args is None else args))
    with np.errstate(all="ignore"):
        return op.definition(op.where if where is None else where, *wide)


def cotangents_of(key: str, of_masked: float | None = None) -> tuple[np.ndarray, ...]:
    """Cotangents of the outputs; maybe with another value where an output has no element left."""
    cotangents = tuple(np.sin(np.arange(s.size) + 1).reshape(s.shape).astype(s.dtype) for s in shapes_of(key))
    if of_masked is None:
        return cotangents
    where = OPS[key].where
    left = {"whole": where.any(), "element": where, "row": where.any(tuple(range(1, where.ndim)))}

    def replaced(kind: str, cotangent: np.ndarray) -> np.ndarray:
        is_left = np.reshape(left[kind], (*left[kind].shape, *[1] * (cotangent.ndim - left[kind].ndim)))
        return np.where(is_left, cotangent, cotangent.dtype.type(of_masked))

    return tuple(replaced(*both) for both in zip(OPS[key].outputs, cotangents, strict=True))


def filled(key: str, where: np.ndarray, garbage: Any, only: int | None = None) -> tuple[np.ndarray, ...]:
    """The arguments with garbage, a value or a function of an array, under the mask; maybe in one of them only."""
    op, new = OPS[key], []
    for i, (a, hidden) in enumerate(zip(op.args, op.hides(where), strict=True)):
        value = np.asarray(garbage(a) if callable(garbage) else garbage)
        new.append(np.where(hidden, value, a).astype(a.dtype) if only in (None, i) else a)
    return tuple(new)


def polluted(key: str, where: np.ndarray, value: float = np.nan) -> tuple[np.ndarray, ...]:
    """The arguments with a number under the mask, and -100 for labels."""
    return filled(key, where, lambda a: value if a.dtype.kind == "f" else -100)


def assert_close(actual: Any, expected: Any) -> None:
    """Outputs, and maybe gradients, of two programs: differences of numbers of the size of the largest."""
    for a, e in zip(jax.tree.leaves(jax.device_get(actual)), jax.tree.leaves(tuple(expected)), strict=True):
        largest = np.abs(e[np.isfinite(e)]).max(initial=1)
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=2e-6 * largest)


def assert_same_second_derivative(actual: np.ndarray, expected: np.ndarray) -> None:
    """It is a difference of numbers of the size of the largest, and has their rounding error."""
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=5)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5 * largest)


def assert_is_of_definition(key: str, results: Results) -> None:
    """The gradients and the second derivatives, of which those of `all_modes` agree."""
    op, cotangents = OPS[key], cotangents_of(key)
    gradients, slopes = definitions.derivatives(op, cotangents, directions_of(key))
    for actual, expected in zip(results.gradients, gradients, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)
    for actual, expected in zip(results.forward_over_reverse, slopes, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-2, atol=1e-3)
    for forward, reverse in zip(results.forward_over_reverse, results.reverse_over_reverse, strict=False):
        assert_same_second_derivative(reverse, forward)
    finite = [np.isfinite(out) for out in results.outputs]
    along = sum(np.vdot(t[f], c[f]) for f, t, c in zip(finite, results.tangents, cotangents, strict=True))
    np.testing.assert_allclose(along, sum(map(np.vdot, gradients, directions_of(key))), rtol=1e-3, atol=1e-3)


def assert_nothing_left_is_nothing(key: str, **options: Any) -> None:
    where = np.zeros_like(OPS[key].where)
    results = run(key, where, polluted(key, where), **options)
    for out, nothing in zip(results.outputs, OPS[key].nothing, strict=True):
        assert_is_nothing(out, nothing)
    assert_is_nothing(results[1:])


def assert_is_nothing(actual: Any, nothing: float = 0) -> None:
    """Of a row with nothing left: the number itself, and no -0 for 0."""
    jax.tree.map(lambda a: assert_same_bits(a, np.full_like(a, nothing)), actual)
