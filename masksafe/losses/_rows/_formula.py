r"""A loss of rows of logits is stated once: the terms of each class, and the outputs of their sums.

.. math::
  m = \max_c x_c, \qquad S = \sum_c \mathrm{terms}(x_c - m), \qquad \text{outputs}(S)

The outputs are the same whatever is subtracted, so :math:`m` is a constant for derivatives. The cotangents of the sums
are those of the outputs, and the cotangents of the logits are those of the terms, class by class: JAX derives both. A
reverse pass keeps the sums.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from masksafe._core import sharding
from masksafe._core.exponentials import finite_largest
from masksafe._core.labels import is_class, nan_unless
from masksafe._core.masks import selected
from masksafe._core.precision import widened
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


class LogitTile(NamedTuple):
    """The logits of some rows `[..., n]` at some of the classes, and their labels or targets."""

    logits: Array
    is_label: Any = None
    unmasked: Array | None = None  # which of the classes are unmasked; None: all
    class_weights: Array | None = None  # [n]
    label: Array | None = None  # `[..., 1]`, if it may be looked up
    first: Index = 0  # the first of the classes
    unmasked_rows: Array | None = None  # `[..., 1]`; sums of masked rows may be anything, but their largest is finite
    targets: Any = None  # in place of a label


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFormula:
    """What follows from a formula's `terms` and `outputs`.

    `terms(tile, shift, x, targets)` are what the classes add to the sums, `[..., n]` each: a NamedTuple with
    exponentials as `total`, and None for what is no sum of terms, such as the `largest` x. `outputs(sums, classes)` are
    those of a row, `[..., 1]` each, from its sums and the number of classes on all devices.
    """

    terms: ClassVar[Any]
    outputs: ClassVar[Any]
    # A form whose first derivative alone is right, with smaller rounding errors.
    has_one_derivative: bool = False

    @property
    def label_outputs(self) -> int:
        """How many of the outputs depend on a label, and are NaN if it is out of range: the first ones."""
        return 0

    def add_devices(self, classes: Classes, sums: Any) -> Any:
        """The sums over the classes of all devices."""
        return sums

    def has_derivatives(self, sums: Any) -> Array:
        """Whether the derivatives of a row are finite."""
        return has_probabilities(sums)

    def for_one_derivative(self) -> Any:
        return dataclasses.replace(self, has_one_derivative=True)

    def x(self, logits: Array, unmasked: Array | None = None) -> Array:
        """The logits, wide; -inf where masked."""
        return widened(selected(logits, unmasked, -jnp.inf))

    def sums(self, tile: LogitTile) -> Any:
        """The sums over the classes of a tile, `[..., 1]` each."""
        x = self.x(tile.logits, tile.unmasked)
        largest = selected(finite_largest(x), tile.unmasked_rows)
        terms = self.terms(tile, largest, x, tile.targets)
        sums = jax.tree.map(lambda term: jnp.sum(term, -1, keepdims=True), terms)
        return self.completed(sums._replace(largest=largest), tile, x)

    def completed(self, sums: Any, tile: LogitTile, x: Array) -> Any:
        """The sums, with what is not a sum of terms."""
        return sums

    def d_sums(self, sums: Any, labels: Array, classes: int, d_outputs: Arrays) -> Any:
        """The cotangents of the sums, with the largest x itself: what the cotangents of a row's logits have in common.

        NaN in a row without probabilities. An output of a bad label has a cotangent of NaN, unless it is 0: then the
        user has replaced the output.
        """
        if self.label_outputs:
            good, n = is_class(labels, classes), self.label_outputs
            d_outputs = (*(jnp.where(good | (d == 0), d, jnp.nan) for d in d_outputs[:n]), *d_outputs[n:])
        sums = sums._replace(total=jnp.where(has_probabilities(sums), sums.total, jnp.nan))
        outputs_of = functools.partial(self.for_one_derivative().outputs, classes=classes)
        found, pull_back = jax.vjp(outputs_of, sums)
        (d_sums,) = pull_back(tuple(map(sharding.vary_with, d_outputs, found)))
        d_sums = jax.tree.map(lambda d: None if d.dtype == jax.dtypes.float0 else d, d_sums)  # that of an integer
        return d_sums._replace(largest=sums.largest)

    def d_tile(self, tile: LogitTile, d_sums: Any, *, computed_again: bool = True) -> tuple[Array, Array | None]:
        """The cotangents of some logits and of their targets; anything where masked."""
        x, pull_back_x = jax.vjp(self.x, tile.logits)
        x = selected(x, tile.unmasked, -jnp.inf)
        # Logits that are computed again may exceed the largest by a rounding. Those of an array are the same as before,
        # and XLA computes their exponentials once (jax 0.12, a CPU, 2048x1024: 2.9 ms for 4.5).
        x = jnp.minimum(x, d_sums.largest) if computed_again else x
        d_x, d_targets = self.d_terms(tile, x, d_sums)
        return pull_back_x(self.with_label(d_x, tile, d_sums))[0], d_targets

    def d_terms(self, tile: LogitTile, x: Array, d_sums: Any) -> tuple[Array, Array | None]:
        """The cotangents of some x and of their targets, by the terms."""
        terms_of = functools.partial(self.for_one_derivative().terms, tile, d_sums.largest)
        terms, pull_back = jax.vjp(terms_of, x, tile.targets)
        return pull_back(jax.tree.map(sharding.broadcast_like, self.of_terms(d_sums), terms))

    def of_terms(self, sums: Any) -> Any:
        """The sums of terms, without the others."""
        return sums._replace(largest=None)

    def with_label(self, d_x: Array, tile: LogitTile, d_sums: Any) -> Array:
        """The cotangents of x, from those by the terms."""
        return d_x


def has_probabilities(sums: Any) -> Array:
    """Whether rows have probabilities: not one with a NaN or +inf, nor one of only -inf."""
    return (sums.total > 0) & (sums.total < jnp.inf)


def nan_if_bad(formula: Any, outputs: Arrays, labels: Pytree, classes: int) -> Arrays:
    """The outputs, with NaN for those of a bad label, in derivatives as well."""
    n = formula.label_outputs
    return (*(nan_unless(is_class(labels, classes), output) for output in outputs[:n]), *outputs[n:])
