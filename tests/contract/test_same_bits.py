"""Rule 7. A program gives the same bits in every run, and what `docs/contract.md` says of the bits of a padded row."""

import functools

import jax
import numpy as np
import pytest
from program import assert_same_bits, each_kind, value_and_gradients
from table import OPS
from tiers import optimised_jit, parametrize

import masksafe
from masksafe import losses
from masksafe._core import platforms

# So often an array of the table comes again, along its first axes: enough work for the threads of XLA's CPU runtime.
ROWS_AGAIN = 2**13
AGAIN = {"dot_product_attention": (1, 128), "info_nce_loss": (128,)}
IN_BLOCKS = {"linear_softmax_cross_entropy", "linear_kl_divergence", "info_nce_loss"}


def arguments(key):
    """Mask, arrays and cotangents of the table, again and again."""
    op, times = OPS[key], AGAIN.get(key, (ROWS_AGAIN,))
    tile = lambda a, times: np.tile(a, (*times, *[1] * (a.ndim - len(times))))  # noqa: E731
    where = tile(op.where, (*times, *times[1:]))  # of attention both queries and keys
    args = tuple(a if kind in ("along", "whole") else tile(a, times) for kind, a in zip(op.kinds, op.args, strict=True))
    return where, args


@each_kind()
def test_two_runs_of_a_program_give_the_same_bits(key):
    op, (where, args) = OPS[key], arguments(key)
    options = {"block_size": None} if key in IN_BLOCKS else {}
    shapes = jax.eval_shape(lambda *given: jax.tree.leaves(op.call(*given, **options)), where, *args)
    cotangents = tuple(np.cos(np.arange(out.size)).reshape(out.shape).astype(out.dtype) for out in shapes)
    step = optimised_jit(functools.partial(value_and_gradients, key, **options))
    first, *others = (jax.device_get(step(where, args, cotangents)) for _ in range(4))
    for other in others:
        assert_same_bits(other, first)


# What follows holds for the kernels of XLA's library, from 4,096 elements on. Without the library rows of another
# length are added up in another order.


ROWS, WIDTH, CLASSES, TOKEN = 64, 100, 1000, 32
RNG = np.random.default_rng(0)
X, D_X = RNG.normal(size=(2, 256, 1000)).astype(np.float32)
LABELS = RNG.integers(WIDTH, size=256).astype(np.int32)
KERNEL = RNG.normal(size=(TOKEN, CLASSES)).astype(np.float32)
DIVIDED = "mean", "var", "layer_norm", "rms_norm"  # whose number of elements is a constant without a mask


def soft_labelled(x, labels, where):
    smooth = 0.9 * jax.nn.one_hot(labels, x.shape[1]) + np.float32(0.001)
    return losses.softmax_cross_entropy(x, smooth, where=where)


LABELLED = "softmax_cross_entropy_with_integer_labels", "log_probs"
ALONG_ROWS = "log_softmax", "softmax", "logsumexp", "sum", "max", *DIVIDED
OF_ROWS = {
    **{name: lambda x, _, where, name=name: getattr(masksafe, name)(x, axis=-1, where=where) for name in ALONG_ROWS},
    **{name: lambda x, y, where, name=name: getattr(losses, name)(x, y, where=where) for name in LABELLED},
    "softmax_cross_entropy": soft_labelled,
}
OF_TOKENS = {
    "linear_log_probs": lambda x, labels, where: losses.linear_log_probs(x, KERNEL, labels, where=where),
    "linear_softmax_cross_entropy": lambda x, labels, where: losses.linear_softmax_cross_entropy(
        x, KERNEL, labels, where=where, reduction="none"
    ),
}
needs_library = pytest.mark.skipif(
    not platforms.Choices().has_fusion_library, reason="XLA's CPU compiler of this jax has no library of kernels"
)


@functools.cache
def program_of(op):
    """Jitted: the value and the gradient of a function of an array, from a part of the cotangents."""

    def results(x, d_x, *others):
        out, pull_back = jax.vjp(lambda x: op(x, *others), x)
        return out, pull_back(d_x[tuple(slice(n) for n in out.shape)] if out.ndim > 1 else d_x[:, 0])[0]

    return optimised_jit(results)


def padded(a, width):
    return np.pad(a[:, :WIDTH], [(0, 0), (0, width - WIDTH)], constant_values=np.nan)


