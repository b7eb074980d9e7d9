"""Models of flax.nnx and equinox whose layers `convert` replaces: the same on clean arrays, and safe under masks."""

import functools
import io
import typing

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparisons import assert_close
from flax import linen, nnx

import masksafe
from masksafe import adapters
from masksafe.testing import assert_mask_safe

WIDTH, WORDS = 8, 5
PADDING = WORDS - 1  # its row of the look-up is NaN where a test says so
VALID = np.array([[True, True, False], [True, True, True]])
TOKENS = np.int32([[0, 1, 2], [3, 0, 2]])

assert_safe = functools.partial(
    assert_mask_safe, masked={0: ~VALID}, output_mask=~VALID[..., None], garbage=[PADDING, 1], transforms=["jit"]
)
is_not_gone = functools.partial(pytest.raises, AssertionError, match=r"A masked element is not gone\.")


# flax.nnx.


class Block(nnx.Module):
    def __init__(self, norm, rngs):
        self.norm = norm
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, normalize_qk=True, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask, pairs):
        x = x + self.attention(self.norm(x, mask=mask), mask=pairs)
        return x + nnx.gelu(self.mlp(self.mlp_norm(x, mask=mask)))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)  # also that of the block
        self.blocks = nnx.List([Block(self.norm, rngs)])
        self.group = nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs)
        self.batch = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)

    def __call__(self, tokens, valid, selects=False, masks_norms=False):
        x = self.embed(tokens)
        x = masksafe.keep(x, where=valid[..., None]) if selects else x
        mask = jnp.broadcast_to(valid[..., None], x.shape) if masks_norms else None
        for block in self.blocks:
            x = block(x, mask, nnx.make_attention_mask(valid, valid))
        return self.batch(self.group(self.norm(x, mask=mask), mask=mask), mask=mask)


TRANSFORMER = {
    "batch": "BatchNorm",
    "group": "GroupNorm",
    "blocks.0.norm": "LayerNorm",
    "blocks.0.mlp_norm": "RMSNorm",
    "blocks.0.attention": "MultiHeadAttention",
    "blocks.0.attention.query_ln": "LayerNorm",
    "blocks.0.attention.key_ln": "LayerNorm",
}


@nnx.jit
def train(model, optimizer):
    def loss(model):
        return jnp.sum(jnp.sin(model(TOKENS, VALID | True)))

    value, d_model = nnx.value_and_grad(loss)(model)
    optimizer.update(model, d_model)
    return value


def test_an_nnx_model_is_the_same_on_clean_arrays():
    """Its values, and what an optimizer from before makes of its parameters and statistics."""
    model, own = Transformer(nnx.Rngs(0)), Transformer(nnx.Rngs(0))
    graph, _ = nnx.split(model)
    optimizers = [nnx.Optimizer(m, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param) for m in (model, own)]
    before = jax.tree.leaves(nnx.state(model))
    shared, attention = model.norm, model.blocks[0].attention
    assert adapters.nnx.convert(model) == adapters.Conversion(TRANSFORMER, {})
    assert model.blocks[0].norm is model.norm is shared
    assert type(shared) is adapters.nnx.LayerNorm
    assert model.blocks[0].attention is attention
    assert attention.attention_fn is adapters.flax_attention
    assert all(after is leaf for after, leaf in zip(jax.tree.leaves(nnx.state(model)), before, strict=True))
    for _ in range(2):
        assert_close(train(model, optimizers[0]), train(own, optimizers[1]), rtol=1e-4)
    assert_close(nnx.state(model), nnx.state(own), rtol=1e-4)

    merged = nnx.merge(*nnx.split(model))
    assert type(merged.batch) is adapters.nnx.BatchNorm
    assert merged.blocks[0].norm is merged.norm
    assert type(nnx.merge(graph, nnx.state(model)).batch) is nnx.BatchNorm
    assert adapters.nnx.convert(model) == adapters.Conversion()


def test_layers_are_those_of_a_changed_import():
    """Nothing else tells a converted layer from one that was made by our class."""
    make = lambda layers: (  # noqa: E731
        layers.LayerNorm(WIDTH, rngs=nnx.Rngs(0)),
        layers.MultiHeadAttention(2, WIDTH, decode=False, dropout_rate=0.5, rngs=nnx.Rngs(0)),
    )
    for converted, made in zip(make(nnx), make(adapters.nnx), strict=True):
        adapters.nnx.convert(converted)
        assert nnx.split(converted)[0] == nnx.split(made)[0]


