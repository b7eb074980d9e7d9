"""Every benchmark: CSVs in docs/benchmarks, pictures in docs/_static/benchmarks, and the tables of docs/performance.

python examples/benchmarks/all.py                    # about an hour on two cores
python examples/benchmarks/all.py --only attention --only losses
python examples/benchmarks/all.py --oldest           # with the oldest jax: CSVs in docs/benchmarks/jax-0.10
python examples/benchmarks/all.py --plot-only        # all pictures and tables again from the CSVs of both
python examples/benchmarks/all.py --quick            # a smoke run, which writes nothing
"""

import importlib
from collections.abc import Sequence

import attention
import command
import formulas
import linear
import losses
import normalization
import segments
import steps
from measure import Benchmark

MODULES = losses, linear, attention, normalization, formulas, segments, steps
BENCHMARKS = [benchmark for module in MODULES for benchmark in module.BENCHMARKS]


def publish(benchmarks: Sequence[Benchmark]) -> None:
    """Of all of them together with what other programs measure, imported late: one sets the number of devices."""
    if len(benchmarks) < len(BENCHMARKS):
        return command.publish(benchmarks)
    names = "accuracy", "compiled", "exchanges", "gpu", "meshes", "moves", "sweep"
    accuracy, compiled, exchanges, gpu, meshes, moves, sweep = map(importlib.import_module, names)
    command.publish([*benchmarks, *meshes.BENCHMARKS])
    for module in (accuracy, exchanges, gpu, moves, sweep):
        module.publish()
    for target in compiled.PLACES:
        compiled.publish(target)


if __name__ == "__main__":
    command.main(BENCHMARKS, publish=publish)
