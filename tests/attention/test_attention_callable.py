"""The contract around the user's own kernel: two of them, each with faults of its own."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    CASES,
    POSITIONS_AND_MODS,
    assert_alike_where_finite,
    attention,
    exact,
    hidden_by,
    normals,
    other_derivatives,
    over_all_pairs,
    poisoned,
    random_inputs,
    replaced,
    window,
    with_gradients,
)
from comparisons import assert_close, assert_same_bits
from jax.experimental import pallas
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

forms = functools.partial(pytest.param, marks=pytest.mark.forms)
CASES = {
    "plain": ({}, np.broadcast_to(True, (2, 2, 6, 7))),
    **over_all_pairs({"causal window": (dict(is_causal=True, local_window_size=2), window(6, 7, 2, 0))}),
    **CASES,
    **POSITIONS_AND_MODS,
}
GARBAGE = np.nan, np.inf, -np.inf, 3e38, -3e38, 5.0
INPUTS = "query", "key", "value"
D_OUT = normals(2, 6, 2, 4, seed=6)
SCALE = 0.5  # of heads of width 4


# The textbook's softmax, which knows a mask and a bias. A query without a key would be NaN, and with it all gradients.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted(scale, query, key, value, bias, mask):
    return forward(scale, query, key, value, bias, mask)[0]


def forward(scale, query, key, value, bias, mask):
    group = query.shape[2] // key.shape[2]
    x = scale * jnp.einsum("btnh,bsnh->bnts", query, jnp.repeat(key, group, 2))
    x = x if bias is None else x + bias
    x = x if mask is None else jnp.where(mask, x, -jnp.inf)
    p = jax.nn.softmax(x)
    out = jnp.einsum("bnts,bsnh->btnh", p, jnp.repeat(value, group, 2))
    return (out, jnp.moveaxis(jax.nn.logsumexp(x, -1), 1, 2)), (query, key, value, bias, p, out)


def reverse(scale, residuals, cotangents):
    (query, key, value, bias, p, out), (d_out, d_lse) = residuals, cotangents
    group = query.shape[2] // key.shape[2]
    d_p = jnp.einsum("btnh,bsnh->bnts", d_out, jnp.repeat(value, group, 2))
    d_x = p * (d_p - jnp.moveaxis(jnp.sum(out * d_out, -1) - d_lse, 1, 2)[..., None])
    of_heads = [jnp.einsum("bnts,btnh->bsnh", *args) for args in ((scale * d_x, query), (p, d_out))]
    d_key, d_value = (d.reshape(*key.shape[:3], group, -1).sum(3) for d in of_heads)
    d_query = scale * jnp.einsum("bnts,bsnh->btnh", d_x, jnp.repeat(key, group, 2))
    shared = [] if bias is None else [n for n in (0, 1) if bias.shape[n] == 1]
    return d_query, d_key, d_value, None if bias is None else jnp.sum(d_x, shared, keepdims=True), None


weighted.defvjp(forward, reverse)


def textbook(query, key, value, *, scale, bias=None, mask=None):
    return weighted(scale, query, key, value, bias, mask)


KERNELS = {
    "jax.nn": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
    "textbook": textbook,
}


def cases(names, *kept):
    """Of each kernel; by default those that are kept."""
    return [case if case in kept else forms(*case) for case in itertools.product(KERNELS, names)]


KEPT = ("jax.nn", "query lengths"), ("textbook", "causal, dead rows"), ("textbook", "pairs")


@pytest.mark.parametrize(("kernel", "name"), cases(CASES, *KEPT))
def test_value_and_gradients(kernel, name):
    arguments, live = CASES[name]
    inputs = random_inputs()
    run = with_gradients(functools.partial(attention, implementation=KERNELS[kernel], **arguments))
    out, gradients = clean = run(inputs, D_OUT)
    bias = np.where(live, 0.5, 0) if name == "bias of -inf" else 0.0
    (expected, _), of_all = exact(*inputs, live, bias, d_out=D_OUT)
    assert_close((out, gradients), (expected, tuple(of_all[n] for n in INPUTS)))
    for x, hidden in zip((out, *gradients), (hidden_by(live)[0], *hidden_by(live)), strict=True):
        assert (np.where(hidden, x, 0) == 0).all()
    for garbage in GARBAGE:
        assert_same_bits(run(poisoned(inputs, live, garbage), D_OUT), clean)
        dead = poisoned((D_OUT, *inputs[1:]), live, garbage)[0]  # a cotangent of a query that sees nothing
        assert_same_bits(run(inputs, dead), clean)


KEYWORDS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "causal window": dict(is_causal=True, local_window_size=(2, 0)),
    "causal, aligned at the end": dict(mask=(1, 1, 6, 7)),
    "window": dict(local_window_size=(2, 1)),
    "window, behind the keys for the last queries": dict(mask=(1, 1, 6, 7)),
    "key lengths": dict(key_value_seq_lengths=(2,)),
    "query lengths": dict(query_seq_lengths=(2,)),
    "keys of every sample": dict(mask=(2, 1, 6, 7)),
    "pairs": dict(mask=(2, 2, 6, 7)),
    "segments": dict(mask=(2, 1, 6, 7)),
    "bias of -inf": dict(bias=(1, 1, 6, 7), mask=(1, 1, 6, 7)),
    "causal and left padding": dict(is_causal=True, mask=(2, 1, 6, 7)),
    "positions": dict(mask=(2, 1, 6, 7)),
    "mod, chunked": dict(mask=(2, 1, 6, 7)),
}


LENGTHS = dict(key_value_seq_lengths=np.array([5, 0]), query_seq_lengths=np.array([6, 3]))
# The arguments of a call, the parameters that the kernel has, and those that it gets besides the scale.
CALLS = {name: (CASES[name][0], None, keywords) for name, keywords in KEYWORDS.items()} | {
    "a window and lengths": (
        dict(local_window_size=(2, 1), **LENGTHS),
        None,
        dict(local_window_size=(2, 1), query_seq_lengths=(2,), mask=(2, 1, 6, 7)),
    ),
    "causal, lengths": (
        dict(is_causal=True, **LENGTHS),
        None,
        dict(is_causal=True, key_value_seq_lengths=(2,), query_seq_lengths=(2,)),
    ),
    "by a mask": (dict(is_causal=True, **LENGTHS), ("mask",), dict(mask=(2, 1, 6, 7))),
    "a window by a mask": (
        dict(is_causal=True, local_window_size=3),
        ("is_causal", "mask"),
        dict(is_causal=True, mask=(1, 1, 6, 7)),
    ),
    "without the lengths of queries": (dict(query_seq_lengths=np.array([6, 0])), (), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_gets_the_keywords_that_it_has_and_for_the_rest_a_mask(name):
    (arguments, parameters, expected), found = CALLS[name], []

    def kernel(query, key, value, **keywords):
        found.append({name: getattr(x, "shape", x) for name, x in keywords.items()})
        return query

    if parameters is not None:
        of_name = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
        kernel.__signature__ = inspect.Signature([of_name(n) for n in ("scale", *parameters)])
    jax.eval_shape(lambda: attention(*random_inputs(), **arguments, implementation=kernel))
    assert found == [dict(scale=SCALE) | expected]


# By a kernel and by the form in blocks, with a mask of pairs and a bias: two programs for many tests.

MASK = CASES["causal, aligned at the end"][1] & replaced(CASES["pairs"][1], (1, 1), True)
BIAS = normals(1, 2, 6, 7, seed=5)
of_each_kernel = pytest.mark.parametrize("both", KERNELS, indirect=True)


@pytest.fixture(scope="module")
def in_blocks():
    return with_gradients(functools.partial(attention, implementation="xla"))


@pytest.fixture(scope="module")
def both(request, in_blocks):
    """The results of both, for arrays in place of the usual ones."""
    runs = with_gradients(functools.partial(attention, implementation=KERNELS[request.param])), in_blocks

    def results(mask=MASK, d_out=D_OUT, bias=BIAS, **inputs):
        args = *(dict(zip(INPUTS, random_inputs(), strict=True)) | inputs).values(), bias
        return [run(args, d_out, dict(mask=np.broadcast_to(mask, (2, 2, 6, 7)))) for run in runs]

    return results


@of_each_kernel
def test_what_is_masked_of_a_bias_does_not_matter(both):
    clean, expected = both()
    assert_close(clean, expected)
    masked = ~MASK.any(0, keepdims=True)
    assert masked.any()
    assert (np.asarray(clean[1][3])[masked] == 0).all()
    for garbage in GARBAGE:
        assert_same_bits(both(bias=np.where(masked, np.float32(garbage), BIAS))[0], clean)


@of_each_kernel
def test_a_bias_of_minus_infinity_masks_and_a_low_one_does_not(both):
    live = MASK.any(0, keepdims=True)
    assert_alike_where_finite(*both(True, bias=np.where(live, BIAS, -np.inf)))
    for number in (-3e38, 3e38):
        (out, gradients), (expected, _) = both(bias=replaced(BIAS, (0, slice(None), 2), number))
        assert_close(out, expected)
        assert all(np.isfinite(x).all() for x in gradients)


@of_each_kernel
def test_nothing_is_hidden(both):
    inputs = dict(zip(INPUTS, random_inputs(), strict=True))
    clean, _ = both()
    places = ("query", (0, 3, 1, 3)), ("key", (0, 2, 0, 0)), ("key", (1, 0, 0, 1)), ("value", (1, 3, 0, 2))
    for bad, (name, index) in itertools.product((np.nan, np.inf, -np.inf, 1e30), places):
        actual, expected = both(**{name: replaced(inputs[name], index, bad)})
        assert_alike_where_finite(actual, expected)
        assert np.isnan(actual[0]).any()
        kept = ~np.isnan(actual[0])
        assert_same_bits(np.asarray(actual[0])[kept], np.asarray(clean[0])[kept])
    assert_alike_where_finite(*both(bias=replaced(BIAS, (0, 1, 3, 2), np.nan)))
    for bad in (np.nan, np.inf):
        actual, expected = both(d_out=replaced(D_OUT, (0, 3, 1, 3), bad))
        assert_alike_where_finite(actual, expected)
        assert np.isnan(actual[1][0]).any()


@of_each_kernel
def test_huge_finite_numbers(both):
    """Up to the limit they are numbers like others; beyond it, masked, they are gone."""
    query, key, value = random_inputs()
    for large in (2.0**58, 1e17):
        changed = dict(query=np.abs(query), key=replaced(np.abs(key), (slice(None), 4), large))
        actual, expected = both(**changed)
        assert_close(actual[0], expected[0])
        assert_close(*(both(value=large * value)[i][0] / large for i in (0, 1)))


@of_each_kernel
def test_padded_queries_that_the_loss_masks(both):
    d_out = replaced(D_OUT, (1, 4), 0)
    clean, actual = (both(d_out=d_out, query=replaced(random_inputs()[0], (1, 4), x))[0][1] for x in (0, np.nan))
    assert_same_bits(actual, clean)


# Derivatives and transformations.


def test_the_logsumexp_and_its_gradient():
    inputs, (arguments, live) = random_inputs(), CASES["causal, dead rows"]
    fn = functools.partial(attention, implementation=textbook, return_residual=True, **arguments)
    cotangents = D_OUT, normals(2, 6, 2, seed=7)
    run = with_gradients(fn)
    outputs, gradients = clean = run(inputs, cotangents)
    expected, of_all = exact(*inputs, live, d_out=D_OUT, d_lse=cotangents[1])
    assert_close(outputs, expected)
    assert_close(gradients, [of_all[n] for n in INPUTS])
    for garbage in GARBAGE:
        assert_same_bits(run(poisoned(inputs, live, garbage), cotangents), clean)


@pytest.mark.parametrize(("kernel", "name"), cases(["causal, dead rows"]))
def test_other_derivatives(kernel, name):
    arguments, live = CASES[name]
    inputs, along = random_inputs(), random_inputs(seed=3)

    own, xla = (jax.jit(functools.partial(other_derivatives, arguments, i)) for i in (KERNELS[kernel], "xla"))
    clean = own(inputs, along)
    assert_close(clean, xla(inputs, along), 1e-4)
    assert_same_bits(own(poisoned(inputs, live, np.nan), along), clean)
    assert_same_bits(own(inputs, poisoned(along, live, np.nan))[:2], clean[:2])


@pytest.mark.parametrize(("kernel", "name"), cases(("key lengths", "pairs"), ("textbook", "pairs")))
def test_vmap(kernel, name):
    arguments, live = CASES[name]
    name, given = next(iter(arguments.items()))
    inputs, other = random_inputs(), random_inputs(seed=3)[0]

    @jax.jit
    def run(query, x):
        fn = functools.partial(attention, implementation=KERNELS[kernel], **{name: x})
        out, pull_back = jax.vjp(fn, query, *inputs[1:])
        return out, pull_back(out)

    queries = np.stack([inputs[0], np.where(hidden_by(live)[0], np.nan, other)])
    together = jax.vmap(run)(queries, np.stack([given, given]))
    for n in range(2):
        assert_close([x[n] for x in jax.tree.leaves(together)], run(queries[n], given))
    assert_close(jax.vmap(run, (0, None))(queries, given), together)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [("textbook", AxisType.Explicit), forms("jax.nn", AxisType.Explicit), forms("textbook", AxisType.Auto)],
)
def test_on_a_mesh(kernel, kind):
    """On explicit axes each device calls the kernel for its own samples and heads, on automatic ones all call it."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    inputs, d_out = random_inputs(B=4, N=4, K=2), normals(4, 6, 4, 4, seed=6)
    mask, sizes = np.tile(CASES["pairs"][1], (2, 2, 1, 1)), []

    @functools.wraps(KERNELS[kernel])
    def recorded(query, *others, **keywords):
        sizes.append(query.shape)
        return KERNELS[kernel](query, *others, **keywords)

    run = with_gradients(functools.partial(attention, implementation=recorded, is_causal=True))
    expected = run(inputs, d_out, dict(mask=mask))
    sizes.clear()
    specs = *(P("x", None, "y"),) * 3, P("x", None, "y"), P("x", "y")
    split = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((*inputs, d_out, mask), specs, strict=True)]
    with jax.set_mesh(mesh):
        actual = run(tuple(split[:3]), split[3], dict(mask=split[4]))
    assert set(sizes) == {(2, 6, 2, 4) if kind == AxisType.Explicit else (4, 6, 4, 4)}
    assert actual[0].sharding.is_equivalent_to(NamedSharding(mesh, specs[0]), 4) or kind == AxisType.Auto
    assert_close(actual, expected)


