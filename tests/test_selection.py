"""keep, mask_where and apply_where: dtypes, shapes, functions. The table has the contract."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe

DTYPES = ("bfloat16", "int8", "uint32", "bool", "complex64")
MASK = np.array([[True, False, True], [False, False, True]])
X = np.random.default_rng(0).random((2, 3)).astype(np.float32) + np.float32(0.5)


def test_every_dtype():
    numbers = {dtype: np.arange(3).astype(jnp.dtype(dtype)) for dtype in DTYPES}

    @jax.jit
    def ones_for_zeros(numbers):
        one = {d: jnp.ones((), d) for d in numbers}
        return (
            {d: masksafe.keep(x, where=x != 0, value=one[d]) for d, x in numbers.items()},
            {d: masksafe.mask_where(x == 0, x, one[d]) for d, x in numbers.items()},
            {d: masksafe.apply_where(x != 0, x, lambda x: x, fill_value=one[d]) for d, x in numbers.items()},
        )

    expected = {d: np.where(x != 0, x, np.ones((), x.dtype)) for d, x in numbers.items()}
    for results in ones_for_zeros(numbers):
        chex.assert_trees_all_equal(results, expected, strict=True)


# keep


@pytest.mark.parametrize("dtype", DTYPES)
def test_keep_leaves_zeros_of_the_dtype(dtype):
    x = np.ones((2, 3), jnp.dtype(dtype))
    out = masksafe.keep(x, where=MASK)
    chex.assert_trees_all_equal(out, np.where(MASK, x, np.zeros((), x.dtype)), strict=True)


def test_keep_has_the_gradient_of_what_it_took():
    value = np.array([2.0, 3.0, 4.0], np.float32)
    out, gradients = jax.value_and_grad(
        lambda x, value: (masksafe.keep(x, where=MASK[:1], value=value) ** 2).sum(), (0, 1)
    )(X, value)
    np.testing.assert_allclose(out, (np.where(MASK[:1], X, value) ** 2).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradients[0], np.where(MASK[:1], 2 * X, 0), rtol=1e-6)
    np.testing.assert_allclose(gradients[1], np.where(MASK[0], 0, 4 * value), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"where": None}, TypeError, "where: got type NoneType"),
        ({"where": np.ones((2, 3))}, TypeError, "where: got dtype float"),
        ({"where": np.ones((4, 2, 3), bool)}, ValueError, r"where: got shape \(4, 2, 3\)"),
        ({"where": MASK, "value": np.ones((4, 2, 3))}, ValueError, r"value: got shape \(4, 2, 3\)"),
        ({"where": MASK, "value": "0"}, TypeError, "value: got type str"),
    ],
)
def test_keep_refuses(arguments, error, text):
    with pytest.raises(error, match=f"^keep: {text}"):
        masksafe.keep(X, **arguments)


@pytest.mark.parametrize(
    ("x", "value", "expected"),
    [
        (np.ones(2, np.uint8), 300, "300; expected a number that uint8 holds"),
        (np.ones(2, np.uint8), -1, "-1; expected a number that uint8 holds"),
        (np.ones(2, np.float16), 1e6, r"1000000\.0; expected a number that float16 holds"),
        (jax.random.split(jax.random.key(0)), 1, "1; expected random keys, as x has"),
        (np.ones(2), jax.random.key(0), "key<fry>; expected a number or an array of numbers, as x is"),
    ],
)
def test_keep_refuses_a_value_that_the_result_cannot_hold(x, value, expected):
    with pytest.raises(TypeError, match=f"^keep: value: got (value|dtype) {expected}"):
        masksafe.keep(x, where=MASK[0, :2], value=value)


# mask_where


def test_mask_where_broadcasts():
    rng = np.random.default_rng(0)
    for of_mask, of_x, of_y in (
        ((3,), (2, 3), ()), ((2, 1), (2, 3), (3,)), ((2, 3), (1,), (2, 1)), ((), (2,), (3, 1))
    ):  # fmt: skip
        mask, x, y = rng.random(of_mask) < 0.5, rng.normal(size=of_x), rng.normal(size=of_y)
        np.testing.assert_array_equal(masksafe.mask_where(mask, x, y), np.where(mask, y, x).astype(np.float32))


# apply_where


def test_apply_where_never_shows_the_functions_an_element_that_is_not_theirs():
    x, y = np.array([5.0, -1.0, 7.0], np.float32), np.array([[1.0], [2.0]], np.float32)

    @jax.jit
    def out_and_seen(x, y):
        seen = []
        ratio = lambda x, y: seen.append(x) or x / y  # noqa: E731
        total = lambda x, y: seen.append(x) or x + y  # noqa: E731
        return masksafe.apply_where(x > 0, (x, y), ratio, total), seen

    out, seen = out_and_seen(x, y)
    np.testing.assert_allclose(out, np.where(x > 0, x / y, x + y), rtol=1e-6)
    assert sorted(bool((s > 0).all()) for s in seen) == [False, True]
    assert sorted(bool((s < 0).all()) for s in seen) == [False, True]


def test_apply_where_takes_numbers_as_results_and_as_arguments():
    x, cond = np.ones((2, 3), jnp.bfloat16), np.array([True, False, True])
    out = masksafe.apply_where(cond, (x, 2.0), lambda x, y: 3, lambda x, y: np.float32(4))
    np.testing.assert_array_equal(out, np.where(MASK[:1] | cond, [[3, 4, 3]] * 2, 4))


@pytest.mark.parametrize(
    ("functions", "error", "text"),
    [
        ({"f1": jnp.sum, "fill_value": 0.0}, ValueError, r"f1: got a result of shape \(\); expected \(2, 3\)"),
        ({"f1": lambda x: x[None], "fill_value": 0.0}, ValueError, r"f1: got a result of shape \(1, 2, 3\)"),
        ({"f1": jnp.log, "f2": lambda x: x[0]}, ValueError, r"f2: got a result of shape \(3,\); .* fill_value=c"),
        ({"f1": jnp.log, "f2": lambda x: None}, TypeError, "the result of f2: got type NoneType"),
        ({"f1": 0.0, "fill_value": 0.0}, TypeError, "f1: got type float; expected a function"),
    ],
)
def test_apply_where_refuses_what_is_not_elementwise(functions, error, text):
    with pytest.raises(error, match=f"^apply_where: {text}"):
        masksafe.apply_where(MASK, X, **functions)


@pytest.mark.parametrize("number", [2**40, "0", None])
def test_mask_where_refuses_what_is_no_array(number):
    with pytest.raises(TypeError, match=r"^mask_where: y: got type .*; expected an array"):
        masksafe.mask_where(MASK, X, number)
