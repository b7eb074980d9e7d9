"""Softmaxes, logsumexp and logmeanexp: axes, precision, dtypes, and what jax.nn computes. The table has the rules."""

import functools

import chex
import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import with_gradients
from tiers import parametrize

import masksafe


def logsumexp(x, axis=-1, where=None):
    """With the parameters of the others."""
    return masksafe.logsumexp(x, axis, where=where)


OPS = {
    "logsumexp": (logsumexp, jax.nn.logsumexp),
    "logmeanexp": (lambda x, axis=-1, where=None: masksafe.logmeanexp(x, axis, where), jax.nn.logmeanexp),
    "softmax": (masksafe.softmax, jax.nn.softmax),
    "log_softmax": (masksafe.log_softmax, jax.nn.log_softmax),
}
X = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
WHERE = np.random.default_rng(1).random(X.shape) < 0.6
WHERE[:, :, 0] = True
DEAD = WHERE & (np.arange(3) != 1)[:, None, None]  # with slices that have nothing left
DEAD[2, 3] = False


def values_and_gradients(axis=-1, ops=OPS):
    """Each op, and the gradient of a number made of what is finite, in one program."""
    fns = {name: with_gradients(lambda x, where, op=op: op(x, axis, where)) for name, (op, _) in ops.items()}
    return jax.jit(lambda x, where=None: {name: fn(x, where) for name, fn in fns.items()})


def along_rows(op, axis):
    """The op of the rows in which those axes come one after the other."""
    axes = range(X.ndim) if axis is None else [a % X.ndim for a in np.atleast_1d(axis)]
    order = [*(a for a in range(X.ndim) if a not in axes), *axes]

    def run(x, _, where):
        moved = x.transpose(order)
        kept = moved.shape[: X.ndim - len(axes)]
        rows = None if where is None else where.transpose(order).reshape(*kept, -1)
        out = op(moved.reshape(*kept, -1), -1, rows)
        return out if out.shape == kept else out.reshape(moved.shape).transpose(np.argsort(order))

    return run


# Values and derivatives.


@parametrize(
    ("axis", "masked"),
    [((0, 2), True)],
    exhaustive=[(1, False), ((2, 1), True), ((0, 1, 2), False), (None, True)],
    ids=str,
)
def test_axes_are_those_of_rows(axis, masked):
    where = DEAD if masked else None
    by_rows = {name: (along_rows(op, axis), None) for name, (op, _) in OPS.items()}
    expected = values_and_gradients(axis, by_rows)(X, where)
    chex.assert_trees_all_close(values_and_gradients(axis)(X, where), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPS)
def test_pure_forward_mode_needs_no_context(name):
    ours, theirs = OPS[name]
    x, d_x = (np.random.default_rng(i).normal(size=X.shape).astype(np.float32) for i in (2, 3))
    expected = jax.jvp(lambda x: theirs(x, -1, where=WHERE), (x,), (d_x,))
    garbage = [np.where(WHERE, a, np.nan) for a in (x, d_x)]
    actual = jax.jvp(lambda x: ours(x, -1, where=WHERE), *([a] for a in garbage))
    reduces = name.endswith("exp")
    for a, e in zip(actual, expected, strict=True):
        chex.assert_trees_all_close(a if reduces else a[WHERE], e if reduces else e[WHERE], rtol=1e-5, atol=1e-6)
    _, of_empty_rows = jax.jvp(lambda x: ours(x, -1, where=DEAD), *([a] for a in garbage))
    assert not np.any(of_empty_rows[2, 3])


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_a_reverse_pass_keeps_one_array_and_the_mask(name):
    """Of 16 bits: a wide array would be twice as large. In a loop over layers as well."""
    op, _ = OPS[name]
    x, where = jnp.ones((64, 256), jnp.bfloat16), jnp.ones((64, 256), bool)
    size = lambda fn, *args: sum(a.nbytes for a in jax.tree.leaves(jax.vjp(fn, *args)[1]))  # noqa: E731
    few = 64 * x.shape[0]  # bytes: some numbers for each row
    assert size(lambda x: op(x, where=where), x) <= x.nbytes + where.nbytes + few

    def layers(x):
        layer = lambda x, _: (x + op(x, where=where).reshape(*x.shape[:1], -1), ())  # noqa: E731
        return jax.lax.scan(layer, x, length=8)[0]

    assert size(layers, x) <= 8 * (x.nbytes + where.nbytes + few) + x.nbytes


