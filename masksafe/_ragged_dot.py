"""The products of groups of rows, each with a matrix of its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from masksafe._core import label_checks, sharding
from masksafe._core.arguments import as_float_array, as_index_array, message
from masksafe._core.derivatives import nan_in_derivatives, rule, with_derivatives_of
from masksafe._core.linear import finite_or_zero, nan_unless_finite
from masksafe._core.masks import selected
from masksafe._core.precision import widened
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, Arrays, DType, Pytree, jitted

_OP = "ragged_dot"


@public_op
def ragged_dot(
    lhs: ArrayLike, rhs: ArrayLike, group_sizes: ArrayLike, *, preferred_element_type: DTypeLike | None = None
) -> Array:
    r"""The product of each group of rows with the matrix of the group; rows beyond the groups are padding.

    .. math:: y_i = x_i W_{g(i)}

    where the first `group_sizes[0]` rows belong to group 0, the next `group_sizes[1]` to group 1, and so on, such as
    the tokens of a mixture of experts, sorted by their expert.

    Args:
      lhs: the rows :math:`x`, floats `[M, K]`.
      rhs: the matrices :math:`W`, floats `[G, K, N]`.
      group_sizes: integers `[G]`, 0 or more, whose sum is at most M.
      preferred_element_type: the dtype of the result, and in which it is accumulated, as for `jax.lax.ragged_dot`.

    Returns:
      An array `[M, N]`, of the dtype of `jax.lax.ragged_dot`; float16 and bfloat16 are accumulated in float32 and
      rounded once. Padding may hold anything: its rows and their gradients are exactly 0, on every platform, and so is
      the gradient of the matrix of an empty group. What is not finite in a row or a matrix makes elements NaN, in that
      row, or in that column of the group's rows, and in the gradients of that group alone. While label checks are off,
      a negative size, or a group that reaches beyond the last row, makes all rows from the start of that group on NaN.

    Raises:
      TypeError: if `lhs` or `rhs` are not floats, or `group_sizes` are not integers.
      ValueError: if the shapes do not fit, or the axes of an explicit mesh split an argument. While label checks are
        on, for a size that is negative or reaches beyond the last row.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> tokens = jnp.array([[1.0, 2.0], [3.0, 4.0], [jnp.nan, jnp.nan]])
      >>> experts = jnp.stack([jnp.eye(2), 10 * jnp.eye(2)])
      >>> print(masksafe.ragged_dot(tokens, experts, jnp.array([1, 1])))
      [[ 1.  2.]
       [30. 40.]
       [ 0.  0.]]

    References:
      `jax.lax.ragged_dot <https://docs.jax.dev/en/latest/_autosummary/jax.lax.ragged_dot.html>`_, which it replaces.
      Gale et al., `MegaBlocks <https://arxiv.org/abs/2211.15841>`_, for products of experts.
    """
    lhs, rhs = as_float_array(_OP, "lhs", lhs), as_float_array(_OP, "rhs", rhs)
    sizes = as_index_array(_OP, "group_sizes", group_sizes)
    if lhs.ndim != 2:
        raise ValueError(message(_OP, "lhs", f"shape {lhs.shape}", "[M, K]"))
    if rhs.ndim != 3 or rhs.shape[1] != lhs.shape[1]:
        raise ValueError(message(_OP, "rhs", f"shape {rhs.shape}", f"[G, K, N] with K = {lhs.shape[1]}, as lhs has it"))
    if sizes.shape != rhs.shape[:1]:
        expected = f"shape {rhs.shape[:1]}, a size for each matrix of rhs"
        raise ValueError(message(_OP, "group_sizes", f"shape {sizes.shape}", expected))
    if any(map(sharding.is_sharded, (lhs, rhs, sizes))):
        hint = "Call it inside jax.shard_map, with the rows and sizes of each device."
        raise ValueError(message(_OP, "lhs, rhs, group_sizes", "arrays split over a mesh", "whole arrays", hint))
    otherwise = f"negative, or reach beyond the {lhs.shape[0]} rows of lhs"
    is_valid = lambda sizes: _fit(sizes, lhs.shape[0])  # noqa: E731
    label_checks.check_elements(_OP, sizes, sizes.shape, None, is_valid, otherwise, "group_sizes")
    dtype = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
    return _ragged_dot(jnp.dtype(dtype), *sharding.vary_alike((lhs, rhs, sizes)))


def _fit(sizes: Array, rows: int) -> Array:
    """Which groups have a size of 0 or more and end within the rows."""
    return (sizes >= 0) & (jnp.cumsum(jnp.minimum(sizes, rows + 1)) <= rows)


@jitted(0)
def _ragged_dot(dtype: DType, lhs: Array, rhs: Array, sizes: Array) -> Array:
    fit = lax.cummin(_fit(sizes, lhs.shape[0]).astype(sizes.dtype)) == 1  # as do all groups before them
    sizes = jnp.where(fit, sizes, 0)
    row = jnp.arange(lhs.shape[0], dtype=sizes.dtype)[:, None]
    is_row, are_defined = row < jnp.sum(sizes, dtype=sizes.dtype), jnp.all(fit)
    is_padding = are_defined & ~is_row
    # JAX may multiply a row by every matrix, and all but one of the products by 0: so all have to be finite.
    lhs = selected(lhs, ~is_padding) * jnp.where(is_row | is_padding, 1, jnp.nan).astype(lhs.dtype)
    rhs = selected(rhs, (sizes > 0)[:, None, None])
    group = jnp.sum(row >= jnp.cumsum(sizes)[None], 1)
    bad_rows, bad_columns = jnp.sum(nan_unless_finite(lhs), 1, keepdims=True), jnp.sum(nan_unless_finite(rhs), 1)
    out = _product(dtype, finite_or_zero(lhs), finite_or_zero(rhs), sizes)
    bad = bad_rows.astype(dtype) + jnp.pad(bad_columns.astype(dtype), ((0, 1), (0, 0)))[group]
    return selected(nan_in_derivatives(out + bad), ~is_padding)


# JAX has no reverse mode of the product that is the gradient of the matrices. For second derivatives of both products
# it differentiates dense ones, which have each group of rows in an array of all rows.


def _in_groups(x: Array, sizes: Array) -> Array:
    """The rows of each group, with zeros in place of others, `[G, M, ...]`."""
    row, ends = jnp.arange(x.shape[0], dtype=sizes.dtype)[None], jnp.cumsum(sizes)[:, None]
    is_in_group = (row >= ends - sizes[:, None]) & (row < ends)
    return selected(widened(x)[None], is_in_group[:, :, None])


@with_derivatives_of(
    lambda dtype, x, w, sizes: jnp.einsum("gmk,gkn->mn", _in_groups(x, sizes), widened(w)).astype(dtype)
)
def _rows(dtype: DType, x: Array, w: Array, sizes: Array) -> Array:
    return _grouped(_Product(dtype, contracted=1, groups=(0,), folds=((0, 0), (2, 1))), x, w, sizes)


@with_derivatives_of(
    lambda dtype, x, y, sizes: jnp.einsum("gmk,gmn->gkn", _in_groups(x, sizes), _in_groups(y, sizes)).astype(dtype)
)
def _matrices(dtype: DType, x: Array, y: Array, sizes: Array) -> Array:
    return _grouped(_Product(dtype, contracted=0, groups=(), folds=((1, 1), (1, 2))), x, y, sizes)


class _Product(NamedTuple):
    """A product whose rows, the first axis of the left operand, lie in groups."""

    dtype: DType
    contracted: int  # an axis of both operands
    groups: tuple[int, ...]  # the axis of the right operand that numbers them; else they are the result's first axis
    folds: tuple[tuple[int, int], ...]  # of each operand an axis that has room for samples, and that of the result

    def of(self, samples: int, x: Array, y: Array, sizes: Array) -> Array:
        """The product; if `samples` is 1, that of each sample, which the first axis of all arrays numbers."""
        contracted, sample, axis = [self.contracted + samples], [0] * samples, 0 if self.groups else samples
        numbers = (contracted, contracted), (sample, sample)
        dimensions = lax.RaggedDotDimensionNumbers(numbers, [samples], [g + samples for g in self.groups])
        split = None
        for kind in (jax.typeof(a).sharding for a in (x, y, sizes)):
            if AxisType.Explicit in kind.mesh.axis_types:  # JAX asks how the result is split
                split = NamedSharding(kind.mesh, PartitionSpec(*[None] * axis, *kind.spec[:samples]))
        options: dict[str, Any] = {"preferred_element_type": self.dtype, "out_sharding": split}
        return jnp.moveaxis(lax.ragged_dot_general(x, y, sizes, dimensions, **options), axis, 0)


def _grouped(product: _Product, *args: Array) -> Array:
    """The product. JAX has a rule for `jax.vmap` only if it maps all arguments along their first axis, and once."""
    of_one, of_each = (custom_vmap(functools.partial(product.of, samples)) for samples in (0, 1))

    @of_one.def_vmap
    def _(number: int, are_mapped: Sequence[bool], *args: Array) -> tuple[Array, bool]:
        if sum(are_mapped) > 1 or are_mapped[2] or any(map(sharding.is_sharded, args)):
            return of_each(*_samples(number, are_mapped, args)), True
        # The samples of one operand extend one of its axes, and one of the result. Rows of one number lie together.
        *operands, sizes = args
        i = are_mapped.index(True)
        axis, to = product.folds[i]
        size = operands[i].shape[axis + 1]
        operands[i] = _merged(jnp.moveaxis(operands[i], 0, axis + 1), axis)
        out = of_one(*operands, sizes if axis else sizes * number)
        return jnp.moveaxis(out.reshape(*out.shape[:to], size, number, *out.shape[to + 1 :]), to + 1, 0), True

    @of_each.def_vmap
    def _(number: int, are_mapped: Sequence[bool], *args: Array) -> tuple[Array, bool]:
        samples = _samples(number, are_mapped, args)
        out = of_each(*(_merged(a, 0) for a in samples))
        return out.reshape(*samples[0].shape[:2], *out.shape[1:]), True

    return of_one(*args)


def _samples(number: int, are_mapped: Sequence[bool], args: Arrays) -> Sequence[Array]:
    """The arrays of each sample, split over devices as in one of the arguments."""
    arrays = [a if m else jnp.broadcast_to(a, (number, *a.shape)) for a, m in zip(args, are_mapped, strict=True)]
    split = next((jax.typeof(a).sharding for a in arrays if sharding.is_sharded(a)), None)
    if split is None:
        return arrays
    return [jax.sharding.reshard(a, NamedSharding(split.mesh, PartitionSpec(split.spec[0]))) for a in arrays]


def _merged(x: Array, axis: int) -> Array:
    """`x` with an axis and the next one as one."""
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _forward(dtype: DType, x: Array, w: Array, sizes: Array) -> tuple[Array, Pytree]:
    return _rows(dtype, x, w, sizes), (x, w, sizes)


def _reverse(_: DType, residuals: Pytree, d_out: Array) -> tuple[Array, Array, None]:
    x, w, sizes = residuals
    d_x = _rows(x.dtype, d_out, jnp.swapaxes(w, 1, 2), sizes)
    return d_x, _matrices(w.dtype, x, d_out, sizes), None


_product = rule(_forward, _reverse)
