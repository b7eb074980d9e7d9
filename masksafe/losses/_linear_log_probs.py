"""Log-probabilities and entropies of a linear layer, for fine-tuning with large vocabularies."""

from __future__ import annotations

from typing import Unpack, overload

import jax.numpy as jnp

from masksafe._core import arguments, label_checks, sharding
from masksafe._core.labels import at_labels
from masksafe._core.masks import both, read_mask
from masksafe._core.public_op import public_op
from masksafe._core.run_time import any_of
from masksafe._core.sharding import AxisName
from masksafe._core.switches import is_checkified
from masksafe._core.typing import Array, ArrayLike, Arrays, jitted
from masksafe.losses._rows import _arguments, _kept, _several
from masksafe.losses._rows._arguments import No, Yes
from masksafe.losses._rows._columns import Columns, logits_at
from masksafe.losses._rows._cross_entropy import PREDICTIONS, CrossEntropy, Output
from masksafe.losses._rows._linear_layer import LinearInputs
from masksafe.losses._rows._linear_loss import LinearLoss
from masksafe.losses._rows._linear_op import evaluate
from masksafe.losses._rows._several import SUMS, AtLabels

_OP = "linear_log_probs"


class _Rest(_arguments.LabelOptions, total=False):
    """The parameters that the overloads have in common, besides the arrays."""

    temperature: float
    kept_ids: ArrayLike | None


@overload
def linear_log_probs(
    features: ArrayLike, kernel: ArrayLike, labels: ArrayLike, *, with_entropy: No = False, **rest: Unpack[_Rest]
) -> Array: ...


@overload
def linear_log_probs(
    features: ArrayLike, kernel: ArrayLike, labels: ArrayLike, *, with_entropy: Yes, **rest: Unpack[_Rest]
) -> tuple[Array, Array]: ...


@overload
def linear_log_probs(
    features: ArrayLike, kernel: ArrayLike, labels: ArrayLike, *, with_entropy: bool, **rest: Unpack[_Rest]
) -> Array | tuple[Array, Array]: ...


@overload
def linear_log_probs(
    features: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    *,
    with_entropy: bool = ...,
    with_predictions: Yes,
    **rest: Unpack[_Rest],
) -> tuple[Array, ...]: ...


