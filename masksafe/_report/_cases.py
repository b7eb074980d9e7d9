"""The cases: inputs of each op with garbage under the mask, or at the edge of what it accepts, and the right result.

An op has the name of masksafe's function. Right results are computed by NumPy in float64.
"""

from typing import Any

import numpy as np

from masksafe._report._case import Case, Inputs


def all_cases() -> list[Case]:
    return [
        *_garbage_cases(),
        *_integer_label_cases(),
        *_soft_label_cases(),
        *_other_loss_cases(),
        *_contrastive_cases(),
        *_attention_cases(),
        *_normalization_cases(),
        *_segment_cases(),
        *_empty_cases(),
    ]


_RNG = np.random.default_rng(0)
_ROWS, _CLASSES = 4, 5


def _floats(*shape: int) -> np.ndarray:
    return _RNG.normal(size=shape).astype(np.float32)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(np.float64(x) - np.max(x, -1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _cross_entropy(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The losses of integer labels."""
    x = np.float64(logits)
    others = x - np.take_along_axis(x, labels[:, None], -1)
    return np.asarray(np.log1p(np.exp(others).sum(-1) - 1))


_X, _Y, _P = _floats(_ROWS, _CLASSES), _floats(_ROWS, _CLASSES), _softmax(_floats(_ROWS, _CLASSES)).astype(np.float32)
_LABELS = np.array([1, 4, 0, 2])
_ELEMENTS = _RNG.random((_ROWS, _CLASSES)) < 0.6
_ELEMENTS[np.arange(_ROWS), _LABELS] = True
_SOME_ROWS = np.array([True, False, True, True])
_ELEMENTS[1] = False
_BITS = (_RNG.random((_ROWS, _CLASSES)) < 0.5).astype(np.float32)
_EXPERTS = np.array([[0, 3], [1, 2], [4, 0], [3, 1]])  # of each token


# Garbage under the mask, for every op.


def _garbage_cases() -> list[Case]:
    def cases(ops: str, masked: Inputs, where: np.ndarray = _ELEMENTS, **others: Any) -> list[Case]:
        """A case for each op, with garbage in the masked inputs."""
        at_rank = {name: np.expand_dims(where, tuple(range(where.ndim, x.ndim))) for name, x in masked.items()}
        hidden = {name: ~np.broadcast_to(at_rank[name], x.shape) for name, x in masked.items()}
        inputs = {**masked, **others, "where": where}
        return [Case(op, "garbage under the mask", inputs, hidden, None) for op in ops.split()]

    soft, pair = {"logits": _X, "labels": _P}, {"predictions": _X, "targets": _Y}
    log_p, q = np.log(_P), _P[::-1].copy()
    kernel = _floats(_CLASSES, 7)
    kernels = {name: x for name, x in _distillation().items() if name in ("kernel", "target_kernel")}
    top_k = {"target_log_probs": log_p[:, :2], "target_classes": np.array([[1, 4], [0, 3], [6, 2], [5, 1]])}
    pixels = np.broadcast_to(np.array([True, True, False])[:, None], (2, 3, 1))
    truth = np.eye(4, dtype=np.float32)[_RNG.integers(4, size=(2, 3))]
    images = {"predictions": _floats(2, 3, 4), "targets": truth}
    segments = "segment_sum segment_mean segment_var segment_max segment_min segment_logsumexp segment_softmax"
    segments += " segment_log_softmax segment_standardize"
    multiclass = "multiclass_hinge_loss multiclass_perceptron_loss multiclass_sparsemax_loss"
    return [
        *cases("squared_error l2_loss huber_loss log_cosh", pair),
        *cases("hinge_loss perceptron_loss", {"predictor_outputs": _X, "targets": 2 * _BITS - 1}),
        *cases("sigmoid_binary_cross_entropy sigmoid_focal_loss sparsemax_loss", {"logits": _X}, labels=_BITS),
        *cases("softmax_cross_entropy poly_loss_cross_entropy ranking_softmax_loss", soft),
        *cases("softmax_cross_entropy_with_integer_labels log_probs", {"logits": _X, "labels": _LABELS}, _SOME_ROWS),
        *cases(
            "linear_softmax_cross_entropy linear_log_probs",
            {"features": _X, "labels": _LABELS},
            _SOME_ROWS,
            kernel=kernel,
        ),
        *cases("linear_kl_divergence", {"features": _X, "target_features": _X}, _SOME_ROWS, **kernels),
        *cases("linear_kl_divergence_with_top_k_targets", {"features": _X, **top_k}, _SOME_ROWS, kernel=kernel),
        *cases("kl_divergence generalized_kl_divergence", {"log_predictions": log_p, "targets": q}),
        *cases("kl_divergence_with_log_targets", {"log_predictions": log_p, "log_targets": np.log(q)}),
        *cases("cosine_similarity cosine_distance", pair),
        *cases(multiclass, {"scores": _X, "labels": _LABELS}, _SOME_ROWS),
        *cases("dice_loss multiclass_generalized_dice_loss", images, pixels),
        *cases("binary_dice_loss", {"predictions": _X}, targets=_BITS),
        *cases("smooth_labels", {"labels": _P}, alpha=0.1),
        *cases("triplet_margin_loss", {"anchors": _X, "positives": _Y, "negatives": _P}),
        *cases("ntxent", {"embeddings": _X}, _SOME_ROWS, labels=np.array([0, 1, 0, 1])),
        *cases("logsumexp softmax log_softmax layer_norm rms_norm standardize", {"x": _X}),
        *cases("batch_norm group_norm l2_normalize sum mean var max min", {"x": _X}),
        *cases(segments, {"data": _X, "segment_ids": np.array([0, 2, 2, 0])}, _SOME_ROWS),
        *cases("load_balancing_loss", {"router_probs": _P, "expert_indices": _EXPERTS}, _SOME_ROWS),
        *cases("router_z_loss", {"router_logits": _X}, _SOME_ROWS),
        *cases("info_nce_loss sigmoid_contrastive_loss", {"x": _X, "y": _Y}, _SOME_ROWS, scale=0.5),
    ]


def _distillation() -> Inputs:
    """A student and a teacher."""
    rng = np.random.default_rng(2)
    kernel, difference = rng.normal(size=(2, _CLASSES, 7))
    target_kernel = kernel + difference
    layers = {"features": _X, "kernel": kernel, "target_features": _X.copy(), "target_kernel": target_kernel}
    return {name: x.astype(np.float32) for name, x in layers.items()}


# The edges.


def _edge(op: str, what: str, expected: np.ndarray, hidden: dict[str, np.ndarray] | None = None, **inputs: Any) -> Case:
    return Case(op, what, inputs, hidden or {}, expected)


def _integer_label_cases() -> list[Case]:
    op, losses = "softmax_cross_entropy_with_integer_labels", _cross_entropy(_X, _LABELS)
    behind = np.max(_X, 1) - _X[np.arange(_ROWS), _LABELS]

    def bad_label(label: int) -> tuple[np.ndarray, np.ndarray]:
        """Labels of which one is bad, and what to add to the losses."""
        is_bad = np.arange(_ROWS) == 2
        return np.where(is_bad, label, _LABELS), np.where(is_bad, np.nan, 0)

    classes = np.ones(_X.shape, bool)
    classes[0, _LABELS[0]] = False
    remaining = np.where(np.arange(_ROWS) == 0, np.inf, losses)
    whole = np.round(_X)
    below, above = bad_label(-1), bad_label(_CLASSES)
    too_small, too_large = (f"label {label} of {_CLASSES} classes" for label in (-1, _CLASSES))
    return [
        _edge(op, too_small, losses + below[1], logits=_X, labels=below[0]),
        _edge(op, too_large, losses + above[1], logits=_X, labels=above[0]),
        _edge("multiclass_perceptron_loss", too_large, behind + above[1], scores=_X, labels=above[0]),
        _edge(op, "label at a masked class", remaining, {"logits": ~classes}, logits=_X, labels=_LABELS, where=classes),
        _edge(op, "offset of 1e5", _cross_entropy(whole, _LABELS), logits=whole + np.float32(1e5), labels=_LABELS),
        _edge("log_probs", too_small, below[1] - losses, logits=_X, labels=below[0]),
    ]


def _soft_label_cases() -> list[Case]:
    # As many rows as classes, to catch a mask on the wrong axis.
    logits, labels = _floats(4, 4), _softmax(_floats(4, 4)).astype(np.float32)
    p = _softmax(logits)
    poly = np.where(_SOME_ROWS, np.sum(labels * (2 * (1 - p) - np.log(p)), 1), 0)
    masked_rows = {"logits": ~np.broadcast_to(_SOME_ROWS[:, None], (4, 4))}
    poly_inputs = {"logits": logits, "labels": labels, "where": _SOME_ROWS}
    one, three = np.eye(_CLASSES, dtype=np.float32)[:1], np.eye(3, dtype=np.float32)[:1]
    soft, ruled_out = "softmax_cross_entropy", np.array([[2.0, -np.inf, 1.0]], np.float32)
    two_left, smoothed = np.array([[True, True, False]]), np.array([[0.9, 0.1, 0.0]])
    nothing, all_hidden = np.zeros(_X.shape, bool), {"logits": np.ones(_X.shape, bool)}
    layers = _distillation()
    return [
        _edge(soft, "logit -inf with label 0", np.log1p(np.exp([-1.0])), logits=ruled_out, labels=three),
        _edge("poly_loss_cross_entropy", "a mask of as many rows as classes", poly, masked_rows, **poly_inputs),
        _edge("kl_divergence", "a target of 0", -np.log(_P[:1, 0]), log_predictions=np.log(_P[:1]), targets=one),
        _edge("linear_kl_divergence", "a student and its teacher", _mean_divergence(**layers), **layers),
        _edge("smooth_labels", "sums to 1", smoothed, {"labels": ~two_left}, labels=three, alpha=0.2, where=two_left),
        _edge("ranking_softmax_loss", "no list left", np.zeros(()), all_hidden, logits=_X, labels=_P, where=nothing),
    ]


def _mean_divergence(
    features: np.ndarray, kernel: np.ndarray, target_features: np.ndarray, target_kernel: np.ndarray
) -> np.ndarray:
    layers = ((target_features, target_kernel), (features, kernel))
    p, q = (_softmax(f.astype(np.float64) @ k.astype(np.float64)) for f, k in layers)
    return np.asarray(np.sum(p * np.log(p / q), -1).mean())


def _other_loss_cases() -> list[Case]:
    zeros, ones = np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)
    frames = np.array([[False] * 3, [False, True, True]])
    ctc = {"logit_paddings": frames, "labels": np.array([[2], [1]]), "label_paddings": np.zeros((2, 1), bool)}
    logits = np.zeros((2, 3, 4), np.float32)
    dropped = np.where(np.arange(2) == 1, -1, _EXPERTS)
    shares = np.bincount(dropped[:, 0], minlength=_CLASSES) / _ROWS
    balance = np.asarray(_CLASSES * np.sum(shares * np.float64(_P).mean(0)))
    paths = -np.log([6 / 4**3, 1 / 4])  # the share of the alignments that give the label
    padded = {"logits": np.broadcast_to(frames[..., None], logits.shape)}
    return [
        _edge("cosine_similarity", "a vector of zeros", np.zeros(1), predictions=zeros, targets=ones),
        _edge("ctc_loss", "garbage in padded frames", paths, padded, logits=logits, **ctc),
        _edge("load_balancing_loss", "dropped assignments", balance, router_probs=_P, expert_indices=dropped),
    ]


def _contrastive_cases() -> list[Case]:
    x, y = (side[_SOME_ROWS].astype(np.float64) for side in (_X, _Y))
    z = x @ y.T
    of_negatives = np.logaddexp(0, z - 1).sum() - np.logaddexp(0, np.diag(z) - 1).sum()
    expected = {
        "info_nce_loss": (_cross_entropy(z, np.arange(3)) + _cross_entropy(z.T, np.arange(3))).mean() / 2,
        "sigmoid_contrastive_loss": (of_negatives + np.logaddexp(0, 1 - np.diag(z)).sum()) / 3,
    }
    padding = ~np.broadcast_to(_SOME_ROWS[:, None], _X.shape)
    hidden, inputs = {"x": padding, "y": padding}, {"x": _X, "y": _Y, "where": _SOME_ROWS}
    biases = {"info_nce_loss": {}, "sigmoid_contrastive_loss": {"bias": np.float32(-1)}}
    pair, scale = np.eye(2, dtype=np.float32), np.float32(30)
    return [
        *(
            _edge(op, "padded rows are no negatives", np.asarray(loss), hidden, **inputs, **biases[op])
            for op, loss in expected.items()
        ),
        _edge("info_nce_loss", "sure pairs: logits 30, 0", np.log1p(np.exp(-30.0)), x=pair, y=pair, scale=scale),
    ]


def _attention_cases() -> list[Case]:
    query, key, value = (_floats(1, 3, 1, 4) for _ in range(3))

    def expected(mask: np.ndarray) -> np.ndarray:
        scores = np.where(mask[0, 0], np.float64(query[0, :, 0] @ key[0, :, 0].T) / 2, -np.inf)
        with np.errstate(invalid="ignore"):
            p = np.nan_to_num(_softmax(scores))
        return np.asarray((p @ value[0, :, 0])[None, :, None])

    def case(what: str, mask: np.ndarray, **hidden: np.ndarray) -> Case:
        inputs = {"query": query, "key": key, "value": value, "mask": mask}
        return Case("dot_product_attention", what, inputs, hidden, expected(mask))

    padded = np.broadcast_to(np.array([True, True, False]), (1, 1, 3, 3))
    one_masked_query = np.ones((1, 1, 3, 3), bool)
    one_masked_query[0, 0, 1] = False
    last = np.broadcast_to(np.array([False, False, True])[None, :, None, None], (1, 3, 1, 4))
    everything = np.ones((1, 3, 1, 4), bool)
    return [
        case("garbage in a masked key", padded, key=last),
        case("garbage in a masked value", padded, value=last),
        case("a query with every key masked", one_masked_query),
        case("a context that is all padding", np.zeros((1, 1, 3, 3), bool), key=everything, value=everything),
    ]


def _normalization_cases() -> list[Case]:
    x = np.float32(1e4) + _floats(2, 64)
    zero = np.zeros((1, 3), np.float32)
    of_rows, of_columns = _standardized(x, 1, 1e-6), _standardized(x, 0, 1e-5)
    return [
        *(_edge(op, "mean 1e4, deviation 1", of_rows, x=x) for op in ("layer_norm", "standardize")),
        _edge("batch_norm", "mean 1e4, deviation 1", of_columns, x=x),
        _edge("l2_normalize", "a vector of zeros", np.zeros((1, 3)), x=zero),
    ]


def _standardized(x: np.ndarray, axis: int, epsilon: float) -> np.ndarray:
    wide = np.float64(x)
    return np.asarray((wide - wide.mean(axis, keepdims=True)) / np.sqrt(wide.var(axis, keepdims=True) + epsilon))


def _segment_cases() -> list[Case]:
    """Rows of padding with the id -1, and no row of the segment 1."""
    x, ids = np.array([1, 2, 4, 0], np.float32), np.array([0, 2, 2, -1])
    of_2 = _softmax(x[1:3])
    expected = {
        "segment_sum": np.array([1, 0, 6]),
        "segment_mean": np.array([1, 0, 3]),
        "segment_var": np.array([0, 0, 1]),
        "segment_max": np.array([1, -np.inf, 4]),
        "segment_softmax": np.array([1, *of_2, 0]),
    }
    what, hidden = "garbage in padding of id -1", {"data": ids == -1}
    ones, zeros = np.ones(4096, np.float16), np.zeros(4096, int)
    return [
        *(_edge(op, what, y, hidden, data=x, segment_ids=ids) for op, y in expected.items()),
        _edge("segment_sum", "4096 ones in float16", np.array([4096, 0, 0]), data=ones, segment_ids=zeros),
    ]


def _empty_cases() -> list[Case]:
    inputs, hidden = {"x": _X, "where": np.zeros(_X.shape, bool)}, {"x": np.ones(_X.shape, bool)}

    def cases(ops: str, expected: np.ndarray, what: str = "nothing left in a row") -> list[Case]:
        return [Case(op, what, inputs, hidden, expected) for op in ops.split()]

    return [
        *cases("layer_norm rms_norm standardize group_norm l2_normalize softmax", np.zeros(_X.shape)),
        *cases("batch_norm", np.zeros(_X.shape), "a feature with nothing left"),
        *cases("sum mean var", np.zeros(_ROWS)),
        *cases("logsumexp max", np.full(_ROWS, -np.inf)),
        *cases("min", np.full(_ROWS, np.inf)),
    ]
