"""A user's file, which mypy and pyright read in their strict modes and nobody runs.

`assert_type` says what the checkers have to find. A line with `type: ignore` and `pyright: ignore` is a wrong call that
both have to refuse: an ignore that is not needed is an error as well.
"""

import functools
from typing import Any, assert_type

import jax
import jax.numpy as jnp

import masksafe
from masksafe import MaskedMean, adapters, attention_masks, losses

X, KERNEL, LABELS, KEEP = jnp.ones((2, 4)), jnp.ones((4, 3)), jnp.array([0, 2]), jnp.array([True, False])
HEADS = jnp.ones((1, 2, 1, 4))
Pair = tuple[jax.Array, jax.Array]


def words() -> None:
    """Parameters that take one of a few words."""
    losses.linear_softmax_cross_entropy(X, KERNEL, LABELS, where=KEEP, reduction="sum")
    losses.linear_softmax_cross_entropy(X, KERNEL, LABELS, reduction="total")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    losses.linear_kl_divergence(X, KERNEL, X, KERNEL, direction="reverse")
    losses.linear_kl_divergence(X, KERNEL, X, KERNEL, direction="backward")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    losses.linear_kl_divergence_with_top_k_targets(X, KERNEL, X, LABELS, rest="drop")
    losses.linear_kl_divergence_with_top_k_targets(X, KERNEL, X, LABELS, rest="keep")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    losses.info_nce_loss(X, X, reduction="none")
    losses.info_nce_loss(X, X, reduction="None")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    losses.sigmoid_contrastive_loss(X, X, reduction=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    losses.dice_loss(X, X, reduction="mean")
    losses.dice_loss(X, X, reduction="average")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    masksafe.dot_product_attention(HEADS, HEADS, HEADS, implementation="cudnn")
    masksafe.dot_product_attention(HEADS, HEADS, HEADS, implementation=jax.nn.dot_product_attention)
    masksafe.dot_product_attention(HEADS, HEADS, HEADS, implementation="triton")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    masksafe.standardize(X, algorithm="stable")
    masksafe.standardize(X, algorithm="slow")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    masksafe.set_label_checks("off")
    masksafe.set_label_checks("on")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with masksafe.label_checks("raise"), masksafe.forward_mode():
        assert_type(masksafe.mean(X), jax.Array)
    with masksafe.label_checks("warn"):  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        pass


def ops() -> None:
    """Results that are arrays, and keywords of other libraries."""
    assert_type(losses.softmax_cross_entropy_with_integer_labels(X, LABELS, where=KEEP), jax.Array)
    assert_type(losses.softmax_cross_entropy_with_integer_labels(X, LABELS, z_loss=0.1, with_components=True), Pair)
    assert_type(losses.softmax_cross_entropy_with_integer_labels(X, LABELS, class_weights=X[0]), jax.Array)
    assert_type(masksafe.mean(X, axis=[0, 1], where=True), jax.Array)
    assert_type(masksafe.var_mean(X), Pair)
    assert_type(masksafe.layer_norm(X, where=KEEP[:, None], axis_name=("data", "model")), jax.Array)
    assert_type(masksafe.softmax(X, -1, where=KEEP[:, None]), jax.Array)
    assert_type(masksafe.segment_sum(X, LABELS, 3), jax.Array)
    assert_type(masksafe.keep(X, where=KEEP[:, None]), jax.Array)
    assert_type(masksafe.mask_where(KEEP, LABELS, 0), jax.Array)
    masksafe.mean(X, keepdim=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    masksafe.softmax(X, mask=KEEP)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    masksafe.mean("X")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def axes(names: tuple[str, ...] | None) -> None:
    """The axis of a mesh, several, or none, wherever `axis_name` is a parameter."""
    assert_type(masksafe.dot_product_attention(HEADS, HEADS, HEADS, axis_name=("data", "time")), jax.Array)
    assert_type(masksafe.segment_sum(X, LABELS, 3, axis_name=names), jax.Array)
    assert_type(losses.softmax_cross_entropy_with_integer_labels(X, LABELS, axis_name=("data", "model")), jax.Array)
    assert_type(losses.linear_softmax_cross_entropy(X, KERNEL, LABELS, axis_name="model"), jax.Array)
    assert_type(losses.linear_log_probs(X, KERNEL, LABELS, axis_name=names, with_entropy=True), Pair)
    losses.linear_log_probs(X, KERNEL, LABELS, axis_name=0)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    masksafe.mean(X, axis_name=0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def flags(flag: bool) -> None:
    """Results that depend on a flag, which is known or only a bool."""
    attend = masksafe.dot_product_attention
    assert_type(attend(HEADS, HEADS, HEADS), jax.Array)
    assert_type(attend(HEADS, HEADS, HEADS, return_residual=True), Pair)
    assert_type(attend(HEADS, HEADS, HEADS, return_residual=flag), jax.Array | Pair)
    assert_type(attend(HEADS, HEADS, HEADS, return_max_logit=True), tuple[jax.Array, ...])
    assert_type(masksafe.logsumexp(X), jax.Array)
    assert_type(masksafe.logsumexp(X, return_sign=True), Pair)
    assert_type(masksafe.logsumexp(X, return_sign=flag), jax.Array | Pair)
    assert_type(losses.log_probs(X, LABELS), jax.Array)
    assert_type(losses.log_probs(X, LABELS, with_entropy=True), Pair)
    assert_type(losses.log_probs(X, LABELS, with_entropy=flag), jax.Array | Pair)
    assert_type(losses.log_probs(X, LABELS, with_entropy=False), jax.Array)
    assert_type(losses.log_probs(X, LABELS, with_entropy=True, kept_ids=LABELS), Pair)
    assert_type(losses.linear_log_probs(X, KERNEL, LABELS, kept_ids=LABELS), jax.Array)
    assert_type(losses.linear_log_probs(X, KERNEL, LABELS, with_entropy=True), Pair)
    assert_type(losses.linear_log_probs(X, KERNEL, LABELS, with_entropy=flag), jax.Array | Pair)
    assert_type(losses.linear_softmax_cross_entropy(X, KERNEL, LABELS, with_components=True), Pair)
    assert_type(losses.linear_softmax_cross_entropy(X, KERNEL, LABELS, with_components=flag), jax.Array | Pair)
    assert_type(losses.linear_softmax_cross_entropy(X, KERNEL, LABELS, with_predictions=True), tuple[jax.Array, ...])
    assert_type(losses.linear_log_probs(X, KERNEL, LABELS, with_predictions=True), tuple[jax.Array, ...])


def mean_loss(params: dict[str, jax.Array], x: jax.Array, *, factor: int = 1) -> MaskedMean:
    return MaskedMean.of(params["kernel"] * x * factor, where=KEEP[:, None])


def mean_loss_and_name(params: jax.Array, x: jax.Array) -> tuple[MaskedMean, str]:
    return MaskedMean.of(params * x), "name"


def several_means(params: jax.Array, x: jax.Array) -> dict[str, MaskedMean]:
    return {"loss": MaskedMean.of(params * x), "z": MaskedMean.of(params)}


def several_means_and_name(params: jax.Array, x: jax.Array) -> tuple[dict[str, MaskedMean], str]:
    return several_means(params, x), "name"


def plain_loss(params: jax.Array) -> jax.Array:
    return params.sum()


def means(flag: bool) -> None:
    """A mean of parts, and its gradient, which has the parameters of its function."""
    parts = [MaskedMean.of(X), MaskedMean.of(X, where=KEEP[:, None])]
    assert_type(MaskedMean.sum(parts), MaskedMean)
    assert_type(sum(parts[1:], parts[0]), MaskedMean)
    assert_type(parts[0] + parts[1], MaskedMean)
    assert_type(parts[0].psum("data").value, jax.Array)
    MaskedMean.sum([X])  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]

    step = masksafe.value_and_grad_of_mean(mean_loss, microbatches=2, axis_name="data")
    value, gradients = step({"kernel": X}, X, factor=2)
    assert_type(value, jax.Array)
    jax.tree.map(jnp.sum, gradients)
    step({"kernel": X}, X, factor="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    step(X, X)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with_name = masksafe.value_and_grad_of_mean(mean_loss_and_name, has_aux=True)
    assert_type(with_name(X, X)[0], tuple[jax.Array, str])
    assert_type(masksafe.value_and_grad_of_mean(mean_loss_and_name, 0, flag)(X, X), tuple[Any, Any])
    of_sum = masksafe.value_and_grad_of_mean(several_means, factors={"z": 0.1, "loss": X[0, 0]}, microbatches=2)
    assert_type(of_sum(X, X)[0], tuple[jax.Array, dict[str, MaskedMean]])
    of_sum(X, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with_both = masksafe.value_and_grad_of_mean(several_means_and_name, has_aux=True, factors={"z": X[0, 0]})
    assert_type(with_both(X, X)[0], tuple[jax.Array, dict[str, MaskedMean], str])
    assert_type(masksafe.value_and_grad_of_mean(several_means_and_name, 0, flag)(X, X), tuple[Any, Any])
    0.1 * parts[0]  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]
    masksafe.value_and_grad_of_mean(mean_loss, chunks=2)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def layers(rngs: Any) -> None:
    """Layers of flax and equinox: constructors are the libraries' own, calls are typed."""
    assert_type(adapters.nnx.LayerNorm(4, rngs=rngs)(X, mask=KEEP[:, None]), jax.Array)
    assert_type(adapters.nnx.BatchNorm(4, rngs=rngs)(X, use_running_average=False, mask=KEEP[:, None]), jax.Array)
    assert_type(adapters.linen.GroupNorm(num_groups=2)(X), jax.Array)
    attended: jax.Array = adapters.nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)(HEADS[0], is_causal=True)
    assert_type(adapters.linen.MultiHeadAttention(num_heads=2)(attended), jax.Array)
    out: jax.Array = adapters.equinox.MultiheadAttention(2, 4, key=rngs)(X, X, X, KEEP[:, None] & KEEP)
    assert_type(adapters.equinox.RMSNorm(4)(out[0], where=KEEP[0]), Any)
    assert_type(adapters.nnx.Accuracy().compute(), jax.Array)
    assert_type(adapters.nnx.convert(rngs), adapters.Conversion)
    assert_type(adapters.equinox.convert([X]), tuple[list[jax.Array], adapters.Conversion])
    adapters.nnx.LayerNorm(4, rngs=rngs)(X, mask="X")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def masks_and_adapters() -> None:
    """Masks that are joined, functions of one's own, and the attention of flax's layers."""
    mask = attention_masks.causal & ~attention_masks.window(2) | attention_masks.chunked(4)
    assert_type(mask, attention_masks.AttentionMask)
    masksafe.dot_product_attention(HEADS, HEADS, HEADS, mask_mod=mask, local_window_size=(2, 0))
    masksafe.dot_product_attention(HEADS, HEADS, HEADS, mask_mod=KEEP)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    attention_fn = functools.partial(adapters.flax_attention, mask_mod=mask)
    assert_type(attention_fn(HEADS, HEADS, HEADS, is_causal=True), jax.Array)
    adapters.flax_attention(HEADS, HEADS, HEADS, dropout_rate="0.1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@masksafe.forward_mode()
def decorated(x: jax.Array, power: int) -> jax.Array:
    return x**power


def tools(fn: Any) -> None:
    """A decorator that keeps the types of its function, and `masksafe.testing`."""
    assert_type(decorated(X, 2), jax.Array)
    decorated(X, "2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    masksafe.testing.assert_mask_safe(fn, X, KEEP, masked={0: ~KEEP}, transforms=["jit", "vmap"])
    masksafe.testing.assert_mask_safe(fn, X, masked={0: KEEP}, transforms=["pmap"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    masksafe.testing.assert_packing_safe(fn, {"w": X}, [[1, 2], LABELS], max_length=8, packs=False)
    masksafe.testing.assert_packing_safe(fn, X, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    masksafe.testing.assert_gradients(fn, X, modes=("fwd",))
    masksafe.testing.assert_gradients(fn, X, modes=("forward",))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    masksafe.testing.assert_consistent(fn, X, modes=masksafe.testing.CONSISTENCY_MODES[:2])
    report = masksafe.testing.nonfinite_report(fn, X)
    assert_type(report, masksafe.testing.NonfiniteReport)
    assert_type(report.sources[0].inside_of, str)