@public_op
def linear_log_probs(
    features: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    temperature: float = 1.0,
    logit_soft_cap: float | None = None,
    block_size: int | None = None,
    axis_name: AxisName = None,
    with_entropy: bool = False,
    class_mask: ArrayLike | None = None,
    with_predictions: bool = False,
    kept_ids: ArrayLike | None = None,
) -> Array | tuple[Array, ...]:
    r"""Log-probability of each label under the softmax of a linear layer, without the logits in memory.

    .. math::
      a_t = f_t W + b, \qquad x_t = \frac{\kappa}{T} \tanh(a_t / \kappa), \qquad
      p_{tc} = \frac{e^{x_{tc}}}{\sum_j e^{x_{tj}}}

      \log p_{t y_t}, \qquad H_t = -\sum_c p_{tc} \log p_{tc}

    The labels are, for example, the tokens that a policy has sampled at the temperature :math:`T`. The logits exist for
    one block of tokens at a time, forward and in reverse, and only blocks with unmasked tokens are computed. On meshes
    it works as `linear_softmax_cross_entropy` does.

    Args:
      features: floats `[..., D]`, one row for each token.
      kernel: floats `[D, V]`.
      labels: integers `[...]` in [0, V), or `[..., L]`: several for each token, from one softmax.
      bias: `[V]`, or None.
      where: booleans `[...]`; False masks a token.
      temperature: :math:`T`, positive; it divides the logits after the soft cap.
      logit_soft_cap: :math:`\kappa`, positive, or None for no cap.
      block_size: the most tokens in a block; None chooses it.
      axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of them, over which `kernel` and `bias` are split by
        class. Labels and ids count classes of all devices. Gradients are correct with `check_vma=True`, the default.
      with_entropy: whether to return the entropies too.
      class_mask: booleans `[V]`, split like the classes; False takes a class away, as for a padded vocabulary.
      with_predictions: whether to return the most probable classes and the logsumexps too.
      kept_ids: integers `[..., K]`, or None: the classes that each token keeps, a set padded by -1, as of top-k or
        top-p. Only their logits are computed; they count if `class_mask` leaves them.

    Returns:
      The log-probabilities, of the shape of labels; with `with_entropy` a pair of these and the entropies `[...]` in
      nats. Their dtype is the promoted one of features and kernel, but at least float32. Both are 0 at masked tokens,
      which have gradients of 0 and no influence. Both have gradients.

      With `with_predictions` the class with the largest :math:`x_{tc}` of every token follows, and
      :math:`\log \sum_c e^{x_{tc}}`, as from `linear_softmax_cross_entropy`.

      * A label out of range makes the log-probability NaN, and with it the gradients to which it contributes; not the
        entropy, which does not depend on it.
      * Masked classes have gradients of 0 and no influence. A label at one has log-probability -inf, and is reported by
        `masksafe.label_checks`. If all classes are masked, both are 0, as at masked tokens.
      * A label that its token does not keep has log-probability -inf too. A token that keeps no class is masked. An id
        out of range, other than -1, makes the results of its token NaN and the prediction -1.
      * A bias of -inf excludes a class as well, with a soft cap too: it adds nothing to the entropy, and its
        log-probability is -inf. If it excludes all of them, both are NaN.
      * Where the cotangents are 0, the gradients are 0, even if the outputs are NaN.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> features, labels = jnp.eye(3), jnp.array([1, 3, -100])
      >>> kernel = jnp.arange(12.0).reshape(3, 4)
      >>> log_probs, entropies = masksafe.losses.linear_log_probs(
      ...     features, kernel, labels, where=labels >= 0, temperature=2.0,
      ...     with_entropy=True)
      >>> print(log_probs.round(4), entropies.round(4))
      [-1.7873 -0.7873  0.    ] [1.2451 1.2451 0.    ]

    References:
      Ouyang et al., "Training language models to follow instructions with human feedback", 2022; Shao et al.,
      "DeepSeekMath", 2024; Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024.
    """
    layer = _arguments.read_layer(_OP, features, kernel, bias)
    labels = _arguments.read_labels(_OP, layer.features, labels, may_be_several=True)
    tokens = layer.features.shape[:-1]
    is_one = labels.ndim == len(tokens)
    inputs = LinearInputs((layer,), labels, None, read_mask(_OP, where, tokens, "features", "tokens"))
    axis_name = sharding.as_axis_name(_OP, axis_name)
    with_entropy = arguments.as_bool(_OP, "with_entropy", with_entropy)
    soft_cap = _arguments.read_optional_number(_OP, "logit_soft_cap", logit_soft_cap)
    temperature = _arguments.read_number(_OP, "temperature", temperature)
    block_size = _arguments.read_block_size(_OP, block_size)
    class_mask = _arguments.read_class_mask(_OP, class_mask, layer.kernel)
    names: tuple[Output, ...] = ("log_prob",) if is_one and kept_ids is None else SUMS
    names = (*names, "entropy") if with_entropy else names
    if kept_ids is not None:
        ids = _kept.read_kept_ids(_OP, kept_ids, tokens, "features")
        with_predictions = arguments.as_bool(_OP, "with_predictions", with_predictions)
        formula = CrossEntropy(names + PREDICTIONS[:1] * with_predictions, soft_cap, temperature)
        outputs = _of_kept(formula, inputs, ids, class_mask, block_size, axis_name, with_predictions)
    else:
        with_predictions = _arguments.read_with_predictions(_OP, with_predictions, inputs, axis_name)
        formula = CrossEntropy(names + PREDICTIONS * with_predictions, soft_cap, temperature)
        outputs = _of_all_classes(formula, inputs, class_mask, block_size, axis_name)
        if with_predictions:
            outputs = (*outputs[:-2], *_arguments.predictions(*outputs[-2:]))
    return outputs if len(outputs) > 1 else outputs[0]


