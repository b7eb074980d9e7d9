"""The modes in which a function must give one answer.

A mode takes a function of a flat list of arrays, those arrays, and `derive`, which returns the function or its
gradient. It yields named results: none if it does not apply here, several if it stands for several ways to run.
"""

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from masksafe._core.switches import forward_mode
from masksafe.testing._trees import is_float, only_floats, replace_floats, weighted_sum

Function = Callable[..., dict[str, Any]]
Derive = Callable[[Function], Function]
Results = Iterator[tuple[str, dict[str, Any]]]


class Mode(NamedTuple):
    run: Callable[[Function, list[Any], Derive], Results]
    is_derived: bool = False  # whether it differentiates the function
    has_many_ways: bool = False  # whether one mode alone may yield results to compare


def _op_by_op(fn: Function, arrays: list[Any], derive: Derive) -> Results:
    yield "op by op", derive(fn)(*arrays)


def _eager(fn: Function, arrays: list[Any], derive: Derive) -> Results:
    with jax.disable_jit():
        yield "eager", derive(fn)(*arrays)


def _jit(fn: Function, arrays: list[Any], derive: Derive) -> Results:
    yield "jit", jax.jit(derive(fn))(*arrays)


def _vmap(fn: Function, arrays: list[Any], derive: Derive) -> Results:
    if arrays:
        batch = [jnp.stack([_reversed(a), a]) for a in arrays]
        yield "vmap", _second_of_batch(jax.jit(jax.vmap(derive(fn)))(*batch))


def _vmap_last_axis(fn: Function, arrays: list[Any], derive: Derive) -> Results:
    if arrays:
        batch = [jnp.stack([_reversed(a), a], -1) for a in arrays]
        yield "vmap, last axis", _second_of_batch(jax.jit(jax.vmap(derive(fn), in_axes=-1))(*batch))


def _scan(fn: Function, arrays: list[Any], derive: Derive) -> Results:
    def step(carry: None, arrays: list[Any]) -> tuple[None, dict[str, Any]]:
        return None, derive(fn)(*arrays)

    if arrays:
        batch = [jnp.stack([_reversed(a), a]) for a in arrays]
        yield "scan", _second_of_batch(jax.jit(lambda batch: jax.lax.scan(step, None, batch)[1])(batch))


def _reversed(array: Any) -> Any:
    """Other values in the same range, for the example whose results are ignored."""
    return jnp.flip(array)


def _second_of_batch(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: leaf[1] for name, leaf in batch.items()}


def _value_and_grad(fn: Function, arrays: list[Any], derive: Derive) -> Results:
    def loss(chosen: list[Any]) -> tuple[Any, dict[str, Any]]:
        outputs = fn(*replace_floats(arrays, chosen))
        return weighted_sum(outputs, dict.fromkeys(outputs, 1.0)), outputs

    floats = only_floats(arrays)
    if jax.tree.leaves(floats) and any(map(is_float, jax.eval_shape(fn, *arrays).values())):
        yield "value_and_grad", jax.jit(jax.value_and_grad(loss, has_aux=True))(floats)[0][1]


def _jvp(fn: Function, arrays: list[Any], derive: Derive) -> Results:
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
    yield "jvp", outputs


def _checkpoint(fn: Function, arrays: list[Any], derive: Derive) -> Results:
    yield "checkpoint", jax.jit(derive(jax.checkpoint(fn)))(*arrays)


def _transposed(fn: Function, arrays: list[Any], derive: Derive) -> Results:
    run_transposed = jax.jit(lambda *transposed: derive(fn)(*(a.T for a in transposed)))
    yield "transposed", run_transposed(*(a.T for a in arrays))


def _strided(fn: Function, arrays: list[Any], derive: Derive) -> Results:
    yield "strided", jax.jit(derive(fn))(*(_strided_copy(np.asarray(a)) for a in arrays))


