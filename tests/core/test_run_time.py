"""No op reduces what is constant in the program, which XLA would do while it compiles: on one thread, with an alarm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from tiers import parametrize

import masksafe
from masksafe import losses
from masksafe._core import run_time

ROWS, CLASSES = 4096, 64
_RNG = np.random.default_rng(0)
X = jax.ShapeDtypeStruct((ROWS, CLASSES), "float32")
LABELS, SOFT = np.zeros(ROWS, np.int32), np.full((ROWS, CLASSES), 1 / CLASSES, np.float32)
MASK, SOME_ROWS = _RNG.random((ROWS, CLASSES)) < 0.5, _RNG.random(ROWS) < 0.5


def test_what_is_found():
    """A mask that is closed over is a constant in the program, and XLA computes `jnp.any` of it while it compiles."""
    (found,) = reductions_of_constants(lambda x: jnp.where(jnp.any(MASK, 1), x[:, 0], 0).sum(), X)
    assert "reduce_or" in found
    assert not reductions_of_constants(lambda x: jnp.where(run_time.any_of(MASK, 1), x[:, 0], 0).sum(), X)


# What in a program is constant, as XLA's folding of constants sees it.

_NOT, _ALIKE, _ARRAY = 0, 1, 2  # all elements of a constant are alike, as in a cotangent of ones, or they differ
_REDUCTIONS = {"reduce", "reduce_max", "reduce_min", "reduce_or", "reduce_and", "argmax", "argmin", "cumsum", "sort"}
_MANY = 2**12  # elements: what has fewer is folded at once


def _kind(x):
    return _ARRAY if np.ndim(x) else _ALIKE


def _subprograms(equation):
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else [value]:
            if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                yield getattr(part, "jaxpr", part), getattr(part, "consts", ())


def _find(program, consts, arguments, found):
    """Which results are constant, from which arguments are; and in `found` the reductions of many constants."""
    known = dict(zip(program.constvars, map(_kind, consts), strict=True))
    known |= dict(zip(program.invars, arguments, strict=True))

    def kinds(variables):
        return [_kind(x.val) if isinstance(x, core.Literal) else known.get(x, _NOT) for x in variables]

    of_platform = {x for e in program.eqns if e.primitive.name == "platform_index" for x in e.outvars}
    for equation in program.eqns:
        name, of_arguments = equation.primitive.name, kinds(equation.invars)
        kind = max(of_arguments, default=_ALIKE) if all(of_arguments) else _NOT
        if name == "dot_general" and not all(x.aval.size for x in equation.invars):  # a product of nothing is 0
            kind = _ALIKE
        results = [_NOT if name in ("iota", "optimization_barrier") else kind] * len(equation.outvars)
        is_sum = name == "reduce_sum" and kind == _ARRAY  # that of equal elements is a product
        if name in _REDUCTIONS or is_sum:
            size = max(x.aval.size for x in equation.invars)
            found += [str(equation)] * (kind != _NOT and size >= _MANY)
        elif name in ("scan", "while"):  # what a loop takes a part of, or carries, is not constant in it
            results = [_NOT] * len(equation.outvars)
        elif not name.startswith(("scatter", "reduce")):
            # Of the forms for platforms the first is that for a CPU.
            number = 1 if name == "cond" and equation.invars[0] in of_platform else None
            for part, of_part in list(_subprograms(equation))[:number]:
                if len(part.invars) <= len(of_arguments):
                    results = _find(part, of_part, of_arguments[len(of_arguments) - len(part.invars) :], found)
        known |= dict(zip(equation.outvars, results, strict=False))
    return kinds(program.outvars)


def reductions_of_constants(fn, *args):
    """The reductions of many constants in the value of `fn` and its gradient."""
    program, found = jax.make_jaxpr(jax.value_and_grad(fn))(*args), []
    _find(program.jaxpr, program.consts, [_NOT] * len(program.jaxpr.invars), found)
    return found


KERNEL = np.ones((CLASSES, 8), np.float32)
OF_TOKENS = {"where": SOME_ROWS, "weights": _RNG.random(ROWS), "class_weights": _RNG.random(8)}
LINEAR = {
    "linear_softmax_cross_entropy": lambda x, kernel: losses.linear_softmax_cross_entropy(x, kernel, LABELS[:256]),
    "linear_log_probs": lambda x, kernel: losses.linear_log_probs(x, kernel, LABELS[:256], with_entropy=True)[1],
    "linear_kl_divergence": lambda x, kernel: losses.linear_kl_divergence(x, kernel, x, kernel),
    "linear_kl_divergence_with_top_k_targets": lambda x, kernel: losses.linear_kl_divergence_with_top_k_targets(
        x, kernel, np.zeros((256, 1), np.float32), LABELS[:256, None]
    ),
}


def _of_width_0(fn, x):
    """The value and the gradients of a layer of no features, whose products are constants."""
    return fn(x[:256, :0], x[:0])


OPS = {
    "logsumexp": lambda x: masksafe.logsumexp(x, -1, where=MASK),
    "log_softmax": lambda x: masksafe.log_softmax(x, where=MASK),
    "softmax_cross_entropy": lambda x: losses.softmax_cross_entropy(x, SOFT, where=MASK),
    "integer labels": lambda x: losses.softmax_cross_entropy_with_integer_labels(x, LABELS, where=MASK),
    "log_probs": lambda x: losses.log_probs(x, LABELS, where=MASK),
    "kl_divergence": lambda x: losses.kl_divergence(x, SOFT, where=MASK),
    "multiclass_hinge_loss": lambda x: losses.multiclass_hinge_loss(x, LABELS, where=MASK),
    "dice_loss": lambda x: losses.dice_loss(x, SOFT, where=SOME_ROWS[:, None]),
    "linear with weights": lambda x: losses.linear_softmax_cross_entropy(x, KERNEL, LABELS, **OF_TOKENS),
    "linear of float16": lambda x: losses.linear_softmax_cross_entropy(
        x.astype("float16"), KERNEL.astype("float16"), LABELS, **OF_TOKENS
    ),
    **{f"{name} of width 0": functools.partial(_of_width_0, fn) for name, fn in LINEAR.items()},
    "layer_norm": lambda x: masksafe.layer_norm(x, where=MASK),
    "batch_norm": lambda x: masksafe.batch_norm(x, where=MASK)[0],
    "group_norm": lambda x: masksafe.group_norm(x, 8, where=MASK),
    "var": lambda x: masksafe.var(x, -1, where=MASK),
    "ntxent": lambda x: losses.ntxent(x, LABELS % 7, where=SOME_ROWS),
    "ntxent in one block": lambda x: losses.ntxent(x[:256], LABELS[:256] % 7, where=SOME_ROWS[:256]),
    "info_nce_loss": lambda x: losses.info_nce_loss(x, x[::-1], where=SOME_ROWS, ids=LABELS),
    "info_nce_loss in one block": lambda x: losses.info_nce_loss(x[:256], x[256:512], where=SOME_ROWS[:256]),
    "sigmoid_contrastive_loss": lambda x: losses.sigmoid_contrastive_loss(x[:256], x[256:512], ids=LABELS[:256]),
    "MaskedMean": lambda x: masksafe.MaskedMean.of(x, where=MASK).value,
    "MaskedMean by segment": lambda x: (
        masksafe.MaskedMean.of(x, where=MASK, by="segment", segment_ids=np.sort(_RNG.integers(0, 4, x.shape))).value
    ),
}


@parametrize("name", ["logsumexp"], exhaustive=OPS)
def test_a_mask_that_is_closed_over_is_not_reduced_by_the_compiler(name):
    assert not reductions_of_constants(lambda x: OPS[name](x).sum(), X)


LENGTHS, SEGMENTS = np.full(8, 100, np.int32), np.sort(_RNG.integers(0, 4, (8, 128)), 1).astype(np.int32)
ATTENTION = {
    "mask": {"mask": _RNG.random((8, 1, 128, 128)) < 0.5},
    "nothing": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (32, 0)},
    "lengths": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
    "segments": {"query_segment_ids": SEGMENTS, "key_value_segment_ids": SEGMENTS},
    "positions": {"is_causal": True, "query_positions": np.arange(128)[None], "key_positions": np.arange(128)[None]},
}


@parametrize("masked", ["mask"], exhaustive=ATTENTION)
def test_the_cotangent_of_a_sum_is_not_reduced_by_the_compiler(masked):
    attention = functools.partial(masksafe.dot_product_attention, **ATTENTION[masked])
    q = jax.ShapeDtypeStruct((8, 128, 4, 16), "float32")
    assert not reductions_of_constants(lambda qkv: attention(*qkv).sum(), (q, q, q))


@pytest.mark.exhaustive
@pytest.mark.optimised
def test_xla_prints_no_alarm(capfd):
    q = jax.ShapeDtypeStruct((32, 512, 16, 64), "float32")  # for a minute, if it was folded
    gradient = jax.grad(lambda q: masksafe.dot_product_attention(q, q, q).sum())
    jax.jit(gradient).lower(q).compile()
    mask = _RNG.random((32, 128, 4096)) < 0.5
    x = jax.ShapeDtypeStruct(mask.shape, "float32")
    jax.jit(jax.grad(lambda x: masksafe.logsumexp(x, -1, where=mask).sum())).lower(x).compile()
    assert "Constant folding" not in capfd.readouterr().err
