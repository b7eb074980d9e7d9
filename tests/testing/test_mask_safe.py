"""assert_mask_safe finds what it is there to find, and only that."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe.testing import assert_mask_safe

MASK = np.array([[True, False, False], [False, False, True]])
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)), jnp.float32)

# Eager code is compiled op by op, which takes longer than all that is tested here.
assert_mask_safe_compiled = functools.partial(assert_mask_safe, transforms=("jit",))


def clean(x):
    return jnp.where(MASK, 0.0, x)


@jax.custom_vjp
def zero_with_a_gradient(x):
    return jnp.zeros_like(x)


zero_with_a_gradient.defvjp(lambda x: (jnp.zeros_like(x), None), lambda _, d_zero: (d_zero,))

# Planted bugs. Each names what the report must say of it.
LEAKS = {
    "a gradient that no garbage changes": (
        lambda x: clean(x) + zero_with_a_gradient(x),
        "2 of 2 masked elements have a",
    ),
    "value": (lambda x: x.sum(), "derivative: value"),
    "multiplied away": (lambda x: x * ~MASK, "derivative: value"),
    "a product with 0": (
        lambda x: clean(x).sum() + (x - jax.lax.stop_gradient(x)).sum() * 0,
        "derivative: value",
    ),
    "where behind the bad operation": (
        lambda x: jnp.where(MASK, 0.0, jnp.log(x**2)),
        "derivative: gradient",
    ),
    "uniform weights of an empty row": (
        lambda x: jax.nn.softmax(jnp.where(MASK.any(1, keepdims=True), -1e30, x)) * x,
        "derivative: value",
    ),
}


@pytest.mark.parametrize("name", LEAKS)
def test_planted_leak_is_found(name):
    fn, text = LEAKS[name]
    with pytest.raises(AssertionError, match=text):
        assert_mask_safe_compiled(fn, X, masked={0: MASK})


@pytest.mark.forms
def test_all_derivatives_under_all_transforms_of_a_clean_function_pass():
    assert_mask_safe(lambda x: clean(x) ** 3, X, masked={0: MASK})


def leaking(order):
    """A function that is clean up to a derivative of this order, where a masked element enters."""

    @jax.custom_jvp
    def fn(x):
        return clean(x) ** 2

    @fn.defjvp
    def fn_jvp(primals, tangents):
        (x,), (x_dot,) = primals, tangents
        slope = 2 * clean(x) if order == 2 else 2 * clean(x) + 0.1 * jnp.where(MASK, x, 0).sum()
        return fn(x), poisoned(slope, x) * clean(x_dot)

    @jax.custom_jvp
    def poisoned(slope, x):
        return slope

    @poisoned.defjvp
    def poisoned_jvp(primals, tangents):
        return primals[0], tangents[0] + (
            0.1 * jnp.where(MASK, primals[1], 0).sum() * clean(tangents[1]) if order == 2 else 0
        )

    return fn


@pytest.mark.parametrize(("order", "derivative"), [(1, "gradient with respect"), (2, "Hessian-vector product")])
def test_leak_into_a_derivative_is_found_at_its_order_only(order, derivative):
    with pytest.raises(AssertionError, match=f"derivative: {derivative}"):
        assert_mask_safe_compiled(leaking(order), X, masked={0: MASK})
    assert_mask_safe_compiled(leaking(order), X, masked={0: MASK}, order=order - 1)


def test_leak_under_one_transform_is_found_there():
    def fn(x):
        inside_vmap = "vmap" in str(type(x)).lower() or "BatchTracer" in type(x).__name__
        return x.sum() if inside_vmap else clean(x)

    assert_mask_safe(fn, X, masked={0: MASK}, transforms=("eager", "jit"), order=0)
    with pytest.raises(AssertionError, match=r"transform: +vmap"):
        assert_mask_safe(fn, X, masked={0: MASK}, order=0)


MULTIPLIED = {
    "value": lambda x, mask: jnp.sum(x * mask) / jnp.sum(mask),
    "a rule that multiplies": jax.custom_vjp(lambda x, mask: jnp.sum(jnp.where(mask, x**2, 0))),
}
MULTIPLIED["a rule that multiplies"].defvjp(
    lambda x, mask: (jnp.sum(jnp.where(mask, x**2, 0)), (x, mask)), lambda res, d: (2 * d * res[0] * res[1], None)
)


@pytest.mark.forms
@pytest.mark.parametrize(("name", "derivative"), [("value", "value"), ("a rule that multiplies", "gradient")])
def test_product_with_a_mask_that_xla_makes_a_selection_is_found(name, derivative):
    fn, args, masked = MULTIPLIED[name], (X, jnp.asarray(~MASK)), {0: MASK}
    assert_mask_safe(fn, *args, masked=masked, transforms=("eager", "jit", "vmap"), order=1)
    with pytest.raises(AssertionError, match=rf"garbage: +nan\n +transform: +disable_jit\n +derivative: {derivative}"):
        assert_mask_safe(fn, *args, masked=masked)


def test_operation_by_operation_all_masks_are_filled_at_once():
    seen = []

    def fn(x, index, where):
        seen.append((x, index))
        return jnp.where(MASK, 0, x) + jnp.where(MASK, 0, index)

    assert_mask_safe(
        fn, X, jnp.ones((2, 3), int), ~MASK, masked={0: MASK, 1: MASK}, transforms=("disable_jit",), order=0
    )
    filled = seen[-1]
    np.testing.assert_array_equal(np.isnan(filled[0]), MASK)
    np.testing.assert_array_equal(filled[1] == jnp.iinfo(filled[1].dtype).min, MASK)


def test_leak_into_another_arguments_gradient_is_found():
    def fn(x, scale):
        return jnp.where(MASK, 0.0, x * scale)

    with pytest.raises(AssertionError, match="gradient with respect to argument 1"):
        assert_mask_safe_compiled(fn, X, jnp.float32(2.0), masked={0: MASK})


def test_integer_that_wraps_is_found():
    table, mask = jnp.arange(5.0), np.array([False, True])

    def looked_up(index):
        return jnp.where(mask, 0.0, table[index]) + table[index].sum() * 0

    assert_mask_safe_compiled(looked_up, jnp.array([1, 2]), masked={0: mask})
    with pytest.raises(AssertionError, match=r"argument: +0, int32"):
        assert_mask_safe_compiled(lambda index: table[index], jnp.array([1, 2]), masked={0: mask})


def test_report_tells_where_to_look():
    with pytest.raises(AssertionError) as caught:
        assert_mask_safe(lambda x: x * 2, X, masked={0: MASK}, garbage=[7.0])
    assert str(caught.value) == (
        "A masked element is not gone.\n"
        "  argument:   0, float32[2, 3], 2 of 6 elements masked\n"
        "  garbage:    7.0\n"
        "  transform:  eager\n"
        "  derivative: value\n"
        "  2 of 6 elements changed, the first at index (0, 0):\n"
        f"    {_harmless()} with harmless values under the mask, 14.0 with garbage"
    )


def _harmless():
    filled = []
    with pytest.raises(AssertionError):
        assert_mask_safe(lambda x: filled.append(x) or x * 2, X, masked={0: MASK}, garbage=[7.0], transforms=["eager"])
    return np.asarray(filled[1])[0, 0] * np.float32(2)


def test_output_mask_frees_the_padding_of_the_output():
    with pytest.raises(AssertionError):
        assert_mask_safe_compiled(lambda x: x + 1, X, masked={0: MASK})
    assert_mask_safe_compiled(lambda x: x + 1, X, masked={0: MASK}, output_mask=MASK)
    assert_mask_safe_compiled(
        lambda x: {"a": x + 1, "b": clean(x)}, X, masked={0: MASK}, output_mask={"a": MASK, "b": False}
    )


def test_empty_must_be_finite():
    nothing = np.zeros((2, 3), bool)

    def mean(x, where):
        return jnp.mean(x, where=where)

    x, where = X, jnp.asarray(~MASK)
    assert_mask_safe_compiled(
        lambda x, where: masksafe.mean(x, where=where), x, where, masked={0: MASK}, empty=(x, nothing)
    )
    with pytest.raises(AssertionError, match="With everything masked, a result is not finite"):
        assert_mask_safe_compiled(mean, x, where, masked={0: MASK}, empty=(x, nothing), garbage=[1.0])


@pytest.mark.parametrize("where", [~MASK, np.ones((2, 3), bool)], ids=["as before", "all"])
def test_empty_must_mask_everything(where):
    def mean(x, where):
        return masksafe.mean(x, where=where)

    text = r"In the call of `empty`, which should mask everything: .*\n +argument: +0, .* 6 of 6 elements masked"
    with pytest.raises(AssertionError, match=text):
        assert_mask_safe_compiled(mean, X, jnp.asarray(~MASK), masked={0: MASK}, empty=(X, where))


def test_pytrees_of_arguments_and_outputs():
    params, masks = {"w": X, "b": X[0]}, {"w": MASK, "b": MASK[0]}

    def fn(params):
        return {"out": clean(params["w"]).sum() + jnp.where(MASK[0], 0, params["b"]).sum(), "count": jnp.int32(3)}

    assert_mask_safe_compiled(fn, params, masked={0: masks})
    with pytest.raises(AssertionError, match=r"argument: +0, float32\[3\], float32\[2, 3\], 3 of 9"):
        assert_mask_safe_compiled(lambda p: fn(p)["out"] + p["b"].sum(), params, masked={0: masks})


def test_floats_beside_integers_in_one_argument_are_differentiated():
    batch = {"x": X, "index": jnp.arange(3)}
    masks = {"x": MASK, "index": np.zeros(3, bool)}
    assert_mask_safe_compiled(lambda batch: clean(batch["x"]) ** 2, batch, masked={0: masks})
    with pytest.raises(AssertionError, match="derivative: gradient"):
        assert_mask_safe_compiled(lambda batch: jnp.where(MASK, 0, jnp.log(batch["x"] ** 2)), batch, masked={0: masks})


def test_function_sees_jax_arrays_only():
    fn = lambda x: clean(x.at[0, 0].set(0.0))  # noqa: E731
    assert_mask_safe(fn, X, masked={0: MASK}, garbage=np.array([1e30]), transforms=("eager",), order=0)


def test_garbage_that_a_dtype_cannot_hold_is_left_out():
    def fn(x, index):
        return clean(x) + jnp.where(MASK, 0, index)

    assert_mask_safe_compiled(fn, X, jnp.ones((2, 3), int), masked={0: MASK, 1: MASK}, garbage=[np.nan])


def test_keys_and_booleans_are_passed_through():
    def dropped(key, x, where):
        return jnp.where(where, x, 0.0) * jax.random.bernoulli(key, 0.5, x.shape)

    assert_mask_safe_compiled(dropped, jax.random.key(1), X, jnp.asarray(~MASK), masked={1: MASK})


OTHER_DTYPES = [pytest.param(d, marks=pytest.mark.forms) for d in ("float16", "float32", "int8", "int32")]


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8", "bool", *OTHER_DTYPES])
def test_every_dtype_can_be_filled(dtype):
    x = jnp.ones((2, 3), dtype)
    assert_mask_safe_compiled(lambda x: jnp.where(MASK, jnp.zeros_like(x), x), x, masked={0: MASK})
    with pytest.raises(AssertionError):
        assert_mask_safe_compiled(lambda x: x, x, masked={0: MASK})


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"masked": {}}, "masked: got keys"),
        ({"masked": {1: MASK}}, r"masked: got keys \[1\]; expected positions of arguments, in \[0, 1\)"),
        ({"masked": {0: MASK.astype(float)}}, "masked: got dtype float64; expected bool"),
        ({"masked": {0: MASK[:, :2]}}, r"masked: got shape \(2, 2\); expected a shape that broadcasts to \(2, 3\)"),
        ({"masked": {0: np.zeros_like(MASK)}}, "masked: got nothing that is True"),
        ({"masked": {0: MASK}, "order": 3}, "order: got value 3"),
        ({"masked": {0: MASK}, "transforms": ["pmap"]}, "transforms: got"),
        ({"masked": {0: MASK}, "transforms": []}, "transforms: got"),
        ({"masked": {0: MASK}, "garbage": []}, r"garbage: got \[\]; expected numbers that float32 can hold"),
        ({"masked": {0: MASK}, "output_mask": True}, "output_mask: got nothing that is False"),
        ({"masked": {0: MASK}, "empty": ()}, "empty: got 0 arguments; expected 1"),
        ({"masked": {0: MASK}, "output_mask": MASK[:1, :2]}, "output_mask: got shape"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(kwargs, text):
    with pytest.raises(ValueError, match=text):
        assert_mask_safe(clean, X, **kwargs)


def test_garbage_that_no_argument_can_hold_is_refused():
    with pytest.raises(ValueError, match=r"garbage: got \[nan, 0.5\]; expected numbers that int32 can hold"):
        assert_mask_safe(clean, jnp.ones((2, 3), "int32"), masked={0: MASK}, garbage=[np.nan, 0.5])


def test_function_that_returns_nothing_is_refused():
    with pytest.raises(ValueError, match="fn: got no output; expected an array"):
        assert_mask_safe(lambda x: None, X, masked={0: MASK})


def test_a_mask_that_belongs_to_no_argument_is_refused():
    with pytest.raises(TypeError, match=r"masked: got type ndarray; expected a mapping.* write \{0: mask\}"):
        assert_mask_safe(clean, X, masked=MASK)
