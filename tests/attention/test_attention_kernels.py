"""The contract around kernels of others, each with faults of its own: two of a user, and a stand-in for cuDNN's."""

import contextlib
import functools
import itertools
from typing import Any, NamedTuple

import attention_cases as cases
import comparisons
import cudnn_stand_in
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    attention,
    causal,
    exact,
    hidden_by,
    normals,
    poisoned,
    random_inputs,
    replaced,
    with_gradients,
)
from comparisons import assert_same_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import exhaustive_params, parametrize

T, S, H = 6, 8, 8
CASES = cases.cases_of(S) | cases.positions_and_mods(S)
CASES |= cases.over_all_pairs(
    {"plain": ({}, True), "causal window": (dict(is_causal=True, local_window_size=2), cases.window(T, S, 2, 0))}, S
)
GARBAGE = np.nan, np.inf, -np.inf, 3e38, -3e38, 5.0
INPUTS = "query", "key", "value"


# The textbook's softmax, which knows a mask and a bias. A query without a key would be NaN, and with it all gradients.


def formula(scale, query, key, value, bias, mask):
    group = query.shape[2] // key.shape[2]
    x = scale * jnp.einsum("btnh,bsnh->bnts", query, jnp.repeat(key, group, 2))
    x = x if bias is None else x + bias
    x = x if mask is None else jnp.where(mask, x, -jnp.inf)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(x), jnp.repeat(value, group, 2))
    return out, jnp.moveaxis(jax.nn.logsumexp(x, -1), 1, 2)


weighted = jax.custom_vjp(formula, nondiff_argnums=(0,))  # so that JAX cannot differentiate it twice
weighted.defvjp(
    lambda scale, *args: jax.vjp(functools.partial(formula, scale), *args),
    lambda _, pull_back, cotangents: pull_back(cotangents),
)


def textbook(query, key, value, *, scale, bias=None, mask=None):
    return weighted(scale, query, key, value, bias, mask)


class Kernel(NamedTuple):
    implementation: Any
    dtype: Any
    rtol: float

    def attend(self, **arguments):
        return functools.partial(attention, implementation=self.implementation, **arguments)

    def inputs(self, **others):
        return random_inputs(**dict(S=S, H=H, dtype=self.dtype) | others)

    def d_out(self, *batch):
        return normals(*batch, 2, T, 2, H, seed=6).astype(self.dtype)

    def assert_close(self, actual, expected, times=1):
        comparisons.assert_close(actual, expected, times * self.rtol)


KERNELS = {
    "cudnn": Kernel("cudnn", jnp.bfloat16, 2e-2),
    "textbook": Kernel(textbook, np.float32, 2e-5),
    "jax.nn": Kernel(functools.partial(jax.nn.dot_product_attention, implementation="xla"), np.float32, 2e-5),
}


@pytest.fixture(scope="module", params=["cudnn", *exhaustive_params(["textbook", "jax.nn"])])
def kernel(request):
    with cudnn_stand_in.installed() if request.param == "cudnn" else contextlib.nullcontext():
        yield KERNELS[request.param]


# Of positions and functions of a pair each kernel gets an array over pairs, and `textbook` of all masks.
OF_CUDNN = [n for n in CASES if not n.startswith(("positions", "mod"))]
OF_CUDNN += ["positions and lengths", "mod of samples and heads", "mod of nothing"]
OF_JAX = "plain", "causal, dead rows", "window", "causal window", "query lengths", "causal, lengths", "bias of -inf"


@parametrize(
    ("name", "kernel"),
    [("causal, lengths", "cudnn")],
    exhaustive=[
        *((n, "cudnn") for n in OF_CUDNN if n != "causal, lengths"),
        *((n, "textbook") for n in ("plain", "pairs", "bias of -inf", "mod of nothing")),
        *((n, "jax.nn") for n in OF_JAX),
    ],
    indirect=["kernel"],
)
def test_value_and_gradients(name, kernel):
    arguments, live = CASES[name]
    if name == "bias of -inf":
        arguments = dict(bias=arguments["bias"][None, None].astype(kernel.dtype))
    inputs, d_out = kernel.inputs(), kernel.d_out()
    run = with_gradients(kernel.attend(**arguments))
    out, gradients = clean = run(inputs, d_out)
    assert out.dtype == kernel.dtype
    bias = np.where(live, 0.5, 0) if name == "bias of -inf" else 0.0
    (expected, _), of_all = exact(*inputs, live, bias, d_out=d_out)
    kernel.assert_close((out, gradients), (expected, tuple(of_all[n] for n in INPUTS)))
    for x, hidden in zip((out, *gradients), (hidden_by(live)[0], *hidden_by(live)), strict=True):
        assert (np.where(hidden, x, 0) == 0).all()
    for garbage in GARBAGE:
        assert_same_bits(run(poisoned(inputs, live, garbage), d_out), clean)
        dead = poisoned((d_out, *inputs[1:]), live, garbage)[0]  # a cotangent of a query that sees nothing
        assert_same_bits(run(inputs, dead), clean)


