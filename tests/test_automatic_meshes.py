"""`jit` of arrays that an automatic mesh splits: nothing is gathered, and the values are those of one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import parametrize

import masksafe
from masksafe import losses

DEVICES = 4
RNG = np.random.default_rng(0)
ROWS, CLASSES = 2**11, 2**9  # of more elements than two blocks
X, T, Z = (RNG.normal(size=(ROWS, CLASSES)).astype(np.float32) for _ in range(3))
TARGETS = np.exp(T) / np.exp(T).sum(-1, keepdims=True)
LABELS, ROWS_LEFT = RNG.integers(0, CLASSES, ROWS), RNG.random(ROWS) < 0.6
MASK = RNG.random((ROWS, CLASSES)) < 0.7
SCALE = RNG.normal(size=CLASSES).astype(np.float32)
INTEGER = losses.softmax_cross_entropy_with_integer_labels

# Functions of a first array, which gets a gradient, and of others of its rows, of its shape or of its classes; and how
# many sums or maxima over the devices they may take if these split the classes. Rows are split by the contract's tests.
OF_ROWS = {
    "integer": (lambda x, y, m: INTEGER(x, y, where=m), (X, LABELS, ROWS_LEFT), 3),
    "one-hot": (lambda x, t, m: losses.softmax_cross_entropy(x, t, where=m), (X, TARGETS, MASK), 4),
    "log-probabilities": (lambda x, y: sum(losses.log_probs(x, y, with_entropy=True)), (X, LABELS), 4),
    "KL": (losses.kl_divergence, (X, TARGETS), 2),
    "poly": (losses.poly_loss_cross_entropy, (X, TARGETS), 5),
    "cosine": (losses.cosine_similarity, (X, T), 3),
    "ranking": (losses.ranking_softmax_loss, (X, TARGETS), 4),
    "hinge": (losses.multiclass_hinge_loss, (X, LABELS), 4),
    "softmax": (lambda x, z, m: z * masksafe.softmax(x, where=m), (X, Z, MASK), 4),
    "log_softmax": (lambda x, z: z * masksafe.log_softmax(x), (X, Z), 4),
    "layer norm": (lambda x, z, s, m: z * masksafe.layer_norm(x, s, where=m[:, None]), (X, Z, SCALE, ROWS_LEFT), 5),
    "RMS norm": (lambda x, z, s: z * masksafe.rms_norm(x, s), (X, Z, SCALE), 4),
    "group norm": (lambda x, z, s: z * masksafe.group_norm(x, 8, s), (X, Z, SCALE), 4),
    "l2": (lambda x, z: z * masksafe.l2_normalize(x), (X, Z), 3),
    "variance": (lambda x: masksafe.var(x, -1), (X,), 4),
}


def split_over_devices(args, specs):
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]


def assert_nothing_is_gathered(fn, args, specs, all_reduces, rtol=1e-4):
    """The value and the gradients by the floats of one shape with the first: on four devices, and on one."""
    of_floats = [i for i, x in enumerate(args) if x.dtype == np.float32]
    step = jax.value_and_grad(lambda *args: jnp.mean(fn(*args)), of_floats)
    split = split_over_devices(args, specs)
    program = jax.jit(step).lower(*split).compile()
    exchanges = re.findall(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", program.as_text())
    assert set(exchanges) <= {"all-reduce"}
    assert len(exchanges) <= all_reduces
    expected = jax.jit(step)(*map(jnp.asarray, args))
    for result, of_one_device in zip(jax.tree.leaves(program(*split)), jax.tree.leaves(expected), strict=True):
        scale = np.abs(of_one_device).max()
        np.testing.assert_allclose(result, of_one_device, rtol=rtol, atol=rtol * scale)


@parametrize("name", ["integer"], exhaustive=OF_ROWS)
def test_rows_with_classes_on_several_devices(name):
    fn, args, all_reduces = OF_ROWS[name]
    specs = [P(None, "d") if x.ndim == 2 else P() if x.shape == (ROWS,) else P("d") for x in args]
    assert_nothing_is_gathered(fn, args, specs, all_reduces + 1)


TOKENS, WIDTH = 768, 16
FEATURES, TARGET_FEATURES = (RNG.normal(size=(TOKENS, WIDTH)).astype(np.float32) for _ in range(2))
KERNEL, TARGET_KERNEL = (RNG.normal(size=(WIDTH, CLASSES)).astype(np.float32) / 4 for _ in range(2))
OF_TOKENS = LABELS[:TOKENS], ROWS_LEFT[:TOKENS]
LINEAR = {
    "cross-entropy": lambda f, k, y, m: losses.linear_softmax_cross_entropy(f, k, y, where=m),
    "log-probabilities": lambda f, k, y, _: sum(losses.linear_log_probs(f, k, y, with_entropy=True)),
    "divergence": losses.linear_kl_divergence,
}


@parametrize(
    ("name", "split"),
    [("cross-entropy", "classes")],
    exhaustive=[("cross-entropy", "tokens"), ("log-probabilities", "classes"), ("divergence", "tokens")],
)
def test_linear_losses(name, split):
    args = (FEATURES, KERNEL, *((TARGET_FEATURES, TARGET_KERNEL) if name == "divergence" else OF_TOKENS))
    of_tokens, of_classes = (P("d"), P()) if split == "tokens" else (P(), P(None, "d"))
    specs = [of_tokens if x.shape[0] == TOKENS else of_classes for x in args]
    assert_nothing_is_gathered(LINEAR[name], args, specs, 5 if split == "tokens" else 8)


TIMES = 160
QKV = tuple(RNG.normal(size=(4, TIMES, 4, 8)).astype(np.float32) for _ in range(3))
SEGMENTS = np.repeat(np.arange(4), TIMES // 4)[None].repeat(4, 0)
ATTENTION = {
    "causal": {"is_causal": True},
    "all": {},
    "lengths": {"key_value_seq_lengths": RNG.integers(1, TIMES, 4)},
    "segments": {"query_segment_ids": SEGMENTS, "key_value_segment_ids": SEGMENTS},
}


HEADS, BATCH = P(None, None, "d"), P("d")


@parametrize(
    ("name", "spec"), [("causal", HEADS)], exhaustive=[("all", BATCH), ("lengths", HEADS), ("segments", BATCH)], ids=str
)
def test_attention(name, spec):
    fn = functools.partial(masksafe.dot_product_attention, **ATTENTION[name])
    assert_nothing_is_gathered(fn, QKV, (spec,) * 3, 10, rtol=1e-3)
