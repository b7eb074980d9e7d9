"""Batch normalisation."""

from __future__ import annotations

import jax.numpy as jnp

from masksafe._core import arguments, masks, row_blocks, run_time, sharding
from masksafe._core.moments import Moments, Rows
from masksafe._core.precision import wide_dtype
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, Axes, Axis, jitted
from masksafe.normalization._arguments import NormInputs, along_axes, given, read
from masksafe.normalization._normalize import Norm, normalize, normalized

_OP = "batch_norm"


@public_op
def batch_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    epsilon: float = 1e-5,
    mean: ArrayLike | None = None,
    var: ArrayLike | None = None,
    axis_name: sharding.AxisName = None,
) -> tuple[Array, Array, Array]:
    r"""Batch normalisation of each feature over the unmasked elements of the whole batch; 0 at the masked ones.

    .. math::
      y_i = \gamma \frac{x_i - \mu}{\sqrt{\sigma^2 + \varepsilon}} + \beta, \qquad
      \mu = \frac{1}{W} \sum_{i : \text{where}_i} w_i x_i, \qquad
      \sigma^2 = \frac{1}{W} \sum_{i : \text{where}_i} w_i (x_i - \mu)^2, \qquad
      W = \sum_{i : \text{where}_i} w_i

    With `axis_name` the batch is that of all devices, however many unmasked elements each of them has, in value and
    gradient.

    Args:
      x: floats `[...]`.
      scale: :math:`\gamma`, of the shape of the features; None means 1.
      bias: :math:`\beta`, of the same shape; None means 0.
      axis: the axis of the features, or a tuple of axes. The statistics are taken over all other axes.
      where: booleans that broadcast to the shape of `x`, trailing axes first; False is masked, None masks nothing. To
        mask positions write `where[..., None]`.
      weights: non-negative numbers that broadcast to the shape of `x`, with which the elements enter the statistics;
        None means 1. A NaN or infinity of weight 0 is masked. A masked weight has no influence.
      epsilon: added to the variance, 0 or more.
      mean: statistics to normalise by, of the shape of the features, as for inference; with `var`.
      var: the variance that belongs to `mean`.
      axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of them, over which the batch is split; or the named
        axis of a `jax.vmap` over its samples. On meshes without `jax.shard_map` it is not needed.

    Returns:
      `(y, mean, var)`. `y` has the shape and dtype of `x`; float16 and bfloat16 are computed in float32 and rounded
      once. `mean` and `var` are the statistics by which it was normalised, those given or those of the batch, in
      float32 at least, with gradients too. A running average of them is the caller's to keep.

      * Masked elements are 0 (`bias` is not added), and get a gradient of 0.
      * A feature that is fully masked, or has only weights of 0, has a `y`, mean and variance of 0. A running average
        should leave it out.
      * A feature of equal elements is `bias`, even with an `epsilon` of 0, which makes its gradient 0.
      * A NaN or infinity in an unmasked element makes the unmasked elements of its feature NaN.
      * The variance is divided by :math:`W`; torch's running variance by :math:`W - 1`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([[1.0, 5.0], [3.0, jnp.nan], [jnp.nan, jnp.nan]])
      >>> y, mean, var = masksafe.batch_norm(x, where=~jnp.isnan(x), epsilon=0)
      >>> print(y, mean, var)
      [[-1.  0.]
       [ 1.  0.]
       [ 0.  0.]] [2. 5.] [1. 0.]

    Coming from another library:
      flax's layers compute :math:`E[x^2] - E[x]^2` by default, and with `mask` and `axis_name` the mean of the devices'
      means. torch's layers have the features on axis 1, and no mask.

    References:
      `Ioffe, Szegedy, Batch Normalization, 2015 <https://arxiv.org/abs/1502.03167>`_; Chan, Golub, LeVeque, "Updating
      Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
    """
    arguments.check_both_or_none(_OP, mean=mean, var=var)
    static, arrays = given(_OP, x, scale, bias, where, weights, epsilon)
    features = arguments.canonical_axes(_OP, axis, arrays.x.ndim)
    devices = sharding.Devices(sharding.as_axis_name(_OP, axis_name))
    if mean is None or var is None:
        return _normalize(features, devices, static, arrays)
    mean, var = arguments.as_array(_OP, "mean", mean), arguments.as_array(_OP, "var", var)
    return _normalize_by(features, static, arrays, mean, var), mean, var


@jitted(0, 1, 2)
def _normalize(
    features: Axes, devices: sharding.Devices, epsilon: float | None, arrays: NormInputs
) -> tuple[Array, Array, Array]:
    inputs = read(_OP, arrays, features)
    rows, inputs = _rows_of_features(features, arrays.x.ndim, devices).on_one_axis(inputs)
    norm = Norm(rows, epsilon)
    row_moments = norm.moments(inputs)
    order = [sorted(features).index(a) for a in features]  # the user's order of the axes
    mean, var = (jnp.transpose(jnp.squeeze(s, rows.axes), order) for s in (row_moments.mean, row_moments.variance))
    return normalize(norm, inputs, row_moments).reshape(arrays.x.shape), mean, var


@jitted(0, 1)
def _normalize_by(features: Axes, epsilon: float | None, arrays: NormInputs, mean: Array, var: Array) -> Array:
    inputs = read(_OP, arrays, features)
    x, where = inputs.x, inputs.where
    norm = Norm(_rows_of_features(features, x.ndim, sharding.Devices()), epsilon)
    has_unmasked = None if where is None else run_time.any_of(where, norm.rows.axes, keepdims=True)
    statistics = (along_axes(_OP, name, s, x, features) for name, s in (("mean", mean), ("var", var)))
    mean, var = (masks.selected(s.astype(wide_dtype(x.dtype)), has_unmasked, 1) for s in statistics)
    return normalized(norm, inputs, Moments(None, mean, None, var))[0]


def _rows_of_features(features: Axes, ndim: int, devices: sharding.Devices) -> Rows:
    return Rows(row_blocks.axes_of_row(tuple(a for a in range(ndim) if a not in features), ndim), devices)
