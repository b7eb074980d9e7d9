"""Outputs of tokens, and weighted sums of them, with their derivative rules and on meshes.

All functions here take `Inputs` in the user's layout, since a copy could show a masked NaN to jax_debug_nans. Only the
first layers, as many as the formula says, have gradients.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from masksafe._core import platforms, sharding
from masksafe._core.derivatives import explains_forward_mode, with_derivatives_of, with_reverse_rule
from masksafe._core.labels import is_class
from masksafe._core.masks import both, selected
from masksafe._core.own_shard_map import Split, split_of
from masksafe._core.precision import widened
from masksafe._core.sharding import has_symbolic_size, may_loop, vary_with
from masksafe._core.typing import Array
from masksafe._core.unfolded import any_of
from masksafe.losses._rows import _tiles
from masksafe.losses._rows._blocks import Config, Inputs, Sizes, SizesByMask, sums_and_gradients
from masksafe.losses._rows._formula import Formula, LabelFormula
from masksafe.losses._rows._sources import Gradients, Linear

Outputs = tuple[Array, ...]  # of a formula, for each token
_Core = Callable[..., Any]


class Options(NamedTuple):
    """The static arguments as the user gives them."""

    formula: Formula
    block_size: int | None
    axis_name: sharding.AxisName = None

    def config(self, inputs: Inputs) -> Config:
        """With the sizes of blocks for these arrays."""
        if any(map(has_symbolic_size, jax.tree.leaves(inputs))):
            one_pass = SizesByMask(Sizes(1, 1), Sizes(1, 1))
            return Config(self.formula, one_pass, one_pass, self.axis_name)
        on_cpu, elsewhere = (
            SizesByMask(*(_choose_sizes(self, inputs.layers, on_cpu, is_masked) for is_masked in (False, True)))
            for on_cpu in (True, False)
        )
        return Config(self.formula, on_cpu, elsewhere, self.axis_name)


def _choose_sizes(options: Options, layers: tuple[Linear, ...], on_cpu: bool, is_masked: bool) -> Sizes:
    tokens, classes = max(1, math.prod(layers[0].features.shape[:-1])), layers[0].kernel.shape[1]
    width, given = max(layer.kernel.shape[0] for layer in layers), options.block_size
    has_tiles = isinstance(options.formula, LabelFormula)
    if has_tiles and not on_cpu:
        return _tiles.default_sizes(tokens, width, classes, given, is_masked)
    if given is not None:
        block = min(given, tokens)
    elif on_cpu:
        block = default_token_block(tokens, classes, 1 if has_tiles else 2, is_masked)
    else:
        block = default_token_block_elsewhere(tokens, classes)
    return Sizes(block, default_class_tile(width, block) if on_cpu else classes)


def default_token_block(tokens: int, classes: int, rows: int, is_masked: bool) -> int:
    """On a CPU, for blocks with so many rows of logits per token."""
    of = platforms.choices().linear
    most = max(of.fewest_tokens, min(of.most_tokens, of.token_block_elements // rows // max(1, classes)))
    if is_masked:
        most = min(most, max(of.fewest_tokens_if_masked, min(of.most_tokens_if_masked, tokens // 4)))
    return min(most, tokens)


def default_class_tile(width: int, token_block: int) -> int:
    return max(1, platforms.choices().linear.class_tile_elements // max(1, width, token_block))


def default_token_block_elsewhere(tokens: int, classes: int) -> int:
    of = platforms.choices().linear
    return min(tokens, max(of.fewest_tokens, of.token_block_elements_elsewhere // classes))


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
    split = None if options.axis_name is not None else split_of(args, _dimensions(options, *args))
    if split is None:
        return _on_device(core, options, *args)
    return _evaluate_on_each_device(core, options, split, *args)


@explains_forward_mode
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _evaluate_on_each_device(core: _Core, options: Options, split: Split, *args: Any) -> Any:
    names = _dimensions(options, *args)
    of_tokens = PartitionSpec(*names[0].layers[0].features[:-1])
    over_tokens = split.axes(*of_tokens) or None
    options = options._replace(axis_name=split.axes("classes") or None)

    def on_device(*args: Any) -> Any:
        results = _on_device(core, options, *args)
        return sharding.Devices(over_tokens).sum(results) if core is _weighted_sum else results

    of_results = PartitionSpec() if core is _weighted_sum else (of_tokens,) * options.formula.number
    return split.map(on_device, args, names, of_results)


def _on_device(core: _Core, options: Options, inputs: Inputs, *weights: Any) -> Any:
    results = core(options.config(inputs), inputs, *weights)
    return jax.tree.map(sharding.Devices(options.axis_name).shared, results)


def _dimensions(options: Options, inputs: Inputs, *weights: Outputs) -> Any:
    """The names of the dimensions of each array; the classes have none where every device needs all of them."""
    tokens = [f"tokens {axis}" for axis in range(inputs.layers[0].features.ndim - 1)]
    of_tokens = PartitionSpec(*tokens)
    classes = PartitionSpec("classes" if isinstance(options.formula, LabelFormula) else None)

    def of_layer(layer: Linear) -> Any:
        of_bias = None if layer.bias is None else classes
        return Linear(PartitionSpec(*tokens, None), PartitionSpec(None, *classes), of_bias)  # type: ignore[arg-type]

    names = Inputs(
        tuple(map(of_layer, inputs.layers)),
        jax.tree.map(lambda _: of_tokens, inputs.data),
        None if inputs.class_weights is None else classes,  # type: ignore[arg-type]
        None if inputs.live is None else of_tokens,  # type: ignore[arg-type]
    )
    return names, *(tuple(of_tokens if w.ndim else PartitionSpec() for w in each) for each in weights)


# The two forms: the outputs of each token, and a weighted sum, computed together with its gradients.


def _token_outputs_forward(config: Config, inputs: Inputs) -> tuple[Outputs, Any]:
    if _needs_one_pass(inputs):
        outputs = _plain_outputs(config, inputs)
        return outputs, (inputs, outputs, None)
    outputs, sums = _outputs_and_sums(config, inputs)
    return outputs, (inputs, outputs, sums)


def _token_outputs_reverse(config: Config, residuals: Any, d_outputs: Outputs) -> tuple[Inputs]:
    inputs, outputs, sums = residuals
    d_outputs = tuple(selected(sharding.Devices(config.axis_name).sum(d), inputs.live) for d in d_outputs)
    # Cotangents of 0 mean that the user has replaced the outputs, and with them any NaN. Other tokens stay, since the
    # gradients have derivatives with respect to the cotangents even there.
    is_sound = functools.reduce(jnp.logical_and, map(jnp.isfinite, outputs))
    takes_part = is_sound | _is_wanted(d_outputs)
    gradients = _plain_gradients if sums is None else _gradients
    return (_cotangents_of(inputs, gradients(config, inputs, takes_part, sums, d_outputs)),)


def _is_wanted(d_outputs: Outputs) -> Array:
    return functools.reduce(jnp.logical_or, [d != 0 for d in d_outputs])


def _cotangents_of(inputs: Inputs, gradients: tuple[Gradients, ...]) -> Inputs:
    rest: Any = [None] * (len(inputs.layers) - len(gradients))
    return Inputs((*(Linear(*d) for d in gradients), *rest), None, None, None)


@with_reverse_rule(_token_outputs_forward, _token_outputs_reverse, static_argnums=(0,))
def _token_outputs(config: Config, inputs: Inputs) -> Outputs:
    return _outputs(config, inputs)


class _Saved(NamedTuple):
    """What the forward pass of a sum keeps: gradients, or zeros if the reverse pass computes them from the sums."""

    gradients: tuple[Gradients, ...]
    sums: Any  # None in one pass


def _weighted_sum_forward(config: Config, inputs: Inputs, weights: Outputs) -> tuple[Array, Any]:
    if _needs_one_pass(inputs):
        outputs, gradients = _plain_outputs_and_gradients(config, inputs, _scaled_weights(config, inputs, weights))
        saved = _Saved(gradients, None)
    else:
        outputs, saved = _outputs_and_saved(config, inputs, weights)
    kept = tuple(x if w.ndim else None for x, w in zip(outputs, weights, strict=True))
    return _sum_of(outputs, weights), (inputs, weights, kept, saved)


def _weighted_sum_reverse(config: Config, residuals: Any, d_total: Array) -> tuple[Inputs, Any]:
    inputs, weights, outputs, saved = residuals
    # Each device returns a part of the cotangents of the weights: they are the same on all devices.
    d_weights = tuple(None if x is None else _times(d_total, x) for x in outputs)
    d_total = sharding.Devices(config.axis_name).sum(d_total)
    multiplied = _multiplied if saved.sums is None else _multiplied_or_computed
    return _cotangents_of(inputs, multiplied(config, inputs, weights, saved, d_total)), d_weights


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
def _weighted_sum(config: Config, inputs: Inputs, weights: Outputs) -> Array:
    return _sum_of(_outputs(config, inputs), weights)


def _is_float16(layers: tuple[Linear, ...]) -> bool:
    return any(layer.dtype == jnp.float16 for layer in layers)


def _cotangent_scale(config: Config, inputs: Inputs, weights: Outputs) -> Array | float:
    """The cotangent used for the gradients of a sum before the actual cotangent is known.

    Cotangents of the logits are rounded to the dtype of the kernel; this scale moves them into the range of float16.
    """
    if not _is_float16(inputs.layers):
        return 1.0
    scale = 2.0**config.formula.cotangent_exponent
    if not any(w.ndim for w in weights):
        return scale
    each = [jnp.max(jnp.abs(lax.stop_gradient(w)), initial=0) for w in weights]
    largest = functools.reduce(jnp.maximum, each)
    return scale / jnp.where((largest > 0) & (largest < jnp.inf), largest, 1)


def _scaled_weights(config: Config, inputs: Inputs, weights: Outputs) -> Outputs:
    """The cotangents of the outputs for which the gradients of a sum are computed."""
    scale, tokens = _cotangent_scale(config, inputs, weights), inputs.layers[0].features.shape[:-1]
    return tuple(jnp.broadcast_to(w.astype(inputs.sum_dtype) * scale, tokens) for w in weights)


# The kernels, and the plain functions that JAX differentiates in their place.


def _needs_one_pass(inputs: Inputs) -> bool:
    """Whether JAX refuses a loop over the tokens, or an argument is empty."""
    return not may_loop(inputs) or any(x.size == 0 for x in jax.tree.leaves(inputs))


def _flat(inputs: Inputs) -> Inputs:
    """With the tokens on one axis, and features and kernel of a layer in one dtype."""
    leading = inputs.layers[0].features.ndim - 1

    def rows(x: Array) -> Array:
        flat = x.reshape(math.prod(x.shape[:leading]), *x.shape[leading:])
        return flat[:, None] if flat.ndim == 1 else flat

    layers = tuple(Linear(rows(x.features).astype(x.dtype), x.kernel.astype(x.dtype), x.bias) for x in inputs.layers)
    live = None if inputs.live is None else inputs.live.reshape(-1)
    return Inputs(layers, jax.tree.map(rows, inputs.data), inputs.class_weights, live)


def _flat_outputs(d_outputs: Outputs) -> Outputs:
    return tuple(d.reshape(-1)[:, None] for d in d_outputs)


def _per_token(inputs: Inputs, outputs: Outputs) -> Outputs:
    """Outputs `[N, 1]` in the user's layout, 0 where masked."""
    shape = inputs.layers[0].features.shape[:-1]
    return tuple(selected(x[:, 0].reshape(shape), inputs.live) for x in outputs)


