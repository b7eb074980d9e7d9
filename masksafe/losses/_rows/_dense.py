"""Rows of logits that are an array: a CPU takes their sums in blocks of rows, which stay in the cache.

The arguments are in the user's layout, which avoids copies among the residuals.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms, row_blocks, sharding, tiles, unfolded
from masksafe._core.derivatives import computed_once, rule_of_kernels
from masksafe._core.exponentials import Exponentials
from masksafe._core.masks import both, masks_rows, selected
from masksafe._core.precision import wide_dtype, widened
from masksafe._core.typing import Array, Arrays, Axes, Pytree, Tree
from masksafe.losses._labelled import Labelled
from masksafe.losses._layout import from_rows
from masksafe.losses._rows import _cross_entropy as formulas
from masksafe.losses._rows._arguments import cleaned_class_weights
from masksafe.losses._rows._cross_entropy import CrossEntropy, LabelSums, TargetCrossEntropy, TargetSums
from masksafe.losses._rows._formula import Classes, LogitPart


class LabelConfig(NamedTuple):
    """The static arguments of the op of rows with labels."""

    formula: CrossEntropy
    axes: Axes  # of the classes
    axis_name: str | None = None  # the mesh axis over which the classes are split
    # Whether the logit of the label is looked up: the derivative is a scatter, which checkify cannot check.
    looks_up: bool = True

    def part(self, x: Array, labels: Array, where: Array | None, weights: Array | None) -> LogitPart:
        weights = None if weights is None else jnp.squeeze(weights, tuple(range(weights.ndim - 1)))
        part = formulas.logit_part(x, labels, Classes(x.shape[-1], self.axis_name, weights))
        # A mask of rows is applied to their outputs, except in JAX's own derivatives, where masked logits give a NaN.
        masks_whole_rows = self.looks_up and masks_rows(where, (-1,))
        part = part._replace(unmasked_rows=where) if masks_whole_rows else part._replace(unmasked=where)
        return part._replace(label=labels if self.looks_up and self.axis_name is None else None)


Args = tuple[Labelled, Pytree]  # the arrays, and the temperature or the formula of targets
Residuals = tuple[Pytree, Array | None]  # the sums, and which rows have an unmasked class; None: all


def _label_forward(
    config: LabelConfig, inputs: Labelled, temperature: Array | None, *, value_alone: bool = False
) -> tuple[Arrays, Residuals]:
    x, labels, where = inputs.rows(config.axes)
    unmasked = _unmasked_rows(x, where, config.axis_name)
    labels = selected(labels, unmasked)  # a masked row has a valid label
    devices, formula = sharding.Devices(config.axis_name), config.formula.at(temperature)
    classes = Classes(x.shape[-1], config.axis_name)
    sums_of_rows = lambda *rows: formula.sums(config.part(*rows))  # noqa: E731
    rows = x, labels, where, _weights_at_rank(inputs)
    longest = platforms.choices().longest_row_of_kernels if value_alone else None
    # In blocks, devices would exchange sums once per block. Before a reverse pass XLA stores the exponentials of all
    # rows in any case; for values alone blocks keep a long row in the cache until it is read again.
    is_one = x.dtype == wide_dtype(x.dtype) and _are_kernels(where, x, longest=longest)  # XLA writes what it widens
    at_once = devices.are_many or (not formula.has_other_sums and is_one)
    sums = sums_of_rows(*rows) if at_once else row_blocks.map_row_blocks(sums_of_rows, *rows)
    sums = formula.add_devices(classes, sums)
    largest, total, *others = sums
    if not config.looks_up:  # otherwise the rule selects later, in fewer passes
        largest = selected(largest, unmasked)
    # The logarithm has no derivative at 0.
    sums = LabelSums(largest, selected(total, unmasked, 1), *jax.tree.map(lambda x: selected(x, unmasked), others))
    outputs = formula.outputs(sums, labels, classes.number)
    outputs = tuple(selected(output, unmasked).squeeze(-1) for output in outputs)
    return sharding.vary_with(outputs, x) if devices.are_many else outputs, (sums, unmasked)


def _weights_at_rank(inputs: Labelled) -> Array | None:
    if inputs.class_weights is None:
        return None
    weights = sharding.gathered_along(cleaned_class_weights(inputs.class_weights), 0)  # the mesh may split them by rows
    return jnp.expand_dims(weights, range(inputs.labels.ndim))


def _unmasked_rows(x: Array, where: Array | None, axis_name: str | None = None) -> Array | None:
    """Which rows have an unmasked class; None: all."""
    if x.shape[-1] == 0:
        return jnp.zeros((*x.shape[:-1], 1), bool)
    return None if where is None else sharding.Devices(axis_name).any(unfolded.any_of(where, -1, keepdims=True))


def _are_kernels(where: Array | None, *arrays: Array, longest: int | None = None) -> bool:
    """Whether the library of XLA's CPU compiler sums rows of at most `longest` elements in one kernel.

    The library does not select.
    """
    if not platforms.choices().has_kernel_library or not masks_rows(where, (-1,)):
        return False
    if any(map(sharding.has_symbolic_size, arrays)) or len({wide_dtype(x.dtype) for x in arrays}) > 1:
        return False
    return longest is None or sum(x.shape[-1] for x in arrays) <= longest


def _label_reverse(config: LabelConfig, args: Args, residuals: Residuals, d_outputs: Arrays) -> tuple[Labelled, None]:
    (inputs, temperature), (sums, unmasked) = args, residuals
    x, labels, where = inputs.rows(config.axes)
    labels = selected(labels, unmasked)
    formula, devices = config.formula.at(temperature), sharding.Devices(config.axis_name)
    d_rows = tuple(devices.sum(d).astype(sums.total.dtype)[..., None] for d in d_outputs)
    slopes = formula.slopes(sums, labels, Classes(x.shape[-1], config.axis_name).number, d_rows)
    part = config.part(x, labels, where, _weights_at_rank(inputs))
    # Selected once more after the product, since the cotangent of a masked row may be infinite, as for sqrt(0).
    d_x = formula.logit_cotangents(part, slopes, computed_again=False)
    d_x = selected(d_x, where)
    return Labelled(computed_once(from_rows(config.axes, inputs.logits, d_x)), None, None), None


def _in_reverse(axes: Axes, args: Args, residuals: Residuals, d_outputs: Arrays) -> Args:
    """Masks rows without probabilities whose cotangents are 0: the user has replaced their results, and any NaN."""
    inputs, other = args
    has_probabilities = formulas.has_probabilities(residuals[0]).squeeze(-1)
    takes_part = functools.reduce(jnp.logical_or, [d != 0 for d in d_outputs], has_probabilities)
    return inputs._replace(where=both(inputs.where, jnp.expand_dims(takes_part, axes))), other


# Outputs `[...]` of rows with labels, wide, 0 for empty rows; a temperature replaces that of the formula.
label_outputs = rule_of_kernels(
    _label_forward,
    _label_reverse,
    lambda config, *args: _in_reverse(config.axes, *args),
    value=lambda *args: platforms.unfused_on_cpu(_label_forward(*args, value_alone=True)[0]),
    plain=lambda config, *args: _label_forward(config._replace(looks_up=False), *args)[0],
)


# The loss of targets.


def _target_forward(
    axes: Axes, inputs: Labelled, formula: TargetCrossEntropy, *, fewest: int | None = None
) -> tuple[Arrays, Residuals]:
    by_rows = functools.partial(_target_by_rows, axes)

    def in_one_kernel(inputs: Labelled, formula: TargetCrossEntropy) -> tuple[Array, Residuals]:
        x, t, where = inputs.rows(axes)
        loss = selected(formula.textbook_loss(widened(x), widened(t)), where)
        again = lambda: by_rows(*platforms.unfused((inputs, formula)))  # noqa: E731
        repaired = lambda loss: jnp.where(jnp.isfinite(loss), loss, again()[0])  # noqa: E731, other rows keep their bits
        return tiles.once_if(unfolded.any_of(~jnp.isfinite(loss)), repaired, loss), again()[1]

    loss, residuals = _by_kernels(axes, fewest, in_one_kernel, by_rows, inputs, formula)
    return (loss.squeeze(-1),), residuals


def _target_by_rows(axes: Axes, inputs: Labelled, formula: TargetCrossEntropy) -> tuple[Array, Residuals]:
    sums_of = lambda x, t, where, formula: formula.sums(x, t, where)  # noqa: E731
    x, t, where = inputs.rows(axes)
    sums, unmasked = row_blocks.map_row_blocks(sums_of, x, t, where, formula), _unmasked_rows(x, where)
    sums = sums._replace(total=selected(sums.total, unmasked, 1))
    return selected(formula.loss(sums), unmasked), (sums, unmasked)


def _target_value(*args: Pytree) -> Arrays:
    return _target_forward(*args, fewest=platforms.choices().fewest_elements_of_kernels)[0]


def _by_kernels(
    axes: Axes, fewest: int | None, in_one_kernel: Callable[..., Tree], by_rows: Callable[..., Tree], *args: Pytree
) -> Tree:
    """The second function of the arguments, or the first one on a CPU, by default where rows would be in blocks.

    XLA's library makes one kernel of the textbook's formula, but does not select. So what it computes is looked at, and
    repaired in a loop of at most one turn. Before a reverse pass of fewer elements, XLA keeps the exponentials.
    """
    (x, t, where), choices = args[0].rows(axes), platforms.choices()
    # The loop goes through no array: a value needs it on an automatic mesh as well, where rows are in one pass.
    is_looked_at = sharding.may_loop(args) if fewest is None else sharding.are_whole(args)
    longest = choices.longest_row_of_kernels if sharding.may_loop(args) else None  # there are no blocks otherwise
    is_served = is_looked_at and _are_kernels(where, x, t, longest=longest)
    if not is_served or x.size < (fewest or choices.most_elements_in_one_pass + 1):
        return by_rows(*args)
    return platforms.on_cpu_or_elsewhere(in_one_kernel, by_rows, *args)


def _target_reverse(axes: Axes, args: Args, residuals: Residuals, d_outputs: Arrays) -> Args:
    (inputs, formula), (sums, unmasked) = args, residuals
    d = d_outputs[0].astype(sums.total.dtype)[..., None]

    def by_rows(inputs: Labelled, formula: TargetCrossEntropy, d: Array, sums: TargetSums) -> tuple[Array, Array]:
        x, t, where = inputs.rows(axes)
        # Rows that the user has replaced are masked in what comes out: the exponentials stay those of the first pass.
        class_mask = None if unmasked is None and masks_rows(where, (-1,)) else where
        slopes, costs = formula.slopes(x, t, class_mask, sums)
        d_t = jnp.where((jnp.abs(costs) < jnp.inf) | (d != 0), costs * d, 0)
        d_logits = from_rows(axes, inputs.logits, selected(slopes * d, where))
        return d_logits, from_rows(axes, inputs.labels, selected(d_t, where))

    def in_one_kernel(inputs: Labelled, formula: TargetCrossEntropy, d: Array, sums: TargetSums) -> tuple[Array, Array]:
        apart = platforms.unfused(inputs)  # so that XLA writes nothing that the loss has in common with this
        x, t, where = apart.rows(axes)
        d_x = from_rows(axes, inputs.logits, formula.textbook_logit_slopes(widened(x), widened(t)) * d)
        if where is not None:
            d_x = tiles.once_if(unfolded.any_of(~where), lambda d_x: selected(d_x, inputs.where), d_x)
        return d_x, by_rows(platforms.unfused(apart), formula, d, sums)[1]

    d_x, d_t = _by_kernels(axes, None, in_one_kernel, by_rows, inputs, formula, d, sums)
    d_epsilon = None
    if formula.epsilon is not None:
        d_epsilon = selected((sums.weight - sums.caught) * d, unmasked)
        d_epsilon = jnp.where(d == 0, 0, d_epsilon).astype(formula.epsilon.dtype)
    return Labelled(computed_once(d_x), d_t, None), TargetCrossEntropy(d_epsilon)


def _in_target_reverse(axes: Axes, args: Args, residuals: Residuals, d_outputs: Arrays) -> Args:
    """`_in_reverse`; where a kernel has computed the loss, rows are looked at once more if any cotangent is 0."""
    (inputs, formula), (d_loss,) = args, d_outputs

    def in_one_kernel(inputs: Labelled, is_needed: Array, _: Array) -> Array:
        x, t = platforms.unfused(lax.stop_gradient(inputs)).rows(axes)[:2]
        has_slopes = lambda: formula.has_slopes(Exponentials.of(x), jnp.sum(widened(t), -1, keepdims=True))  # noqa: E731
        add = lambda is_needed: is_needed | has_slopes().squeeze(-1)  # noqa: E731
        return tiles.once_if(unfolded.any_of(~is_needed), add, is_needed)

    by_rows = lambda _, is_needed, is_valid: is_needed | is_valid  # noqa: E731
    needed_and_valid = d_loss != 0, formula.has_slopes(residuals[0], residuals[0].weight).squeeze(-1)
    takes_part = _by_kernels(axes, None, in_one_kernel, by_rows, inputs, *needed_and_valid)
    return inputs._replace(where=both(inputs.where, jnp.expand_dims(takes_part, axes))), formula


# The loss `[...]` of rows with targets, wide, 0 for empty rows, of a `TargetCrossEntropy`.
target_loss_of_rows = rule_of_kernels(
    _target_forward,
    _target_reverse,
    _in_target_reverse,
    value=_target_value,
    plain=lambda *args: (_target_by_rows(*args)[0].squeeze(-1),),
)
