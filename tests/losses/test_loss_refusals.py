"""What losses refuse, beyond what all ops do (tests/contract), and what they report while label checks are on."""

import functools
import re

import jax
import linear_cases as linear
import numpy as np
import pytest
from jax.experimental import checkify
from tiers import parametrize

import masksafe
from masksafe import losses

NAN, INF = np.nan, np.inf


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


X, LABELS, PIXELS = np.float32([[0.5, 2, 1], [0, 1, -1]]), np.array([0, 2]), ones(2, 6, 3) / 3
FRAMES, TEXTS = ones(2, 4, 3), np.array([[1, 2], [2, 1]])
OF_LABELS = {"labels": LABELS}
# Arguments that are right.
RIGHT = {
    **{name: {"x": X, "y": X} for name in ("info_nce_loss", "sigmoid_contrastive_loss")},
    "load_balancing_loss": {"router_probs": ones(4, 6, 5), "expert_indices": np.zeros((4, 6, 2), int)},
    "router_z_loss": {"router_logits": ones(4, 6, 5)},
    "softmax_cross_entropy_with_integer_labels": {"logits": X, **OF_LABELS},
    "log_probs": {"logits": X, **OF_LABELS},
    **{f"multiclass_{name}_loss": {"scores": X, **OF_LABELS} for name in ("hinge", "perceptron", "sparsemax")},
    **{name: {"predictor_outputs": X, "targets": np.sign(X - 0.7)} for name in ("hinge_loss", "perceptron_loss")},
    "sparsemax_loss": {"logits": X, "labels": np.float32(X > 0.7)},
    **{name: {"logits": X, "labels": X > 0} for name in ("sigmoid_binary_cross_entropy", "sigmoid_focal_loss")},
    "kl_divergence": {"log_predictions": X, "targets": ones(2, 3) / 3},
    **{name: {"predictions": X, "targets": X} for name in ("squared_error", "l2_loss")},
    "huber_loss": {"predictions": X},
    "smooth_labels": {"labels": X, "alpha": 0.1},
    "ntxent": {"embeddings": X, **OF_LABELS},
    **{name: {"predictions": PIXELS, "targets": PIXELS} for name in ("dice_loss", "multiclass_generalized_dice_loss")},
    "binary_dice_loss": {"predictions": PIXELS[..., 0], "targets": PIXELS[..., 0]},
    "ctc_loss": {"logits": FRAMES, "labels": TEXTS, "logit_paddings": ones(2, 4) * 0, "label_paddings": ones(2, 2) * 0},
}
MULTICLASS = [name for name in RIGHT if name.startswith("multiclass_") and "dice" not in name]
INTEGER, CONTRASTIVE = "softmax_cross_entropy_with_integer_labels", ("info_nce_loss", "sigmoid_contrastive_loss")
ELEMENTWISE = "squared_error", "l2_loss", "huber_loss", "hinge_loss", "sigmoid_focal_loss"
LINEAR = CROSS_ENTROPY, LOG_PROBS, DIVERGENCE, TOP_K = tuple(linear.OPS)
LABELLED, TARGETED = (CROSS_ENTROPY, LOG_PROBS), (DIVERGENCE, TOP_K)
REDUCED, TEMPERED = (CROSS_ENTROPY, *TARGETED), ("log_probs", LOG_PROBS, *TARGETED)
WEIGHTED, ROUTER = (CROSS_ENTROPY, INTEGER), "load_balancing_loss"
UNIT, POSITIVE = "; expected a number in [0, 1]", "; expected a number above 0 and finite"
LOWER_RANK = "got shape (2,); expected rank 2, to mask elements of the input (2, 3). To align it with the leading axes"
LOWER_RANK += " write where[..., None]."
NO_CLASS = "with the D = 8 of features (40, 8), and at least one class"
# One name or several, an argument, a wrong value of it, or more wrong arguments, and what is said.
REFUSED = [
    (CONTRASTIVE, "x", LABELS[:, None], TypeError, "got dtype int"),
    (CONTRASTIVE, "y", LABELS[:, None], TypeError, "got dtype int"),
    (CONTRASTIVE, "x", X[0], ValueError, "got shape (3,); expected [N, D]"),
    (CONTRASTIVE, "y", X[:1], ValueError, "got shape (1, 3); expected (2, 3)"),
    (CONTRASTIVE, "scale", X[0], ValueError, "got shape (3,)"),
    (CONTRASTIVE, "scale", None, TypeError, "got type NoneType"),
    (CONTRASTIVE, "ids", X[:, 0], TypeError, "got dtype float32"),
    (CONTRASTIVE, "ids", LABELS[:1], ValueError, "got shape (1,)"),
    ("info_nce_loss", "symmetric", X > 0, TypeError, "got an array"),
    ("sigmoid_contrastive_loss", "bias", X, ValueError, "got shape (2, 3)"),
    ("sigmoid_contrastive_loss", "bias", None, TypeError, "got type NoneType"),
    ((*CONTRASTIVE, "dice_loss", *REDUCED), "reduction", "median", ValueError, "got value 'median'"),
    ((*CONTRASTIVE, *LINEAR), "block_size", 0, ValueError, "got value 0"),
    ((*CONTRASTIVE, ROUTER, INTEGER, *LABELLED), "axis_name", "x", ValueError, "got value 'x'"),
    (ROUTER, "axis_name", 3, TypeError, "got value 3"),
    (ROUTER, "router_probs", ones(4, 6, 5, dtype=int), TypeError, "got dtype int"),
    (ROUTER, "expert_indices", {"router_probs": np.float32(1)}, ValueError, "got shape (4, 6, 2)"),
    (ROUTER, "expert_indices", ones(4, 6, 2), TypeError, "got dtype float32"),
    *((ROUTER, "expert_indices", np.ones(s, int), ValueError, f"got shape {s}") for s in ((6, 2), (4, 5, 2), (4, 6))),
    (ROUTER, "where", ones(4, 6, 1, dtype=bool), ValueError, "got shape (4, 6, 1); expected"),
    ("router_z_loss", "router_logits", ones(4, 6, 5, dtype=int), TypeError, "got dtype int"),
    ("router_z_loss", "where", ones(6, dtype=bool), ValueError, "got shape (6,)"),
    (WEIGHTED, "label_smoothing", -0.1, ValueError, "got value -0.1"),
    (WEIGHTED, "label_smoothing", 1.5, ValueError, "got value 1.5"),
    (WEIGHTED, "z_loss", "0.1", TypeError, "got type str"),
    *((WEIGHTED, "z_loss", x, ValueError, f"got value {x}") for x in (-1.0, NAN)),
    (INTEGER, "class_weights", ones(2), ValueError, "got shape (2,); expected (3,)"),
    (INTEGER, "class_weights", ones(3, dtype=int), TypeError, "got dtype int"),
    ("log_probs", "logits", LABELS, TypeError, "got dtype int"),
    ("log_probs", "labels", LABELS[0], ValueError, "got shape ()"),
    ("log_probs", "axis", None, TypeError, "got type NoneType"),
    *((TEMPERED, "temperature", t, ValueError, f"got value {float(t)}; expected") for t in (0, -1, NAN, INF)),
    (TEMPERED, "temperature", "1", TypeError, "got type str"),
    (TEMPERED, "temperature", None, TypeError, "got type NoneType"),
    (MULTICLASS, "scores", ones(2, 3, dtype=int), TypeError, "got dtype int"),
    (MULTICLASS, "scores", ones(2, 0), ValueError, "got shape (2, 0)"),
    (MULTICLASS, "scores and labels", {"labels": ones(3, dtype=int)}, ValueError, "got shapes"),
    *(("sigmoid_focal_loss", "alpha", x, ValueError, f"got value {x}{UNIT}") for x in (-1, 1.5)),
    *(("sigmoid_focal_loss", "gamma", x, ValueError, f"got value {x}; expected a number") for x in (-0.5, NAN)),
    (ELEMENTWISE, "where", LABELS > 0, ValueError, LOWER_RANK),
    ("kl_divergence", "where", ones(2, dtype=bool), ValueError, "got shape (2,)"),
    ("squared_error", "targets", X[:, :1], ValueError, "got shape (2, 1)"),
    ("l2_loss", "targets", X[0], ValueError, "got shape (3,)"),
    ("huber_loss", "predictions", LABELS, TypeError, "got dtype int"),
    *(("huber_loss", "delta", x, ValueError, f"got value {x}{POSITIVE}") for x in (0.0, -1.0, NAN, INF)),
    *(("smooth_labels", "alpha", x, ValueError, f"got value {x}{UNIT}") for x in (-0.1, 1.5, 2, NAN, np.float64(1.1))),
    ("ntxent", "embeddings", X[0], ValueError, "got shape (3,)"),
    ("ntxent", "labels", LABELS[:1], ValueError, "got shape (1,)"),
    ("dice_loss", "targets", PIXELS[:, :3], ValueError, "got shape (2, 3, 3)"),
    ("dice_loss", "class_weights", ones(2), ValueError, "got shape (2,)"),
    ("dice_loss", "axis", -1, ValueError, "got value"),
    ("dice_loss", "where", ones(2, 6, dtype=bool), ValueError, "got shape (2, 6)"),
    ("binary_dice_loss", "targets", PIXELS[:, :5, 0], ValueError, "got shape (2, 5)"),
    ("binary_dice_loss", "predictions", ones(2, 6, dtype=int), TypeError, "got dtype int"),
    ("ctc_loss", "logits", ones(2, 4), ValueError, "got shape (2, 4)"),
    ("ctc_loss", "labels", TEXTS[:1], ValueError, "got shape (1, 2)"),
    ("ctc_loss", "logit_paddings", np.zeros((2, 3)), ValueError, "got shape (2, 3)"),
    ("ctc_loss", "label_paddings", np.zeros((2, 3)), ValueError, "got shape (2, 3)"),
    *(("ctc_loss", "blank_id", x, ValueError, f"got value {x}") for x in (3, 1.0)),
    ("ctc_loss", "where", ones(2, 4, dtype=bool), ValueError, "got shape (2, 4)"),
    (LINEAR, "features", ones(), ValueError, "got shape ()"),
    (LINEAR, "features", ones(40, 8, dtype=int), TypeError, "got dtype int"),
    (LINEAR, "kernel", linear.KERNEL.T, ValueError, "got shape (24, 8)"),
    ((*LABELLED, TOP_K), "kernel", ones(8, 0), ValueError, f"got shape (8, 0); expected [D, V] {NO_CLASS}"),
    (LINEAR, "bias", ones(3), ValueError, "got shape (3,)"),
    (LINEAR, "class_mask", ones(40, 24, dtype=bool), ValueError, "got shape (40, 24)"),
    (LINEAR, "class_mask", ones(24), TypeError, "got dtype"),
    (LABELLED, "labels", linear.LABELS[:3], ValueError, "got shape (3,)"),
    *((LABELLED, "logit_soft_cap", x, ValueError, f"got value {x}") for x in (0.0, INF)),
    (CROSS_ENTROPY, "weights", ones(3), ValueError, "got shape (3,)"),
    (CROSS_ENTROPY, "weights", ones(2, 40), ValueError, "got shape (2, 40)"),
    (CROSS_ENTROPY, "weights", ones(40, dtype=complex), TypeError, "got dtype complex64"),
    (CROSS_ENTROPY, "weights", "1", TypeError, "got type str"),
    (CROSS_ENTROPY, "class_weights", ones(3), ValueError, "got shape (3,)"),
    (CROSS_ENTROPY, "class_weights", ones(24, dtype=int), TypeError, "got dtype int"),
    (CROSS_ENTROPY, "class_weights", 1.0, ValueError, "got shape ()"),
    (TARGETED, "direction", "backward", ValueError, "got value 'backward'"),
    *((TARGETED, "beta", x, ValueError, f"got value {x}; expected a number between 0 and 1") for x in (0.0, 1.0)),
    (DIVERGENCE, "target_kernel", linear.TARGET_KERNEL.T, ValueError, "got shape (24, 4); expected [D, V]"),
    (DIVERGENCE, "target_kernel", linear.TARGET_KERNEL[:, :3], ValueError, "got shape (4, 3); expected 24 classes"),
    (DIVERGENCE, "target_features", linear.FEATURES[:3, :4], ValueError, "got shape"),
    (DIVERGENCE, "target_bias", ones(3), ValueError, "got shape (3,)"),
    (DIVERGENCE, "target_gradients", 1, TypeError, "got value 1"),
    (TOP_K, "target_log_probs", ones(40, 2, dtype=int), TypeError, "got dtype"),
    *((TOP_K, "target_log_probs", ones(*shape), ValueError, f"got shape {shape}") for shape in ((3, 2), (40, 0))),
    (TOP_K, "target_classes", ones(40, 2), TypeError, "got dtype"),
    (TOP_K, "target_classes", ones(40, 1, dtype=int), ValueError, "got shape"),
    (TOP_K, "rest", "keep", ValueError, "got value 'keep'"),
]
RIGHT |= {name: op.arguments for name, op in linear.OPS.items()}


