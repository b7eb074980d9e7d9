"""Every benchmark: CSVs in docs/benchmarks, pictures in docs/_static/benchmarks, and the tables of docs/performance.md.

python examples/benchmarks/all.py                    # some twenty minutes on two cores
python examples/benchmarks/all.py --only attention --only losses
python examples/benchmarks/all.py --plot-only        # pictures and tables again from the CSVs
python examples/benchmarks/all.py --quick            # a smoke run, into examples/output/benchmarks
"""

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

if __name__ == "__main__":
    main(BENCHMARKS)
