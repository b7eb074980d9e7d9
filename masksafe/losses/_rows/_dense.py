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
from masksafe._core.precision import widened
from masksafe._core.typing import Array, Arrays, Axes, Pytree, Tree
from masksafe.losses._labelled import Labelled
from masksafe.losses._layout import from_rows
from masksafe.losses._rows._cross_entropy import (
    CrossEntropy,
    LabelSums,
    LogitPart,
    TargetSums,
    is_sound,
    logit_part,
    target_loss,
    target_slopes,
    target_sums,
    textbook_logit_slopes,
    textbook_target_loss,
)
from masksafe.losses._rows._formula import Classes


class OfLabels(NamedTuple):
    """The outputs of rows with labels, and the axes of their classes."""

    formula: CrossEntropy
    axes: Axes  # of the classes
    axis_name: str | None = None  # the mesh axis over which the classes are split
    looks_up: bool = True  # the logit of the label; JAX's derivative of that is a scatter, which checkify cannot check

    def part(self, x: Array, labels: Array, where: Array | None) -> LogitPart:
        part = logit_part(x, labels, Classes(x.shape[-1], self.axis_name))
        # Rows are masked by what comes out of them. Derivatives of JAX's own would have a NaN of masked logits.
        is_of_rows = self.looks_up and masks_rows(where, (-1,))
        part = part._replace(live_rows=where) if is_of_rows else part._replace(live=where)
        return part._replace(label=labels if self.looks_up and self.axis_name is None else None)


Args = tuple[Labelled, Array | None]  # the arrays, and the temperature or the epsilon
Kept = tuple[Pytree, Array | None]  # the sums, and which rows have a class left; None: all


def _label_forward(
    config: OfLabels, inputs: Labelled, temperature: Array | None, *, value_alone: bool = False
) -> tuple[Arrays, Kept]:
    x, labels, where = inputs.rows(config.axes)
    live = _live_rows(x, where, config.axis_name)
    labels = selected(labels, live)  # one that is out of range is gone with its row
    devices, formula = sharding.Devices(config.axis_name), config.formula.at(temperature)
    classes = Classes(x.shape[-1], config.axis_name)
    of_sums = lambda x, labels, where: formula.sums(config.part(x, labels, where))  # noqa: E731
    longest = platforms.choices().longest_row_of_kernels if value_alone else None
    # In blocks, devices would have to exchange sums once per block. Before a reverse pass the exponentials of all rows
    # are kept where the cotangents will be; for values alone a long row leaves the cache before it is read once more.
    at_once = devices.are_many or (not formula.has_other_sums and _are_kernels(where, x, longest=longest))
    sums = of_sums(x, labels, where) if at_once else row_blocks.map_row_blocks(of_sums, x, labels, where)
    sums = formula.add_devices(classes, sums)
    largest, total, *others = sums
    if not config.looks_up:  # else the rule selects what it makes of the lowest number, in as few passes as it can
        largest = selected(largest, live)
    # The logarithm has no derivative at 0.
    sums = LabelSums(largest, selected(total, live, 1), *jax.tree.map(lambda x: selected(x, live), others))
    outputs = formula.outputs(sums, labels, classes.number)
    outputs = tuple(selected(output, live).squeeze(-1) for output in outputs)
    return sharding.vary_with(outputs, x) if devices.are_many else outputs, (sums, live)


def _live_rows(x: Array, where: Array | None, axis_name: str | None = None) -> Array | None:
    """Finds the rows that have a class left."""
    if x.shape[-1] == 0:
        return jnp.zeros((*x.shape[:-1], 1), bool)
    return None if where is None else sharding.Devices(axis_name).any(unfolded.any_of(where, -1, keepdims=True))


def _are_kernels(where: Array | None, *arrays: Array, longest: int | None = None) -> bool:
    """Whether the library of XLA's CPU compiler makes one kernel of a sum over each row of arrays, of so many elements.

    The library does not select, and what is widened is written to memory.
    """
    if not platforms.choices().has_kernel_library or not masks_rows(where, (-1,)):
        return False
    if any(sharding.has_symbolic_size(x) or widened(x).dtype != arrays[0].dtype for x in arrays):
        return False
    return longest is None or sum(x.shape[-1] for x in arrays) <= longest