@pytest.mark.exhaustive
def test_stacked_blocks_are_scanned_as_before():
    stack = nnx.vmap(lambda rngs: Block(nnx.LayerNorm(WIDTH, rngs=rngs), rngs))
    blocks = stack(nnx.Rngs(0).split(2))
    pairs = nnx.make_attention_mask(VALID | True, VALID | True)
    through = nnx.jit(nnx.scan(lambda block, x: block(x, None, pairs), in_axes=(0, nnx.Carry), out_axes=nnx.Carry))
    x = jnp.sin(jnp.arange(6.0 * WIDTH)).reshape(2, 3, WIDTH)
    expected = through(blocks, x)
    adapters.nnx.convert(blocks)
    assert_close(through(blocks, x), expected)


def test_a_converted_nnx_model_does_not_see_what_is_masked():
    model = Transformer(nnx.Rngs(0))
    model.embed.embedding[...] = model.embed.embedding[...].at[PADDING].set(jnp.nan)
    adapters.nnx.convert(model)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def with_options(**options):
        return lambda tokens, params: nnx.merge(graph, params, rest, copy=True)(tokens, VALID, **options)

    masking = jax.jit(with_options(masks_norms=True))
    out, other = (masking(np.where(VALID, TOKENS, word), params)[VALID] for word in (PADDING, 1))
    assert jnp.all(jnp.isfinite(out))  # that of flax is not
    np.testing.assert_array_equal(out, other)
    with is_not_gone():  # norms get no mask by the conversion
        assert_safe(with_options(), TOKENS, params, order=0)
    assert_safe(with_options(selects=True), TOKENS, params, order=1)


class Subclass(nnx.LayerNorm):
    pass


def values(query, key, value, **options):
    return value


def nnx_attention(**options):
    return nnx.MultiHeadAttention(2, WIDTH, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Subclass(WIDTH, rngs=nnx.Rngs(0)), "a subclass of LayerNorm"),
        (lambda: nnx.RMSNorm(WIDTH, axis_index_groups=((0,),), rngs=nnx.Rngs(0)), "masksafe has no axis_index_groups"),
        (lambda: nnx.BatchNorm(WIDTH, dtype=complex, rngs=nnx.Rngs(0)), "masksafe has no complex norms and attention"),
        (
            lambda: nnx.RMSNorm(WIDTH, param_dtype=complex, rngs=nnx.Rngs(0)),
            "masksafe has no complex norms and attention",
        ),
        (lambda: nnx_attention(attention_fn=values), "its attention_fn is not flax's default"),
        (
            lambda: nnx_attention(attention_fn=functools.partial(nnx.dot_product_attention, bias=1)),
            "its attention_fn is not flax's default",
        ),
        (lambda: nnx_attention(dropout_rate=1.0), "masksafe's dropout_rate is below 1"),
        (lambda: nnx.InstanceNorm(WIDTH, rngs=nnx.Rngs(0)), "masksafe has no InstanceNorm"),
        (
            lambda: nnx.SpectralNorm(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)),
            "a norm of weights, not of what is masked",
        ),
        (
            lambda: nnx.bridge.ToNNX(linen.LayerNorm(), rngs=nnx.Rngs(0)),
            "a module of flax.linen is a definition: change its import",
        ),
    ],
)
def test_what_is_left_of_nnx_is_unchanged_and_has_a_reason(make, reason):
    layer = make()
    kind, attributes = type(layer), dict(vars(layer))
    record = adapters.nnx.convert(nnx.Sequential(layer))
    assert record == adapters.Conversion({}, {"layers.0": (kind.__name__, reason)})
    assert type(layer) is kind
    assert vars(layer) == attributes
    assert str(record) == f"layers.0  {kind.__name__}  left: {reason}"


def test_an_attention_fn_of_masksafe_stays():
    for function in (adapters.flax_attention, functools.partial(adapters.flax_attention, window=(1, 1))):
        layer = nnx_attention(attention_fn=function)
        assert adapters.nnx.convert(layer) == adapters.Conversion({"": "MultiHeadAttention"}, {})
        assert type(layer) is adapters.nnx.MultiHeadAttention
        assert layer.attention_fn is function


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Transformer, r"got the class Transformer; expected a module of flax\.nnx\.$"),
        (nnx.State({}), r"got State; expected a module of flax\.nnx\.$"),
        (linen.Dense(3), "got Dense; .* A module of flax.linen is a definition: change its import"),
        (equinox.nn.LayerNorm(3), "got LayerNorm; expected"),
    ],
    ids=repr,
)
def test_what_is_no_module_of_nnx_is_refused(model, text):
    with pytest.raises(TypeError, match=f"^convert: model: {text}"):
        adapters.nnx.convert(model)


# equinox.


