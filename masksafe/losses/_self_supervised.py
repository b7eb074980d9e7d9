"""Losses that move related embeddings together and others apart."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from masksafe._core import arguments, row_blocks, sharding
from masksafe._core.derivatives import elementwise
from masksafe._core.masks import read_mask, selected
from masksafe._core.precision import promoted, with_wide_numbers
from masksafe._core.public_op import public_op
from masksafe._core.run_time import number_of, sum_of
from masksafe._core.typing import Array, ArrayLike, Axes, DType, Pytree, jitted
from masksafe._softmax import logsumexp
from masksafe.losses._elementwise import broadcast_alike
from masksafe.losses._layout import find_unmasked_rows, wide_selected
from masksafe.losses._negatives import Side, in_blocks, with_block_size
from masksafe.losses._regression import unit_vector


@public_op
def ntxent(
    embeddings: ArrayLike, labels: ArrayLike, temperature: ArrayLike = 0.07, *, where: ArrayLike | None = None
) -> Array:
    r"""The normalised temperature-scaled cross-entropy (NT-Xent) of the pairs of a batch.

    .. math::
      \ell = -\frac{1}{|P|} \sum_{(i, j) \in P} \log \frac{e^{x_{ij}}}{e^{x_{ij}} + \sum_{k : y_k \ne y_i} e^{x_{ik}}},
      \qquad x_{ij} = \frac{1}{\tau} \cos(z_i, z_j)

    over the pairs :math:`P` of different samples with the same label.

    Cosines are computed in blocks of rows, and again for the gradient: those of all pairs are never in memory at once,
    unless a mesh splits the batch outside of `jax.shard_map`.

    Args:
      embeddings: :math:`z`, floats `[batch, dim]`.
      labels: :math:`y` `[batch]`; samples with equal labels form pairs.
      temperature: :math:`\tau`.
      where: booleans; False is masked. A mask `[batch]` masks samples, a mask of the rank of the embeddings masks their
        elements.

    Returns:
      A scalar of the promoted dtype of embeddings and temperature; 0 if there is no unmasked pair. Masked elements have
      gradients of exactly 0. The scale of an embedding has no effect, unlike in optax, which takes no squared norm to
      be below the rounding error of the dtype: 1e-7, but 1e-3 and 8e-3 of float16 and bfloat16. An embedding of zeros,
      which has no direction, has the cosine 0 with every other.

    Raises:
      TypeError: if `embeddings` are not floats or `where` is not boolean.
      ValueError: if the shapes do not fit.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [jnp.nan, 0.0]])
      >>> labels, mask = jnp.array([0, 0, 1, 1]), jnp.array([True, True, True, False])
      >>> print(f"{masksafe.losses.ntxent(embeddings, labels, 1.0, where=mask):.4f}")
      0.4846

    References:
      `optax.losses.ntxent <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.ntxent>`_.

      Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", 2020.
    """
    op = "ntxent"
    z, labels = arguments.as_float_array(op, "embeddings", embeddings), arguments.as_real_array(op, "labels", labels)
    temperature = arguments.as_real_array(op, "temperature", temperature)
    if z.ndim != 2:
        raise ValueError(arguments.message(op, "embeddings", f"shape {z.shape}", "[batch, dim]"))
    arguments.check_shape(op, "labels", labels.shape, z.shape[:1], "the batch of embeddings")
    mask = read_mask(op, where, z.shape, "the input", "elements or rows", (1,))
    mask = None if mask is None else jnp.broadcast_to(mask, z.shape)
    dtype = promoted(z.dtype, temperature)

    # The first sample of a pair is split over devices like the batch; the second is gathered on all devices.
    batch = jax.typeof(z).sharding.spec[0] if sharding.is_sharded(z) else None
    row_label, every_label = _reshard_first_axis(labels, batch), _reshard_first_axis(labels, None)
    unmasked = find_unmasked_rows(mask, (1,))
    unmasked_rows, every_unmasked_row = (_reshard_first_axis(unmasked, axes) for axes in (batch, None))
    units = unit_vector(wide_selected(z, mask), (1,))
    units, every_unit = _reshard_first_axis(units, batch), _reshard_first_axis(units, None)
    rows, columns = Side(units, row_label, unmasked_rows), Side(every_unit, every_label, every_unmasked_row)
    # JAX's gradient of a block keeps several arrays of its pairs at once.
    total, number = with_block_size(_sum_over_pairs, None, 4 * z.shape[0], rows, columns, temperature)
    return (total / jnp.maximum(number, 1)).astype(dtype)


def _sum_over_pairs(size: int | None, rows: Side, columns: Side, temperature: Array) -> tuple[Array, Array]:
    """The sum of the losses of all pairs of samples with the same label, and their number."""

    def sum_block(columns: Side, sums: Pytree, rows_and_index: tuple[Side, Array]) -> tuple[Pytree, None]:
        (units, label, unmasked), index = rows_and_index
        x = jnp.matmul(units, columns.vectors.T, precision=jax.lax.Precision.HIGHEST) / temperature
        same = label[:, None] == columns.keys[None]
        both = jnp.ones_like(same)
        both = both if unmasked is None else both & unmasked[:, None]
        both = both if columns.unmasked is None else both & columns.unmasked[None]
        others = logsumexp(x, -1, keepdims=True, where=both & ~same)  # -inf if there are none
        pairs = both & same & (index[:, None] != jnp.arange(columns.keys.shape[0])[None])
        total, number = sums
        losses = selected(jax.nn.softplus(selected(others - x, pairs)), pairs)
        pairs_per_row = number_of(pairs, 1).astype(number.dtype)  # as an integer the number of pairs could overflow
        return (total + jnp.sum(losses), number + sum_of(pairs_per_row)), None

    zero = jnp.zeros((), rows.vectors.dtype)
    zeros = sharding.vary_with((zero, zero), (rows, columns, temperature))
    index = _reshard_first_axis(jnp.arange(rows.keys.shape[0]), jax.typeof(rows.keys).sharding.spec[0])
    return in_blocks(size, sum_block, rows, columns, zeros, index)[0]


def _reshard_first_axis(x: Array | None, batch: Pytree) -> Pytree:
    """`x`, an array or None, with its first axis split over the axes `batch` of an explicit mesh, and no other axis."""
    if x is None or (batch is None and not sharding.is_sharded(x)):
        return x
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(batch, *[None] * (x.ndim - 1)))


@public_op
def triplet_margin_loss(
    anchors: ArrayLike,
    positives: ArrayLike,
    negatives: ArrayLike,
    axis: int = -1,
    norm_degree: ArrayLike = 2,
    margin: ArrayLike = 1.0,
    eps: ArrayLike = 1e-6,
    *,
    where: ArrayLike | None = None,
) -> Array:
    r"""The triplet loss: how far the negative is from exceeding the distance of the positive by a margin.

    .. math:: \ell = \max(0, d(a, p) - d(a, n) + m), \qquad
      d(u, v) = \Bigl(\sum_i (u_i - v_i)^q + \epsilon\Bigr)^{1/q}

    Args:
      anchors: :math:`a`, floats `[..., dim]`.
      positives: :math:`p`, floats that broadcast with `anchors`.
      negatives: :math:`n`, floats that broadcast with `anchors`.
      axis: the axis of the vectors.
      norm_degree: :math:`q`. As in optax, differences are raised to this power with their signs, which gives a norm
        only if :math:`q` is even.
      margin: :math:`m`.
      eps: :math:`\epsilon`, which keeps the derivative finite where two vectors are equal.
      where: booleans; False is masked. A mask of the rank of the vectors masks elements, a mask of the rank of the loss
        masks rows.

    Returns:
      The losses `[...]`, of the dtype to which JAX promotes all arguments; 0 where all is masked. Masked elements
      have gradients of exactly 0.

    Raises:
      TypeError: if the vectors are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast, `axis` is out of range, or `where` is of another rank.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> anchors = jnp.array([[0.0, 0.0], [jnp.nan, 1.0]])
      >>> positives, negatives = jnp.array([[0.1, 0.1], [1.1, 1.1]]), jnp.eye(2)
      >>> loss = masksafe.losses.triplet_margin_loss
      >>> with jnp.printoptions(precision=4):
      ...     print(loss(anchors, positives, negatives, where=jnp.array([True, False])))
      [0.1414 0.    ]

    References:
      `optax.losses.triplet_margin_loss
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.triplet_margin_loss>`_.

      Balntas et al., "Learning shallow convolutional feature descriptors with triplet losses", 2016.
    """
    op = "triplet_margin_loss"
    named = {"anchors": anchors, "positives": positives, "negatives": negatives}
    arrays = {name: arguments.as_float_array(op, name, x) for name, x in named.items()}
    shape = arguments.broadcast_shapes(op, **{name: x.shape for name, x in arrays.items()})
    axes = arguments.canonical_axes(op, axis, len(shape))
    mask = read_mask(op, where, shape, "the input", "elements or rows", axes)
    a, p, n = arrays.values()
    distances = jnp.result_type(a, p), jnp.result_type(a, n)
    dtype = promoted(*distances, norm_degree, margin, eps)
    known_degree = norm_degree if isinstance(norm_degree, int) else None  # powers of a known integer are products
    vectors, degree = broadcast_alike(arrays.values(), shape), jnp.asarray(norm_degree)
    return _evaluate_triplets(axes, dtype, known_degree, vectors, mask, degree, margin, eps)


@jitted(0, 1, 2)
def _evaluate_triplets(
    axes: Axes,
    dtype: DType,
    known_degree: int | None,
    vectors: list[Array],
    mask: Array | None,
    degree: Array,
    margin: ArrayLike,
    eps: ArrayLike,
) -> Array:
    unmasked_rows = find_unmasked_rows(mask, axes)
    degrees = () if known_degree is not None else (jnp.reshape(degree, (1,) * vectors[0].ndim),)

    raised = lambda x, y, *degree: jnp.power(x - y, *(degree or (known_degree,)))  # noqa: E731
    terms = lambda a, p, n, *degree: tuple(elementwise(raised)(a, x, *degree) for x in (p, n))  # noqa: E731
    sums = row_blocks.sums_over_rows(terms, vectors, mask, axes, *degrees)
    # In an empty row eps is 1, where the derivative of the root of a sum of 0 is finite, and gets no derivative.
    eps = selected(jnp.asarray(eps, sums[0].dtype), unmasked_rows, 1)
    margin = with_wide_numbers(sums[0], margin)[1]
    losses = elementwise(_triplet_loss)(*(jnp.squeeze(s, axes) for s in sums), eps, 1 / degree, margin)
    return selected(losses, unmasked_rows).astype(dtype)


def _triplet_loss(to_positive: Array, to_negative: Array, eps: Array, exponent: Array, margin: Array) -> Array:
    distances = (jnp.power(s + eps, exponent) for s in (to_positive, to_negative))
    return jnp.maximum(functools.reduce(jnp.subtract, distances) + margin, 0)