def _plain_outputs(config: Config, inputs: Inputs) -> Outputs:
    """The outputs in a form that JAX differentiates to any order, if possible in a fixed number of blocks."""
    flat, dtype, classes = _flat(inputs), inputs.sum_dtype, inputs.classes(config)

    def of_tokens(rows: tuple[list[Array], Any, Array | None]) -> Outputs:
        features, data, live = rows
        where = None if live is None else live[..., None]
        clean = functools.partial(selected, where=where)
        layers = [x._replace(features=clean(of_x)) for x, of_x in zip(flat.layers, features, strict=True)]
        logits = tuple(clean(layer.logits(dtype)) for layer in layers)
        return tuple(map(clean, config.formula.plain_outputs(logits, jax.tree.map(clean, data), classes)))

    rows = [layer.features for layer in flat.layers], flat.data, flat.live
    if _needs_one_pass(inputs):
        outputs = of_tokens(rows)
    else:
        outputs = lax.map(jax.checkpoint(of_tokens), rows, batch_size=config.on_cpu.unmasked.token_block)
    shape = inputs.layers[0].features.shape[:-1]
    return vary_with(tuple(x[:, 0].reshape(shape) for x in outputs), inputs)


def _outputs(config: Config, inputs: Inputs) -> Outputs:
    return _plain_outputs(config, inputs) if _needs_one_pass(inputs) else _outputs_and_sums(config, inputs)[0]