# Of a bias: of all samples or heads, queries or keys.
SHAPES = (), (S,), (2, 2, T, 1), (1, 2, 1, S)
FORMS = {
    "textbook": (textbook, lambda choose: None),
    "kernels of a CPU": ("xla", lambda choose: choose(has_fusion_library=True, attention=ONE_BLOCK)),
    "blocks": ("xla", cases.shrink_blocks),
    "blocks of keys": ("xla", cases.decode_always),
    "rows": ("xla", cases.by_rows),
}
ONE_BLOCK = dict(fewest_rows_of_kernels=1, fewest_rows_of_one_kernel=1)


@parametrize(
    ("name", "shapes"),
    [("textbook", SHAPES)],
    exhaustive=[(form, SHAPES[2:]) for form in ("kernels of a CPU", "blocks", "blocks of keys", "rows")],
    ids=str,
)
def test_a_bias_broadcasts(name, shapes, choose):
    """In values and gradients; where a query gets a NaN as cotangent, the bias of all pairs that it sees is NaN."""
    implementation, adjust = FORMS[name]
    adjust(choose)
    attend = functools.partial(attention, is_causal=True, implementation=implementation)

    run = with_gradients(attend)
    inputs, d_out = random_inputs(S=S), normals(2, T, 2, 4, seed=6)
    bad, live = replaced(d_out, (0, 3, 0, 1), np.nan), np.broadcast_to(causal(T, S), (2, 2, T, S))
    sees_bad = np.zeros_like(live)
    sees_bad[0, 0, 3, :4] = True
    for shape in shapes:
        bias = normals(*shape, seed=5)
        (out, gradients), (_, of_bad) = (run((*inputs, bias), d) for d in (d_out, bad))
        (expected, _), of_all = exact(*inputs, live, bias, d_out=d_out)
        axes = tuple(axis for axis, size in enumerate((1,) * (4 - len(shape)) + shape) if size == 1)
        of_all["bias"] = of_all["bias"].sum(axes, keepdims=True).reshape(shape)
        of_all = [of_all[n] for n in (*INPUTS, "bias")]
        values = jax.jit(attend)(*inputs, bias)
        comparisons.assert_close((values, out, gradients), (expected, expected, of_all), 5e-5)
        of_all[3] = np.where(sees_bad.any(axes, keepdims=True).reshape(shape), np.nan, of_all[3])
        cases.assert_alike_where_finite(of_bad[3], of_all[3], 5e-5)


# By a kernel and by the form in blocks, with a mask of pairs and a bias: two programs for many tests.

MASK = cases.cases_of(S)["causal, aligned at the end"][1] & replaced(cases.cases_of(S)["pairs"][1], (1, 1), True)


@pytest.fixture(scope="module")
def both(kernel):
    """The results of both, for arrays in place of the usual ones."""
    runs = with_gradients(kernel.attend()), with_gradients(functools.partial(attention, implementation="xla"))

    def results(mask=MASK, d_out=None, bias=None, **inputs):
        bias = bias_of(kernel) if bias is None else bias.astype(kernel.dtype)
        args = *(dict(zip(INPUTS, kernel.inputs(), strict=True)) | inputs).values(), bias
        d_out = kernel.d_out() if d_out is None else d_out
        return [run(args, d_out, dict(mask=np.broadcast_to(mask, (2, 2, T, S)))) for run in runs]

    return results


def bias_of(kernel, *shape):
    return normals(*(shape or (1, 2)), T, S, seed=5).astype(kernel.dtype)


