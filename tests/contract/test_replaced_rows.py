"""What labels and targets hold in rows whose loss the user replaces, by `jnp.where` behind the op, is in no gradient.

It is no rule of the contract, which is about masks; but many programs mask in this way, and docstrings promise it.
"""

import jax
import numpy as np
import pytest
from program import assert_is_nothing, assert_same_bits, cotangents_of, each_op, unmasked
from table import OPS

from masksafe import losses

GARBAGE = {"f": (np.nan, np.inf, -np.inf, 1e38), "i": (-100, 2**31 - 1)}


def labels_of(op):
    """The arguments of rows, but for the logits or predictions, which come first."""
    return [i for i, kind in enumerate(op.kinds) if i > 0 and kind in ("row", "of row", "label")]


def is_loss_of_labels(op):
    return hasattr(losses, op.name) and op.has_rows and bool(labels_of(op))


def assert_labels_of_replaced_rows_are_in_no_gradient(key, run):
    op, used = OPS[key], cotangents_of(key)
    gone = np.arange(len(op.where)) % 2 == 1
    in_rows = [op.kinds[i] in ("row", "of row") for i in op.floats]
    cotangents = tuple(np.where(gone.reshape(-1, *[1] * (c.ndim - 1)), 0, c).astype(c.dtype) for c in used)
    clean = run(key, op.args, cotangents)[1]
    for i in labels_of(op):
        some = np.zeros_like(op.args[i], bool)
        some[gone] = True
        one = some & (np.arange(some.size).reshape(some.shape) % max(1, some[0].size) == 0)
        for number, at in ((number, at) for number in GARBAGE[op.args[i].dtype.kind] for at in (some, one)):
            args = (*op.args[:i], np.where(at, number, op.args[i]).astype(op.args[i].dtype), *op.args[i + 1 :])
            gradients = run(key, args, cotangents)[1]
            for gradient, expected, is_of_rows in zip(gradients, clean, in_rows, strict=True):
                assert_is_nothing(abs(gradient[gone]) if is_of_rows else 0.0)
                left = ~gone if is_of_rows else slice(None)
                assert_same_bits(gradient[left], expected[left])
            if number in GARBAGE["i"] or np.isnan(number):  # where it is used, it shows
                outputs, gradients = run(key, args, used)
                assert any(np.isnan(out[gone]).any() for out in outputs)
                assert any(np.isnan(g[gone]).any() for g, of_rows in zip(gradients, in_rows, strict=True) if of_rows)


# A rule of rows, a sum of elements, an element, and a label.
SOME = "softmax_cross_entropy", "kl_divergence", "sigmoid_binary_cross_entropy", "multiclass_hinge_loss"


def test_labels_of_replaced_rows_are_in_no_gradient_of_some_losses():
    program = jax.jit(lambda given: {key: unmasked(key)(*of_key) for key, of_key in given.items()})
    given = {key: (OPS[key].args, cotangents_of(key)) for key in SOME}
    for key in SOME:
        run = lambda key, args, cotangents: program({**given, key: (args, cotangents)})[key]  # noqa: E731
        assert_labels_of_replaced_rows_are_in_no_gradient(key, run)


@pytest.mark.exhaustive
@each_op(is_loss_of_labels)
def test_labels_of_replaced_rows_are_in_no_gradient(key):
    assert_labels_of_replaced_rows_are_in_no_gradient(key, lambda key, *given: jax.device_get(unmasked(key)(*given)))