@parametrize(("offset", "scale"), [(1e4, 1)], exhaustive=[(0, 1), (0, 15)])
def test_the_error_is_at_most_twice_that_of_jax(offset, scale):
    rng = np.random.default_rng(0)
    x = np.float32(offset + scale * rng.normal(size=(64, 50)))

    def of_rows(nn):
        reductions = (functools.partial(op, axis=-1, keepdims=True) for op in (nn.logsumexp, nn.logmeanexp))
        return [nn.softmax, nn.log_softmax, *reductions]

    ours, theirs = of_rows(masksafe), of_rows(jax.nn)
    actual, peers = ([with_gradients(fn)(x) for fn in fns] for fns in (ours, theirs))
    with jax.enable_x64(True):
        exact = jax.device_get([with_gradients(fn)(jnp.asarray(x, float)) for fn in theirs])
    for a, b, e in zip(*map(jax.tree.leaves, (actual, peers, exact)), strict=True):
        few_ulp = 4 * np.finfo(np.float32).eps * max(1, np.abs(e).max())
        assert np.abs(a - e).max() <= max(2 * np.abs(b - e).max(), few_ulp)


@parametrize("dtype", ["float16"], exhaustive=["bfloat16"])
def test_gradients_in_16_bits_are_rounded_once(dtype):
    rng = np.random.default_rng(0)
    x, d_out = (rng.normal(0, 3, (4, 1000)).astype(jnp.dtype(dtype)) for _ in range(2))

    @jax.jit
    def gradients(x, d_out):
        of_rows = jax.vjp(masksafe.log_softmax, x)[1](d_out), jax.vjp(logsumexp, x)[1](d_out[:, 0])
        ids = np.zeros(1000, np.int32)
        return *of_rows, jax.vjp(lambda x: masksafe.segment_log_softmax(x.T, ids, 1).T, x)[1](d_out)

    p = np.stack([definitions.softmax(row) for row in np.float64(x)])
    of_log = np.float64(d_out) - p * np.float64(d_out).sum(-1, keepdims=True)
    for (d_x,), expected in zip(gradients(x, d_out), (of_log, p * np.float64(d_out[:, :1]), of_log), strict=True):
        finfo = jnp.finfo(dtype)
        smallest = float(finfo.smallest_subnormal)
        np.testing.assert_allclose(np.float64(d_x), expected, rtol=0.51 * float(finfo.eps), atol=max(1e-6, smallest))


