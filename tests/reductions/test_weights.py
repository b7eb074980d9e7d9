"""Derivatives by elements and weights, of reductions, norms and segments, next to a weight or a variance of 0."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from comparisons import assert_close, assert_same_bits
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tiers import parametrize

import masksafe

IDS, ORDER = np.array([0, 0, 1, 1]), np.array([0, 2, 1, 3])  # a device gets a row of each segment
EPSILON, BY = 0.5, (0, 1)


def mean(x, w):
    return jnp.sum(w * x) / jnp.sum(w)


def var(x, w, m=None):
    return mean((x - (mean(x, w) if m is None else m)) ** 2, w)


def standardize(x, w):
    return (x - mean(x, w)) / jnp.sqrt(var(x, w) + EPSILON)


def rms_norm(x, w):
    return x / jnp.sqrt(mean(x**2, w) + EPSILON)


def by_segment(formula):
    return lambda x, w: jnp.concatenate([jnp.atleast_1d(formula(x[s], w[s])) for s in (slice(0, 2), slice(2, 4))])


def norm(name, **more):
    return lambda x, w, **options: getattr(masksafe, name)(x, weights=w, epsilon=EPSILON, **more, **options)


def batch_norm(x, w, **axis_name):
    return [a.ravel() for a in masksafe.batch_norm(x[:, None], weights=w[:, None], epsilon=EPSILON, **axis_name)]


def by_given_mean(algorithm):
    return lambda x, w: masksafe.standardize(x, mean=1.0, algorithm=algorithm, epsilon=EPSILON, weights=w)


def segment(name):
    return lambda x, w, ids=IDS, **axis_name: getattr(masksafe, name)(x, ids, 2, weights=w, **axis_name)


# What each op computes, and the plain formula.
OPS = {
    "var": (lambda x, w, **axis_name: masksafe.var(x, weights=w, **axis_name), var),
    "segment_var": (segment("segment_var"), by_segment(var)),
    "mean": (lambda x, w, **axis_name: masksafe.mean(x, weights=w, **axis_name), mean),
    "sum": (lambda x, w, **axis_name: masksafe.sum(x, weights=w, **axis_name), lambda x, w: jnp.sum(w * x)),
    "var_mean": (
        lambda x, w, **axis_name: masksafe.var_mean(x, weights=w, **axis_name),
        lambda x, w: (var(x, w), mean(x, w)),
    ),
    "segment_sum": (segment("segment_sum"), by_segment(lambda x, w: jnp.sum(w * x))),
    "segment_mean": (segment("segment_mean"), by_segment(mean)),
    "standardize": (norm("standardize"), standardize),
    "layer_norm": (norm("layer_norm"), standardize),
    "rms_norm": (norm("rms_norm"), rms_norm),
    "batch_norm": (batch_norm, lambda x, w: [standardize(x, w), mean(x, w)[None], var(x, w)[None]]),
    "group_norm": (
        lambda x, w: masksafe.group_norm(x[None], 1, weights=w[None], epsilon=EPSILON)[0],
        standardize,
    ),
    "standardize, an array for epsilon": (
        lambda x, w, **axis_name: masksafe.standardize(x, weights=w, epsilon=jnp.asarray(EPSILON), **axis_name),
        standardize,
    ),
    "standardize, stable by a given mean": (
        by_given_mean("stable"),
        lambda x, w: (x - 1) / jnp.sqrt(var(x, w, 1.0) + EPSILON),
    ),
    "standardize, fast by a given mean": (
        by_given_mean("fast"),
        lambda x, w: (x - 1) / jnp.sqrt(mean(x**2, w) - 1 + EPSILON),
    ),
    "MaskedMean": (lambda x, w: masksafe.MaskedMean.of(x, weights=w).value, mean),
    "MaskedMean, by sequence": (
        lambda x, w: masksafe.MaskedMean.of(x.reshape(2, 2), weights=w.reshape(2, 2), by="sequence").value,
        lambda x, w: jnp.mean(by_segment(mean)(x, w)),
    ),
    "MaskedMean, by segment": (
        lambda x, w: masksafe.MaskedMean.of(x, weights=w, by="segment", segment_ids=IDS).value,
        lambda x, w: jnp.mean(by_segment(mean)(x, w)),
    ),
}
OVER_DEVICES = "segment_var", "mean", "var_mean", "segment_mean", "standardize", "rms_norm", "batch_norm"
NORMS = [name for name in OPS if name.endswith("_norm") or name.startswith("standardize")]
CASES = {
    "of weight": ([1, 5, 2, 4], [1, 0.5, 2, 1]),
    "a weight of 0": ([1, 5, 2, 4], [1, 0, 2, 1]),
    "equal elements": ([1, 1, 1, 1], [1, 0.5, 2, 1]),
    "equal elements, others of weight 0": ([1, 5, 4, 1], [1, 0, 0, 2]),
}


def in_one_number(results):
    return sum(jnp.sum(jnp.sin(y + jnp.arange(y.size))) for y in jax.tree.leaves(results))


def derivatives(op, modes="all"):
    """Those by elements and weights: the first ones, and the second ones along a direction."""

    def of_arrays(*arrays):
        number = lambda x, w: in_one_number(op(x, w))  # noqa: E731
        gradients, slopes = jax.grad(number, BY), jax.jacfwd(number, BY)
        direction = tuple(jnp.cos(i + jnp.arange(a.size)) for i, a in enumerate(arrays))
        first, second = [gradients(*arrays)], [jax.jvp(gradients, arrays, direction)[1]]
        if modes != "forward over reverse":
            second.append(jax.vjp(gradients, *arrays)[1](direction))
            with masksafe.forward_mode():
                first.append(slopes(*arrays))
                second.append(jax.jvp(slopes, arrays, direction)[1])
                second += [jax.vjp(slopes, *arrays)[1](direction)] if modes == "all" else []
        return first, second

    return jax.jit(of_arrays)


def over_two_devices(name):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    op = functools.partial(OPS[name][0], axis_name="rows")
    out_specs = {"var_mean": (P(), P()), "batch_norm": [P("rows"), P(), P()]}
    out = out_specs.get(name, P("rows") if name in NORMS else P())
    split = jax.shard_map(op, mesh=mesh, in_specs=P("rows"), out_specs=out)
    return (lambda x, w: split(x[ORDER], w[ORDER], IDS[ORDER])) if name.startswith("segment") else split


def assert_derivatives_are_those_of_the_formula(op, formula, modes):
    with jax.enable_x64(True):
        actual, expected = derivatives(op, modes), derivatives(formula, "forward over reverse")
        for case in CASES.values():
            arrays = [np.float64(a) for a in case]
            for of_modes, (right,) in zip(actual(*arrays), expected(*arrays), strict=True):
                for found in of_modes:
                    chex.assert_trees_all_close(found, right, rtol=1e-9, atol=1e-9)


# Layer norm is `standardize` with a scale and a bias.
@parametrize("name", ["var"], exhaustive=[name for name in OPS if name != "layer_norm"])
def test_derivatives_of_both_orders_are_those_of_the_formula(name):
    assert_derivatives_are_those_of_the_formula(*OPS[name], "all" if name == "var" else "all but reverse over forward")


@parametrize("name", ["var"], exhaustive=OVER_DEVICES)
def test_derivatives_over_devices_are_those_of_the_formula(name):
    modes = "all" if name == "var" else "forward over reverse"
    assert_derivatives_are_those_of_the_formula(over_two_devices(name), OPS[name][1], modes)


def test_figures_of_ops_with_a_mean_or_a_variance_of_their_own():
    equal, weights, ids = np.float32([1, 1]), np.float32([1, 0]), np.zeros(2, int)
    of_segment = lambda x: masksafe.segment_var(x, ids, 1)[0]  # noqa: E731
    means = lambda x, w: (masksafe.mean(x, weights=w), masksafe.segment_mean(x, ids, 1, weights=w)[0])  # noqa: E731

    def standard(w, **mean):
        return masksafe.standardize(np.float32([1, 5]), epsilon=jnp.float32(1), weights=w, **mean)[1]

    @jax.jit
    def figures(x, w):
        with masksafe.forward_mode():
            variances = jax.hessian(masksafe.var)(x), jax.hessian(of_segment)(x)
        by_weights = jax.grad(standard)(w), jax.grad(lambda w: standard(w, mean=1.0, algorithm="stable"))(w)
        return variances, by_weights, [by_both[1, 1] for by_both in jax.jacfwd(jax.jacrev(means), 1)(x, w)]

    variances, by_weights, mixed = figures(equal, weights)
    assert_close(variances, (np.array([[0.5, -0.5], [-0.5, 0.5]]),) * 2)
    assert_close(by_weights, (np.array([0, -36]), np.array([0, -32])))
    assert_close(mixed, [1, 1])


@parametrize("name", ["var"], exhaustive=OPS)
def test_a_tangent_of_weight_0_that_is_not_finite_is_in_no_derivative(name):
    x, w, op = np.float32([1, 5, 2, 4]), np.float32([1, 0, 3, 2]), OPS[name][0]

    @jax.jit
    def along(x_dot):
        with masksafe.forward_mode():
            tangents = jax.jvp(lambda x: op(x, w), (x,), (x_dot,))[1]
        gradients = jax.grad(lambda x, w: in_one_number(op(x, w)), BY)
        return tangents, jax.jvp(gradients, (x, w), (x_dot, jnp.cos(w)))[1]

    x_dot = np.float32([1, 0, 0.5, -1])
    expected = along(x_dot)
    assert all(np.isfinite(y).all() for y in jax.tree.leaves(expected))
    for bad in (np.nan, np.inf, -np.inf):
        assert_same_bits(along(np.where(w == 0, np.float32(bad), x_dot)), expected)


@parametrize("name", ["var"], exhaustive=[name for name in OPS if name not in NORMS])
def test_gradients_by_an_element_of_weight_0(name):
    """A NaN elsewhere is not in its gradient, and a NaN of weight 0 is in no gradient, that by its weight included."""
    gradients = jax.jit(jax.grad(lambda x, w: in_one_number(OPS[name][0](x, w)), BY))
    w = np.float32([1, 0, 3, 2])
    assert gradients(np.float32([np.nan, 5, 2, 4]), w)[0][1] == 0
    for gradient in gradients(np.float32([1, np.nan, 2, 4]), w):
        assert gradient[1] == 0
        assert np.isfinite(gradient).all()
