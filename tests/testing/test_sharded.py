"""The assertions take arrays that are sharded over devices of this process, and refuse those of several processes."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiers import exhaustive_params, parametrize

import masksafe
from masksafe.testing import assert_consistent, assert_gradients, assert_mask_safe, nonfinite_report

LOGITS = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
LABELS = np.arange(8) % 5
WHERE = np.arange(8) > 2


@pytest.fixture(params=[AxisType.Explicit, *exhaustive_params([AxisType.Auto])], ids=str)
def split(request):
    """A function that splits the rows of arrays over eight devices."""
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(request.param,))
    sharding = NamedSharding(mesh, PartitionSpec("rows"))
    with jax.set_mesh(mesh):
        yield lambda *arrays: jax.device_put(arrays, sharding)


def mean_loss(predictions, labels, where):
    return masksafe.mean(labels, where=where) * masksafe.var(predictions, where=where[:, None])


@pytest.mark.exhaustive
def test_functions_that_keep_the_promise(split):
    args = split(LOGITS, LABELS, WHERE)
    assert_consistent(mean_loss, *args, modes=("jit", "value_and_grad", "float64"))
    assert_gradients(mean_loss, *args, order=1)
    assert_mask_safe(mean_loss, *args, masked={0: ~args[2][:, None], 1: ~args[2]}, order=1, garbage=[np.nan, -100])


def test_functions_that_do_not(split):
    logits, where = split(LOGITS, WHERE)
    product = lambda logits, where: jnp.sum(logits * where[:, None])  # noqa: E731
    with pytest.raises(AssertionError, match="A masked element is not gone"):
        assert_mask_safe(product, logits, where, masked={0: ~where[:, None]}, order=0, garbage=[np.nan])


@parametrize("grad", [True], exhaustive=[False])
@parametrize("how", ["shard_map"], exhaustive=["jit"])
def test_the_device_and_the_pass_that_have_a_nan_first(how, grad):
    mesh, spec = jax.make_mesh((2, 2), ("a", "b")), PartitionSpec("a", "b")
    x = jax.device_put(jnp.ones((4, 4)).at[2, 1].set(0), NamedSharding(mesh, spec))
    in_jit = jax.jit(lambda x: jnp.log(x) * 2)
    fn = in_jit if how == "jit" else jax.shard_map(in_jit, mesh=mesh, in_specs=spec, out_specs=spec)
    report = nonfinite_report(fn, x, grad=grad)
    (source,) = report.sources
    assert source.device == {"a": 1, "b": 0}
    assert (source.primitive, source.in_reverse_pass) == ("div" if grad else "log", grad)
    assert source.index == ((0, 1) if how == "shard_map" else (2, 1))
    assert "on the device a=1, b=0" in str(source)
    assert ("in the reverse pass" in str(source)) == grad


def test_what_a_device_gets_from_another_is_bad_there_first():
    mesh, spec = jax.make_mesh((2,), ("a",)), PartitionSpec("a")

    def fn(x):
        received = jax.lax.ppermute(x, "a", [(0, 1), (1, 0)])
        return jnp.where(jax.lax.axis_index("a") == 0, jnp.log(received), 0.0)

    x = jax.device_put(jnp.array([1.0, -1.0]), NamedSharding(mesh, spec))
    (source,) = nonfinite_report(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec), x).sources
    assert (source.primitive, source.device) == ("log", {"a": 0})


# The second process asks alone, and must not wait for the first: not for a refusal, and not with a copy of its own.
TWO_PROCESSES = """
import sys, jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[4]))
from masksafe.testing import *
mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
x = {"a": jax.make_array_from_callback((2, 3), split, lambda index: np.ones((2, 3), np.float32)[index])}
total, masked = lambda x: jnp.sum(x["a"]), {0: {"a": np.array([[True], [False]])}}
local = {"a": np.ones((2, 3), np.float32)}
calls = [
    lambda: assert_consistent(total, x),
    lambda: assert_gradients(total, x),
    lambda: assert_mask_safe(total, x, masked=masked),
    lambda: assert_mask_safe(total, local, masked=masked, empty=(x,)),
    lambda: nonfinite_report(total, x),
]
calls_on_a_copy = [
    lambda: assert_consistent(total, local, modes=("jit", "devices", "sharded", "float64")),
    lambda: assert_gradients(total, local, order=1),
    lambda: assert_mask_safe(lambda x: jnp.sum(x["a"][1]), local, masked=masked, order=0, transforms=("jit",)),
    lambda: print(nonfinite_report(total, local), file=sys.stderr),
]
for call in calls + calls_on_a_copy if sys.argv[4] == "1" else ():
    try:
        call()
    except ValueError as error:
        print(error, file=sys.stderr)
"""


@pytest.mark.slow
def test_arrays_of_several_processes_are_refused():
    statuses, (_, told) = processes.outcome([sys.executable, "-c", TWO_PROCESSES], 2, 1)
    assert statuses == [0, 0]
    ops = "assert_consistent: args", "assert_gradients: args", "assert_mask_safe: args", "assert_mask_safe: empty"
    found = "got float32[2, 3] on the devices of 2 processes; expected an array on devices of this process. Run it in "
    found += "one process, or gather a copy: multihost_utils.process_allgather(x, tiled=True)."
    refusals = [f"{op}[0]['a']: {found}" for op in (*ops, "nonfinite_report: args")]
    lines = [line for line in told if line.startswith(("assert_", "nonfinite_", "Everything"))]
    assert lines == [*refusals, "Everything is finite."]
