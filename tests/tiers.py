"""Which cases of a test run by default, and how programs are compiled that have to be those of users."""

import functools

import jax
import pytest

# By default the tests' processes do without the emitters (conftest.py), which later versions always have.
EMITTERS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else None
optimised_jit = functools.partial(jax.jit, compiler_options=EMITTERS)


def few_of(values, *kept):
    """All values as parameters; those that are not kept run with `-m forms`, for each compiles a program."""
    return [v if v in kept else pytest.param(v, marks=pytest.mark.forms) for v in values]
