"""Where cuDNN's kernel is taken; its results are in test_attention_kernels.py and test_attention_on_gpu.py.

A stand-in is called: no test but those on a GPU runs cuDNN itself.
"""

import functools

import cudnn_stand_in
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import attention, causal, exact, loss, normals, random_inputs, with_gradients, with_low_logsumexps
from comparisons import assert_close, assert_same_bits
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiers import parametrize

from masksafe.attention import _cudnn

T, S = 6, 8
SIZES = dict(B=2, T=T, S=S, N=4, K=2, H=8)
KEYS = np.array([[1, 1, 0, 1, 0, 0, 0, 1], [0] * S], bool)[:, None, None]


def test_an_installation_without_cudnn_does_not_notice():
    x = jnp.ones((2, 6, 2, 8), jnp.bfloat16)
    by_xla, by_default = (jax.make_jaxpr(lambda x: attention(x, x, x, implementation=i))(x) for i in ("xla", None))  # noqa: B023
    if _cudnn._refusal_of_jax(8, x.dtype) is not None:
        assert str(by_default) == str(by_xla)
        with pytest.raises(ValueError, match=r"implementation: got value 'cudnn'.*JAX reports: cuDNN"):
            attention(x, x, x, implementation="cudnn")


@pytest.fixture
def stand_in():
    with cudnn_stand_in.installed():
        yield


pytestmark = pytest.mark.usefixtures("stand_in")


def inputs_of(dtype=jnp.bfloat16, **sizes):
    return random_inputs(**(SIZES | sizes), dtype=dtype)


def test_float16_without_an_array_that_masks(stand_in):
    inputs, d_out = inputs_of(jnp.float16), normals(2, T, 4, 8, seed=6).astype(jnp.float16)
    (out, _), of_all = exact(*inputs, causal(T, S), d_out=d_out)
    actual = with_gradients(functools.partial(attention, is_causal=True, implementation="cudnn"))(inputs, d_out)
    assert actual[0].dtype == jnp.float16
    assert_close(actual, (out, [of_all[n] for n in ("query", "key", "value")]), 4e-3)


