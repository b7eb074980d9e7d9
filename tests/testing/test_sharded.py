"""The assertions take arrays that are sharded over devices of this process; test_distributed.py has those of others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import masksafe
from masksafe.testing import assert_consistent, assert_gradients, assert_mask_safe, nonfinite_report

LOGITS = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
LABELS = np.arange(8) % 5
WHERE = np.arange(8) > 2


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=str)
def split(request):
    """A function that splits the rows of arrays over eight devices."""
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(request.param,))
    sharding = NamedSharding(mesh, PartitionSpec("rows"))
    with jax.set_mesh(mesh):
        yield lambda *arrays: jax.device_put(arrays, sharding)


def mean_loss(logits, labels, where):
    loss = masksafe.losses.softmax_cross_entropy_with_integer_labels(logits, labels, where=where)
    return masksafe.mean(loss, where=where)


def product_with_mask(logits, labels, where):
    return jnp.sum(logits * where[:, None])


def test_functions_that_keep_the_promise(split):
    args = split(LOGITS, LABELS, WHERE)
    assert_consistent(mean_loss, *args, modes=("jit", "value_and_grad", "float64"))
    assert_gradients(mean_loss, *args, order=1)
    assert_mask_safe(mean_loss, *args, masked={0: ~args[2][:, None], 1: ~args[2]}, order=1, garbage=[np.nan, -100])


def test_functions_that_do_not(split):
    args = split(LOGITS, LABELS, WHERE)
    with pytest.raises(AssertionError, match="A masked element is not gone"):
        assert_mask_safe(product_with_mask, *args, masked={0: ~args[2][:, None]}, order=0, garbage=[np.nan])


@pytest.mark.parametrize("grad", [False, True])
def test_a_nan_is_found_on_its_device(split, grad):
    (x,) = split(np.where(np.arange(8) == 6, 0.0, 1.0).astype(np.float32))
    report = nonfinite_report(lambda x: jnp.sum(jnp.log(x)), x, grad=grad)
    assert report.first.index == (6,)
    assert report.first.primitive == ("div" if grad else "log")
