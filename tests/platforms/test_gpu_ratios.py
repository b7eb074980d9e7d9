"""What XLA makes of every op for an H100, held to its peer: bytes moved, kernels launched, temporary memory.

The figures are those of the value with its gradient, unless a line of the table says otherwise. Nothing is run.
"""

from dataclasses import dataclass

import compiled
import jax
import pytest
from measure import GRADIENT, VALUE

pytestmark = pytest.mark.optimised

CASES = {(case.work, case.mask, case.dtype): (name, case) for name, of in compiled.benchmarks().items() for case in of}
SLACK = 0.005  # of a ratio: arrays of a few bytes


@dataclass(frozen=True)
class Aim:
    """The most that masksafe may have in units of its peer's; None: whatever it is."""

    work: str
    mask: str
    dtype: str
    moved: float = 1.0
    launches: float | None = None
    temporaries: float | None = None
    most_temporary_bytes: int | None = None
    what: str = GRADIENT

    @property
    def case(self) -> tuple[str, str, str]:
        return self.work, self.mask, self.dtype


F32, BF16 = "float32", "bfloat16"
BOTH = (F32, BF16)
SIZE_OF_NORMS = {F32: 4 * 8192 * 1024, BF16: 2 * 8192 * 1024}  # bytes of the input

VALUES_TOO = ((F32, VALUE), (F32, GRADIENT), (BF16, GRADIENT))  # the value is alike in both

# Segments: the bytes of the value and of the value with its gradient in float32, and of the latter in bfloat16. jraph's
# formulas sum bfloat16 in bfloat16, masksafe in float32, in which it also keeps the results of segment_log_softmax and
# segment_standardize for the gradient, which needs their digits. Means are in two parts, the second of which is read
# for every element as well. A GPU finds extrema of integers, and those of floats are converted once more.
OF_SEGMENTS = {
    "segment_sum": (1.0, 1.0, 1.25),
    "segment_mean": (0.81, 0.83, 0.98),
    "segment_var": (1.04, 0.78, 1.04),
    "segment_max": (1.16, 1.11, 1.33),
    "segment_min": (1.16, 1.11, 1.33),
    "segment_logsumexp": (1.0, 0.62, 0.67),
    "segment_softmax": (1.01, 0.73, 0.76),
    "segment_log_softmax": (1.36, 0.78, 1.1),
    "segment_standardize": (1.05, 0.95, 1.52),
}

# XLA's kernels for a row have one result. The sums that a row keeps for its gradient are made by one more, which reads
# logits and targets again.
OF_LOSSES = {"safe_softmax_cross_entropy": 1.21}

# The sum over a row in the gradient is a kernel of its own, and the row is read once more. XLA does not split it off if
# the sum is added to zeros made of its own terms; nobody has timed that on a GPU, so the formula stays as it is.
OF_SOFTMAXES = {("softmax", F32, GRADIENT): 1.17, ("log_softmax", F32, GRADIENT): 1.23}

# Losses of all pairs, as above. The logits are computed again for the gradient, rather than kept.
OF_PAIRS = {"info_nce_loss": (1.28, 1.18, 0.99), "sigmoid_contrastive_loss": (1.21, 1.13, 0.87)}


def is_of_one_form(of):
    """Whether a case has the dtype of its mask: float32 without one, bfloat16 with one. So half of the cases remain."""
    return of.dtype == (F32 if of.mask == "none" else BF16)


AIMS = [
    *(
        Aim(work, mask, dtype)
        for work in ("integer", "one-hot")
        for mask in ("none", "rows", "classes")
        for dtype in BOTH
    ),
    *(
        Aim(work, mask, dtype, moved=OF_SOFTMAXES.get((work, dtype, what), 1.0), what=what)
        for work in ("softmax", "log_softmax", "logsumexp")
        for mask in ("none", "elements")
        for dtype, what in VALUES_TOO
    ),
    *(Aim(work, mask, dtype) for work in ("mean", "sum", "var") for mask in ("none", "elements") for dtype in BOTH),
    *(
        Aim(work, mask, dtype, what=what, most_temporary_bytes=SIZE_OF_NORMS[dtype] - 1)
        for work in ("layer norm", "RMS norm")
        for mask in ("none", "rows", "elements")
        for dtype, what in VALUES_TOO
    ),
    *(
        Aim(work, mask, dtype, what=what)
        for work in ("batch norm", "group norm")
        for mask in ("none", "rows")
        for dtype, what in VALUES_TOO
    ),
    *(
        Aim("attention", mask, dtype, moved=1.05, launches=5.3, temporaries=0.5, what=what)
        for mask in ("none", "causal", "8 segments")
        for dtype, what in VALUES_TOO
    ),
    Aim("linear", "none", BF16, moved=1.3, launches=8, temporaries=1 / 3),
    Aim("linear", "60 % of tokens", BF16, moved=0.7, launches=8),
    *(Aim(work, "none", BF16, launches=8, temporaries=1 / 2.5) for work in ("log p", "log p, entropy")),
    *(Aim(work, "60 % of tokens", BF16, moved=0.9, launches=8) for work in ("log p", "log p, entropy")),
    *(
        Aim(case.work, case.mask, case.dtype, moved=OF_LOSSES.get(case.work, 1.05))
        for case in compiled.of_losses()
        if is_of_one_form(case)
    ),
    *(Aim(case.work, case.mask, case.dtype) for case in compiled.of_more()),
    *(
        Aim(work, mask, dtype, moved=moved, what=what)
        for work, of_work in OF_SEGMENTS.items()
        for mask in ("none", "rows")
        for (dtype, what), moved in zip(VALUES_TOO, of_work, strict=True)
    ),
    *(
        Aim(work, mask, dtype, moved=1.06, what=what)
        for work in ("load_balancing_loss", "router_z_loss")
        for mask in ("none", "60 % of tokens")
        for dtype, what in VALUES_TOO
    ),
    *(
        Aim(work, mask, dtype, moved=moved, temporaries=0.5 if what == GRADIENT else 0.67, what=what)
        for work, of_work in OF_PAIRS.items()
        for mask in ("none", "60 % of rows")
        for (dtype, what), moved in zip(VALUES_TOO, of_work, strict=True)
    ),
]