def _plain_outputs_and_sums(config: Config, inputs: Inputs) -> tuple[Outputs, Any]:
    return _plain_outputs(config, inputs), _no_sums(config, inputs)


@with_derivatives_of(_plain_outputs_and_sums)
@functools.partial(jax.jit, static_argnums=0)
def _outputs_and_sums(config: Config, inputs: Inputs) -> tuple[Outputs, Any]:
    """The outputs, and what their reverse pass wants to know of the rows."""

    def on_cpu(inputs: Inputs) -> tuple[Outputs, Any]:
        return _run(config, config.on_cpu.of(inputs.live), inputs)[:2]

    def elsewhere(inputs: Inputs) -> tuple[Outputs, Any]:
        if not isinstance(config.formula, LabelFormula):
            return _run(config, config.elsewhere.of(inputs.live), inputs)[:2]
        flat = _flat(inputs)
        return _with_outputs(config, inputs, flat, _tiles.sums(config, config.formula, flat))

    return platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, inputs)


def _run(
    config: Config, sizes: Sizes, inputs: Inputs, sums: Any = None, d_outputs: Outputs | None = None
) -> tuple[Outputs, Any, tuple[Gradients, ...]]:
    """Outputs, sums and gradients, in blocks; the latter two in the dtype of sums."""
    flat = _flat(inputs)
    d_rows = None if d_outputs is None else _flat_outputs(d_outputs)
    sums, gradients = sums_and_gradients(config, sizes, flat, sums, d_rows)
    outputs, sums = _with_outputs(config, inputs, flat, sums)
    of_user = zip(gradients, inputs.layers, strict=False)
    return outputs, sums, tuple(d._replace(features=d.features.reshape(x.features.shape)) for d, x in of_user)


