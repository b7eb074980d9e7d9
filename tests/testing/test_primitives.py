"""The names of JAX's primitives, by which the search for a NaN knows what an equation does, are those of this JAX."""

import gc

import jax
import jax.extend.core.primitives
import jax.lax.linalg
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

from masksafe.testing import _devices, _replay, _rules, nonfinite_report

IS_NEW = jax.__version_info__ >= (0, 12)
NAMES_OF_OTHER_VERSIONS = {"call", "closed_call"} if IS_NEW else {"reduced_vary_cast", "vary_unreduced_cast"}


@pytest.mark.forms
def test_every_name_is_that_of_a_primitive():
    of_programs = _replay.CALLS | _replay.RETYPINGS | _replay.PLACEMENTS | _replay.ARITHMETIC | set(_replay._STRUCTURES)
    of_rules = {*_rules.KINDS, *_rules.FIRST_INDEX, *_rules.MIXED_AXES, *_rules.DECIDING}
    names = of_programs | of_rules | _devices.EXCHANGES
    assert len(names) > 150
    known = {x.name for x in gc.get_objects() if isinstance(x, Primitive)}
    assert names - known == NAMES_OF_OTHER_VERSIONS


@pytest.mark.parametrize(("row", "blamed"), [(0, (0, 1)), (2, (2, 0))])
def test_a_ragged_product_passes_a_nan_on_from_its_row(row, blamed):
    x, kernels, sizes = jnp.ones((3, 2)), jnp.ones((2, 2, 2)), jnp.array([1, 2])

    def total(x):
        return jax.lax.ragged_dot(jnp.log(x), kernels, sizes)[row].sum()

    report = nonfinite_report(total, x.at[blamed].set(-1.0).at[1, 0].set(-1.0))
    assert [(source.primitive, source.index) for source in report.sources] == [("log", blamed)]


def test_a_product_that_is_wider_than_its_operands_passes_a_nan_on_from_its_row():
    def product(x):
        return jnp.dot(jnp.log(x).astype(jnp.bfloat16), jnp.ones((2, 2), jnp.bfloat16), preferred_element_type=x.dtype)

    report = nonfinite_report(product, jnp.array([[1.0, 2.0], [3.0, -1.0]]))
    assert [(source.primitive, source.index) for source in report.sources] == [("log", (1, 1))]
