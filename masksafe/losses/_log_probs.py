"""Log-probabilities of labels under a softmax, and its entropy."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, cast, overload

import jax
import jax.numpy as jnp
from jax.custom_derivatives import zero_from_primal

from masksafe._core import arguments, label_checks, platforms, precision, row_blocks, sharding, unfolded
from masksafe._core.derivatives import computed_once, with_reverse_rule
from masksafe._core.labels import class_index, nan_unless
from masksafe._core.masks import lowest_under_mask, selected
from masksafe._core.public_op import public_op
from masksafe._core.row_sums import exps_of_others, log_sum_exp, sum_of_row
from masksafe._core.typing import Array, ArrayLike, Axes, Axis
from masksafe.losses._cross_entropy_rows import below_infinity, label_here, takes_part, value_at_label
from masksafe.losses._labelled import Labelled, read_integer_labels
from masksafe.losses._layout import from_rows
from masksafe.losses._rows._reading import read_temperature


@overload
def log_probs(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    temperature: float = 1.0,
    with_entropy: Literal[False] = False,
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

    Returns:
      The log-probabilities `[...]`; with `with_entropy` a tuple of them and the entropies `[...]`. Both have the
      dtype of `logits`, but at least float32, and a small relative error where they are close to 0.

      * A row that is masked, or that has no unmasked class, is 0 in both, whatever its label. Masked logits have
        gradients of exactly 0.
      * An unmasked label outside [0, num_classes) never wraps: the log-probability of its row is NaN, and the gradient
        through it too. The entropy does not depend on the label.
      * A label whose class is masked or has a logit of -inf has log-probability -inf. A class with a logit of
        -inf adds nothing to the entropy. Logits of only -inf have no probabilities: both are NaN.
      * A NaN or +inf in an unmasked logit makes the entropy and the gradients of its own row NaN, and the
        log-probability NaN, or -inf where the logit +inf belongs to a class other than the label.
      * Where the cotangent of a result is 0, so is the gradient through it, even in a row with a NaN. (For second
        derivatives in reverse over reverse, and inside `forward_mode`, this requires `where`.)

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits = jnp.array([[1.0, 1.0, 1.0], [20.0, 0.0, 0.0], [jnp.nan] * 3])
      >>> tokens = jnp.array([2, 0, -100])  # the last one is padding
      >>> log_probs, entropy = masksafe.losses.log_probs(
      ...     logits, tokens, where=tokens >= 0, with_entropy=True)
      >>> with jnp.printoptions(precision=4):
      ...     print(log_probs, entropy, sep="\n")
      [-1.0986e+00 -4.1223e-09  0.0000e+00]
      [1.0986e+00 8.6568e-08 0.0000e+00]

    References:
      trl's ``selective_log_softmax`` and ``entropy_from_logits``; ``log_prob`` and ``entropy`` of
      `distrax.Categorical <https://github.com/google-deepmind/distrax>`_.
    """
    op = "log_probs"
    temperature, with_entropy = read_temperature(op, temperature), arguments.as_bool(op, "with_entropy", with_entropy)
    inputs, axes, bad_rows = read_integer_labels(op, logits, labels, axis, where)
    static, array = (1.0, None) if temperature == 1 else arguments.as_static_or_array(temperature, *inputs[:2])
    log_p, entropy = _of_policy(_Config(axes, static, with_entropy), inputs, array)
    log_p = label_checks.nan_where_bad(log_p, bad_rows)
    return log_p if entropy is None else (log_p, entropy)


# The core. Let m be the largest unmasked logit, z = (x - m) / temperature, s the sum of e^z over all classes but one
# of the largest, and g the mean of -z under p. In
#     log p_y = z_y - log1p(s)        H = log1p(s) + g        g = sum(e^z (-z)) / (1 + s)
# nothing cancels, so certain rows keep their digits. For cotangents d and e of log p_y and H,
#     d_z = d ([c = y] - p) + e p (-z - g)
# where 1 - p_y is -expm1(log p_y). Without H a single sum is enough, that of all classes but the label: s is then that
# sum plus e^(z_y) - 1. What it loses where the label is not the largest is nothing beside z_y.


