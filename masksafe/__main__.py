"""Checks whether masksafe keeps its contract on this machine.

Every op is run with garbage under its mask, with everything masked, and with bad labels if it takes labels, on each
kind of device. Its verdict:

  right    as the contract requires
  leaks    a masked value changes a result, or has a gradient other than 0
  wrong    a NaN, another value where everything is masked, or a bad label that goes unnoticed
  refused  an error

With MODULE:FUNCTION the function of yours that FUNCTION returns, with its arguments and masks, is judged by the tools
of masksafe.testing.

The exit status is 0 if masksafe, or your function, is right everywhere, 1 if it is not, 2 for bad options.
"""

import argparse
import json
import platform
import sys
from pathlib import Path

import jax
import jaxlib

import masksafe
from masksafe._core import compiler_faults
from masksafe._report import _own_function
from masksafe._report._cases import CASES
from masksafe._report._verdict import judge_case, print_progress, print_table


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.case is not None:
        return 0 if _own_function.is_right(*options.case) else 1
    cases = [case for case in CASES if any(part in case.op for part in options.only.strip(",").split(","))]
    if not cases:
        print(f"No op has any of {options.only} in its name.", file=sys.stderr)
        return 2
    versions = {module.__name__: module.__version__ for module in (masksafe, jax, jaxlib)}
    kinds = [f"{device.id}: {device.device_kind} ({device.platform})" for device in jax.local_devices()]
    versions = {"Python": platform.python_version()} | versions | {"devices": ", ".join(kinds)}
    print_table("What runs here", ["", "version"], list(versions.items()))
    first_of_kind = {device.device_kind: device for device in reversed(jax.local_devices())}.values()
    verdicts: dict[str, dict[str, str]] = {case.op: {} for case in cases}
    findings = []
    for device in first_of_kind:
        for case in cases:
            with jax.default_device(device):
                verdict, finding = judge_case(case)
            verdicts[case.op][str(device)] = verdict
            if verdict != "right":
                findings.append(f"{case.op} on {device}: {verdict}\n{finding}")
            print_progress(f"{device}: {case.op}: {verdict}")
    rows = [(op, *by_device.values()) for op, by_device in verdicts.items()]
    print_table("Masked means gone", ["op", *map(str, first_of_kind)], rows)
    for finding in findings:
        print(f"{finding}\n")
    print(f"masksafe {'does NOT keep its contract: please report it' if findings else 'keeps its contract'}.")
    fault = compiler_faults.described(compiler_faults.known)
    if fault is not None and any(device.platform == "cpu" for device in jax.local_devices()):
        print(f"These cases do not show it, but: {fault}")
    if options.json:
        ops = [{"op": op, "verdicts": by_device} for op, by_device in verdicts.items()]
        report = {"versions": versions, "keeps_contract": not findings, "cases": ops, "findings": findings}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if findings else 0


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
    parser.add_argument("--only", metavar="OPS", default="", help="parts of names: run only ops that match one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    options = parser.parse_args(arguments)
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"argument --json: there is no folder {options.json.parent}")
    if options.case is not None:
        if options.json or options.only:
            parser.error("--json and --only are for masksafe's own ops, without MODULE:FUNCTION")
        try:
            options.case = options.case, _own_function.load(options.case)
        except _own_function.NotACaseError as error:
            parser.error(f"argument MODULE:FUNCTION: {error}")
    return options


if __name__ == "__main__":
    sys.exit(main())