def _strided_copy(array: np.ndarray) -> np.ndarray:
    """The same values, in every other place of a larger array in Fortran order."""
    every_other = tuple(slice(None, None, 2) for _ in array.shape)
    larger = np.zeros([2 * n for n in array.shape], array.dtype, order="F")
    larger[every_other] = array
    copy: np.ndarray = larger[every_other]
    return copy


def _donated(fn: Function, arrays: list[Any], derive: Derive) -> Results:
    copies = [jnp.array(a, copy=True) for a in arrays]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        yield "donated", jax.jit(derive(fn), donate_argnums=tuple(range(len(copies))))(*copies)


def _disk(fn: Function, arrays: list[Any], derive: Derive) -> Results:
    with tempfile.TemporaryFile() as file:
        # Bytes are saved, since NumPy's format does not know bfloat16 nor JAX's other float types.
        np.savez(file, *(np.frombuffer(np.asarray(a).tobytes(), np.uint8) for a in arrays))
        file.seek(0)
        with np.load(file) as saved:
            loaded = [saved[f"arr_{i}"].view(a.dtype).reshape(a.shape) for i, a in enumerate(arrays)]
    yield "disk", jax.jit(derive(fn))(*loaded)


def _devices(fn: Function, arrays: list[Any], derive: Derive) -> Results:
    for device in (device for devices in _platforms() for device in devices):
        with jax.default_device(device):
            yield str(device), jax.jit(derive(fn))(*jax.device_put(_on_host(arrays), device))


def _sharded(fn: Function, arrays: list[Any], derive: Derive) -> Results:
    for devices in _platforms():
        if len(devices) > 1:
            mesh = Mesh(np.array(devices), ("devices",))
            for axis, name in ((0, "first"), (-1, "last")):
                split = [jax.device_put(a, _split(mesh, a, axis)) for a in _on_host(arrays)]
                label = f"sharded along the {name} axis over {len(devices)} {devices[0].platform} devices"
                yield label, jax.jit(derive(fn))(*split)


def _split(mesh: Mesh, array: np.ndarray, axis: int) -> NamedSharding:
    if array.ndim == 0 or array.shape[axis] % mesh.size:
        return NamedSharding(mesh, PartitionSpec())
    spec = [None] * array.ndim
    spec[axis] = "devices"  # type: ignore[call-overload]
    return NamedSharding(mesh, PartitionSpec(*spec))


def _platforms() -> Iterator[list[jax.Device]]:
    """The devices of this process, of every platform that is here."""
    for platform in ("cpu", "gpu", "tpu"):
        with contextlib.suppress(RuntimeError):  # raised for a platform that is not here
            yield jax.local_devices(backend=platform)


def _on_host(arrays: list[Any]) -> list[np.ndarray]:
    return [np.asarray(a) for a in arrays]


def _float64(fn: Function, arrays: list[Any], derive: Derive) -> Results:
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.enable_x64(True), jax.default_device(cpu):
        wide = [_widened(a) for a in _on_host(arrays)]
        yield "float64", jax.jit(derive(fn))(*jax.device_put(wide, cpu))


def _widened(array: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(array):
        return array.astype(np.complex128)
    return array.astype(np.float64) if is_float(array) else array


MODES = {
    "op by op": Mode(_op_by_op),
    "eager": Mode(_eager),
    "jit": Mode(_jit),
    "vmap": Mode(_vmap),
    "vmap, last axis": Mode(_vmap_last_axis),
    "scan": Mode(_scan),
    "value_and_grad": Mode(_value_and_grad, is_derived=True),
    "jvp": Mode(_jvp, is_derived=True),
    "checkpoint": Mode(_checkpoint),
    "transposed": Mode(_transposed),
    "strided": Mode(_strided),
    "donated": Mode(_donated),
    "disk": Mode(_disk),
    "devices": Mode(_devices, has_many_ways=True),
    "sharded": Mode(_sharded, has_many_ways=True),
    "float64": Mode(_float64),
}
