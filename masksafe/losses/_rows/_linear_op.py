"""The op of losses of linear layers: outputs of tokens, or a weighted sum of them, with derivatives and on meshes.

A formula is computed in blocks of tokens on a CPU, in tiles of the classes on accelerators, and in one pass where JAX
refuses a loop. In blocks and in one pass the forward pass of a weighted sum also computes its gradients, and the
reverse pass multiplies them by the cotangent of the sum; in tiles the reverse pass computes them.

The functions take `LinearInputs` in the user's layout, since a copy could show a masked NaN to jax_debug_nans. Only the
first layers have gradients, as many as the formula says.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from masksafe._core import per_device, platforms, run_time, sharding
from masksafe._core.derivatives import rule_with_plain_form, without_mask_of_rows
from masksafe._core.masks import both, selected
from masksafe._core.precision import widened
from masksafe._core.typing import Array, Arrays, Pytree, jitted
from masksafe.losses._rows import _class_tiles, _token_blocks
from masksafe.losses._rows._cross_entropy import CrossEntropy
from masksafe.losses._rows._formula import nan_if_bad
from masksafe.losses._rows._linear_layer import Linear, LinearInputs, as_rows
from masksafe.losses._rows._linear_loss import LinearLoss, Sizes

_Args = tuple[LinearInputs, Arrays | None]  # the inputs and the weights


@jitted(0)
def evaluate(options: LinearLoss, inputs: LinearInputs, weights: Arrays | None = None) -> Pytree:
    """The outputs of each token `[...]`, 0 where masked; with weights the sum over the tokens of `output * weight`.

    The weights, one for each output, are arrays over the tokens `[...]`, 0 where masked, or scalars. An array has a
    gradient, a scalar none. If the explicit axes of a mesh split the arrays, each device works on its own
    tokens and classes.

    For features [8, 512, 256], a kernel [256, 50257] and labels [8, 512] an output or an array of weights is [8, 512].
    """
    args, names = (inputs, weights), _dimensions(options, inputs, weights)
    split = None if options.axis_name is not None else per_device.split_of(args, names)
    if split is None:
        results = _outputs_or_sum(options, inputs, weights)
        return jax.tree.map(sharding.Devices(options.axis_name).shared, results)
    token_names = PartitionSpec(*names[0].layers[0].features[:-1])
    token_devices = sharding.Devices(split.axes(*token_names) or None)

    def on_device(*args: Pytree) -> Pytree:
        results = evaluate(options._replace(axis_name=split.axes("classes") or None), *args)
        return results if weights is None else token_devices.sum(results)

    result_names = (token_names,) * len(options.formula.names) if weights is None else PartitionSpec()
    return split.map(on_device, args, names, result_names)


def _dimensions(options: LinearLoss, inputs: LinearInputs, weights: Arrays | None) -> Pytree:
    """The names of the dimensions of each array; the classes have none where every device needs all of them."""
    tokens: Pytree = PartitionSpec(*(f"tokens {axis}" for axis in range(len(inputs.tokens))))
    classes: Pytree = PartitionSpec("classes" if isinstance(options.formula, CrossEntropy) else None)
    layer = Linear(PartitionSpec(*tokens, None), PartitionSpec(None, *classes), classes)  # type: ignore[arg-type]
    names = LinearInputs((layer,) * len(inputs.layers), tokens, classes, tokens, tokens)
    weight_names = None if weights is None else tuple(tokens if w.ndim else PartitionSpec() for w in weights)
    return jax.tree.map(lambda name, x: jax.tree.map(lambda _: name, x), names, inputs), weight_names


class _Residuals(NamedTuple):
    """What the forward pass hands to the reverse pass."""

    results: Pytree
    outputs: tuple[Array | None, ...]  # those whose weights have gradients, else None
    sums: Pytree  # of each row; None in one pass
    gradients: tuple[Linear, ...]  # of the weighted sum, with tokens on one axis; () without weights, 0 in tiles


def _forward(
    options: LinearLoss, inputs: LinearInputs, weights: Arrays | None, *, with_gradients: bool = True
) -> tuple[Pytree, _Residuals]:
    d_outputs = None if weights is None or not with_gradients else _scaled_weights(options, inputs, weights)
    if _needs_one_pass(inputs):
        outputs, gradients, sums = *_in_one_pass(options, inputs, d_outputs), None
    else:
        d_rows = None if d_outputs is None else _on_one_axis(d_outputs)
        forms = (functools.partial(form, options) for form in (_token_blocks.sums_and_gradients, _class_tiles.sums))
        flat, (on_cpu, on_accelerator) = inputs.flat, _schedules(options, inputs, *forms)
        sums, gradients = platforms.by_platform(on_accelerator, flat, None, d_rows, cpu=on_cpu)
        number = inputs.classes(options.axis_name).number
        row_outputs = nan_if_bad(options.formula, options.formula.outputs(sums, number), flat.data, number)
        outputs = tuple(selected(x[:, 0].reshape(inputs.tokens), inputs.unmasked) for x in row_outputs)
    if weights is None:
        return outputs, _Residuals(outputs, (), sums, gradients)
    weighted_outputs = tuple(x if w.ndim else None for x, w in zip(outputs, weights, strict=True))
    total = _sum_of(outputs, weights)
    return total, _Residuals(total, weighted_outputs, sums, gradients)


def _in_one_pass(
    options: LinearLoss, inputs: LinearInputs, d_outputs: Arrays | None
) -> tuple[Arrays, tuple[Linear, ...]]:
    """The outputs, and the gradients in the dtype of sums, from cotangents in the range of float16."""
    if d_outputs is None or options.axis_name is not None:
        return _plain(options, inputs, None), ()
    number = options.formula.gradients
    wide = jax.tree.map(widened if _is_float16(inputs) else lambda x: x, inputs.layers[:number])
    plain = lambda layers: _plain(options, inputs._replace(layers=(*layers, *inputs.layers[number:])), None)  # noqa: E731
    outputs, reverse = jax.vjp(plain, wide)
    (gradients,) = reverse(jax.tree.map(lambda d, x: sharding.broadcast_like(d.astype(x.dtype), x), d_outputs, outputs))
    flat = [d._replace(features=as_rows(d.features, len(inputs.tokens))) for d in gradients]
    return outputs, tuple(jax.tree.map(lambda d: d.astype(inputs.sum_dtype), flat))


def _is_float16(inputs: LinearInputs) -> bool:
    """Whether scaled cotangents would overflow in the dtype of a layer."""
    return any(layer.dtype == jnp.float16 for layer in inputs.layers)


def _needs_one_pass(inputs: LinearInputs) -> bool:
    """Whether JAX refuses a loop over the tokens, or an argument is empty."""
    return not sharding.may_loop(inputs) or any(x.size == 0 for x in jax.tree.leaves(inputs))


def _schedules(
    options: LinearLoss, inputs: LinearInputs, in_blocks: Callable[..., Pytree], in_tiles: Callable[..., Pytree]
) -> list[Callable[..., Pytree]]:
    """`in_blocks` on a CPU, on accelerators `in_tiles` if the formula has them; both with their sizes."""
    sizes_if = functools.partial(options.sizes, inputs, is_masked=inputs.unmasked is not None)
    on_accelerator = in_tiles if isinstance(options.formula, CrossEntropy) else in_blocks
    return [functools.partial(in_blocks, sizes_if(True)), functools.partial(on_accelerator, sizes_if(False))]


def _sum_of(outputs: Arrays, weights: Arrays) -> Array:
    def one(x: Array, weight: Array) -> Array:
        weighted = x * weight.astype(x.dtype)
        return jnp.sum(jnp.where(weight != 0, weighted, 0.0) if weight.ndim else weighted)

    return functools.reduce(jnp.add, map(one, outputs, weights))


def _scaled_weights(options: LinearLoss, inputs: LinearInputs, weights: Arrays) -> Arrays:
    """The cotangents of the outputs with which the gradients of a sum are computed."""
    scale = _cotangent_scale(options, inputs, weights)
    return tuple(jnp.broadcast_to(w.astype(inputs.sum_dtype) * scale, inputs.tokens) for w in weights)


def _on_one_axis(d_outputs: Arrays) -> Arrays:
    """The cotangents with tokens on one axis, `[N, 1]`."""
    return tuple(as_rows(d, d.ndim) for d in d_outputs)


def _cotangent_scale(options: LinearLoss, inputs: LinearInputs, weights: Arrays) -> Array | float:
    """The cotangent used for the gradients of a sum before the actual cotangent is known.

    Cotangents of the logits are rounded to the dtype of the kernel; this scale moves them into the range of float16.
    """
    if not _is_float16(inputs):
        return 1.0
    scale = 2.0**options.formula.cotangent_exponent
    if not any(w.ndim for w in weights):
        return scale
    each = [run_time.largest_of(jnp.abs(lax.stop_gradient(w))) for w in weights]
    largest = functools.reduce(jnp.maximum, each)
    return scale / jnp.where((largest > 0) & (largest < jnp.inf), largest, 1)


def _plain(options: LinearLoss, inputs: LinearInputs, weights: Arrays | None) -> Pytree:
    """The results in a form that JAX differentiates to any order; if possible in a fixed number of blocks."""
    formula, used = options.formula, inputs.used
    if used is not None:
        inputs = inputs._replace(unmasked=both(inputs.unmasked, jnp.broadcast_to(jnp.any(used, 0), inputs.tokens)))
        if formula.label_outputs:
            has_label = jnp.any(used[: formula.label_outputs], 0)
            inputs = inputs._replace(data=jnp.where(has_label, inputs.data, 0))
    flat, dtype, classes = inputs.flat, inputs.sum_dtype, inputs.classes(options.axis_name)

    def outputs_of(rows: tuple[list[Array], Pytree, Array | None]) -> Arrays:
        features, data, unmasked = rows
        unmasked = None if unmasked is None else unmasked[..., None]
        clean = functools.partial(selected, where=unmasked)
        layers = [layer._replace(features=clean(x)) for layer, x in zip(flat.layers, features, strict=True)]
        logits, where = without_mask_of_rows(unmasked, (-1,), *(layer.logits(dtype) for layer in layers))
        logits = tuple(selected(x, where) for x in logits)
        return tuple(map(clean, formula.plain_outputs(logits, formula.cleaned(data, unmasked), classes)))

    rows = [layer.features for layer in flat.layers], flat.data, flat.unmasked
    if _needs_one_pass(inputs):
        outputs = outputs_of(rows)
    else:
        block = options.sizes(inputs, on_cpu=True, is_masked=False).token_block
        outputs = lax.map(jax.checkpoint(outputs_of), rows, batch_size=block)
    outputs = sharding.vary_with(tuple(x[:, 0].reshape(inputs.tokens) for x in outputs), inputs)
    return outputs if weights is None else _sum_of(outputs, weights)


# The reverse pass.


def _in_reverse(options: LinearLoss, args: _Args, residuals: _Residuals, d_results: Pytree) -> _Args:
    """Leaves out results that are not finite and whose cotangents are 0: the user has replaced them.

    Finite ones stay, since the gradients have derivatives with respect to cotangents of 0.
    """
    inputs, weights = args
    pairs = zip(residuals.results, d_results, strict=True) if weights is None else [(residuals.results, d_results)]
    devices = sharding.Devices(options.axis_name)
    used = jnp.stack([jnp.isfinite(x) | (devices.sum(d) != 0) for x, d in pairs])
    return inputs._replace(used=used), weights


def _reverse(options: LinearLoss, args: _Args, residuals: _Residuals, d_results: Pytree) -> tuple[LinearInputs, Pytree]:
    inputs, weights = args
    # The weights are the same on all devices, so each device returns a part of their cotangents.
    each = (None if x is None else _times(d_results, x) for x in residuals.outputs)
    d_weights = None if weights is None else tuple(each)
    number = options.formula.gradients
    layers, others = inputs.layers[:number], inputs.layers[number:]
    if residuals.sums is None and not residuals.gradients:
        results_of = lambda layers: _plain(options, inputs._replace(layers=(*layers, *others)), weights)  # noqa: E731
        (gradients,) = jax.vjp(results_of, layers)[1](d_results)
    else:
        found = zip(_gradients(options, inputs, weights, residuals, d_results), layers, strict=True)
        gradients = tuple(d._replace(features=d.features.reshape(x.features.shape)) for d, x in found)
    no_cotangents: LinearInputs = jax.tree.map(lambda _: None, inputs)
    return no_cotangents._replace(layers=(*gradients, *no_cotangents.layers[number:])), d_weights


def _gradients(
    options: LinearLoss, inputs: LinearInputs, weights: Arrays | None, residuals: _Residuals, d_results: Pytree
) -> tuple[Linear, ...]:
    """The gradients of the layers, with tokens on one axis. Tokens with cotangents of 0 cost no time.

    For features [8, 512, 256], a kernel [256, 50257] and a bias [50257] they are [4096, 256], [256, 50257] and [50257].
    """
    devices, dtype = sharding.Devices(options.axis_name), inputs.sum_dtype
    dtypes = jax.tree.map(lambda x: x.dtype, inputs.layers[: options.formula.gradients])
    if weights is None:
        d_tokens = tuple(map(devices.sum, d_results))
        d_outputs, factor = _on_one_axis(d_tokens), jnp.ones((), dtype)
    else:
        d_outputs = weights
        factor = devices.sum(d_results).astype(dtype) / _cotangent_scale(options, inputs, weights)

    def multiplied(flat: LinearInputs, residuals: _Residuals, factor: Array) -> tuple[Linear, ...]:
        gradients: tuple[Linear, ...] = jax.tree.map(functools.partial(_times, factor), residuals.gradients)
        if flat.unmasked is None:
            return gradients
        # Selected after the product: the cotangent may be infinite, as for sqrt(0).
        column, by_class = flat.unmasked[:, None], functools.partial(selected, where=run_time.any_of(flat.unmasked))
        return tuple(Linear(selected(d.features, column), *jax.tree.map(by_class, d[1:])) for d in gradients)

    def in_blocks(sizes: Sizes, flat: LinearInputs, residuals: _Residuals, d_outputs: Arrays, factor: Array) -> Pytree:
        if weights is None:
            needed = flat._replace(unmasked=both(_is_needed(d_outputs), flat.unmasked))
            gradients = _token_blocks.sums_and_gradients(options, sizes, needed, residuals.sums, d_outputs)[1]
        else:
            gradients = multiplied(flat, residuals, factor)
        return jax.tree.map(lambda d, dtype: d.astype(dtype), gradients, dtypes)

    def in_tiles(sizes: Sizes, flat: LinearInputs, residuals: _Residuals, d_outputs: Arrays, factor: Array) -> Pytree:
        needed = _is_needed(d_outputs) if weights is None else None
        d_rows = d_outputs if weights is None else _on_one_axis(_scaled_weights(options, inputs, d_outputs))
        return (_class_tiles.gradients(options, sizes, flat, residuals.sums, d_rows, factor, dtypes[0], needed),)

    if residuals.sums is None:
        return jax.tree.map(lambda d, dtype: d.astype(dtype), multiplied(inputs.flat, residuals, factor), dtypes)
    on_cpu, on_accelerator = _schedules(options, inputs, in_blocks, in_tiles)
    return platforms.by_platform(on_accelerator, inputs.flat, residuals, d_outputs, factor, cpu=on_cpu)


def _is_needed(d_rows: Arrays) -> Array:
    """Which tokens have a cotangent other than 0, `[N]`."""
    return functools.reduce(jnp.logical_or, [d[:, 0] != 0 for d in d_rows])


def _times(d_total: Array, x: Array) -> Array:
    """`x` times the cotangent of the sum; 0 for a cotangent of 0, even where `x` is NaN.

    Such a cotangent means that the user has replaced the sum, and with it any NaN. The derivative with respect to it
    stays.
    """
    return jnp.where((d_total != 0) | jnp.isfinite(x), x * d_total.astype(x.dtype), 0.0)


_outputs_or_sum = rule_with_plain_form(
    _forward, _reverse, _in_reverse, lambda *args: _forward(*args, with_gradients=False)[0], _plain
)
