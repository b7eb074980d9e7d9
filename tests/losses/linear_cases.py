"""What the tests of the losses of a linear layer have in common."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe

TOKENS, WIDTH, CLASSES = 40, 6, 24
RNG = np.random.default_rng(0)
FEATURES, KERNEL, BIAS = (RNG.normal(size=shape) for shape in ((TOKENS, WIDTH), (WIDTH, CLASSES), (CLASSES,)))
LABELS = RNG.integers(0, CLASSES, TOKENS)
MASK = RNG.random(TOKENS) < 0.6

forms = functools.partial(pytest.param, marks=pytest.mark.forms)
singles = functools.partial(jax.tree.map, np.float32)


def use_platform(choose, name):
    """With blocks and tiles so small that there are several, the last one ragged or with classes that it repeats."""
    choose(linear={"class_tile_elements": 60})
    if name == "elsewhere":  # which also runs on a CPU
        sizes = {"least_logits": 100, "most_logits": 100, "least_tokens_if_masked": 12, "most_tokens_of_one_block": 8}
        choose(form="elsewhere", linear={"fewest_tokens": 12, "token_block_elements_elsewhere": 0, **sizes})


def in_turn(names, default, cases):
    """Parameters with a platform in front: a default one, and by `-m forms` others, in turn of one and the other."""
    turns = [forms(("elsewhere", "cpu")[i // 2 % 2], *case) for i, case in enumerate(cases)]
    return pytest.mark.parametrize(("platform", *names), [*default, *turns], indirect=["platform"])


def assert_trees_close(actual, desired, **tolerances):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float64(a), np.float64(b), **tolerances), actual, desired)


def bad_rows(x):
    return np.isnan(np.asarray(x).reshape(len(x), -1)).any(-1).nonzero()[0].tolist()


def assert_same_function(fn, plain, args):
    """The value and the gradients, in float64, of a function and of a plain form."""
    step = lambda fn, *args: jax.value_and_grad(fn, tuple(range(len(args))))(*args)  # noqa: E731
    with jax.enable_x64(True):
        assert_trees_close(*jax.jit(lambda *args: (step(fn, *args), step(plain, *args)))(*args), rtol=1e-11, atol=1e-12)


def assert_every_derivative(fn, plain, args):
    """The same, with forward mode and second derivatives, both ways."""

    @jax.jit
    def all_of(*args):
        directions, numbers = tuple(map(jnp.cos, args)), tuple(range(len(args)))
        gradient, plain_gradient = jax.grad(fn, numbers), jax.grad(plain, numbers)
        along = lambda *args: sum(map(jnp.vdot, gradient(*args), directions))  # noqa: E731
        with masksafe.forward_mode():
            first = jax.jvp(fn, args, directions), gradient(*args)
        first_plain = jax.jvp(plain, args, directions), plain_gradient(*args)
        second = jax.jvp(gradient, args, directions)[1], jax.grad(along, numbers)(*args)
        return (first, *second), (first_plain, *[jax.jvp(plain_gradient, args, directions)[1]] * 2)

    with jax.enable_x64(True):
        assert_trees_close(*all_of(*args), rtol=1e-9, atol=1e-11)


def assert_hessian_where_cotangents_are_zero(outputs, args):
    """That of half the squared distance from the outputs at the arguments themselves: J^T J, not 0."""

    @jax.jit
    def all_of(*args):
        old, directions, numbers = outputs(*args), tuple(map(jnp.cos, args)), tuple(range(len(args)))
        gradient = jax.grad(lambda *args: jnp.sum(jnp.square(outputs(*args) - old)) / 2, numbers)
        again = jax.grad(lambda *args: sum(map(jnp.vdot, gradient(*args), directions)), numbers)(*args)
        with masksafe.forward_mode():
            desired = jax.vjp(outputs, *args)[1](jax.jvp(outputs, args, directions)[1])
        return gradient(*args), (jax.jvp(gradient, args, directions)[1], again), (desired, desired)

    with jax.enable_x64(True):
        gradients, actual, desired = all_of(*args)
    assert_trees_close(gradients, jax.tree.map(np.zeros_like, gradients), atol=1e-12)
    assert_trees_close(actual, desired, rtol=1e-9, atol=1e-12)


def assert_memory_is_that_of_a_block(loss, *shapes_and_dtypes, rows=1):
    """Of 4096 tokens, 64 features and 32768 classes; `rows` arrays of logits."""
    args = [jax.ShapeDtypeStruct(*both) for both in shapes_and_dtypes]
    program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args).compile()
    of_kernel, of_logits = 4 * 64 * 32768, rows * 4 * 4096 * 32768
    assert program.memory_analysis().temp_size_in_bytes - of_kernel < of_logits / 8