class _Config(NamedTuple):
    """The static arguments."""

    axes: Axes  # of the classes
    temperature: Any  # None where it is an array, which `with_temperature` puts here within a traced function
    with_entropy: bool

    def with_temperature(self, array: Array | None) -> _Config:
        return self if array is None else self._replace(temperature=array)

    def divided(self, x: Array) -> Array:
        """`x` divided by the temperature."""
        temperature = self.temperature
        return x / (temperature if isinstance(temperature, float) else temperature.astype(x.dtype))


class _Rows(NamedTuple):
    """The results of the forward pass for each row; every array is `[..., 1]`."""

    log_prob: Any
    entropy: Any = None  # None unless it is wanted
    shift: Any = None  # m
    log_sum: Any = None  # log1p(s); 0 in a row with nothing left
    gap: Any = None  # g
    label: Any = None  # -1 if it is out of range


_Results = tuple[Array, Array | None]


def _forward(config: _Config, inputs: Labelled, temperature: Array | None) -> tuple[_Results, Any]:
    rows = _evaluate(config, False, inputs, temperature)
    return _results(rows), (inputs._replace(labels=None), temperature, rows)


def _reverse(config: _Config, residuals: Any, d_results: _Results) -> tuple[Labelled, None]:
    return Labelled(_pull_back(config, *residuals, *d_results), None, None), None


@with_reverse_rule(_forward, _reverse, static_argnums=(0,))
def _of_policy(config: _Config, inputs: Labelled, temperature: Array | None) -> _Results:
    return _results(_evaluate(config, True, inputs, temperature))


