"""Every row of the contract's table is compiled for a TPU v5e with its gradients, and for arrays that v5e:2x2 splits.

Nothing is run: that the numbers of what is compiled are right, tests of the contract show with the plan "accelerator".
"""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from program import cotangents_of, may_be_split, split_rows, value_and_gradients
from programs import compile_for, devices
from table import OPS

pytestmark = pytest.mark.optimised


@pytest.mark.parametrize("key", OPS)
def test_every_row(v5e, key):
    op = OPS[key]
    program = compile_for(v5e, functools.partial(value_and_gradients, key), op.where, op.args, cotangents_of(key))
    jax.clear_caches()
    assert program.cycles > 0


# Whether an element is masked or has a weight of 0 is no question of devices.
SPLIT = [key for key, op in OPS.items() if may_be_split(op) and not key.endswith(" of 0")]


@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("key", SPLIT)
def test_every_row_on_a_mesh(v5e, key, kind):
    op = OPS[key]
    mesh = Mesh(np.array(devices(v5e, 4)).reshape(2, 2), ("rows", "others"), axis_types=(kind, kind))
    shapes = jax.tree.map(
        lambda a, split: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=split),
        (op.where, op.args, cotangents_of(key)),
        split_rows(key, mesh),
    )
    with jax.set_mesh(mesh):
        program = compile_for(v5e, functools.partial(value_and_gradients, key), *shapes)
    jax.clear_caches()
    if op.has_rows:
        assert set(program.collectives) <= {"all-reduce"}, program.exchanges
