"""Rows of logits that are an array: a CPU takes their sums in blocks of rows, which stay in the cache.

The arguments are in the user's layout, which avoids copies among the residuals.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from masksafe._core import platforms, row_blocks, run_time, sharding, tiles
from masksafe._core.derivatives import rule_with_plain_form
from masksafe._core.labels import is_soft
from masksafe._core.masks import both, masks_rows, selected
from masksafe._core.precision import wide_dtype, widened
from masksafe._core.typing import Array, Arrays, Axes, Pytree
from masksafe.losses._labelled import Labelled
from masksafe.losses._layout import from_rows
from masksafe.losses._rows._arguments import cleaned_class_weights
from masksafe.losses._rows._cross_entropy import CrossEntropy, TargetCrossEntropy, logit_tile
from masksafe.losses._rows._formula import Classes, LogitTile, nan_if_bad


class RowLoss(NamedTuple):
    """The static arguments of the op."""

    formula: CrossEntropy | TargetCrossEntropy
    axes: Axes  # of the classes
    axis_name: sharding.AxisName = None  # the mesh axis over which the classes are split
    # Whether JAX differentiates what is computed. Then the logit of the label is not looked up, since checkify cannot
    # check the derivative, a scatter; and masked rows are selected before anything is computed.
    is_plain: bool = False

    def tile(self, x: Array, labels: Array, where: Array | None, weights: Array | None) -> LogitTile:
        """Some rows, with labels or targets, and the weights of the classes at the rank of the rows."""
        if is_soft(labels):
            tile = LogitTile(x, targets=labels)
        else:
            weights = None if weights is None else jnp.squeeze(weights, tuple(range(weights.ndim - 1)))
            tile = logit_tile(x, labels, Classes(x.shape[-1], self.axis_name, weights))
            tile = tile._replace(label=None if self.is_plain or self.axis_name is not None else labels)
        # A mask of rows is applied to their outputs, except in JAX's own derivatives, where masked logits give a NaN.
        masks_whole_rows = not self.is_plain and masks_rows(where, (-1,))
        return tile._replace(unmasked_rows=where) if masks_whole_rows else tile._replace(unmasked=where)


_Args = tuple[Labelled, Array | None]  # the arrays, and what replaces a number of the formula
_Residuals = tuple[Pytree, Array | None]  # the sums, and which rows have an unmasked class; None: all


def _forward(
    config: RowLoss, inputs: Labelled, number: Array | None, *, value_alone: bool = False
) -> tuple[Arrays, _Residuals]:
    x, labels, where = inputs.rows(config.axes)
    formula, devices = config.formula.at(number), sharding.Devices(config.axis_name)
    unmasked, classes = _unmasked_rows(x, where, config.axis_name), Classes(x.shape[-1], config.axis_name)
    rows = x, _with_valid_labels(labels, unmasked), where, _weights_at_rank(inputs)
    is_wide = x.dtype == wide_dtype(x.dtype)  # XLA writes what it widens (jax 0.12, a CPU, 2048x32768: 256 MiB)
    # In blocks, devices would exchange sums once per block.
    if devices.are_many or (is_wide and not formula.has_other_sums and _is_one_fusion(value_alone, where, x)):
        sums = formula.sums(config.tile(*rows))
    else:
        sums = row_blocks.map_row_blocks(lambda *rows: formula.sums(config.tile(*rows)), *rows)
    sums = formula.add_devices(classes, sums)
    cleaned = jax.tree.map(lambda x: selected(x, unmasked), sums)._replace(total=selected(sums.total, unmasked, 1))
    if not config.is_plain:  # the rule selects later, in fewer passes
        cleaned = cleaned._replace(largest=sums.largest)
    outputs = nan_if_bad(formula, formula.outputs(cleaned, classes.number), rows[1], classes.number)
    outputs = tuple(selected(output, unmasked).squeeze(-1) for output in outputs)
    return sharding.vary_with(outputs, x) if devices.are_many else outputs, (cleaned, unmasked)


def _with_valid_labels(labels: Array, unmasked: Array | None) -> Array:
    """A masked row has a valid label; targets stay."""
    return labels if is_soft(labels) else selected(labels, unmasked)


def _weights_at_rank(inputs: Labelled) -> Array | None:
    if inputs.class_weights is None:
        return None
    weights = sharding.gathered_along(cleaned_class_weights(inputs.class_weights), 0)  # the mesh may split them by rows
    return jnp.expand_dims(weights, range(inputs.labels.ndim))


def _unmasked_rows(x: Array, where: Array | None, axis_name: sharding.AxisName = None) -> Array | None:
    """Which rows have an unmasked class; None: all."""
    if x.shape[-1] == 0:
        return jnp.zeros((*x.shape[:-1], 1), bool)
    return None if where is None else sharding.Devices(axis_name).any(run_time.any_of(where, -1, keepdims=True))


def _is_one_fusion(value_alone: bool, where: Array | None, *rows: Array) -> bool:
    """Whether the library of XLA's CPU compiler makes one fusion of sums over rows. It does not select.

    Before a reverse pass XLA stores the exponentials of all rows in any case; for values alone blocks keep a long row
    in the cache until it is read again. With jax 0.12 24576x1000 takes 6 ms in one fusion and 10 in blocks, 1024x50257
    takes 91 and 51.
    """
    choices = platforms.choices()
    if not choices.has_fusion_library or not masks_rows(where, (-1,)) or any(map(sharding.has_symbolic_size, rows)):
        return False
    return not value_alone or sum(x.shape[-1] for x in rows) <= choices.longest_row_of_fusions


# The value. That of targets may be one fusion of the textbook's formula, which is looked at and repaired.


def _value(config: RowLoss, inputs: Labelled, number: Array | None) -> Arrays:
    if is_soft(inputs.labels) and _is_loss_one_fusion(config, inputs):
        kernel = functools.partial(_loss_in_one_fusion, config)
        return platforms.by_platform(functools.partial(_value_by_rows, config), inputs, number, cpu=kernel)
    # Unfused: XLA would compute all rows and their mean on one core (jax 0.12, 24576x1000: 123 ms for 19).
    return platforms.unfused(_forward(config, inputs, number, value_alone=True)[0], on="cpu")


def _is_loss_one_fusion(config: RowLoss, inputs: Labelled) -> bool:
    (x, t, where), choices = inputs.rows(config.axes), platforms.choices()
    # On an automatic mesh there are no blocks, which a long row would need.
    is_one = _is_one_fusion(sharding.may_loop(inputs), where, x, t) and wide_dtype(x.dtype) == wide_dtype(t.dtype)
    return is_one and sharding.are_whole(inputs) and x.size >= choices.fewest_elements_of_fusions


def _value_by_rows(config: RowLoss, inputs: Labelled, number: Array | None) -> Arrays:
    return _forward(config, inputs, number, value_alone=True)[0]


def _loss_in_one_fusion(config: RowLoss, inputs: Labelled, number: Array | None) -> Arrays:
    """The losses, of which those that are not finite are computed by rows, in a loop of at most one turn."""
    x, t, where = inputs.rows(config.axes)
    formula = config.formula.at(number)
    assert isinstance(formula, TargetCrossEntropy)
    loss = selected(formula.textbook_loss(widened(x), widened(t)), where).squeeze(-1)
    again = lambda: _value_by_rows(config, *platforms.unfused((inputs, number)))[0]  # noqa: E731
    repaired = lambda loss: jnp.where(jnp.isfinite(loss), loss, again())  # noqa: E731, other rows keep their bits
    return (tiles.once_if(run_time.any_of(~jnp.isfinite(loss)), repaired, loss),)


# The reverse pass.


def _in_reverse(config: RowLoss, args: _Args, residuals: _Residuals, d_outputs: Arrays) -> _Args:
    """Masks rows without derivatives whose cotangents are 0: the user has replaced their results, and any NaN."""
    inputs, number = args
    has_derivatives = config.formula.at(number).has_derivatives(residuals[0]).squeeze(-1)
    takes_part = functools.reduce(jnp.logical_or, [d != 0 for d in d_outputs], has_derivatives)
    return inputs._replace(where=both(inputs.where, jnp.expand_dims(takes_part, config.axes))), number


def _reverse(config: RowLoss, args: _Args, residuals: _Residuals, d_outputs: Arrays) -> tuple[Labelled, Array | None]:
    (inputs, number), (sums, unmasked) = args, residuals
    x, labels, where = inputs.rows(config.axes)
    labels, formula = _with_valid_labels(labels, unmasked), config.formula.at(number)
    devices = sharding.Devices(config.axis_name)
    d_rows = tuple(devices.sum(d).astype(sums.total.dtype)[..., None] for d in d_outputs)
    d_sums = formula.d_sums(sums, labels, Classes(x.shape[-1], config.axis_name).number, d_rows)
    tile = config.tile(x, labels, where, _weights_at_rank(inputs))._replace(label=None)
    d_x, d_t = formula.d_tile(tile, d_sums, computed_again=False)
    # Selected once more after the product, since the cotangent of a masked row may be infinite, as for sqrt(0).
    d_logits = platforms.computed_once(from_rows(config.axes, inputs.logits, selected(d_x, where)))
    if d_t is None:
        return Labelled(d_logits, None, None), None
    (d,) = d_rows
    d_t = selected(jnp.where((jnp.abs(d_t) < jnp.inf) | (d != 0), d_t, 0), where)
    d_epsilon = None
    if number is not None:
        d_epsilon = jnp.where(d == 0, 0, selected((sums.catchable - sums.caught / sums.total) * d, unmasked))
    return Labelled(d_logits, from_rows(config.axes, inputs.labels, d_t), None), d_epsilon


# The outputs `[...]` of rows, wide, 0 for empty rows. An array replaces the temperature, or the epsilon of PolyLoss.
outputs_of_rows = rule_with_plain_form(
    _forward,
    _reverse,
    _in_reverse,
    value=_value,
    plain=lambda config, *args: _forward(config._replace(is_plain=True), *args)[0],
)
