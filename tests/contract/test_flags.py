"""Every op under flags of JAX: 64 bits beside float32, a search for NaN. `run` refuses to promote ranks and dtypes."""

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program import (
    PLANS,
    assert_close,
    direction,
    distinct_programs,
    each_kind,
    each_op,
    filled,
    program_of,
    reverse_over_reverse_of,
    run,
    value_and_gradients,
)
from table import OPS

import masksafe
from masksafe._core import platforms

# The dtype of these is at least JAX's default float, as in optax.
OF_DEFAULT_FLOAT = "multiclass_hinge", "multiclass_perceptron", "multiclass_sparsemax", "ctc_loss"


@contextlib.contextmanager
def strict_flags():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def beside_64_bits(key, args, dtype="bfloat16", **options):
    """What a program takes, for floats of a dtype and integers of 64 bits."""
    op, dtypes = OPS[key], {"f": jnp.dtype(dtype), "i": "int64"}
    args = tuple(a.astype(dtypes.get(a.dtype.kind, a.dtype)) for a in args)
    outputs = jax.eval_shape(lambda *args: jax.tree.leaves(op.call(op.where, *args, **options)), *args)
    return op.where, args, tuple(np.sin(np.arange(o.size) + 1).reshape(o.shape).astype(o.dtype) for o in outputs)


@each_op(lambda op: op.by_default)  # test_shard_map.py has all
def test_no_dtype_grows_beside_64_bits(key):
    with strict_flags(), platforms.chosen(**PLANS["blocks"]):
        given = beside_64_bits(key, OPS[key].args)
        assert_no_dtype_grew(key, *jax.eval_shape(functools.partial(value_and_gradients, key), *given))


def assert_no_dtype_grew(key, outputs, gradients):
    """Of a call with bfloat16."""
    assert {g.dtype for g in gradients} == ({jnp.dtype("bfloat16")} if OPS[key].floats else set())
    dtypes = {out.dtype for out in outputs}
    assert key.startswith(OF_DEFAULT_FLOAT) or dtypes <= {jnp.dtype("bfloat16"), jnp.dtype("float32")}


@pytest.mark.exhaustive
@each_kind()
def test_every_derivative_is_traced_beside_64_bits(key):
    def every_derivative(where, args, cotangents):
        given = where, args, cotangents, tuple(direction(i, args[i]) for i in OPS[key].floats)
        return program_of(key)(*given), reverse_over_reverse_of(key)(*given)

    with strict_flags(), platforms.chosen(**PLANS[[*distinct_programs(key)][-1]]):
        jax.eval_shape(every_derivative, *beside_64_bits(key, OPS[key].args, "float32"))


# Every option that is a number, unlike its default, and what else it needs.
WITH_EPSILON = "poly_loss_cross_entropy", "cosine_similarity", "cosine_distance", "layer_norm", "rms_norm"
WITH_EPSILON += "standardize", "l2_normalize", "batch_norm", "group_norm", "segment_standardize"
LINEAR_DIVERGENCES = "linear_kl_divergence", "linear_kl_divergence_with_top_k_targets"
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 0.01}
NUMBERS = {
    **{name: {"epsilon": 0.1} for name in WITH_EPSILON},
    **{name: {"smooth": 0.5} for name in ("binary_dice_loss", "multiclass_generalized_dice_loss")},
    **{name: {"log_epsilon": -1e4} for name in ("ctc_loss", "ctc_loss_with_forward_probs")},
    **{name: {"direction": "jensen_shannon", "temperature": 1.5, "beta": 0.3} for name in LINEAR_DIVERGENCES},
    **{name: {"correction": 0.5} for name in ("var", "var_mean")},
    "smooth_labels": {"alpha": 0.2},
    "huber_loss": {"delta": 0.5},
    "sigmoid_focal_loss": {"alpha": 0.3, "gamma": 1.5},
    "softmax_cross_entropy_with_integer_labels": SMOOTHED,
    "log_probs": {"temperature": 0.7},
    "triplet_margin_loss": {"norm_degree": 4, "margin": 0.5, "eps": 1e-4},
    "ntxent": {"temperature": 0.3},
    "info_nce_loss": {"scale": 3.0},
    "sigmoid_contrastive_loss": {"scale": 3.0, "bias": -1.0},
    "dice_loss": {"smooth": 0.5, "alpha": 0.3, "beta": 0.6},
    "linear_softmax_cross_entropy": {"logit_soft_cap": 3.0, **SMOOTHED},
    "linear_log_probs": {"temperature": 0.7, "logit_soft_cap": 3.0},
    "dot_product_attention": {
        **{"scale": 0.5, "logit_soft_cap": 2.0, "causal_offset": 1, "is_causal": True},
        **{"dropout_rate": 0.3, "dropout_key": np.uint32([0, 1])},
    },
}


def test_every_number_is_an_option_above():
    for name in {op.name for op in OPS.values()} - {"convex_kl_divergence"}:
        fn = getattr(masksafe, name, None) or getattr(masksafe.losses, name)
        parameters = inspect.signature(fn).parameters.values() if inspect.isfunction(fn) else ()
        numbers = {p.name for p in parameters if "float" in p.annotation or type(p.default) is float}
        assert numbers <= set(NUMBERS.get(name, ())), name


# What is laid out anew for a reverse pass shows NaN that a mask hides: channels in groups, parts of attention.
ALARM = {key for key, op in OPS.items() if op.name in ("group_norm", "merge_attention")}


@each_op()
def test_eager_code(key):
    """As a compiled program. JAX searches the outputs of each of its own: what is kept for a reverse pass, too."""
    op, numbers = OPS[key], NUMBERS.get(key, {})
    of, dtype = functools.partial(value_and_gradients, key, **numbers), "bfloat16" if numbers else "float32"
    expected = run(key)[:2]  # with the program that other tests compile
    with strict_flags(), jax.debug_nans(key not in ALARM):
        given = beside_64_bits(key, filled(key, op.where, np.nan, only=0), dtype, **numbers)
        actual, expected = of(*given), jax.jit(of)(*given) if numbers else expected
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype or key.startswith(OF_DEFAULT_FLOAT)
    assert_close(*jax.tree.map(np.float64, (actual, expected)))