MANY = 192  # keys, 64 more than a multiple of 128
MANY_PAIRS = np.random.default_rng(3).random((2, 4, T, MANY)) < 0.7
MANY_IDS = np.arange(MANY) % 3
FAULTY = {
    "mask": (dict(mask=MANY_PAIRS), MANY_PAIRS),
    "causal, mask, lengths": (
        dict(mask=MANY_PAIRS, is_causal=True, key_value_seq_lengths=np.array([MANY, 5])),
        MANY_PAIRS & causal(T, MANY) & (np.arange(MANY) < np.array([MANY, 5])[:, None, None, None]),
    ),
    "segments": (
        dict(query_segment_ids=np.arange(T)[None] % 2, key_value_segment_ids=MANY_IDS[None]),
        (np.arange(T)[:, None] % 2 == MANY_IDS)[None, None],
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_gradients_where_the_kernel_alone_has_nan(name):
    """An array that masks, 64 more keys than a multiple of 128, and a low logsumexp."""
    arguments, live = FAULTY[name]
    live = np.broadcast_to(live, MANY_PAIRS.shape)
    inputs = with_low_logsumexps(*map(jnp.asarray, inputs_of(S=MANY)))
    d_out = normals(2, T, 4, 8, seed=6).astype(jnp.bfloat16)
    (out, _), of_all = exact(*inputs, live, d_out=d_out)
    actual = with_gradients(functools.partial(attention, implementation="cudnn", **arguments))(inputs, d_out)
    assert_close(actual, (out, [of_all[n] for n in ("query", "key", "value")]), 4e-2)


def test_gradients_of_a_bias_where_the_kernel_alone_has_nan():
    inputs = with_low_logsumexps(*map(jnp.asarray, inputs_of(S=MANY)))
    bias, d_out = normals(2, 4, T, MANY, seed=5).astype(jnp.bfloat16), normals(2, T, 4, 8, seed=6).astype(jnp.bfloat16)
    (out, _), of_all = exact(*inputs, True, bias, d_out=d_out)
    actual = with_gradients(functools.partial(attention, implementation="cudnn"))((*inputs, bias), d_out)
    assert_close(actual, (out, [of_all[n] for n in ("query", "key", "value", "bias")]), 4e-2)


def test_keys_are_padded_only_where_the_kernel_would_fail(monkeypatch):
    found, kernel = [], jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda q, k, *a, **kw: (found.append(k.shape[1]), kernel(q, k, *a, **kw))[1]
    )
    for keys, masks in ((192, True), (64, True), (192, False), (128, True), (136, True)):
        inputs = inputs_of(S=keys)
        mask = np.ones((T, keys), bool) if masks else None
        jax.eval_shape(functools.partial(attention, mask=mask, implementation="cudnn"), *inputs)
    assert found == [256, 128, 192, 128, 136]


REFUSED = [
    (dict(T=1), {}, "the number of queries or of keys is odd"),
    (dict(dtype=np.float32), {}, "the dtype is float32, not float16 or bfloat16"),
    (dict(H=12), {}, "the width 12 is not a multiple of 8"),
    (dict(width=16), {}, "the value's width is not the query's"),
    (dict(S=7), {}, "the number of queries or of keys is odd"),
    (dict(S=0), {}, "an array is empty"),
    ({}, dict(scale=np.ones(1, np.float32)), "the scale is not a number"),
    ({}, dict(logit_soft_cap=2.0), "it has no logit_soft_cap"),
    ({}, dict(dropout_rate=0.1, dropout_key=np.zeros(2, np.uint32)), "its dropout takes no key"),
    ({}, dict(return_residual=True), "its logsumexp is rounded to 16 bits and has no gradient"),
    ({}, dict(score_mod=lambda x, *_: x), "it has no score_mod"),
    (dict(dtype=jnp.float16), dict(mask=KEYS), "no number of float16 is low enough"),
    ({}, dict(bias=np.zeros((T, S), np.float32)), "the bias has another dtype than the query"),
    ({}, dict(bias=np.zeros((1, S), jnp.bfloat16)), "the bias is not one for all queries and keys"),
]


@pytest.mark.parametrize(("sizes", "arguments", "reason"), REFUSED)
def test_what_cudnn_lacks_is_refused_by_name_and_taken_over_otherwise(sizes, arguments, reason):
    inputs = random_inputs(**(SIZES | dict(dtype=jnp.bfloat16) | sizes))
    with pytest.raises(ValueError, match=f"^dot_product_attention: implementation: got value 'cudnn'.*{reason}"):
        attention(*inputs, implementation="cudnn", **arguments)
    chosen, xla = (jax.make_jaxpr(lambda: attention(*inputs, implementation=i, **arguments))() for i in (None, "xla"))  # noqa: B023
    assert str(chosen) == str(xla)


def test_more_batch_dimensions_are_refused():
    inputs = [x[None] for x in inputs_of()]
    with pytest.raises(ValueError, match="there are 2 batch dimensions, not at most one"):
        attention(*inputs, implementation="cudnn")
    assert attention(*inputs).shape == inputs[0].shape


@parametrize("kind", [AxisType.Explicit], exhaustive=[AxisType.Auto], ids=str)
def test_arrays_that_a_mesh_splits(kind):
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(kind,), devices=jax.devices()[:2])
    inputs = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch"))) for x in inputs_of()]
    chosen, xla = (str(jax.make_jaxpr(lambda *x: attention(*x, implementation=i))(*inputs)) for i in (None, "xla"))  # noqa: B023
    assert (chosen == xla) == (kind == AxisType.Auto)  # where the compiler may split them in any way
    assert_close(attention(*inputs, implementation="cudnn"), attention(*inputs_of(), implementation="cudnn"), 2e-2)


def test_an_old_gpu_takes_the_other_form(monkeypatch):
    monkeypatch.setattr(_cudnn, "_has_old_gpu", lambda: True)
    with pytest.raises(ValueError, match="a GPU here is older than compute capability"):
        attention(*inputs_of(), implementation="cudnn")
    assert attention(*inputs_of()).shape == (2, T, 4, 8)


def test_by_name_it_is_refused_where_the_program_is_lowered_for_another_platform(choose):
    choose(form=None)
    inputs, text = inputs_of(), "^dot_product_attention: implementation: got value 'cudnn'.*another platform than CUDA"
    named = functools.partial(attention, implementation="cudnn")
    for fn in (named, jax.jit(named), jax.vmap(named), jax.grad(functools.partial(loss, named))):
        with pytest.raises(ValueError, match=text):
            fn(*inputs)
    assert_same_bits(attention(*inputs), attention(*inputs, implementation="xla"))
    lowered = jax.jit(lambda q: attention(q, *inputs[1:])).trace(inputs[0]).lower(lowering_platforms=("cpu",))
    assert "while" in lowered.as_text() or "dot_general" in lowered.as_text()