class Layer(equinox.Module):
    attention: equinox.nn.MultiheadAttention
    attention_norm: equinox.nn.LayerNorm
    mlp: equinox.nn.Linear
    mlp_norm: equinox.nn.RMSNorm

    def __init__(self, key):
        self.attention = equinox.nn.MultiheadAttention(2, WIDTH, use_output_bias=True, dropout_p=0.1, key=key)
        self.attention_norm, self.mlp_norm = equinox.nn.LayerNorm(WIDTH), equinox.nn.RMSNorm(WIDTH)
        self.mlp = equinox.nn.Linear(WIDTH, WIDTH, key=key)

    def __call__(self, x, pairs):
        x = jax.vmap(self.attention_norm)(x + self.attention(x, x, x, pairs))
        return jax.vmap(self.mlp_norm)(x + jax.nn.gelu(jax.vmap(self.mlp)(x)))


class Bert(equinox.Module):
    words: equinox.nn.Embedding
    positions: jax.Array
    norm: equinox.nn.LayerNorm
    layers: list[Layer]
    pooler: dict[str, typing.Any]

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.words = equinox.nn.Embedding(WORDS, WIDTH, key=keys[0])
        self.positions = jax.random.normal(keys[1], (3, WIDTH))
        self.norm = equinox.nn.LayerNorm(WIDTH)
        self.layers = [Layer(key) for key in keys[2:]]
        self.pooler = {"linear": equinox.nn.Linear(WIDTH, WIDTH, key=key)}
        self.pooler["norm"] = equinox.nn.BatchNorm(WIDTH, "batch", mode="ema")

    def __call__(self, tokens, valid, state, selects=False):
        """The features of the tokens, those of the first one for the whole sample, and the state."""
        x = jax.vmap(self.words)(tokens) + self.positions
        x = jax.vmap(self.norm)(masksafe.keep(x, where=valid[..., None]) if selects else x)
        for layer in self.layers:
            x = layer(x, valid[:, None] & valid)
        pooled, state = self.pooler["norm"](self.pooler["linear"](x[0]), state)
        return x, jnp.tanh(pooled), state


BERT = {
    "norm": "LayerNorm",
    "pooler.norm": "BatchNorm",
    "layers.0.attention": "MultiheadAttention",
    "layers.0.attention_norm": "LayerNorm",
    "layers.0.mlp_norm": "RMSNorm",
}


def bert(seed=0):
    """A model without dropout, and its state."""
    model, state = equinox.nn.make_with_state(Bert)(jax.random.key(seed))
    return equinox.tree_at(lambda m: m.layers[0].attention.dropout.inference, model, True), state


def over_batch(model, tokens, valid, state, **options):
    one = functools.partial(model, **options)
    return jax.vmap(one, (0, 0, None), (0, 0, None), axis_name="batch")(tokens, valid, state)


OPTIMIZER = optax.sgd(0.1, momentum=0.9)


@equinox.filter_jit
def trained(model, state, optimizer_state):
    """The value, and the model and both states after a step."""

    def loss(model):
        features, pooled, after = over_batch(model, TOKENS, VALID | True, state)
        return jnp.sum(jnp.sin(features)) + jnp.sum(pooled), after

    (value, after), d_model = equinox.filter_value_and_grad(loss, has_aux=True)(model)
    updates, optimizer_state = OPTIMIZER.update(d_model, optimizer_state)
    return value, equinox.apply_updates(model, updates), after, optimizer_state


def test_an_equinox_model_is_the_same_on_clean_arrays():
    """Its values, and what an optimizer from before makes of its parameters and statistics."""
    model, state = bert()
    optimizer_state = OPTIMIZER.init(equinox.filter(model, equinox.is_inexact_array))
    converted, record = adapters.equinox.convert(model)
    assert record == adapters.Conversion(BERT, {})
    assert type(converted.pooler["norm"]) is adapters.equinox.BatchNorm
    assert type(model.pooler["norm"]) is equinox.nn.BatchNorm
    assert all(x is y for x, y in zip(jax.tree.leaves(converted), jax.tree.leaves(model), strict=True))
    moved = converted, state, adapters.equinox.convert(optimizer_state)[0]
    own = model, state, optimizer_state
    for _ in range(2):
        (value, *moved), (expected, *own) = trained(*moved), trained(*own)
        assert_close(value, expected, rtol=1e-4)
    for x, y in zip(moved, own, strict=True):
        assert_close(*(equinox.filter(tree, equinox.is_array) for tree in (x, y)), rtol=1e-4)
    again, record = adapters.equinox.convert(converted)
    assert record == adapters.Conversion()
    assert equinox.tree_equal(again, converted)