@parametrize(
    ("shape", "kernel"),
    [((1, 2), "cudnn")],
    exhaustive=[((2, 1), "cudnn"), ((1, 1), "cudnn"), ((2, 2), "textbook"), ((1, 2), "jax.nn")],
    indirect=["kernel"],
    ids=str,
)
def test_a_bias_of_minus_infinity_masks(shape, kernel, both):
    """Whatever the other arrays hold there; the bias has a gradient."""
    live = np.broadcast_to(replaced(causal(T, S, -1), (3, 2), False), (2, 2, T, S))
    finite, inputs, d_out = bias_of(kernel, *shape), kernel.inputs(), kernel.d_out()
    bias = np.where(live[: shape[0], : shape[1]], finite, -np.inf)
    clean, _ = both(True, bias=bias)
    (expected, _), of_all = exact(*inputs, live, np.where(live, np.float64(finite), 0), d_out=d_out)
    of_all["bias"] = of_all["bias"].sum(tuple(axis for axis in (0, 1) if shape[axis] == 1), keepdims=True)
    kernel.assert_close(clean, (expected, [of_all[n] for n in (*INPUTS, "bias")]), 2)
    assert (np.asarray(clean[1][3])[bias == -np.inf] == 0).all()
    for garbage in GARBAGE:
        dirty = dict(zip(INPUTS, poisoned(inputs, live, garbage), strict=True))
        assert_same_bits(both(True, bias=bias, **dirty)[0], clean)


def test_what_is_masked_of_a_bias_does_not_matter(kernel, both):
    clean, expected = both()
    kernel.assert_close(clean, expected, 2)
    masked = ~MASK.any(0, keepdims=True)
    assert masked.any()
    assert (np.asarray(clean[1][3])[masked] == 0).all()
    for garbage in GARBAGE:
        assert_same_bits(both(bias=np.where(masked, np.float32(garbage), bias_of(kernel)))[0], clean)


def test_a_low_finite_bias_does_not_mask(kernel, both):
    """If all keys of a query have one, the masked ones get no weight; cuDNN's weights are those without a bias."""
    for number in (-3e38, -3e12, 3e38):
        bias, other = (
            replaced(bias_of(kernel), (0, slice(None), 2), x)
            for x in (number, 0 if kernel.implementation == "cudnn" else number)
        )
        out, gradients = both(bias=bias)[0]
        kernel.assert_close(out, both(bias=other)[1][0])
        assert all(np.isfinite(np.float32(x)).all() for x in gradients)


def test_nothing_is_hidden(kernel, both):
    """Up to the limit, 1.15e18 for a head of width 8, a number is like others."""
    small = [x * x.dtype.type(1e-19) for x in kernel.inputs()]
    small = dict(zip(INPUTS, small, strict=True))
    clean = np.float32(both(**small)[0][0])
    places = ("query", (0, 3, 0, 3)), ("key", (0, 2, 0, 0)), ("key", (1, 0, 0, 1)), ("value", (1, 3, 0, 2))
    for bad, (name, index) in itertools.product((np.nan, np.inf, -np.inf, 1.1e18, 1.2e18, 1e30), places):
        actual, expected = both(**small | {name: replaced(small[name], index, bad)})
        cases.assert_alike_where_finite(actual, expected, 2 * kernel.rtol)
        out = np.float32(actual[0])
        assert np.isnan(out).any() == (bad != 1.1e18)
        assert bad == 1.1e18 or (out == clean)[~np.isnan(out)].all()
    cases.assert_alike_where_finite(*both(bias=replaced(bias_of(kernel), (0, 1, 3, 2), np.nan)), 2 * kernel.rtol)
    for bad in (np.nan, np.inf):
        actual, expected = both(d_out=replaced(kernel.d_out(), (0, 3, 0, 3), bad))
        cases.assert_alike_where_finite(actual, expected, 2 * kernel.rtol)
        assert np.isnan(np.float32(actual[1][0])).any()


def test_huge_keys_have_no_weight_for_queries_that_do_not_see_them(kernel, both):
    """Their logits exceed what `jax.nn` adds to masked ones."""
    query, key, _ = kernel.inputs()
    (actual, expected), (clean, _) = (
        both(causal(T, S), query=np.abs(query), key=replaced(np.abs(key), (slice(None), 4), x)) for x in (1e18, 0)
    )
    assert np.isfinite(np.float32(actual[0])).all()
    kernel.assert_close(actual[0], expected[0])
    kernel.assert_close(actual[0][:, :4], clean[0][:, :4])


def test_padded_queries_that_the_loss_masks(kernel, both):
    d_out, query = replaced(kernel.d_out(), (1, 4), 0), kernel.inputs()[0]
    clean, actual = (both(d_out=d_out, query=replaced(query, (1, 4), x))[0][1] for x in (0, np.nan))
    assert_same_bits(actual, clean)


# Derivatives and transformations.


