"""Ops on arrays split over eight H100s, or four TPUs, exchange what the mathematics needs, and gather nothing.

Every program is compiled for an automatic mesh, whose arguments say how they are split, and for explicit axes.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from measure import with_gradient
from programs import compile_for, devices

import masksafe
from masksafe import losses

pytestmark = pytest.mark.optimised

NUMBERS = {"h100": 8, "v5e": 4}  # of devices
TOKENS, CLASSES, WIDTH = 8192, 32768, 1024
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
BY_ROW, ROWS, COLUMNS = P("d"), P("d", None), P(None, "d")


@dataclass(frozen=True)
class Split:
    """A function of arrays split over the devices, and how many sums or maxima over them it may take."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]  # shape, dtype, how it is split
    all_reduces: int = 0
    of: int = 0  # with the gradient by so many arguments
    out: Any = BY_ROW  # how the result is split, and its cotangent

    def step(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if not self.of:
            return self.fn, self.args
        result = jax.eval_shape(self.fn, *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in self.args))
        return with_gradient(self.fn, self.of), ((result.shape, result.dtype, self.out), *self.args)


gradient = functools.partial(Split, of=1)


def pair(split: P, dtype: Any = jnp.float32, classes: int = CLASSES) -> tuple[Any, ...]:
    """Logits, and integer labels of the same rows."""
    return ((TOKENS, classes), dtype, split), ((TOKENS,), jnp.int32, P(split[0]))


def alike(number: int, split: P = ROWS, shape: tuple[int, ...] = (TOKENS, WIDTH)) -> tuple[Any, ...]:
    return ((shape, jnp.float32, split),) * number


def mean_over_rows(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: masksafe.mean(fn(*args))


INTEGER, SOFT = losses.softmax_cross_entropy_with_integer_labels, losses.softmax_cross_entropy
LINEAR = jax.value_and_grad(losses.linear_softmax_cross_entropy, (0, 1))
PARAMETERS = (((WIDTH,), jnp.float32, P(None)),) * 2
ATTENTION = ((8, 1024, 8, 64), jnp.bfloat16)
MASK = (((TOKENS, WIDTH), bool, ROWS),)
CAUSAL = functools.partial(masksafe.dot_product_attention, is_causal=True)


def linear(tokens: P, kernel: P) -> tuple[Any, ...]:
    features, labels = ((TOKENS, WIDTH), jnp.bfloat16, P(*tokens, None)), ((TOKENS,), jnp.int32, tokens)
    return features, ((WIDTH, CLASSES), jnp.bfloat16, kernel), labels


def attended(split: P) -> tuple[Any, ...]:
    return ((*ATTENTION, split),) * 3


SPLITS = [
    # Rows are independent: nothing is exchanged, but for a mean and for parameters that they share.
    Split("integer, rows, value", INTEGER, pair(ROWS)),
    gradient("integer, rows", INTEGER, pair(ROWS)),
    Split("integer, rows, mean", jax.value_and_grad(mean_over_rows(INTEGER)), pair(ROWS), 1),
    gradient("one-hot, rows", SOFT, alike(2)),
    gradient("softmax, rows", masksafe.softmax, alike(1), out=ROWS),
    gradient("softmax, rows, mask", lambda x, where: masksafe.softmax(x, where=where), alike(1) + MASK, out=ROWS),
    Split("layer norm, rows, value", masksafe.layer_norm, alike(1) + PARAMETERS),
    gradient("layer norm, rows", masksafe.layer_norm, alike(1) + PARAMETERS, 1, of=3, out=ROWS),
    gradient("RMS norm, rows", masksafe.rms_norm, alike(1) + PARAMETERS[:1], 1, of=2, out=ROWS),
    Split("mean, rows", functools.partial(masksafe.mean, axis=-1), alike(1)),
    Split("variance of all", masksafe.var, alike(1), 3),
    Split("attention, batch, value", masksafe.dot_product_attention, attended(P("d"))),
    gradient("attention, batch", masksafe.dot_product_attention, attended(P("d")), of=3),
    gradient("attention, batch, causal", CAUSAL, attended(P("d")), of=3),
    gradient(
        "attention, heads", masksafe.dot_product_attention, attended(P(None, None, "d")), of=3, out=P(None, None, "d")
    ),
    Split("linear, tokens", LINEAR, linear(P("d"), P(None, None)), 2),
    gradient("sigmoid", losses.sigmoid_binary_cross_entropy, alike(2), out=ROWS),
    gradient("KL divergence", losses.kl_divergence, alike(2)),
    gradient("cosine", losses.cosine_similarity, alike(2)),
    gradient("poly loss", losses.poly_loss_cross_entropy, alike(2)),
    gradient("hinge of classes", losses.multiclass_hinge_loss, pair(ROWS, classes=WIDTH)),
    gradient("triplets", losses.triplet_margin_loss, alike(3), of=3),
    gradient("dice", losses.dice_loss, alike(2, P("d"), (8, TOKENS, 8))),
    gradient("Fenchel-Young", losses.make_fenchel_young_loss(jax.nn.logsumexp), alike(2)),
    # Classes split: the maximum, the sum, and what the label holds.
    Split("integer, classes, value", INTEGER, pair(COLUMNS), 3),
    gradient("integer, classes", INTEGER, pair(COLUMNS), 3, out=P(None)),
    gradient("one-hot, classes", SOFT, alike(2, COLUMNS), 4, out=P(None)),
    gradient("softmax, classes", masksafe.softmax, alike(1, COLUMNS), 3, out=COLUMNS),
    gradient("log softmax, classes", masksafe.log_softmax, alike(1, COLUMNS), 3, out=COLUMNS),
    Split("linear, classes", LINEAR, linear(P(None), COLUMNS), 4),
]


def mesh_of(target, kind):
    return Mesh(np.array(devices(target, NUMBERS[target])), ("d",), axis_types=(kind,))


def compiled_for_many(target, kind, fn, args):
    mesh = mesh_of(target, kind)
    shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, split)) for shape, dtype, split in args]
    if kind == AUTO:
        return compile_for(target, fn, *shapes)
    with jax.set_mesh(mesh):
        return compile_for(target, fn, *shapes)


