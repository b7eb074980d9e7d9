"""Rows along several neighbouring axes, which norms compute as rows of one axis where XLA has no library for CPUs."""

import functools

import jax
import numpy as np
import pytest

import masksafe
from masksafe._core import platforms

SHAPE = 3, 4, 5, 6
RNG = np.random.default_rng(0)
X = RNG.normal(size=SHAPE).astype(np.float32)
OPS = {
    "layer norm": (functools.partial(masksafe.layer_norm, axis=(1, 2, 3)), (1, 2, 3)),
    "standardize, axes in another order": (
        functools.partial(masksafe.standardize, axis=(2, 0, 1), epsilon=1e-5),
        (0, 1, 2),
    ),
    "standardize, axes apart": (functools.partial(masksafe.standardize, axis=(0, 2), epsilon=1e-5), (0, 2)),
    "batch norm": (lambda x, where: masksafe.batch_norm(x, where=where)[0], (0, 1, 2)),
    "batch norm of channels on axis 0": (lambda x, where: masksafe.batch_norm(x, where=where, axis=0)[0], (1, 2, 3)),
    "instance norm": (lambda x, where: masksafe.group_norm(x, 6, where=where, epsilon=1e-5), (1, 2)),
    "instance norm of channels on axis 1": (
        lambda x, where: masksafe.group_norm(x, 4, where=where, axis=1, epsilon=1e-5),
        (2, 3),
    ),
}
MASKS = [SHAPE, (1, 4, 1, 1), (3, 1, 5, 1), (3, 1, 1, 6), (3, 1, 1, 1), None]


@pytest.mark.parametrize("has_library", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_masks_that_repeat_along_some_of_the_axes(name, has_library):
    op, axes = OPS[name]
    wheres = [None if shape is None else RNG.random(shape) < 0.7 for shape in MASKS]
    with platforms.chosen(has_kernel_library=has_library):
        actual = jax.jit(lambda x: [op(x, where=where) for where in wheres])(X)
    for y, where in zip(actual, wheres, strict=True):
        full = np.broadcast_to(True if where is None else where, SHAPE)
        wide = np.ma.array(X.astype(np.float64), mask=~full)
        deviations = wide - wide.mean(axes, keepdims=True)
        variance = (deviations**2).mean(axes, keepdims=True)
        np.testing.assert_allclose(y, (deviations / np.sqrt(variance + 1e-5)).filled(0), rtol=1e-5, atol=1e-5)


def test_no_sum_goes_along_several_axes():
    """On a CPU it would take several times as long with some versions of XLA."""
    step = jax.value_and_grad(lambda x, where: (masksafe.batch_norm(x, where=where)[0] ** 2 * X).sum())
    with platforms.chosen(has_kernel_library=False):
        text = jax.jit(step).lower(X, X > 0).as_text()
    assert "across dimensions = [0]" in text
    assert "across dimensions = [0, 1, 2]" not in text