def _label_reverse(config: OfLabels, args: Args, kept: Kept, d_outputs: Arrays) -> tuple[Labelled, None]:
    (inputs, temperature), (sums, live) = args, kept
    x, labels, where = inputs.rows(config.axes)
    labels = selected(labels, live)
    formula, devices = config.formula.at(temperature), sharding.Devices(config.axis_name)
    d_rows = tuple(devices.sum(d).astype(sums.total.dtype)[..., None] for d in d_outputs)
    slopes = formula.slopes(sums, labels, Classes(x.shape[-1], config.axis_name).number, d_rows)
    # Selected once more after the product, since the cotangent of a masked row may be infinite, as for sqrt(0).
    d_x = formula.logit_cotangents(config.part(x, labels, where), slopes, computed_again=False)
    d_x = selected(d_x, where)
    return Labelled(computed_once(from_rows(config.axes, inputs.logits, d_x)), None, None), None


def _in_reverse(axes: Axes, args: Args, kept: Kept, d_outputs: Arrays) -> Args:
    """Masks rows that are not sound whose cotangents are 0: the user has replaced their results, and any NaN."""
    inputs, other = args
    takes_part = functools.reduce(jnp.logical_or, [d != 0 for d in d_outputs], is_sound(kept[0]).squeeze(-1))
    return inputs._replace(where=both(inputs.where, jnp.expand_dims(takes_part, axes))), other


# Outputs `[...]` of rows with labels, wide, 0 where nothing is left; a temperature replaces that of the formula.
label_outputs = rule_of_kernels(
    _label_forward,
    _label_reverse,
    lambda config, *args: _in_reverse(config.axes, *args),
    value=lambda *args: platforms.unfused_on_cpu(_label_forward(*args, value_alone=True)[0]),
    plain=lambda config, *args: _label_forward(config._replace(looks_up=False), *args)[0],
)


# The loss of targets.


def _target_forward(
    axes: Axes, inputs: Labelled, epsilon: Array | None, *, fewest: int | None = None
) -> tuple[Arrays, Kept]:
    args = inputs, None if epsilon is None else epsilon[..., None]
    by_rows = functools.partial(_target_by_rows, axes)

    def in_one_kernel(inputs: Labelled, epsilon: Array | None) -> tuple[Array, Kept]:
        x, t, where = inputs.rows(axes)
        loss = selected(textbook_target_loss(widened(x), widened(t), epsilon), where)
        again = lambda: by_rows(*platforms.unfused((inputs, epsilon)))  # noqa: E731
        return tiles.once_if(unfolded.any_of(~jnp.isfinite(loss)), lambda _: again()[0], loss), again()[1]

    loss, kept = _by_kernels(axes, fewest, in_one_kernel, by_rows, *args)
    return (loss.squeeze(-1),), kept


def _target_by_rows(axes: Axes, inputs: Labelled, epsilon: Array | None) -> tuple[Array, Kept]:
    x, t, where = inputs.rows(axes)
    sums, live = row_blocks.map_row_blocks(target_sums, x, t, where, epsilon), _live_rows(x, where)
    sums = sums._replace(total=selected(sums.total, live, 1))
    return selected(target_loss(sums, epsilon), live), (sums, live)


def _target_plain(axes: Axes, inputs: Labelled, epsilon: Array | None) -> Arrays:
    return (_target_by_rows(axes, inputs, None if epsilon is None else epsilon[..., None])[0].squeeze(-1),)


def _target_value(axes: Axes, inputs: Labelled, epsilon: Array | None) -> Arrays:
    return _target_forward(axes, inputs, epsilon, fewest=platforms.choices().fewest_elements_of_kernels)[0]


