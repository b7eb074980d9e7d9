"""What a loss says of one row of logits; how rows are gone through is the matter of `_blocks` and `_tiles`.

A formula needs some sums over the classes of a row. They are taken of parts of the classes, which then are added up.
From the sums follow the outputs of the row, and from the sums and the cotangents of the outputs those of its logits.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from masksafe._core.soft_cap import pulled_back, soft_capped
from masksafe._core.typing import Array


class Layer(NamedTuple):
    """The linear layer: kernel `[D, V]` and bias `[V]`; and weights of the classes `[V]`."""

    kernel: Array
    bias: Array | None
    class_weights: Array | None


class Tokens(NamedTuple):
    """Features `[N, D]`, labels `[N]`, and which tokens are unmasked `[N]`; None means all."""

    features: Array
    labels: Array
    live: Array | None


class Part(NamedTuple):
    """The logits of some rows `[..., n]` at some of the classes."""

    logits: Array
    is_label: Array
    live: Array | None  # which of the classes count; None means all
    class_weights: Array | None  # [n]


@dataclasses.dataclass(frozen=True)
class Formula(abc.ABC):
    r"""A function of the rows of :math:`x = \kappa \tanh(a / \kappa) / T`, where :math:`a` are the logits."""

    soft_cap: float | None = None
    temperature: float = 1.0

    @property
    @abc.abstractmethod
    def number(self) -> int:
        """How many outputs a row has."""

    @property
    @abc.abstractmethod
    def of_labels(self) -> tuple[bool, ...]:
        """Which of them depend on the label, and are NaN if it is out of range."""

    @property
    @abc.abstractmethod
    def nothing(self) -> Any:
        """The sums over no classes: a NamedTuple of scalars."""

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

    @abc.abstractmethod
    def outputs(self, sums: Any, labels: Array, classes: int) -> tuple[Array, ...]:
        """The outputs of the rows `[..., 1]`."""

    @abc.abstractmethod
    def outputs_of_logits(self, axis_name: Any, part: Part, labels: Array, classes: int) -> tuple[Array, ...]:
        """The same from all logits, of all devices, in a form that JAX differentiates to any order."""

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


def nan_if_bad(d_output: Array, valid: Array) -> Array:
    """The cotangent of an output that is NaN where not valid; one of 0 stays, since the user has replaced the NaN."""
    return jnp.where(valid | (d_output == 0), d_output, jnp.nan)


def finite_shift(largest: Array) -> Array:
    """The amount subtracted from the logits: the largest logit, or 0 if that is -inf."""
    return jnp.where(largest == -jnp.inf, 0, largest)
