"""What XLA makes of the ops on a CPU, as far as its compiler decides it and not a clock."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import parametrize

import masksafe
from masksafe import losses

X, LABELS, BITS = np.zeros((4, 8), np.float32), np.zeros(4, np.int32), np.ones((4, 8), np.float32)
INTEGER = losses.softmax_cross_entropy_with_integer_labels


def attend(q, **arguments):
    return masksafe.dot_product_attention(q, q, q, **arguments)


HEADS = np.random.default_rng(0).normal(size=(2, 4, 1, 8)).astype(np.float32)
IDS, LENGTHS = np.zeros((2, 4), np.int32), np.ones(2, np.int32)
ONE_PROGRAM = {
    **{name: (getattr(masksafe, name), X) for name in ("mean", "var", "logsumexp", "softmax", "log_softmax")},
    **{name: (getattr(masksafe, name), X) for name in ("layer_norm", "rms_norm")},
    **{name: (getattr(losses, name), X, BITS / 8) for name in ("softmax_cross_entropy", "poly_loss_cross_entropy")},
    **{name: (getattr(losses, name), X, BITS / 8) for name in ("cosine_distance", "kl_divergence")},
    **{name: (getattr(losses, name), X, BITS) for name in ("sigmoid_focal_loss", "huber_loss", "hinge_loss")},
    **{name: (getattr(losses, name), X, LABELS) for name in ("log_probs", "multiclass_sparsemax_loss")},
    "softmax_cross_entropy_with_integer_labels": (INTEGER, X, LABELS),
    "triplet_margin_loss": (losses.triplet_margin_loss, X, X, X),
}
OF_ATTENTION = {
    "causal": {"is_causal": True},
    "causal with an offset": {"is_causal": True, "causal_offset": 1},
    "window": {"local_window_size": 1},
    "lengths": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
    "segments": {"query_segment_ids": IDS, "key_value_segment_ids": IDS},
    "positions": {"is_causal": True, "query_positions": IDS, "key_positions": IDS},
    "mask of keys": {"mask": np.ones((2, 1, 1, 4), bool)},
    "mask of pairs": {"mask": np.ones((4, 4), bool)},
    "bias, scale and sinks": {"bias": np.zeros((4, 4), np.float32), "scale": 0.5, "sinks": np.zeros(1, np.float32)},
    "ready-made mask": {"mask_mod": masksafe.attention_masks.causal},
    "functions": {"score_mod": lambda x, b, h, q, k: x - q, "mask_mod": lambda b, h, q, k: k <= q},
    "dropout": {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)},
}
ONE_PROGRAM |= {f"attention, {name}": (attend, HEADS, options) for name, options in OF_ATTENTION.items()}


@parametrize("name", ["mean"], exhaustive=ONE_PROGRAM)
def test_an_eager_call_is_one_program(name):
    op, *arrays = ONE_PROGRAM[name]
    options = arrays.pop() if isinstance(arrays[-1], dict) else {}
    is_array = lambda x: isinstance(x, (np.ndarray, jax.Array))  # noqa: E731
    named = {argument: jnp.asarray(x) for argument, x in options.items() if is_array(x)}
    rest = {argument: x for argument, x in options.items() if not is_array(x)}
    steps = jax.make_jaxpr(lambda arrays, named: op(*arrays, **named, **rest))(list(map(jnp.asarray, arrays)), named)
    assert [str(step.primitive) for step in steps.eqns] == ["jit"]


# Functions of an array and a number, which eager code may change in each call.
NUMBERS = {
    "scale": lambda x, n: attend(x, scale=n / 10),
    "causal offset": lambda x, n: attend(x, is_causal=True, causal_offset=n),
    "window at an offset": lambda x, n: attend(x, local_window_size=1, causal_offset=-n),
    "temperature": lambda x, n: losses.log_probs(x, jnp.zeros(x.shape[:-1], int), temperature=n / 10),
    "gradient at a temperature": lambda x, n: jax.grad(
        lambda x: losses.log_probs(x, jnp.zeros(x.shape[:-1], int), temperature=n / 10, with_entropy=True)[1].sum()
    )(x),
    "epsilon of layer norm": lambda x, n: masksafe.layer_norm(x, epsilon=n / 10),
    "gradient of layer norm": lambda x, n: jax.grad(
        lambda x: jnp.sum(jnp.square(masksafe.layer_norm(x, jnp.ones(8), where=x < 2, epsilon=n / 10)))
    )(x),
    "epsilon of rms norm": lambda x, n: masksafe.rms_norm(x, epsilon=n / 10),
    "epsilon of batch norm": lambda x, n: masksafe.batch_norm(x, epsilon=n / 10)[0],
    "epsilon of group norm": lambda x, n: masksafe.group_norm(x, 2, epsilon=n / 10),
    "prefix": lambda x, n: attend(x, mask_mod=masksafe.attention_masks.prefix(n)),
}


@parametrize("name", ["scale"], exhaustive=NUMBERS)
def test_another_number_in_an_eager_call_compiles_nothing(name, compilations):
    fn, x = NUMBERS[name], jnp.asarray(HEADS)
    results = [jax.block_until_ready(fn(x, n)) for n in (1, 2)]
    compilations.clear()
    results += [fn(x, n) for n in (3, 5, 1)]
    assert not compilations
    assert jnp.any(results[0] != results[1])
    np.testing.assert_allclose(results[1], jax.jit(fn, static_argnums=1)(x, 2), rtol=1e-6, atol=1e-6)


def temporary_bytes(fn, *shapes):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


def mean_of(loss):
    return lambda *args: loss(*args).mean()


@parametrize("classes", [50257], exhaustive=[1000])
@parametrize("gradient", [True], exhaustive=[False], ids=["gradient", "value"])
def test_cross_entropy_of_labels_holds_no_array_of_the_logits_size(classes, gradient):
    rows = 2**21 // classes
    fn = mean_of(INTEGER)
    fn = jax.value_and_grad(fn) if gradient else fn
    logits, labels = ((rows, classes), jnp.float32), ((rows,), jnp.int32)
    assert temporary_bytes(fn, logits, labels) < 0.3 * rows * classes * 4


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA removes the barrier before it fuses with jax 0.10")
@pytest.mark.parametrize(
    ("loss", "of_classes", "arrays"),
    [
        pytest.param(losses.softmax_cross_entropy, True, 3, id="distributions"),
        pytest.param(losses.log_probs, False, 2, id="log_probs"),
        pytest.param(lambda x, y: -jnp.sum(masksafe.log_softmax(x) * y, -1), True, 3, id="log_softmax"),
    ],
)
def test_the_cotangent_of_logits_behind_a_product_is_computed_once(loss, of_classes, arrays):
    """Two arrays of the size of the logits: the cotangent, and its transpose for the gradient of the kernel.

    Of rows in blocks: losses of fewer rows, in one pass, hold a third before (optax's hold four). Beside distributions
    XLA writes their product with the cotangent as well.
    """
    x, kernel, classes = ((4, 256, 32), jnp.float32), ((32, 4096), jnp.float32), ((4, 256, 4096), jnp.float32)
    labels = classes if of_classes else ((4, 256), jnp.int32)
    step = jax.value_and_grad(mean_of(lambda x, kernel, y: loss(x @ kernel, y)), (0, 1))
    assert temporary_bytes(step, x, kernel, labels) < (arrays + 0.5) * 4 * 256 * 4096 * 4


@parametrize("op", ["softmax"], exhaustive=["logsumexp"])
def test_exponentials_are_not_written_to_memory(op):
    if op == "logsumexp" and jax.__version_info__ < (0, 12):
        pytest.skip("XLA writes them with jax 0.10")
    assert temporary_bytes(lambda x: getattr(masksafe, op)(x, -1), ((2048, 1024), jnp.float32)) < 0.1 * 2048 * 1024 * 4


def test_the_mean_of_losses_is_no_part_of_the_computation_of_rows():
    # Fused with it, all rows would be computed on one core and in memory.
    text = jax.jit(mean_of(INTEGER)).lower(jnp.zeros((8192, 1024)), jnp.zeros(8192, jnp.int32)).as_text()
    assert "stablehlo.optimization_barrier" in text


def test_decoding_holds_no_copy_of_keys():
    query, key = ((4, 1, 8, 64), jnp.float32), ((4, 4096, 2, 64), jnp.float32)
    fn = lambda q, k, v, lengths: masksafe.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)  # noqa: E731
    assert temporary_bytes(fn, query, key, key, ((4,), jnp.int32)) < 0.25 * 4 * 4096 * 2 * 64 * 4


def test_gradient_of_short_attention_works_on_some_samples_at_a_time():
    arrays = [((64, 64, 8, 64), jnp.float32)] * 4

    def gradients(q, k, v, d):
        out, pull_back = jax.vjp(masksafe.dot_product_attention, q, k, v)
        return out, pull_back(d)

    # The forward pass holds some arrays of the size of the queries, the reverse pass those of its results.
    assert temporary_bytes(gradients, *arrays) < 9 * 64 * 64 * 8 * 64 * 4
