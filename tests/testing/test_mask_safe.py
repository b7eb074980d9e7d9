"""assert_mask_safe finds what it is there to find, and only that."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import parametrize

import masksafe
from masksafe.testing import assert_mask_safe

MASK = np.array([[True, False, False], [False, False, True]])
X = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)

# Eager code is compiled op by op, which takes longer than all that is tested here.
assert_mask_safe_compiled = functools.partial(assert_mask_safe, transforms=("jit",))


def clean(x):
    return jnp.where(MASK, 0.0, x)


@jax.custom_vjp
def zero_with_a_gradient(x):
    return jnp.zeros_like(x)


zero_with_a_gradient.defvjp(lambda x: (jnp.zeros_like(x), None), lambda _, d_zero: (d_zero,))


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


def where_unmasked(x):
    return jnp.where(MASK, 0.0, jnp.log(x**2))


def of_a_tree(params):
    return {"out": clean(params["w"]).sum() + jnp.where(MASK[0], 0, params["b"]).sum(), "count": jnp.int32(3)}


def ids_not_0(ids):
    return masksafe.sum(ids, where=ids != 0)


def next_layer(x, params):
    """Its gradient is NaN on clean data: the maximum of nothing is infinite."""
    largest = masksafe.max(x, axis=1, where=~MASK & (x > 9))
    return jnp.exp(largest[:, None] * params["w"]).sum()


def bent(x):
    """Its second derivative is NaN at 0."""
    return (clean(x) * 0) ** 1.5


def check(fn, *args, masked=None, **options):
    """The assertion, of X under MASK unless arguments and masks are given."""
    masked = {0: MASK} if masked is None else masked
    return lambda: assert_mask_safe_compiled(fn, *(args or (X,)), masked=masked, **options)


TREE, OF_TREE = {"w": X, "b": X[0]}, {0: {"w": MASK, "b": MASK[0]}}
BATCH, OF_BATCH = {"x": X, "index": np.arange(3)}, {0: {"x": MASK, "index": np.zeros(3, bool)}}
TABLE, INDEX, OF_INDEX = jax.device_put(np.arange(5, dtype=np.float32)), np.int32([1, 2]), np.array([False, True])
IDS, KERNEL = np.int32([3, 0, 5]), {"w": np.ones(1, np.float32)}
INTEGERS, KEY = np.ones((2, 3), "int32"), np.zeros(2, np.uint32)
WHERE, NOTHING = ~MASK, np.zeros((2, 3), bool)
mean, naive_mean = (lambda x, where, op=op: op(x, where=where) for op in (masksafe.mean, jnp.mean))
ZERO_TIMES = lambda x: clean(x).sum() + (x - jax.lax.stop_gradient(x)).sum() * 0  # noqa: E731
UNIFORM = lambda x: jax.nn.softmax(jnp.where(MASK.any(1, keepdims=True), -1e30, x)) * x  # noqa: E731
MASKS_LESS = r"In the call of `empty`, which should mask everything: .*\n +argument: +0, .* 6 of 6 elements masked"

# Planted bugs, and what the report must say of each.
LEAK_OF_BOTH = check(lambda x: clean(x) + zero_with_a_gradient(x)), "2 of 2 masked elements"
LEAKS = [
    (check(lambda x: x.sum()), "derivative: value"),
    (check(lambda x: x * ~MASK), "derivative: value"),
    (check(ZERO_TIMES), "derivative: value"),
    (check(where_unmasked), "derivative: gradient"),
    (check(UNIFORM), "derivative: value"),
    (check(leaking(1)), "derivative: gradient with respect"),
    (check(leaking(2)), "derivative: Hessian-vector product"),
    (check(lambda x, scale: jnp.where(MASK, 0, x * scale), X, np.float32(2)), "gradient with respect to argument 1"),
    (check(lambda i: TABLE[i], INDEX, masked={0: OF_INDEX}), r"argument: +0, int32"),
    (check(lambda x: x + 1), "derivative: value"),
    (check(naive_mean, X, WHERE, empty=(X, NOTHING), garbage=[1.0]), "With everything masked, a result is not finite"),
    (check(mean, X, WHERE, empty=(X, ~MASK)), MASKS_LESS),
    (check(mean, X, WHERE, empty=(X, ~NOTHING)), MASKS_LESS),
    (check(lambda p: p["b"].sum(), TREE, masked=OF_TREE), r"argument: +0, float32\[3\], float32\[2, 3\], 3 of 9"),
    (check(lambda batch: where_unmasked(batch["x"]), BATCH, masked=OF_BATCH), "derivative: gradient"),
    (check(lambda batch: batch["x"], BATCH, masked={0: {"x": MASK}}), r"argument: +0, float32\[2, 3\], 2 of 6 "),
    (
        check(ids_not_0, IDS, masked={0: IDS == 0}),
        r"int32(.|\n)*a mask that is computed from these integers",
    ),
    (check(lambda x: {"a": clean(x), "b": jnp.log(clean(x) - 9)}), r"NaN without garbage(.|\n)*value of output\['b'\]"),
    (check(next_layer, X, KERNEL), r"NaN without garbage(.|\n)*gradient with respect to argument 1\['w'\]"),
    (check(bent, order=2), r"NaN without garbage(.|\n)*Hessian-vector product"),
]
# The function sees arrays of JAX only.
SAFE_OF_JAX = check(lambda x: clean(x.at[0, 0].set(0.0)), garbage=np.array([1e30]), transforms=("eager",), order=0)
SAFE = [
    check(leaking(1), order=0),
    check(leaking(2), order=1),
    check(lambda i: jnp.where(OF_INDEX, 0.0, TABLE[i]) + TABLE[i].sum() * 0, INDEX, masked={0: OF_INDEX}),
    check(lambda x: x + 1, output_mask=MASK),
    check(lambda x: {"a": x + 1, "b": clean(x)}, output_mask={"a": MASK, "b": False}),
    check(mean, X, WHERE, empty=(X, NOTHING)),
    check(of_a_tree, TREE, masked=OF_TREE),
    check(lambda batch: clean(batch["x"]) ** 2, BATCH, masked=OF_BATCH),
    check(lambda batch: clean(batch["x"]) ** 2, BATCH, masked={0: {"x": MASK}}),
    check(lambda batch: clean(batch["x"]) ** 2, BATCH, masked={0: {"x": MASK, "index": None}}),
    check(lambda batch: clean(batch["x"]), {"x": X, "rng": jax.random.key(0)}, masked={0: {"x": MASK}}),
    check(lambda pair: clean(pair[0]["x"]) + pair[1], (BATCH, X), masked={0: ({"x": MASK}, None)}),
    check(lambda x: jnp.log(clean(x) - 9), allow_nan=True),
    check(next_layer, X, KERNEL, allow_nan=True),
    check(lambda x: 1 / clean(x) ** 2, order=1, allow_nan=True),
    check(lambda x, i: clean(x) + clean(i), X, INTEGERS, masked={0: MASK, 1: MASK}, garbage=[np.nan]),
    check(lambda key, x: clean(x) * jax.random.bernoulli(key, 0.5, x.shape), KEY, X, masked={1: MASK}),
]


@parametrize(("call", "text"), [LEAK_OF_BOTH], exhaustive=LEAKS)
def test_planted_leak_is_found(call, text):
    with pytest.raises(AssertionError, match=text):
        call()


@parametrize("call", [SAFE_OF_JAX], exhaustive=SAFE)
def test_what_is_safe_passes(call):
    call()


def test_leak_under_one_transform_is_found_there():
    def fn(x):
        inside_vmap = "vmap" in str(type(x)).lower() or "BatchTracer" in type(x).__name__
        return x.sum() if inside_vmap else clean(x)

    assert_mask_safe(fn, X, masked={0: MASK}, transforms=("eager", "jit"), order=0)
    with pytest.raises(AssertionError, match=r"transform: +vmap"):
        assert_mask_safe(fn, X, masked={0: MASK}, order=0)


MULTIPLIED = {
    "value": lambda x, mask: jnp.sum(x * mask) / jnp.sum(mask),
    "gradient": jax.custom_vjp(lambda x, mask: jnp.sum(jnp.where(mask, x**2, 0))),
}
MULTIPLIED["gradient"].defvjp(
    lambda x, mask: (jnp.sum(jnp.where(mask, x**2, 0)), (x, mask)), lambda res, d: (2 * d * res[0] * res[1], None)
)


@pytest.mark.exhaustive
@parametrize("derivative", ["value"], exhaustive=MULTIPLIED)
def test_product_with_a_mask_that_xla_makes_a_selection_is_found(derivative):
    fn, args, masked = MULTIPLIED[derivative], (X, ~MASK), {0: MASK}
    assert_mask_safe(fn, *args, masked=masked, transforms=("eager", "jit", "vmap"), order=1)
    with pytest.raises(AssertionError, match=rf"garbage: +nan\n +transform: +disable_jit\n +derivative: {derivative}"):
        assert_mask_safe(fn, *args, masked=masked)


def test_operation_by_operation_all_masks_are_filled_at_once():
    seen = []

    def fn(x, index, where):
        seen.append((x, index))
        return jnp.where(MASK, 0, x) + jnp.where(MASK, 0, index)

    assert_mask_safe(fn, X, INTEGERS, ~MASK, masked={0: MASK, 1: MASK}, transforms=("disable_jit",), order=0)
    filled = seen[-1]
    np.testing.assert_array_equal(np.isnan(filled[0]), MASK)
    np.testing.assert_array_equal(filled[1] == jnp.iinfo(filled[1].dtype).min, MASK)


@parametrize("dtype", ["bfloat16"], exhaustive=["uint8", "bool", "float16", "float32", "int8", "int32"])
def test_every_dtype_can_be_filled(dtype):
    x = jnp.ones((2, 3), dtype)
    assert_mask_safe_compiled(lambda x: jnp.where(MASK, jnp.zeros_like(x), x), x, masked={0: MASK})
    with pytest.raises(AssertionError):
        assert_mask_safe_compiled(lambda x: x, x, masked={0: MASK})


BAD_ARGUMENTS = [
    ({"masked": {}}, "masked: got keys"),
    ({"masked": {1: MASK}}, r"masked: got keys \[1\]; expected positions of arguments, in \[0, 1\)"),
    ({"masked": {0: MASK.astype(float)}}, r"masked\[0\]: got dtype float64; expected bool"),
    ({"masked": {0: MASK[:, :2]}}, r"masked\[0\]: got shape \(2, 2\); expected a shape that broadcasts to \(2, 3\)"),
    ({"masked": {0: np.zeros_like(MASK)}}, "masked: got nothing that is True"),
    ({"masked": {0: None}}, "masked: got nothing that is True"),
    ({"x": BATCH, "masked": {0: {"y": MASK}}}, r"masked\[0\]: got the keys \['y'\]; expected some of \['x', 'index'\]"),
    ({"masked": {0: {"x": MASK}}}, r"masked\[0\]: got a dict; expected a mask"),
    ({"x": BATCH, "masked": {0: {"x": X}}}, r"masked\[0\]\['x'\]: got dtype float32; expected bool"),
    ({"x": BATCH, "masked": {0: MASK}}, r"masked\[0\]: got masks in another structure"),
    ({"x": (X, X), "masked": {0: [MASK, None]}}, r"masked\[0\]: got masks in another structure"),
    ({"order": 3}, "order: got value 3"),
    ({"transforms": ["pmap"]}, "transforms: got"),
    ({"transforms": []}, "transforms: got"),
    ({"garbage": []}, r"garbage: got \[\]; expected numbers that float32 can hold"),
    ({"x": INTEGERS, "garbage": [np.nan, 0.5]}, r"garbage: got \[nan, 0.5\]; expected numbers that int32 can hold"),
    ({"output_mask": True}, "output_mask: got nothing that is False"),
    ({"output_mask": MASK[:1, :2]}, "output_mask: got shape"),
    ({"empty": ()}, "empty: got 0 arguments; expected 1"),
    ({"fn": lambda x: None}, "fn: got no output; expected an array"),
    ({"masked": MASK}, r"masked: got type ndarray; expected a mapping.* write \{0: mask\}"),
]


@pytest.mark.parametrize(("options", "text"), BAD_ARGUMENTS)
def test_arguments_that_make_no_sense_are_refused(options, text):
    call = {"fn": clean, "x": X, "masked": {0: MASK}} | options
    with pytest.raises(TypeError if "got type" in text else ValueError, match=text):
        assert_mask_safe(call.pop("fn"), call.pop("x"), **call)
