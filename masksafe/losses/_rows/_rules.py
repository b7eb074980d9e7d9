"""Outputs of tokens, and weighted sums of them, with their derivative rules and on meshes.

All functions here take `Inputs` in the user's layout, since a copy could show a masked NaN to jax_debug_nans. Only the
first layers, as many as the formula says, have gradients.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from masksafe._core import labels, own_shard_map, platforms, precision, sharding, unfolded
from masksafe._core.derivatives import with_derivatives_of, with_reverse_rule
from masksafe._core.masks import both, selected
from masksafe._core.typing import Array
from masksafe.losses._rows import _tiles
from masksafe.losses._rows._blocks import sums_and_gradients
from masksafe.losses._rows._options import Options, Sizes
from masksafe.losses._rows._sources import Inputs, Linear

Outputs = tuple[Array, ...]  # of a formula, for each token
Gradients = tuple[Linear, ...]  # of the first layers, as many as the formula says
_Core = Callable[..., Any]
_Results = TypeVar("_Results")


def token_outputs(options: Options, inputs: Inputs) -> Outputs:
    """The outputs of each token `[...]`, 0 where masked."""
    return cast(Outputs, _evaluate(_token_outputs, options, inputs))


def weighted_sum(options: Options, inputs: Inputs, weights: Outputs) -> Array:
    """The sum over the tokens of `outputs[k] * weights[k]`.

    The weights are arrays over the tokens `[...]`, 0 where masked, or scalars. An array has a gradient, a scalar none.
    """
    return cast(Array, _evaluate(_weighted_sum, options, inputs, weights))


# On a mesh with explicit axes, each device works on the tokens and classes of its own.


def _evaluate(core: _Core, options: Options, *args: Any) -> Any:
    """What a core returns, computed on each device by itself if the arrays are split."""
    split = None if options.axis_name is not None else own_shard_map.split_of(args, _dimensions(options, *args))
    if split is None:
        return jax.tree.map(sharding.Devices(options.axis_name).shared, core(options, *args))
    return _evaluate_on_each_device(core, options, split, *args)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _evaluate_on_each_device(core: _Core, options: Options, split: own_shard_map.Split, *args: Any) -> Any:
    names = _dimensions(options, *args)
    of_tokens = PartitionSpec(*names[0].layers[0].features[:-1])
    over_tokens = split.axes(*of_tokens) or None
    options = options._replace(axis_name=split.axes("classes") or None)

    def on_device(*args: Any) -> Any:
        results = jax.tree.map(sharding.Devices(options.axis_name).shared, core(options, *args))
        return sharding.Devices(over_tokens).sum(results) if core is _weighted_sum else results

    of_results = PartitionSpec() if core is _weighted_sum else (of_tokens,) * len(options.formula.of_labels)
    return split.map(on_device, args, names, of_results)


def _dimensions(options: Options, inputs: Inputs, weights: Outputs = ()) -> Any:
    """The names of the dimensions of each array; the classes have none where every device needs all of them."""
    tokens: Any = PartitionSpec(*(f"tokens {axis}" for axis in range(len(inputs.tokens))))
    classes: Any = PartitionSpec("classes" if options.formula.by_parts else None)
    layer = Linear(PartitionSpec(*tokens, None), PartitionSpec(None, *classes), classes)  # type: ignore[arg-type]
    names = Inputs((layer,) * len(inputs.layers), tokens, classes, tokens)
    of_arrays = jax.tree.map(lambda names, arrays: jax.tree.map(lambda _: names, arrays), names, inputs)
    of_weights = tuple(tokens if w.ndim else PartitionSpec() for w in weights)
    return (of_arrays, of_weights) if weights else (of_arrays,)


# The two forms: the outputs of each token, and a weighted sum. Where the sum is computed in blocks, the forward pass
# computes its gradients along, and the reverse pass multiplies them by the cotangent of the sum; in tiles the reverse
# pass computes them.


class _Saved(NamedTuple):
    """What the forward pass keeps: gradients if it has computed them, zeros or none if the reverse pass does."""

    gradients: Gradients
    sums: Any  # None in one pass


def _token_outputs_forward(options: Options, inputs: Inputs) -> tuple[Outputs, Any]:
    outputs, saved = _evaluated(options, inputs, None)
    return outputs, (inputs, outputs, saved.sums)


def _token_outputs_reverse(options: Options, residuals: Any, d_outputs: Outputs) -> tuple[Inputs]:
    inputs, outputs, sums = residuals
    d_outputs = tuple(selected(sharding.Devices(options.axis_name).sum(d), inputs.live) for d in d_outputs)
    # Cotangents of 0 mean that the user has replaced the outputs, and with them any NaN. Other tokens stay, since the
    # gradients have derivatives with respect to the cotangents even there.
    is_sound = functools.reduce(jnp.logical_and, map(jnp.isfinite, outputs))
    takes_part = is_sound | _is_wanted(d_outputs)
    gradients = _plain_gradients if sums is None else _gradients
    return (_cotangents_of(inputs, gradients(options, inputs, takes_part, sums, d_outputs)),)


def _is_wanted(d_outputs: Outputs) -> Array:
    return functools.reduce(jnp.logical_or, [d != 0 for d in d_outputs])


def _cotangents_of(inputs: Inputs, gradients: Gradients) -> Inputs:
    rest: Any = [None] * (len(inputs.layers) - len(gradients))
    return Inputs((*gradients, *rest), None, None, None)


@with_reverse_rule(_token_outputs_forward, _token_outputs_reverse, static_argnums=(0,))
def _token_outputs(options: Options, inputs: Inputs) -> Outputs:
    return _evaluated(options, inputs, None)[0]


def _weighted_sum_forward(options: Options, inputs: Inputs, weights: Outputs) -> tuple[Array, Any]:
    outputs, saved = _evaluated(options, inputs, weights)
    kept = tuple(x if w.ndim else None for x, w in zip(outputs, weights, strict=True))
    return _sum_of(outputs, weights), (inputs, weights, kept, saved)


def _weighted_sum_reverse(options: Options, residuals: Any, d_total: Array) -> tuple[Inputs, Any]:
    inputs, weights, outputs, saved = residuals
    # Each device returns a part of the cotangents of the weights: they are the same on all devices.
    d_weights = tuple(None if x is None else _times(d_total, x) for x in outputs)
    d_total = sharding.Devices(options.axis_name).sum(d_total)
    multiplied = _multiplied if saved.sums is None else _multiplied_or_computed
    return _cotangents_of(inputs, multiplied(options, inputs, weights, saved, d_total)), d_weights


def _times(d_total: Array, x: Array) -> Array:
    """`x` times the cotangent of the sum; 0 for a cotangent of 0, even where `x` is NaN.

    Such a cotangent means that the user has replaced the sum, and with it any NaN. The derivative with respect to it
    stays.
    """
    return jnp.where((d_total != 0) | jnp.isfinite(x), x * d_total.astype(x.dtype), 0.0)


def _sum_of(outputs: Outputs, weights: Outputs) -> Array:
    def one(x: Array, weight: Array) -> Array:
        weighted = x * weight.astype(x.dtype)
        return jnp.sum(jnp.where(weight != 0, weighted, 0.0) if weight.ndim else weighted)

    return functools.reduce(jnp.add, map(one, outputs, weights))


@with_reverse_rule(_weighted_sum_forward, _weighted_sum_reverse, static_argnums=(0,))
def _weighted_sum(options: Options, inputs: Inputs, weights: Outputs) -> Array:
    return _sum_of(_evaluated(options, inputs, None)[0], weights)


def _is_float16(layers: tuple[Linear, ...]) -> bool:
    return any(layer.dtype == jnp.float16 for layer in layers)


def _cotangent_scale(options: Options, inputs: Inputs, weights: Outputs) -> Array | float:
    """The cotangent used for the gradients of a sum before the actual cotangent is known.

    Cotangents of the logits are rounded to the dtype of the kernel; this scale moves them into the range of float16.
    """
    if not _is_float16(inputs.layers):
        return 1.0
    scale = 2.0**options.formula.cotangent_exponent
    if not any(w.ndim for w in weights):
        return scale
    each = [jnp.max(jnp.abs(lax.stop_gradient(w)), initial=0) for w in weights]
    largest = functools.reduce(jnp.maximum, each)
    return scale / jnp.where((largest > 0) & (largest < jnp.inf), largest, 1)


def _scaled_weights(options: Options, inputs: Inputs, weights: Outputs) -> Outputs:
    """The cotangents of the outputs for which the gradients of a sum are computed."""
    scale = _cotangent_scale(options, inputs, weights)
    return tuple(jnp.broadcast_to(w.astype(inputs.sum_dtype) * scale, inputs.tokens) for w in weights)


# The plain functions, in a form that JAX differentiates to any order.


def _needs_one_pass(inputs: Inputs) -> bool:
    """Whether JAX refuses a loop over the tokens, or an argument is empty."""
    return not sharding.may_loop(inputs) or any(x.size == 0 for x in jax.tree.leaves(inputs))


def _rows(x: Array, leading: int) -> Array:
    """An array with its `leading` axes, those of the tokens, as one; `[N, 1]` if there is no other axis."""
    flat = x.reshape(math.prod(x.shape[:leading]), *x.shape[leading:])
    return flat[:, None] if flat.ndim == 1 else flat


def _flat(inputs: Inputs) -> Inputs:
    """With the tokens on one axis, and features and kernel of a layer in one dtype."""
    rows = functools.partial(_rows, leading=len(inputs.tokens))
    layers = tuple(Linear(rows(x.features).astype(x.dtype), x.kernel.astype(x.dtype), x.bias) for x in inputs.layers)
    live = None if inputs.live is None else inputs.live.reshape(-1)
    return Inputs(layers, jax.tree.map(rows, inputs.data), inputs.class_weights, live)


def _evaluated(options: Options, inputs: Inputs, weights: Outputs | None) -> tuple[Outputs, _Saved]:
    """The outputs, and what is saved for the reverse pass of them or, with weights, of their sum."""
    if not _needs_one_pass(inputs):
        return _outputs_and_saved(options, inputs, weights)
    if weights is None:
        return _plain_outputs(options, inputs), _Saved((), None)
    outputs, gradients = _plain_outputs_and_gradients(options, inputs, _scaled_weights(options, inputs, weights))
    return outputs, _Saved(gradients, None)


def _plain_outputs(options: Options, inputs: Inputs) -> Outputs:
    """The outputs, if possible in a fixed number of blocks."""
    flat, dtype, classes = _flat(inputs), inputs.sum_dtype, inputs.classes(options.axis_name)

    def of_tokens(rows: tuple[list[Array], Any, Array | None]) -> Outputs:
        features, data, live = rows
        where = None if live is None else live[..., None]
        clean = functools.partial(selected, where=where)
        layers = [x._replace(features=clean(of_x)) for x, of_x in zip(flat.layers, features, strict=True)]
        logits = tuple(clean(layer.logits(dtype)) for layer in layers)
        return tuple(map(clean, options.formula.plain_outputs(logits, jax.tree.map(clean, data), classes)))

    rows = [layer.features for layer in flat.layers], flat.data, flat.live
    if _needs_one_pass(inputs):
        outputs = of_tokens(rows)
    else:
        block = options.sizes(inputs, on_cpu=True, is_masked=False).token_block
        outputs = lax.map(jax.checkpoint(of_tokens), rows, batch_size=block)
    return sharding.vary_with(tuple(x[:, 0].reshape(inputs.tokens) for x in outputs), inputs)


def _plain_outputs_and_saved(options: Options, inputs: Inputs, weights: Outputs | None) -> tuple[Outputs, _Saved]:
    nothing = options.formula.nothing(jnp.zeros((math.prod(inputs.tokens), 1), inputs.sum_dtype))
    gradients = () if weights is None else _no_gradients(options, inputs)
    return _plain_outputs(options, inputs), _Saved(gradients, sharding.vary_with(nothing, inputs))


def _no_gradients(options: Options, inputs: Inputs) -> Gradients:
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, inputs.sum_dtype), inputs.layers[: options.formula.gradients])
    return sharding.vary_with(zeros, inputs)


def _plain_outputs_and_gradients(options: Options, inputs: Inputs, d_outputs: Outputs) -> tuple[Outputs, Gradients]:
    inputs = _without_unwanted_labels(options, inputs, d_outputs)
    number, dtype = options.formula.gradients, inputs.sum_dtype

    def outputs_of(layers: tuple[Linear, ...]) -> Outputs:
        outputs = _plain_outputs(options, inputs._replace(layers=(*layers, *inputs.layers[number:])))
        return tuple(sharding.Devices(options.axis_name).shared(x) for x in outputs)

    layers = inputs.layers[:number]
    if _is_float16(layers):  # the scaled cotangents would overflow in float16
        layers = jax.tree.map(precision.widened, layers)
    outputs, reverse = jax.vjp(outputs_of, layers)
    # The product splits the cotangents over devices like the outputs.
    d_outputs = tuple(
        sharding.Devices(options.axis_name).part_of_cotangent(d.astype(x.dtype)) * jnp.ones_like(x)
        for d, x in zip(d_outputs, outputs, strict=True)
    )
    # In the dtype of sums, as in blocks, whatever dtypes the arguments have.
    (gradients,) = jax.tree.map(lambda d: d.astype(dtype), reverse(d_outputs))
    return sharding.vary_with((outputs, gradients), (inputs, d_outputs))


def _without_unwanted_labels(options: Options, inputs: Inputs, d_outputs: Outputs) -> Inputs:
    """Labels without those out of range where the user has replaced all outputs that are NaN because of them."""
    of_labels = [d for d, is_of_label in zip(d_outputs, options.formula.of_labels, strict=True) if is_of_label]
    if not of_labels:
        return inputs
    is_kept = labels.is_class(inputs.data, inputs.classes(options.axis_name).number) | _is_wanted(tuple(of_labels))
    return inputs._replace(data=jnp.where(is_kept, inputs.data, 0))


def _plain_gradients(options: Options, inputs: Inputs, takes_part: Array, _: Any, d_outputs: Outputs) -> Gradients:
    live = inputs._replace(live=both(takes_part, inputs.live))
    return _cast(_plain_outputs_and_gradients(options, live, d_outputs)[1], inputs)


def _cast(gradients: Gradients, inputs: Inputs) -> Gradients:
    """Gradients in the dtypes of the arguments."""
    layers = inputs.layers[: len(gradients)]
    return cast(Gradients, jax.tree.map(lambda d, x: d.astype(x.dtype), gradients, layers))


def _multiplied(options: Options, inputs: Inputs, weights: Outputs, saved: _Saved, d_total: Array) -> Gradients:
    """The gradients of the forward pass times the actual cotangent of the sum."""
    live, d_total = inputs.live, d_total / _cotangent_scale(options, inputs, weights)
    products = jax.tree.map(functools.partial(_times, d_total), saved.gradients)
    if live is not None:
        # Selected after the product, since the cotangent may be infinite, as for sqrt(0).
        of_classes = functools.partial(selected, where=unfolded.any_of(live))
        products = tuple(
            Linear(selected(d.features, live[..., None]), *jax.tree.map(of_classes, d[1:])) for d in products
        )
    return _cast(products, inputs)


def _plain_multiplied(options: Options, inputs: Inputs, weights: Outputs, _: _Saved, d_total: Array) -> Gradients:
    gradients = _plain_outputs_and_gradients(options, inputs, _scaled_weights(options, inputs, weights))[1]
    return _multiplied(options, inputs, weights, _Saved(gradients, None), d_total)


# The kernels, each with the derivatives of a plain function.


def _by_schedule(
    options: Options, in_blocks: Callable[..., _Results], in_tiles: Callable[..., _Results], inputs: Inputs, *args: Any
) -> _Results:
    """`in_blocks(sizes, inputs, *args)` on a CPU; elsewhere `in_tiles`, if the formula can be computed in them."""
    of_cpu, of_others = (options.sizes(inputs, on_cpu, is_masked=inputs.live is not None) for on_cpu in (True, False))
    elsewhere = functools.partial(in_tiles if options.formula.by_parts else in_blocks, of_others)
    on_cpu = functools.partial(in_blocks, of_cpu)
    return platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, inputs, *args)


@with_derivatives_of(_plain_outputs_and_saved)
@functools.partial(jax.jit, static_argnums=0)
def _outputs_and_saved(options: Options, inputs: Inputs, weights: Outputs | None) -> tuple[Outputs, _Saved]:
    """The outputs, and what the reverse pass wants to know: in blocks the gradients of the weighted sum too, if any."""

    def in_tiles(sizes: Sizes, inputs: Inputs, _: Any, d_outputs: Outputs | None) -> tuple[Outputs, _Saved]:
        flat = _flat(inputs)
        outputs, sums = _with_outputs(options, inputs, flat, _tiles.sums(options, sizes, flat))
        return outputs, _Saved(() if d_outputs is None else _no_gradients(options, inputs), sums)

    d_outputs = None if weights is None else _scaled_weights(options, inputs, weights)
    return _by_schedule(options, functools.partial(_in_blocks, options), in_tiles, inputs, None, d_outputs)


def _in_blocks(
    options: Options, sizes: Sizes, inputs: Inputs, sums: Any, d_outputs: Outputs | None
) -> tuple[Outputs, _Saved]:
    """Outputs, sums and gradients, in blocks; the latter two in the dtype of sums."""
    flat, d_rows = _flat(inputs), None if d_outputs is None else _flat_outputs(d_outputs)
    sums, gradients = sums_and_gradients(options, sizes, flat, sums, d_rows)
    outputs, sums = _with_outputs(options, inputs, flat, sums)
    return outputs, _Saved(_unflattened(gradients, inputs), sums)


def _flat_outputs(d_outputs: Outputs) -> Outputs:
    return tuple(_rows(d, d.ndim) for d in d_outputs)


def _unflattened(gradients: Gradients, inputs: Inputs) -> Gradients:
    of_user = zip(gradients, inputs.layers, strict=False)
    return tuple(d._replace(features=d.features.reshape(x.features.shape)) for d, x in of_user)


def _with_outputs(options: Options, inputs: Inputs, flat: Inputs, sums: Any) -> tuple[Outputs, Any]:
    """The outputs in the user's layout, 0 where masked; and the sums."""
    outputs = options.formula.outputs(sums, flat.data, inputs.classes(options.axis_name).number)
    outputs = tuple(selected(x[:, 0].reshape(inputs.tokens), inputs.live) for x in outputs)
    return sharding.vary_with((outputs, sums), inputs)


