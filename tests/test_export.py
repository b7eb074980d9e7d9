"""Every op is exported with symbolic sizes, serialised, read and called."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe import losses

RNG = np.random.default_rng(0)
B, T, C, D = 3, 4, 5, 2  # batch, time, classes, dimension
X, Y = RNG.normal(size=(2, B, T, C)).astype(np.float32)
P, Q = RNG.dirichlet(np.ones(C), (2, B, T)).astype(np.float32)
BITS = (RNG.random((B, T, C)) < 0.5).astype(np.float32)
LABELS = RNG.integers(0, C, (B, T))
ELEMENTS = RNG.random((B, T, C)) < 0.7
ELEMENTS[np.arange(B)[:, None], np.arange(T), LABELS] = True
ROWS = RNG.random((B, T)) < 0.7
FEATURES, TARGET_FEATURES = RNG.normal(size=(2, B, T, D)).astype(np.float32)
KERNEL, TARGET_KERNEL = RNG.normal(size=(2, D, C)).astype(np.float32)
WEIGHTS = RNG.random((B, T, C)).astype(np.float32)
NAMES = {B: "b", T: "t", C: "c", D: "d"}
QUERY, KEY, VALUE = RNG.normal(size=(3, B, T, 1, 8)).astype(np.float32)

OF_ELEMENTS = {  # with a mask of elements
    **{name: (getattr(losses, name), X, Y) for name in ("squared_error", "l2_loss", "huber_loss", "log_cosh")},
    **{name: (getattr(losses, name), X, 2 * BITS - 1) for name in ("hinge_loss", "perceptron_loss")},
    **{
        name: (getattr(losses, name), X, BITS)
        for name in ("sigmoid_binary_cross_entropy", "sigmoid_focal_loss", "sparsemax_loss", "binary_dice_loss")
    },
    **{
        name: (getattr(losses, name), X, P)
        for name in (
            "softmax_cross_entropy",
            "poly_loss_cross_entropy",
            "ranking_softmax_loss",
        )
    },
    **{
        name: (getattr(losses, name), np.log(P), Q)
        for name in ("kl_divergence", "generalized_kl_divergence", "convex_kl_divergence")
    },
    "kl_divergence_with_log_targets": (losses.kl_divergence_with_log_targets, np.log(P), np.log(Q)),
    "cosine_similarity": (losses.cosine_similarity, X, Y),
    "cosine_distance": (losses.cosine_distance, X, Y),
    "triplet_margin_loss": (losses.triplet_margin_loss, X, Y, P),
    "smooth_labels": (functools.partial(losses.smooth_labels, alpha=0.1), P),
    "softmax_cross_entropy_with_integer_labels": (losses.softmax_cross_entropy_with_integer_labels, X, LABELS),
    "log_probs": (functools.partial(losses.log_probs, with_entropy=True), X, LABELS),
    "fenchel_young_loss": (losses.make_fenchel_young_loss(masksafe.logsumexp), X, P),
    **{name: (getattr(masksafe, name), X) for name in ("softmax", "log_softmax", "layer_norm", "rms_norm")},
    **{name: (getattr(masksafe, name), X) for name in ("standardize", "l2_normalize", "batch_norm")},
    **{name: (getattr(masksafe, name), X) for name in ("logsumexp", "sum", "mean", "var", "var_mean", "max", "min")},
    "group_norm": (functools.partial(masksafe.group_norm, num_groups=1), X),
    "mean with weights": (lambda x, w, where: masksafe.mean(x, -1, where, weights=w), X, WEIGHTS),
    "layer_norm with weights": (lambda x, w, where: masksafe.layer_norm(x, where=where, weights=w), X, WEIGHTS),
    "MaskedMean": (lambda x, where: masksafe.MaskedMean.of(x, where).value, X),
    "apply_where": (lambda x, where: masksafe.apply_where(where, x, jnp.log1p, fill_value=0.0), BITS),
    "mask_where": (lambda x, y, where: masksafe.mask_where(where, x, y), X, Y),
    "dice_loss": (losses.dice_loss, P, BITS),
    "multiclass_generalized_dice_loss": (losses.multiclass_generalized_dice_loss, P, BITS),
}
OF_ROWS = {  # with a mask of rows
    "softmax_cross_entropy": (losses.softmax_cross_entropy, X, P),
    "softmax_cross_entropy_with_integer_labels": (losses.softmax_cross_entropy_with_integer_labels, X, LABELS),
    "poly_loss_cross_entropy": (losses.poly_loss_cross_entropy, X, P),
    "log_probs": (losses.log_probs, X, LABELS),
    **{
        name: (getattr(losses, name), X, LABELS)
        for name in ("multiclass_hinge_loss", "multiclass_perceptron_loss", "multiclass_sparsemax_loss")
    },
    **{
        name: (getattr(losses, name), FEATURES, KERNEL, LABELS)
        for name in ("linear_softmax_cross_entropy", "linear_log_probs")
    },
    "linear_kl_divergence": (losses.linear_kl_divergence, FEATURES, KERNEL, TARGET_FEATURES, TARGET_KERNEL),
    "linear_kl_divergence_with_top_k_targets": (
        losses.linear_kl_divergence_with_top_k_targets,
        FEATURES,
        KERNEL,
        np.log(P[..., :1]),
        LABELS[..., None],
    ),
}
OTHERS = {  # without an argument `where`
    **{
        f"{name}, {masked}": (
            functools.partial(
                lambda name, x, labels, where=None: getattr(losses, name)(
                    x, jnp.zeros(x.shape[:2]), labels[:, :1], jnp.zeros((x.shape[0], 1)), where=where
                ),
                name,
            ),
            X,
            LABELS,
            *where,
        )
        for name in ("ctc_loss", "ctc_loss_with_forward_probs")
        for masked, where in (("unmasked", ()), ("masked", (ELEMENTS,)))
    },
    "safe_softmax_cross_entropy": (losses.safe_softmax_cross_entropy, X, P),
    "ntxent": (losses.ntxent, X[:, 0], LABELS[:, 0]),
    "dot_product_attention": (masksafe.dot_product_attention, QUERY, KEY, VALUE),
    "merge_attention": (
        lambda q, k, v: masksafe.merge_attention(
            *(jnp.stack([x, x]) for x in masksafe.dot_product_attention(q, k, v, return_residual=True))
        ),
        QUERY,
        KEY,
        VALUE,
    ),
}
CASES = {
    **{
        f"{name}, {masked}": (*case, where)
        for name, case in OF_ELEMENTS.items()
        for masked, where in (("elements", ELEMENTS), ("unmasked", None))
        if where is not None or name not in ("apply_where", "mask_where")
    },
    **{f"{name}, rows": (*case, ROWS) for name, case in OF_ROWS.items()},
    **{name: (*case, None) for name, case in OTHERS.items()},
}


def with_gradient(fn):
    """The result, and the gradient by the first argument."""

    def total(x, *others):
        result = fn(x, *others)
        leaves = (jnp.where(jnp.isfinite(leaf), leaf, 0) for leaf in jax.tree.leaves(result))
        return sum(jnp.sum(leaf * leaf) for leaf in leaves), result

    return jax.value_and_grad(total, has_aux=True)


@pytest.mark.parametrize(
    "transform", [lambda fn: fn, pytest.param(with_gradient, marks=pytest.mark.slow)], ids=["value", "gradient"]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "unmasked" in name else name for name in CASES]
)
def test_export_with_symbolic_sizes(name, transform):
    fn, *arrays, where = CASES[name]
    if where is not None:
        arrays, fn = [*arrays, where], functools.partial(lambda fn, *args: fn(*args[:-1], where=args[-1]), fn)
    elif name not in OTHERS:
        fn = functools.partial(fn, where=None)
    scope, compiled = jax.export.SymbolicScope(), jax.jit(transform(fn))
    arrays = [jnp.asarray(a) for a in arrays]
    sizes = [",".join(NAMES.get(n, str(n)) for n in a.shape) for a in arrays]
    shapes = [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(size, scope=scope), a.dtype)
        for size, a in zip(sizes, arrays, strict=True)
    ]
    read = jax.export.deserialize(jax.export.export(compiled)(*shapes).serialize())
    chex.assert_trees_all_close(read.call(*arrays), compiled(*arrays), rtol=1e-5, atol=1e-5)
