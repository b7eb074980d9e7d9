"""The gradient of the mean over a whole batch, from micro-batches and devices."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from masksafe._core import label_checks, moments, precision, sharding, switches
from masksafe._core.arguments import as_size, message
from masksafe._core.typing import Array, Pytree
from masksafe._reductions._masked_mean import MaskedMean

_OP = "value_and_grad_of_mean"

_P = ParamSpec("_P")
_Aux = TypeVar("_Aux")


class _Keywords(TypedDict, total=False):
    in_axes: Pytree
    microbatches: int
    axis_name: sharding.AxisName


@overload
def value_and_grad_of_mean(
    fn: Callable[_P, MaskedMean],
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[False] = False,
    **options: Unpack[_Keywords],
) -> Callable[_P, tuple[Array, Pytree]]: ...


@overload
def value_and_grad_of_mean(
    fn: Callable[_P, tuple[MaskedMean, _Aux]],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    **options: Unpack[_Keywords],
) -> Callable[_P, tuple[tuple[Array, _Aux], Pytree]]: ...


@overload
def value_and_grad_of_mean(
    fn: Callable[_P, Pytree], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Unpack[_Keywords]
) -> Callable[_P, tuple[Pytree, Pytree]]: ...


def value_and_grad_of_mean(
    fn: Callable[..., Pytree],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    in_axes: Pytree = 0,
    microbatches: int = 1,
    axis_name: sharding.AxisName = None,
) -> Callable[..., tuple[Pytree, Pytree]]:
    r"""Like `jax.value_and_grad`, for the mean over a whole batch that is worked on in parts.

    With the totals :math:`T_i(\theta)` and counts :math:`n_i(\theta)` of the micro-batches and devices :math:`i`, the
    value and its gradient are

    .. math::
      m = \frac{\sum_i T_i}{\sum_i n_i}, \qquad
      \nabla m = \frac{\sum_i \nabla T_i - m \sum_i \nabla n_i}{\sum_i n_i}

    To rounding, these equal the mean and the gradient of the whole batch in one piece, even if parts are unequal or
    empty. The mean of the parts' means does not, nor does its gradient.

    Args:
      fn: a function that returns a `MaskedMean` of scalars; with `has_aux` a tuple of it and anything. Inside
        `jax.shard_map` it returns the mean of its own device, not summed over `axis_name`.
      argnums: the position of the argument, or of several, by which to differentiate: pytrees of floats.
      has_aux: whether `fn` returns a second result.
      in_axes: which axis of the other arguments to cut, as in `jax.vmap`: an int or None for all positional arguments,
        or a tuple of one for each, of ints, None, or trees of them that are prefixes of the argument. It is None for
        what all parts share, and for an argument by which to differentiate. The axis of keyword arguments is 0. A
        scalar goes into every part as it is; a key of `jax.random.key` is split, unless the axis is None.
      microbatches: the number of parts. The axes are cut into so many equal parts, one after another in a `lax.scan`:
        part i holds the elements i, i + microbatches, and so on.
      axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of them, over which the batch is split; or the named
        axis of a `jax.vmap` or `jax.pmap`. On meshes without `jax.shard_map` it is not needed. A random key that is the
        same on all devices gives them the same draws, unless `jax.lax.axis_index` is folded in.

    Returns:
      A function of the arguments of `fn` that returns `(value, gradients)`, or `((value, aux), gradients)`. The value
      is in float32 at least. Gradients are accumulated in float32 at least, and have the dtypes of their arguments.
      If all is masked, the value and all gradients are 0. In `aux` the parts are stacked along a new leading axis, and
      each device has its own; but a `MaskedMean` in it is the mean over all parts and devices.

    Raises:
      TypeError: also if `fn` does not return a `MaskedMean` with a total of floats.
      ValueError: also if `microbatches` does not divide the axes to cut, or a total is summed over `axis_name` already.

    Example:
      >>> import jax, jax.numpy as jnp, masksafe
      >>> def loss(params, features, labels):
      ...     mask = labels != -100
      ...     per_token = masksafe.losses.softmax_cross_entropy_with_integer_labels(
      ...         features @ params, labels, where=mask)
      ...     return masksafe.MaskedMean.of(per_token, mask)
      >>> features = jax.random.normal(jax.random.key(0), (6, 4, 3))
      >>> mask = masksafe.length_mask(jnp.array([4, 1, 0, 2, 3, 0]), 4)
      >>> args = jnp.ones((3, 5)), features, jnp.where(mask, 2, -100)
      >>> value, gradient = masksafe.value_and_grad_of_mean(loss, microbatches=3)(*args)
      >>> expected = jax.grad(lambda *args: loss(*args).value)(*args)
      >>> print(jnp.allclose(gradient, expected, atol=1e-6))
      True

    References:
      `huggingface/transformers#34191 <https://github.com/huggingface/transformers/issues/34191>`_; `optax.MultiSteps
      <https://optax.readthedocs.io/en/latest/api/transformations.html#optax.MultiSteps>`_ averages the gradients of the
      parts' means.
    """
    microbatches = as_size(_OP, "microbatches", microbatches, 1)
    positions = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)

    @functools.wraps(fn)
    def value_and_grad(*args: Pytree, **kwargs: Pytree) -> Pytree:
        devices = sharding.Devices(sharding.as_axis_name(_OP, axis_name))
        active = _as_positions(positions, len(args))
        params = jax.tree.map(jnp.asarray, tuple(args[i] for i in active))
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            if not jnp.issubdtype(x.dtype, jnp.floating):
                argument = f"argument to differentiate by{jax.tree_util.keystr(path)}"
                raise TypeError(message(_OP, argument, f"dtype {x.dtype}", "a float dtype"))
        batch = {"args": {i: a for i, a in enumerate(args) if i not in active}, "kwargs": kwargs}

        def fn_of(params: Pytree, batch: Pytree) -> Pytree:
            positional = batch["args"] | dict(zip(active, params, strict=True))
            result = fn(*(positional[i] for i in range(len(args))), **batch["kwargs"])
            return _as_mean_and_aux(result, has_aux, devices)

        parts = _in_microbatches(batch, _axes_to_cut(in_axes, batch, len(args), active), microbatches)
        sums, aux = _summed_over_microbatches(fn_of, devices.varying(params), parts)
        sums, aux = devices.sum(sums), _map_means(devices.sum, aux)
        gradients = jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), sums.gradients_of_mean(), params)
        gradients = gradients[0] if isinstance(argnums, numbers.Integral) else gradients
        return ((sums.mean.value, aux) if has_aux else sums.mean.value), gradients

    return value_and_grad


# The arguments.


def _as_positions(argnums: tuple[Pytree, ...], number: int) -> tuple[int, ...]:
    for i in argnums:
        if not isinstance(i, numbers.Integral) or not -number <= int(i) < number:
            expected = f"positions of the {number} positional arguments"
            raise ValueError(message(_OP, "argnums", f"value {i!r}", expected))
    positions = tuple(int(i) % number for i in argnums)
    if len(set(positions)) < len(positions):
        raise ValueError(message(_OP, "argnums", f"value {argnums}", "distinct positions"))
    return positions


def _as_mean_and_aux(result: object, has_aux: bool, devices: sharding.Devices) -> tuple[MaskedMean, Pytree]:
    mean, aux = result if has_aux and isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(mean, MaskedMean) or (has_aux and mean is result):
        expected, hint = "a MaskedMean and aux, as has_aux=True says" if has_aux else "a MaskedMean", ""
        found = f"a function that returns {type(result).__name__}"
        if isinstance(result, jax.Array):
            found = f"a function that returns an array of dtype {result.dtype} and shape {result.shape}"
            hint = "Write MaskedMean.of(loss, where=mask) for an array of losses, not yet averaged."
        elif not has_aux and isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], MaskedMean):
            found, hint = "a function that returns a MaskedMean and more", "Write has_aux=True."
        raise TypeError(message(_OP, "fn", found, expected, hint))

    def checked(mean: MaskedMean) -> MaskedMean:
        if devices.share(jax.tree.leaves(mean)[0]):
            found = "a MaskedMean whose total is the same on all devices"
            raise ValueError(message(_OP, "fn", found, "the mean of each device, not yet summed over axis_name"))
        return mean

    mean, aux = _map_means(checked, (mean, aux))
    for name, x in {"total": mean.total, "count": mean.count}.items():
        if x.shape != ():
            raise ValueError(message(_OP, "fn", f"a MaskedMean whose {name} has shape {x.shape}", "scalars"))
    if not jnp.issubdtype(mean.total.dtype, jnp.floating):
        raise TypeError(message(_OP, "fn", f"a MaskedMean whose total has dtype {mean.total.dtype}", "a float dtype"))
    return mean, aux


# The axes that are cut.


def _axes_to_cut(in_axes: Pytree, batch: Pytree, number: int, active: tuple[int, ...]) -> list[int | None]:
    """The axis of each leaf of `batch`, or None. As with `jax.vmap`, the axis of keyword arguments is 0."""
    if isinstance(in_axes, tuple | list):
        if len(in_axes) != number:
            expected = f"one for each of the {number} positional arguments"
            raise ValueError(message(_OP, "in_axes", f"{len(in_axes)} of them", expected))
        for i in active:
            if jax.tree.leaves(in_axes[i]):
                expected = "None, since the argument is differentiated by and not cut"
                raise ValueError(message(_OP, f"in_axes[{i}]", f"value {in_axes[i]!r}", expected))
    elif in_axes is not None and not _is_axis(in_axes):
        expected = "an int, None, or a tuple with one or a tree of them for each positional argument"
        raise TypeError(message(_OP, "in_axes", f"value {in_axes!r}", expected))
    axes: list[int | None] = []

    def spread(axis: Pytree, subtree: Pytree) -> None:
        if axis is not None and not _is_axis(axis):
            raise TypeError(message(_OP, "in_axes", f"value {axis!r}", "an int or None"))
        axes.extend([axis] * len(jax.tree.leaves(subtree)))

    for i, arg in batch["args"].items():
        arg_axes = in_axes[i] if isinstance(in_axes, tuple | list) else in_axes
        try:
            jax.tree.map(spread, arg_axes, arg, is_leaf=lambda axis: axis is None)
        except ValueError as error:
            found = f"{arg_axes!r} for an argument of structure {jax.tree.structure(arg)}"
            raise ValueError(message(_OP, f"in_axes[{i}]", found, "a prefix of its tree")) from error
    return axes + [0] * len(jax.tree.leaves(batch["kwargs"]))


def _is_axis(axis: object) -> bool:
    return isinstance(axis, numbers.Integral) and not isinstance(axis, bool)


# The parts.


class _Microbatches(NamedTuple):
    number: int
    size: int | None  # of a part, along the axis that is cut; None if no array is cut
    leaves: list[Pytree]  # of the arguments
    cut: list[Array | None]  # the parts of each, along a new leading axis; None for what all parts share
    tree: Pytree

    def joined(self, part: list[Array | None]) -> Pytree:
        """The arguments of one part."""
        leaves = [whole if own is None else own for whole, own in zip(self.leaves, part, strict=True)]
        return jax.tree.unflatten(self.tree, leaves)


def _in_microbatches(batch: Pytree, axes: list[int | None], number: int) -> _Microbatches:
    named, tree = jax.tree_util.tree_flatten_with_path(batch)
    leaves = {f"{path[0].key}{jax.tree_util.keystr(path[1:])}": x for path, x in named}
    along = dict(zip(leaves, axes, strict=True))
    sizes = {}
    for name, x in leaves.items():
        axis = along[name]
        if axis is None or getattr(x, "ndim", 0) == 0:
            continue
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(message(_OP, name, f"shape {x.shape}", f"an axis {axis}, which in_axes says"))
        sizes[name] = x.shape[axis]
    if number == 1:
        return _Microbatches(1, None, [*leaves.values()], [None] * len(leaves), tree)
    if len(set(sizes.values())) > 1:
        found = "axes to cut of sizes " + " and ".join(f"{size} of {name}" for name, size in sizes.items())
        hint = "For what all parts share, in_axes is None." + _hint_of_keys(leaves[name] for name in sizes)
        raise ValueError(message(_OP, "arguments", found, "one size", hint))
    cut = [_cut(name, x, along[name], number) for name, x in leaves.items()]
    size = next((size // number for size in sizes.values()), None)
    return _Microbatches(number, size, [*leaves.values()], cut, tree)


def _cut(name: str, x: Pytree, axis: int | None, number: int) -> Array | None:
    """The parts of an array along a new leading axis, or None for what all parts share."""
    if axis is None or not hasattr(x, "dtype"):
        return None
    if x.ndim == 0:
        return jax.random.split(x, number) if sharding.is_random_key(x) else None
    axis %= x.ndim
    before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    if size % number:
        expected = f"an axis {axis} that {number} microbatches divide"
        raise ValueError(message(_OP, name, f"shape {x.shape}", expected, _hint_of_keys([x])))
    # Every part takes elements from the whole axis, so that none lies on a few devices only.
    with jax.debug_nans(False):  # in eager code it would see masked elements here
        return jnp.moveaxis(jnp.reshape(x, (*before, size // number, number, *after)), axis + 1, 0)


def _hint_of_keys(arrays: Iterable[Pytree]) -> str:
    """What to do about a key of `jax.random.PRNGKey`, if one of the arrays may be such a key."""
    if not any(x.dtype == jnp.uint32 and x.shape in ((2,), (4,)) for x in arrays):
        return ""
    return " A key of jax.random.key is split among the parts; one of jax.random.PRNGKey is an array like any other."


# The sums.


class _SumsOfMean(NamedTuple):
    """The sums over parts and devices."""

    mean: MaskedMean
    d_total: Pytree
    d_count: Pytree  # None if the count does not depend on the parameters

    def gradients_of_mean(self) -> Pytree:
        value = self.mean.value

        def gradient(d_total: Array, d_count: Array | None = None) -> Array:
            count = self.mean.count.astype(d_total.dtype)
            d_mean = d_total if d_count is None else d_total - value.astype(d_total.dtype) * d_count
            return jnp.where(count == 0, 0, d_mean / moments.nonzero_divisor(count))

        return jax.tree.map(gradient, self.d_total, *([] if self.d_count is None else [self.d_count]))


def _summed_over_microbatches(
    fn: Callable[..., Pytree], params: Pytree, parts: _Microbatches
) -> tuple[_SumsOfMean, Pytree]:
    """The sums, and aux, which is stacked along a new leading axis, except that its means are added up.

    For tokens [64, 512] in 4 parts: `parts.cut` has [4, 16, 512], the sums have the shapes of `params`, and `aux` of
    [16, 512] is [4, 16, 512].
    """

    def run_microbatch(cut: list[Array | None]) -> tuple[_SumsOfMean, Pytree]:
        return _sums_of_microbatch(lambda params: fn(params, parts.joined(cut)), params)

    if parts.number == 1:
        sums, aux = run_microbatch(parts.cut)
        return sums, _map_means(lambda mean: mean, aux, lambda x: jnp.asarray(x)[None])

    def run_numbered(cut: list[Array | None], index: Array | None) -> tuple[_SumsOfMean, Pytree]:
        with label_checks.in_microbatch(index, parts.number, parts.size):
            return run_microbatch(cut)

    def step(sums: _SumsOfMean, numbered: tuple[list[Array | None], Array | None]) -> tuple[_SumsOfMean, Pytree]:
        added, aux = run_numbered(*numbered)
        gradients = jax.tree.map(jnp.add, sums[1:], added[1:])
        return _SumsOfMean(sums.mean + added.mean, *gradients), aux

    numbered = parts.cut, None if switches.label_check_mode() == "off" else jnp.arange(parts.number)
    shapes, _ = jax.eval_shape(lambda numbered: run_numbered(*jax.tree.map(lambda x: x[0], numbered)), numbered)
    sums, aux = lax.scan(step, sharding.zeros_of_types(shapes, (params, parts.cut)), numbered, length=parts.number)
    added_up = functools.partial(jax.tree.map, lambda x: jnp.sum(x, 0, dtype=x.dtype))
    return sums, _map_means(added_up, aux)


_Map = Callable[[Pytree], Pytree]


def _map_means(map_mean: _Map, tree: Pytree, map_other: _Map = lambda x: x) -> Pytree:
    """The tree with its means and its other leaves replaced."""
    is_mean = lambda x: isinstance(x, MaskedMean)  # noqa: E731
    return jax.tree.map(lambda x: map_mean(x) if is_mean(x) else map_other(x), tree, is_leaf=is_mean)


def _sums_of_microbatch(fn: Callable[..., tuple[MaskedMean, Pytree]], params: Pytree) -> tuple[_SumsOfMean, Pytree]:
    is_dependent: list[bool] = []

    def total_and_count(params: Pytree) -> Pytree:
        mean, aux = fn(params)
        return (mean.total, _noting_dependence(is_dependent, mean.count)), (mean, aux)

    (total, count), pull_back, (mean, aux) = jax.vjp(total_and_count, params, has_aux=True)
    (d_total,) = pull_back((jnp.ones_like(total), jnp.zeros_like(count)))
    (d_count,) = pull_back((jnp.zeros_like(total), jnp.ones_like(count))) if is_dependent else (None,)
    wide = functools.partial(jax.tree.map, precision.widened)
    return _SumsOfMean(mean, wide(d_total), wide(d_count)), aux


def _noting_dependence(noted: list[bool], x: Array) -> Array:
    """`x`; adds True to `noted` if `x` depends on the parameters."""
    identity = jax.custom_jvp(lambda x: x)

    def rule(primals: Pytree, tangents: Pytree) -> Pytree:
        if not isinstance(tangents[0], SymbolicZero):
            noted.append(True)
        return primals[0], tangents[0]

    identity.defjvp(rule, symbolic_zeros=True)
    return identity(x)
