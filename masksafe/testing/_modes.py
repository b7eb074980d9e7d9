"""The modes in which a function must give one answer.

A mode takes a function of a flat list of arrays, and those arrays. It yields named results: none if it does not apply
here, several if it stands for several ways to run.
"""

import contextlib
import functools
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from masksafe._core.switches import forward_mode
from masksafe.testing._trees import as_double, is_float, only_floats, replace_floats, weighted_sum

Function = Callable[..., dict[str, Any]]
Transform = Callable[[Function], Function]
Results = Iterable[tuple[str, dict[str, Any]]]  # by the name of the way, "" for a mode with one way


class Mode(NamedTuple):
    run: Callable[[Function, list[Any]], Results]
    is_derived: bool = False  # whether it differentiates the function
    has_many_ways: bool = False  # whether one mode alone may yield results to compare
    before_gradient: Transform = lambda fn: fn  # how it changes a function that is then differentiated


def _jit(fn: Function, arrays: list[Any]) -> Results:
    yield "", jax.jit(fn)(*arrays)


def _in_batch(transform: Transform, axis: int, fn: Function, arrays: list[Any]) -> Results:
    """The arrays as the second element of a batch; the first has the same range, and its results are ignored."""
    if arrays:
        batch = [jnp.stack([jnp.flip(a), a], axis) for a in arrays]
        yield "", {name: leaf[1] for name, leaf in jax.jit(transform(fn))(*batch).items()}


def _scanned(fn: Function) -> Function:
    return lambda *batch: jax.lax.scan(lambda carry, arrays: (carry, fn(*arrays)), None, batch)[1]


def _value_and_grad(fn: Function, arrays: list[Any]) -> Results:
    def loss(chosen: list[Any]) -> tuple[Any, dict[str, Any]]:
        outputs = fn(*replace_floats(arrays, chosen))
        return weighted_sum(outputs, dict.fromkeys(outputs, 1.0)), outputs

    floats = only_floats(arrays)
    if jax.tree.leaves(floats) and any(map(is_float, jax.eval_shape(fn, *arrays).values())):
        yield "", jax.jit(jax.value_and_grad(loss, has_aux=True))(floats)[0][1]


def _jvp(fn: Function, arrays: list[Any]) -> Results:
    def value_and_tangent(floats: list[Any]) -> tuple[Any, Any]:
        return jax.jvp(lambda chosen: fn(*replace_floats(arrays, chosen)), (floats,), (floats,))

    floats = only_floats(arrays)
    try:
        with forward_mode():
            outputs, _ = jax.jit(value_and_tangent)(floats)
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        return
    yield "", outputs


def _strided_copy(array: np.ndarray) -> np.ndarray:
    """The same values, in every other place of a larger array in Fortran order."""
    every_other = tuple(slice(None, None, 2) for _ in array.shape)
    larger = np.zeros([2 * n for n in array.shape], array.dtype, order="F")
    larger[every_other] = array
    return larger[every_other]


def _donated(fn: Function, arrays: list[Any]) -> Results:
    copies = [jnp.array(a, copy=True) for a in arrays]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        yield "", jax.jit(fn, donate_argnums=tuple(range(len(copies))))(*copies)


def _disk(fn: Function, arrays: list[Any]) -> Results:
    with tempfile.TemporaryFile() as file:
        # Bytes are saved, since NumPy's format does not know bfloat16 nor JAX's other float types.
        np.savez(file, *(np.frombuffer(np.asarray(a).tobytes(), np.uint8) for a in arrays))
        file.seek(0)
        with np.load(file) as saved:
            loaded = [saved[f"arr_{i}"].view(a.dtype).reshape(a.shape) for i, a in enumerate(arrays)]
    yield "", jax.jit(fn)(*loaded)


def _devices(fn: Function, arrays: list[Any]) -> Results:
    for device in itertools.chain(*_platforms()):
        with jax.default_device(device):
            yield str(device), jax.jit(fn)(*jax.device_put([*map(np.asarray, arrays)], device))


def _sharded(fn: Function, arrays: list[Any]) -> Results:
    for devices in _platforms():
        if len(devices) > 1:
            mesh = Mesh(np.array(devices), ("devices",))
            for axis, name in ((0, "first"), (-1, "last")):
                split = [jax.device_put(a, _split(mesh, a, axis)) for a in map(np.asarray, arrays)]
                label = f"sharded along the {name} axis over {len(devices)} {devices[0].platform} devices"
                yield label, jax.jit(fn)(*split)


def _split(mesh: Mesh, array: np.ndarray, axis: int) -> NamedSharding:
    divides = array.ndim > 0 and array.shape[axis] % mesh.size == 0
    spec = ["devices" if divides and n == axis % array.ndim else None for n in range(array.ndim)]
    return NamedSharding(mesh, PartitionSpec(*spec))


def _platforms() -> Iterator[list[jax.Device]]:
    """The devices of this process, of every platform that is here."""
    for platform in ("cpu", "gpu", "tpu"):
        with contextlib.suppress(RuntimeError):  # raised for a platform that is not here
            yield jax.local_devices(backend=platform)


def _float64(fn: Function, arrays: list[Any]) -> Results:
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.enable_x64(True), jax.default_device(cpu):
        wide = [as_double(a) if jnp.issubdtype(a.dtype, jnp.inexact) else np.asarray(a) for a in arrays]
        yield "", jax.jit(fn)(*jax.device_put(wide, cpu))


MODES = {
    "op by op": Mode(lambda fn, arrays: [("", fn(*arrays))]),
    "eager": Mode(lambda fn, arrays: [("", jax.disable_jit()(fn)(*arrays))]),
    "jit": Mode(_jit),
    "vmap": Mode(functools.partial(_in_batch, jax.vmap, 0)),
    "vmap, last axis": Mode(functools.partial(_in_batch, functools.partial(jax.vmap, in_axes=-1), -1)),
    "scan": Mode(functools.partial(_in_batch, _scanned, 0)),
    "value_and_grad": Mode(_value_and_grad, is_derived=True),
    "jvp": Mode(_jvp, is_derived=True),
    "checkpoint": Mode(_jit, before_gradient=jax.checkpoint),
    "transposed": Mode(lambda fn, arrays: _jit(lambda *a: fn(*(x.T for x in a)), [x.T for x in arrays])),
    "strided": Mode(lambda fn, arrays: _jit(fn, [_strided_copy(np.asarray(x)) for x in arrays])),
    "donated": Mode(_donated),
    "disk": Mode(_disk),
    "devices": Mode(_devices, has_many_ways=True),
    "sharded": Mode(_sharded, has_many_ways=True),
    "float64": Mode(_float64),
}
