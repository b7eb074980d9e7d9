"""Rule 10. Bad arguments are refused while a program is traced, by a text that names the op and the argument."""

import functools

import jax
import numpy as np
import pytest
from program import each_op
from table import OPS


def refused(key, kind, text, where=None, args=None, **options):
    op = OPS[key]
    fn = functools.partial(op.call, **options)
    with pytest.raises(kind, match=text):
        jax.eval_shape(fn, op.where if where is None else where, *(args or op.args))


# In the table the masks of these are computed from the mask, or go to a function that has a name of its own.
WITHOUT = {"make_fenchel_young_loss", "MaskedMean", "ctc_loss", "ctc_loss_with_forward_probs"}
WITHOUT |= {"mask_where", "merge_attention", "ragged_dot"}
OTHER_NAMES = {"dot_product_attention": "mask", "apply_where": "cond"}


@each_op(lambda op: op.name not in WITHOUT, by_default=True)
def test_a_mask_that_is_not_boolean_or_does_not_broadcast(key):
    op = OPS[key]
    about = f"^{op.name}: {OTHER_NAMES.get(op.name, 'where')}"
    refused(key, TypeError, f"{about}: got dtype", op.where.astype(np.float32))
    refused(key, ValueError, about, np.ones((*op.where.shape[:-1], 7), bool))


# Losses of labels refuse that there is no class.
@each_op(
    lambda op: op.where.ndim == 2 and op.name not in WITHOUT and not op.name.startswith("multiclass_"), by_default=True
)
def test_a_mask_of_no_elements_that_is_not_boolean(key):
    op = OPS[key]
    args = tuple(a[..., :0] if kind in ("row", "along") else a for a, kind in zip(op.args, op.kinds, strict=True))
    about = f"^{op.name}: {OTHER_NAMES.get(op.name, 'where')}: got dtype"
    refused(key, TypeError, about, op.where[..., :0].astype(np.float32), args)


@each_op(lambda op: op.classes, by_default=True)
def test_labels_that_are_floats(key):
    op = OPS[key]
    refused(key, TypeError, f"^{op.name}: labels: got dtype", args=(*op.args[:-1], op.args[-1].astype(np.float32)))


@each_op(lambda op: op.has_axis, by_default=True)
def test_an_axis_out_of_range(key):
    refused(key, ValueError, f"^{OPS[key].name}: axis: got", axis=2)
