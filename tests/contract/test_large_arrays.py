"""The rules in arrays of 4,096 elements and more, with the choices of the platform.

XLA's CPU compiler hands such arrays to a library, whose kernels are others than those of the small arrays of the table:
its maxima lose a NaN. The arrays here are those of the table among more rows and columns: the rows of the table come
again, if each has a result of its own, and what else is added is masked and holds garbage. So the results are those of
the table.
"""

import functools

import jax
import numpy as np
from program import (
    assert_is_nothing,
    assert_same_bits,
    cotangents_of,
    each_op,
    filled,
    function_of_floats,
    run,
)
from table import OPS
from tiers import optimised_jit

from masksafe._core import platforms

ELEMENTS, COLUMNS = 4096, 32
# So many queries that attention is computed by kernels of the library; with more keys the mask would be too large.
QUERIES, KEYS = 512, 16
LONGER = {"dot_product_attention": QUERIES, "merge_attention": 256}  # which have no more rows: samples, or parts
LOGITS_ARE_PAIRS = {"info_nce_loss", "sigmoid_contrastive_loss", "ntxent"}
LINEAR = dict.fromkeys(("fewest_tokens", "most_tokens", "fewest_tokens_if_masked", "most_tokens_if_masked"), 1024)


def is_possible(op):
    """Not if the options of a variant are arrays, or sizes of blocks, for the arrays of the table."""
    return op is OPS[op.name] or not op.name.startswith(("linear_", "dot_product_attention"))


def is_tried(op):
    """Where there is no library, one of each kind is enough to see that the sizes of arrays make no difference."""
    return is_possible(op) and bool(op.stands_for or platforms.Choices().has_fusion_library)


