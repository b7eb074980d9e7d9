"""Checks whether masksafe keeps its contract on this machine, and how the installed peers do on the same cases.

Every case is run with harmless values and with garbage under the mask. Its output and gradients get a verdict:

  right    as the contract requires
  NaN      a NaN or an infinity where a number belongs, in the output or in a gradient
  leaks    a masked value changes a result, or has a gradient other than 0
  wrong    a wrong value, or a bad label that goes unnoticed
  refused  an error
  -        the library has no such function, or the case was not run there

With MODULE:FUNCTION the function of yours that FUNCTION returns, with its arguments and masks, gets the same verdicts
from the tools of masksafe.testing.

The exit status is 0 if masksafe, or your function, is right everywhere, 1 if it is not or jaxlib computes wrong sums,
2 for bad options.
"""

import argparse
import importlib.metadata
import json
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import jax

from masksafe._report import _own_function, _probe, _show
from masksafe._report._case import Case
from masksafe._report._cases import all_cases
from masksafe._report._libraries import PEERS, is_installed, runner
from masksafe._report._verdict import Verdict, judge, worst


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.case is not None:
        return 0 if _own_function.judge(options.case) else 1
    cases = [case for case in all_cases() if any(part in case.op for part in options.only)]
    if not cases:
        print(f"No op has any of {', '.join(options.only)} in its name.", file=sys.stderr)
        return 2
    peers = _chosen_peers(options.peers)
    versions = _versions(peers)
    _show.table("What runs here", ["", "version"], list(versions.items()))
    fault = _probe.fault()
    if fault:
        print(fault)

    of_devices = {}
    for device, chosen in _assign_cases(cases):
        name = f"masksafe on {device}"
        with jax.default_device(device):
            of_devices[name] = _judge_cases("masksafe", cases, chosen, name)
    of_peers = {peer: _judge_cases(peer, cases, cases, peer) for peer in peers}
    of_masksafe = [worst(verdicts) for verdicts in zip(*of_devices.values(), strict=True)]
    _show.verdicts("Masked means gone", cases, {"masksafe": of_masksafe} | of_peers)
    keeps = set(of_masksafe) == {Verdict.RIGHT}
    _summarise(of_devices | of_peers, keeps)
    if options.json:
        options.json.write_text(json.dumps(_as_json(versions, cases, of_devices | of_peers, keeps), indent=1) + "\n")
    return 0 if keeps and not fault else 1


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
    parser.add_argument("--peers", default="all", help=f"none, all, or some of {','.join(PEERS)}; default: %(default)s")
    parser.add_argument(
        "--only", metavar="OPS", type=_parts, default=[""], help="parts of names: run only ops that match one"
    )
    parser.add_argument("--ops", type=_parts, help=argparse.SUPPRESS)  # the name of --only in 0.2; it goes in 0.4
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    options = parser.parse_args(arguments)
    if options.ops is not None:
        warnings.warn("--ops is deprecated and goes in masksafe 0.4: write --only.", DeprecationWarning, stacklevel=2)
        options.only = options.ops
    if options.case is not None:
        try:
            options.case = _own_function.load(options.case)
        except _own_function.NotACaseError as error:
            parser.error(f"argument MODULE:FUNCTION: {error}")
    unknown = set(options.peers.split(",")) - {"none", "all", *PEERS}
    if unknown:
        parser.error(f"argument --peers: {', '.join(sorted(unknown))} is none of none, all, {', '.join(PEERS)}")
    return options


def _parts(text: str) -> list[str]:
    return text.split(",")


def _chosen_peers(text: str) -> list[str]:
    chosen = {"none": [], "all": list(PEERS)}.get(text, text.split(","))
    return [peer for peer in PEERS if peer in chosen and is_installed(peer)]


def _versions(peers: list[str]) -> dict[str, str]:
    versions = {"Python": platform.python_version()}
    for package in ("masksafe", "jax", "jaxlib", *(peer for peer in peers if peer != "jax.nn")):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed as a package"
    kinds = [f"{device.id}: {device.device_kind} ({device.platform})" for device in jax.local_devices()]
    return versions | {"devices": ", ".join(kinds)}


def _assign_cases(cases: list[Case]) -> list[tuple[Any, list[Case]]]:
    """Each device with its cases: all of them on the first device of a kind, one per op on the others."""
    one_each = list({case.op: case for case in reversed(cases)}.values())
    first_of_kind = {device.device_kind: device for device in reversed(jax.local_devices())}.values()
    return [(device, cases if device in first_of_kind else one_each) for device in jax.local_devices()]


def _judge_cases(library: str, cases: list[Case], chosen: list[Case], name: str) -> list[Verdict]:
    """The verdict on each case; ABSENT for cases that are not chosen. Each op is reported when it is done."""
    verdicts: dict[int, Verdict] = {}
    for op in dict.fromkeys(case.op for case in chosen):
        runs = [(case, runner(library, case)) for case in chosen if case.op == op]
        of_op = {id(case): judge(case, run) for case, run in runs if run is not None}
        if of_op:
            _show.progress(f"{name}: {op}: {', '.join(of_op.values())}")
        verdicts |= of_op
    return [verdicts.get(id(case), Verdict.ABSENT) for case in cases]


def _summarise(verdicts: dict[str, list[Verdict]], keeps: bool) -> None:
    for name, column in verdicts.items():
        run = [verdict for verdict in column if verdict != Verdict.ABSENT]
        if run:
            print(f"{name}: {run.count(Verdict.RIGHT)} of {len(run)} right")
    print(f"masksafe {'keeps its contract' if keeps else 'does NOT keep its contract: please report it'}.")


def _as_json(
    versions: dict[str, str], cases: list[Case], verdicts: dict[str, list[Verdict]], keeps: bool
) -> dict[str, Any]:
    rows = [
        {"op": case.op, "case": case.what, "verdicts": {name: column[i] for name, column in verdicts.items()}}
        for i, case in enumerate(cases)
    ]
    return {"versions": versions, "keeps_contract": keeps, "cases": rows}


if __name__ == "__main__":
    sys.exit(main())
