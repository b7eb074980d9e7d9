"""No program grows unseen: the operations that each op hands to XLA are bounded, for its value and with its gradient.

Nothing is compiled, and the counts are the same on any machine. A bound is 10 % above the larger of the counts with the
oldest and the newest JAX. They are in `program_sizes.csv`, with the reason where a program is larger than it has to be.
When programs have become smaller, or when one has to be larger, this counts anew with this JAX and that of other
Pythons, and writes the bounds into the file:

    PYTHONPATH=.:examples/benchmarks python tests/test_program_sizes.py [ANOTHER_PYTHON ...]
"""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import compiled
import jax
import pytest
from measure import PASSES
from operations import name_of, operations
from tiers import parametrize

SLACK = 1.1  # a bound in units of the count
COUNTS = "--counts"  # the option that prints, as JSON, what this Python's JAX counts

TABLE = Path(__file__).with_name("program_sizes.csv")


def read_table():
    """Its lines by op and mask: the most operations of the value, and of the value with its gradient."""
    with TABLE.open(newline="") as file:
        return {(line["op"], line["mask"]): line for line in csv.DictReader(file)}


BOUNDS = read_table()

TOO_LARGE = """
{op}, mask: {mask}: the {what} has {count} operations, of which {bound} are allowed.
Write a smaller program: `examples/benchmarks/compiled.py --target cpu --only "{work}"` shows it beside its peer.
Or raise the bound in `tests/program_sizes.csv`, and say beside it what the operations buy."""
CASES = {(name_of(case), case.mask): case for of_name in compiled.on_cpu().values() for case in of_name}


def count(case, what):
    step, args = compiled.step_of(case, "masksafe", what)
    return operations(step, *args)


@pytest.fixture(autouse=True)
def no_platform_of_the_process(monkeypatch):
    """What a program does is decided when it is lowered: no op asks for the platform of the process."""
    for name in ("default_backend", "devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda *_, **__: pytest.fail("an op asks for the platform of the process"))


@parametrize("key", [("integer", "none")], exhaustive=CASES, ids=lambda key: "-".join(key).replace(" ", "_"))
def test_a_program_is_no_larger_than_its_bound(key):
    case = CASES[key]
    for what in PASSES:
        found, bound = count(case, what), int(BOUNDS[key][what])
        about = {"op": key[0], "mask": key[1], "work": case.work, "what": what, "count": found, "bound": bound}
        assert found <= bound, TOO_LARGE.format(**about)


def test_every_op_has_a_bound():
    assert set(BOUNDS) == set(CASES), "write the table anew: the docstring of this file has the command"


# Writing the table


def counts():
    return [[count(case, what) for what in PASSES] for case in CASES.values()]


def counts_of(python):
    """What another Python, which has another JAX, counts."""
    return json.loads(subprocess.check_output([python, __file__, COUNTS], text=True).splitlines()[-1])


def bound_of(found):
    return max(found + 1, math.ceil(SLACK * found))


def write_table(pythons):
    everywhere = [counts(), *map(counts_of, pythons)]
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, ("op", "mask", *PASSES, "reason"), lineterminator="\n")
        table.writeheader()
        for key, *found in zip(CASES, *everywhere, strict=True):
            bounds = (bound_of(max(of_pass)) for of_pass in zip(*found, strict=True))
            reason = BOUNDS.get(key, {}).get("reason", "")
            table.writerow(dict(zip(table.fieldnames, (*key, *bounds, reason), strict=True)))


if __name__ == "__main__":
    if COUNTS in sys.argv:
        print(json.dumps(counts()))
    else:
        write_table(sys.argv[1:])