def test_infinities_beside_masked_elements():
    x = np.float32([[-np.inf, -np.inf, 3], [np.inf, 1, 3], [1, 1, 3]])
    results = jax.device_get(values_and_gradients()(x, np.array([True, True, False])))
    nan, inf = np.nan, np.inf
    np.testing.assert_array_equal(results["softmax"][0], [[nan, nan, 0], [nan, nan, 0], [0.5, 0.5, 0]])
    np.testing.assert_array_equal(results["log_softmax"][0][:2], [[nan, nan, -inf]] * 2)
    np.testing.assert_allclose(results["logsumexp"][0], [-inf, inf, 1 + np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(results["logmeanexp"][0], [-inf, inf, 1], rtol=1e-6)
    for _, gradient in results.values():
        np.testing.assert_array_equal(np.isnan(gradient[1:]).any(-1), [True, False])


# Arguments and dtypes.


def test_empty_arrays_and_lists_of_axes():
    for name, (op, _) in OPS.items():
        out, reduces = op(np.zeros((3, 0), np.float32)), name.endswith("exp")
        np.testing.assert_array_equal(out, np.full(3, -np.inf) if reduces else np.zeros((3, 0)))
        assert jax.eval_shape(lambda x, op=op: op(x, [0, 2]), X).shape == ((4,) if reduces else X.shape)


@parametrize("x64", [False], exhaustive=[True])
def test_integers_become_floats(x64):
    with jax.enable_x64(x64):
        for dtype in (np.int8, np.int32, np.uint8, np.int64):
            x = np.arange(6).reshape(2, 3).astype(dtype)
            of_each = {name: functools.partial(jax.eval_shape, op)(x).dtype for name, (op, _) in OPS.items()}
            assert set(of_each.values()) == {jax.eval_shape(jnp.exp, x).dtype}
        results = jax.jit(lambda x: {name: op(x) for name, (op, _) in OPS.items()})(x)
        expected = {name: np.stack([getattr(definitions, name)(row) for row in np.float64(x)]) for name in OPS}
        chex.assert_trees_all_close(results, expected, rtol=1e-12 if x64 else 1e-6)


@pytest.mark.parametrize(
    ("name", "x", "options", "error", "text"),
    [
        *((name, "cat", {}, TypeError, ".: got type str") for name in OPS),
        *((name, X + 1j, {}, TypeError, "x: got dtype complex.*; expected a float dtype") for name in list(OPS)[2:]),
        ("logmeanexp", X, {"where": np.ones(4, bool)}, ValueError, "where: got shape"),
        ("logsumexp", X, {"b": np.ones(4, np.float32)}, ValueError, "a and b: got shapes"),
    ],
)
def test_bad_arguments_are_refused(name, x, options, error, text):
    with pytest.raises(error, match=f"^{name}: {text}"):
        getattr(masksafe, name)(x, **options)


# What jax.nn.logsumexp takes beyond that.

FACTORS = np.array([1.0, -2.0, 0.0, 3.0, -1.0], np.float32)
CALLS = (  # axis, b, keepdims, return_sign, where
    (),  # all axes by default
    (0, None, True),
    ((0, 2), None, False, True),
    (-1, FACTORS),
    ((1, 2), FACTORS, True, True, WHERE),
)


CALLS_OF_MEAN = (), (-1, WHERE), ((1, 2), None, True)  # axis, where, keepdims


@parametrize("dtype", ["float32"], exhaustive=["complex64", "bfloat16", "int32"])
def test_logsumexp_and_logmeanexp_are_those_of_jax_nn(dtype):
    def results(nn, a):
        return [*(nn.logsumexp(a, *call) for call in CALLS), *(nn.logmeanexp(a, *call) for call in CALLS_OF_MEAN)]

    ours, theirs = jax.jit(lambda a: (results(masksafe, a), results(jax.nn, a)))((3 * X).astype(jnp.dtype(dtype)))
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    ours, theirs = jax.tree.map(lambda a: np.asarray(a, np.complex64), (ours, theirs))
    chex.assert_trees_all_close(ours, theirs, rtol=2e-2 if dtype == "bfloat16" else 1e-5, atol=1e-6)


ONLY_INFINITE = np.array([[-np.inf] * 4, [-np.inf, 0, 1, 2], [-np.inf, -np.inf, 2, 1]], np.float32)
FIRST_TWO = np.arange(4) < 2  # of the third row, too, all that is left is -inf
ROW_CALLS = {
    "plain": {},
    "factors": {"b": np.array([2, 1, -0.1, 1], np.float32)},
    "signs": {"return_sign": True},
    "factors and signs": {"b": np.float32(-2), "return_sign": True},
    "masked": {"where": FIRST_TWO},
    "masked factors": {"where": FIRST_TWO, "b": np.ones((3, 4), np.float32)},
}


@parametrize("dtype", ["float32"], exhaustive=["bfloat16", "complex64"])
def test_logsumexp_of_nothing_but_minus_infinity_has_a_gradient_of_0(dtype):
    """In either mode, and so has its second derivative; other rows have what they have without it."""

    def of_call(call, a):
        fn = lambda a: jax.tree.leaves(masksafe.logsumexp(a.astype(dtype), -1, **call))[0].real  # noqa: E731
        gradient = lambda a: jax.grad(lambda a: fn(a).sum())(a)  # noqa: E731
        with masksafe.forward_mode():
            value, along = jax.jvp(fn, (a,), (jnp.cos(X[0, :3, :4]),))
        return value, along, gradient(a), jax.jvp(gradient, (a,), (jnp.cos(X[0, :3, :4]),))[1]

    results = jax.jit(lambda a: {name: of_call(call, a) for name, call in ROW_CALLS.items()})
    infinite, finite = results(ONLY_INFINITE), results(np.where(np.arange(3)[:, None] == 0, 0, ONLY_INFINITE))
    for name, (value, *derivatives) in infinite.items():
        empty = np.array([True, False, name.startswith("masked")])
        assert (np.asarray(value)[empty] == -np.inf).all()
        assert not any(np.asarray(d)[empty].any() for d in derivatives)
        for ours, same in zip((value, *derivatives), finite[name], strict=True):
            np.testing.assert_array_equal(np.asarray(ours)[1:], np.asarray(same)[1:])
            assert np.isfinite(np.asarray(ours)[~empty]).all()
    np.testing.assert_array_equal(jax.grad(masksafe.logsumexp)(ONLY_INFINITE[0]), 0)  # eager


def test_logsumexp_hides_no_bad_factor_and_no_negative_sum():
    infinite = np.full(2, -np.inf, np.float32)
    assert jnp.isnan(masksafe.logsumexp(infinite, b=np.float32([1, np.nan])))
    assert jnp.isnan(masksafe.logsumexp(np.zeros(2, np.float32), b=-np.ones(2, np.float32)))
