r"""Attention over time that is split over the devices of a mesh axis: keys and values go round, queries stay.

In every step a device computes with the keys and values that it has, while they are sent on to the next device. With
the outputs :math:`o_r`, the largest logits :math:`m_r` and the sums of exponentials :math:`l_r` of the steps :math:`r`,
those of all keys are

.. math::
  m = \max_r m_r, \qquad l = \sum_r e^{m_r - m} l_r, \qquad o = \frac1l \sum_r e^{m_r - m} l_r o_r.

The reverse pass needs only these three from the forward pass. With them the weights of a step are those among all keys,
so the cotangents of the steps add up: those of queries on their device, while those of keys and values travel with
these and return to their own device at the end (Liu, Zaharia and Abbeel, "Ring Attention", 2023).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.precision import wide_dtype
from masksafe._core.sharding import AxisName, Devices, vary_with
from masksafe._core.tiles import Tile, once_if, whole
from masksafe._core.typing import Array
from masksafe.attention._block import Rows
from masksafe.attention._merge import Partial
from masksafe.attention._pairs import OVER_PAIRS, Pairs, Side, add_at, cut, may_see, with_bias
from masksafe.attention._plan import Operands, Plan, Reach, Ring

_FEW_STEPS = 3  # up to this many steps are not a loop, so that nothing is sent in vain

_State = TypeVar("_State")


def ring_of(axis_name: AxisName, reach: Reach | None, num_queries: int, num_keys: int) -> Ring | None:
    """The ring of a mesh axis, with as few steps as a static mask allows; the numbers are those of one device."""
    if axis_name is None:
        return None
    size = lax.axis_size(axis_name)
    whole = Ring(axis_name, size, 0, size)
    if reach is None or not (isinstance(num_queries, int) and isinstance(num_keys, int)) or num_keys == 0:
        return whole
    left, right = reach
    places = []  # how far before a device the devices are whose keys its queries see
    for device in range(size):
        first_key = 0 if left is None else max(0, device * num_queries - left)
        last_key = min(size * num_keys - 1, (device + 1) * num_queries - 1 + right)
        if first_key <= last_key:
            places += [device - last_key // num_keys, device - first_key // num_keys]
    if not places:
        return Ring(axis_name, size, 0, 1)  # all is masked
    first, steps = min(places), max(places) - min(places) + 1
    # A whole round begins with the device's own keys, so that nothing is sent before the first step.
    fits = steps < size or (steps == size and first == 0)
    return Ring(axis_name, size, first, steps) if fits else whole


class _Moving(NamedTuple):
    """What goes round."""

    k: Array
    v: Array
    positions: Array | None
    segments: Array | None


def run_forward(inner: Callable[[Plan, Operands, Pairs], Partial], plan: Plan, x: Operands, pairs: Pairs) -> Partial:
    """`inner(plan, x, pairs)` for the keys of all devices of the ring."""
    ring = plan.ring
    assert ring is not None
    # JAX sums the cotangent of an array over devices where the array begins to vary: so once, not in every step.
    x = vary_with(x, (x, pairs))

    def visit(step: Any, moving: _Moving, state: Partial) -> Partial:
        seen = _seen_in_step(ring, step, moving, x, pairs)

        def add(state: Partial) -> Partial:
            return state.plus(inner(plan, *seen).multiplied())

        if plan.is_plain:  # JAX differentiates it, and recomputes each step instead of storing it
            return jax.checkpoint(add)(state)
        return _if_any(plan, add, state, *seen)

    empty: Partial = vary_with(Partial.empty(x.q[..., :1], x.v.shape[-1]), x.q)
    return _go_round(ring, visit, x, pairs, empty).divided()


def run_reverse(
    inner: Callable[[Plan, Operands, Rows, Pairs], Operands], plan: Plan, x: Operands, rows: Rows, pairs: Pairs
) -> Operands:
    """`inner(plan, x, rows, pairs)` for the keys of all devices of the ring."""
    ring = plan.ring
    assert ring is not None
    devices = Devices(ring.axis_name)
    x, rows = vary_with((x, rows), (x, rows, pairs))

    def visit(step: Any, moving: _Moving, sums: Operands) -> Operands:
        seen, seen_pairs = _seen_in_step(ring, step, moving, x, pairs)
        if not (isinstance(step, int) and step == 0):
            sums = sums._replace(k=devices.from_before(sums.k), v=devices.from_before(sums.v))

        def add(sums: Operands) -> Operands:
            d = inner(plan, seen, rows, seen_pairs)
            bias, first_key = sums.bias, _first_key(ring, step, moving.k)
            if bias is not None and d.bias is not None:  # the bias of all keys
                keys = {"s": Tile(first_key, moving.k.shape[1], first_key, False)}
                bias = add_at(bias, d.bias.reshape(*bias.shape[:3], -1), "bnts", keys)
            captured = tuple(a + b for a, b in zip(sums.captured, d.captured, strict=True))
            return Operands(sums.q + d.q, sums.k + d.k, sums.v + d.v, bias, captured)

        return _if_any(plan, add, sums, seen, seen_pairs)

    zeros = jax.tree.map(lambda a: jnp.zeros_like(a, wide_dtype(a.dtype)), x)
    sums = _go_round(ring, visit, x, pairs, vary_with(zeros, x.q))
    way_home = -(ring.first + ring.steps - 1)
    dk, dv = (devices.from_before(a, way_home) for a in (sums.k, sums.v))
    return sums._replace(k=dk, v=dv)


# The way round.


def _go_round(
    ring: Ring, visit: Callable[[Any, _Moving, _State], _State], x: Operands, pairs: Pairs, state: _State
) -> _State:
    """`state` after `visit(step, moving, state)` for every step; the arrays are sent on during the visit."""
    devices = Devices(ring.axis_name)
    moving = _Moving(x.k, x.v, *devices.varying((pairs.keys.position, pairs.keys.segment)))

    def step(carry: tuple[_Moving, _State], n: Any) -> tuple[tuple[_Moving, _State], None]:
        moving, state = carry
        return (devices.from_before(moving), visit(n, moving, state)), None

    carry, last = (devices.from_before(moving, ring.first), state), ring.steps - 1
    if ring.steps <= _FEW_STEPS:
        for n in range(last):
            carry, _ = step(carry, n)
    else:
        carry, _ = lax.scan(step, carry, jnp.arange(last, dtype=jnp.int32))
    return visit(last, *carry)


def _if_any(plan: Plan, add: Callable[[_State], _State], state: _State, x: Operands, pairs: Pairs) -> _State:
    """`add(state)` if any of these queries sees any of these keys, else `state`; `add` sends nothing."""
    found = may_see(plan, with_bias(x, pairs), {"t": whole(x.q.shape[1]), "s": whole(x.k.shape[1])})
    return add(state) if found is None else once_if(found, add, state)


# What a device sees in a step.


def _first_key(ring: Ring, step: Any, k: Array) -> Array:
    """The global index of the first of these keys."""
    return jnp.remainder(lax.axis_index(ring.axis_name) - (ring.first + step), ring.size) * k.shape[1]


def _seen_in_step(ring: Ring, step: Any, moving: _Moving, x: Operands, pairs: Pairs) -> tuple[Operands, Pairs]:
    """The operands and pairs of this device's queries with the keys of this step."""
    num_keys, first_key = moving.k.shape[1], _first_key(ring, step, moving.k)
    keys = {"s": Tile(first_key, num_keys, first_key, False)}
    allowed = None if pairs.allowed is None else cut(pairs.allowed, OVER_PAIRS, keys)
    bias = None if x.bias is None else cut(x.bias, "bnts", keys)
    index = (first_key + jnp.arange(num_keys, dtype=jnp.int32))[None]
    own = pairs._replace(keys=Side(index, moving.positions, moving.segments, pairs.keys.length), allowed=allowed)
    return Operands(x.q, moving.k, moving.v, bias, x.captured), own
