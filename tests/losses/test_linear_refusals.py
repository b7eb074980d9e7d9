"""Bad arguments of the losses of a linear layer: one table of what each of them refuses, and how."""

import jax.numpy as jnp
import numpy as np
import pytest
from linear_cases import CLASSES, FEATURES, KERNEL, LABELS, OPS, TOKENS, WIDTH

from masksafe import losses

CROSS_ENTROPY, LOG_PROBS, DIVERGENCE, TOP_K = ((name,) for name in OPS)
OF_LABELS, OF_TARGETS, REDUCED = CROSS_ENTROPY + LOG_PROBS, DIVERGENCE + TOP_K, CROSS_ENTROPY + DIVERGENCE + TOP_K
TEMPERED, TARGET_KERNEL = LOG_PROBS + OF_TARGETS, OPS[DIVERGENCE[0]].arguments["target_kernel"]
REFUSALS = [
    (OPS, "features", jnp.zeros(()), ValueError, "features: got shape"),
    (OPS, "features", jnp.zeros((TOKENS, WIDTH), int), TypeError, "features: got dtype int32"),
    (OPS, "kernel", KERNEL.T, ValueError, "kernel: got shape"),
    (OF_LABELS + TOP_K, "kernel", np.zeros((WIDTH, 0)), ValueError, "at least one class"),
    (OPS, "bias", np.ones(3), ValueError, r"bias: got shape \(3,\)"),
    (OPS, "block_size", 0, ValueError, "block_size: got value 0"),
    (OF_LABELS, "axis_name", "classes", ValueError, "axis_name: got value 'classes'"),
    (REDUCED, "reduction", "median", ValueError, "reduction: got value 'median'"),
    (OF_LABELS, "labels", LABELS[:3], ValueError, r"labels: got shape \(3,\)"),
    (OF_LABELS, "logit_soft_cap", 0.0, ValueError, "logit_soft_cap: got value 0"),
    (OF_LABELS, "logit_soft_cap", np.inf, ValueError, "logit_soft_cap: got value inf"),
    (CROSS_ENTROPY, "label_smoothing", 1.5, ValueError, "label_smoothing: got value 1.5"),
    (CROSS_ENTROPY, "z_loss", "0.1", TypeError, "z_loss: got type str"),
    (CROSS_ENTROPY, "z_loss", -1.0, ValueError, "z_loss: got value -1"),
    (CROSS_ENTROPY, "weights", np.ones(3), ValueError, r"weights: got shape \(3,\)"),
    (CROSS_ENTROPY, "weights", np.ones((2, TOKENS)), ValueError, r"weights: got shape \(2, 40\)"),
    (CROSS_ENTROPY, "weights", np.ones(TOKENS, complex), TypeError, "weights: got dtype complex64"),
    (CROSS_ENTROPY, "weights", "1", TypeError, "weights: got type str"),
    (CROSS_ENTROPY, "class_weights", np.ones(3), ValueError, r"class_weights: got shape \(3,\)"),
    (CROSS_ENTROPY, "class_weights", np.ones(CLASSES, int), TypeError, "class_weights: got dtype int32"),
    (CROSS_ENTROPY, "class_weights", 1.0, ValueError, r"class_weights: got shape \(\)"),
    (TEMPERED, "temperature", 0, ValueError, "temperature: got value 0"),
    (TEMPERED, "temperature", -1.0, ValueError, "temperature: got value -1"),
    (TEMPERED, "temperature", np.nan, ValueError, "temperature: got value nan"),
    (TEMPERED, "temperature", np.inf, ValueError, "temperature: got value inf"),
    (TEMPERED, "temperature", "1", TypeError, "temperature: got type str"),
    (TEMPERED, "temperature", None, TypeError, "temperature: got type NoneType"),
    (OF_TARGETS, "direction", "backward", ValueError, "direction: got value 'backward'"),
    (OF_TARGETS, "beta", 0.0, ValueError, "beta: got value 0.0.*direction="),
    (OF_TARGETS, "beta", 1, ValueError, "beta: got value 1"),
    (OPS, "class_mask", np.ones((TOKENS, CLASSES), bool), ValueError, r"class_mask: got shape \(40, 24\)"),
    (OPS, "class_mask", np.ones(CLASSES), TypeError, "class_mask: got dtype"),
    (DIVERGENCE, "target_kernel", TARGET_KERNEL.T, ValueError, r"pass target_kernel\.T"),
    (DIVERGENCE, "target_kernel", TARGET_KERNEL[:, :3], ValueError, "target_kernel: got shape .* 24 classes"),
    (DIVERGENCE, "target_features", FEATURES[:3, :4], ValueError, "target_features: got shape"),
    (DIVERGENCE, "target_bias", np.ones(3), ValueError, r"target_bias: got shape \(3,\)"),
    (DIVERGENCE, "target_gradients", 1, TypeError, "target_gradients: got value 1"),
    (TOP_K, "target_log_probs", np.zeros((TOKENS, 2), int), TypeError, "target_log_probs: got dtype"),
    (TOP_K, "target_log_probs", np.zeros((3, 2)), ValueError, "target_log_probs: got shape"),
    (TOP_K, "target_log_probs", np.zeros((TOKENS, 0)), ValueError, "at least one class"),
    (TOP_K, "target_classes", np.zeros((TOKENS, 2)), TypeError, "target_classes: got dtype"),
    (TOP_K, "target_classes", np.zeros((TOKENS, 1), int), ValueError, "target_classes: got shape"),
    (TOP_K, "rest", "keep", ValueError, "rest: got value 'keep'"),
]


@pytest.mark.parametrize("op", OPS)
def test_bad_arguments_are_refused(op):
    for ops, argument, value, error, text in REFUSALS:
        if op in ops:
            with pytest.raises(error, match=f"^{op}: (.*){text}"):
                getattr(losses, op)(**OPS[op].arguments | {argument: value})
