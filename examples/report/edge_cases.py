"""The cases of `python -m masksafe` for other libraries too, and edges of what an op accepts, with the right results.

An op has the name of masksafe's function. Right results are computed by NumPy in float64.
"""

from typing import NamedTuple

import numpy as np

from masksafe._report import _cases
from masksafe._report._cases import CLASSES, LABELS, ROWS, SOME_ROWS, Array, Inputs, P, X, Y, floats, masked_in, softmax

NOTHING, SOFT = np.zeros(X.shape, bool), {"logits": X, "labels": P}


class Case(NamedTuple):
    """A call of an op."""

    op: str
    what: str
    inputs: Inputs
    hidden: dict[str, Array]  # for each input, where it is masked
    expected: Array | None  # None: the result of the same call with harmless values under the mask


# The right results.


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The losses of integer labels."""
    x = np.float64(logits)
    others = x - np.take_along_axis(x, labels[:, None], -1)
    return np.asarray(np.log1p(np.exp(others).sum(-1) - 1))


def mean_divergence(features: Array, kernel: Array, target_features: Array, target_kernel: Array) -> Array:
    layers = ((target_features, target_kernel), (features, kernel))
    p, q = (softmax(x.astype(np.float64) @ weights) for x, weights in layers)
    return np.asarray(np.sum(p * np.log(p / q), -1).mean())


def standardized(x: Array, axis: int, epsilon: float) -> Array:
    wide = np.float64(x)
    return np.asarray((wide - wide.mean(axis, keepdims=True)) / np.sqrt(wide.var(axis, keepdims=True) + epsilon))


def attended(query: Array, key: Array, value: Array, mask: Array) -> Array:
    """Attention of one sample and one head of width 4."""
    scores = np.where(mask[0, 0], np.float64(query[0, :, 0] @ key[0, :, 0].T) / 2, -np.inf)
    with np.errstate(invalid="ignore"):
        p = np.nan_to_num(softmax(scores))
    return np.asarray((p @ value[0, :, 0])[None, :, None])


def integer_label_cases() -> list[Case]:
    op, losses, is_third = "softmax_cross_entropy_with_integer_labels", cross_entropy(X, LABELS), np.arange(ROWS) == 2
    below, above = ({"logits": X, "labels": np.where(is_third, label, LABELS)} for label in (-1, CLASSES))
    too_small, too_large = (f"label {label} of {CLASSES} classes" for label in (-1, CLASSES))
    bad_losses = np.where(is_third, np.nan, losses)
    behind = np.where(is_third, np.nan, np.max(X, 1) - X[np.arange(ROWS), LABELS])
    unmasked = np.ones(X.shape, bool)
    unmasked[0, LABELS[0]] = False
    remaining = np.where(np.arange(ROWS) == 0, np.inf, losses)
    masked_class, whole = {"logits": X, "labels": LABELS, "where": unmasked}, np.round(X)
    shifted = {"logits": whole + np.float32(1e5), "labels": LABELS}
    return [
        Case(op, too_small, below, {}, bad_losses),
        Case(op, too_large, above, {}, bad_losses),
        Case("log_probs", too_small, below, {}, -bad_losses),
        Case("multiclass_perceptron_loss", too_large, {"scores": X, "labels": above["labels"]}, {}, behind),
        Case(op, "label at a masked class", masked_class, {"logits": ~unmasked}, remaining),
        Case(op, "offset of 1e5", shifted, {}, cross_entropy(whole, LABELS)),
    ]


def soft_label_cases() -> list[Case]:
    first, two_left = np.eye(3, dtype=np.float32)[:1], np.array([[True, True, False]])
    ruled_out = {"logits": np.array([[2.0, -np.inf, 1.0]], np.float32), "labels": first}
    certain = {"log_predictions": np.log(P[:1]), "targets": np.eye(CLASSES, dtype=np.float32)[:1]}
    layers = {
        "features": X,
        "kernel": _cases.KERNEL,
        "target_features": X.copy(),
        "target_kernel": _cases.TARGET_KERNEL,
    }
    smoothed = {"labels": first, "alpha": 0.2, "where": two_left}
    # As many rows as classes, to catch a mask on the wrong axis.
    square, targets = X[:, :ROWS], softmax(Y[:, :ROWS]).astype(np.float32)
    of_rows, p = {"logits": square, "labels": targets, "where": SOME_ROWS}, softmax(square)
    poly = np.where(SOME_ROWS, np.sum(targets * (2 * (1 - p) - np.log(p)), 1), 0)
    at_rows = {"logits": masked_in(square, SOME_ROWS)}
    return [
        Case("softmax_cross_entropy", "logit -inf with label 0", ruled_out, {}, np.log1p(np.exp([-1.0]))),
        Case("poly_loss_cross_entropy", "a mask of as many rows as classes", of_rows, at_rows, poly),
        Case("kl_divergence", "a target of 0", certain, {}, -np.log(P[:1, 0])),
        Case("linear_kl_divergence", "a student and its teacher", layers, {}, mean_divergence(**layers)),
        Case("smooth_labels", "sums to 1", smoothed, {"labels": ~two_left}, np.array([[0.9, 0.1, 0.0]])),
        Case("ranking_softmax_loss", "no list left", SOFT | {"where": NOTHING}, {"logits": ~NOTHING}, np.zeros(())),
    ]


def other_loss_cases() -> list[Case]:
    zeros, sure = np.zeros((1, 3), np.float32), dict.fromkeys("xy", np.eye(2, dtype=np.float32))
    frames, logits = np.array([[False] * 3, [False, True, True]]), np.zeros((2, 3, 4), np.float32)
    ctc = {"logits": logits, "logit_paddings": frames, "labels": np.array([[2], [1]])}
    ctc["label_paddings"] = np.zeros((2, 1), bool)
    paths = -np.log([6 / 4**3, 1 / 4])  # the share of the alignments that give the label
    experts = {"router_probs": P, "expert_indices": np.where(np.arange(2) == 1, -1, _cases.EXPERTS)}
    shares = np.bincount(_cases.EXPERTS[:, 0], minlength=CLASSES) / ROWS
    balance = np.asarray(CLASSES * np.sum(shares * np.float64(P).mean(0)))
    rows, signs = {"x": X, "y": Y, "where": SOME_ROWS}, 2 * np.eye(3) - 1
    z, at_rows = X[SOME_ROWS].astype(np.float64) @ Y[SOME_ROWS].T, masked_in(X, SOME_ROWS)
    info_nce = np.mean([cross_entropy(logits, np.arange(3)) for logits in (z, z.T)])
    sigmoid = np.asarray(np.logaddexp(0, -signs * (z - 1)).sum() / 3)
    hidden, padded = {"x": at_rows, "y": at_rows}, "padded rows are no negatives"
    return [
        Case("cosine_similarity", "a vector of zeros", {"predictions": zeros, "targets": zeros + 1}, {}, np.zeros(1)),
        Case("ctc_loss", "garbage in padded frames", ctc, {"logits": masked_in(logits, ~frames)}, paths),
        Case("load_balancing_loss", "dropped assignments", experts, {}, balance),
        Case("info_nce_loss", padded, rows, hidden, np.asarray(info_nce)),
        Case("sigmoid_contrastive_loss", padded, rows | {"bias": np.float32(-1)}, hidden, sigmoid),
        Case(
            "info_nce_loss", "sure pairs: logits 30, 0", sure | {"scale": np.float32(30)}, {}, np.log1p(np.exp(-30.0))
        ),
    ]


def attention_cases() -> list[Case]:
    inputs = {name: floats(1, 3, 1, 4) for name in ("query", "key", "value")}
    one_masked_query = np.ones((1, 1, 3, 3), bool)
    one_masked_query[0, 0, 1] = False
    padded = np.broadcast_to(np.arange(3) < 2, (1, 1, 3, 3))
    last, every = (masked_in(inputs["key"], np.arange(3)[None] < number) for number in (2, 0))
    calls = {
        "garbage in a masked key": (padded, {"key": last}),
        "garbage in a masked value": (padded, {"value": last}),
        "a query with every key masked": (one_masked_query, {}),
        "a context that is all padding": (np.zeros((1, 1, 3, 3), bool), {"key": every, "value": every}),
    }
    return [
        Case("dot_product_attention", what, inputs | {"mask": mask}, hidden, attended(**inputs, mask=mask))
        for what, (mask, hidden) in calls.items()
    ]


def row_cases() -> list[Case]:
    """Norms, reductions and softmaxes of rows, with nothing left among others."""
    x, zero, what = np.float32(1e4) + floats(2, 64), np.zeros((1, 3), np.float32), "mean 1e4, deviation 1"
    inputs, hidden = {"x": X, "where": NOTHING}, {"x": ~NOTHING}
    empty = {
        "layer_norm rms_norm standardize group_norm l2_normalize softmax batch_norm": np.zeros(X.shape),
        "sum mean var": np.zeros(ROWS),
        "logsumexp logmeanexp max": np.full(ROWS, -np.inf),
        "min": np.full(ROWS, np.inf),
    }
    return [
        Case("layer_norm", what, {"x": x}, {}, standardized(x, 1, 1e-6)),
        Case("standardize", what, {"x": x}, {}, standardized(x, 1, 1e-6)),
        Case("batch_norm", what, {"x": x}, {}, standardized(x, 0, 1e-5)),
        Case("l2_normalize", "a vector of zeros", {"x": zero}, {}, np.zeros((1, 3))),
        *(Case(op, "nothing left", inputs, hidden, y) for ops, y in empty.items() for op in ops.split()),
    ]


def segment_cases() -> list[Case]:
    """Rows of padding with the id -1, and no row of the segment 1."""
    x, ids = np.array([1, 2, 4, 0], np.float32), np.array([0, 2, 2, -1])
    expected = {
        "segment_sum": np.array([1, 0, 6]),
        "segment_mean": np.array([1, 0, 3]),
        "segment_var": np.array([0, 0, 1]),
        "segment_max": np.array([1, -np.inf, 4]),
        "segment_softmax": np.array([1, *softmax(x[1:3]), 0]),
    }
    inputs, hidden = {"data": x, "segment_ids": ids}, {"data": ids == -1}
    ones = {"data": np.ones(4096, np.float16), "segment_ids": np.zeros(4096, int)}
    return [
        *(Case(op, "garbage in padding of id -1", inputs, hidden, y) for op, y in expected.items()),
        Case("segment_sum", "4096 ones in float16", ones, {}, np.array([4096, 0, 0])),
    ]


# What `python -m masksafe` has for attention and CTC is in cases of their own, with expected results.
GARBAGE = [
    Case(case.op, "garbage under the mask", case.inputs, case.masked, None)
    for case in _cases.CASES
    if case.op not in ("ctc_loss", "dot_product_attention")
]
FAMILIES = integer_label_cases, soft_label_cases, other_loss_cases, attention_cases, row_cases, segment_cases
CASES = [*GARBAGE, *(case for cases in FAMILIES for case in cases())]
