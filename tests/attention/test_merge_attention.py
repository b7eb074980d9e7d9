"""merge_attention: attention over the union of disjoint sets of keys."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import assert_close, attention, causal, exact, normals, random_inputs, replaced, with_gradients
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import masksafe

with_residual = functools.partial(attention, return_residual=True)


def in_parts(query, key, value, ends=(2, 5), **arguments):
    """Causal attention of six queries to seven keys, in sets of keys up to those ends."""
    bounds = [0, *ends, key.shape[1]]
    parts = []
    for start, end in itertools.pairwise(bounds):
        keys = slice(start, end)
        parts.append(with_residual(query, key[:, keys], value[:, keys], is_causal=True, causal_offset=-start))
    return masksafe.merge_attention(*zip(*parts, strict=True))


def test_parts_give_what_all_keys_give_with_exact_gradients():
    inputs, cotangents = random_inputs(), (normals(2, 6, 2, 4, seed=6), normals(2, 6, 2, seed=7))
    outputs, gradients = with_gradients(in_parts)(inputs, cotangents)
    expected, of_all = exact(*inputs, causal(6, 7), d_out=cotangents[0], d_lse=cotangents[1])
    assert_close(outputs, expected)
    assert_close(gradients, [of_all[name] for name in ("query", "key", "value")])


def random_parts(number=3, dtype=np.float32, seen=None):
    outs = normals(number, 2, 5, 4, seed=1, dtype=dtype)
    lses = normals(number, 2, 5, seed=2, dtype=dtype) * 5
    seen = np.ones(lses.shape, bool) if seen is None else seen
    return outs, np.where(seen, lses, -np.inf).astype(dtype), seen


def reference(outs, lses):
    """In float64."""
    outs, lses = np.float64(outs), np.float64(lses)
    lse = np.logaddexp.reduce(lses)
    with np.errstate(invalid="ignore"):
        weights = np.where(lses == -np.inf, 0, np.exp(lses - lse))
    return np.sum(weights[..., None] * np.where(np.isneginf(lses)[..., None], 0, outs), 0), lse


@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(seed=st.integers(0, 2**20), number=st.sampled_from([1, 2, 4]))
def test_parts_that_saw_nothing_change_nothing(seed, number):
    outs, lses, seen = random_parts(number, seen=np.random.default_rng(seed).random((number, 2, 5)) < 0.6)
    run, cotangents = with_gradients(masksafe.merge_attention), (normals(2, 5, 4, seed=3), normals(2, 5, seed=4))
    clean = run((np.where(seen[..., None], outs, 0), lses), cotangents)
    assert_close(clean[0], reference(outs, lses))
    empty = ~seen.any(0)
    assert (np.asarray(clean[0][0])[empty] == 0).all()
    assert (np.asarray(clean[0][1])[empty] == -np.inf).all()
    for gradient in clean[1]:
        assert np.isfinite(gradient).all()
        assert (np.asarray(gradient)[~seen] == 0).all()
    for garbage in (np.nan, np.inf):
        dirty = run((np.where(seen[..., None], outs, np.float32(garbage)), lses), cotangents)
        jax.tree.map(np.testing.assert_array_equal, dirty, clean)


def test_all_derivatives():
    outs, lses, _ = random_parts(seen=np.arange(5) > np.array([-1, 0, 1])[:, None, None])
    lses = np.broadcast_to(lses, (3, 2, 5)).copy()
    outs = np.where(np.isneginf(lses)[..., None], np.float32(np.nan), outs)

    def loss(outs, lses):
        out, lse = masksafe.merge_attention(outs, lses)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.square(lse))

    def plain(outs, lses):
        lse = jax.nn.logsumexp(lses, 0)
        return jnp.sum(jnp.sin(jnp.sum(jax.nn.softmax(lses, 0)[..., None] * outs, 0))) + jnp.sum(jnp.square(lse))

    clean, low = np.nan_to_num(outs), np.where(np.isneginf(lses), np.float32(-1e4), lses)
    along = normals(*outs.shape, seed=8), np.where(np.isneginf(lses), 0, normals(*lses.shape, seed=9))
    assert_close(jax.grad(loss, (0, 1))(outs, lses), jax.grad(plain, (0, 1))(clean, low))
    with masksafe.forward_mode():
        assert_close(jax.jvp(loss, (outs, lses), along)[1], jax.jvp(plain, (clean, low), along)[1])
    second = lambda fn, *at: jax.jvp(jax.grad(fn, (0, 1)), at, along)[1]  # noqa: E731
    assert_close(second(loss, outs, lses), second(plain, clean, low), 1e-4)


def test_a_query_without_cotangent_takes_no_part():
    """As in attention: a loss masks padded queries, which may be full of NaN, in all of their parts."""
    query, key, value = random_inputs()
    real = (np.arange(6) < 4)[:, None, None]

    def loss(key, value, query):
        out, lse = in_parts(query, key, value)
        return jnp.sum(jnp.where(real, out, 0) ** 2) + jnp.sum(jnp.where(real[..., 0], lse, 0))

    gradients = jax.jit(jax.grad(loss, (0, 1)))
    clean = gradients(key, value, query)
    dirty = gradients(key, value, replaced(query, np.s_[:, 4:], np.nan))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


def test_a_part_with_nearly_all_weight_keeps_its_digits():
    outs, lses = random_parts(2)[0], np.stack([np.full((2, 5), 30.0), np.full((2, 5), 10.0)]).astype(np.float32)
    d_out = normals(2, 5, 4, seed=3)
    _, (_, d_lses) = with_gradients(lambda *args: masksafe.merge_attention(*args)[0])((outs, lses), d_out)
    weight = 1 / (1 + np.exp(20.0))
    slope = weight * (1 - weight) * np.sum((np.float64(outs[0]) - outs[1]) * d_out, -1)
    np.testing.assert_allclose(d_lses[0], slope, rtol=1e-5)
    np.testing.assert_allclose(d_lses[1], -slope, rtol=1e-5)


@pytest.mark.parametrize("number", [2, 3])
def test_parts_of_one_weight(number):
    """Of weights that were computed apart and rounded, two might exceed a half."""
    for size in (1, 7, 28, 35, 1000):
        outs, lses = random_parts(number)[0], np.full((number, 2, 5), np.log(size), np.float32)
        d_out = normals(2, 5, 4, seed=3)
        _, (_, d_lses) = with_gradients(lambda *args: masksafe.merge_attention(*args)[0])((outs, lses), d_out)
        slopes = np.sum((outs - outs.mean(0)) * d_out, -1) / number
        np.testing.assert_allclose(d_lses, slopes, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes(dtype):
    outs, lses, _ = random_parts()
    narrow = jnp.asarray(outs, dtype)
    out, lse = masksafe.merge_attention(narrow, lses)
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    expected = reference(np.asarray(narrow, np.float64), lses)[0]
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=float(jnp.finfo(dtype).eps), atol=1e-3)


def test_dtypes_are_promoted_even_where_jax_refuses():
    with jax.numpy_dtype_promotion("strict"):
        out, _ = masksafe.merge_attention([jnp.ones((3, 4), jnp.bfloat16), jnp.ones((3, 4))], jnp.ones((2, 3)))
    assert out.dtype == jnp.float32


def test_vmap_scan_and_arguments_in_any_form():
    outs, lses, _ = random_parts()
    expected = masksafe.merge_attention(outs, lses)
    assert_close(masksafe.merge_attention(list(outs), tuple(lses)), expected, 0)
    assert_close(jax.vmap(masksafe.merge_attention, (1, 1))(outs, lses), expected)

    def step(merged, part):
        return masksafe.merge_attention(*zip(merged, part, strict=True)), None

    nothing = jnp.full((2, 5, 4), jnp.nan), jnp.full((2, 5), -jnp.inf)
    assert_close(jax.lax.scan(step, nothing, (outs, lses))[0], expected)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_sharded(kind):
    mesh = jax.make_mesh((2, 1), ("batch", "time"), axis_types=(kind, kind))
    outs, lses, _ = random_parts()
    run, cotangents = with_gradients(masksafe.merge_attention), (normals(2, 5, 4, seed=3), normals(2, 5, seed=4))
    expected = run((outs, lses), cotangents)
    with jax.set_mesh(mesh):
        place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
        args = place(outs, None, "batch"), place(lses, None, "batch")
        actual = run(args, tuple(place(x, "batch") for x in cotangents))
    assert_close(actual, expected)


BAD_ARGUMENTS = {
    "no parts": (([], []), ValueError, "outs: got no array"),
    "numbers": ((np.ones((2, 3, 4)), np.ones((1, 3))), ValueError, "logsumexps: got 1 arrays; expected 2"),
    "no sequence": ((3, 4), TypeError, "outs: got type int; expected a sequence"),
    "integers": ((np.ones((1, 3, 4), int), np.ones((1, 3))), TypeError, r"outs\[0\]: got dtype int"),
    "shapes": (([np.ones((3, 4)), np.ones((2, 4))], np.ones((2, 3))), ValueError, r"outs\[1\]: got shape"),
    "a logsumexp": (([np.ones((3, 4))], [np.ones((3, 4))]), ValueError, r"logsumexps\[0\]: got shape \(3, 4\)"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_are_refused(name):
    arguments, error, text = BAD_ARGUMENTS[name]
    with pytest.raises(error, match=f"^merge_attention: {text}"):
        masksafe.merge_attention(*arguments)
