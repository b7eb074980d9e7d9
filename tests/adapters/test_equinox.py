"""masksafe's layers for equinox: equinox's own on clean input, safe under masks, with the same checkpoints."""

import functools
import io

import chex
import comparisons
import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import parametrize

from masksafe.adapters import equinox as ours

theirs = equinox.nn
# By NumPy: what JAX computes here, it compiles in each process.
RNG, KEY = np.random.default_rng(0), np.zeros(2, np.uint32)  # that of jax.random.PRNGKey(0)
GARBAGE = [np.nan, np.inf, -1e30]
assert_close = functools.partial(comparisons.assert_close, rtol=1e-4, atol=1e-5)


def of_both(make):
    """What `make` makes of masksafe's layers and of equinox's, with the same parameters, no two of them alike."""
    return tuple(jax.tree.map(spread, make(module)) for module in (ours, theirs))


def spread(leaf):
    if not equinox.is_inexact_array(leaf):
        return leaf
    return (leaf + jnp.cos(1.0 + jnp.arange(leaf.size)).reshape(leaf.shape)).astype(leaf.dtype)


@equinox.filter_jit
def differentiated(layer, arrays, call):
    """The output of `call(layer, *arrays)`, and the gradients of all that is a float."""

    def total(of):
        out = call(*of)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    (_, out), gradients = equinox.filter_value_and_grad(total, has_aux=True)((layer, *arrays))
    return out, arrays_of(gradients[0]), gradients[1:]


def arrays_of(tree):
    return jax.tree.leaves(equinox.filter(tree, equinox.is_array))


def assert_same_leaves(ours, theirs):
    leaves, expected = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (ours, theirs))
    assert list(leaves) == list(expected)
    assert all(np.array_equal(leaf, expected[path]) for path, leaf in leaves.items())


# Norms of one sample.

NORMS = {
    "layer norm": (lambda nn: nn.LayerNorm(8), (8,)),
    "layer norm of two axes": (lambda nn: nn.LayerNorm((3, 8), 1e-3, use_bias=False), (3, 8)),
    "layer norm without parameters": (lambda nn: nn.LayerNorm((3, 8), use_weight=False, use_bias=False), (3, 8)),
    "rms norm": (lambda nn: nn.RMSNorm((3, 8)), (3, 8)),
    "rms norm without bias": (lambda nn: nn.RMSNorm(8, 1e-3, use_bias=False), (8,)),
    "rms norm without weight": (lambda nn: nn.RMSNorm(8, use_weight=False), (8,)),
    "group norm": (lambda nn: nn.GroupNorm(2, 4), (4, 3, 5)),
    "group norm of channels alone": (lambda nn: nn.GroupNorm(2, 8, 1e-3), (8,)),
    "group norm without parameters": (lambda nn: nn.GroupNorm(2, channelwise_affine=False), (4, 5)),
}
MASKED_NORMS = ["layer norm of two axes", "rms norm", "group norm"]


def sample(shape):
    return jax.random.normal(jax.random.key(1), shape) + 2


def with_mask(layer, x, where):
    return layer(x, where=where)


@parametrize("name", ["layer norm"], exhaustive=NORMS)
def test_norm_is_equinox_own(name):
    """Its fields, values and gradients, and it hands a state on."""
    make, shape = NORMS[name]
    mine, its = of_both(make)
    assert_same_leaves(mine, its)
    assert isinstance(mine, type(its))
    assert type(mine).__name__ == type(its).__name__
    static, expected = ({k: v for k, v in vars(x).items() if k not in ("weight", "bias")} for x in (mine, its))
    assert static == expected
    assert_close(*(differentiated(layer, (sample(shape),), lambda layer, x: layer(x)) for layer in (mine, its)))
    out, state = mine(sample(shape), None, key=KEY)
    assert state is None
    np.testing.assert_array_equal(out, mine(sample(shape)))


@parametrize("name", ["layer norm of two axes"], exhaustive=MASKED_NORMS)
def test_norm_under_a_mask_is_untouched_by_garbage_and_of_nothing_zero(name):
    make, shape = NORMS[name]
    layer, _ = of_both(make)
    where = jax.random.bernoulli(jax.random.key(2), 0.6, shape)
    clean = differentiated(layer, (jnp.where(where, sample(shape), 0), where), with_mask)
    assert (clean[0][~where] == 0).all()
    assert (clean[2][0][~where] == 0).all()
    assert (clean[2][0][where] != 0).any()
    for garbage in GARBAGE:
        dirty = differentiated(layer, (jnp.where(where, sample(shape), garbage), where), with_mask)
        chex.assert_trees_all_equal(dirty, clean)
    of_nothing = differentiated(layer, (jnp.full(shape, jnp.nan), jnp.zeros(shape, bool)), with_mask)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(of_nothing))


