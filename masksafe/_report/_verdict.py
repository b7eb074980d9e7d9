"""Verdicts from the tools of `masksafe.testing`, and tables of them."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from masksafe._report._cases import OPS, Case, X
from masksafe.testing import assert_mask_safe


def judge(checks: Sequence[tuple[Callable[[], None], str]]) -> tuple[str, str]:
    """Runs checks, each with its verdict if it fails; returns the verdict, and what the first to fail has found."""
    for check, if_not in checks:
        try:
            check()
        except AssertionError as error:
            return if_not, str(error)
        except Exception as error:  # an op, or a function of the user's, may raise any
            return "refused", f"{type(error).__name__}: {error}"
    return "right", ""


def judge_case(case: Case) -> tuple[str, str]:
    op, names = OPS[case.op], [*case.inputs]
    call = jax.jit(lambda *inputs: op(**dict(zip(names, inputs, strict=True))))
    masked = {names.index(name): mask for name, mask in case.masked.items()}
    how: dict[str, Any] = {"order": 1, "transforms": ("jit",), "allow_nan": True}  # values are asserted below
    gone = lambda: assert_mask_safe(call, *case.inputs.values(), masked=masked, **how)  # noqa: E731
    return judge([(gone, "leaks"), (lambda: _assert_values(call, case), "wrong")])


def _assert_values(call: Callable[..., Any], case: Case) -> None:
    """Asserts that bad labels give NaN and nothing else does, and that the output is right with everything masked."""
    run = lambda **changed: np.asarray(call(*(case.inputs | changed).values()))  # noqa: E731
    _assert_equal("NaN", np.isnan(run()), False)
    _assert_equal("output with everything masked", run(**case.empty), case.empty_output)
    labels = case.inputs["labels"] if "labels" in case.masked else np.zeros(0)
    classes = case.inputs.get("kernel", X).shape[-1]
    for label in (-1, classes) if labels.dtype.kind == "i" else ():
        is_first = np.arange(labels.size) == 0
        nan = np.isnan(run(labels=np.where(is_first, label, labels)))
        _assert_equal(f"NaN for label {label} of {classes} classes", nan, is_first if nan.ndim else True)


def _assert_equal(what: str, found: np.ndarray, expected: Any) -> None:
    if not (found == expected).all():
        raise AssertionError(f"{what}: got {found.tolist()}, expected {np.asarray(expected).tolist()}")


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(title)
    for row in (header, ["-" * width for width in widths], *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


def print_progress(line: str) -> None:
    """Prints a line at once, apart from the report, if somebody watches."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
