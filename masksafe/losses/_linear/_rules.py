"""Outputs of tokens, and weighted sums of them, with their derivative rules and on meshes.

All functions here take the same arrays, in the user's layout, since a copy could show a masked NaN to jax_debug_nans:
features `[..., D]`, labels `[...]`, which tokens are unmasked `[...]`, and the kernel, the bias and the weights of the
classes of the layer. All but features and kernel may be None; the weights of the classes have no gradient.
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
from masksafe._core.labels import class_index, is_class
from masksafe._core.masks import both, selected
from masksafe._core.own_shard_map import Split, on_each_device, split_of
from masksafe._core.precision import wide_dtype, widened
from masksafe._core.sharding import has_symbolic_size, may_loop, vary_with
from masksafe._core.typing import Array
from masksafe._core.unfolded import any_of
from masksafe.losses._linear._blocks import Config, outputs_and_gradients
from masksafe.losses._linear._formula import Formula, Layer, Part, Tokens
from masksafe.losses._linear._layer import Gradients, Sizes, default_class_tile, default_token_block
from masksafe.losses._linear._tiles import default_sizes, outputs_and_sums
from masksafe.losses._linear._tiles import gradients as gradients_in_tiles

_Core = Callable[..., Any]
Outputs = tuple[Array, ...]  # of a formula, for each token


class Options(NamedTuple):
    """The static arguments as the user gives them."""

    formula: Formula
    block_size: int | None
    axis_name: sharding.AxisName

    def config(self, features: Array, kernel: Array) -> Config:
        """With the sizes of blocks for these arrays."""
        sizes = Sizes(1, 1), Sizes(1, 1), Sizes(1, 1)
        if not (has_symbolic_size(features) or has_symbolic_size(kernel)):
            sizes = _choose_sizes(math.prod(features.shape[:-1]), kernel.shape, self.block_size)
        return Config(self.formula, *sizes, self.axis_name)


def _choose_sizes(tokens: int, of_kernel: tuple[int, ...], block_size: int | None) -> tuple[Sizes, Sizes, Sizes]:
    """On a CPU, elsewhere, and elsewhere with a mask."""
    tokens, (width, classes) = max(1, tokens), of_kernel
    block = min(default_token_block(classes) if block_size is None else block_size, tokens)
    elsewhere, if_masked = (default_sizes(tokens, width, classes, block_size, m) for m in (False, True))
    return Sizes(block, default_class_tile(width, block)), elsewhere, if_masked


def token_outputs(options: Options, *args: Any) -> Outputs:
    """The outputs of each token `[...]`, 0 where masked."""
    return cast(Outputs, _evaluate(_token_outputs, options, *args))


def weighted_sum(options: Options, *args_and_weights: Any) -> Array:
    """The sum over the tokens of `outputs[k] * weights[k]`; the last argument is the tuple of weights.

    They are arrays of the shape of the labels, 0 where masked, or scalars. An array has a gradient, a scalar has none.
    """
    return cast(Array, _evaluate(_weighted_sum, options, *args_and_weights))


# On a mesh with explicit axes, each device works on the tokens and classes of its own.


def _evaluate(core: _Core, options: Options, *args: Any) -> Any:
    """What a core returns, computed on each device by itself if the arrays are split."""
    split = None if options.axis_name is not None else split_of(args, _dimensions(*args))
    if split is None:
        features, _, _, kernel, *_ = args
        outputs = core(options.config(features, kernel), *args)
        return jax.tree.map(functools.partial(sharding.same_on_all_devices, options.axis_name), outputs)
    return _evaluate_on_each_device(core, options, split, *args)


@explains_forward_mode
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _evaluate_on_each_device(core: _Core, options: Options, split: Split, *args: Any) -> Any:
    names = _dimensions(*args)
    of_tokens = PartitionSpec(*names[0][:-1])
    over_tokens = split.axes(*of_tokens) or None
    options = options._replace(axis_name=split.axes("classes") or None)

    def on_device(*args: Any) -> Any:
        features, _, _, kernel, *_ = args
        outputs = core(options.config(features, kernel), *args)
        outputs = jax.tree.map(functools.partial(sharding.same_on_all_devices, options.axis_name), outputs)
        return sharding.sum_over_devices(over_tokens, outputs) if core is _weighted_sum else outputs

    of_results = PartitionSpec() if core is _weighted_sum else (of_tokens,) * options.formula.number
    return on_each_device(on_device, split, args, names, of_results)


def _dimensions(
    features: Array,
    labels: Array,
    live: Array | None,
    kernel: Array,
    bias: Array | None,
    class_weights: Array | None,
    weights: Outputs | None = None,
) -> tuple[Any, ...]:
    """The names of the dimensions of each array."""
    tokens = [f"tokens {axis}" for axis in range(labels.ndim)]
    of_tokens, of_classes = PartitionSpec(*tokens), PartitionSpec("classes")
    dimensions = (
        PartitionSpec(*tokens, None),
        of_tokens,
        None if live is None else of_tokens,
        PartitionSpec(None, "classes"),
        None if bias is None else of_classes,
        None if class_weights is None else of_classes,
    )
    if weights is None:
        return dimensions
    return *dimensions, tuple(of_tokens if w.ndim else PartitionSpec() for w in weights)


# The two forms: a weighted sum, computed together with its gradients, and the outputs of each token.


class _Saved(NamedTuple):
    """What the forward pass of a sum keeps: on a CPU the gradients, elsewhere the sums of the rows; the other is 0."""

    gradients: Gradients
    sums: Any  # None in one pass, on any platform


def _weighted_sum_forward(config: Config, *args_and_weights: Any) -> tuple[Array, Any]:
    *args, weights = args_and_weights
    if needs_one_pass(args):
        outputs, gradients = _differentiable_gradients(config, *args, _scaled_weights(args, weights))
        saved = _Saved(gradients, None)
    else:
        outputs, saved = _outputs_and_saved(config, *args, weights)
    kept = tuple(x if w.ndim else None for x, w in zip(outputs, weights, strict=True))
    return _sum_of(outputs, weights), (args, weights, kept, saved)


def _weighted_sum_reverse(config: Config, residuals: Any, d_total: Array) -> tuple[Any, ...]:
    args, weights, outputs, saved = residuals
    # Each device returns a part of the cotangents of the weights: they are the same on all devices.
    d_weights = tuple(None if x is None else times(d_total, x) for x in outputs)
    d_total = sharding.whole_cotangent(config.axis_name, d_total)
    if saved.sums is None:
        gradients = _multiplied(args, weights, saved, d_total)
    else:
        gradients = _multiplied_or_computed(config, *args, weights, saved, d_total)
    return gradients.features, None, None, gradients.kernel, gradients.bias, None, d_weights


def times(d_total: Array, x: Array) -> Array:
    """`x` times the cotangent of the sum; 0 for a cotangent of 0, even where `x` is NaN.

    Such a cotangent means that the user has replaced the sum, and with it any NaN. The derivative with respect to it
    stays.
    """
    return jnp.where((d_total != 0) | jnp.isfinite(x), x * d_total.astype(x.dtype), 0)


def _sum_of(outputs: Outputs, weights: Outputs) -> Array:
    def one(x: Array, weight: Array) -> Array:
        weighted = x * weight.astype(x.dtype)
        return jnp.sum(jnp.where(weight != 0, weighted, 0) if weight.ndim else weighted)

    first, *others = map(one, outputs, weights)
    return functools.reduce(jnp.add, others, first)


def _is_float16(features: Array, kernel: Array) -> bool:
    return bool(jnp.promote_types(features.dtype, kernel.dtype) == jnp.float16)


def _cotangent_scale(args: Any, weights: Outputs) -> Array | float:
    """The cotangent used for the gradients of a sum before the actual cotangent is known.

    Cotangents of the logits are rounded to the dtype of the kernel; this scale moves them into the range of float16.
    """
    features, _, _, kernel, *_ = args
    if not _is_float16(features, kernel):
        return 1.0
    if not any(w.ndim for w in weights):
        return 2.0**10
    each = [jnp.max(jnp.abs(lax.stop_gradient(w)), initial=0) for w in weights]
    largest = functools.reduce(jnp.maximum, each)
    return 2.0**10 / jnp.where((largest > 0) & (largest < jnp.inf), largest, 1)


def _scaled_weights(args: Any, weights: Outputs) -> Outputs:
    """The cotangents of the outputs for which the gradients of a sum are computed."""
    features, labels, _, kernel, *_ = args
    dtype = _sum_dtype(features, kernel)
    scale = _cotangent_scale(args, weights)
    return tuple(jnp.broadcast_to(w.astype(dtype) * scale, labels.shape) for w in weights)


@with_reverse_rule(_weighted_sum_forward, _weighted_sum_reverse, static_argnums=(0,))
def _weighted_sum(config: Config, *args_and_weights: Any) -> Array:
    *args, weights = args_and_weights
    return _sum_of(_evaluate_outputs(config, *args), weights)


def _token_outputs_forward(config: Config, *args: Any) -> tuple[Outputs, Any]:
    if needs_one_pass(args):
        outputs = _differentiable_outputs(config, *args)
        return outputs, (args, outputs, None)
    outputs, sums = _outputs_and_sums(config, *args)
    return outputs, (args, outputs, sums)


def _token_outputs_reverse(config: Config, residuals: Any, d_outputs: Outputs) -> tuple[Any, ...]:
    args, outputs, sums = residuals
    _, _, live, *_ = args
    d_outputs = tuple(selected(sharding.whole_cotangent(config.axis_name, d), live) for d in d_outputs)
    # Cotangents of 0 mean that the user has replaced the outputs, and with them any NaN. Other tokens stay, since the
    # gradients have derivatives with respect to the cotangents even there.
    is_sound = functools.reduce(jnp.logical_and, map(jnp.isfinite, outputs))
    takes_part = is_sound | _is_wanted(d_outputs)
    gradients = _gradients_of_one_pass if sums is None else _gradients
    d_features, d_kernel, d_bias = gradients(config, *args, takes_part, sums, d_outputs)
    return d_features, None, None, d_kernel, d_bias, None


def _is_wanted(d_outputs: Outputs) -> Array:
    return functools.reduce(jnp.logical_or, [d != 0 for d in d_outputs])


@with_reverse_rule(_token_outputs_forward, _token_outputs_reverse, static_argnums=(0,))
def _token_outputs(config: Config, *args: Any) -> Outputs:
    return _evaluate_outputs(config, *args)


# The kernels in blocks, and the equivalent functions that JAX differentiates in their place.


def _sum_dtype(features: Array, kernel: Array) -> Any:
    """The dtype of the sums."""
    return wide_dtype(jnp.promote_types(features.dtype, kernel.dtype))


def _flatten(
    features: Array,
    labels: Array,
    live: Array | None,
    kernel: Array,
    bias: Array | None,
    class_weights: Array | None,
) -> tuple[Tokens, Layer]:
    """The tokens on one axis, and features and kernel in one dtype."""
    dtype = jnp.promote_types(features.dtype, kernel.dtype)
    features = selected(features, None if live is None else live[..., None])
    features = features.astype(dtype).reshape(math.prod(labels.shape), features.shape[-1])
    live = None if live is None else live.reshape(-1)
    return Tokens(features, labels.reshape(-1), live), Layer(kernel.astype(dtype), bias, class_weights)


def needs_one_pass(args: Any) -> bool:
    """Whether JAX refuses a loop over the tokens, or an argument is empty."""
    return not may_loop(args) or any(x.size == 0 for x in jax.tree.leaves(args))


def _differentiable_outputs(config: Config, *args: Any) -> Outputs:
    """The outputs in a form that JAX differentiates to any order, if possible in a fixed number of blocks."""
    features, labels, _, kernel, *_ = args
    tokens, layer = _flatten(*args)

    def outputs_of_tokens(tokens: Tokens) -> Outputs:
        labels, live = tokens.labels[..., None], None if tokens.live is None else tokens.live[..., None]
        logits = jnp.matmul(tokens.features, layer.kernel, preferred_element_type=_sum_dtype(features, kernel))
        if layer.bias is not None:
            logits += jnp.expand_dims(layer.bias, range(logits.ndim - 1)).astype(logits.dtype)
        logits, labels = selected(logits, live), selected(labels, live)
        is_label = class_index(logits.shape) == config.local_labels(layer, labels)
        part = Part(logits, is_label, None, layer.class_weights)
        outputs = config.formula.outputs_of_logits(config.axis_name, part, labels, config.classes(layer))
        return tuple(selected(x, live)[..., 0] for x in outputs)

    if needs_one_pass(args):
        outputs = outputs_of_tokens(tokens)
    else:
        outputs = lax.map(jax.checkpoint(outputs_of_tokens), tokens, batch_size=config.on_cpu.token_block)
    return cast(Outputs, vary_with(tuple(x.reshape(labels.shape) for x in outputs), args))


def _differentiable_outputs_and_sums(config: Config, *args: Any) -> tuple[Outputs, Any]:
    return _differentiable_outputs(config, *args), _no_sums(config, *args)


@with_derivatives_of(_differentiable_outputs_and_sums)
@functools.partial(jax.jit, static_argnums=0)
def _outputs_and_sums(config: Config, *args: Any) -> tuple[Outputs, Any]:
    """The outputs, and what their reverse pass wants to know of the rows."""

    def on_cpu(*args: Any) -> tuple[Outputs, Any]:
        outputs, _ = outputs_and_gradients(config, *_flatten(*args), None)
        return _like_labels(args, outputs), _no_sums(config, *args)

    def elsewhere(*args: Any) -> tuple[Outputs, Any]:
        outputs, sums = outputs_and_sums(config, *_flatten(*args))
        return cast(tuple[Outputs, Any], vary_with((_like_labels(args, outputs), sums), args))

    return cast(tuple[Outputs, Any], platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, *args))


def _like_labels(args: Any, outputs: Outputs) -> Outputs:
    _, labels, *_ = args
    return tuple(x.reshape(labels.shape) for x in outputs)


def _no_sums(config: Config, *args: Any) -> Any:
    features, labels, _, kernel, *_ = args
    zero = jnp.zeros((labels.size, 1), _sum_dtype(features, kernel))
    return vary_with(jax.tree.map(lambda _: zero, config.formula.nothing), args)


def _evaluate_outputs(config: Config, *args: Any) -> Outputs:
    return _differentiable_outputs(config, *args) if needs_one_pass(args) else _outputs_and_sums(config, *args)[0]


def _differentiable_gradients(config: Config, *args_and_d_outputs: Any) -> tuple[Outputs, Gradients]:
    features, labels, live, kernel, bias, class_weights, d_outputs = args_and_d_outputs
    labels = _without_unwanted_labels(config, labels, kernel, d_outputs)

    def outputs_of_floats(features: Array, kernel: Array, bias: Array | None) -> Outputs:
        outputs = _differentiable_outputs(config, features, labels, live, kernel, bias, class_weights)
        return tuple(sharding.same_on_all_devices(config.axis_name, x) for x in outputs)

    floats = features, kernel, bias
    if _is_float16(features, kernel):  # the scaled cotangents would overflow in float16
        floats = jax.tree.map(widened, floats)
    outputs, reverse = jax.vjp(outputs_of_floats, *floats)
    # The product splits the cotangents over devices like the outputs.
    d_outputs = tuple(
        sharding.part_of_cotangent(config.axis_name, d) * jnp.ones_like(x)
        for d, x in zip(d_outputs, outputs, strict=True)
    )
    dtype = _sum_dtype(features, kernel)  # as in blocks, whatever dtypes the arguments have
    gradients = jax.tree.map(lambda gradient: gradient.astype(dtype), Gradients(*reverse(d_outputs)))
    return cast(tuple[Outputs, Gradients], vary_with((outputs, gradients), args_and_d_outputs))


def _without_unwanted_labels(config: Config, labels: Array, kernel: Array, d_outputs: Outputs) -> Array:
    """Labels without those out of range where the user has replaced all outputs that are NaN because of them."""
    of_labels = [d for d, is_of_label in zip(d_outputs, config.formula.of_labels, strict=True) if is_of_label]
    classes = sharding.size_over_devices(config.axis_name, kernel.shape[1])
    is_kept = is_class(labels, classes)
    return jnp.where(is_kept | _is_wanted(tuple(of_labels)) if of_labels else is_kept, labels, 0)


def _gradients_of_one_pass(config: Config, *all_args: Any) -> Gradients:
    *args, takes_part, _, d_outputs = all_args
    return _cast(_differentiable_gradients(config, *_with_live(args, takes_part), d_outputs)[1], args)


def _with_live(args: Any, live_too: Array) -> tuple[Any, ...]:
    """The arguments, with tokens unmasked only if they are in `live_too`."""
    features, labels, live, *layer = args
    return features, labels, both(live_too, live), *layer


def _cast(gradients: Gradients, args: Any) -> Gradients:
    """Gradients in the dtypes of the arguments."""
    features, _, _, kernel, bias, _ = args
    d_bias = None if bias is None or gradients.bias is None else gradients.bias.astype(bias.dtype)
    return Gradients(gradients.features.astype(features.dtype), gradients.kernel.astype(kernel.dtype), d_bias)


@with_derivatives_of(_gradients_of_one_pass)
@functools.partial(jax.jit, static_argnums=0)
def _gradients(config: Config, *all_args: Any) -> Gradients:
    """The gradients of the sum of the outputs weighted with `d_outputs`, in the dtypes of the arguments.

    Tokens with cotangents of 0 have none, and cost no time. After the arguments follow the tokens that take part in
    derivatives of the gradients, the sums of the rows, and the cotangents.
    """

    def on_cpu(args: Any, _: Any, d_outputs: Outputs) -> Gradients:
        return _cast(_gradients_in_blocks(config, _with_live(args, _is_wanted(d_outputs)), d_outputs)[1], args)

    def elsewhere(args: Any, sums: Any, d_outputs: Outputs) -> Gradients:
        return _gradients_in_tiles(
            config, args, sums, d_outputs, jnp.ones((), d_outputs[0].dtype), _is_wanted(d_outputs)
        )

    *args, _, sums, d_outputs = all_args
    return cast(Gradients, platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, args, sums, d_outputs))


def _gradients_in_blocks(config: Config, args: Any, d_outputs: Outputs) -> tuple[Outputs, Gradients]:
    features, *_ = args
    flat = tuple(d.reshape(-1) for d in d_outputs)
    outputs, gradients = outputs_and_gradients(config, *_flatten(*args), flat)
    assert gradients is not None
    return _like_labels(args, outputs), gradients._replace(features=gradients.features.reshape(features.shape))


def _gradients_in_tiles(
    config: Config, args: Any, sums: Any, d_outputs: Outputs, factor: Array, wanted: Array | None = None
) -> Gradients:
    features, _, _, kernel, bias, _ = args
    dtypes = Gradients(features.dtype, kernel.dtype, None if bias is None else bias.dtype)
    flat = tuple(d.reshape(-1) for d in d_outputs)
    wanted = None if wanted is None else wanted.reshape(-1)
    gradients = gradients_in_tiles(config, *_flatten(*args), sums, flat, factor, dtypes, wanted)
    return gradients._replace(features=gradients.features.reshape(features.shape))


# The gradients of a sum. On a CPU the forward pass computes them, and the reverse pass multiplies them by the cotangent
# of the sum; elsewhere the reverse pass computes them.


def _differentiable_outputs_and_saved(config: Config, *args_and_weights: Any) -> tuple[Outputs, _Saved]:
    *args, _ = args_and_weights
    return _differentiable_outputs(config, *args), _Saved(_no_gradients(*args), _no_sums(config, *args))


@with_derivatives_of(_differentiable_outputs_and_saved)
@functools.partial(jax.jit, static_argnums=0)
def _outputs_and_saved(config: Config, *args_and_weights: Any) -> tuple[Outputs, _Saved]:
    def on_cpu(args: Any, weights: Outputs) -> tuple[Outputs, _Saved]:
        outputs, gradients = _gradients_in_blocks(config, args, _scaled_weights(args, weights))
        return outputs, _Saved(gradients, _no_sums(config, *args))

    def elsewhere(args: Any, _: Any) -> tuple[Outputs, _Saved]:
        outputs, sums = outputs_and_sums(config, *_flatten(*args))
        outputs, sums = vary_with((_like_labels(args, outputs), sums), args)
        return outputs, _Saved(_no_gradients(*args), sums)

    *args, weights = args_and_weights
    return cast(tuple[Outputs, _Saved], platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, args, weights))


def _no_gradients(*args: Any) -> Gradients:
    features, _, _, kernel, bias, _ = args
    dtype = _sum_dtype(features, kernel)
    d_bias = None if bias is None else jnp.zeros(bias.shape, dtype)
    zeros = Gradients(jnp.zeros(features.shape, dtype), jnp.zeros(kernel.shape, dtype), d_bias)
    return cast(Gradients, vary_with(zeros, args))


def _multiplied(args: Any, weights: Outputs, saved: _Saved, d_total: Array) -> Gradients:
    """The gradients of the forward pass times the actual cotangent of the sum."""
    features, _, live, kernel, bias, _ = args
    d_total = d_total / _cotangent_scale(args, weights)

    def multiplied(gradient: Array, like: Array, where: Array | None) -> Array:
        # Selected after the product, since the cotangent may be infinite, as for sqrt(0).
        return selected(times(d_total, gradient), where).astype(like.dtype)

    live_tokens, any_live = (None, None) if live is None else (live[..., None], any_of(live))
    of_features, of_kernel, of_bias = saved.gradients
    return Gradients(
        multiplied(of_features, features, live_tokens),
        multiplied(of_kernel, kernel, any_live),
        None if of_bias is None or bias is None else multiplied(of_bias, bias, any_live),
    )


def _differentiable_multiplied(config: Config, *args_weights_saved_and_d_total: Any) -> Gradients:
    *args, weights, _, d_total = args_weights_saved_and_d_total
    _, gradients = _differentiable_gradients(config, *args, _scaled_weights(args, weights))
    return _multiplied(args, weights, _Saved(gradients, None), d_total)


@with_derivatives_of(_differentiable_multiplied)
@functools.partial(jax.jit, static_argnums=0)
def _multiplied_or_computed(config: Config, *args_weights_saved_and_d_total: Any) -> Gradients:
    def on_cpu(args: Any, weights: Outputs, saved: _Saved, d_total: Array) -> Gradients:
        return _multiplied(args, weights, saved, d_total)

    def elsewhere(args: Any, weights: Outputs, saved: _Saved, d_total: Array) -> Gradients:
        d_outputs = _scaled_weights(args, weights)
        factor = d_total.astype(d_outputs[0].dtype) / _cotangent_scale(args, weights)
        return _gradients_in_tiles(config, args, saved.sums, d_outputs, factor)

    *args, weights, saved, d_total = args_weights_saved_and_d_total
    return cast(Gradients, platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, args, weights, saved, d_total))
