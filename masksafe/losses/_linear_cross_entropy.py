"""The softmax cross-entropy of a linear layer, for vocabularies whose logits would be the largest array in memory."""

from __future__ import annotations

import functools
from typing import Unpack, overload

import jax.numpy as jnp

from masksafe._core import arguments, label_checks, moments, precision, run_time, sharding
from masksafe._core.masks import as_weights_of, both, read_mask, selected
from masksafe._core.public_op import public_op
from masksafe._core.typing import REDUCTIONS, Array, ArrayLike, LossReduction, jitted
from masksafe.losses._rows import _arguments
from masksafe.losses._rows._arguments import No, Yes
from masksafe.losses._rows._cross_entropy import PREDICTIONS, CrossEntropy
from masksafe.losses._rows._linear_layer import LinearInputs
from masksafe.losses._rows._linear_loss import LinearLoss
from masksafe.losses._rows._linear_op import evaluate

_OP = "linear_softmax_cross_entropy"


class _Rest(_arguments.LabelOptions, total=False):
    """The parameters that the overloads have in common, besides the arrays."""

    reduction: LossReduction
    label_smoothing: float
    z_loss: float
    class_weights: ArrayLike | None
    weights: ArrayLike | None


@overload
def linear_softmax_cross_entropy(
    features: ArrayLike, kernel: ArrayLike, labels: ArrayLike, *, with_components: No = False, **rest: Unpack[_Rest]
) -> Array: ...


@overload
def linear_softmax_cross_entropy(
    features: ArrayLike, kernel: ArrayLike, labels: ArrayLike, *, with_components: Yes, **rest: Unpack[_Rest]
) -> tuple[Array, Array]: ...


@overload
def linear_softmax_cross_entropy(
    features: ArrayLike, kernel: ArrayLike, labels: ArrayLike, *, with_components: bool, **rest: Unpack[_Rest]
) -> Array | tuple[Array, Array]: ...


@overload
def linear_softmax_cross_entropy(
    features: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    *,
    with_components: bool = ...,
    with_predictions: Yes,
    **rest: Unpack[_Rest],
) -> tuple[Array, ...]: ...


