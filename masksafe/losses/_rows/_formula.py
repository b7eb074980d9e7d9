"""The formula of a loss, for one row of logits; `_token_blocks` and `_class_tiles` go through the rows.

A formula needs some sums over the classes of a row. The outputs of the row follow from the sums; the cotangents of its
logits follow from the sums and the cotangents of the outputs.
"""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from masksafe._core import sharding
from masksafe._core.masks import selected
from masksafe._core.typing import Array, Arrays, Index, Pytree


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


class LogitPart(NamedTuple):
    """The logits of some rows `[..., n]` at some of the classes."""

    logits: Array
    is_label: Array
    unmasked: Array | None = None  # which of the classes are unmasked; None: all
    class_weights: Array | None = None  # [n]
    label: Array | None = None  # `[..., 1]`, if it may be looked up
    first: Index = 0  # the first of the classes
    unmasked_rows: Array | None = None  # `[..., 1]`; sums of masked rows may be anything, but their largest is finite


class Formula(abc.ABC):
    """A loss of rows: of the logits `[..., V]` of one layer or two, and of further data, such as labels."""

    names: tuple[str, ...]  # of the outputs of a row

    @property
    def gradients(self) -> int:
        """How many of the layers have gradients: the first ones."""
        return 1

    @property
    def label_outputs(self) -> int:
        """How many of the outputs depend on a label, and are NaN if it is out of range: the first ones."""
        return 0

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


class FormulaByParts(Formula):
    """A formula of one layer whose sums over parts of the classes can be added up.

    Its rows can be computed in tiles of the classes, and each device can have some of the classes.
    """

    @abc.abstractmethod
    def sums_of_each(self, part: LogitPart) -> Pytree:
        """The sums over each logit alone."""

    @abc.abstractmethod
    def add(self, a: Any, b: Any) -> Pytree:
        """The sums over two parts of the classes together."""

    @abc.abstractmethod
    def add_devices(self, classes: Classes, sums: Any) -> Pytree:
        """The sums over the classes of all devices."""

    @abc.abstractmethod
    def slopes(self, sums: Any, labels: Array, classes: int, d_outputs: Arrays) -> Any:
        """A NamedTuple of what the cotangents of a row's logits have in common; its `shift` is subtracted from them."""

    @abc.abstractmethod
    def logit_cotangents(self, part: LogitPart, slopes: Any) -> Array:
        """The cotangents of some logits of some rows."""


def nan_if_bad(d_output: Array, valid: Array) -> Array:
    """The cotangent of an output, NaN where it is not valid; a cotangent of 0 stays: the user has replaced the NaN."""
    return jnp.where(valid | (d_output == 0), d_output, jnp.nan)
