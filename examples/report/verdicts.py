"""The verdict on a function in a case, and tables of verdicts."""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from edge_cases import Case

from masksafe._report._cases import Array, Inputs
from masksafe._report._verdict import print_table


class Verdict(enum.StrEnum):
    """Verdicts in the order in which they are checked, the worst first."""

    REFUSED = "refused"  # an error
    NAN = "NaN"  # in the output or a gradient, where none belongs
    LEAKS = "leaks"  # a masked value changes a result, or has a gradient
    WRONG = "wrong"
    RIGHT = "right"
    ABSENT = "-"  # the library has no such function


class Result(NamedTuple):
    """The output of a call and its gradients with respect to the float inputs."""

    output: Array
    gradients: dict[str, Array]


Run = Callable[[Inputs], Result]

_GARBAGE = {"f": (np.nan, np.inf, -3e4), "i": (-100, 2**31 - 1, -100), "b": (True, True, True)}
_TOLERANCE = 2e-3


def in_jax(op: Callable[..., Any]) -> Run:
    """One program of the output and its gradients, for all that may stand under the mask."""

    @jax.jit
    def output_and_gradients(inputs: Inputs) -> Any:
        floats = {name: x for name, x in inputs.items() if x.dtype.kind == "f"}
        output, reverse = jax.vjp(lambda floats: jnp.asarray(op(**{**inputs, **floats})), floats)
        weights = jnp.cos(jnp.arange(output.size)).reshape(output.shape).astype(output.dtype)
        return output, *reverse(weights)

    return lambda inputs: Result(*jax.tree.map(np.float64, output_and_gradients(jax.tree.map(jnp.asarray, inputs))))


def judge(case: Case, run: Run) -> Verdict:
    """Runs a case with harmless values and with garbage under the mask, and judges the results."""
    try:
        results = [run(inputs) for inputs in _filled(case)]
    except Exception:  # a peer may refuse with any error
        return Verdict.REFUSED
    clean, *dirty = results
    # The harmless result may be infinite, as a logsumexp of nothing is, but not NaN.
    expected = np.where(np.isnan(clean.output), 0, clean.output) if case.expected is None else case.expected
    if any(_has_stray_nan(result, expected) for result in results):
        return Verdict.NAN
    if any(_differ(clean, other) for other in dirty) or any(_has_hidden_gradient(case, r) for r in results):
        return Verdict.LEAKS
    return Verdict.RIGHT if _is_right(clean, expected) else Verdict.WRONG


def _filled(case: Case) -> list[Inputs]:
    """The inputs with 0 under the mask, and with each kind of garbage."""
    fillings = [dict(case.inputs) for _ in range(4 if case.hidden else 1)]
    for name, hidden in case.hidden.items():
        x = case.inputs[name]
        for inputs, value in zip(fillings, (0, *_GARBAGE[x.dtype.kind]), strict=True):
            inputs[name] = np.where(hidden, np.asarray(value, x.dtype), x)
    return fillings


def _has_stray_nan(result: Result, expected: Array) -> bool:
    """A NaN or infinity where the output should be finite, or a NaN in a gradient if no output should be NaN."""
    belongs = np.isfinite(expected) if result.output.shape == expected.shape else True
    if not np.isfinite(result.output[belongs]).all():
        return True
    return not np.isnan(expected).any() and any(np.isnan(g).any() for g in result.gradients.values())


def _differ(a: Result, b: Result) -> bool:
    return not all(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(x, y, equal_nan=True), a, b)))


def _has_hidden_gradient(case: Case, result: Result) -> bool:
    return any(result.gradients[name][hidden].any() for name, hidden in case.hidden.items() if name in result.gradients)


def _is_right(result: Result, expected: Array) -> bool:
    """Whether the values are right and, if a bad label makes some NaN, the gradient is NaN in those rows only."""
    finite = np.abs(expected[np.isfinite(expected)])
    error = _TOLERANCE * np.max(finite, initial=0) + np.finfo(np.float32).tiny
    if result.output.shape != expected.shape or not np.allclose(result.output, expected, 0, error, equal_nan=True):
        return False
    gradient = next(iter(result.gradients.values()))
    return not np.isnan(expected).any() or np.array_equal(np.isnan(gradient).any(-1), np.isnan(expected))


def print_verdicts(title: str, cases: Sequence[Case], columns: Mapping[str, Sequence[Verdict]]) -> None:
    """Prints a table with a line per op, followed by a line per case, and the columns that have any of the cases."""
    columns = {name: column for name, column in columns.items() if set(column) != {Verdict.ABSENT}}
    rows: dict[str, list[Sequence[str]]] = {}
    for case, *found in zip(cases, *columns.values(), strict=True):
        rows.setdefault(case.op, [[case.op, *[""] * len(columns)]]).append([f"  {case.what}", *found])
    print_table(title, ["op and case", *columns], [row for rows_of_op in rows.values() for row in rows_of_op])