def test_checkpoints_of_an_equinox_model_load_into_the_converted_one():
    file = io.BytesIO()
    equinox.tree_serialise_leaves(file, bert(seed=1))
    file.seek(0)
    model, state = bert()
    loaded, _ = equinox.tree_deserialise_leaves(file, (adapters.equinox.convert(model)[0], state))
    assert_close(*(equinox.filter(tree, equinox.is_array) for tree in (loaded, bert(seed=1)[0])))


def test_a_converted_equinox_model_does_not_see_what_is_masked():
    model, state = bert()
    model = equinox.tree_at(lambda m: m.words.weight, model, replace_fn=lambda w: w.at[PADDING].set(jnp.nan))
    converted, _ = adapters.equinox.convert(model)

    def of(model, **options):
        params, rest = equinox.partition(model, equinox.is_inexact_array)
        run = lambda tokens, params: over_batch(equinox.combine(params, rest), tokens, VALID, state, **options)[0]  # noqa: E731
        return run, TOKENS, params

    with is_not_gone():
        assert_safe(*of(model), order=0)
    assert_safe(*of(converted), order=0)  # by the attention; the gradients of norms would be NaN
    assert_safe(*of(converted, selects=True), order=1)


def test_shared_layers_of_equinox_stay_shared():
    norms = equinox.nn.LayerNorm(WIDTH), equinox.nn.LayerNorm(WIDTH)
    shared = equinox.nn.Shared(norms, lambda pair: pair[1].weight, lambda pair: pair[0].weight)
    converted, record = adapters.equinox.convert({"norms": shared})
    assert record == adapters.Conversion(dict.fromkeys(("norms.pytree.0", "norms.pytree.1"), "LayerNorm"), {})
    first, second = converted["norms"]()
    assert type(second) is adapters.equinox.LayerNorm
    assert first.weight is second.weight is norms[0].weight


def test_a_layer_within_a_layer_of_equinox_is_replaced():
    layer = equinox_attention()
    projection = equinox.nn.Sequential([layer.output_proj, equinox.nn.LayerNorm(WIDTH)])
    layer = equinox.tree_at(lambda attention: attention.output_proj, layer, projection)
    converted, record = adapters.equinox.convert(layer)
    assert record == adapters.Conversion({"": "MultiheadAttention", "output_proj.layers.1": "LayerNorm"}, {})
    assert type(converted.output_proj.layers[1]) is adapters.equinox.LayerNorm


class SubclassInEquinox(equinox.nn.LayerNorm):
    pass


def equinox_attention(**options):
    return equinox.nn.MultiheadAttention(2, WIDTH, key=jax.random.key(0), **options)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: SubclassInEquinox(WIDTH), "a subclass of LayerNorm"),
        (lambda: equinox.nn.RMSNorm(WIDTH, dtype=jnp.complex64), "masksafe has no complex norms and attention"),
        (lambda: equinox.nn.BatchNorm(WIDTH, 0, mode="ema"), "masksafe's names of axes are strings"),
        (lambda: equinox_attention(dropout_p=1.0), "masksafe's dropout_rate is below 1"),
        (
            lambda: equinox.nn.WeightNorm(equinox.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0))),
            "a norm of weights, not of what is masked",
        ),
    ],
)
def test_what_is_left_of_equinox_is_unchanged_and_has_a_reason(make, reason):
    layer = make()
    converted, record = adapters.equinox.convert([layer])
    assert record == adapters.Conversion({}, {"0": (type(layer).__name__, reason)})
    assert equinox.tree_equal(converted, [layer])


@pytest.mark.parametrize("model", [Bert, None, [1.0]], ids=str)
def test_what_has_no_module_of_equinox_is_refused(model):
    with pytest.raises(
        TypeError, match=r"^convert: model: got .*; expected a module of equinox, or a pytree with some"
    ):
        adapters.equinox.convert(model)


# The record.


def test_a_record_prints_as_a_table():
    left = "MultiHeadAttention", "its attention_fn is not flax's default"
    replaced = {"blocks.0.norms.0": "LayerNorm", "blocks.10.norms.1": "LayerNorm", "blocks.0.norm2": "RMSNorm"}
    record = adapters.Conversion({"": "GroupNorm", **replaced}, {"blocks.0.attention": left})
    assert str(record).splitlines() == [
        "(model)             GroupNorm           replaced",
        "blocks.*.norms.*    LayerNorm x 2       replaced",
        "blocks.0.norm2      RMSNorm             replaced",
        "blocks.0.attention  MultiHeadAttention  left: its attention_fn is not flax's default",
    ]
    assert str(adapters.Conversion()) == "nothing replaced"
    assert str(adapters.nnx.convert(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))) == "nothing replaced"
