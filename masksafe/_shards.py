"""Classes that `jax.shard_map` splits over the devices of a named axis of the mesh.

Every function takes that name first; None says that all classes are on every device, and nothing is exchanged.
"""

import jax.numpy as jnp
from jax import lax

from masksafe._errors import message
from masksafe._typing import Array

AxisName = str | None


def as_axis_name(op: str, axis_name: AxisName) -> AxisName:
    """The name of an axis that is there, or None."""
    if axis_name is None:
        return None
    try:
        lax.axis_size(axis_name)
    except NameError:
        expected = "an axis of the mesh of the jax.shard_map around the call, or None"
        raise ValueError(message(op, "axis_name", f"value {axis_name!r}", expected)) from None
    return axis_name


def of_all(axis_name: AxisName, number: int) -> int:
    """How many classes there are on all devices, each of which has `number`."""
    return number if axis_name is None else number * lax.axis_size(axis_name)


def local_class(axis_name: AxisName, labels: Array, number: int) -> Array:
    """Labels, which count the classes of all devices, as classes of this one; outside [0, number) is elsewhere."""
    return labels if axis_name is None else labels - lax.axis_index(axis_name) * number


def total(axis_name: AxisName, x: Array) -> Array:
    return x if axis_name is None else lax.psum(x, axis_name)


def largest(axis_name: AxisName, x: Array) -> Array:
    """The largest over the devices, the same on each; +inf for a NaN, whose place in an order is nobody's promise."""
    return x if axis_name is None else lax.pmax(jnp.where(jnp.isnan(x), jnp.inf, x), axis_name)


def any_of(axis_name: AxisName, x: Array) -> Array:
    return x if axis_name is None else lax.pmax(x.astype(jnp.int32), axis_name) > 0


# Every device computes the whole loss. To JAX the loss of a rule may vary from device to device; behind the rule it is
# told that all are alike, by their mean, whose derivative hands each device its part of the cotangent; and the rule's
# reverse pass adds the parts up again.


def alike(axis_name: AxisName, loss: Array) -> Array:
    """The loss as one that is the same on all devices."""
    return loss if axis_name is None else lax.pmean(loss, axis_name)


def whole(axis_name: AxisName, d_loss: Array) -> Array:
    """The cotangent of the loss, from the parts that the devices have."""
    return total(axis_name, d_loss)