@pytest.mark.parametrize("name", RIGHT)
def test_bad_arguments_are_refused(name):
    trace = lambda call: jax.eval_shape(functools.partial(getattr(losses, name), **call))  # noqa: E731
    trace(RIGHT[name])
    rows = [row for names, *row in REFUSED if name == names or (name in names and type(names) is not str)]
    for argument, value, error, text in rows:
        with pytest.raises(error, match="^" + re.escape(f"{name}: {argument}: {text}")):
            trace(RIGHT[name] | (value if isinstance(value, dict) else {argument: value}))


def but(x, *places):
    """The array with other values at places, each an index and a value."""
    x = np.array(x, np.float32)
    for index, value in places:
        x[index] = value
    return x


def hiding(shape, *indices):
    mask = np.ones(shape, bool)
    for index in indices:
        mask[index] = False
    return {"where": mask}


PROBABILITIES = but(PIXELS, ((1, 2), [0.5, 0.125, 0.125]))
OUTSIDE = but(PIXELS, ((1, 2), [0.5, 0.125, 0.125]), ((1, 4), [1.5, -0.5, 0]))
BINARY = but(PIXELS[..., 0], ((1, 2), -0.5), ((1, 4), 1.5))
SUMS = "1 of 12 rows of predictions do not sum to 1; first at (1, 2): 0.75"
TWO_PIXELS = hiding((2, 6, 1), (1, 2), (1, 4))
NO_SOFTMAX, FIRST_ROW = {"apply_softmax": False}, {"where": np.array([[True], [False]])}
AT_5, ALPHA = np.where(np.arange(48).reshape(4, 6, 2) == 41, 5, -1), np.float32([[0.5], [-0.1], [NAN]])
PADDED = {"labels": ones(2, 3, dtype=int), "label_paddings": np.array([[1, 1, 0], [1, 1, 1]])}
# A call with something wrong, what hides it, and what is reported.
REPORTED = [
    ("huber_loss", {"delta": but(X, ((0,), 1), ((1,), [1, 0, NAN])), **hiding((2, 3), (1, 2))}, hiding((2, 3), 1),
     "1 of 5 delta are not above 0 and finite; first at (1, 1): 0.0"),
    ("smooth_labels", {"labels": ones(3, 4), "alpha": ALPHA, **hiding((3, 4), (0, 2), (1, 0), (1, 3), 2)},
     hiding((3, 4), 1, 2), "2 of 5 alpha are not in [0, 1]; first at (1, 1): -0.1"),
    *((name, {"targets": np.array([[1, -1, 1], [-1, 0, 1]])}, hiding((2, 3), (1, 1)),
       "1 of 6 labels are neither -1 nor 1; first at (1, 1): 0") for name in ("hinge_loss", "perceptron_loss")),
    ("sparsemax_loss", {"labels": np.array([[1, 0, 1], [0, 2, 1]])}, hiding((2, 3), (1, 1)),
     "1 of 6 labels are neither 0 nor 1; first at (1, 1): 2"),
    *((name, {"labels": np.array([[0, 1, 1], [-100, 1, 0]])}, hiding((2, 3), (1, 0)),
       "1 of 6 labels are outside [0, 1]; first at (1, 0): -100")
      for name in ("sigmoid_binary_cross_entropy", "sigmoid_focal_loss")),
    *(("kl_divergence", {"targets": but(ones(2, 3) / 3, ((1, 0), bad))}, FIRST_ROW,
       f"1 of 6 labels are negative or not finite; first at (1, 0): {bad}") for bad in (-0.5, NAN, INF)),
    ("multiclass_hinge_loss", hiding((2, 3), (1, 2)), hiding((2, 3), 1),
     "1 of 2 labels are at a masked class; first at (1,): 2"),
    ("ctc_loss", {"labels": np.array([[1, 2], [3, 1]])}, hiding((2, 1, 1), 1),
     "1 of 4 labels are outside [0, 3); first at (1, 0): 3"),
    ("ctc_loss", hiding((2, 4, 3), (0, slice(None), 2)), hiding((2, 4, 3), 0),
     "1 of 4 labels are at a masked class"),
    ("ctc_loss", PADDED, {"logit_paddings": ones(2, 4) * [[1], [0]]},
     "1 of 6 label_paddings are 0 on the right of a padded label"),
    ("load_balancing_loss", {"expert_indices": AT_5}, hiding((4, 6), (3, 2)),
     "1 of 48 expert_indices are outside [0, 5), and not -1; first at (3, 2, 1): 5"),
    ("dice_loss", {"predictions": PROBABILITIES, **NO_SOFTMAX}, TWO_PIXELS, SUMS),
    ("binary_dice_loss", {"predictions": BINARY, "apply_sigmoid": False}, {"where": TWO_PIXELS["where"][..., 0]},
     "2 of 12 predictions are outside [0, 1]; first at (1, 2): -0.5"),
    ("multiclass_generalized_dice_loss", {"predictions": OUTSIDE, **NO_SOFTMAX}, TWO_PIXELS,
     "2 of 36 predictions are outside [0, 1]"),
]  # fmt: skip


MODES = "raise", "checkify"


@parametrize(("number", "mode"), [(0, "raise")], exhaustive=[(i, MODES[i % 2]) for i in range(len(REPORTED))])
def test_what_is_wrong_is_reported_unless_it_is_masked(number, mode):
    name, wrong, hidden, text = REPORTED[number]
    call, text = functools.partial(getattr(losses, name), **RIGHT[name] | wrong), f"^{re.escape(f'{name}: {text}')}"
    with masksafe.label_checks(mode):
        if mode == "raise":
            jax.block_until_ready(call(**hidden))
            with pytest.raises(ValueError, match=text):
                call()
        else:
            error, value = jax.jit(checkify.checkify(call))()
            assert re.search(text, error.get())
            assert np.isnan(value).any() or not name.endswith(("dice_loss", "divergence"))
            jax.jit(checkify.checkify(call))(**hidden)[0].throw()