def times_of(op):
    """How often there are as many rows as in the table."""
    if op.name in LONGER:
        return 1
    elements = max(a.size for a, kind in zip(op.args, op.kinds, strict=True) if kind == "row")
    elements *= columns_of(op) // op.where.shape[1] if has_columns(op) else 1
    return 12 if op.name in LOGITS_ARE_PAIRS else -(-ELEMENTS // elements)


def columns_of(op):
    return LONGER.get(op.name, COLUMNS)


def has_columns(op):
    return op.where.ndim > 1 and op.name != "group_norm"  # whose groups would be others


def shape_of(op, kind, a, length=KEYS):
    """That of an argument among more rows and columns; of attention the axes of queries and keys are longer."""
    if op.name == "dot_product_attention":
        return (len(a), QUERIES, KEYS) if kind == "mask" else (len(a), length, *a.shape[2:])
    if kind == "along" and has_columns(op):
        return (columns_of(op),)
    if kind in ("along", "whole"):
        return a.shape
    columns = (columns_of(op), *a.shape[2:]) if kind in ("row", "mask") and has_columns(op) else a.shape[1:]
    return (times_of(op) * len(a), *columns)


def enlarged(op, a, shape, garbage):
    """The array again and again, or once, and garbage around it."""
    repeats = times_of(op) if op.has_rows and shape[0] == times_of(op) * len(a) else 1
    a = np.tile(a, (repeats, *[1] * (a.ndim - 1)))
    return np.pad(a, [(0, n - m) for n, m in zip(shape, a.shape, strict=True)], constant_values=garbage)


def arguments(key, garbage):
    """The mask and the arrays, with garbage under it."""
    op, of_kind = OPS[key], {"f": np.float32(garbage), "i": np.int32(-100)}
    args = []
    for i, (a, kind) in enumerate(zip(filled(key, op.where, lambda a: of_kind[a.dtype.kind]), op.kinds, strict=True)):
        shape = shape_of(op, kind, a, KEYS if i else QUERIES)
        args.append(a if shape == a.shape else enlarged(op, a, shape, of_kind[a.dtype.kind]))
    return enlarged(op, op.where, shape_of(op, "mask", op.where), False), tuple(args)


@functools.cache
def program_of(key):
    """Jitted: the value alone, where it is computed in another way, the value, and the gradients."""
    op = OPS[key]
    has_blocks = op.name.startswith("linear_") or op.name in LOGITS_ARE_PAIRS - {"ntxent"}
    options = {"block_size": None} if has_blocks else {}

    def results(where, args, cotangents):
        of_floats, floats = function_of_floats(op, where, args, **options)
        outputs, pull_back = jax.vjp(of_floats, *floats)
        alone = of_floats(*floats) if op.name == "dot_product_attention" else outputs
        return alone, outputs, pull_back(cotangents)

    return optimised_jit(results)


@functools.cache
def large_cotangents(key):
    op = OPS[key]
    where, args = arguments(key, 0)
    outputs = jax.eval_shape(lambda *args: jax.tree.leaves(op.call(*args)), where, *args)
    return tuple(
        c if out.shape == c.shape else enlarged(op, c, out.shape, 0)
        for c, out in zip(cotangents_of(key), outputs, strict=True)
    )


def run_large(key, where, args):
    with platforms.chosen(linear=LINEAR):
        return jax.device_get(program_of(key)(where, args, large_cotangents(key)))


def assert_are_those_of_the_table(large, small, nothing=0.0, repeats=1):
    """A result whose rows come again, and around each time there is nothing."""
    inside = tuple(slice(n) for n in small.shape)
    for part in np.split(large, repeats) if repeats > 1 else [large]:
        np.testing.assert_allclose(part[inside], small, rtol=2e-5, atol=2e-5)
        around = np.ones(part.shape, bool)
        around[inside] = False
        assert_is_nothing(part[around], nothing)


@each_op(is_tried)
def test_results_are_those_of_the_table_whatever_is_masked(key):
    op, small, large = OPS[key], run(key), run_large(key, *arguments(key, 0))
    repeats = times_of(op) if op.has_rows else 1
    for outputs in large[:2]:
        for out, expected, nothing in zip(outputs, small.outputs, op.nothing, strict=True):
            assert_are_those_of_the_table(out, expected, nothing, repeats)
    for i, gradient, expected in zip(op.floats, large[2], small.gradients, strict=True):
        if op.kinds[i] in ("along", "whole"):  # the sum over all rows
            assert_are_those_of_the_table(gradient, repeats * expected)
        else:
            assert_are_those_of_the_table(gradient, expected, 0.0, repeats)
    for garbage in (np.nan, np.inf, -np.inf):
        assert_same_bits(run_large(key, *arguments(key, garbage)), large)


@each_op(is_tried)
def test_a_nan_shows_in_its_row_and_in_no_other(key):
    assert_a_nan_shows(key, *arguments(key, np.nan))


@each_op(lambda op: op.may_be_unmasked and is_tried(op))
def test_a_nan_shows_without_a_mask(key):
    assert_a_nan_shows(key, None, arguments(key, 0)[1])


def assert_a_nan_shows(key, where, args, assert_same=assert_same_bits):
    op, clean = OPS[key], run_large(key, where, args)
    of_rows = [k for k, i in enumerate(op.floats) if op.kinds[i] in ("row", "of row")]
    for k in of_rows:
        i = op.floats[k]
        row, *others = np.argwhere(~op.hides(op.where)[i])[-1]
        bad = np.array(args[i])
        bad[row, *others] = np.nan
        dirty = run_large(key, where, (*args[:i], bad, *args[i + 1 :]))
        for outputs, unharmed in zip(dirty[:2], clean[:2], strict=True):
            assert any(np.isnan(out[row] if op.has_rows else out).any() for out in outputs)
            if op.has_rows:
                assert_same(*([np.delete(out, row, 0) for out in r] for r in (outputs, unharmed)))
        if op.has_rows:
            assert_same(*([np.delete(r[2][k], row, 0) for k in of_rows] for r in (dirty, clean)))