def _of_all_classes(
    formula: CrossEntropy,
    inputs: LinearInputs,
    class_mask: Array | None,
    block_size: int | None,
    axis_name: AxisName,
) -> Arrays:
    """The outputs over all classes; of a formula of `SUMS` for several labels of a token."""
    (layer,), labels, number = inputs.layers, inputs.data, inputs.classes(axis_name).number
    inputs, options = inputs.without_masked(class_mask, axis_name), LinearLoss(formula, block_size, axis_name)
    if labels.ndim == len(inputs.tokens):
        bad = _arguments.check_labels(_OP, inputs, class_mask, axis_name)
        log_probs, *others = evaluate(options, inputs)
    else:
        classes, counts, in_range = _several.classes_of(labels, number, inputs.unmasked)
        if class_mask is not None:
            counts &= _is_unmasked(class_mask, classes, axis_name)
        at = AtLabels(logits_at(Columns(block_size, axis_name), layer, classes, counts), counts, in_range)
        bad = _several.check(_OP, labels, at, inputs.unmasked, number, "at a masked class")
        largest, log_total, *others = evaluate(options, inputs._replace(data=jnp.zeros(inputs.tokens, jnp.int32)))
        log_probs = _several.log_probs_at(formula, at, inputs.unmasked, (largest, log_total))
    return label_checks.nan_where_bad(log_probs, bad), *others


def _of_kept(
    formula: CrossEntropy,
    inputs: LinearInputs,
    ids: Array,
    class_mask: Array | None,
    block_size: int | None,
    axis_name: AxisName,
    with_predictions: bool,
) -> Arrays:
    """The outputs over the kept sets of tokens, of a formula of `SUMS`."""
    (layer,), labels, number = inputs.layers, inputs.data, inputs.classes(axis_name).number
    is_one = labels.ndim == len(inputs.tokens)
    of_tokens = labels[..., None] if is_one else labels
    kept, unmasked = _kept_of_tokens(number, axis_name, ids, of_tokens, inputs.unmasked, class_mask)
    logits = logits_at(Columns(block_size, axis_name), layer, kept.classes, kept.is_kept)
    at = kept.at_labels(is_checkified(), logits)
    bad = _kept.check(_OP, ids, labels, kept, at, number, unmasked)
    log_probs, *others = _kept.outputs_of_kept(formula, at, logits, kept)
    log_probs = label_checks.nan_where_bad(log_probs, bad)
    if with_predictions:
        others.insert(-1, _kept.prediction(formula, logits, kept))  # in front of the logsumexps
    return (log_probs.squeeze(-1) if is_one else log_probs), *others


@jitted(0, 1)
def _kept_of_tokens(
    number: int, axis_name: AxisName, ids: Array, labels: Array, unmasked: Array | None, class_mask: Array | None
) -> tuple[_kept.Kept, Array | None]:
    """The sets, and which tokens are unmasked."""
    if class_mask is None:
        return _kept.kept_of(ids, labels, number, unmasked, lambda _: None), unmasked
    any_class = jnp.broadcast_to(sharding.Devices(axis_name).any(any_of(class_mask)), ids.shape[:-1])
    unmasked, is_unmasked = both(unmasked, any_class), lambda ids: _is_unmasked(class_mask, ids, axis_name)
    return _kept.kept_of(ids, labels, number, unmasked, is_unmasked), unmasked


def _is_unmasked(class_mask: Array, classes: Array, axis_name: AxisName) -> Array:
    """Whether classes in range, which count those of all devices, are unmasked."""
    return at_labels(class_mask.astype(jnp.int32), classes, axis_name) > 0