def _with_outputs(config: Config, inputs: Inputs, flat: Inputs, sums: Any) -> tuple[Outputs, Any]:
    outputs = config.formula.outputs(sums, flat.data, flat.classes(config).number)
    return vary_with((_per_token(inputs, outputs), sums), inputs)


def _no_sums(config: Config, inputs: Inputs) -> Any:
    zero = jnp.zeros((math.prod(inputs.layers[0].features.shape[:-1]), 1), inputs.sum_dtype)
    return vary_with(config.formula.nothing(zero), inputs)


def _plain_outputs_and_gradients(
    config: Config, inputs: Inputs, d_outputs: Outputs
) -> tuple[Outputs, tuple[Gradients, ...]]:
    inputs = _without_unwanted_labels(config, inputs, d_outputs)
    number, dtype = config.formula.gradients, inputs.sum_dtype

    def outputs_of(layers: tuple[Linear, ...]) -> Outputs:
        outputs = _plain_outputs(config, inputs._replace(layers=(*layers, *inputs.layers[number:])))
        return tuple(sharding.Devices(config.axis_name).shared(x) for x in outputs)

    layers = inputs.layers[:number]
    if _is_float16(layers):  # the scaled cotangents would overflow in float16
        layers = jax.tree.map(widened, layers)
    outputs, reverse = jax.vjp(outputs_of, layers)
    # The product splits the cotangents over devices like the outputs.
    d_outputs = tuple(
        sharding.Devices(config.axis_name).part_of_cotangent(d.astype(x.dtype)) * jnp.ones_like(x)
        for d, x in zip(d_outputs, outputs, strict=True)
    )
    # In the dtype of sums, as in blocks, whatever dtypes the arguments have.
    (d_layers,) = jax.tree.map(lambda d: d.astype(dtype), reverse(d_outputs))
    gradients = tuple(Gradients(*d) for d in d_layers)
    return vary_with((outputs, gradients), (inputs, d_outputs))