# On an explicit mesh the type of an array says how it is split. These splits change the types most.
EXPLICIT_TOO = {
    "integer, rows, mean",
    "layer norm, rows",
    "attention, heads",
    "one-hot, classes",
    "softmax, classes",
    "linear, classes",
}


def named(target, split, kind):
    """Parameters; to save time most explicit meshes, and attention on TPUs, are compiled with `-m exhaustive` alone."""
    is_form = kind == EXPLICIT and (target == "v5e" or split.name not in EXPLICIT_TOO)
    is_form |= target == "v5e" and split.name.startswith("attention")
    name = f"{target}, {split.name}, {kind.name}".replace(", ", "-").replace(" ", "_")
    return pytest.param(target, split, kind, id=name, marks=[pytest.mark.exhaustive] * is_form)


@pytest.mark.parametrize(
    ("target", "split", "kind"),
    [named(target, split, kind) for target in NUMBERS for split in SPLITS for kind in (AUTO, EXPLICIT)],
    indirect=["target"],
)
def test_only_what_is_needed_is_exchanged(target, split, kind):
    program = compiled_for_many(target, kind, *split.step())
    jax.clear_caches()
    assert set(program.collectives) <= {"all-reduce"}, program.exchanges
    assert program.collectives.get("all-reduce", 0) <= split.all_reduces, program.exchanges


def in_shard_map(mesh, fn, args, out):
    """The function inside `jax.shard_map`, whose axis it is told."""
    specs = tuple(split for _, _, split in args)
    return jax.shard_map(functools.partial(fn, axis_name="d"), mesh=mesh, in_specs=specs, out_specs=out)


def linear_gradient(features, kernel, labels, axis_name):
    loss = functools.partial(losses.linear_softmax_cross_entropy, axis_name=axis_name)
    return jax.value_and_grad(loss, (0, 1))(features, kernel, labels)


def sum_of_losses(logits, labels, axis_name):
    return jnp.sum(INTEGER(logits, labels, axis_name=axis_name))


@pytest.mark.parametrize(
    ("fn", "args", "out", "all_reduces"),
    [
        pytest.param(INTEGER, pair(COLUMNS), P(None), 4, id="integer, value"),
        pytest.param(jax.value_and_grad(sum_of_losses), pair(COLUMNS), (P(), COLUMNS), 5, id="integer"),
        pytest.param(linear_gradient, linear(P(None), COLUMNS), (P(), (P(None, None), COLUMNS)), 7, id="linear"),
    ],
)
def test_in_shard_map_only_what_is_needed_is_exchanged(target, fn, args, out, all_reduces):
    split = in_shard_map(mesh_of(target, AUTO), fn, args, out)
    program = compiled_for_many(target, AUTO, jax.jit(split), args)
    assert set(program.collectives) <= {"all-reduce"}, program.exchanges
    assert program.collectives["all-reduce"] <= all_reduces, program.exchanges
