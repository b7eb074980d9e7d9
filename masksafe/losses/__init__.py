"""Losses of optax, under optax's names and signatures, whose masked elements are gone."""

from masksafe.losses._cross_entropy import safe_softmax_cross_entropy as safe_softmax_cross_entropy
from masksafe.losses._cross_entropy import softmax_cross_entropy as softmax_cross_entropy
from masksafe.losses._cross_entropy import (
    softmax_cross_entropy_with_integer_labels as softmax_cross_entropy_with_integer_labels,
)
from masksafe.losses._ctc import ctc_loss as ctc_loss
from masksafe.losses._ctc import ctc_loss_with_forward_probs as ctc_loss_with_forward_probs
from masksafe.losses._divergence import convex_kl_divergence as convex_kl_divergence
from masksafe.losses._divergence import generalized_kl_divergence as generalized_kl_divergence
from masksafe.losses._divergence import kl_divergence as kl_divergence
from masksafe.losses._divergence import kl_divergence_with_log_targets as kl_divergence_with_log_targets
from masksafe.losses._fenchel_young import make_fenchel_young_loss as make_fenchel_young_loss
from masksafe.losses._linear_cross_entropy import linear_softmax_cross_entropy as linear_softmax_cross_entropy
from masksafe.losses._margin import hinge_loss as hinge_loss
from masksafe.losses._margin import multiclass_hinge_loss as multiclass_hinge_loss
from masksafe.losses._margin import multiclass_perceptron_loss as multiclass_perceptron_loss
from masksafe.losses._margin import multiclass_sparsemax_loss as multiclass_sparsemax_loss
from masksafe.losses._margin import perceptron_loss as perceptron_loss
from masksafe.losses._margin import sparsemax_loss as sparsemax_loss
from masksafe.losses._poly_loss import poly_loss_cross_entropy as poly_loss_cross_entropy
from masksafe.losses._ranking import ranking_softmax_loss as ranking_softmax_loss
from masksafe.losses._regression import cosine_distance as cosine_distance
from masksafe.losses._regression import cosine_similarity as cosine_similarity
from masksafe.losses._regression import huber_loss as huber_loss
from masksafe.losses._regression import l2_loss as l2_loss
from masksafe.losses._regression import log_cosh as log_cosh
from masksafe.losses._regression import squared_error as squared_error
from masksafe.losses._segmentation import binary_dice_loss as binary_dice_loss
from masksafe.losses._segmentation import dice_loss as dice_loss
from masksafe.losses._segmentation import multiclass_generalized_dice_loss as multiclass_generalized_dice_loss
from masksafe.losses._self_supervised import ntxent as ntxent
from masksafe.losses._self_supervised import triplet_margin_loss as triplet_margin_loss
from masksafe.losses._sigmoid import sigmoid_binary_cross_entropy as sigmoid_binary_cross_entropy
from masksafe.losses._sigmoid import sigmoid_focal_loss as sigmoid_focal_loss
from masksafe.losses._smoothing import smooth_labels as smooth_labels
