"""assert_consistent and assert_gradients find what they are there to find, and only that."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, PartitionSpec
from tiers import parametrize

import masksafe
from masksafe.testing import CONSISTENCY_MODES, assert_consistent, assert_gradients
from masksafe.testing._modes import MODES

X = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)


# Without those that compile a program for each of the eight virtual devices.
ON_ONE_DEVICE = tuple(mode for mode in CONSISTENCY_MODES if mode not in ("devices", "sharded"))


def is_traced(x):
    return isinstance(x, jax.core.Tracer)


# Planted bugs, each with the modes that show it and what the report must say of it.


@jax.custom_vjp
def forward_rule_for_another_axis(x):
    return jax.nn.standardize(x, axis=1)


forward_rule_for_another_axis.defvjp(
    lambda x: (jax.nn.standardize(x, axis=-1), x),
    lambda x, d_y: jax.vjp(lambda x: jax.nn.standardize(x, axis=-1), x)[1](d_y),
)


@jax.custom_vjp
def compiled_reverse_rule(x):
    return jnp.sin(x)


compiled_reverse_rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, d: (jnp.cos(x) * d * (2 if is_traced(x) else 1),))


def fast_variance(x):
    x = x + 1e4
    return jax.lax.rsqrt(jnp.mean(x**2, -1) - jnp.mean(x, -1) ** 2 + 1e-6)


@custom_vmap
def batching_rule_that_swaps_the_examples(x):
    return jnp.sin(x)


@batching_rule_that_swaps_the_examples.def_vmap
def _(axis_size, in_batched, x):
    return jnp.sin(x[::-1]), True


@jax.custom_jvp
def forward_rule_with_another_value(x):
    return jnp.sin(x)


forward_rule_with_another_value.defjvp(lambda xs, ts: (jnp.sin(xs[0]) + 1e-3, jnp.cos(xs[0]) * ts[0]))

doubled_if_compiled = lambda x: x * 2 if is_traced(x) else x  # noqa: E731
TRACED = ("op by op", "jit")
COMPILED_REVERSE_RULE = compiled_reverse_rule, TRACED, r"gradient with respect to argument 0, "
BUGS = [
    (forward_rule_for_another_axis, ("jit", "value_and_grad"), r"jit against value_and_grad: 4\d of 48 "),
    (forward_rule_with_another_value, ("jit", "jvp"), r"jit against jvp: "),
    (doubled_if_compiled, ("op by op", "jit", "vmap"), r"op by op against jit, vmap: "),
    (batching_rule_that_swaps_the_examples, ("jit", "vmap", "vmap, last axis"), r"jit against vmap, vmap, last axis: "),
    (fast_variance, ("jit", "float64"), r"jit against float64: "),
    (lambda x: jnp.where(x > 0, x, jnp.nan) if is_traced(x) else x, TRACED, r"max absolute error inf"),
    (lambda x: x.astype(jnp.bfloat16) if is_traced(x) else x, TRACED, r"dtype float32 against bfloat16"),
    (lambda x: x[None] if is_traced(x) else x, TRACED, r"shape \(2, 3, 8\) against \(1, 2, 3, 8\)"),
    (lambda x: jnp.arange(3) + is_traced(x), TRACED, r"3 of 3 elements differ, max absolute error 1"),
    (lambda x: jnp.exp(1j * x) * (1 + is_traced(x)), TRACED, r"complex64"),
    (lambda x: x + (float(x[0, 0, 0]) * 0), TRACED, r"jit raises ConcretizationTypeError: "),
]


@parametrize(("fn", "modes", "text"), [COMPILED_REVERSE_RULE], exhaustive=BUGS)
def test_planted_bug_is_found(fn, modes, text):
    with pytest.raises(AssertionError) as report:
        assert_consistent(fn, X, modes=modes)
    assert re.search(text, str(report.value)), str(report.value)
    assert "Concretization" not in text or isinstance(report.value.__cause__, jax.errors.ConcretizationTypeError)


def test_a_report_lists_every_disagreeing_pair_with_the_worst_element_by_the_names_of_outputs_and_arguments():
    def fn(params, x):
        y = params["w"] * x
        return {"y": compiled_reverse_rule(y), "x": x.at[1].add(0.5) if is_traced(x) else x}

    with pytest.raises(AssertionError) as report:
        assert_consistent(fn, {"w": jnp.ones(3)}, jnp.array([1.0, 2.0, 4.0]), modes=("op by op", "jit", "float64"))
    text = str(report.value)
    worst = "1 of 3 elements differ, max absolute error 0.5, relative 0.2; worst at index (1,): 2.0 against 2.5"
    pairs = [f"    op by op against {mode}: {worst}" for mode in ("jit", "float64")]
    assert "\n".join(["  value output['x'], float32[3]:", *pairs]) in text
    assert "value output['y']" not in text
    assert "gradient with respect to argument 0['w'], float32[3]" in text


def test_function_without_derivatives_is_not_differentiated():
    halve = lambda x: jax.lax.while_loop(lambda x: jnp.abs(x).max() > 0.1, lambda x: x / 2, x)  # noqa: E731
    modes = ("jit", "value_and_grad", "jvp")
    assert_consistent(halve, X, grad=False, modes=modes)
    with pytest.raises(AssertionError, match="value_and_grad raises ValueError: Reverse-mode differentiation"):
        assert_consistent(halve, X, modes=modes)


def test_tolerances_can_be_chosen():
    check = functools.partial(assert_consistent, lambda x: x * 1.001 if is_traced(x) else x, X, modes=TRACED)
    with pytest.raises(AssertionError):
        check()
    check(rtol=1e-2)
    check(rtol=0, atol=0.1)


def test_error_of_every_mode_is_the_functions_own():
    with pytest.raises(ZeroDivisionError):
        assert_consistent(lambda x: x / (1 // 0), X)


# What is right is left alone.


def mlp(params, x, where):
    hidden = jnp.tanh(masksafe.mask_where(~where[..., None], x, 0) @ params["in"])
    return {"logits": hidden @ params["out"], "alive": where.sum(-1)}


def in_a_shard_map(x):
    mesh, rows = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec("d")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=rows, out_specs=rows)(x)


KEY = jax.random.key(0)
PARAMS = {"in": X[0].T @ X[0, :, :5], "out": X[0, :, :5].T}
CLEAN = {
    "bfloat16": (lambda x: jax.nn.softmax(x) @ jnp.eye(8, 2, dtype=x.dtype), jnp.asarray(X, jnp.bfloat16)),
    "float16": (lambda x: jnp.tanh(x) * 3, jnp.asarray(X, jnp.float16)),
    "scalar": (jnp.sin, jnp.array(0.5)),
    "integers only": (lambda x: x // 2, jnp.arange(6)),
    "infinities and NaN": (lambda x: jnp.log(jnp.floor(x)), X),
    "complex": (lambda x: jnp.exp(1j * x) @ jnp.exp(1j * x).T, X[0]),
    "complex argument": (lambda z: jnp.exp(z) @ z.T, X[0] * (1 + 1j)),
    "any output": (lambda x, key: {"key": jax.random.split(key)[0], "n": 3, "half": 0.5, "np": x[0]}, X, KEY),
    "nothing but a key": (lambda key: jax.random.uniform(key, (3,), jnp.float32), KEY),
    "no arguments": (lambda: jnp.arange(3),),
    "a result of 0": (lambda x: jax.nn.softmax(x).sum(-1) - 1, X),
    "a gradient of 0": (lambda x, bias: x + bias - jnp.mean(x + bias, -1, keepdims=True), X, np.float32(0.3)),
    "empty": (lambda x: x * 2, np.zeros((0, 3), np.float32)),
    "shard_map": (in_a_shard_map, X),
    "numbers, keys and None": (
        lambda x, n, key, _: x * n + jax.random.uniform(key, x.shape, "float32"),
        X,
        3,
        KEY,
        None,
    ),
    "parameters": (mlp, PARAMS, X, np.array([[True, False, True], [False] * 3])),
    "custom_vjp of another library": (reverse_rule_of_sin := jax.custom_vjp(jnp.sin), X),
}
reverse_rule_of_sin.defvjp(lambda x: (jnp.sin(x), x), lambda x, d: (jnp.cos(x) * d,))


@parametrize("name", ["infinities and NaN"], exhaustive=CLEAN)
def test_functions_of_every_kind_pass_in_every_mode(name):
    fn, *args = CLEAN[name]
    modes = CONSISTENCY_MODES if name in ("parameters", "shard_map") else ON_ONE_DEVICE
    assert_consistent(fn, *args, modes=modes)


def test_every_mode_runs_here():
    for mode in CONSISTENCY_MODES:
        ways = dict(MODES[mode].run(lambda x: {"": x * 2}, [jnp.asarray(X)]))
        assert len(ways) == {"devices": 8, "sharded": 2}.get(mode, 1)
        assert all(way.startswith(mode) for way in ways if way) or mode == "devices"
        for results in ways.values():
            np.testing.assert_allclose(results[""], 2 * X)


def test_sharded_arrays_are_split_where_their_axes_divide():
    arrays = [jnp.ones((8, 16)), jnp.ones((3, 8)), jnp.ones(())]
    shardings = []

    def look(*arrays):
        jax.debug.inspect_array_sharding(arrays[0], callback=shardings.append)
        return {"": arrays[0]}

    dict(MODES["sharded"].run(look, arrays))
    assert [sharding.shard_shape((8, 16)) for sharding in shardings] == [(1, 16), (8, 2)]


OF_GRADIENTS = "scalar", "numbers, keys and None", "a gradient of 0", "parameters"


@parametrize("name", ["scalar"], exhaustive=OF_GRADIENTS)
def test_right_gradients_pass(name):
    fn, *args = CLEAN[name]
    assert_gradients(jax.jit(fn), *args, order=1)


def test_second_derivatives_are_looked_at():
    @jax.custom_vjp
    def fn(x):
        return x**3

    fn.defvjp(lambda x: (x**3, x), lambda x, d: (3 * jax.lax.stop_gradient(x) ** 2 * d,))
    assert_gradients(fn, jnp.array(2.0), order=1, modes=("rev",))
    with pytest.raises(AssertionError):
        assert_gradients(fn, jnp.array(2.0), order=2, modes=("rev",))
    assert_gradients(jnp.sin, jnp.array(2.0), order=2)


def test_wrong_tangent_is_found_by_the_forward_mode():
    @jax.custom_jvp
    def fn(x):
        return jnp.sin(x)

    fn.defjvp(lambda primals, tangents: (fn(*primals), tangents[0] * 0.99 * jnp.cos(primals[0])))
    with pytest.raises(AssertionError):
        assert_gradients(fn, X, modes=("fwd",))


def test_modes_that_disagree_are_found():
    rule = jax.custom_jvp(jnp.sin)

    @functools.partial(rule.defjvp)
    def _(primals, tangents):
        # Linear, with a transpose that is not its own.
        x, t = primals[0], tangents[0]
        wrong = jax.custom_derivatives.linear_call(lambda c, t: c * t, lambda c, t: 1.0000001 * c * t, jnp.cos(x), t)
        return jnp.sin(x), wrong

    with pytest.raises(AssertionError, match="The two modes of autodiff disagree"):
        assert_gradients(rule, X, order=1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: assert_gradients(jnp.sin, X, modes=("backward",)), "assert_gradients: modes: got .'backward'."),
        (lambda: assert_gradients(jnp.sin, X, modes=()), "assert_gradients: modes: got "),
        (lambda: assert_gradients(jnp.sin, X, order=0), "assert_gradients: order: got value 0; expected 1 or more"),
        (lambda: assert_consistent(jnp.sin, X, modes=("fast",)), "modes: got .'fast'.; expected some of"),
        (lambda: assert_consistent(jnp.sin, X, modes=()), r"modes: got \[\]; expected two or more"),
        (lambda: assert_consistent(jnp.sin, X, modes=["jit", "jit"]), "modes: got .*; expected two or more"),
        (lambda: assert_consistent(lambda x: None, X, modes=TRACED), "assert_consistent: fn: got no output"),
        *(
            (functools.partial(check, jnp.sin, X, **{name: value}), f"{check.__name__}: {name}: got value {value}")
            for check in (assert_consistent, assert_gradients)
            for name in ("rtol", "atol")
            for value in (np.nan, np.inf, -1e-3)
        ),
        (lambda: assert_gradients(lambda x: x, jnp.arange(3)), "assert_gradients: args: got no floats"),
        (lambda: assert_gradients(jnp.fft.fft, X), "assert_gradients: fn: got no output of floats"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()
