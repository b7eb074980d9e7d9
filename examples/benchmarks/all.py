"""Every benchmark: CSVs in docs/benchmarks, pictures in docs/_static/benchmarks, and the tables of docs/performance.

python examples/benchmarks/all.py                    # some forty minutes on two cores
python examples/benchmarks/all.py --only attention --only losses
python examples/benchmarks/all.py --oldest           # with the oldest jax: CSVs in docs/benchmarks/jax-0.10
python examples/benchmarks/all.py --plot-only        # all pictures and tables again from the CSVs of both
python examples/benchmarks/all.py --quick            # a smoke run, into examples/output/benchmarks
"""

import importlib
from pathlib import Path

import attention
import formulas
import linear
import losses
import normalization
import segments
import steps
from command import main, publish
from results import csv_of, fill_pages

MODULES = losses, linear, attention, normalization, formulas, segments, steps
BENCHMARKS = [benchmark for module in MODULES for benchmark in module.BENCHMARKS]


def publish_others(docs: Path) -> None:
    """What the programs measure that are run by themselves, imported late: one of them sets the number of devices."""
    accuracy, compiled, meshes, sweep = map(importlib.import_module, ("accuracy", "compiled", "meshes", "sweep"))
    publish(meshes.BENCHMARKS, docs)
    if csv_of("sweep", docs).exists():
        fill_pages(docs, {"sweep": sweep.section_of(docs)})
    if csv_of("accuracy", docs).exists():
        fill_pages(docs, {"accuracy": accuracy.section(docs)})
    for target in compiled.PLACES:
        if compiled.csv_of(target, docs).exists():
            compiled.publish(target, docs)


if __name__ == "__main__":
    main(BENCHMARKS, others=publish_others)
