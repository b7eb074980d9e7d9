"""dot_product_attention where JAX refuses to promote ranks and dtypes, and where it searches results for NaN."""

import contextlib
import functools

import attention_cases as cases
import cudnn_stand_in
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import attention, normals, random_inputs, replaced
from tiers import parametrize

import masksafe
from masksafe import attention_masks

T, S, H = 6, 8, 8
# Every mask and every other argument, by what it is made for.
CASES = {name: arguments for name, (arguments, _) in (cases.cases_of(S) | cases.positions_and_mods(S)).items()}
CASES |= {
    "nothing": {},
    "window before its query": dict(local_window_size=(2, 0)),
    "causal window": dict(is_causal=True, local_window_size=2),
    "bias of nothing": dict(bias=np.float32(1)),
    "bias of keys": dict(bias=normals(S)),
    "bias of queries": dict(bias=normals(2, 2, T, 1)),
    "mask of keys": dict(mask=np.arange(S) != 3),
    "mask of attention_masks": dict(mask_mod=attention_masks.causal & attention_masks.prefix(np.array([2, 3]))),
    "lengths of one": dict(key_value_seq_lengths=5, query_seq_lengths=np.int8([3])),
    "offset, window": dict(causal_offset=np.int64([1, 2]), local_window_size=(2, 1)),
    "scale": dict(scale=np.float32(0.5), is_causal=True),
    "number as scale": dict(scale=0.5),
    "soft cap": dict(logit_soft_cap=2.0, is_causal=True),
    "sinks": dict(sinks=np.float32([0.5, -1]), is_causal=True),
    "dropout": dict(dropout_rate=0.3, dropout_key=np.uint32([0, 1]), is_causal=True),
    "score_mod": dict(score_mod=lambda x, b, h, q, k: x * jnp.float32(2) + (q - k).astype(x.dtype), is_causal=True),
    "logsumexp": dict(return_residual=True, is_causal=True),
}


def of_user_with_a_mask(query, key, value, *, scale, mask=None, bias=None):
    """A kernel that promotes nothing, for two query heads and one or two key heads."""
    x = scale * jnp.einsum("btnh,bsnh->bnts", query, jnp.broadcast_to(key, (*key.shape[:2], *query.shape[2:])))
    x = x if bias is None else x + bias
    x = x if mask is None else jnp.where(mask, x, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(x), jnp.broadcast_to(value, (*key.shape[:2], *query.shape[2:])))


def of_user(query, key, value, *, scale, mask=None, bias=None, **_):
    """One that takes all keywords."""
    return of_user_with_a_mask(query, key, value, scale=scale, mask=mask, bias=bias)


NOT_OF_A_USER = "scale", "soft cap", "sinks", "dropout", "score_mod", "logsumexp"
OF_A_USER = {name: arguments for name, arguments in CASES.items() if name not in NOT_OF_A_USER}
SIZES = dict(fewest_rows_of_kernels=1, fewest_rows_of_one_kernel=1)
IDS = np.arange(128, dtype=np.int32)[None] // 50
OF_SPLASH = {
    "nothing": {},
    "reach": dict(is_causal=True, local_window_size=20, causal_offset=3),
    "lengths": dict(query_seq_lengths=np.array([100, 128]), key_value_seq_lengths=np.array([50, 0])),
    "segments": dict(query_segment_ids=IDS, key_value_segment_ids=IDS),
}
# All that a form takes in few calls, where another form has each case for itself.
FEW = {
    "nothing": {},
    "masks": CASES["causal, segments, lengths"] | CASES["pairs"] | CASES["bias of queries"],
    "offset, window": CASES["offset, window"],
    "functions": CASES["positions, window"] | CASES["mod of samples and heads"] | CASES["score_mod"],
    "options": CASES["scale"] | CASES["soft cap"] | CASES["sinks"] | CASES["dropout"] | CASES["logsumexp"],
}
FEW_OF_A_USER = {name: FEW[name] for name in ("nothing", "masks", "offset, window")}
WITH_SECOND = "causal, segments, lengths", "bias of keys", "score_mod", "sinks", "scale"
# What computes it: how it is asked for, what it is asked, and the choices that lead there.
EXECUTORS = {
    "kernel of a user": (of_user, OF_A_USER, lambda choose: None),
    "kernel of a user, with a mask": (of_user_with_a_mask, FEW_OF_A_USER, lambda choose: None),
    "weights kept": (None, FEW, lambda choose: choose(form="cpu")),
    "kernels of a CPU": (None, FEW, lambda choose: choose(form="cpu", has_fusion_library=True, attention=SIZES)),
    "blocks": ("xla", CASES, cases.shrink_blocks),
    "blocks of keys": ("xla", FEW, cases.decode_always),
    "rows": ("xla", FEW, cases.by_rows),
    "cudnn": (None, FEW, lambda choose: None),  # the stand-in chooses
    "splash": ("splash", OF_SPLASH, lambda choose: choose(form="tpu")),
}


