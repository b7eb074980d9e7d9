"""The formula of a loss, for one row of logits; `_token_blocks` and `_class_tiles` go through the rows.

A formula needs some sums over the classes of a row. The outputs of the row follow from the sums; the cotangents of its
logits follow from the sums and the cotangents of the outputs.
"""

import abc
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from masksafe._core import sharding
from masksafe._core.masks import selected
from masksafe._core.typing import Array, Arrays, Pytree


class Classes(NamedTuple):
    """The classes of the rows."""

    here: int  # the number on this device
    axis_name: sharding.AxisName  # the mesh axis over which they are split
    weights: Array | None = None  # one for each class of this device

    @property
    def number(self) -> int:
        """The number of classes on all devices."""
        return self.here * sharding.Devices(self.axis_name).size

    def local(self, labels: Array) -> Array:
        """Global labels as labels among the classes of this device."""
        return sharding.Devices(self.axis_name).local(labels, self.here)


class Formula(abc.ABC):
    """A loss of rows: of the logits `[..., V]` of one layer or two, and of further data, such as labels."""

    # Whether the sums over parts of the classes can be added up. Then rows can be computed in tiles of the classes, and
    # each device can have some of the classes.
    by_parts: ClassVar[bool] = False

    @property
    def gradients(self) -> int:
        """How many of the layers have gradients: the first ones."""
        return 1

    @property
    @abc.abstractmethod
    def depends_on_label(self) -> tuple[bool, ...]:
        """Whether each output of a row depends on a label, and is NaN if that is out of range."""

    @property
    def cotangent_exponent(self) -> int:
        """The power of two that brings the cotangents of the logits into the range of float16."""
        return 10

    def cleaned(self, data: Pytree, unmasked: Array | None) -> Pytree:
        """The data, with harmless values in masked rows."""
        return jax.tree.map(lambda x: selected(x, unmasked), data)

    @abc.abstractmethod
    def empty_sums(self, zero: Array) -> Pytree:
        """The sums over no class: a NamedTuple of arrays like the zero `[..., 1]`."""

    @abc.abstractmethod
    def sums_of(self, logits: Arrays, data: Pytree, classes: Classes, tile_size: int) -> Pytree:
        """The sums over all classes, `[..., 1]` each, computed in tiles of the classes."""

    @abc.abstractmethod
    def outputs(self, sums: Pytree, data: Pytree, classes: int) -> Arrays:
        """The outputs `[..., 1]`."""

    @abc.abstractmethod
    def cotangents(self, logits: Arrays, data: Pytree, classes: Classes, sums: Pytree, d_outputs: Arrays) -> Arrays:
        """The cotangents of the logits of the layers that have gradients."""

    @abc.abstractmethod
    def plain_outputs(self, logits: Arrays, data: Pytree, classes: Classes) -> Arrays:
        """The outputs in a form that JAX differentiates to any order."""


def nan_if_bad(d_output: Array, valid: Array) -> Array:
    """The cotangent of an output, NaN where it is not valid; a cotangent of 0 stays: the user has replaced the NaN."""
    return jnp.where(valid | (d_output == 0), d_output, jnp.nan)
