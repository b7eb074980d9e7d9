"""What a loss says of one row of logits; how rows are gone through is the matter of `_blocks` and `_tiles`.

A formula needs some sums over the classes of a row. From these follow the outputs of the row, and from the sums and the
cotangents of the outputs those of its logits.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax

from masksafe._core import sharding
from masksafe._core.labels import class_index
from masksafe._core.masks import selected
from masksafe._core.soft_cap import pulled_back, soft_capped
from masksafe._core.tiles import Tile, divide, loop, take
from masksafe._core.typing import Array


class Classes(NamedTuple):
    """The classes of the rows."""

    here: int  # how many this device has
    axis_name: sharding.AxisName  # the mesh axis over which they are split
    weights: Array | None  # of those of this device

    @property
    def number(self) -> int:
        """How many all devices have."""
        return self.here * sharding.Devices(self.axis_name).size

    def local(self, labels: Array) -> Array:
        """Labels counted from the first class of this device."""
        return sharding.Devices(self.axis_name).local(labels, self.here)


class Formula(abc.ABC):
    """A function of rows of logits, of one source or two, `[..., V]` each, and of what else is known of a row."""

    # Whether its sums are those of parts of the classes, added up. Then rows can be computed in tiles of the classes,
    # and devices can each have some of the classes.
    by_parts: ClassVar[bool] = False

    @property
    def gradients(self) -> int:
        """How many of the sources have gradients: the first ones."""
        return 1

    @property
    @abc.abstractmethod
    def of_labels(self) -> tuple[bool, ...]:
        """For each output of a row whether it depends on a label, and is NaN if that is out of range."""

    @property
    def cotangent_exponent(self) -> int:
        """That of the power of two that brings the cotangents of the logits into the range of float16."""
        return 10

    @abc.abstractmethod
    def nothing(self, zero: Array) -> Any:
        """The sums over no classes, a NamedTuple of arrays like the zero `[..., 1]`."""

    @abc.abstractmethod
    def sums_of(self, logits: tuple[Array, ...], data: Any, classes: Classes, tile_size: int) -> Any:
        """The sums over all classes, `[..., 1]` each, computed in tiles of the classes."""

    @abc.abstractmethod
    def outputs(self, sums: Any, data: Any, classes: int) -> tuple[Array, ...]:
        """The outputs `[..., 1]`."""

    @abc.abstractmethod
    def cotangents(
        self, logits: tuple[Array, ...], data: Any, classes: Classes, sums: Any, d_outputs: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        """The cotangents of the logits of the sources that have gradients."""

    @abc.abstractmethod
    def plain_outputs(self, logits: tuple[Array, ...], data: Any, classes: Classes) -> tuple[Array, ...]:
        """The outputs in a form that JAX differentiates to any order."""


class Part(NamedTuple):
    """The logits of some rows `[..., n]` at some of the classes."""

    logits: Array
    is_label: Array
    live: Array | None  # which of the classes count; None means all
    class_weights: Array | None  # [n]


@dataclasses.dataclass(frozen=True)
class LabelFormula(Formula):
    r"""A function of a row's label, and of :math:`x = \kappa \tanh(a / \kappa) / T`, where :math:`a` are its logits.

    Its sums are taken of parts of the classes, which then are added up. The labels are `[..., 1]`.
    """

    by_parts = True
    soft_cap: float | None = None
    temperature: float = 1.0

    @abc.abstractmethod
    def sums(self, part: Part) -> Any:
        """The sums over a part, `[..., 1]` each."""

    @abc.abstractmethod
    def sums_of_each(self, part: Part) -> Any:
        """For every logit the sums over it alone."""

    @abc.abstractmethod
    def add(self, a: Any, b: Any) -> Any:
        """The sums over two parts together."""

    @abc.abstractmethod
    def add_devices(self, axis_name: Any, sums: Any) -> Any:
        """The sums over the classes of all devices."""

    def outputs_of_part(self, axis_name: Any, part: Part, labels: Array, classes: int) -> tuple[Array, ...]:
        """The outputs from all logits, of all devices, in a form that JAX differentiates to any order."""
        return self.outputs(self.add_devices(axis_name, self.sums(part)), labels, classes)

    @abc.abstractmethod
    def row_cotangents(self, sums: Any, labels: Array, classes: int, d_outputs: tuple[Array, ...]) -> Any:
        """What the cotangents of a row's logits have in common: a NamedTuple of arrays `[..., 1]`, or None."""

    @abc.abstractmethod
    def cotangents_of_x(self, x: Array, part: Part, rows: Any) -> Array:
        """The cotangents of some x of some rows."""

    def x(self, logits: Array) -> Array:
        capped = soft_capped(logits, self.soft_cap)
        return capped if self.temperature == 1 else capped * (1 / self.temperature)

    def logit_cotangents(self, part: Part, rows: Any) -> Array:
        """The cotangents of some logits of some rows."""
        x = self.x(part.logits)
        d_x = self.cotangents_of_x(x, part, rows)
        if self.temperature == 1:
            return pulled_back(d_x, x, self.soft_cap)
        capped = x if self.soft_cap is None else x * self.temperature
        return pulled_back(d_x * (1 / self.temperature), capped, self.soft_cap)

    def sums_of(self, logits: tuple[Array, ...], data: Array, classes: Classes, tile_size: int) -> Any:
        (x,), tiles = logits, divide(classes.here, tile_size)

        def of_tile(j: Any) -> Any:
            return self.sums(_part(x, data, classes, tiles.tile(j)))

        if tiles.number == 1:
            sums = of_tile(0)
        else:
            nothing = self.nothing(jnp.zeros_like(x[..., :1]))
            sums = loop(0, tiles.number, lambda j, sums: self.add(sums, of_tile(j)), nothing)
        return self.add_devices(classes.axis_name, sums)

    def cotangents(
        self, logits: tuple[Array, ...], data: Array, classes: Classes, sums: Any, d_outputs: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        rows = self.row_cotangents(sums, data, classes.number, d_outputs)
        return (self.logit_cotangents(_part(logits[0], data, classes), rows),)

    def plain_outputs(self, logits: tuple[Array, ...], data: Array, classes: Classes) -> tuple[Array, ...]:
        return self.outputs_of_part(classes.axis_name, _part(logits[0], data, classes), data, classes.number)


def _part(logits: Array, labels: Array, classes: Classes, tile: Tile | None = None) -> Part:
    """A tile of the classes of this device, or all of them."""
    labels = classes.local(labels)
    if tile is None or tile.size == classes.here:
        return Part(logits, class_index(logits.shape).astype(labels.dtype) == labels, None, classes.weights)
    logits = take(logits, logits.ndim - 1, tile)
    index = jnp.asarray(tile.start, jnp.int32) + class_index(logits.shape)
    weights = None if classes.weights is None else take(classes.weights, 0, tile)
    is_label = index.astype(labels.dtype) == labels
    if not tile.is_ragged:
        return Part(logits, is_label, None, weights)
    live = index >= tile.first
    return Part(logits, is_label & live, live, weights)


def nan_if_bad(d_output: Array, valid: Array) -> Array:
    """The cotangent of an output that is NaN where not valid; one of 0 stays, since the user has replaced the NaN."""
    return jnp.where(valid | (d_output == 0), d_output, jnp.nan)


def finite_shift(largest: Array) -> Array:
    """The amount subtracted from the logits: the largest logit, or 0 if that is -inf."""
    return jnp.where(largest == -jnp.inf, 0, largest)


def largest_logit(x: Array, live: Array | None = None) -> Array:
    """The largest `x` of each row `[..., 1]`, but no less than the lowest finite number, so that differences exist."""
    lowest = float(jnp.finfo(x.dtype).min)
    largest: Array = jnp.max(selected(x, live, lowest), -1, keepdims=True, initial=lowest)
    return lax.stop_gradient(largest)
