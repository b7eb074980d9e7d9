"""Every benchmark: CSVs in docs/benchmarks, pictures in docs/_static/benchmarks, and the tables of docs/performance.

python examples/benchmarks/all.py                    # some forty minutes on two cores
python examples/benchmarks/all.py --only attention --only losses
python examples/benchmarks/all.py --oldest           # with the oldest jax: CSVs in docs/benchmarks/jax-0.10
python examples/benchmarks/all.py --plot-only        # all pictures and tables again from the CSVs of both
python examples/benchmarks/all.py --quick            # a smoke run, into examples/output/benchmarks
"""

import importlib
from pathlib import Path

import accumulation
import attention
import contrastive
import cross_entropy
import decoder
import label_checks
import linear_cross_entropy
import linear_kl_divergence
import linear_log_probs
import losses
import normalization
import routers
import segments
import softmax
from command import main
from pages import csv_of, fill_pages, publish

MODULES = [
    cross_entropy,
    linear_cross_entropy,
    linear_log_probs,
    linear_kl_divergence,
    attention,
    normalization,
    softmax,
    segments,
    losses,
    routers,
    contrastive,
    label_checks,
    decoder,
    accumulation,
]
BENCHMARKS = [module.BENCHMARK for module in MODULES]


def publish_others(docs: Path) -> None:
    """What the scripts measure that are run by themselves, imported late: two of them set the number of devices."""
    compiled, meshes, ring_attention, sweep = map(
        importlib.import_module, ("compiled", "meshes", "ring_attention", "sweep")
    )
    publish([meshes.BENCHMARK, ring_attention.BENCHMARK], docs)
    if csv_of("sweep", docs).exists():
        fill_pages(docs, {"sweep": sweep.section(docs)})
    for target in (*compiled.TARGETS_OF_PAGE, compiled.TARGET_OF_SIZES):
        if compiled.csv_of(target, docs).exists():
            compiled.publish(target, docs)


if __name__ == "__main__":
    main(BENCHMARKS, others=publish_others)
