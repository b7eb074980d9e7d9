"""The cases of `python -m masksafe`: a call of each op, and which elements of its inputs are masked."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import masksafe

Array = np.ndarray
Inputs = dict[str, Any]
Ops = dict[str, Callable[..., Any]]  # by name, each a function of the inputs of its cases

SEGMENTS = 3


def along_rows(reduction: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, where: reduction(x, axis=-1, where=where)


def _named(names: str) -> Ops:
    return {name: getattr(masksafe, name) for name in names.split()}


OPS: Ops = {
    **{name: getattr(masksafe.losses, name) for name in dir(masksafe.losses) if not name.startswith("_")},
    **_named("softmax log_softmax dot_product_attention layer_norm rms_norm standardize l2_normalize"),
    "ragged_dot": lambda where, **inputs: masksafe.ragged_dot(**inputs),  # its sizes are the mask
    "batch_norm": lambda x, where=None: masksafe.batch_norm(x, where=where)[0],
    "group_norm": functools.partial(masksafe.group_norm, num_groups=1),
    **{name: along_rows(op) for name, op in _named("logsumexp logmeanexp sum mean var max min").items()},
    **{
        name: functools.partial(getattr(masksafe, name), num_segments=SEGMENTS)
        for name in dir(masksafe)
        if name.startswith("segment_")
    },
}


class Case(NamedTuple):
    """A call of an op."""

    op: str
    inputs: Inputs
    masked: dict[str, Array]  # for each input that has masked elements, True there
    empty: Inputs  # inputs with which everything is masked
    empty_output: float  # what every output is then


ROWS, CLASSES = 4, 5
RNG = np.random.default_rng(0)


def floats(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


def softmax(x: Array) -> Array:
    e = np.exp(np.float64(x) - np.max(x, -1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def masked_in(x: Array, where: Array) -> Array:
    """True where `x` is masked by a `where` of its first axes."""
    return ~np.broadcast_to(np.expand_dims(where, tuple(range(where.ndim, x.ndim))), x.shape)


X, Y, P = floats(ROWS, CLASSES), floats(ROWS, CLASSES), softmax(floats(ROWS, CLASSES)).astype(np.float32)
LABELS, BITS = np.array([1, 4, 0, 2]), (RNG.random((ROWS, CLASSES)) < 0.5).astype(np.float32)
EXPERTS = np.array([[0, 3], [1, 2], [4, 0], [3, 1]])  # of each token
SOME_ROWS, ELEMENTS = np.array([True, False, True, True]), RNG.random((ROWS, CLASSES)) < 0.6
ELEMENTS[np.arange(ROWS), LABELS] = True
ELEMENTS[1] = False
KERNEL, TARGET_KERNEL = floats(CLASSES, 7), floats(CLASSES, 7)


def _cases(
    ops: str, masked: Inputs, where: Array = ELEMENTS, *, empty_output: float = 0.0, empty: str = "where", **others: Any
) -> list[Case]:
    """A case for each op; by default some elements of each row are masked, and all of one row."""
    masks = {name: masked_in(x, where) for name, x in masked.items()}
    inputs = {**masked, **others, "where": where}
    return [Case(op, inputs, masks, {empty: np.zeros_like(inputs[empty])}, empty_output) for op in ops.split()]


def _all_cases() -> list[Case]:
    pair, log_p, q = {"predictions": X, "targets": Y}, np.log(P), P[::-1].copy()
    top_k = {"target_log_probs": log_p[:, :2], "target_classes": np.array([[1, 4], [0, 3], [6, 2], [5, 1]])}
    pixels = np.broadcast_to(np.array([True, True, False])[:, None], (2, 3, 1))
    truth = np.eye(4, dtype=np.float32)[RNG.integers(4, size=(2, 3))]
    images = {"predictions": floats(2, 3, 4), "targets": truth}
    multiclass = "multiclass_hinge_loss multiclass_perceptron_loss multiclass_sparsemax_loss"
    linear = "linear_softmax_cross_entropy linear_log_probs"
    segments = {"data": X, "segment_ids": np.array([0, 2, 2, 0])}
    layers: Inputs = {"kernel": KERNEL, "target_kernel": TARGET_KERNEL}
    experts: Inputs = {"rhs": floats(3, CLASSES, 2), "group_sizes": np.array([2, 0, 1])}
    attention = {name: floats(1, 3, 1, 4) for name in ("query", "key", "value")}
    keys, frames = np.array([[True, True, False]]), np.array([[False] * 3, [False, True, True]])
    masks = {name: masked_in(attention[name], keys) for name in ("key", "value")}
    attention["mask"] = np.broadcast_to(keys, (1, 1, 3, 3))
    ctc = {"logits": floats(2, 3, 4), "logit_paddings": frames, "labels": np.array([[2], [1]])}
    ctc["label_paddings"] = np.zeros((2, 1), bool)
    padding = {name: np.ones_like(x) for name, x in ctc.items() if name.endswith("paddings")}
    return [
        *_cases("squared_error l2_loss huber_loss log_cosh cosine_similarity cosine_distance", pair),
        *_cases("hinge_loss perceptron_loss", {"predictor_outputs": X, "targets": 2 * BITS - 1}),
        *_cases("sigmoid_binary_cross_entropy sigmoid_focal_loss sparsemax_loss", {"logits": X}, labels=BITS),
        *_cases("softmax_cross_entropy poly_loss_cross_entropy ranking_softmax_loss", {"logits": X, "labels": P}),
        *_cases("softmax_cross_entropy_with_integer_labels log_probs", {"logits": X, "labels": LABELS}, SOME_ROWS),
        *_cases(linear, {"features": X, "labels": LABELS}, SOME_ROWS, kernel=KERNEL),
        *_cases("linear_kl_divergence", {"features": X, "target_features": X}, SOME_ROWS, **layers),
        *_cases("linear_kl_divergence_with_top_k_targets", {"features": X, **top_k}, SOME_ROWS, kernel=KERNEL),
        *_cases("kl_divergence generalized_kl_divergence", {"log_predictions": log_p, "targets": q}),
        *_cases("kl_divergence_with_log_targets", {"log_predictions": log_p, "log_targets": np.log(q)}),
        *_cases(multiclass, {"scores": X, "labels": LABELS}, SOME_ROWS),
        *_cases("dice_loss multiclass_generalized_dice_loss", images, pixels),
        *_cases("binary_dice_loss", {"predictions": X}, targets=BITS),
        *_cases("smooth_labels", {"labels": P}, alpha=0.1),
        *_cases("triplet_margin_loss", {"anchors": X, "positives": Y, "negatives": P}),
        *_cases("ntxent", {"embeddings": X}, SOME_ROWS, labels=np.array([0, 1, 0, 1])),
        *_cases("softmax layer_norm rms_norm standardize batch_norm group_norm l2_normalize sum mean var", {"x": X}),
        *_cases("logsumexp logmeanexp log_softmax max", {"x": X}, empty_output=-np.inf),
        *_cases("min", {"x": X}, empty_output=np.inf),
        *_cases("segment_sum segment_mean segment_var segment_softmax segment_standardize", segments, SOME_ROWS),
        *_cases("segment_logsumexp segment_log_softmax segment_max", segments, SOME_ROWS, empty_output=-np.inf),
        *_cases("segment_min", segments, SOME_ROWS, empty_output=np.inf),
        *_cases("load_balancing_loss", {"router_probs": P, "expert_indices": EXPERTS}, SOME_ROWS),
        *_cases("ragged_dot", {"lhs": X}, np.arange(ROWS) < 3, empty="group_sizes", **experts),
        *_cases("router_z_loss", {"router_logits": X}, SOME_ROWS),
        *_cases("info_nce_loss sigmoid_contrastive_loss", {"x": X, "y": Y}, SOME_ROWS, scale=0.5),
        Case("ctc_loss", ctc, {"logits": masked_in(ctc["logits"], ~frames)}, padding, 0.0),
        Case("dot_product_attention", attention, masks, {"mask": np.zeros((1, 1, 3, 3), bool)}, 0.0),
    ]


CASES = _all_cases()
