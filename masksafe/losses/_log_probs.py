"""Log-probabilities of labels under a softmax, and its entropy."""

from __future__ import annotations

import math
from typing import Literal, overload

from masksafe._core import arguments, label_checks
from masksafe._core.masks import either
from masksafe._core.public_op import public_op
from masksafe._core.switches import is_checkified
from masksafe._core.typing import Array, ArrayLike, Axis
from masksafe.losses._labelled import read_integer_labels
from masksafe.losses._rows import _kept
from masksafe.losses._rows._arguments import read_number
from masksafe.losses._rows._cross_entropy import CrossEntropy, Output
from masksafe.losses._rows._dense import RowLoss, outputs_of_rows


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
        broadcast against those of `logits` and vice versa.
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
      * An unmasked label outside [0, num_classes) never wraps: the log-probability of its row is NaN, and the gradient
        through it too. The entropy does not depend on the label.
      * A label whose class is masked or has a logit of -inf has log-probability -inf. A class with a logit of
        -inf adds nothing to the entropy. Logits of only -inf have no probabilities: both are NaN.
      * With `kept_ids`, the other classes are masked, so a label among them has log-probability -inf. A row that keeps
        no class is masked. An id out of range, other than -1, makes its row NaN.
      * A NaN or +inf in an unmasked logit makes the entropy and the gradients of its own row NaN, and the
        log-probability NaN, or -inf where the logit +inf belongs to a class other than the label.
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
    inputs, axes, bad_rows = read_integer_labels(op, logits, labels, axis, where)
    static, array = (1.0, None) if temperature == 1 else arguments.as_static_or_array(temperature, *inputs[:2])
    names: tuple[Output, ...] = ("log_prob", "entropy") if with_entropy else ("log_prob",)
    formula = CrossEntropy(names, temperature=1.0 if static is None else static)
    if kept_ids is None:
        log_p, *entropies = outputs_of_rows(RowLoss(formula, axes), inputs, array)
    else:
        ids = _kept.read_kept_ids(op, kept_ids, inputs.labels.shape, "logits and labels together")
        places, kept, unmasked = _kept.kept_of_rows(axes, is_checkified(), inputs, ids)
        number = math.prod(inputs.logits.shape[a] for a in axes)
        bad_rows = either(bad_rows, _kept.check_kept_ids(op, ids, inputs.labels, kept, number, unmasked))
        log_p, *entropies = _kept.outputs_of_kept(formula, places, kept, array)
    log_p = label_checks.nan_where_bad(log_p, bad_rows)
    return (log_p, entropies[0]) if with_entropy else log_p
