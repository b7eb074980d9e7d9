"""Targets and masks of sequences of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from masksafe._core import arguments, label_checks, masks, per_device, platforms, sharding
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, Pytree, jitted


@public_op
def next_tokens(
    tokens: ArrayLike,
    segment_ids: ArrayLike | None = None,
    *,
    steps: int = 1,
    where: ArrayLike | None = None,
    axis_name: sharding.AxisName = None,
) -> tuple[Array, Array]:
    r"""The labels of a language model, which are the tokens `steps` further on, and the mask of those that exist.

    .. math::
      \text{label}_t = \text{token}_{t + s}, \qquad
      \text{mask}_t = \text{where}_t \wedge \text{where}_{t + s} \wedge \text{segment}_t = \text{segment}_{t + s}

    Args:
      tokens: integers `[..., T]`.
      segment_ids: integers that broadcast to the shape of `tokens`: in packed rows, the document of each token. A label
        is never from another document; padding with an id of its own is a document, too. With more than one step an
        id must not return later in its row: two documents with the same id count as one.
      steps: how far ahead a label is, at least 1; more than 1 for the heads of multi-token prediction.
      where: booleans that broadcast to the shape of `tokens`; False is padding, which neither has a label nor is one.
      axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of them, over which time is split, in its order. Each
        device gets the first `steps` tokens of the next one, in one exchange.

    Returns:
      The labels `[..., T]`, of the dtype of `tokens`, and booleans `[..., T]` that say which of them exist. Pass these
      to the loss as `where`. Where there is none, after the last token, across documents and at padding, the label is
      0, so that it can index a table.

    Raises:
      TypeError: if `tokens` or `segment_ids` are not integers, or `where` is not boolean.
      ValueError: if the shapes do not broadcast to that of `tokens`, `steps` is below 1, or there is no axis of the
        name `axis_name`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> tokens, documents = jnp.array([5, 6, 7, 8, 9, 0]), jnp.array([0, 0, 0, 1, 1, -1])
      >>> labels, mask = masksafe.next_tokens(tokens, documents, where=documents >= 0)
      >>> print(labels, mask)
      [6 7 0 9 0 0] [ True  True False  True False False]

    References:
      Labels that leak from one document into another, `pytorch/torchtitan#4075
      <https://github.com/pytorch/torchtitan/issues/4075>`_, and over devices, `AI-Hypercomputer/maxtext#4600
      <https://github.com/AI-Hypercomputer/maxtext/issues/4600>`_.
    """
    op = "next_tokens"
    tokens = arguments.as_integer_array(op, "tokens", tokens)
    if tokens.ndim == 0:
        raise ValueError(arguments.message(op, "tokens", "shape ()", "an array of rank 1 or more"))
    if segment_ids is not None:
        segment_ids = arguments.as_integer_array(op, "segment_ids", segment_ids)
        segment_ids = arguments.at_rank_of(op, "segment_ids", segment_ids, tokens.shape, "tokens")
    where = masks.read_mask(op, where, tokens.shape, "tokens")
    devices = sharding.Devices(sharding.as_axis_name(op, axis_name))
    return _next_tokens(arguments.as_size(op, "steps", steps, 1), devices, tokens, segment_ids, where)


@jitted(0, 1)
def _next_tokens(
    steps: int, devices: sharding.Devices, tokens: Array, ids: Array | None, where: Array | None
) -> tuple[Array, Array]:
    def on_each(devices: sharding.Devices, *here: Pytree) -> tuple[Array, Array]:
        (tokens, ids, where), (labels, ids_there, where_there) = here, _moved(steps, devices, here)
        time, first = tokens.shape[-1], devices.first(tokens.shape[-1])
        index = jnp.arange(time, dtype=jnp.int32) + (0 if first is None else first)
        exists = index < time * devices.size - steps
        mask = jnp.broadcast_to(exists, tokens.shape)
        if ids is not None:
            mask &= ids == ids_there
        if where is not None:
            mask &= where & where_there
        mask = platforms.unfused(mask, on="cpu")  # otherwise XLA stores its parts, 4 MiB of 256x4096 (jax 0.12)
        return masks.selected(labels, mask), mask

    row_axes = [str(axis) for axis in range(tokens.ndim - 1)]
    args = tuple(None if x is None else jnp.broadcast_to(x, tokens.shape) for x in (tokens, ids, where))
    names = PartitionSpec(*row_axes, "time")
    names_of_args = tuple(None if x is None else names for x in args)
    return per_device.along_devices(on_each, devices, args, names_of_args, (names, names), ("time",))


def _moved(steps: int, devices: sharding.Devices, arrays: Pytree) -> Pytree:
    """The elements `steps` further on along time; 0 after the end."""
    if not devices.are_many:  # time may have any size, also a symbolic one, or one below `steps`
        return jax.tree.map(lambda x: jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, steps)])[..., steps:], arrays)
    present, tree = jax.tree.flatten(arrays)  # as integers in one array, for one exchange
    dtype = jnp.int64 if any(x.dtype.itemsize == 8 for x in present) else jnp.int32
    x, (whole, rest) = jnp.stack([x.astype(dtype) for x in present]), divmod(steps, present[0].shape[-1])
    moved = devices.from_before(x[..., rest:], -whole)
    if rest:
        moved = jnp.concatenate([moved, devices.from_before(x[..., :rest], -whole - 1)], -1)
    return jax.tree.unflatten(tree, [m.astype(x.dtype) for m, x in zip(moved, present, strict=True)])


@public_op
def length_mask(lengths: ArrayLike, size: int) -> Array:
    r"""The mask of padded rows of these lengths: True for the first elements of each.

    .. math:: \text{mask}_{\ldots, t} = t < \text{length}_{\ldots}

    Args:
      lengths: integers `[...]`.
      size: the size of the padded axis.

    Returns:
      Booleans `[..., size]`, all False for a length of 0.

    Raises:
      TypeError: if `lengths` are not integers, or `size` is not an int that is known while tracing.
      ValueError: if `size` is negative; while label checks are on, for a length outside of 0 to `size`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> print(masksafe.length_mask(jnp.array([2, 0, 3]), 3))
      [[ True  True False]
       [False False False]
       [ True  True  True]]

    References:
      `tf.sequence_mask <https://www.tensorflow.org/api_docs/python/tf/sequence_mask>`_.
    """
    op = "length_mask"
    lengths = arguments.as_index_array(op, "lengths", lengths)
    size = arguments.as_size(op, "size", size, 0)
    is_valid = lambda lengths: (lengths >= 0) & (lengths <= size)  # noqa: E731
    label_checks.check_elements(op, lengths, lengths.shape, None, is_valid, f"outside [0, {size}]", "lengths")
    return jnp.arange(size, dtype=lengths.dtype) < lengths[..., None]
