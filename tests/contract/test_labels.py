"""Rule 6. Labels never wrap: a bad one gives NaN in its own row, and an error while labels are checked."""

import jax
import numpy as np
import pytest
from program import assert_same_bits, each_kind, each_op, function_of_floats, run
from table import OPS
from tiers import parametrize

import masksafe
from masksafe.testing import nonfinite_report


def with_label(key, label):
    """The arguments with another label in the first row, the first of several."""
    op = OPS[key]
    labels = np.array(op.args[-1])
    labels.reshape(len(labels), -1)[0, 0] = label
    return (*op.args[:-1], labels)


def first_of_row(results):
    """The output of the first row, of the first of several labels."""
    return np.ravel(results.outputs[0][0])[0]


@each_op(lambda op: op.classes)
def test_a_bad_label_is_nan_in_its_own_row(key):
    assert_a_bad_label_is_nan(key, (-1, -100, OPS[key].classes, 2**31 - 1, -(2**31)))


def assert_a_bad_label_is_nan(key, labels, assert_same=assert_same_bits, **options):
    op, clean = OPS[key], run(key, **options)
    for label in labels:
        dirty = run(key, args=with_label(key, label), **options)
        assert np.isnan(first_of_row(dirty) if op.has_rows else dirty.outputs[0])
        if op.has_rows:
            assert np.isnan(dirty.gradients[0][0]).any()
            assert_same(*([*(out[1:] for out in r.outputs), r.gradients[0][1:]] for r in (dirty, clean)))


@each_op(lambda op: op.classes and op.where.ndim > 1)
def test_a_label_at_a_masked_class_has_no_finite_loss(key):
    op = OPS[key]
    where = np.array(op.where)
    where[0] = True
    where[0, np.ravel(op.args[-1][0])[0]] = False
    assert np.isinf(first_of_row(run(key, where)))


@each_op(lambda op: op.classes)
def test_checks_report_what_is_bad_and_not_what_is_masked(key):
    op = OPS[key]
    hidden = op.hides(op.where)[-1]
    masked = np.where(hidden, -100, op.args[-1])
    call = op.call if op.by_default else jax.jit(op.call)  # whose error has more in front of the text
    text = rf"{op.name}: 1 of {np.sum(~hidden)} labels are outside \[0, {op.classes}\); first at "
    with masksafe.label_checks("raise"):
        jax.block_until_ready(call(op.where, *op.args[:-1], masked))
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=text):
            jax.block_until_ready(call(op.where, *with_label(key, op.classes)))


@each_kind(lambda op: op.classes)
@parametrize("grad", [False], exhaustive=[True], ids=["value", "gradient"])
def test_a_report_calls_a_bad_label_one(key, grad):
    op = OPS[key]
    fn, floats = function_of_floats(op, op.where, with_label(key, op.classes))
    report = nonfinite_report(fn, *floats, grad=grad)
    # An op may write it once for the value and once for the gradient.
    ((primitive, note),) = {(source.primitive, source.note) for source in report.sources}
    assert primitive == "select_n"
    assert note.startswith(f"{op.name} writes it on purpose, for a label out of range or at a masked class")
    assert 'masksafe.label_checks("raise")' in str(report)