@public_op
def linear_softmax_cross_entropy(
    features: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    reduction: LossReduction = "mean",
    logit_soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    block_size: int | None = None,
    axis_name: sharding.AxisName = None,
    class_weights: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    with_components: bool = False,
    class_mask: ArrayLike | None = None,
    with_predictions: bool = False,
) -> Array | tuple[Array, ...]:
    r"""Softmax cross-entropy of `features @ kernel + bias` and integer labels, without the logits in memory.

    .. math::
      a_t = f_t W + b, \qquad x_t = \kappa \tanh(a_t / \kappa), \qquad \lambda_t = \log \sum_c e^{x_{tc}}

      \ell_t = v_t \Big( (1 - \varepsilon) w_{y_t} (\lambda_t - x_{t y_t}) +
      \frac{\varepsilon}{V} \sum_c w_c (\lambda_t - x_{tc}) + \zeta \lambda_t^2 \Big)

    The logits exist for one block of tokens at a time, and only blocks with unmasked tokens are computed. On an
    automatic mesh all logits are in memory: see the guide "Several devices".

    Args:
      features: floats `[..., D]`, one row for each token.
      kernel: floats `[D, V]`.
      labels: integers `[...]` in [0, V).
      bias: `[V]`, or None.
      where: booleans `[...]`; False masks a token.
      reduction: "mean" over the unmasked tokens, "sum", or "none" for the losses `[...]`, 0 at masked tokens. With
        weights the mean is :math:`\sum_t \ell_t / \sum_t v_t w_{y_t}`, torch's definition; a divisor of 0 is taken
        for 1. For the mean over devices or micro-batches put the sum and the number of tokens, or with weights this
        divisor, into a `masksafe.MaskedMean`.
      logit_soft_cap: :math:`\kappa`, positive, or None for no cap.
      label_smoothing: :math:`\varepsilon` in [0, 1], the part of the probability shared by all classes.
      z_loss: :math:`\zeta`, the weight of the squared logsumexp.
      block_size: the most tokens in a block; None chooses it.
      axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of them, over which `kernel` and `bias` are split by
        class. Labels count the classes of all devices. Gradients are correct with `check_vma=True`, the default.
      class_weights: :math:`w`, non-negative floats `[V]`, split like the classes; None means 1. They have no gradient.
        A weight of 0 makes the cost of a label 0, even if that is NaN; it masks neither the token nor its predictions.
      weights: :math:`v`, non-negative numbers that broadcast to `[...]`; None means 1. They have gradients. A token of
        weight 0 takes no part, even if it holds a NaN, and its weight has a gradient of 0.
      with_components: whether to return the z-loss apart.
      class_mask: booleans `[V]`, split like the classes; False takes a class from the softmax, as for a padded
        vocabulary. :math:`V` and the sums are over the others.
      with_predictions: whether to return predicted classes and logsumexps; "mean" and "sum" then cost as "none" does.

    Returns:
      The loss; with `with_components` a pair of the cross-entropy and the term with :math:`\zeta`, which add up to the
      loss. It has the promoted dtype of features and kernel, but at least float32, and is 0, with gradients of 0, if
      all is masked. Masked tokens have gradients of 0 and no influence.

      With `with_predictions` the class of the largest logit of every token follows, and :math:`\lambda`, both `[...]`.
      The classes are int32, the lowest of several, counted over all devices; -1 for a token that is masked, has a
      token weight of 0, or is NaN. :math:`\lambda` is 0 at the first two, and has gradients.

      * A label out of range makes the loss NaN, and with it the gradients to which the token contributes; not the
        z-loss, which does not depend on it. So does an unmasked weight that is negative.
      * Masked classes have gradients of 0 and no influence. A label at one gives loss +inf, and is reported by
        `masksafe.label_checks`.
      * A bias of -inf excludes a class as well, with a soft cap and from label smoothing too. If it excludes all of
        them, the loss is NaN.
      * Where the cotangent of the loss is 0, the gradients are 0, even if the loss is NaN.

    Example:
      >>> import jax, jax.numpy as jnp, masksafe
      >>> features, labels = jnp.eye(3), jnp.array([1, 3, -100])
      >>> kernel = jnp.arange(12.0).reshape(3, 4)
      >>> def loss(features, kernel, **options):
      ...     fn = masksafe.losses.linear_softmax_cross_entropy
      ...     return fn(features, kernel, labels, where=labels >= 0, **options)
      >>> value, gradients = jax.value_and_grad(loss, (0, 1))(features, kernel)
      >>> print(f"{value:.4f}", gradients[0][2], gradients[1].shape)
      1.4402 [0. 0. 0.] (3, 4)

      A vocabulary that is padded to eight classes, and what the layer predicts:

      >>> padded = jnp.pad(kernel, ((0, 0), (0, 4)), constant_values=jnp.nan)
      >>> options = {"class_mask": jnp.arange(8) < 4, "with_predictions": True}
      >>> value, predictions, _ = loss(features, padded, **options)
      >>> print(f"{value:.4f}", predictions)
      1.4402 [ 3  3 -1]

    References:
      Hsu et al., "Liger Kernel", 2024; Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024;
      Chowdhery et al., "PaLM", 2022 (z-loss); Gemma Team, "Gemma 2", 2024 (soft cap); Szegedy et al., "Rethinking the
      Inception Architecture", 2016 (label smoothing).
    """
    layer = _arguments.read_layer(_OP, features, kernel, bias)
    kernel, labels = layer.kernel, _arguments.read_labels(_OP, layer.features, labels)
    where = read_mask(_OP, where, labels.shape, "labels", "tokens")
    arguments.as_choice(_OP, "reduction", reduction, REDUCTIONS)
    axis_name = sharding.as_axis_name(_OP, axis_name)
    numbers = _arguments.read_factors(_OP, label_smoothing, z_loss, "mean")
    soft_cap = _arguments.read_optional_number(_OP, "logit_soft_cap", logit_soft_cap)
    block_size = _arguments.read_block_size(_OP, block_size)
    class_mask = _arguments.read_class_mask(_OP, class_mask, kernel)
    if class_weights is not None:
        class_weights = _arguments.read_per_class(_OP, "class_weights", class_weights, kernel.shape[1], "kernel")
        class_weights = selected(class_weights, class_mask, 1)  # the loss of a label at a masked class must show
        class_weights = _arguments.cleaned_class_weights(class_weights)
    weights = as_weights_of(_OP, weights, labels.shape, "labels")
    inputs = LinearInputs((layer,), labels, None, where).without_masked(class_mask, axis_name)
    where = inputs.unmasked
    token_weights = None if weights is None else _cleaned(weights, where, labels.shape)
    label_weights = token_weights
    if class_weights is not None:
        label_weights = _arguments.weights_of_labels(class_weights, labels, where, axis_name)
        if token_weights is not None:
            # The loss at the label may be infinite: the derivative of the product would be NaN.
            is_zero = (token_weights == 0) | (label_weights == 0) & ~jnp.isnan(token_weights)
            label_weights = jnp.where(is_zero, 0, token_weights * label_weights.astype(token_weights.dtype))

    dtype = precision.wide_dtype(layer.dtype)
    # The factors of the outputs: scalars, or one for each token.
    weighted = ((n, label_weights if name == "cross_entropy" else token_weights) for name, n in numbers.items())
    factors = tuple(jnp.asarray(n, dtype) if w is None else w.astype(dtype) * n for n, w in weighted)
    with_predictions = _arguments.read_with_predictions(_OP, with_predictions, inputs, axis_name)
    # A token that adds nothing to the loss costs no time, unless its predictions are asked for: a class weight of 0
    # does not mask them.
    needed_factors = factors
    if with_predictions:
        needed_factors = () if token_weights is None else (token_weights.astype(dtype),)
    if needed_factors and all(factor.ndim for factor in needed_factors):
        has_factor = functools.reduce(jnp.logical_or, [factor != 0 for factor in needed_factors])
        inputs = inputs._replace(unmasked=both(where, has_factor))
    options = LinearLoss(CrossEntropy((*numbers, *PREDICTIONS * with_predictions), soft_cap), block_size, axis_name)
    bad_rows = _arguments.check_labels(_OP, inputs, class_mask, axis_name)
    if "mean" in numbers:
        inputs = inputs._replace(class_weights=_smoothing_weights(axis_name, inputs, class_weights))
    with_components = arguments.as_bool(_OP, "with_components", with_components)
    results: tuple[Array, ...]
    predictions: tuple[Array, ...] = ()
    if with_components or with_predictions or reduction == "none":
        outputs = evaluate(options, inputs)
        predictions = _arguments.predictions(*outputs[-2:]) if with_predictions else ()
        losses = tuple(_arguments.weighted_losses(x, factor) for x, factor in zip(outputs, factors, strict=False))
        results = _arguments.components(numbers, losses) if with_components else (functools.reduce(jnp.add, losses),)
        results = results if reduction == "none" else tuple(map(jnp.sum, results))
    else:
        results = (evaluate(options, inputs, factors),)
    if reduction == "mean":
        if label_weights is not None:
            total = moments.nonzero_divisor(run_time.sum_of(selected(label_weights, where)).astype(dtype))
        else:
            number = jnp.asarray(labels.size) if where is None else run_time.number_of(where)
            total = jnp.maximum(number, 1).astype(dtype)
        results = tuple(result / total for result in results)
    if bad_rows is not None and reduction != "none":
        bad_rows = run_time.any_of(bad_rows)
    results = (label_checks.nan_where_bad(results[0], bad_rows), *results[1:], *predictions)
    return results if len(results) > 1 else results[0]