def _without_unwanted_labels(config: Config, inputs: Inputs, d_outputs: Outputs) -> Inputs:
    """Labels without those out of range where the user has replaced all outputs that are NaN because of them."""
    if not isinstance(config.formula, LabelFormula):
        return inputs
    of_labels = [d for d, is_of_label in zip(d_outputs, config.formula.of_labels, strict=True) if is_of_label]
    is_kept = is_class(inputs.data, inputs.classes(config).number)
    is_kept = is_kept | _is_wanted(tuple(of_labels)) if of_labels else is_kept
    return inputs._replace(data=jnp.where(is_kept, inputs.data, 0))


def _plain_gradients(
    config: Config, inputs: Inputs, takes_part: Array, _: Any, d_outputs: Outputs
) -> tuple[Gradients, ...]:
    live = inputs._replace(live=both(takes_part, inputs.live))
    return _cast(_plain_outputs_and_gradients(config, live, d_outputs)[1], inputs)


def _cast(gradients: tuple[Gradients, ...], inputs: Inputs) -> tuple[Gradients, ...]:
    """Gradients in the dtypes of the arguments."""
    return tuple(
        Gradients(*(None if g is None else g.astype(x.dtype) for g, x in zip(d, layer, strict=True)))  # type: ignore
        for d, layer in zip(gradients, inputs.layers, strict=False)
    )


@with_derivatives_of(_plain_gradients)
@functools.partial(jax.jit, static_argnums=0)
def _gradients(config: Config, inputs: Inputs, _: Array, sums: Any, d_outputs: Outputs) -> tuple[Gradients, ...]:
    """The gradients of the sum of the outputs weighted with `d_outputs`, in the dtypes of the arguments.

    Tokens with cotangents of 0 have none, and cost no time. The third argument is which tokens take part in derivatives
    of the gradients.
    """

    def in_blocks(sizes: SizesByMask, inputs: Inputs, sums: Any, d_outputs: Outputs) -> tuple[Gradients, ...]:
        wanted = inputs._replace(live=both(_is_wanted(d_outputs), inputs.live))
        return _cast(_run(config, sizes.of(inputs.live), wanted, sums, d_outputs)[2], inputs)

    def elsewhere(inputs: Inputs, sums: Any, d_outputs: Outputs) -> tuple[Gradients, ...]:
        if not isinstance(config.formula, LabelFormula):
            return in_blocks(config.elsewhere, inputs, sums, d_outputs)
        one = jnp.ones((), d_outputs[0].dtype)
        return _gradients_in_tiles(config, config.formula, inputs, sums, d_outputs, one, _is_wanted(d_outputs))

    on_cpu = functools.partial(in_blocks, config.on_cpu)
    return platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, inputs, sums, d_outputs)


def _gradients_in_tiles(
    config: Config,
    formula: LabelFormula,
    inputs: Inputs,
    sums: Any,
    d_outputs: Outputs,
    factor: Array,
    wanted: Array | None = None,
) -> tuple[Gradients, ...]:
    (layer,) = inputs.layers
    dtypes: Any = jax.tree.map(lambda x: x.dtype, layer)
    wanted = None if wanted is None else wanted.reshape(-1)
    d = _tiles.gradients(
        config, formula, _flat(inputs), sums, _flat_outputs(d_outputs), factor, Gradients(*dtypes), wanted
    )
    return (d._replace(features=d.features.reshape(layer.features.shape)),)


