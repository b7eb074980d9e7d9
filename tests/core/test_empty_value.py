"""The value that a caller gives to an empty maximum, minimum or logsumexp, of rows and of segments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from tiers import parametrize

import masksafe

X = np.array([[1.0, 3.0], [-np.inf, -np.inf], [np.nan, np.nan]], np.float32)
WHERE = np.array([[True, True], [True, False], [False, False]])  # of the last row nothing
IDS = np.array([[0, 0], [1, 1], [2, 2]])


def of_rows(op):
    return lambda x, where, **options: op(x, axis=-1, where=where, **options)


def of_segments(op):
    def call(x, where, **options):
        return op(jnp.ravel(x), jnp.ravel(IDS[: len(x)]), 3, where=jnp.ravel(where), **options)

    return call


OPS = {name: of_rows(getattr(masksafe, name)) for name in ("max", "min", "logsumexp", "logmeanexp")}
OPS |= {name: of_segments(getattr(masksafe, name)) for name in ("segment_max", "segment_min", "segment_logsumexp")}


@pytest.mark.parametrize("op", OPS)
def test_only_an_empty_row_has_it(op):
    """An unmasked infinity stays, and neither the value nor an element has a gradient by the empty row."""
    value = np.float32(7)

    @jax.jit
    def results(x, value):
        out = OPS[op](x, WHERE, empty_value=value)
        gradients = jax.grad(lambda x, value: OPS[op](x, WHERE, empty_value=value)[::2].sum(), (0, 1))(x, value)
        return out, OPS[op](x, WHERE), gradients

    out, without, (d_x, d_value) = results(X, value)
    np.testing.assert_array_equal(out, np.where(WHERE.any(-1), without, value))
    assert out[1] == -np.inf
    np.testing.assert_allclose(d_x.sum(-1), [1, 0, 0], rtol=1e-6)
    assert d_value == 0


@parametrize("op", ["max", "segment_logsumexp"], exhaustive=OPS)
def test_the_next_layer_has_finite_gradients(op):
    """The infinity of an empty row would be multiplied by its kernel."""
    x = np.where(WHERE, np.nan_to_num(X), np.nan).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=2)
    def gradients(x, kernel, options):
        step = lambda x, kernel: jnp.tanh(OPS[op](x, WHERE, **dict(options))[:, None] @ kernel).sum()  # noqa: E731
        return jax.grad(step, (0, 1))(x, kernel)

    kernel = np.zeros((1, 2), np.float32)
    assert np.isnan(gradients(x, kernel, ())[1]).any()
    assert all(np.isfinite(g).all() for g in gradients(x, kernel, (("empty_value", 0),)))


def test_the_sign_of_an_empty_sum_stays_0():
    a, b = np.ones((2, 3), np.float32), np.array([[1, -3, 1], [0, 0, 0]], np.float32)
    logs, signs = masksafe.logsumexp(a, 1, b, return_sign=True, empty_value=5)
    np.testing.assert_allclose(logs, [1, 5], rtol=1e-6)
    np.testing.assert_array_equal(signs, [-1, 0])
    unsigned = masksafe.logsumexp(a, 1, where=b > 0, return_sign=True, empty_value=5)
    np.testing.assert_allclose(unsigned, [[1 + np.log(2), 5], [1, 0]], rtol=1e-6)


def test_rows_without_elements_are_empty():
    nothing = np.zeros((2, 0), np.float32)
    for op in (masksafe.max, masksafe.min, masksafe.logsumexp, masksafe.logmeanexp):
        np.testing.assert_array_equal(op(nothing, axis=1, empty_value=4), [4, 4])
    for op in (masksafe.segment_max, masksafe.segment_min, masksafe.segment_logsumexp):
        np.testing.assert_array_equal(op(nothing[0], np.zeros(0, int), 2, empty_value=4), [4, 4])
    np.testing.assert_array_equal(masksafe.max(nothing.astype(np.int8), axis=1, empty_value=4), [4, 4])


@parametrize("op", ["max", "segment_max"], exhaustive=["min", "segment_min", "segment_logsumexp"])
def test_a_row_is_empty_if_it_is_on_all_devices(op):
    """Row 0 has its elements on one device, row 1 an infinity there, and row 2 nothing."""
    x, where = np.tile(X, (4, 1, 1)), np.stack([WHERE, *[np.zeros_like(WHERE)] * 3])
    mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec())
    def on_each(x, where):
        return OPS[op](x[0], where[0], empty_value=7, axis_name="d")

    np.testing.assert_array_equal(jax.jit(on_each)(x, where), OPS[op](X, WHERE, empty_value=7))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int32", 0.5),
        ("uint8", 300),
        ("uint8", -1),
        ("bool", 2),
        ("int32", np.nan),
        ("float16", 1e5),
        ("float32", 1j),
        ("int8", 2**40),
    ],
)
def test_a_value_that_the_dtype_does_not_hold_is_refused(dtype, value):
    for op in ("max", "segment_min"):
        with pytest.raises(TypeError, match=f"^{op}: empty_value: got value .*; expected a number that {dtype} holds"):
            OPS[op](np.ones((3, 2), dtype), WHERE, empty_value=value)


@pytest.mark.parametrize(
    ("dtype", "value"), [("int32", np.float32(1)), ("uint8", np.int32(1)), ("float32", np.complex64(1))]
)
def test_a_traced_value_of_a_dtype_that_does_not_fit_is_refused(dtype, value):
    with pytest.raises(TypeError, match=r"^min: empty_value: got dtype"):
        jax.eval_shape(lambda v: masksafe.min(np.ones(3, dtype), empty_value=v), value)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("bfloat16", 0.1),
        ("int8", -128.0),
        ("bool", 1),
        ("uint32", 2**32 - 1),
        ("float32", 2**40),
        ("float16", np.inf),
        ("complex64", 2j),
        ("float32", np.nan),
    ],
)
def test_a_value_takes_the_dtype_of_the_result(dtype, value):
    op = masksafe.logsumexp if dtype == "complex64" else masksafe.max
    out = op(np.ones(3, jnp.dtype(dtype)), where=False, empty_value=value)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, np.asarray(value).astype(out.dtype))


def test_a_value_is_a_scalar():
    with pytest.raises(ValueError, match=r"^logmeanexp: empty_value: got shape \(2,\); expected a number"):
        masksafe.logmeanexp(X, empty_value=np.zeros(2))
