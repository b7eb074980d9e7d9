"""What the tests of the losses of a linear layer have in common."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def use_small_class_tiles(choose):
    """So that there are several, and the last one may repeat classes."""
    choose(linear={"class_tile_elements": 60})


def use_form_for_accelerators(choose):
    """It also runs on a CPU, with tiles so small that there are several."""
    sizes = {"least_logits": 100, "most_logits": 100, "least_tokens_if_masked": 12, "most_tokens_of_one_block": 8}
    choose(form="elsewhere", linear=sizes)


def assert_trees_close(actual, desired, **tolerances):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float64(a), np.float64(b), **tolerances), actual, desired)


def assert_every_other_derivative(fn, plain, args):
    """Forward mode and second derivatives of a function of `args`, both ways, against those of a plain form."""

    @jax.jit
    def all_of(*args):
        directions, numbers = tuple(map(jnp.cos, args)), tuple(range(len(args)))
        forward_over_reverse = lambda fn: jax.jvp(jax.grad(fn, numbers), args, directions)[1]  # noqa: E731
        along = lambda *args: sum(map(jnp.vdot, jax.grad(fn, numbers)(*args), directions))  # noqa: E731
        with masksafe.forward_mode():
            first = jax.jvp(fn, args, directions), jax.grad(fn, numbers)(*args)
        first_plain = jax.jvp(plain, args, directions), jax.grad(plain, numbers)(*args)
        second = forward_over_reverse(fn), jax.grad(along, numbers)(*args)
        return (first, *second), (first_plain, *[forward_over_reverse(plain)] * 2)

    with jax.enable_x64(True):
        assert_trees_close(*all_of(*args), rtol=1e-9, atol=1e-11)
