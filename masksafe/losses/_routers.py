"""Losses of the routers of mixtures of experts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from masksafe._core import arguments, label_checks, masks, per_device, run_time, sharding, switches
from masksafe._core.derivatives import without_mask_of_rows
from masksafe._core.labels import at_label, nan_unless
from masksafe._core.moments import nonzero_divisor
from masksafe._core.precision import wide_dtype, widened
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, Axis, jitted
from masksafe._reductions import MaskedMean
from masksafe._softmax import wide_logsumexp
from masksafe.losses import _layout


@public_op
def load_balancing_loss(
    router_probs: ArrayLike,
    expert_indices: ArrayLike,
    *,
    where: ArrayLike | None = None,
    axis_name: sharding.AxisName = None,
) -> Array:
    r"""How unevenly a router spreads tokens over experts: 1 if evenly, the number of experts if all go to one.

    .. math::
      \ell = E \sum_{e=1}^E f_e P_e, \qquad
      f_e = \frac{\text{assignments to } e}{\text{all assignments}}, \qquad
      P_e = \frac{1}{n} \sum_{t : \text{where}_t} p_{t e}

    over the :math:`n` unmasked tokens and their assignments. The shares :math:`f` have no gradient, the mean
    probabilities :math:`P` have.

    The loss is a product of two means. So the mean of the losses of micro-batches or of devices is not the loss: add up
    their `RouterStatistics`, or give `axis_name`.

    ================================  =================================================================
    the number of                     is, with k experts for each token and a coefficient c
    ================================  =================================================================
    Switch Transformer                c times this, with k = 1
    Mixtral (transformers)            c k times this, of the tokens of all layers
    Megatron-LM                       c times this
    maxtext                           c k times the mean of this over sequences, by `jax.vmap`
    DeepSeek-V3, sequence-wise        c times the mean of this over sequences, by `jax.vmap`
    ================================  =================================================================

    Args:
      router_probs: the probabilities of the experts, floats `[..., experts]`.
      expert_indices: to which experts each token goes, integers `[..., k]`; -1 is an assignment that was dropped.
      where: booleans `[...]` that broadcast to the tokens; False is padding, which counts in neither mean.
      axis_name: the mesh axis, or a tuple of them, over whose devices the tokens are split, inside `jax.shard_map`.

    Returns:
      The loss, a scalar of at least float32; 0 if all tokens are masked, or none has an assignment. It and its gradient
      are NaN if an unmasked index is neither -1 nor that of an expert.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> probs = jnp.array([[0.9, 0.1], [0.1, 0.9], [0.9, 0.1]])
      >>> experts, mask = jnp.array([[0], [1], [0]]), jnp.array([True, True, False])
      >>> print(masksafe.losses.load_balancing_loss(probs, experts, where=mask))
      1.0
      >>> print(masksafe.losses.load_balancing_loss(probs, experts).round(4))
      1.0889

    References:
      `Switch Transformers <https://arxiv.org/abs/2101.03961>`_, equations 4 to 6; padding that is counted,
      `NVIDIA/Megatron-LM#1984 <https://github.com/NVIDIA/Megatron-LM/issues/1984>`_.
    """
    op = "load_balancing_loss"
    devices = sharding.Devices(sharding.as_axis_name(op, axis_name))
    return _loss_of_tokens(devices, *_read(op, router_probs, expert_indices, where))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterStatistics:
    """What `load_balancing_loss` is made of, as means that can be added up over parts before they are multiplied.

    `a + b` has the tokens of both, `sum(parts)` those of all, `a.psum("data")` those of all devices, and `.loss` is the
    loss of them together. It is a pytree. In its `aux`, `value_and_grad_of_mean` returns that of the whole batch.

    Attributes:
      share: the `MaskedMean` of the assignments to each expert, `[experts]`.
      probability: the `MaskedMean` of the probabilities of each expert, `[experts]`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> of = masksafe.losses.RouterStatistics.of
      >>> first = of(jnp.array([[0.9, 0.1]]), jnp.array([[0]]))
      >>> second = of(jnp.array([[0.1, 0.9]]), jnp.array([[1]]))
      >>> print(first.loss, second.loss, (first + second).loss)
      1.8 1.8 1.0
    """

    share: MaskedMean
    probability: MaskedMean

    @classmethod
    def of(
        cls, router_probs: ArrayLike, expert_indices: ArrayLike, *, where: ArrayLike | None = None
    ) -> RouterStatistics:
        """The statistics of the unmasked tokens; for the arguments and errors see `load_balancing_loss`."""
        chosen, choices, probability, tokens = _sums(*_read("RouterStatistics.of", router_probs, expert_indices, where))
        # A count for each total, as `MaskedMean.of` has them.
        counts = (jnp.broadcast_to(n, chosen.shape) for n in (choices, tokens))
        return cls(*map(MaskedMean, (chosen, probability), counts))

    def __add__(self, other: RouterStatistics | int) -> RouterStatistics:
        """The statistics of the tokens of both. Adding 0 changes nothing, so that `sum` works."""
        if isinstance(other, RouterStatistics):
            return RouterStatistics(self.share + other.share, self.probability + other.probability)
        return self if isinstance(other, int) and other == 0 else NotImplemented

    __radd__ = __add__

    def psum(self, axis_name: sharding.AxisName) -> RouterStatistics:
        """The statistics of the tokens of all devices of a mesh axis, or of several, inside `jax.shard_map`."""
        return RouterStatistics(self.share.psum(axis_name), self.probability.psum(axis_name))

    @property
    def loss(self) -> Array:
        """The load-balancing loss of the tokens; 0 if there are none."""
        return _loss(self)


@jitted()
def _loss(statistics: RouterStatistics) -> Array:
    return _loss_of_means(statistics.share.value, statistics.probability.value)


def _loss_of_means(share: Array, probability: Array) -> Array:
    return share.shape[-1] * jnp.sum(share * probability, -1)


def _read(op: str, router_probs: object, expert_indices: object, where: object) -> tuple[Array, Array, Array | None]:
    """Probabilities `[..., experts]`, indices `[..., k]`, and a mask that broadcasts to both."""
    probs = arguments.as_float_array(op, "router_probs", router_probs)
    indices = arguments.as_index_array(op, "expert_indices", expert_indices)
    if probs.ndim == 0 or indices.ndim != probs.ndim or indices.shape[:-1] != probs.shape[:-1]:
        found, expected = f"shape {indices.shape}", f"shape [..., k] for router_probs [..., experts] {probs.shape}"
        raise ValueError(arguments.message(op, "expert_indices", found, expected))
    where = masks.read_mask(op, where, probs.shape[:-1], "the tokens")
    where = None if where is None else where[..., None]
    number = probs.shape[-1]
    is_valid = lambda indices: (indices >= -1) & (indices < number)  # noqa: E731
    otherwise = f"outside [0, {number}), and not -1"
    label_checks.check_elements(op, indices, indices.shape, where, is_valid, otherwise, "expert_indices")
    return probs, indices, where


@jitted(0)
def _loss_of_tokens(devices: sharding.Devices, probs: Array, indices: Array, where: Array | None) -> Array:
    chosen, choices, probability, tokens = (
        devices.sum(x).astype(wide_dtype(probs.dtype)) for x in _sums(probs, indices, where)
    )
    return _loss_of_means(chosen / nonzero_divisor(choices), probability / nonzero_divisor(tokens))


@jitted()
def _sums(probs: Array, indices: Array, where: Array | None) -> tuple[Array, Array, Array, Array]:
    """Of the unmasked tokens: how often each expert was chosen, of how many choices; its probability, of how many."""
    number, indices = probs.shape[-1], masks.selected(indices, where, -1)
    is_valid = jnp.all((indices >= -1) & (indices < number))
    tokens = jnp.broadcast_to(True if where is None else where, (*probs.shape[:-1], 1))
    probability = jnp.sum(masks.selected(widened(probs), where), tuple(range(probs.ndim - 1)))
    probability = nan_unless(is_valid, probability)
    return _chosen(number, indices), jnp.sum(indices >= 0), probability, run_time.number_of(tokens)


def _chosen(number: int, indices: Array) -> Array:
    """How many indices choose each expert; indices out of range do not count."""

    def on_each(devices: sharding.Devices, indices: Array) -> Array:
        if switches.uses_plain_rules():  # checkify would report an index out of range
            found = at_label(indices, number)
            return devices.sum(run_time.number_of(found, tuple(range(indices.ndim))).astype(jnp.int32))
        none_chosen = jnp.zeros(number, jnp.int32)
        return devices.sum(none_chosen.at[indices].add(1, mode="drop", wrap_negative_indices=False))

    names = tuple(str(axis) for axis in range(indices.ndim))
    args = (indices,), (PartitionSpec(*names),)
    return per_device.along_devices(on_each, sharding.Devices(), *args, PartitionSpec(None), names)


@public_op
def router_z_loss(router_logits: ArrayLike, *, axis: Axis = -1, where: ArrayLike | None = None) -> Array:
    r"""The square of the logarithm of the sum of the router's exponentials, which keeps its logits small.

    .. math:: \ell = \left(\log \sum_{e : \text{where}_e} e^{x_e}\right)^2

    Args:
      router_logits: floats `[..., experts]`.
      axis: the axis or axes of the experts.
      where: booleans of the rank of the loss, which mask tokens, or of that of the logits, which mask experts.

    Returns:
      The losses `[...]`, of the dtype of `router_logits`, whose mean over tokens is `masksafe.mean(loss, where=where)`.
      It is 0 where a token is masked or has no unmasked expert, and so is its gradient.

    Raises:
      TypeError: if `router_logits` are not floats or `where` is not boolean.
      ValueError: if `where` has another rank or does not broadcast, or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits = jnp.array([[2.0, 0.0], [jnp.nan, 0.0]])
      >>> where = jnp.array([True, False])
      >>> print(masksafe.losses.router_z_loss(logits, where=where).round(4))
      [4.5238 0.    ]

    References:
      `ST-MoE <https://arxiv.org/abs/2202.08906>`_, equation 5, which takes the mean.
    """
    op = "router_z_loss"
    logits = arguments.as_float_array(op, "router_logits", router_logits)
    axes = arguments.canonical_axes(op, axis, logits.ndim)
    where = masks.read_mask(op, where, logits.shape, "the input", "elements or rows", axes)
    return _squared_logsumexp(axes, logits, where)


@jitted(0)
def _squared_logsumexp(axes: tuple[int, ...], logits: Array, where: Array | None) -> Array:
    if any(logits.shape[a] == 0 for a in axes):  # without experts every token is empty
        where = jnp.zeros(logits.shape, bool)
    unmasked_rows = _layout.find_unmasked_rows(where, axes)
    (logits,), where = without_mask_of_rows(where, axes, logits)
    result = jnp.squeeze(wide_logsumexp(axes, logits, where), axes)
    return jnp.square(masks.selected(result, unmasked_rows)).astype(logits.dtype)