# Batch norm.

BATCHES = jax.device_put(np.float32(1 + RNG.normal(size=(3, 6, 4, 5)) * np.array([1, 2, 0.5]).reshape(3, 1, 1, 1)))


each_mode = parametrize("mode", ["ema"], exhaustive=["batch"])


def batch_norms(mode, **arguments):
    return of_both(lambda nn: nn.BatchNorm(4, "batch", mode=mode, momentum=0.8, **arguments))


def over_batch(layer, x, state, where=None, **arguments):
    def call(x, state, where):
        return layer(x, state, **arguments) if where is None else layer(x, state, where=where, **arguments)

    return jax.vmap(call, (0, None, 0), (0, None), axis_name="batch")(x, state, where)


@equinox.filter_jit
def trained(layer, batches, where=None):
    """Outputs in training and at inference, and the state, with the gradients of the sum of sines of all outputs."""

    def total(of):
        layer, batches = of
        state, outs = theirs.State(layer), []
        for n, batch in enumerate(batches):
            out, state = over_batch(layer, batch, state, None if where is None else where[n])
            outs.append(out)
        out, state = over_batch(layer, batches[0], state, None if where is None else where[0], inference=True)
        outs.append(out)
        return sum(jnp.sum(jnp.sin(out)) for out in outs), (outs, jax.tree.leaves(state))

    (_, results), gradients = equinox.filter_value_and_grad(total, has_aux=True)((layer, batches))
    return results, arrays_of(gradients[0]), gradients[1]


@parametrize("affine", [True], exhaustive=[False])
@each_mode
def test_batch_norm_is_equinox_own(mode, affine):
    assert_close(*(trained(layer, BATCHES[:2]) for layer in batch_norms(mode, channelwise_affine=affine)))


@each_mode
def test_gradients_of_batch_norm_within_vmap_are_equinox_own(mode):
    def of_sample(layer, state):
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(layer(x, state)[0])))
        return jax.jit(jax.vmap(gradient, axis_name="batch"))(BATCHES[0])

    assert_close(*(of_sample(layer, theirs.State(layer)) for layer in batch_norms(mode)))


@pytest.mark.exhaustive
def test_batch_norm_over_two_axes_is_equinox_own():
    x, where = BATCHES.swapaxes(1, 2), jnp.arange(12).reshape(3, 4) != 5

    def run(layer, **masks):
        call = lambda x, state, where: layer(x, state, **dict.fromkeys(masks, where))  # noqa: E731
        for name in ("batch", "time"):
            call = jax.vmap(call, (0, None, 0), (0, None), axis_name=name)
        out, state = call(x, theirs.State(layer), where)
        return out, jax.tree.leaves(state)

    layer, own = of_both(lambda nn: nn.BatchNorm(6, ("batch", "time"), mode="batch"))
    assert_close(run(layer), run(own))
    out, _ = run(layer, where=where)
    np.testing.assert_array_equal((out == 0).all((2, 3)), ~where)


@each_mode
def test_batch_norm_does_not_see_what_is_masked(mode):
    """Masked samples are as if taken out, and of masked elements no bit matters."""
    (layer, own), batches = batch_norms(mode), BATCHES[:2]
    is_sample = jnp.array([True, False, True, True, False, True])
    samples = jnp.broadcast_to(is_sample[:, None, None], batches.shape)
    (outs, state), d_layer, d_x = trained(layer, jnp.where(samples, batches, jnp.nan), samples)
    (expected, expected_state), d_own, d_expected = trained(own, batches[:, is_sample])
    assert_close((state, [out[is_sample] for out in outs]), (expected_state, expected))
    assert_close(d_layer, d_own, atol=1e-4)
    assert_close(d_x[:, is_sample], d_expected)
    assert all((out[~is_sample] == 0).all() for out in outs)
    assert (d_x[:, ~is_sample] == 0).all()

    some = jax.random.bernoulli(jax.random.key(4), 0.6, batches.shape)
    clean = trained(layer, jnp.where(some, batches, 0), some)
    for garbage in GARBAGE:
        chex.assert_trees_all_equal(trained(layer, jnp.where(some, batches, garbage), some), clean)