# Weights: of tokens, as the user gives them, and of labels, those of the tokens times those of their classes. None
# means that all are 1. A negative weight is NaN.


@jitted(2)  # which hides the NaN of masked weights from jax_debug_nans
def _cleaned(weights: Array, where: Array | None, shape: tuple[int, ...]) -> Array:
    """The weights of the tokens, 0 under the mask."""
    weights = _arguments.not_negative(selected(jnp.broadcast_to(precision.widened(weights), shape), where))
    return jnp.where(weights == 0, 0, weights)  # an element without weight has no gradient


def _smoothing_weights(axis_name: sharding.AxisName, inputs: LinearInputs, class_weights: Array | None) -> Array | None:
    """The class weights of label smoothing: 0 where a bias of -inf excludes a class, whose part the others share."""
    bias = inputs.layers[0].bias
    if bias is None:
        return class_weights
    devices, dtype = sharding.Devices(axis_name), inputs.sum_dtype
    is_included = bias.astype(dtype) != -jnp.inf  # as in the logits, whose dtype may be narrower
    number = jnp.maximum(devices.sum(run_time.number_of(is_included)), 1).astype(dtype)
    part = bias.size * devices.size / number
    return jnp.where(is_included, part if class_weights is None else class_weights.astype(dtype) * part, 0)
