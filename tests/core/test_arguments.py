"""Argument checks: one style of error text, which names op, argument, what was found and what was expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import parametrize

import masksafe

LOGITS, LABELS = np.zeros((2, 3), np.float32), np.zeros(2, np.int32)
INTEGER = masksafe.losses.softmax_cross_entropy_with_integer_labels
SOFT = masksafe.losses.softmax_cross_entropy

REFUSED = [
    (lambda: INTEGER(jnp.zeros((2, 3), int), LABELS), TypeError, "logits: got dtype int32; expected a float dtype"),
    (lambda: INTEGER(LOGITS, None), TypeError, "labels: got type NoneType; expected an array"),
    (
        lambda: INTEGER(LOGITS, jnp.zeros((2, 3), int)),
        ValueError, r"labels: got shape \(2, 3\); expected rank 1, .* For soft labels .* use softmax_cross_entropy\.",
    ),
    (lambda: INTEGER(LOGITS, jnp.zeros(5, int)), ValueError, r"logits and labels: got shapes \(2, 3\) and \(5,\)"),
    (lambda: INTEGER(LOGITS, LABELS, LABELS == 0), TypeError, "axis: got an array; .* by name: where=mask"),
    (lambda: SOFT(LOGITS, LABELS), ValueError, r"logits and labels: got shapes .* For integer labels use softmax_"),
    (lambda: SOFT(LOGITS, LABELS[:, None]), ValueError, r"labels: got shape \(2, 1\); expected one-hot rows"),
    (lambda: SOFT(LOGITS, LOGITS.astype("float8_e4m3fn")), TypeError, "labels: got dtype float8_e4m3fn"),
    (
        lambda: masksafe.softmax(LOGITS, where=LABELS == 0),
        ValueError, r"where: got shape \(2,\); expected .* with the leading axes write where\[\.\.\., None\]\.",
    ),
    (lambda: INTEGER(LOGITS, LABELS, axis=1.0), TypeError, "axis: got type float; expected an int or a tuple of ints"),
    (lambda: INTEGER(LOGITS, LABELS, axis=None), TypeError, "axis: got type NoneType; expected an int or a tuple"),
    (
        lambda: INTEGER(LOGITS, LABELS[0], axis=(1, -1)),
        ValueError, r"axis: got value \(1, -1\); expected distinct axes",
    ),
    (lambda: INTEGER(LOGITS, LABELS, where=jnp.ones(2)), TypeError, "where: got dtype float32; expected bool. Write"),
    (lambda: SOFT(LOGITS, jnp.zeros((2, 4))), ValueError, r"logits and labels: got shapes \(2, 3\) and \(2, 4\)"),
    (lambda: SOFT(jnp.zeros((2, 1)), jnp.zeros((2, 4))), ValueError, r"logits: got shape \(2, 1\); expected as many"),
    (lambda: masksafe.mask_where(jnp.ones(2), 0.0, 1.0), TypeError, "mask: got dtype float32; expected bool"),
    (lambda: masksafe.mask_where(jnp.ones(2, bool), jnp.ones(3), 1.0), ValueError, r"mask and x and y: got shapes"),
    (lambda: masksafe.apply_where(LABELS > 0, LABELS, jnp.log), TypeError, "f2 or fill_value: got neither"),
    (lambda: SOFT(LOGITS, LOGITS.astype(complex)), TypeError, "labels: got dtype complex64; expected a real dtype"),
    (lambda: INTEGER(LOGITS, [2**40, 0]), TypeError, "labels: got type list; expected an array"),
    (
        lambda: masksafe.apply_where(LABELS > 0, LABELS, jnp.exp, 0.0),
        TypeError, r"f2: got type float; expected a function. A constant is written fill_value=0.0",
    ),
    (
        lambda: masksafe.apply_where(LABELS > 0, LABELS, jnp.exp, fill_value=jnp.ones(5)),
        ValueError, r"fill_value: got shape \(5,\); expected a shape that broadcasts to \(2,\)",
    ),
    (lambda: masksafe.var_mean([1.0, None]), TypeError, "x: got type list; expected an array"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_bad_argument_is_refused_by_name(call, error, text):
    with pytest.raises(error, match=r"^(softmax|mask_where|apply_where|sum|mean|var)[a-z_]*: " + text):
        call()


HEADS, IMAGES, KERNEL = np.zeros((1, 4, 1, 4)), np.zeros((1, 2, 2, 3)), np.zeros((3, 5))
losses = masksafe.losses

# The op, its arrays, and the arguments for which a program is made.
ENTROPY = {"temperature": 1.0, "with_entropy": True}
OF_LINEAR = {"with_predictions": True, "block_size": 2}
STATIC = {
    "softmax": (masksafe.softmax, [LOGITS], {"axis": 1}),
    "logsumexp": (masksafe.logsumexp, [LOGITS], {"keepdims": True, "return_sign": True}),
    "var": (masksafe.var, [LOGITS], {"axis": 1, "keepdims": True, "correction": 1}),
    "sum": (masksafe.sum, [LOGITS], {"keepdims": False}),
    "layer_norm": (masksafe.layer_norm, [LOGITS], {"epsilon": 1e-5}),
    "group_norm": (masksafe.group_norm, [LOGITS], {"num_groups": 1}),
    "zigzag": (masksafe.zigzag, [HEADS], {"shards": 1}),
    "log_probs": (losses.log_probs, [LOGITS, LABELS], ENTROPY),
    "linear_log_probs": (
        losses.linear_log_probs, [LOGITS, KERNEL, LABELS], {"logit_soft_cap": 2.0, **ENTROPY, **OF_LINEAR}
    ),
    "linear_softmax_cross_entropy": (
        losses.linear_softmax_cross_entropy,
        [LOGITS, KERNEL, LABELS], {"label_smoothing": 0.1, "z_loss": 0.1, "with_components": True, **OF_LINEAR},
    ),
    "linear_kl_divergence": (
        losses.linear_kl_divergence,
        [LOGITS, KERNEL] * 2, {"temperature": 1.0, "beta": 0.5, "target_gradients": True, "block_size": 2},
    ),
    "dice_loss": (losses.dice_loss, [IMAGES, IMAGES], {"apply_softmax": True, "ignore_background": True}),
    "binary_dice_loss": (losses.binary_dice_loss, [IMAGES, IMAGES], {"apply_sigmoid": True}),
    "ctc_loss": (
        losses.ctc_loss,
        [np.zeros((1, 4, 3)), np.zeros((1, 4)), np.ones((1, 2), int), np.zeros((1, 2))], {"blank_id": 0},
    ),
}  # fmt: skip


@parametrize("name", ["softmax"], exhaustive=STATIC)
def test_a_traced_value_for_what_a_program_is_made_for(name):
    op, arrays, static = STATIC[name]
    for argument, value in static.items():
        text = (
            rf"^{name}: {argument}: got a traced array; expected .* known while tracing. Name its parameter in static_"
        )
        with pytest.raises(TypeError, match=text):
            jax.make_jaxpr(lambda value, argument=argument: op(*arrays, **{argument: value}))(value)