def _by_kernels(
    axes: Axes, fewest: int | None, in_one_kernel: Callable[..., Tree], by_rows: Callable[..., Tree], *args: Pytree
) -> Tree:
    """The second function of the arguments, or the first one on a CPU, by default where rows would be in blocks.

    XLA's library makes one kernel of the textbook's formula, but does not select. So what it computes is looked at, and
    repaired in a loop of at most one turn. Before a reverse pass of fewer elements, XLA keeps the exponentials.
    """
    (x, t, where), choices = args[0].rows(axes), platforms.choices()
    is_served = choices.has_kernel_library and sharding.may_loop(args) and masks_rows(where, (-1,))
    is_served &= not any(map(sharding.has_symbolic_size, (x, t))) and widened(x).dtype == widened(t).dtype
    is_served = is_served and x.size >= (fewest or choices.most_elements_in_one_pass + 1)
    if not is_served or 2 * x.shape[-1] > choices.longest_row_of_kernels:
        return by_rows(*args)
    return platforms.on_cpu_or_elsewhere(in_one_kernel, by_rows, *args)


def _target_reverse(axes: Axes, args: Args, kept: Kept, d_outputs: Arrays) -> Args:
    (inputs, epsilon), (sums, live), (d_loss,) = args, kept, d_outputs
    of_rows, d = None if epsilon is None else epsilon[..., None], d_loss.astype(sums.total.dtype)[..., None]

    def by_rows(inputs: Labelled, epsilon: Array | None, d: Array, sums: TargetSums) -> tuple[Array, Array]:
        x, t, where = inputs.rows(axes)
        # Rows that the user has replaced are masked in what comes out: the exponentials stay those of the first pass.
        of_classes = None if live is None and masks_rows(where, (-1,)) else where
        slopes, costs = target_slopes(x, t, of_classes, epsilon, sums)
        d_t = jnp.where((jnp.abs(costs) < jnp.inf) | (d != 0), costs * d, 0)
        d_logits = from_rows(axes, inputs.logits, selected(slopes * d, where))
        return d_logits, from_rows(axes, inputs.labels, selected(d_t, where))

    def in_one_kernel(inputs: Labelled, epsilon: Array | None, d: Array, sums: TargetSums) -> tuple[Array, Array]:
        x, t, where = platforms.unfused(inputs).rows(axes)  # arrays of their own, apart from the kernel of the loss
        d_x = from_rows(axes, inputs.logits, textbook_logit_slopes(widened(x), widened(t), epsilon) * d)
        if where is not None:
            d_x = tiles.once_if(unfolded.any_of(~where), lambda d_x: selected(d_x, inputs.where), d_x)
        return d_x, by_rows(platforms.unfused(inputs), epsilon, d, sums)[1]

    d_x, d_t = _by_kernels(axes, None, in_one_kernel, by_rows, inputs, of_rows, d, sums)
    d_epsilon = None
    if epsilon is not None:
        d_epsilon = selected((sums.weight - sums.caught) * d, live).squeeze(-1)
        d_epsilon = jnp.where(d_loss == 0, 0, d_epsilon).astype(epsilon.dtype)
    return Labelled(computed_once(d_x), d_t, None), d_epsilon


def _in_target_reverse(axes: Axes, args: Args, kept: Kept, d_outputs: Arrays) -> Args:
    """`_in_reverse`; where a kernel has computed the loss, rows are looked at once more if any cotangent is 0."""
    (inputs, epsilon), (d_loss,) = args, d_outputs

    def by_rows(_: Labelled, is_needed: Array, is_sound: Array) -> Array:
        return is_needed | is_sound

    def in_one_kernel(inputs: Labelled, is_needed: Array, _: Array) -> Array:
        x = platforms.unfused(lax.stop_gradient(inputs)).rows(axes)[0]
        add = lambda is_needed: is_needed | is_sound(Exponentials.of(x)).squeeze(-1)  # noqa: E731
        return tiles.once_if(unfolded.any_of(~is_needed), add, is_needed)

    needed_and_sound = d_loss != 0, is_sound(kept[0]).squeeze(-1)
    takes_part = _by_kernels(axes, None, in_one_kernel, by_rows, inputs, *needed_and_sound)
    return inputs._replace(where=both(inputs.where, jnp.expand_dims(takes_part, axes))), epsilon


# The loss `[...]` of rows with targets, wide, 0 where nothing is left; an epsilon `[...]` adds PolyLoss's term.
target_loss_of_rows = rule_of_kernels(
    _target_forward, _target_reverse, _in_target_reverse, value=_target_value, plain=_target_plain
)