def test_a_kernel_of_pallas_on_a_mesh():
    """`jax.shard_map` would refuse it if it looked at the types of its results."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])

    def kernel(query, key, value, scale):
        def add(x, y, out):
            out[...] = x[...] + y[...]

        return pallas.pallas_call(add, jax.ShapeDtypeStruct(query.shape, query.dtype), interpret=True)(query, value)

    inputs = random_inputs(S=6, K=2)
    split = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in inputs]
    with jax.set_mesh(mesh):
        assert_same_bits(attention(*split, implementation=kernel), inputs[0] + inputs[2])


def test_a_program_is_found_again():
    traced = []

    def kernel(size, query, key, value, scale, **_):
        traced.append(size)
        return query

    x = random_inputs(K=2)[0]

    def calls(*kernels):
        traced.clear()
        for kernel in kernels:
            jax.eval_shape(functools.partial(attention, implementation=kernel), x, x, x)
        return traced

    once = functools.partial(kernel, 1)
    assert calls(once, once, functools.partial(kernel, 1)) == [1]
    of_array = functools.partial(kernel, np.arange(2))
    assert len(calls(of_array, of_array)) == 1
    assert calls(*(functools.partial(kernel, size) for size in (2, True, 2.0))) == [2, True, 2.0]
    assert calls(*(lambda *args, **keywords: kernel(3, *args, **keywords) for _ in range(2))) == [3, 3]


# What is refused.


def of(query, key, value, *, scale):
    return query


def of_anything(query, key, value, **_):
    return query


class Unhashable:
    __hash__ = None

    def __call__(self, *_, **__): ...


def returns(fn):
    return lambda query, key, value, scale: fn(query)


BESIDE = r"got the function of_anything, beside {}; expected 'xla' or None\. A function of yours is not called with {}"
REFUSED = {
    "sinks": (ValueError, BESIDE, dict(sinks=np.ones(2, np.float32))),
    "score_mod": (ValueError, BESIDE, dict(score_mod=lambda x, *_: x)),
    "dropout": (ValueError, BESIDE, dict(dropout_rate=0.1, dropout_key=jax.random.key(0))),
    "logit_soft_cap": (ValueError, BESIDE, dict(logit_soft_cap=2.0)),
    "an array as scale": (ValueError, BESIDE, dict(scale=jnp.array(0.5))),
    "bias": (TypeError, "got the function of, which takes no keyword {}", dict(bias=np.ones(7), implementation=of)),
    "mask": (
        TypeError,
        "got the function of, which takes no keyword {}; expected one that takes {}. It gets the masks",
        dict(is_causal=True, implementation=of),
    ),
    "scale": (TypeError, "which takes no keyword {}", dict(implementation=lambda q, k, v: q)),
    "no logsumexp": (
        ValueError,
        r"got the function of, which returns no logsumexp; .*\(output, logsumexp\)\. return_residual=True needs it",
        dict(implementation=of, return_residual=True),
    ),
    "another shape": (
        ValueError,
        r"whose output has shape \(2, 2, 6, 4\) and dtype float32; expected shape \(2, 6, 2, 4\) and dtype float32",
        dict(implementation=returns(lambda q: jnp.swapaxes(q, 1, 2))),
    ),
    "another dtype": (
        TypeError,
        "whose output has shape .* and dtype bfloat16; expected shape .* and dtype float32",
        dict(implementation=returns(lambda q: q.astype(jnp.bfloat16))),
    ),
    "no array": (
        TypeError,
        "whose output has type NoneType; expected shape",
        dict(implementation=returns(lambda q: None)),
    ),
    "three results": (TypeError, "whose output has type tuple", dict(implementation=returns(lambda q: (q, q, q)))),
    "a logsumexp of another shape": (
        ValueError,
        r"whose logsumexp has shape \(2, 2, 6\) and dtype float32; expected shape \(2, 6, 2\) and",
        dict(implementation=returns(lambda q: (q, jnp.ones((2, 2, 6)))), return_residual=True),
    ),
    "a rounded logsumexp": (
        TypeError,
        "whose logsumexp has shape .* and dtype float16; expected shape .* and dtype float32",
        dict(implementation=returns(lambda q: (q, jnp.ones((2, 6, 2), jnp.float16))), return_residual=True),
    ),
    "no hash": (TypeError, "got the function Unhashable, which has no hash", dict(implementation=Unhashable())),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_function_cannot_do_is_refused(name):
    error, text, arguments = REFUSED[name]
    with pytest.raises(error, match="^dot_product_attention: implementation: .*" + text.format(name, name)):
        attention(*random_inputs(), **dict(implementation=of_anything) | arguments)


def test_a_ring_is_refused():
    mesh = jax.make_mesh((2,), ("time",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    fn = functools.partial(attention, implementation=of_anything, axis_name="time")
    with pytest.raises(ValueError, match=BESIDE.format("axis_name", "axis_name")):
        jax.shard_map(fn, mesh=mesh, in_specs=P(None, "time"), out_specs=P(None, "time"))(*random_inputs(S=6))


def test_a_function_that_cannot_be_asked_gets_all_keywords():
    """One that is not written in Python: its own TypeError says what it lacks."""
    with pytest.raises(TypeError, match="keyword argument"):
        attention(*random_inputs(), is_causal=True, implementation=max)


def test_sizes_of_16_bits_and_a_scale():
    """The output may be wide: it is rounded once."""
    inputs = random_inputs(dtype=jnp.bfloat16)
    found = []

    def wide(query, key, value, scale):
        found.append(scale)
        return KERNELS["textbook"](*(x.astype(jnp.float32) for x in (query, key, value)), scale=scale)

    out, lse = attention(*inputs, scale=0.25, implementation=wide, return_residual=True)
    assert found == [0.25]
    assert out.dtype == jnp.bfloat16
    expected = exact(*inputs, scale=0.25)
    assert_close((out.astype(jnp.float32), lse), expected, 1e-2)


def test_without_keys_no_kernel_is_called():
    out, lse = attention(*random_inputs(S=0), implementation=Unhashable.__call__, return_residual=True)
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()
