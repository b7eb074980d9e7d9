"""What losses refuse, and what they report while label checks are on; those of linear layers have their own table.

The contract's table has what all ops refuse: masks that are not boolean or do not broadcast, labels of floats, and axes
out of range.
"""

import functools
import re

import jax
import numpy as np
import pytest
from jax.experimental import checkify

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
    "ctc_loss": {
        "logits": FRAMES,
        "logit_paddings": 0 * FRAMES[..., 0],
        "labels": TEXTS,
        "label_paddings": np.zeros((2, 2)),
    },
}
MULTICLASS = [name for name in RIGHT if name.startswith("multiclass_") and "dice" not in name]
UNIT, POSITIVE = "; expected a number in [0, 1]", "; expected a number above 0 and finite"
LOWER_RANK = "got shape (2,); expected rank 2, to mask elements of the input (2, 3). To align it with the leading axes"
LOWER_RANK += " write where[..., None]."
ELEMENTWISE = "squared_error", "l2_loss", "huber_loss", "hinge_loss", "sigmoid_focal_loss"
REFUSED = [
    ("info_nce_loss", "x", LABELS[:, None], TypeError, "got dtype int"),
    ("info_nce_loss", "y", LABELS[:, None], TypeError, "got dtype int"),
    ("info_nce_loss", "x", X[0], ValueError, "got shape (3,); expected [N, D]"),
    ("info_nce_loss", "y", X[:1], ValueError, "got shape (1, 3); expected (2, 3)"),
    ("info_nce_loss", "scale", X[0], ValueError, "got shape (3,)"),
    ("info_nce_loss", "scale", None, TypeError, "got type NoneType"),
    ("info_nce_loss", "ids", X[:, 0], TypeError, "got dtype float32"),
    ("info_nce_loss", "ids", LABELS[:1], ValueError, "got shape (1,)"),
    ("info_nce_loss", "symmetric", X > 0, TypeError, "got an array"),
    ("info_nce_loss", "reduction", "avg", ValueError, "got value 'avg'"),
    ("info_nce_loss", "axis_name", "q", ValueError, "got value 'q'"),
    ("info_nce_loss", "block_size", 0, ValueError, "got value 0"),
    ("sigmoid_contrastive_loss", "bias", X, ValueError, "got shape (2, 3)"),
    ("sigmoid_contrastive_loss", "bias", None, TypeError, "got type NoneType"),
    ("load_balancing_loss", "router_probs", ones(4, 6, 5, dtype=int), TypeError, "got dtype int"),
    ("load_balancing_loss", "expert_indices", {"router_probs": np.float32(1)}, ValueError, "got shape (4, 6, 2)"),
    ("load_balancing_loss", "expert_indices", ones(4, 6, 2), TypeError, "got dtype float32"),
    *(
        ("load_balancing_loss", "expert_indices", ones(*shape, dtype=int), ValueError, f"got shape {shape}; expected")
        for shape in ((6, 2), (4, 5, 2), (4, 6))
    ),
    ("load_balancing_loss", "where", ones(4, 6, 1, dtype=bool), ValueError, "got shape (4, 6, 1); expected"),
    ("load_balancing_loss", "axis_name", "x", ValueError, "got value 'x'"),
    ("load_balancing_loss", "axis_name", 3, TypeError, "got value 3"),
    ("router_z_loss", "router_logits", ones(4, 6, 5, dtype=int), TypeError, "got dtype int"),
    ("router_z_loss", "where", ones(6, dtype=bool), ValueError, "got shape (6,)"),
    ("softmax_cross_entropy_with_integer_labels", "axis_name", "x", ValueError, "got value 'x'"),
    ("softmax_cross_entropy_with_integer_labels", "label_smoothing", -0.1, ValueError, "got value -0.1"),
    ("softmax_cross_entropy_with_integer_labels", "z_loss", NAN, ValueError, "got value nan"),
    (
        "softmax_cross_entropy_with_integer_labels",
        "class_weights",
        ones(2),
        ValueError,
        "got shape (2,); expected (3,)",
    ),
    ("softmax_cross_entropy_with_integer_labels", "class_weights", ones(3, dtype=int), TypeError, "got dtype int"),
    ("log_probs", "logits", LABELS, TypeError, "got dtype int"),
    ("log_probs", "labels", LABELS[0], ValueError, "got shape ()"),
    ("log_probs", "axis", None, TypeError, "got type NoneType"),
    *(("log_probs", "temperature", t, ValueError, f"got value {float(t)}") for t in (0, -1, NAN, INF)),
    ("log_probs", "temperature", "1", TypeError, "got type str"),
    *((name, "scores", ones(2, 3, dtype=int), TypeError, "got dtype int") for name in MULTICLASS),
    *((name, "scores", ones(2, 0), ValueError, "got shape (2, 0)") for name in MULTICLASS),
    *((name, "scores and labels", {"labels": ones(3, dtype=int)}, ValueError, "got shapes") for name in MULTICLASS),
    *(("sigmoid_focal_loss", "alpha", x, ValueError, f"got value {x}{UNIT}") for x in (-1, 1.5)),
    *(("sigmoid_focal_loss", "gamma", x, ValueError, f"got value {x}; expected a number") for x in (-0.5, NAN)),
    *((name, "where", LABELS > 0, ValueError, LOWER_RANK) for name in ELEMENTWISE),
    ("kl_divergence", "where", ones(2, dtype=bool), ValueError, "got shape (2,)"),
    ("squared_error", "targets", X[:, :1], ValueError, "got shape (2, 1)"),
    ("l2_loss", "targets", X[0], ValueError, "got shape (3,)"),
    ("huber_loss", "predictions", LABELS, TypeError, "got dtype int"),
    *(("huber_loss", "delta", x, ValueError, f"got value {x}{POSITIVE}") for x in (0.0, -1.0, NAN, INF)),
    *(("smooth_labels", "alpha", x, ValueError, f"got value {x}{UNIT}") for x in (-0.1, 1.5, 2, NAN, np.float64(1.1))),
    ("ntxent", "embeddings", X[0], ValueError, "got shape (3,)"),
    ("ntxent", "labels", LABELS[:1], ValueError, "got shape (1,)"),
    ("dice_loss", "targets", PIXELS[:, :3], ValueError, "got shape (2, 3, 3)"),
    ("dice_loss", "reduction", "median", ValueError, "got value 'median'"),
    ("dice_loss", "class_weights", ones(2), ValueError, "got shape (2,)"),
    ("dice_loss", "axis", -1, ValueError, "got value"),
    ("dice_loss", "where", ones(2, 6, dtype=bool), ValueError, "got shape (2, 6)"),
    ("binary_dice_loss", "targets", PIXELS[:, :5, 0], ValueError, "got shape (2, 5)"),
    ("binary_dice_loss", "predictions", ones(2, 6, dtype=int), TypeError, "got dtype int"),
    ("ctc_loss", "logits", ones(2, 4), ValueError, "got shape (2, 4)"),
    ("ctc_loss", "labels", TEXTS[:1], ValueError, "got shape (1, 2)"),
    ("ctc_loss", "logit_paddings", np.zeros((2, 3)), ValueError, "got shape (2, 3)"),
    ("ctc_loss", "label_paddings", np.zeros((2, 3)), ValueError, "got shape (2, 3)"),
    ("ctc_loss", "blank_id", 3, ValueError, "got value 3"),
    ("ctc_loss", "blank_id", 1.0, ValueError, "got value 1.0"),
    ("ctc_loss", "where", ones(2, 4, dtype=bool), ValueError, "got shape (2, 4)"),
]


@pytest.mark.parametrize("name", dict.fromkeys(row[0] for row in REFUSED))
def test_bad_arguments_are_refused(name):
    trace = lambda call: jax.eval_shape(functools.partial(getattr(losses, name), **call))  # noqa: E731
    trace(RIGHT[name])
    for _, argument, value, error, text in (row for row in REFUSED if row[0] == name):
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
SUMS, TWO_OUTSIDE = (
    "1 of 12 rows of predictions do not sum to 1; first at (1, 2): 0.75",
    "2 of 36 predictions are outside [0, 1]",
)
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
    ("multiclass_generalized_dice_loss", {"predictions": OUTSIDE, **NO_SOFTMAX}, TWO_PIXELS, TWO_OUTSIDE),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["raise", "checkify"])
@pytest.mark.parametrize(("name", "wrong", "hidden", "text"), REPORTED)
def test_what_is_wrong_is_reported_unless_it_is_masked(name, wrong, hidden, text, mode):
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
