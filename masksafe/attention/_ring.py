r"""Attention over time that is split over the devices of a mesh axis: keys and values go round, queries stay.

In every step a device works on the keys and values that it holds, while they are sent on to the next device. With the
outputs :math:`o_r`, the largest logits :math:`m_r` and the sums of exponentials :math:`l_r` of the steps :math:`r`,
those of all keys are

.. math::
  m = \max_r m_r, \qquad l = \sum_r e^{m_r - m} l_r, \qquad o = \frac1l \sum_r e^{m_r - m} l_r o_r.

The reverse pass needs of the forward pass only these three. With them the weights of a step are those among all keys,
so the cotangents of the steps are parts of sums: those of queries are added up where they are, while those of keys and
values travel with these and return to their own device at the end (Liu, Zaharia and Abbeel, "Ring Attention", 2023).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.precision import wide_dtype
from masksafe._core.sharding import AxisName, Devices, vary_with
from masksafe._core.tiles import divide, once_if
from masksafe._core.typing import Array
from masksafe._core.unfolded import any_of
from masksafe.attention._block import Band, Cotangents, Gradients, Inputs, Plan, Ring
from masksafe.attention._merge import Partial
from masksafe.attention._pairs import OVER_PAIRS, cut, find_live_blocks, words_from_key

_FEW_STEPS = 3  # are not a loop: then nothing is sent that no device needs

_State = TypeVar("_State")


def ring_of(axis_name: AxisName, band: Band | None, num_queries: int, num_keys: int) -> Ring | None:
    """The ring of a mesh axis, with as few steps as a static mask allows, for so many queries and keys per device."""
    if axis_name is None:
        return None
    size = lax.axis_size(axis_name)
    whole = Ring(axis_name, size, 0, size, None)
    if band is None or not (isinstance(num_queries, int) and isinstance(num_keys, int)) or num_keys == 0:
        return whole
    left, right = band
    places = []  # by which the devices are before the one whose queries see their keys
    for device in range(size):
        first_key = 0 if left is None else max(0, device * num_queries - left)
        last_key = min(size * num_keys - 1, (device + 1) * num_queries - 1 + right)
        if first_key <= last_key:
            places += [device - last_key // num_keys, device - first_key // num_keys]
    if not places:
        return Ring(axis_name, size, 0, 1, None)  # of which all is masked
    first, steps = min(places), max(places) - min(places) + 1
    # A whole round begins with the device's own keys, so that nothing is sent before the first step.
    fits = steps < size or (steps == size and first == 0)
    return Ring(axis_name, size, first, steps, band) if fits else whole


class _Moving(NamedTuple):
    """What goes round."""

    k: Array
    v: Array
    positions: Array | None
    segments: Array | None


def run_forward(inner: Callable[[Plan, Inputs], Partial], plan: Plan, inputs: Inputs) -> Partial:
    """`inner(plan, inputs)`; in a ring for the keys of all devices."""
    ring = plan.ring
    if ring is None:
        return inner(plan, inputs)
    # JAX sums the cotangent of an array over devices where it begins to vary: so not in every step.
    q, k, v, adjustments = vary_with(inputs[:-1], inputs)
    inputs = Inputs(q, k, v, adjustments, inputs.pairs)

    def visit(step: Any, moving: _Moving, state: Partial) -> Partial:
        plan_of_step, seen = _seen_in_step(plan, step, moving, inputs)

        def add(state: Partial) -> Partial:
            return state.plus(inner(plan_of_step, seen).multiplied())

        if plan.is_plain:  # JAX differentiates it: so it recomputes each step instead of storing it
            return jax.checkpoint(add)(state)
        return _if_live(plan, add, state, seen)

    nothing: Partial = vary_with(Partial.nothing(q[..., :1], v.shape[-1]), q)
    return _go_round(ring, visit, inputs, nothing).divided()


def run_reverse(
    inner: Callable[[Plan, Cotangents, Inputs], Gradients], plan: Plan, queries: Cotangents, inputs: Inputs
) -> Gradients:
    """`inner(plan, queries, inputs)`; in a ring for the keys of all devices."""
    ring = plan.ring
    if ring is None:
        return inner(plan, queries, inputs)
    devices = Devices(ring.axis_name)
    queries, q, k, v, adjustments = vary_with((queries, *inputs[:-1]), (queries, inputs))
    inputs = Inputs(q, k, v, adjustments, inputs.pairs)

    def visit(step: Any, moving: _Moving, sums: Gradients) -> Gradients:
        plan_of_step, seen = _seen_in_step(plan, step, moving, inputs)
        if not (isinstance(step, int) and step == 0):
            sums = sums._replace(key=devices.from_before(sums.key), value=devices.from_before(sums.value))

        def add(sums: Gradients) -> Gradients:
            d = inner(plan_of_step, queries, seen)
            places = {"s": (_first_key(ring, step, moving.k), moving.k.shape[1])}  # in the bias, that of all keys
            adjustments = sums.adjustments.plus(*d.adjustments, places)
            return Gradients(sums.query + d.query, sums.key + d.key, sums.value + d.value, adjustments)

        return _if_live(plan, add, sums, seen)

    nothing = jax.tree.map(lambda x: jnp.zeros_like(x, wide_dtype(x.dtype)), Gradients(q, k, v, adjustments))
    sums = _go_round(ring, visit, inputs, vary_with(nothing, q))
    way_home = -(ring.first + ring.steps - 1)
    d_k, d_v = (devices.from_before(x, way_home).astype(like.dtype) for x, like in ((sums.key, k), (sums.value, v)))
    return Gradients(sums.query.astype(q.dtype), d_k, d_v, sums.adjustments)


# The way round.


def _go_round(ring: Ring, visit: Callable[[Any, _Moving, _State], _State], inputs: Inputs, state: _State) -> _State:
    """`state` after `visit(step, moving, state)` for every step; what moves is sent on before the visit is over."""
    of_keys = inputs.pairs.key_positions, inputs.pairs.key_segments
    devices = Devices(ring.axis_name)
    moving = _Moving(inputs.k, inputs.v, *devices.varying(of_keys))

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


def _if_live(plan: Plan, add: Callable[[_State], _State], state: _State, seen: Inputs) -> _State:
    """`add(state)` if any of these queries sees any of these keys, else `state`; nothing is sent in there."""
    num_queries, num_keys = seen.q.shape[1], seen.k.shape[1]
    of_queries, of_keys = divide(num_queries, plan.sizes.query_tile), divide(num_keys, num_keys)
    live = find_live_blocks(seen.adjustments.of(seen.pairs), of_queries, of_keys)
    return add(state) if live is None else once_if(any_of(live), add, state)


# What a device sees in a step.


def _first_key(ring: Ring, step: Any, k: Array) -> Array:
    """The index of the first of these keys among those of all devices."""
    return jnp.remainder(lax.axis_index(ring.axis_name) - (ring.first + step), ring.size) * k.shape[1]


def _seen_in_step(plan: Plan, step: Any, moving: _Moving, inputs: Inputs) -> tuple[Plan, Inputs]:
    """The parameters and inputs of this device's queries and the keys that it has in a step."""
    ring, (q, _, _, adjustments, pairs) = plan.ring, inputs
    assert ring is not None
    num_keys, first_key = moving.k.shape[1], _first_key(ring, step, moving.k)
    of_step = functools.partial(jax.tree.map, lambda x: cut(x, OVER_PAIRS, {"s": (first_key, num_keys)}))
    first, end = jax.tree.map(lambda x: jnp.clip(x - first_key, 0, num_keys), (pairs.first_key, pairs.end_key))
    words = words_from_key(pairs.query_words, first_key)
    own = pairs._replace(first_key=first, end_key=end, allowed=of_step(pairs.allowed), query_words=words)
    own = own._replace(key_positions=moving.positions, key_segments=moving.segments)
    band = _band_of_step(ring, step, num_keys) if q.shape[1] == num_keys else None
    seen = Inputs(q, moving.k, moving.v, adjustments._replace(bias=of_step(adjustments.bias)), own)
    return plan._replace(band=band), seen


def _band_of_step(ring: Ring, step: Any, num_keys: int) -> Band | None:
    """How far a query may see by the static mask, from its place among this device's to that of a key."""
    if ring.band is None or not isinstance(step, int):
        return None
    (left, right), behind = ring.band, (ring.first + step) * num_keys
    return (None if left is None else left - behind), right + behind
