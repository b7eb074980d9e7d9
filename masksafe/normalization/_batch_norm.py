"""Batch normalisation."""

from __future__ import annotations

import jax.numpy as jnp

from masksafe._core import arguments, masks, moments, precision, sharding, unfolded
from masksafe._core.public_op import public_op
from masksafe._core.row_moments import Rows
from masksafe._core.typing import Array, ArrayLike, Axes, Axis, jitted
from masksafe.normalization._arguments import Inputs, along_axes, read_arguments
from masksafe.normalization._statistics import normalize, normalize_by, reciprocal_root

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
        None means 1. A NaN or infinity of weight 0 is masked. A weight under the mask is gone.
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
      * A feature with nothing left anywhere, or nothing but weights of 0, has a `y`, mean and variance of 0. A running
        average should leave it out.
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
    x = arguments.as_float_array(_OP, "x", x, of_any_width=True)
    features = arguments.canonical_axes(_OP, axis, x.ndim)
    given_mean, given_var = (along_axes(_OP, name, s, x, features) for name, s in (("mean", mean), ("var", var)))
    if (given_mean is None) != (given_var is None):
        argument = "var" if given_var is None else "mean"
        raise ValueError(arguments.message(_OP, argument, "value None", "an array, since its counterpart is given"))
    static, inputs = read_arguments(
        _OP, x, features, scale=scale, bias=bias, where=where, weights=weights, epsilon=epsilon
    )
    rest = tuple(a for a in range(x.ndim) if a not in features)
    rows = Rows(rest, sharding.Devices(sharding.as_axis_name(_OP, axis_name)))
    if given_mean is None or given_var is None:
        return _normalize(rows, static, features, inputs)
    return _normalize_by(rows, static, inputs, given_mean, given_var), jnp.asarray(mean), jnp.asarray(var)


@jitted(0, 1, 2)
def _normalize(rows: Rows, epsilon: float | None, features: Axes, inputs: Inputs) -> tuple[Array, Array, Array]:
    y, (mean, variance) = normalize(rows, epsilon, inputs)
    order = [sorted(features).index(a) for a in features]  # the user's order of the axes
    of_features = lambda statistic: jnp.transpose(jnp.squeeze(statistic, rows.axes), order)  # noqa: E731
    return y, of_features(moments.total(mean)), of_features(variance)


@jitted(0, 1)
def _normalize_by(rows: Rows, epsilon: float | None, inputs: Inputs, mean: Array, variance: Array) -> Array:
    where = masks.weighting_of(inputs.x, inputs.where, inputs.weights).where
    is_live = None if where is None else unfolded.any_of(where, rows.axes, keepdims=True)
    mean, variance = (
        masks.selected(s.astype(precision.wide_dtype(inputs.x.dtype)), is_live, 1) for s in (mean, variance)
    )
    root = reciprocal_root(variance, None, epsilon, inputs.epsilon)
    inputs = inputs._replace(where=where)
    return normalize_by(rows.devices, inputs, moments.Mean(jnp.zeros_like(mean), mean), root)