@parametrize("batches", [0], exhaustive=[2])
@each_mode
def test_a_batch_or_a_channel_of_nothing_keeps_its_statistics(mode, batches):
    layer, _ = batch_norms(mode)
    where = jnp.ones((6, 4, 1), bool).at[:, 1].set(False)

    def at_inference(state):
        return over_batch(layer, BATCHES[0], state, inference=True)[0]

    state = theirs.State(layer)
    for batch in BATCHES[:batches]:
        _, state = over_batch(layer, batch, state)
    before = jax.tree.leaves(state)
    out, state = over_batch(layer, jnp.full_like(BATCHES[0], jnp.nan), state, jnp.zeros((6, 1, 1), bool))
    assert (out == 0).all()
    chex.assert_trees_all_equal(jax.tree.leaves(state), before)
    expected = at_inference(state)
    out, state = over_batch(layer, BATCHES[2], state, where)
    assert (out[:, 1] == 0).all()
    actual = at_inference(state)
    if batches == 0 and mode == "ema":  # as with mean 0 and variance 1
        expected = expected.at[:, 1].set(BATCHES[0][:, 1] * layer.weight[1] + layer.bias[1])
    np.testing.assert_allclose(actual[:, 1], expected[:, 1], rtol=1e-4, atol=1e-5)
    assert not np.allclose(actual[:, 0], expected[:, 0], rtol=1e-2)


# Attention.

SIZES = {"key_size": 5, "value_size": 7, "output_size": 6, "qk_size": 3, "vo_size": 2}
BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
QUERY, KEY_, VALUE = (jax.device_put(np.float32(RNG.normal(size=s))) for s in ((4, 8), (6, 5), (6, 7)))
MASK = jax.device_put((RNG.random((2, 4, 6)) < 0.6) | (np.arange(6) == 0))


def attentions(**arguments):
    return of_both(lambda nn: nn.MultiheadAttention(2, 8, key=KEY, **arguments))


def rotate(query, key, value):
    rope = jax.vmap(theirs.RotaryPositionalEmbedding(4), in_axes=1, out_axes=1)
    return rope(query), rope(key), value


def attend(layer, query, key_, value, mask):
    return layer(query, key_, value, mask)


def rotated(layer, query, key_, value, mask):
    return layer(query, query, query, mask[0, :, :4], process_heads=rotate)


INTEGERS = np.where(MASK, np.int32([1, -2, 3] * 2), 0)
SIZES_AND_BIASES = SIZES | BIASES


@parametrize(
    ("call", "arguments", "mask"),
    [(attend, SIZES_AND_BIASES, MASK)],
    exhaustive=[(attend, SIZES_AND_BIASES, None), (attend, SIZES, INTEGERS[0]), (rotated, {}, MASK)],
)
def test_attention_is_equinox_own(call, arguments, mask):
    layers = attentions(**arguments)
    assert_same_leaves(*layers)
    assert_close(*(differentiated(layer, (QUERY, KEY_, VALUE, mask), call) for layer in layers), atol=1e-4)


@parametrize("form", ["for all heads"], exhaustive=["for each head"])
def test_masked_rows_of_attention_are_gone(form):
    """The third key is masked for all queries, and the last query sees no key; the weights get no NaN of either."""
    mask = MASK.at[:, :, 2].set(False).at[:, 3].set(False)
    mask = mask[0] if form == "for all heads" else mask
    layer, _ = attentions(**SIZES, **BIASES)

    def run(garbage):
        arrays = (QUERY.at[3].set(garbage), KEY_.at[2].set(garbage), VALUE.at[2].set(garbage), mask)
        return differentiated(layer, arrays, attend)

    clean = out, _, (d_query, d_key, d_value, _) = run(0.0)
    assert all((row == 0).all() for row in (out[3], d_query[3], d_key[2], d_value[2]))
    assert (out[:3] != 0).all()
    for garbage in GARBAGE:
        chex.assert_trees_all_equal(run(garbage), clean)


@parametrize(("time", "keys"), [(0, 3)], exhaustive=[(3, 0), (0, 0)])
def test_attention_without_queries_or_keys(time, keys):
    layer, _ = attentions()
    query, key_ = (jnp.ones((length, QUERY.shape[1])) for length in (time, keys))
    for mask in (None, jnp.ones((time, keys), bool)):
        np.testing.assert_array_equal(layer(query, key_, key_, mask), jnp.zeros((time, QUERY.shape[1])))


