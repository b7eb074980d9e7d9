"""The marks that say which tests run, and how: `exhaustive`, `optimised`, and pytest's own words for parameters."""

import functools
import itertools

import jax
import pytest

# XLA's optimisations, which the tests' processes do without by default, and the emitters of XLA's CPU compiler, which
# later versions always have (conftest.py).
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
OPTIMISED |= {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}


def exhaustive_params(values):
    """For a fixture or a list of parameters: values that repeat what the others prove."""
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def parametrize(names, values, *, exhaustive, **options):
    """`pytest.mark.parametrize` by values, and by those in `exhaustive`, which repeat what the others prove."""
    is_one = isinstance(names, str) and "," not in names
    given = set(map(repr, values))
    repeated = [
        pytest.param(*([v] if is_one else v), marks=pytest.mark.exhaustive) for v in exhaustive if repr(v) not in given
    ]
    return pytest.mark.parametrize(names, [*values, *repeated], **options)


def optimised_jit(fn):
    """`jax.jit` with XLA's optimisations; within another program the function itself: JAX refuses options there."""
    program = jax.jit(fn, compiler_options=OPTIMISED)

    @functools.wraps(fn)
    def run(*args):
        is_within = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
        return (fn if is_within else program)(*args)

    run.lower = program.lower
    return run


def pairs(*choices):
    """Rows of the product of some choices, as few as have every pair of two values: a fault seldom needs three."""
    rows = list(itertools.product(*choices))
    found = [set(itertools.combinations(enumerate(map(repr, row)), 2)) for row in rows]
    left, kept = set().union(*found), []
    while left:
        best = max(range(len(rows)), key=lambda i: len(found[i] & left))
        left -= found[best]
        kept.append(rows[best])
    return kept
