"""Log-probabilities of labels under a softmax, and its entropy."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, overload

import jax.numpy as jnp

from masksafe._core import arguments, label_checks
from masksafe._core.public_op import public_op
from masksafe._core.switches import is_checkified
from masksafe._core.typing import Array, ArrayLike, Arrays, Axes, Axis
from masksafe.losses._labelled import Labelled, read_integer_labels
from masksafe.losses._rows import _kept, _several
from masksafe.losses._rows._arguments import read_number
from masksafe.losses._rows._cross_entropy import CrossEntropy, Output
from masksafe.losses._rows._dense import RowLoss, outputs_of_rows
from masksafe.losses._rows._several import SUMS


@overload
def log_probs(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    temperature: float = 1.0,
    with_entropy: Literal[False] = False,
    kept_ids: ArrayLike | None = None,
) -> Array: ...


@overload
def log_probs(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    temperature: float = 1.0,
    with_entropy: Literal[True],
    kept_ids: ArrayLike | None = None,
) -> tuple[Array, Array]: ...


@overload
def log_probs(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    temperature: float = 1.0,
    with_entropy: bool,
    kept_ids: ArrayLike | None = None,
) -> Array | tuple[Array, Array]: ...


@public_op
def log_probs(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    kept_ids: ArrayLike | None = None,
) -> Array | tuple[Array, Array]:
    r"""The log-probabilities of labels, such as the tokens or actions that a policy has taken, and its entropy.

    .. math::
      \log p_y, \qquad H = -\sum_j p_j \log p_j, \qquad p_j = \frac{e^{x_j / \tau}}{\sum_k e^{x_k / \tau}}

    with logits :math:`x`, label :math:`y`, temperature :math:`\tau` and the sums over the unmasked classes.

    Args:
      logits: unnormalised log probabilities, floats `[..., num_classes]`.
      labels: the class of every row, integers `[...]` of any width, in [0, num_classes). Axes of size 1
        broadcast against those of `logits` and vice versa. With one axis more, the last, several classes of every row:
        the log-probabilities are then `[..., L]`, from one softmax.
      axis: the axis of the classes. With a tuple of axes, a label is the flat index into an array of those
        axes, in the order given.
      where: booleans; False is masked. A mask of the rank of `logits` masks classes, such as actions that are
        not allowed, and broadcasts to their shape. A mask of lower rank masks rows and broadcasts to the shape of
        the result: for logits `[2, 2]`, a mask `(2,)` masks rows.
      temperature: the number by which the logits are divided, as they are when a policy is sampled; positive.
      with_entropy: whether to return the entropy too.
      kept_ids: integers `[..., K]`, or None: the classes that each row keeps, a set padded by -1, as of top-k or top-p.
        Only they count in the softmax, if `where` leaves them. Axes of size 1 broadcast to those of the result.

    Returns:
      The log-probabilities `[...]`; with `with_entropy` a tuple of them and the entropies `[...]`. Both have the
      dtype of `logits`, but at least float32.

      * A row that is masked, or that has no unmasked class, is 0 in both, whatever its label. Masked logits have
        gradients of exactly 0.
      * An unmasked label outside [0, num_classes) never wraps: its log-probability is NaN, and the gradient through it
        too. The entropy does not depend on the label. Pad several labels with any class, and replace their results:
        `masksafe.keep(log_probs, where=labels >= 0)`.
      * A label whose class is masked or has a logit of -inf has log-probability -inf. A class with a logit of
        -inf adds nothing to the entropy. Logits of only -inf have no probabilities: both are NaN.
      * With `kept_ids`, the other classes are masked, so a label among them has log-probability -inf. A row that keeps
        no class is masked. An id out of range, other than -1, makes its row NaN.
      * A NaN or +inf in an unmasked logit makes the results and the gradients of its own row NaN, except for a single
        label without `kept_ids`, beside a logit of +inf at another class: its log-probability is -inf.
      * Where the cotangent of a result is 0, so is the gradient through it, even in a row with a NaN. (For second
        derivatives in reverse over reverse, and inside `forward_mode`, this requires `where`.)

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits = jnp.array([[1.0, 1.0, 1.0], [3.0, 0.0, 0.0], [jnp.nan] * 3])
      >>> tokens = jnp.array([2, 0, -100])  # the last one is padding
      >>> log_probs, entropy = masksafe.losses.log_probs(
      ...     logits, tokens, where=tokens >= 0, with_entropy=True)
      >>> with jnp.printoptions(precision=4):
      ...     print(log_probs, entropy, sep="\n")
      [-1.0986 -0.0949  0.    ]
      [1.0986 0.3666 0.    ]
      >>> top_2 = jnp.array([[0, 2], [0, 1], [-1, -1]])
      >>> of_two = masksafe.losses.log_probs(logits, tokens, kept_ids=top_2)
      >>> with jnp.printoptions(precision=4):
      ...     print(of_two)
      [-0.6931 -0.0486  0.    ]

    References:
      trl's ``selective_log_softmax`` and ``entropy_from_logits``; ``log_prob`` and ``entropy`` of
      `distrax.Categorical <https://github.com/google-deepmind/distrax>`_.
    """
    op = "log_probs"
    temperature = read_number(op, "temperature", temperature)
    with_entropy = arguments.as_bool(op, "with_entropy", with_entropy)
    inputs, axes = read_integer_labels(op, logits, labels, axis, where, may_be_several=True)
    static, array = (1.0, None) if temperature == 1 else arguments.as_static_or_array(temperature, *inputs[:2])
    names: tuple[Output, ...] = ("entropy",) if with_entropy else ()
    formula = CrossEntropy(("log_prob", *names), temperature=1.0 if static is None else static)
    if kept_ids is None and inputs.labels.ndim == inputs.logits.ndim - len(axes):
        bad = label_checks.check_integer_labels(op, inputs.labels, inputs.where, axes, inputs.logits.shape, None)
        log_p, *entropies = outputs_of_rows(RowLoss(formula, axes), inputs, array)
        log_p = label_checks.nan_where_bad(log_p, bad)
    else:
        formula = dataclasses.replace(formula, names=(*SUMS, *names))
        log_p, *entropies = _of_several(op, formula, axes, inputs, kept_ids, array)
    return (log_p, entropies[0]) if with_entropy else log_p


def _of_several(
    op: str, formula: CrossEntropy, axes: Axes, inputs: Labelled, kept_ids: ArrayLike | None, temperature: Array | None
) -> Arrays:
    """The outputs of rows with several labels, or over kept sets, of a formula of `SUMS`."""
    labels, shape = inputs.labels, inputs.logits.shape
    is_one, number = labels.ndim == len(shape) - len(axes), math.prod(shape[a] for a in axes)
    of_rows = labels[..., None] if is_one else labels
    rows = of_rows.shape[:-1]
    inputs = inputs._replace(labels=jnp.zeros(rows, jnp.int32))
    if kept_ids is None:
        at, unmasked = _several.at_labels_of_rows(axes, is_checkified(), inputs, of_rows)
        bad = _several.check(op, labels, at, unmasked, number, "at a masked class")
        log_p, *others = _several.outputs_at(formula, axes, inputs, at, unmasked, temperature)
    else:
        ids = _kept.read_kept_ids(op, kept_ids, rows, "logits and labels together")
        places, kept, unmasked = _kept.kept_of_rows(axes, is_checkified(), inputs, of_rows, ids)
        at = kept.at_labels(is_checkified(), places)
        bad = _kept.check(op, ids, labels, kept, at, number, unmasked)
        log_p, *others = _kept.outputs_of_kept(formula, at, places, kept, temperature)
    log_p = label_checks.nan_where_bad(log_p, bad)
    return (log_p.squeeze(-1) if is_one else log_p), *others