@pytest.mark.exhaustive
def test_dropout_of_attention():
    layer, own = attentions(dropout_p=0.5)
    draw = equinox.filter_jit(lambda key, **arguments: layer(QUERY, QUERY, QUERY, key=key, **arguments))
    expected = own(QUERY, QUERY, QUERY, inference=True)
    for without in (draw(None, inference=True), equinox.nn.inference_mode(layer)(QUERY, QUERY, QUERY, key=KEY)):
        np.testing.assert_allclose(without, expected, rtol=1e-4, atol=1e-5)
    with pytest.warns(UserWarning, match="deterministic"):
        np.testing.assert_allclose(layer(QUERY, QUERY, QUERY, deterministic=True), expected, rtol=1e-4, atol=1e-5)
    draws = equinox.filter_jit(equinox.filter_vmap(lambda key: layer(QUERY, QUERY, QUERY, key=key)))(
        jax.random.split(KEY, 2000)
    )
    assert (abs(draws.mean(0) - expected) <= 5 * draws.std(0) / len(draws) ** 0.5 + 1e-6).all()
    assert (draws[0] != draws[1]).any()
    with pytest.raises(RuntimeError, match=r"^MultiheadAttention: key: got None; expected a random key for dropout"):
        layer(QUERY, QUERY, QUERY)


# What is refused.


ROWS = (np.asarray(QUERY),) * 3
SHAPE = r"x: got shape \(2, 8\); expected shape \(8,\)"
REFUSED = [
    ("LayerNorm", (np.ones((2, 8)),), {}, SHAPE),
    ("RMSNorm", (np.ones((2, 8)),), {}, SHAPE),
    ("RMSNorm", (np.ones(8),), {"where": np.ones(8, np.float32)}, "where: got dtype float32; expected bool"),
    ("MultiheadAttention", (ROWS[0][None], *ROWS[1:]), {}, "query: got shape .1, 4, 8.; expected an array of rank 2"),
    ("MultiheadAttention", (QUERY, ROWS[0][:3], QUERY), {}, "value: got 4 rows; expected 3"),
    ("MultiheadAttention", (*ROWS, np.ones((5, 4), bool)), {}, "mask: got shape .5, 4.; expected a shape that broad"),
    ("MultiheadAttention", ROWS, {"mask": np.float32([[0], [-1e9]])}, "mask: got dtype float32; .* mask == 0"),
    ("MultiheadAttention", ROWS, {"process_heads": lambda q, k, v: (q[:, :1], k, v)}, "process_heads: got shapes "),
]


@pytest.mark.parametrize(("name", "arguments", "options", "text"), REFUSED)
def test_bad_arguments_are_refused(name, arguments, options, text):
    layer = attentions()[0] if name == "MultiheadAttention" else getattr(ours, name)(8)
    with pytest.raises((TypeError, ValueError), match=f"^{name}: {text}"):
        layer(*arguments, **options)


@pytest.mark.parametrize("dtype", ["complex64", "int32"])
def test_other_dtypes_are_refused(dtype):
    for make, shape in NORMS.values():
        layer = make(ours)
        with pytest.raises(TypeError, match=f"^{type(layer).__name__}: x: got dtype {dtype}; expected a float dtype"):
            layer(np.ones(shape, dtype))
    layer, state = theirs.make_with_state(ours.BatchNorm)(4, "batch", mode="batch")
    with pytest.raises(TypeError, match=r"^BatchNorm: x: got dtype complex64; expected a float dtype"):
        over_batch(layer, BATCHES[0].astype(jnp.complex64), state)


@parametrize("axis_name", ["batch"], exhaustive=[None])
def test_batch_norm_needs_its_axis(axis_name):
    for module in (ours, theirs):
        layer, state = theirs.make_with_state(module.BatchNorm)(4, axis_name, mode="batch")
        with pytest.raises(NameError):
            layer(BATCHES[0, 0], state)


# Checkpoints.


def layers_of(nn):
    norms = nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 4), nn.BatchNorm(4, "batch", mode="batch")
    return *norms, nn.MultiheadAttention(2, 8, use_output_bias=True, key=KEY)


@parametrize("moved", [0], exhaustive=[1], ids=["to equinox", "from equinox"])
def test_checkpoints_are_the_same(moved):
    models = [(layers, theirs.State(layers)) for layers in of_both(layers_of)]
    source, target = models[moved], models[1 - moved]
    source = jax.tree.map(lambda leaf: leaf + 1 if equinox.is_inexact_array(leaf) else leaf, source)
    file = io.BytesIO()
    equinox.tree_serialise_leaves(file, source)
    file.seek(0)
    loaded = equinox.tree_deserialise_leaves(file, target)
    assert [type(layer) for layer in loaded[0]] == [type(layer) for layer in target[0]]
    assert_same_leaves(loaded, source)
