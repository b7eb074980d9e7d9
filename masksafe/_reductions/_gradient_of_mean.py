"""The gradient of the mean over a whole batch, from micro-batches and devices."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from masksafe._core.arguments import message
from masksafe._core.precision import widened
from masksafe._core.row_moments import or_one
from masksafe._core.sharding import (
    AxisName,
    as_axis_name,
    is_random_key,
    is_same_on_devices,
    varying_over,
    zeros_of_types,
)
from masksafe._core.typing import Array
from masksafe._reductions._masked_mean import MaskedMean, as_summand

_OP = "value_and_grad_of_mean"


def value_and_grad_of_mean(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    microbatches: int = 1,
    axis_name: AxisName = None,
) -> Callable[..., Any]:
    r"""Like `jax.value_and_grad`, for the mean over a whole batch that is worked on in parts.

    With the totals :math:`T_i(\theta)` and counts :math:`n_i(\theta)` of the micro-batches and devices :math:`i`, the
    value and its gradient are

    .. math::
      m = \frac{\sum_i T_i}{\sum_i n_i}, \qquad
      \nabla m = \frac{\sum_i \nabla T_i - m \sum_i \nabla n_i}{\sum_i n_i}

    to rounding those of the whole batch in one piece, however unequal the parts are, and if some are empty. The mean of
    the parts' means and its gradient are others.

    Args:
      fn: a function that returns a `MaskedMean` of scalars; with `has_aux` a tuple of it and anything. Inside
        `jax.shard_map` it returns that of its own device, not summed over `axis_name`.
      argnums: the position of the argument, or of several, by which to differentiate: pytrees of floats.
      has_aux: whether `fn` returns a second result.
      microbatches: the number of parts. The leading axis of every array in the other arguments, of one size in all of
        them, is cut into so many equal parts, one after another in a `lax.scan`: part i holds the elements i, i +
        microbatches, and so on, which keeps an axis that is split over devices split in every part. A scalar goes into
        every part as it is; a random key is split. What all parts share is closed over.
      axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of them, over which the batch is split; or the named
        axis of a `jax.vmap`. On meshes without `jax.shard_map` it is not needed. A random key that is the same on all
        devices gives them the same draws, unless `jax.lax.axis_index` is folded in.

    Returns:
      A function of the arguments of `fn` that returns `(value, gradients)`, or `((value, aux), gradients)`. The value
      is in float32 at least. Gradients are accumulated in float32 at least, summed over devices once, after the last
      part, and have the dtypes of their arguments. With nothing left anywhere the value and all gradients are 0. `aux`
      is that of all parts along a new leading axis, on each device its own.

    Raises:
      TypeError: if `fn` does not return a `MaskedMean` with a total of floats, or an argument to differentiate by is
        not of floats.
      ValueError: if `microbatches` does not divide the leading axes, or these differ; if `argnums` is out of range, or
        there is no axis of the name `axis_name`; or if the total is summed over it already.

    Example:
      >>> import jax, jax.numpy as jnp, masksafe
      >>> def loss(params, features, labels):
      ...     per_token = masksafe.losses.softmax_cross_entropy_with_integer_labels
      ...     mask = labels != -100
      ...     return masksafe.MaskedMean.of(per_token(features @ params, labels, where=mask), mask)
      >>> features, params = jax.random.normal(jax.random.key(0), (6, 4, 3)), jnp.ones((3, 5))
      >>> labels = jnp.where(jnp.arange(4) < jnp.array([4, 1, 0, 2, 3, 0])[:, None], 2, -100)
      >>> in_parts = jax.jit(masksafe.value_and_grad_of_mean(loss, microbatches=3))
      >>> value, gradient = in_parts(params, features, labels)
      >>> expected = jax.grad(lambda params: loss(params, features, labels).value)(params)
      >>> print(jnp.allclose(gradient, expected, atol=1e-6))
      True

    References:
      `huggingface/transformers#34191 <https://github.com/huggingface/transformers/issues/34191>`_; `optax.MultiSteps
      <https://optax.readthedocs.io/en/latest/api/transformations.html#optax.MultiSteps>`_ averages the gradients of the
      parts' means.
    """
    if not isinstance(microbatches, numbers.Integral) or int(microbatches) < 1:
        raise ValueError(message(_OP, "microbatches", f"value {microbatches!r}", "a positive int"))
    positions = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)

    @functools.wraps(fn)
    def value_and_grad(*args: Any, **kwargs: Any) -> Any:
        name = as_axis_name(_OP, axis_name)
        active = _as_positions(positions, len(args))
        params = jax.tree.map(jnp.asarray, tuple(args[i] for i in active))
        _check_floats(params)
        batch = {"args": {i: a for i, a in enumerate(args) if i not in active}, "kwargs": kwargs}

        def fn_of(params: Any, batch: Any) -> Any:
            positional = batch["args"] | dict(zip(active, params, strict=True))
            result = fn(*(positional[i] for i in range(len(args))), **batch["kwargs"])
            return _as_mean_and_aux(result, has_aux, name)

        sums, aux = _summed_over_parts(fn_of, varying_over(name, params), _in_parts(batch, int(microbatches)))
        sums = sums if name is None else lax.psum(sums, name)
        gradients = jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), sums.gradients_of_mean(), params)
        gradients = gradients[0] if isinstance(argnums, numbers.Integral) else gradients
        return ((sums.mean.value, aux) if has_aux else sums.mean.value), gradients

    return value_and_grad


# The arguments.


def _as_positions(argnums: tuple[Any, ...], number: int) -> tuple[int, ...]:
    for i in argnums:
        if not isinstance(i, numbers.Integral) or not -number <= int(i) < number:
            expected = f"positions of the {number} positional arguments"
            raise ValueError(message(_OP, "argnums", f"value {i!r}", expected))
    positions = tuple(int(i) % number for i in argnums)
    if len(set(positions)) < len(positions):
        raise ValueError(message(_OP, "argnums", f"value {argnums}", "distinct positions"))
    return positions


def _check_floats(params: Any) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            where = f"argument to differentiate by{jax.tree_util.keystr(path)}"
            raise TypeError(message(_OP, where, f"dtype {x.dtype}", "a float dtype"))


def _as_mean_and_aux(result: Any, has_aux: bool, axis_name: AxisName) -> tuple[MaskedMean, Any]:
    expected = "a MaskedMean and aux, as has_aux=True says" if has_aux else "a MaskedMean"
    mean, aux = result if has_aux and isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(mean, MaskedMean) or (has_aux and mean is result):
        raise TypeError(message(_OP, "fn", f"a function that returns {type(result).__name__}", expected))
    for field in ("total", "count"):
        if jnp.shape(getattr(mean, field)) != ():
            found = f"a MaskedMean whose {field} has shape {jnp.shape(getattr(mean, field))}"
            raise ValueError(message(_OP, "fn", found, "scalars"))
    total, count = as_summand(mean.total), as_summand(mean.count)
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise TypeError(message(_OP, "fn", f"a MaskedMean whose total has dtype {total.dtype}", "a float dtype"))
    if is_same_on_devices(axis_name, total):
        found = "a MaskedMean whose total is the same on all devices"
        raise ValueError(message(_OP, "fn", found, "that of each device, not yet summed over axis_name"))
    return MaskedMean(total, count), aux


# The parts.


class _Parts(NamedTuple):
    number: int
    cut: list[Array]  # the parts of an array along its leading axis
    whole: list[Any]  # what all parts share
    is_cut: list[bool]
    tree: Any

    def joined(self, cut: list[Array]) -> Any:
        """The arguments of one part."""
        parts, whole = iter(cut), iter(self.whole)
        return jax.tree.unflatten(self.tree, [next(parts if is_cut else whole) for is_cut in self.is_cut])


def _in_parts(batch: Any, number: int) -> _Parts:
    leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
    names = [f"{path[0].key}{jax.tree_util.keystr(path[1:])}" for path, _ in leaves]
    sizes = {name: x.shape[0] for name, (_, x) in zip(names, leaves, strict=True) if _has_leading_axis(x)}
    if len(set(sizes.values())) > 1:
        found = " and ".join(f"{size} of {name}" for name, size in sizes.items())
        hint = "Let fn close over what all parts share."
        raise ValueError(message(_OP, "arguments", f"leading axes {found}", "leading axes of one size", hint))
    cut = [_cut(name, x, number) for name, (_, x) in zip(names, leaves, strict=True)]
    pairs = list(zip(leaves, cut, strict=True))
    return _Parts(
        number,
        [parts for _, parts in pairs if parts is not None],
        [x for (_, x), parts in pairs if parts is None],
        [parts is not None for parts in cut],
        tree,
    )


def _cut(name: str, x: Any, number: int) -> Array | None:
    """The parts of an array along a new leading axis, or None for what has no leading axis."""
    if number == 1:
        return None
    if not _has_leading_axis(x):
        return jax.random.split(x, number) if hasattr(x, "dtype") and is_random_key(x) else None
    if x.shape[0] % number:
        expected = f"a leading axis that {number} microbatches divide"
        raise ValueError(message(_OP, name, f"shape {x.shape}", expected))
    # Every part takes elements from the whole axis, so that none lies on a few devices only.
    return jnp.reshape(x, (x.shape[0] // number, number, *x.shape[1:])).swapaxes(0, 1)


def _has_leading_axis(x: Any) -> bool:
    return hasattr(x, "dtype") and x.ndim > 0


class _Sums(NamedTuple):
    """Over parts and devices."""

    mean: MaskedMean
    d_total: Any
    d_count: Any  # None if the count does not depend on the parameters

    def gradients_of_mean(self) -> Any:
        value = self.mean.value

        def gradient(d_total: Array, d_count: Array | None) -> Array:
            count = self.mean.count.astype(d_total.dtype)
            d_mean = d_total if d_count is None else d_total - value.astype(d_total.dtype) * d_count
            return jnp.where(count == 0, 0, d_mean / or_one(count))

        d_count = jax.tree.map(lambda _: None, self.d_total) if self.d_count is None else self.d_count
        return jax.tree.map(gradient, self.d_total, d_count)


def _summed_over_parts(fn: Callable[..., Any], params: Any, parts: _Parts) -> tuple[_Sums, Any]:
    def of_part(cut: list[Array]) -> tuple[_Sums, Any]:
        return _sums_of_part(lambda params: fn(params, parts.joined(cut)), params)

    if parts.number == 1:
        sums, aux = of_part([])
        return sums, jax.tree.map(lambda x: jnp.asarray(x)[None], aux)

    def step(sums: _Sums, cut: list[Array]) -> tuple[_Sums, Any]:
        added, aux = of_part(cut)
        return jax.tree.map(jnp.add, sums, added), aux

    shapes, _ = jax.eval_shape(of_part, [x[0] for x in parts.cut])
    sums, aux = lax.scan(step, zeros_of_types(shapes, (params, parts.cut)), parts.cut, length=parts.number)
    return sums, aux


def _sums_of_part(fn: Callable[..., tuple[MaskedMean, Any]], params: Any) -> tuple[_Sums, Any]:
    is_dependent: list[bool] = []

    def total_and_count(params: Any) -> Any:
        mean, aux = fn(params)
        if jnp.issubdtype(mean.count.dtype, jnp.floating):
            return (mean.total, _noting_dependence(is_dependent, mean.count)), (mean.count, aux)
        return (mean.total, jnp.zeros_like(mean.total)), (mean.count, aux)

    (total, float_count), pull_back, (count, aux) = jax.vjp(total_and_count, params, has_aux=True)
    one, zero = jnp.ones_like(total), jnp.zeros_like(float_count)
    (d_total,) = pull_back((one, zero))
    d_count = None
    if is_dependent:
        (d_count,) = pull_back((jnp.zeros_like(total), jnp.ones_like(float_count)))
    wide = functools.partial(jax.tree.map, widened)
    return _Sums(MaskedMean(total, count), wide(d_total), wide(d_count)), aux


def _noting_dependence(noted: list[bool], x: Array) -> Array:
    """`x`; adds True to `noted` if it depends on what is being differentiated by."""

    @jax.custom_jvp
    def identity(x: Array) -> Array:
        return x

    def rule(primals: Any, tangents: Any) -> Any:
        if not isinstance(tangents[0], SymbolicZero):
            noted.append(True)
        return primals[0], tangents[0]

    identity.defjvp(rule, symbolic_zeros=True)
    noted_x: Array = identity(x)
    return noted_x
