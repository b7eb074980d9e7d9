"""Argument checks: one style of error text, which names op, argument, what was found and what was expected."""

import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe import _errors

LOGITS = jnp.zeros((2, 3))
LABELS = jnp.zeros(2, jnp.int32)
INTEGER = masksafe.losses.softmax_cross_entropy_with_integer_labels
SOFT = masksafe.losses.softmax_cross_entropy
SAFE = masksafe.losses.safe_softmax_cross_entropy

REFUSED = [
    (lambda: INTEGER(jnp.zeros((2, 3), int), LABELS), TypeError, "logits has dtype int32; expected a float dtype"),
    (lambda: INTEGER(LOGITS, jnp.zeros(2)), TypeError, "labels has dtype float32; expected an integer dtype. Soft"),
    (lambda: INTEGER(LOGITS, jnp.zeros(2, bool)), TypeError, "labels has dtype bool; expected an integer dtype"),
    (lambda: INTEGER(LOGITS, None), TypeError, "labels has type NoneType; expected an array"),
    (lambda: INTEGER(LOGITS, jnp.zeros((2, 3), int)), ValueError, r"labels has shape \(2, 3\); expected rank 1"),
    (lambda: INTEGER(LOGITS, jnp.zeros(5, int)), ValueError, r"logits and labels has shapes \(2,\) and \(5,\)"),
    (lambda: INTEGER(LOGITS, LABELS, axis=2), ValueError, r"axis has value 2; expected a value in \[-2, 2\)"),
    (lambda: INTEGER(LOGITS, LABELS, axis=1.0), TypeError, "axis has type float; expected an int or a tuple of ints"),
    (lambda: INTEGER(LOGITS, LABELS, axis=None), TypeError, "axis has type NoneType; expected an int or a tuple"),
    (lambda: INTEGER(LOGITS, LABELS[0], axis=(1, -1)), ValueError, r"axis has value \(1, -1\); expected axes that"),
    (lambda: INTEGER(LOGITS, LABELS, where=jnp.ones(2)), TypeError, "where has dtype float32; expected bool. Write"),
    (lambda: INTEGER(LOGITS, LABELS, where=jnp.ones(3, bool)), ValueError, r"where has shape \(3,\); expected a shape"),
    (lambda: INTEGER(LOGITS, LABELS, where=jnp.ones((2, 2), bool)), ValueError, r"where has shape \(2, 2\)"),
    (lambda: INTEGER(LOGITS, LABELS, where=jnp.ones((1, 2, 3), bool)), ValueError, r"where has shape \(1, 2, 3\)"),
    (lambda: SOFT(LOGITS, jnp.zeros((2, 4))), ValueError, r"logits and labels has shapes \(2, 3\) and \(2, 4\)"),
    (lambda: SOFT(jnp.zeros((2, 1)), jnp.zeros((2, 4))), ValueError, r"logits has shape \(2, 1\); expected as many"),
    (lambda: SOFT(jnp.zeros((2, 4), complex), jnp.zeros((2, 4))), TypeError, "logits has dtype complex64"),
    (lambda: SAFE(LOGITS, "cat"), TypeError, "labels has type str; expected an array"),
    (lambda: masksafe.mask_where(jnp.ones(2), 0.0, 1.0), TypeError, "mask has dtype float32; expected bool"),
    (lambda: masksafe.mask_where(jnp.ones(2, bool), jnp.ones(3), 1.0), ValueError, r"mask and x and y has shapes"),
    (lambda: masksafe.apply_where(LABELS > 0, LABELS, jnp.log), TypeError, "f2 or fill_value has neither given"),
    (lambda: SOFT(LOGITS, LOGITS.astype(complex)), TypeError, "labels has dtype complex64; expected a real dtype"),
    (lambda: INTEGER(LOGITS, [2**40, 0]), TypeError, "labels has type list; expected an array"),
    (
        lambda: masksafe.apply_where(LABELS > 0, LABELS, jnp.exp, fill_value=jnp.ones(5)),
        ValueError,
        r"fill_value has shape \(5,\); expected a shape that broadcasts to \(2,\)",
    ),
    (lambda: masksafe.apply_where(LABELS, LABELS, jnp.log, jnp.log), TypeError, "cond has dtype int32; expected bool"),
    (lambda: masksafe.sum(LOGITS, where=jnp.ones((2, 1, 1), bool)), ValueError, r"where has shape \(2, 1, 1\)"),
    (lambda: masksafe.mean(LOGITS, axis=3), ValueError, r"axis has value 3; expected a value in \[-2, 2\)"),
    (lambda: masksafe.var(LOGITS, where=LOGITS), TypeError, "where has dtype float32; expected bool"),
    (lambda: masksafe.var_mean([1.0, None]), TypeError, "x has type list; expected an array"),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_bad_argument_is_refused_by_name(call, error, text):
    with pytest.raises(error, match=r"^(softmax|safe|mask_where|apply_where|sum|mean|var)[a-z_]*: " + text):
        call()


def test_numpy_label_beyond_32_bits_stays_out_of_range():
    labels = np.array([2**32, -(2**32), 5], np.int64)
    assert _errors.as_label_array("op", "labels", labels).tolist() == [2**31 - 1, -(2**31), 5]