def of_last_rows(name, rows=ROWS, width=WIDTH, has_mask=True):
    """The results of the first rows of the arrays, in turned order behind others, with padding behind each."""
    order = np.arange(rows)[::-1]
    where = np.broadcast_to(np.arange(width) < WIDTH, (rows, width)) if has_mask else None
    given = padded(X, width)[order], np.nan_to_num(padded(D_X, width)[order]), LABELS[order], where
    found = jax.device_get(program_of(OF_ROWS[name])(*given))
    return [a[order][:ROWS, :WIDTH] if a.ndim > 1 else a[order][:ROWS] for a in found]


@needs_library
@parametrize("name", ["log_softmax"], exhaustive=OF_ROWS)
def test_a_row_has_the_same_bits_whatever_its_padding_and_its_batch(name):
    expected = of_last_rows(name)
    for width in (128, 1000):
        assert_same_bits(of_last_rows(name, width=width), expected)
    assert_same_bits(of_last_rows(name, rows=200), expected)
    if name not in DIVIDED:
        found = of_last_rows(name, has_mask=False)
        if name in LABELLED:  # whose gradients agree to the bit on some CPUs only
            np.testing.assert_array_max_ulp(found.pop(), expected.pop(), 2)
        assert_same_bits(found, expected)


def of_tokens(name, places, tokens):
    """The results of some tokens at those places of a batch, in which the others are masked."""
    x, d_x = (np.full((tokens, TOKEN), v, np.float32) for v in (np.nan, 1))
    labels, where = np.full(tokens, -100, np.int32), np.zeros(tokens, bool)
    x[places], d_x[places], labels[places], where[places] = X[:ROWS, :TOKEN], D_X[:ROWS, :TOKEN], LABELS[:ROWS], True
    return [a[places] for a in jax.device_get(program_of(OF_TOKENS[name])(x, d_x, labels, where))]


@needs_library
@parametrize("name", ["linear_log_probs"], exhaustive=OF_TOKENS)
def test_a_token_has_the_same_bits_wherever_it_stands(name):
    expected = of_tokens(name, np.arange(ROWS), ROWS)
    assert_same_bits(of_tokens(name, np.arange(ROWS), 100), expected)
    assert_same_bits(of_tokens(name, np.sort(RNG.permutation(500)[:ROWS]), 500), expected)


SEGMENTS, COLUMNS = 8, 16
DATA, D_DATA = RNG.normal(size=(2, 48, WIDTH, COLUMNS)).astype(np.float32)
KEEP_ROWS = "segment_softmax", "segment_log_softmax", "segment_standardize"


def of_segments(name, number=SEGMENTS, length=WIDTH, in_turn=False):
    """The results of the first of some segments, with padding in each; rows of all segments may take turns."""
    x, d_x = (np.full((number, length, COLUMNS), v, np.float32) for v in (np.nan, 0))
    x[:, :WIDTH], d_x[:, :WIDTH] = DATA[:number], D_DATA[:number]
    ids = np.broadcast_to(np.arange(number, dtype=np.int32)[:, None], (number, length))
    where = np.broadcast_to(np.arange(length) < WIDTH, (number, length))
    given = [(a.swapaxes(0, 1) if in_turn else a).reshape(-1, *a.shape[2:]) for a in (x, d_x, ids, where)]
    given[1] = given[1] if name in KEEP_ROWS else D_DATA[:number, 0]
    op = lambda x, ids, where: getattr(masksafe, name)(x, ids, number, where=where)  # noqa: E731
    found = jax.device_get(program_of(op)(*given))
    if in_turn:
        found = [a.reshape(length, number, COLUMNS).swapaxes(0, 1) if len(a) > number else a for a in found]
    by_segment = [a.reshape(number, -1, COLUMNS)[:SEGMENTS] for a in found]
    return [a[:, :WIDTH] for a in by_segment]


# Of the other ops a sum, an extremum, and what is computed from two sums.
@parametrize("name", ["segment_sum"], exhaustive=["segment_log_softmax", "segment_max", "segment_standardize"])
def test_a_segment_has_the_same_bits_among_padding_and_other_segments(name):
    expected = of_segments(name)
    for others in ({"length": 128}, {"number": 48}, {"in_turn": True}):
        assert_same_bits(of_segments(name, **others), expected)
