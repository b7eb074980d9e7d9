"""The losses of optax under the same names and signatures, with masks that remove elements exactly; and a few more."""

from typing import TYPE_CHECKING

from masksafe.losses._contrastive import info_nce_loss, sigmoid_contrastive_loss
from masksafe.losses._cross_entropy import (
    safe_softmax_cross_entropy,
    softmax_cross_entropy,
    softmax_cross_entropy_with_integer_labels,
)
from masksafe.losses._ctc import ctc_loss, ctc_loss_with_forward_probs
from masksafe.losses._divergence import (
    convex_kl_divergence,
    generalized_kl_divergence,
    kl_divergence,
    kl_divergence_with_log_targets,
)
from masksafe.losses._fenchel_young import make_fenchel_young_loss
from masksafe.losses._linear_cross_entropy import linear_softmax_cross_entropy
from masksafe.losses._linear_kl_divergence import linear_kl_divergence, linear_kl_divergence_with_top_k_targets
from masksafe.losses._linear_log_probs import linear_log_probs
from masksafe.losses._log_probs import log_probs
from masksafe.losses._margin import (
    hinge_loss,
    multiclass_hinge_loss,
    multiclass_perceptron_loss,
    multiclass_sparsemax_loss,
    perceptron_loss,
    sparsemax_loss,
)
from masksafe.losses._poly_loss import poly_loss_cross_entropy
from masksafe.losses._ranking import ranking_softmax_loss
from masksafe.losses._regression import cosine_distance, cosine_similarity, huber_loss, l2_loss, log_cosh, squared_error
from masksafe.losses._routers import RouterStatistics, load_balancing_loss, router_z_loss
from masksafe.losses._segmentation import binary_dice_loss, dice_loss, multiclass_generalized_dice_loss
from masksafe.losses._self_supervised import ntxent, triplet_margin_loss
from masksafe.losses._sigmoid import sigmoid_binary_cross_entropy, sigmoid_focal_loss
from masksafe.losses._smoothing import smooth_labels

__all__ = [
    "RouterStatistics",
    "binary_dice_loss",
    "convex_kl_divergence",
    "cosine_distance",
    "cosine_similarity",
    "ctc_loss",
    "ctc_loss_with_forward_probs",
    "dice_loss",
    "generalized_kl_divergence",
    "hinge_loss",
    "huber_loss",
    "info_nce_loss",
    "kl_divergence",
    "kl_divergence_with_log_targets",
    "l2_loss",
    "linear_kl_divergence",
    "linear_kl_divergence_with_top_k_targets",
    "linear_log_probs",
    "linear_softmax_cross_entropy",
    "load_balancing_loss",
    "log_cosh",
    "log_probs",
    "make_fenchel_young_loss",
    "multiclass_generalized_dice_loss",
    "multiclass_hinge_loss",
    "multiclass_perceptron_loss",
    "multiclass_sparsemax_loss",
    "ntxent",
    "perceptron_loss",
    "poly_loss_cross_entropy",
    "ranking_softmax_loss",
    "router_z_loss",
    "safe_softmax_cross_entropy",
    "sigmoid_binary_cross_entropy",
    "sigmoid_contrastive_loss",
    "sigmoid_focal_loss",
    "smooth_labels",
    "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels",
    "sparsemax_loss",
    "squared_error",
    "triplet_margin_loss",
]

# Names of other libraries.
_OURS = {
    "binary_cross_entropy": "sigmoid_binary_cross_entropy",
    "cross_entropy": "softmax_cross_entropy_with_integer_labels, or softmax_cross_entropy of probabilities as labels",
    "kl_div": "kl_divergence",
    "linear_cross_entropy": "linear_softmax_cross_entropy",
    "mean_squared_error": "squared_error",
    "mse_loss": "squared_error",
    "nll_loss": "softmax_cross_entropy_with_integer_labels of the logits",
    "sparse_softmax_cross_entropy": "softmax_cross_entropy_with_integer_labels",
}

if not TYPE_CHECKING:  # a type checker would take any name

    def __getattr__(name: str) -> object:
        hint = f": write masksafe.losses.{_OURS[name]}" if name in _OURS else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return __all__