def _results(rows: _Rows) -> _Results:
    return rows.log_prob.squeeze(-1), None if rows.entropy is None else rows.entropy.squeeze(-1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evaluate(config: _Config, results_alone: bool, inputs: Labelled, temperature: Array | None) -> _Rows:
    return _evaluate_rows(config, results_alone, *inputs.rows(config.axes), temperature)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _evaluate_rows(
    config: _Config, results_alone: bool, x: Array, labels: Array, where: Array | None, temperature: Array | None
) -> _Rows:
    """The forward pass, differentiable to any order, and with it the reverse rule, which uses its results."""
    row_values = functools.partial(_row_values, config.with_temperature(temperature), results_alone)
    # Several results are sums of the same terms: in one pass XLA's CPU compiler would write the terms to memory.
    arithmetic = row_values if where is None and not config.with_entropy else None
    rows: _Rows = row_blocks.map_row_blocks(row_values, x, labels, where, arithmetic=arithmetic)
    return rows


@_evaluate_rows.defjvp
def _(config: _Config, results_alone: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[_Rows, _Rows]:
    (x, labels, where, temperature), (x_dot, *_) = primals, tangents
    rows = _evaluate_rows(config, False, x, labels, where, temperature)
    config = config.with_temperature(temperature)
    x_dot = config.divided(selected(x_dot.astype(rows.log_sum.dtype), where))
    p, of_log_prob, of_entropy = _slopes(config, x, where, rows)
    d_log_prob = nan_unless(_has_log_prob(rows), x_dot.dtype) * sum_of_row(of_log_prob * x_dot)
    d_log_sum = sum_of_row(p * x_dot)
    d_entropy = None if of_entropy is None else sum_of_row(of_entropy * x_dot)
    if results_alone:
        return _Rows(rows.log_prob, rows.entropy), _Rows(d_log_prob, d_entropy)
    d_gap = None if d_entropy is None else d_entropy - d_log_sum
    no_shift, no_label = (zero_from_primal(a, symbolic_zeros=False) for a in (rows.shift, rows.label))
    return rows, _Rows(d_log_prob, d_entropy, no_shift, d_log_sum, d_gap, no_label)


def _row_values(config: _Config, results_alone: bool, x: Array, labels: Array, where: Array | None) -> _Rows:
    label, is_empty = label_here(None, labels, x.shape[-1]), x.shape[-1] == 0
    where = jnp.zeros(x.shape, bool) if is_empty else where
    live = None if where is None else unfolded.any_of(where, -1)
    log_prob, shift, log_sum, gap = (_zeros if is_empty else _log_prob_and_sums)(config, x, label, where, live)
    # In a row with nothing left the label does not matter.
    valid = selected(nan_unless(label.squeeze(-1) >= 0, log_prob.dtype), live, 1)
    log_prob = valid * selected(log_prob, live)
    entropy = None if gap is None else log_sum + gap
    rows = _Rows(log_prob, entropy) if results_alone else _Rows(log_prob, entropy, shift, log_sum, gap)
    rows = _Rows(*(a if a is None else a[..., None] for a in rows))
    return rows if results_alone else rows._replace(label=label)


def _log_prob_and_sums(
    config: _Config, x: Array, label: Array, where: Array | None, live: Array | None
) -> tuple[Array, Array, Array, Array | None]:
    """The log-probability, m, log1p(s), and g if it is wanted; every array is `[...]`."""
    # Without the axis of the classes: XLA's CPU compiler takes twice as long for many short rows that keep it.
    dtype, label_x = precision.wide_dtype(x.dtype), value_at_label(None, x, where, label)
    x = lowest_under_mask(x, where)
    shift = below_infinity(jnp.max(x, -1, keepdims=True).astype(dtype))
    z = config.divided(x.astype(dtype) - shift)
    label_z, shift = config.divided(label_x.astype(dtype) - shift).squeeze(-1), shift.squeeze(-1)
    if config.with_entropy:
        log_sum = log_sum_exp(z, where).squeeze(-1)
        gap = jnp.sum(selected(jnp.exp(z) * _gaps(z), where), -1) * jnp.exp(-log_sum)
        return label_z - log_sum, shift, log_sum, gap
    others = jnp.sum(selected(exps_of_others(z, label), where), -1)
    log_sum = selected(jnp.log1p(others + jnp.expm1(label_z)), live)
    return label_z - log_sum, shift, log_sum, None


def _zeros(config: _Config, x: Array, *_: Any) -> tuple[Array, Array, Array, Array | None]:
    """The same of rows without classes."""
    zero = jnp.sum(x, -1, dtype=precision.wide_dtype(x.dtype))
    return zero, zero, zero, zero if config.with_entropy else None


def _gaps(z: Array) -> Array:
    """-z, but finite where the exponential of z is 0."""
    return jnp.minimum(-z, 1000)


@functools.partial(jax.jit, static_argnums=0)
def _pull_back(
    config: _Config, inputs: Labelled, temperature: Array | None, rows: _Rows, d_log_p: Array, d_entropy: Array | None
) -> Array:
    config, logits = config.with_temperature(temperature), inputs.logits
    x, _, mask = inputs._replace(labels=rows.label.squeeze(-1)).rows(config.axes)
    if sharding.are_whole(logits):
        # A CPU computes the exponentials again, else the forward pass would write them to memory for the reverse pass.
        rows, x = platforms.unfused_on_cpu((rows, x))
    _, of_log_prob, of_entropy = _slopes(config, x, mask, rows)
    d_z = _product_where_used(mask, _has_log_prob(rows), of_log_prob, d_log_p)
    if of_entropy is not None and d_entropy is not None:
        d_z += _product_where_used(mask, _has_entropy(rows), of_entropy, d_entropy)
    return computed_once(from_rows(config.axes, logits, config.divided(d_z)))


def _product_where_used(mask: Array | None, is_sound: Array, slopes: Array, d: Array) -> Array:
    """The slopes times a cotangent of their rows, NaN in an unsound row unless its cotangent is 0."""
    d = d.astype(slopes.dtype)[..., None]
    live = takes_part(is_sound, d, mask)
    # Selected after the product, since the cotangent of a masked row may be infinite, as for sqrt(0).
    return jnp.where(live, slopes * jnp.where(is_sound, d, jnp.nan), 0)


def _slopes(config: _Config, x: Array, where: Array | None, rows: _Rows) -> tuple[Array, Array, Array | None]:
    """The probabilities, and the derivatives of log p_y and of H with respect to z, for rows that are sound."""
    z = config.divided(selected(x, where, -jnp.inf).astype(rows.shift.dtype) - rows.shift)
    p: Array = jnp.exp(z) * jnp.exp(-rows.log_sum)
    of_log_prob = jnp.where(class_index(x.shape) == rows.label, -jnp.expm1(rows.log_prob), -p)
    return p, of_log_prob, p * (_gaps(z) - rows.gap) if config.with_entropy else None


def _has_log_prob(rows: _Rows) -> Array:
    """False for a row without an entropy, and for one whose label is out of range."""
    return cast(Array, _has_entropy(rows) & (rows.log_prob == rows.log_prob))


def _has_entropy(rows: _Rows) -> Array:
    """False for a row that contains a NaN or +inf, or contains only -inf."""
    # Comparisons, since XLA's compiler for GPUs cannot fuse `isfinite` with a reduction.
    return jnp.abs(rows.log_sum) < jnp.inf
