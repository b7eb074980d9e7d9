"""Checks whether masksafe keeps its contract on this machine.

Every case is run with harmless values and with garbage under the mask. Its output and gradients get a verdict:

  right    as the contract requires
  NaN      a NaN or an infinity where a number belongs, in the output or in a gradient
  leaks    a masked value changes a result, or has a gradient other than 0
  wrong    a wrong value, or a bad label that goes unnoticed
  refused  an error
  -        the case was not run there

With MODULE:FUNCTION the function of yours that FUNCTION returns, with its arguments and masks, gets the same verdicts
from the tools of masksafe.testing.

The exit status is 0 if masksafe, or your function, is right everywhere, 1 if it is not, 2 for bad options.
"""

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import jax
import jaxlib

import masksafe
from masksafe._core import compiler_faults
from masksafe._report import _own_function, _show
from masksafe._report._cases import CASES, Case
from masksafe._report._ops import OPS
from masksafe._report._verdict import Verdict, in_jax, judge, worst


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.case is not None:
        return 0 if _own_function.judge(*options.case) else 1
    cases = [case for case in CASES if any(part in case.op for part in options.only)]
    if not cases:
        print(f"No op has any of {', '.join(options.only)} in its name.", file=sys.stderr)
        return 2
    versions = _versions()
    _show.table("What runs here", ["", "version"], list(versions.items()))
    verdicts = {}
    for device, chosen in _assign_cases(cases):
        name = f"masksafe on {device}"
        with jax.default_device(device):
            verdicts[name] = _judge_cases(cases, chosen, name)
    worst_verdicts = [worst(case_verdicts) for case_verdicts in zip(*verdicts.values(), strict=True)]
    _show.verdicts("Masked means gone", cases, {"masksafe": worst_verdicts})
    _show.numbers_of_right(verdicts)
    keeps = set(worst_verdicts) == {Verdict.RIGHT}
    print(f"masksafe {'keeps its contract' if keeps else 'does NOT keep its contract: please report it'}.")
    fault = compiler_faults.described(compiler_faults.known)
    if fault is not None and any(device.platform == "cpu" for device in jax.local_devices()):
        print(f"These cases do not show it, but: {fault}")
    if options.json:
        rows = [
            {"op": case.op, "case": case.what, "verdicts": {name: column[i] for name, column in verdicts.items()}}
            for i, case in enumerate(cases)
        ]
        report = {"versions": versions, "keeps_contract": keeps, "cases": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if keeps else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m masksafe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "case",
        nargs="?",
        metavar="MODULE:FUNCTION",
        help="judge a function of yours: FUNCTION() returns it, a tuple of its arguments, and a dict from the index of "
        "an argument to booleans, True where it is masked",
    )
    parser.add_argument(
        "--only",
        metavar="OPS",
        type=lambda text: text.split(","),
        default=[""],
        help="parts of names: run only ops that match one",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    options = parser.parse_args(arguments)
    if options.case is not None:
        try:
            options.case = options.case, _own_function.load(options.case)
        except _own_function.NotACaseError as error:
            parser.error(f"argument MODULE:FUNCTION: {error}")
    return options


def _versions() -> dict[str, str]:
    versions = {module.__name__: module.__version__ for module in (masksafe, jax, jaxlib)}
    kinds = [f"{device.id}: {device.device_kind} ({device.platform})" for device in jax.local_devices()]
    return {"Python": platform.python_version()} | versions | {"devices": ", ".join(kinds)}


def _assign_cases(cases: list[Case]) -> list[tuple[Any, list[Case]]]:
    """Each device with its cases: all of them on the first device of a kind, one per op on the others."""
    one_each = list({case.op: case for case in reversed(cases)}.values())
    first_of_kind = {device.device_kind: device for device in reversed(jax.local_devices())}.values()
    return [(device, cases if device in first_of_kind else one_each) for device in jax.local_devices()]


def _judge_cases(cases: list[Case], chosen: list[Case], name: str) -> list[Verdict]:
    """The verdict on each case; ABSENT for cases that are not chosen. Each op is reported when it is done."""
    verdicts: dict[int, Verdict] = {}
    for op in dict.fromkeys(case.op for case in chosen):
        run = in_jax(OPS[op])
        op_verdicts = {id(case): judge(case, run) for case in chosen if case.op == op}
        _show.progress(f"{name}: {op}: {', '.join(op_verdicts.values())}")
        verdicts |= op_verdicts
    return [verdicts.get(id(case), Verdict.ABSENT) for case in cases]


if __name__ == "__main__":
    sys.exit(main())