# The bytes of what moves more than it should, by op and mask. Means and variances take two passes, where flax's E[x^2]
# takes one and cancels. Masked elements of norms have to be 0, so the mask is read with the result too; of many small
# rows, those of group norm, XLA writes deviations under a mask, and their products with the cotangent; gradients of
# attention compute the logits again rather than keep them. The cotangents of entropies use each logit twice, and XLA
# computes only what uses it once inside the matrix product.
ABOVE = {
    ("apply_where", "elements"): 1.34,
    ("attention", "none"): 1.2,
    ("batch norm", "none"): 1.34,
    ("batch norm", "rows"): 1.43,
    ("group norm", "none"): 1.71,
    ("group norm", "rows"): 2.99,
    ("attention", "8 segments"): 1.2,
    ("ctc_loss", "none"): 1.16,
    ("ctc_loss", "masked"): 1.26,
    ("ctc_loss_with_forward_probs", "none"): 1.27,
    ("layer norm", "none"): 1.14,
    ("layer norm", "rows"): 1.14,
    ("layer norm", "elements"): 1.47,
    ("log p, entropy", "none"): 1.08,
    ("poly_loss_cross_entropy", "masked"): 1.21,
    ("RMS norm", "none"): 1.17,
    ("RMS norm", "rows"): 1.17,
    ("RMS norm", "elements"): 1.22,
    ("standardize", "elements"): 1.26,
}


def named(aim):
    """A parameter; to save time most of the other pairs of mask and dtype are compiled with `-m exhaustive` alone."""
    is_form = aim.mask != "none" if aim.what == VALUE else not is_of_one_form(aim)
    is_only = sum((other.work, other.mask) == (aim.work, aim.mask) for other in AIMS) == 1
    name = "-".join((*aim.case, aim.what)).replace(" ", "_")
    return pytest.param(aim, id=name, marks=[pytest.mark.exhaustive] * (is_form and not is_only))


@pytest.mark.filterwarnings("ignore:The function convex_kl_divergence is deprecated:DeprecationWarning")
@pytest.mark.parametrize("aim", [named(aim) for aim in AIMS])
def test_no_more_than_the_peer(h100, aim):
    name, case = CASES[aim.case]
    (pair,) = compiled.pairs(list(compiled.rows_of(name, case, h100, (aim.what,))))
    jax.clear_caches()
    row, peer = pair.row, pair.peer
    moved = ABOVE.get((aim.work, aim.mask), aim.moved)
    assert pair.of("bytes_moved") <= moved + SLACK, (row.bytes_moved, peer.bytes_moved)
    assert aim.launches is None or row.launches <= aim.launches * peer.launches
    assert aim.temporaries is None or row.temporary_bytes <= aim.temporaries * peer.temporary_bytes
    assert aim.most_temporary_bytes is None or row.temporary_bytes <= aim.most_temporary_bytes


# Those whose value has one scatter more than jraph's formula: to have an element of each segment, from which the others
# deviate.
ONE_MORE = {("segment_var", VALUE), ("segment_standardize", VALUE)}


@pytest.mark.parametrize("what", [VALUE, GRADIENT])
@pytest.mark.parametrize("work", OF_SEGMENTS)
def test_segments_have_no_more_scatters_than_the_peer(h100, work, what):
    _, case = CASES[work, "none", F32]
    ours, peers = (compiled.compile_case(case, name, what, h100) for name in compiled.candidates(case))
    jax.clear_caches()
    assert 1 <= ours.scatters <= peers.scatters + ((work, what) in ONE_MORE)


@pytest.mark.parametrize("mask", ["none", "60 % of tokens"])
def test_the_probabilities_of_a_router_are_read_once(h100, mask):
    _, case = CASES["load_balancing_loss", mask, F32]
    program = compiled.compile_case(case, "masksafe", VALUE, h100)
    probs, *_ = compiled.shapes_of(case.prepare).args
    assert program.bytes_moved <= 1.2 * probs.size * probs.dtype.itemsize


def test_every_op_has_an_aim():
    works = {work for work, *_ in CASES if not work.startswith("attention by")}
    assert {aim.work for aim in AIMS} == works
