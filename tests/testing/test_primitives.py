"""The names of JAX's primitives, by which the search for a NaN knows what an equation does, are those of this JAX."""

import gc

import jax
import jax.extend.core.primitives
import jax.lax.linalg
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

from masksafe.testing import _devices, _influence, _replay, nonfinite_report

IS_NEW = jax.__version_info__ >= (0, 12)
NAMES_OF_OTHER_VERSIONS = {"call", "closed_call"} if IS_NEW else {"reduced_vary_cast", "vary_unreduced_cast"}


def test_every_name_is_that_of_a_primitive():
    tables = [value for module in (_devices, _influence, _replay) for value in vars(module).values()]
    names = set().union(*(table for table in tables if isinstance(table, frozenset)), _influence._INDICES)
    assert len(names) > 140
    known = {x.name for x in gc.get_objects() if isinstance(x, Primitive)}
    assert names - known == NAMES_OF_OTHER_VERSIONS


@pytest.mark.parametrize(("row", "blamed"), [(0, (0, 1)), (2, (2, 0))])
def test_a_ragged_product_passes_a_nan_on_from_its_row(row, blamed):
    x, kernels, sizes = jnp.ones((3, 2)), jnp.ones((2, 2, 2)), jnp.array([1, 2])

    def total(x):
        return jax.lax.ragged_dot(jnp.log(x), kernels, sizes)[row].sum()

    report = nonfinite_report(total, x.at[blamed].set(-1.0).at[1, 0].set(-1.0))
    assert [(source.primitive, source.index) for source in report.sources] == [("log", blamed)]
