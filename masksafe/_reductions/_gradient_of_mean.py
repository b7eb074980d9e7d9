"""The gradient of the mean over a whole batch, or of a sum of means, from micro-batches and devices."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from masksafe._core import label_checks, moments, precision, sharding, switches
from masksafe._core.arguments import as_real_array, as_size, message
from masksafe._core.typing import Array, ArrayLike, Pytree
from masksafe._reductions._masked_mean import HINT_OF_ARRAYS, MaskedMean, check_returned

_OP = "value_and_grad_of_mean"

_P = ParamSpec("_P")
_Aux = TypeVar("_Aux")
_Means = MaskedMean | dict[str, MaskedMean]


class _Keywords(TypedDict, total=False):
    in_axes: Pytree
    microbatches: int
    axis_name: sharding.AxisName


class _KeywordsOfSum(_Keywords, total=False):
    factors: Mapping[str, ArrayLike] | None


@overload
def value_and_grad_of_mean(
    fn: Callable[_P, MaskedMean],
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[False] = False,
    **options: Unpack[_Keywords],
) -> Callable[_P, tuple[Array, Pytree]]: ...


@overload
def value_and_grad_of_mean(
    fn: Callable[_P, dict[str, MaskedMean]],
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[False] = False,
    **options: Unpack[_KeywordsOfSum],
) -> Callable[_P, tuple[tuple[Array, dict[str, MaskedMean]], Pytree]]: ...


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
    fn: Callable[_P, tuple[dict[str, MaskedMean], _Aux]],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    **options: Unpack[_KeywordsOfSum],
) -> Callable[_P, tuple[tuple[Array, dict[str, MaskedMean], _Aux], Pytree]]: ...


@overload
def value_and_grad_of_mean(
    fn: Callable[_P, Pytree], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Unpack[_KeywordsOfSum]
) -> Callable[_P, tuple[Pytree, Pytree]]: ...


def value_and_grad_of_mean(
    fn: Callable[..., Pytree],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    in_axes: Pytree = 0,
    microbatches: int = 1,
    axis_name: sharding.AxisName = None,
    factors: Mapping[str, ArrayLike] | None = None,
) -> Callable[..., tuple[Pytree, Pytree]]:
    r"""Like `jax.value_and_grad`, for the mean over a whole batch that is worked on in parts.

    With the totals :math:`T_i(\theta)` and counts :math:`n_i(\theta)` of the micro-batches and devices :math:`i`, the
    value and its gradient are

    .. math::
      m = \frac{\sum_i T_i}{\sum_i n_i}, \qquad
      \nabla m = \frac{\sum_i \nabla T_i - m \sum_i \nabla n_i}{\sum_i n_i}

    To rounding, these equal the mean and the gradient of the whole batch in one piece, even if parts are unequal or
    empty. The mean of the parts' means does not, nor does its gradient.

    Of a dict of means, the value is the sum of factor times mean. With several micro-batches a first pass finds the
    counts of the whole batch, of which XLA removes whatever makes no count: mostly all but masks. Counts that are
    computed from activations cost one more forward pass, and a `jax.debug.print` in `fn` runs twice.

    Args:
      fn: a function that returns a `MaskedMean` of scalars, or a dict of them whose counts have no derivative; with
        `has_aux` a tuple of it and anything. Inside `jax.shard_map` a mean is that of the device, not yet summed.
      argnums: the position of the argument, or of several, by which to differentiate: pytrees of floats.
      has_aux: whether `fn` returns a second result.
      in_axes: which axis of the other arguments to cut, as in `jax.vmap`: an int or None for all positional arguments,
        or a tuple of one for each, of ints, None, or trees of them that are prefixes of the argument. It is None for
        what all parts share, and for an argument by which to differentiate. The axis of keyword arguments is 0. A
        scalar goes into every part as it is; a key of `jax.random.key` is split, unless the axis is None.
      microbatches: the number of equal parts of a `lax.scan`: part i has the elements i, i + microbatches, and so on.
      axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of them, over which the batch is split; or the named
        axis of a `jax.vmap` or `jax.pmap`. On meshes without `jax.shard_map` it is not needed. A random key that is the
        same on all devices gives them the same draws, unless `jax.lax.axis_index` is folded in.
      factors: numbers or arrays of shape (), without gradients, by the names in the dict; 1 for a missing name. A
        factor of 0 masks nothing: if its mean is NaN, so is the value.

    Returns:
      A function of the arguments of `fn` that returns `(value, gradients)` or `((value, aux), gradients)`; of a dict
      `((value, means), gradients)` or `((value, means, aux), gradients)`, with the means of the whole batch. The value
      and all sums are in float32 at least; gradients have the dtypes of their arguments. If all is masked, the value
      and all gradients are 0, and an empty mean of a dict adds 0. In `aux` the parts are stacked along a new leading
      axis, and each device has its own; but a `MaskedMean` in it is the mean over all parts and devices.

    Raises:
      TypeError: also if `fn` does not return a `MaskedMean` with a total of floats, or a dict of them.
      ValueError: also if `microbatches` does not divide the axes to cut, if a total is summed over `axis_name` already,
        if a count in a dict has a derivative, or if the dict lacks a name of `factors`.

    Example:
      >>> import jax, jax.numpy as jnp, masksafe
      >>> def fn(p, x, mask):
      ...     error = masksafe.losses.squared_error(x * p, jnp.ones_like(x), where=mask)
      ...     return {"error": masksafe.MaskedMean.of(error, mask),
      ...             "size": masksafe.MaskedMean.of(jnp.square(x * p))}
      >>> mask = jnp.array([True, False, True, True, False, False])  # a part has none
      >>> step = masksafe.value_and_grad_of_mean(fn, factors={"size": 0.1}, microbatches=3)
      >>> (value, means), gradient = step(1.0, jnp.array([0.0, 9, 2, 3, 9, 9]), mask)
      >>> print(means["error"].value, value.round(2), gradient.round(2))
      2.0 6.27 13.87

    References:
      `huggingface/transformers#34191 <https://github.com/huggingface/transformers/issues/34191>`_; `optax.MultiSteps
      <https://optax.readthedocs.io/en/latest/api/transformations.html#optax.MultiSteps>`_ averages the gradients of the
      parts' means.
    """
    microbatches = as_size(_OP, "microbatches", microbatches, 1)
    positions = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    factors = _checked_factors(factors)

    @functools.wraps(fn)
    def value_and_grad(*args: Pytree, **kwargs: Pytree) -> Pytree:
        devices = sharding.Devices(sharding.as_axis_name(_OP, axis_name))
        # Arrays not before the step: `jax.shard_map` lets it close over none of an explicit mesh, which numbers become.
        scales = jax.tree.map(lambda x: lax.stop_gradient(jnp.asarray(x)), factors)
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
            return _as_means_and_aux(result, has_aux, scales, devices)

        parts = _in_microbatches(batch, _axes_to_cut(in_axes, batch, len(args), active), microbatches)
        objective = _SumOfMeans(scales or {}, devices)
        sums, aux = _summed_over_microbatches(fn_of, objective, devices.varying(params), parts)
        sums, aux = devices.sum(sums), _map_means(devices.sum, aux)
        value, gradients = sums.value_and_gradients(objective)
        gradients = jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), gradients, params)
        gradients = gradients[0] if isinstance(argnums, numbers.Integral) else gradients
        results = value, *([sums.means] if isinstance(sums.means, dict) else []), *([aux] if has_aux else [])
        return (results if len(results) > 1 else value), gradients

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


def _checked_factors(factors: object) -> dict[str, ArrayLike] | None:
    if factors is None:
        return None
    if not isinstance(factors, Mapping):
        raise TypeError(message(_OP, "factors", f"type {type(factors).__name__}", "a dict of numbers by name"))
    for name, x in factors.items():
        shape = as_real_array(_OP, f"factors[{name!r}]", x).shape
        if shape != ():
            raise ValueError(message(_OP, f"factors[{name!r}]", f"shape {shape}", "a number"))
    return dict(factors)


def _as_means_and_aux(
    result: object, has_aux: bool, factors: dict[str, Array] | None, devices: sharding.Devices
) -> tuple[_Means, Pytree]:
    means, aux = result if has_aux and isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(means, MaskedMean | dict) or (has_aux and means is result):
        expected, hint = "a MaskedMean or a dict of them", ""
        expected += ", and aux, as has_aux=True says" if has_aux else ""
        found = f"a function that returns {type(result).__name__}"
        if isinstance(result, jax.Array):
            found = f"a function that returns an array of dtype {result.dtype} and shape {result.shape}"
            hint = HINT_OF_ARRAYS
        elif not has_aux and isinstance(result, tuple) and result and isinstance(result[0], MaskedMean | dict):
            found, hint = f"a function that returns a {type(result[0]).__name__} and more", "Write has_aux=True."
        raise TypeError(message(_OP, "fn", found, expected, hint))
    _check_names(means, factors)
    for name, mean in means.items() if isinstance(means, dict) else [("", means)]:
        check_returned(_OP, mean, f"a MaskedMean {name!r}" if name else "a MaskedMean")

    def checked(mean: MaskedMean) -> MaskedMean:
        if devices.share(jax.tree.leaves(mean)[0]):
            found = "a MaskedMean whose total is the same on all devices"
            raise ValueError(message(_OP, "fn", found, "the mean of each device, not yet summed over axis_name"))
        return mean

    return _map_means(checked, (means, aux))


def _check_names(means: _Means, factors: dict[str, Array] | None) -> None:
    """Refuses a dict of something else, and factors of means that are not there."""
    if isinstance(means, MaskedMean):
        if factors is not None:
            expected, hint = "None for a function that returns a MaskedMean", "Factors go with a dict of means."
            raise ValueError(message(_OP, "factors", f"names {[*factors]}", expected, hint))
        return
    if not means:
        raise ValueError(message(_OP, "fn", "a function that returns an empty dict", "a dict of MaskedMeans"))
    for name, mean in means.items():
        if not isinstance(mean, MaskedMean):
            is_array = isinstance(mean, jax.Array)
            kind = f"an array of shape {mean.shape}" if is_array else f"of type {type(mean).__name__}"
            hint = HINT_OF_ARRAYS if is_array else ""
            raise TypeError(message(_OP, "fn", f"a dict whose {name!r} is {kind}", "a dict of MaskedMeans", hint))
    unknown = [name for name in factors or {} if name not in means]
    if unknown:
        raise ValueError(message(_OP, "factors", f"the name {unknown[0]!r}", f"names of means: {[*means]}"))


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


class _SumOfMeans(NamedTuple):
    """The sum of factor times mean."""

    factors: dict[str, Array]
    devices: sharding.Devices

    def value(self, means: dict[str, MaskedMean]) -> Array:
        terms = [self._term(name, mean) for name, mean in means.items()]
        widest = max((x.dtype for x in terms), key=lambda dtype: dtype.itemsize)  # strict promotion mixes none
        return functools.reduce(jnp.add, (x.astype(widest) for x in terms))

    def _term(self, name: str, mean: MaskedMean) -> Array:
        x = mean.value
        if name not in self.factors:
            return x
        return jnp.where(mean.count == 0, 0, self.factors[name].astype(x.dtype) * x)  # the factor may be infinite

    def share(self, means: dict[str, MaskedMean], counts: dict[str, Array] | None) -> Array:
        """What a part adds to the value, given the counts of the whole batch; None if each device has one part."""
        counts = self.devices.sum({name: mean.count for name, mean in means.items()}) if counts is None else counts
        return self.value({name: MaskedMean(mean.total, counts[name]) for name, mean in means.items()})


class _Sums(NamedTuple):
    """The sums over parts and devices."""

    means: _Means
    d_total: Pytree  # the gradients of the sum of means, if there is a dict of them
    d_count: Pytree  # None if the count does not depend on the parameters

    def value_and_gradients(self, objective: _SumOfMeans) -> tuple[Array, Pytree]:
        if isinstance(self.means, dict):
            is_empty = functools.reduce(jnp.logical_and, (mean.count == 0 for mean in self.means.values()))
            return objective.value(self.means), jax.tree.map(lambda x: jnp.where(is_empty, 0, x), self.d_total)
        count_of_mean, value = self.means.count, self.means.value

        def gradient(d_total: Array, d_count: Array | None = None) -> Array:
            count = count_of_mean.astype(d_total.dtype)
            d_mean = d_total if d_count is None else d_total - value.astype(d_total.dtype) * d_count
            return jnp.where(count == 0, 0, d_mean / moments.nonzero_divisor(count))

        return value, jax.tree.map(gradient, self.d_total, *([] if self.d_count is None else [self.d_count]))


def _summed_over_microbatches(
    fn: Callable[..., tuple[_Means, Pytree]], objective: _SumOfMeans, params: Pytree, parts: _Microbatches
) -> tuple[_Sums, Pytree]:
    """The sums, and aux, which is stacked along a new leading axis, except that its means are added up.

    For tokens [64, 512] in 4 parts: `parts.cut` has [4, 16, 512], the sums have the shapes of `params`, and `aux` of
    [16, 512] is [4, 16, 512].
    """

    def run_microbatch(cut: list[Array | None], counts: dict[str, Array] | None = None) -> tuple[_Sums, Pytree]:
        fn_of_params = lambda params: fn(params, parts.joined(cut))  # noqa: E731
        return _sums_of_microbatch(fn_of_params, functools.partial(objective.share, counts=counts), params)

    if parts.number == 1:
        sums, aux = run_microbatch(parts.cut)
        return sums, _map_means(lambda mean: mean, aux, lambda x: jnp.asarray(x)[None])

    def run_numbered(
        cut: list[Array | None], index: Array | None, counts: dict[str, Array] | None = None
    ) -> tuple[_Sums, Pytree]:
        with label_checks.in_microbatch(index, parts.number, parts.size):
            return run_microbatch(cut, counts)

    numbered = parts.cut, None if switches.label_check_mode() == "off" else jnp.arange(parts.number)
    shapes, _ = jax.eval_shape(lambda numbered: run_numbered(*jax.tree.map(lambda x: x[0], numbered)), numbered)
    zeros = sharding.zeros_of_types(shapes, (params, parts.cut))
    counts = None
    if isinstance(zeros.means, dict):
        counts = objective.devices.sum(_summed_counts(fn, params, parts, zeros.means))

    def step(sums: _Sums, numbered: tuple[list[Array | None], Array | None]) -> tuple[_Sums, Pytree]:
        added, aux = run_numbered(*numbered, counts)
        return jax.tree.map(jnp.add, sums, added), aux

    sums, aux = lax.scan(step, zeros, numbered, length=parts.number)
    added_up = functools.partial(jax.tree.map, lambda x: jnp.sum(x, 0, dtype=x.dtype))
    return sums, _map_means(added_up, aux)


def _summed_counts(
    fn: Callable[..., Pytree], params: Pytree, parts: _Microbatches, zeros: dict[str, MaskedMean]
) -> dict[str, Array]:
    """The counts of all parts, by name. XLA removes from the loop all else that `fn` computes.

    That is why labels are not checked here, but in the loop of the gradients alone.
    """

    def step(counts: dict[str, Array], cut: list[Array | None]) -> tuple[dict[str, Array], None]:
        means, _ = fn(params, parts.joined(cut))
        return {name: counts[name] + mean.count for name, mean in means.items()}, None

    with switches.label_checks("off"):
        counts, _ = lax.scan(step, {name: mean.count for name, mean in zeros.items()}, parts.cut, length=parts.number)
    return counts


_Map = Callable[[Pytree], Pytree]


def _map_means(map_mean: _Map, tree: Pytree, map_other: _Map = lambda x: x) -> Pytree:
    """The tree with its means and its other leaves replaced."""
    is_mean = lambda x: isinstance(x, MaskedMean)  # noqa: E731
    return jax.tree.map(lambda x: map_mean(x) if is_mean(x) else map_other(x), tree, is_leaf=is_mean)


def _sums_of_microbatch(
    fn: Callable[..., tuple[_Means, Pytree]], share_of: Callable[[dict[str, MaskedMean]], Array], params: Pytree
) -> tuple[_Sums, Pytree]:
    dependent: list[str] = []

    def total_and_count(params: Pytree) -> Pytree:
        means, aux = fn(params)
        if isinstance(means, dict):
            counts = {name: _noting_dependence(dependent, name, mean.count, params) for name, mean in means.items()}
            means = {name: MaskedMean(mean.total, counts[name]) for name, mean in means.items()}
            return (share_of(means), ()), (means, aux)
        return (means.total, _noting_dependence(dependent, "", means.count, params)), (means, aux)

    (total, count), pull_back, (means, aux) = jax.vjp(total_and_count, params, has_aux=True)
    if isinstance(means, dict) and dependent:
        found = f"a MaskedMean {dependent[0]!r} whose count depends on the parameters"
        hint = "Write MaskedMean(total, jax.lax.stop_gradient(count)), or return a single MaskedMean."
        raise ValueError(message(_OP, "fn", found, "a dict of means whose counts have no derivative", hint))
    ones, zeros = (functools.partial(jax.tree.map, like) for like in (jnp.ones_like, jnp.zeros_like))
    (d_total,) = pull_back((ones(total), zeros(count)))
    (d_count,) = pull_back((zeros(total), ones(count))) if dependent else (None,)
    wide = functools.partial(jax.tree.map, precision.widened)
    return _Sums(means, wide(d_total), wide(d_count)), aux


def _noting_dependence(noted: list[str], name: str, x: Array, params: Pytree) -> Array:
    """`x`; adds its name to `noted` if `x` depends on the parameters."""
    identity = jax.custom_jvp(lambda x, _: x)

    def rule(primals: Pytree, tangents: Pytree) -> Pytree:
        if not isinstance(tangents[0], SymbolicZero):
            noted.append(name)
        return primals[0], tangents[0]

    identity.defjvp(rule, symbolic_zeros=True)
    # With the parameters, the derivative by them always takes the rule. Without, one around it would if `x` has none:
    # that by weights, say, of which the count is a sum.
    return identity(x, params)