@with_derivatives_of(_plain_gradients)
@functools.partial(jax.jit, static_argnums=0)
def _gradients(options: Options, inputs: Inputs, _: Array, sums: Any, d_outputs: Outputs) -> Gradients:
    """The gradients of the sum of the outputs weighted with `d_outputs`, in the dtypes of the arguments.

    Tokens with cotangents of 0 have none, and cost no time. The third argument is which tokens take part in derivatives
    of the gradients.
    """

    def in_blocks(sizes: Sizes, inputs: Inputs, sums: Any, d_outputs: Outputs) -> Gradients:
        wanted = inputs._replace(live=both(_is_wanted(d_outputs), inputs.live))
        return _cast(_in_blocks(options, sizes, wanted, sums, d_outputs)[1].gradients, inputs)

    def in_tiles(sizes: Sizes, inputs: Inputs, sums: Any, d_outputs: Outputs) -> Gradients:
        one = jnp.ones((), d_outputs[0].dtype)
        return _gradients_in_tiles(options, sizes, inputs, sums, d_outputs, one, _is_wanted(d_outputs).reshape(-1))

    return _by_schedule(options, in_blocks, in_tiles, inputs, sums, d_outputs)


@with_derivatives_of(_plain_multiplied)
@functools.partial(jax.jit, static_argnums=0)
def _multiplied_or_computed(
    options: Options, inputs: Inputs, weights: Outputs, saved: _Saved, d_total: Array
) -> Gradients:
    def in_blocks(_: Sizes, *args: Any) -> Gradients:
        return _multiplied(options, *args)

    def in_tiles(sizes: Sizes, inputs: Inputs, weights: Outputs, saved: _Saved, d_total: Array) -> Gradients:
        d_outputs = _scaled_weights(options, inputs, weights)
        factor = d_total.astype(d_outputs[0].dtype) / _cotangent_scale(options, inputs, weights)
        return _gradients_in_tiles(options, sizes, inputs, saved.sums, d_outputs, factor)

    return _by_schedule(options, in_blocks, in_tiles, inputs, weights, saved, d_total)


def _gradients_in_tiles(
    options: Options,
    sizes: Sizes,
    inputs: Inputs,
    sums: Any,
    d_outputs: Outputs,
    factor: Array,
    wanted: Array | None = None,
) -> Gradients:
    dtypes: Any = jax.tree.map(lambda x: x.dtype, inputs.layers[0])
    d_rows = _flat_outputs(d_outputs)
    gradients = _tiles.gradients(options, sizes, _flat(inputs), sums, d_rows, factor, dtypes, wanted)
    return _unflattened((gradients,), inputs)