def test_the_logsumexp_and_its_gradient():
    kernel, (arguments, live) = KERNELS["textbook"], CASES["causal, dead rows"]
    inputs, cotangents = kernel.inputs(), (kernel.d_out(), normals(2, T, 2, seed=7))
    run = with_gradients(kernel.attend(return_residual=True, **arguments))
    outputs, gradients = clean = run(inputs, cotangents)
    expected, of_all = exact(*inputs, live, d_out=cotangents[0], d_lse=cotangents[1])
    kernel.assert_close((outputs, gradients), (expected, tuple(of_all[n] for n in INPUTS)))
    for garbage in GARBAGE:
        assert_same_bits(run(poisoned(inputs, live, garbage), cotangents), clean)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", ["cudnn", "textbook"], indirect=True)
def test_other_derivatives(kernel):
    arguments, live = CASES["causal, dead rows"]
    inputs, along = kernel.inputs(), kernel.inputs(seed=3)
    own = jax.jit(functools.partial(cases.other_derivatives, kernel.attend(**arguments)))
    expected = jax.jit(functools.partial(cases.other_derivatives, functools.partial(cases.by_formula, live)))
    clean = own(inputs, along)
    wide = [tuple(np.float32(x) for x in arrays) for arrays in (inputs, along)]
    kernel.assert_close(clean, expected(*wide), 5)
    assert_same_bits(own(poisoned(inputs, live, np.nan), along), clean)
    assert_same_bits(own(inputs, poisoned(along, live, np.nan)), clean)


@parametrize(
    ("name", "in_axes", "kernel"),
    [("key lengths", (None, 2, 1), "cudnn")],
    exhaustive=[
        ("pairs", (1, 0, 0), "cudnn"),
        ("key lengths", (0, None, None), "cudnn"),
        ("pairs", (4, 4, 4), "cudnn"),
        ("pairs", (1, 0, 0), "textbook"),
        ("key lengths", (0, None, None), "jax.nn"),
    ],
    indirect=["kernel"],
    ids=str,
)
def test_vmap(name, in_axes, kernel):
    """Over a mask, or lengths, and some of the inputs: cuDNN takes one batch, in front."""
    (given, live), inputs, d_out = CASES[name], kernel.inputs(), kernel.d_out(2)
    ((argument, mask),) = given.items()
    batched = [
        x if axis is None else np.stack([x, np.where(hidden, x.dtype.type(np.nan), 2 * x)], axis)
        for x, axis, hidden in zip(inputs, in_axes, hidden_by(live), strict=True)
    ]

    @jax.jit
    def run(mask, d_out, *inputs):
        out, pull_back = jax.vjp(kernel.attend(**{argument: mask}), *inputs)
        return out, pull_back(d_out)

    together = jax.vmap(run, (0, 0, *in_axes))(np.stack([mask, mask]), d_out, *batched)
    kernel.assert_close(jax.vmap(kernel.attend(**given), in_axes)(*batched), together[0])
    for n in range(2):
        each = [x if axis is None else np.take(x, n, axis) for x, axis in zip(batched, in_axes, strict=True)]
        kernel.assert_close([x[n] for x in jax.tree.leaves(together)], run(mask, d_out[n], *each))


@parametrize("kind", [AxisType.Explicit], exhaustive=[AxisType.Auto], ids=str)
def test_on_a_mesh(kind):
    """On explicit axes each device calls the kernel for its own samples and heads, on automatic ones all call it."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    kernel, inputs, d_out = KERNELS["textbook"], random_inputs(B=4, S=S, N=4, K=2), normals(4, T, 4, 4, seed=6)
    mask, sizes = np.tile(CASES["pairs"][1], (2, 2, 1, 1)), []

    @functools.wraps(kernel.implementation)
    def recorded(query, *others, **keywords):
        sizes.append(query.shape)
        return kernel.implementation(query, *others, **keywords)

    run = with_gradients(functools.partial(attention, implementation=recorded, is_causal=True))
    expected = run(inputs, d_out, dict(mask=mask))
    sizes.clear()
    specs = *(P("x", None, "y"),) * 3, P("x", None, "y"), P("x", "y")
    split = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((*inputs, d_out, mask), specs, strict=True)]
    with jax.set_mesh(mesh):
        actual = run(tuple(split[:3]), split[3], dict(mask=split[4]))
    assert set(sizes) == {(2, T, 2, 4) if kind == AxisType.Explicit else (4, T, 4, 4)}
    assert actual[0].sharding.is_equivalent_to(NamedSharding(mesh, specs[0]), 4) or kind == AxisType.Auto
    kernel.assert_close(actual, expected)
