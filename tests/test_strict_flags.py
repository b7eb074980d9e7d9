"""Several axes, masks that broadcast and time over devices, where JAX refuses to promote ranks and dtypes by itself.

The programs of the contract, whose masks are whole and whose axis is one, run under the same flags.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiers import parametrize

import masksafe
from masksafe import losses

X, PARAMETER = np.ones((3, 4, 5), np.float32), np.ones((4, 5), np.float32)
OPS = {
    "log_softmax": lambda x, where: masksafe.log_softmax(x, (0, 2), where),
    "layer_norm": lambda x, where: masksafe.layer_norm(x, PARAMETER, axis=(1, 2), where=where),
    "var_mean": lambda x, where: masksafe.var_mean(x, (0, 1), where, correction=1),
    "mean": lambda x, where: masksafe.mean(x, where=where),
}


@parametrize("dtype", ["float32"], exhaustive=["bfloat16"])
@parametrize("name", ["log_softmax"], exhaustive=OPS)
def test_value_and_derivatives_are_traced(name, dtype):
    op = OPS[name]
    total = lambda x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(op(x, np.ones(5, bool))))  # noqa: E731
    along = lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]  # noqa: E731
    x = X.astype(jnp.dtype(dtype))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(along(jax.grad(total)), x).dtype == dtype
        jax.eval_shape(jax.grad(lambda x: jnp.sum(jax.grad(total)(x))), x)
        with masksafe.forward_mode():
            jax.eval_shape(along(total), x)


# Losses whose labels, targets or options may be integers or booleans, as in optax.
BITS, fenchel_young_loss = np.float32([[0, 1, 0], [1, 0, 0]]), losses.make_fenchel_young_loss(masksafe.logsumexp)
OF_INTEGERS = [losses.softmax_cross_entropy, losses.safe_softmax_cross_entropy, losses.sigmoid_binary_cross_entropy]
OF_INTEGERS += [losses.sigmoid_focal_loss, losses.squared_error, losses.l2_loss, losses.huber_loss, losses.log_cosh]
OF_INTEGERS += [losses.hinge_loss, losses.perceptron_loss, losses.sparsemax_loss, losses.ranking_softmax_loss]
OF_INTEGERS += [fenchel_young_loss, losses.dice_loss, losses.binary_dice_loss, losses.multiclass_generalized_dice_loss]
OF_INTEGERS += [
    lambda x, n: losses.ranking_softmax_loss(x, BITS, weights=n),
    lambda x, n: losses.poly_loss_cross_entropy(x, BITS, epsilon=n[:, 0]),
    lambda x, n: losses.dice_loss(x, BITS, class_weights=n[0]),
    lambda x, n: losses.cosine_similarity(x, x, epsilon=n[0, 0]),
    lambda x, n: losses.triplet_margin_loss(x, x, x, margin=n[0, 0], eps=n[0, 0]),
    lambda x, n: masksafe.mean(x, weights=n),
]


@parametrize("x64", [True], exhaustive=[False])
@parametrize("dtype", ["bool"], exhaustive=["int32"])
def test_integers_and_booleans_beside_floats_are_promoted(dtype, x64):
    x = np.ones((2, 3), np.float32)
    with jax.enable_x64(x64):
        for fn in OF_INTEGERS:
            expected = jax.eval_shape(fn, x, BITS.astype(dtype))
            with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
                loss, pull_back = jax.eval_shape(lambda x: jax.vjp(lambda x: fn(x, BITS.astype(dtype)), x), x)  # noqa: B023
                (gradient,) = jax.eval_shape(pull_back, loss)
            assert (loss, gradient.dtype) == (expected, x.dtype)


def test_floats_of_two_dtypes_are_refused_as_by_jax():
    x = np.ones((2, 3), np.float32)
    with jax.numpy_dtype_promotion("strict"), pytest.raises(ValueError, match="promotion"):
        losses.softmax_cross_entropy(x, jnp.bfloat16(x))


# Ops that count elements of all devices, with int32 numbers of devices beside labels and ids of 64 bits.
ROWS, LABELS, KERNEL = np.ones((4, 3), np.float32), np.zeros(4, np.int64), np.ones((3, 4), np.float32)
TOKENS, QUERY = np.zeros((1, 4), np.int64), np.ones((1, 4, 2, 3), np.float32)
SPLIT, ALONG = P("i"), P(None, "i")
ON_DEVICES = {
    "next_tokens": (lambda ids: masksafe.next_tokens(ids, ids, axis_name="i")[0], [(TOKENS, ALONG)]),
    "info_nce_loss": (lambda x: losses.info_nce_loss(x, x, axis_name="i"), [(ROWS, SPLIT)]),
    "sigmoid_contrastive_loss": (lambda x: losses.sigmoid_contrastive_loss(x, x, axis_name="i"), [(ROWS, SPLIT)]),
    "linear_log_probs": (
        lambda kernel, x, labels: losses.linear_log_probs(x, kernel, labels, axis_name="i"),
        [(KERNEL, ALONG), (ROWS, P()), (LABELS, P())],
    ),
    "dot_product_attention": (
        lambda q, ids: masksafe.dot_product_attention(
            q, q, q, is_causal=True, axis_name="i", query_segment_ids=ids, key_value_segment_ids=ids
        ),
        [(QUERY, ALONG), (TOKENS, ALONG)],
    ),
}


@parametrize("name", ["next_tokens"], exhaustive=ON_DEVICES)
def test_elements_of_all_devices_are_counted_beside_64_bits(name):
    fn, arguments = ON_DEVICES[name]
    arrays, specs = zip(*arguments, strict=True)

    def on_device(*args):
        if args[0].dtype == np.int64:
            return fn(*args)
        return jax.grad(lambda x, *rest: jnp.sum(fn(x, *rest)))(*args)

    mesh = jax.make_mesh((2,), ("i",))
    step = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=specs[0])
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        put = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, s)) for x, s in arguments]
        assert jax.eval_shape(step, *put).dtype == arrays[0].dtype