# The gradients of a sum. Where it is computed in blocks the forward pass computes them, and the reverse pass multiplies
# them by the cotangent of the sum; in tiles the reverse pass computes them.


def _plain_outputs_and_saved(config: Config, inputs: Inputs, weights: Outputs) -> tuple[Outputs, _Saved]:
    return _plain_outputs(config, inputs), _Saved(_no_gradients(config, inputs), _no_sums(config, inputs))


@with_derivatives_of(_plain_outputs_and_saved)
@functools.partial(jax.jit, static_argnums=0)
def _outputs_and_saved(config: Config, inputs: Inputs, weights: Outputs) -> tuple[Outputs, _Saved]:
    def in_blocks(sizes: SizesByMask, inputs: Inputs, weights: Outputs) -> tuple[Outputs, _Saved]:
        d_outputs = _scaled_weights(config, inputs, weights)
        outputs, sums, gradients = _run(config, sizes.of(inputs.live), inputs, d_outputs=d_outputs)
        return outputs, _Saved(gradients, sums)

    def elsewhere(inputs: Inputs, weights: Outputs) -> tuple[Outputs, _Saved]:
        if not isinstance(config.formula, LabelFormula):
            return in_blocks(config.elsewhere, inputs, weights)
        outputs, sums = _outputs_and_sums(config, inputs)
        return outputs, _Saved(_no_gradients(config, inputs), sums)

    on_cpu = functools.partial(in_blocks, config.on_cpu)
    return platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, inputs, weights)


def _no_gradients(config: Config, inputs: Inputs) -> tuple[Gradients, ...]:
    dtype, layers = inputs.sum_dtype, inputs.layers[: config.formula.gradients]
    zeros = tuple(Gradients(*jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), layer)) for layer in layers)
    return vary_with(zeros, inputs)


def _multiplied(
    config: Config, inputs: Inputs, weights: Outputs, saved: _Saved, d_total: Array
) -> tuple[Gradients, ...]:
    """The gradients of the forward pass times the actual cotangent of the sum."""
    live, d_total = inputs.live, d_total / _cotangent_scale(config, inputs, weights)
    live_rows, any_live = (None, None) if live is None else (live[..., None], any_of(live))

    def multiplied(gradient: Array | None, where: Array | None) -> Array | None:
        # Selected after the product, since the cotangent may be infinite, as for sqrt(0).
        return None if gradient is None else selected(_times(d_total, gradient), where)

    where = live_rows, any_live, any_live
    products = tuple(Gradients(*map(multiplied, d, where)) for d in saved.gradients)  # type: ignore[arg-type]
    return _cast(products, inputs)


def _plain_multiplied(
    config: Config, inputs: Inputs, weights: Outputs, _: _Saved, d_total: Array
) -> tuple[Gradients, ...]:
    gradients = _plain_outputs_and_gradients(config, inputs, _scaled_weights(config, inputs, weights))[1]
    return _multiplied(config, inputs, weights, _Saved(gradients, None), d_total)


@with_derivatives_of(_plain_multiplied)
@functools.partial(jax.jit, static_argnums=0)
def _multiplied_or_computed(
    config: Config, inputs: Inputs, weights: Outputs, saved: _Saved, d_total: Array
) -> tuple[Gradients, ...]:
    def elsewhere(inputs: Inputs, weights: Outputs, saved: _Saved, d_total: Array) -> tuple[Gradients, ...]:
        if not isinstance(config.formula, LabelFormula):
            return _multiplied(config, inputs, weights, saved, d_total)
        d_outputs = _scaled_weights(config, inputs, weights)
        factor = d_total.astype(d_outputs[0].dtype) / _cotangent_scale(config, inputs, weights)
        return _gradients_in_tiles(config, config.formula, inputs, saved.sums, d_outputs, factor)

    on_cpu = functools.partial(_multiplied, config)
    args = inputs, weights, saved, d_total
    return platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, *args)