@parametrize("executor", ["kernel of a user"], exhaustive=EXECUTORS)
def test_no_rank_and_no_dtype_is_promoted(executor, choose):
    """Beside integers of 64 bits. Of some second derivatives too: those of blocks, whatever computes the first."""
    implementation, arguments, adjust = EXECUTORS[executor]
    dtype = jnp.bfloat16 if executor == "cudnn" else np.float32
    inputs = random_inputs(T=T, S=S, H=H, dtype=dtype) if arguments is not OF_SPLASH else random_inputs(T=128, S=128)
    strict = jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.enable_x64(True)
    with cudnn_stand_in.installed() if executor == "cudnn" else contextlib.nullcontext(), contextlib.ExitStack() as on:
        adjust(choose)
        for flag in strict:
            on.enter_context(flag)
        for name, given in arguments.items():
            has_second = executor == "blocks" and name in WITH_SECOND
            given = given | {n: x.astype(dtype) for n, x in given.items() if n == "bias"}
            out, gradients = jax.eval_shape(derivatives(given, implementation, has_second), *inputs)[:2]
            assert {x.dtype for x in (jax.tree.leaves(out)[0], *gradients)} == {jnp.dtype(dtype)}


def derivatives(given, implementation, has_second):
    """Value and gradients as a function of queries, keys, values; and maybe second derivatives and forward mode."""
    attend = functools.partial(attention, implementation=implementation, **given)
    loss = lambda *inputs: sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(attend(*inputs)))  # noqa: E731
    slopes = jax.grad(loss, (0, 1, 2))

    def results(*inputs):
        first = attend(*inputs), slopes(*inputs)
        if not has_second:
            return first
        with masksafe.forward_mode():
            forward = jax.jvp(attend, inputs, inputs)
        return *first, forward, jax.jvp(slopes, inputs, inputs), jax.vjp(slopes, *inputs)[1](inputs)

    return results


SEES = np.arange(S) < 5
LENGTHS, OF_PAIRS = dict(key_value_seq_lengths=np.int32(5)), dict(mask=SEES)
OF_BIAS = OF_PAIRS | dict(bias=np.where(SEES, np.float32(0.5), np.nan))
# The batch, the number of queries, and the arguments. From 128 queries on a TPU would have a kernel of its own.
EAGER = {
    "many queries": ((2,), 128, LENGTHS | OF_BIAS),
    "few queries": ((2,), T, LENGTHS),
    "no batch": ((), T, OF_PAIRS),
    "two axes of batch": ((2, 1), T, OF_BIAS),
    "kernel of a user": ((2,), T, OF_BIAS | dict(implementation=of_user_with_a_mask)),
}


@parametrize("name", ["many queries"], exhaustive=EAGER)
def test_nan_under_the_mask_fails_no_check_in_eager_code(name, choose):
    """Nor where it is kept for the reverse pass; and an unmasked one is found."""
    choose(attention=dict(most_weights_kept=0))
    batch, number, given = EAGER[name]
    query = normals(*batch, number, 2, H)
    key = value = np.where(SEES[:, None, None], normals(*batch, S, 2, H), np.float32(np.nan))
    names = [n for n in ("bias",) if n in given]

    def loss(*floats):
        return jnp.sum(attention(*floats[:3], **given | dict(zip(names, floats[3:], strict=True))))

    floats = query, key, value, *(given[n] for n in names)
    with jax.debug_nans(True):
        gradients = jax.grad(loss, range(len(floats)))(*floats)
        with pytest.raises(FloatingPointError):
            loss(replaced(query, (..., 0, 0), np.nan), *floats[1:])
    assert all(np.isfinite(x).all() for x in gradients)
    for gradient in gradients[1:]:
        hidden = ~SEES if gradient.ndim < 3 else ~SEES[:, None, None]
        assert (np.where(hidden, gradient, 0) == 0).all()
