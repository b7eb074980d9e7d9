"""Every loss of optax: the same names, parameters, values, gradients and dtypes, and masks of lower rank."""

import functools
import inspect
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import parametrize

import masksafe

NAMES = sorted(name for name in dir(optax.losses) if not name.startswith("_"))
RNG = np.random.default_rng(0)
ROWS, CLASSES = 6, 4


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def probabilities(*shape):
    positive = np.exp(floats(*shape))
    return positive / positive.sum(-1, keepdims=True)


X, Y, P = floats(ROWS, CLASSES), floats(ROWS, CLASSES), probabilities(ROWS, CLASSES)
LABELS, BITS = RNG.integers(CLASSES, size=ROWS), RNG.random(X.shape) < 0.5
SIGNS = np.where(BITS, 1, -1).astype(np.float32)
PIXELS, TRUTH = floats(4, 1, 5, CLASSES), np.eye(CLASSES, dtype=np.float32)[RNG.integers(CLASSES, size=(4, 1, 5))]
FRAMES = np.arange(7) >= np.array([7, 5, 6, 0])[:, None]  # True is padding, as optax has it
LENGTHS = np.arange(3) >= np.array([3, 1, 2, 0])[:, None]
CTC = floats(4, 7, CLASSES), FRAMES.astype(np.float32), RNG.integers(1, CLASSES, (4, 3)), LENGTHS.astype(np.float32)


class Case(NamedTuple):
    """A call."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012


POLY = Case("poly_loss_cross_entropy", (X, P), {"epsilon": -1.0, "axis": 0})
CASES = [
    POLY,
    Case("poly_loss_cross_entropy", (X, P)),
    # Elementwise losses broadcast.
    Case("huber_loss", (X, Y[0])),
    Case("log_cosh", (X[0], Y)),
    Case("sigmoid_binary_cross_entropy", (X[:, :1], P[:1])),
    Case("sigmoid_focal_loss", (X[0], P)),
    Case("hinge_loss", (X[0, 0], SIGNS)),
    Case("sparsemax_loss", (X, BITS[:, :1].astype(np.int32))),
    Case("squared_error", (X, Y)),
    Case("squared_error", (X,)),
    Case("l2_loss", (X, Y)),
    Case("huber_loss", (3 * X, Y), {"delta": 0.7}),
    Case("huber_loss", (3 * X,)),
    Case("log_cosh", (X, Y)),
    Case("cosine_similarity", (X, Y), {"epsilon": 1e-3}),
    Case("cosine_similarity", (X, Y), {"axis": (0, 1)}),
    Case("cosine_distance", (X, Y)),
    Case("sigmoid_binary_cross_entropy", (X, P)),
    Case("sigmoid_binary_cross_entropy", (X, BITS)),
    Case("sigmoid_focal_loss", (X, P)),
    Case("sigmoid_focal_loss", (X, BITS), {"alpha": 0.3, "gamma": 1.5}),
    Case("hinge_loss", (X, SIGNS)),
    Case("perceptron_loss", (X, SIGNS)),
    Case("sparsemax_loss", (X, BITS.astype(np.int32))),
    Case("multiclass_hinge_loss", (X, LABELS)),
    Case("multiclass_perceptron_loss", (X, LABELS)),
    Case("multiclass_sparsemax_loss", (X, LABELS)),
    Case("softmax_cross_entropy", (X, P)),
    Case("softmax_cross_entropy", (X, P), {"axis": None}),
    Case("softmax_cross_entropy", (X[0], P)),
    Case("softmax_cross_entropy", (X.reshape(6, 1, 4), P[:3])),
    Case("safe_softmax_cross_entropy", (X, P)),
    Case("softmax_cross_entropy_with_integer_labels", (X, LABELS)),
    Case("softmax_cross_entropy_with_integer_labels", (X[:2, None], LABELS[None, :3])),
    Case("softmax_cross_entropy_with_integer_labels", (X[:1], LABELS)),
    Case("softmax_cross_entropy_with_integer_labels", (np.stack([X, Y, P]), 3 * LABELS), {"axis": (2, 0)}),
    Case("kl_divergence", (np.log(P), P[::-1].copy())),
    Case("kl_divergence", (np.log(P), P[::-1].copy()), {"axis": None}),
    Case("kl_divergence_with_log_targets", (np.log(P), np.log(P[::-1]))),
    Case("generalized_kl_divergence", (X, P)),
    Case("convex_kl_divergence", (X, P), {"axis": 0}),
    Case("ctc_loss", CTC),
    Case("ctc_loss_with_forward_probs", CTC, {"blank_id": 1}),
    Case("ranking_softmax_loss", (X, P)),
    Case("ranking_softmax_loss", (X, P), {"reduce_fn": None, "weights": np.abs(Y)}),
    Case("ranking_softmax_loss", (X, BITS.astype(np.int32)), {"reduce_fn": jnp.sum}),
    Case("smooth_labels", (P, 0.1)),
    Case("ntxent", (X, np.array([0, 1, 0, 1, 0, 1]))),
    Case("triplet_margin_loss", (X, Y, P), {"margin": 2.0}),
    Case("dice_loss", (PIXELS, TRUTH)),
    Case("dice_loss", (PIXELS, TRUTH), {"reduction": "none", "alpha": 0.3, "smooth": 0.5, "ignore_background": True}),
    Case("dice_loss", (PIXELS, TRUTH), {"reduction": "sum", "class_weights": np.float32([0, 1, 2, 3]), "axis": (1, 2)}),
    Case("dice_loss", (PIXELS[..., :1], TRUTH[..., 0])),
    Case("multiclass_generalized_dice_loss", (PIXELS, TRUTH)),
    Case("multiclass_generalized_dice_loss", (PIXELS, TRUTH), {"ignore_background": True}),
    Case("binary_dice_loss", (X, BITS)),
    Case("fenchel_young_loss", (X, P)),
]
OF_LABELS = {"multiclass_hinge_loss", "multiclass_perceptron_loss", "multiclass_sparsemax_loss", "ntxent"}
OF_LABELS |= {"ctc_loss", "ctc_loss_with_forward_probs", "softmax_cross_entropy_with_integer_labels"}


def loss_of(module, name):
    if name == "fenchel_young_loss":
        maximum = masksafe.logsumexp if module is masksafe.losses else jax.scipy.special.logsumexp
        return module.make_fenchel_young_loss(maximum)
    return getattr(module, name)


def of_both(case):
    """Our loss and that of optax."""
    return [functools.partial(loss_of(module, case.name), **case.kwargs) for module in (masksafe.losses, optax.losses)]


def value_and_gradients(loss, args):
    """The gradients are those by the arrays of floats, of a sum that tells the elements of the outputs apart."""
    numbers = [i for i, x in enumerate(args) if np.ndim(x) and jnp.issubdtype(x.dtype, jnp.floating)]

    def total(*floats):
        new = dict(zip(numbers, floats, strict=True))
        out = loss(*(new.get(i, x) for i, x in enumerate(args)))
        weights = (np.cos(np.arange(x.size)).reshape(x.shape).astype(x.dtype) for x in jax.tree.leaves(out))
        return sum(map(jnp.vdot, jax.tree.leaves(out), weights)), out

    gradients, out = jax.grad(total, range(len(numbers)), has_aux=True)(*(args[i] for i in numbers))
    return out, gradients


def test_every_name_has_a_case_and_the_parameters_of_optax():
    assert {case.name for case in CASES} == set(NAMES) - {"make_fenchel_young_loss"} | {"fenchel_young_loss"}
    for name in NAMES:
        expected = list(inspect.signature(getattr(optax.losses, name)).parameters.values())
        actual = list(inspect.signature(getattr(masksafe.losses, name)).parameters.values())
        for a, e in zip(actual, expected, strict=False):
            assert (a.name, a.kind, a.default) == (e.name, e.kind, e.default)
        added = actual[len(expected) :]
        assert [p.kind for p in added] == [inspect.Parameter.KEYWORD_ONLY] * len(added)
        of_labels = ["axis_name", "label_smoothing", "z_loss", "with_components", "class_weights"]
        assert [p.name for p in added] in ([], ["where"], of_labels)


def assert_as_optax(name, actual, expected):
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    if "forward_probs" in name:  # what optax has behind the labels depends on what is in their padding
        actual, expected = ((x[0], x[1][..., :2], x[2][..., :1]) for x in (actual, expected))
    chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The function convex_kl")
@parametrize("case", [POLY], exhaustive=CASES, ids=lambda case: case.name)
def test_values_and_gradients_are_those_of_optax(case):
    both = jax.jit(lambda *args: [value_and_gradients(loss, args) for loss in of_both(case)])
    (actual, gradients), (expected, expected_gradients) = both(*case.args)
    assert_as_optax(case.name, actual, expected)
    if "forward_probs" in case.name:
        return
    if "ctc" in case.name:  # optax has gradients for paddings, which are flags
        gradients, expected_gradients = gradients[:1], expected_gradients[:1]
    chex.assert_trees_all_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


TYPES = {
    "float32": lambda x: jnp.asarray(x, "float32"),
    "bfloat16": lambda x: jnp.asarray(x, "bfloat16"),
    "float16": lambda x: jnp.asarray(x, "float16"),
    "weak float": lambda x: jnp.full(np.shape(x), 0.5),
    "number": lambda x: 0.5,
    "int32": lambda x: jnp.asarray(x, "int32"),
    "weak int": lambda x: jnp.full(np.shape(x), 1),
    "bool": lambda x: jnp.asarray(x) != 0,
}
# Frames and labels of CTC, and labels of which optax takes integers only, have no other types.
TYPED = {case.name: [i for i in range(2) if i < len(case.args)] for case in reversed(CASES)}
TYPED |= {name: [0] for name in TYPED if name in OF_LABELS}
del TYPED["fenchel_young_loss"]  # there the function that is given has its say


def type_of_result(loss, args):
    """The shape and type of the result, or the error; Python numbers among the arguments stay what they are."""
    arrays = [x for x in args if isinstance(x, jax.Array)]

    def of_arrays(*arrays):
        rest = iter(arrays)
        return loss(*(next(rest) if isinstance(x, jax.Array) else x for x in args))

    try:
        return [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(jax.eval_shape(of_arrays, *arrays))]
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        return error


def pairs_of_types(turn):
    """Each type with two others: with a number of losses all pairs."""
    names = [*TYPES]
    return [(name, names[(i + turn + step) % len(names)]) for step in (0, 3) for i, name in enumerate(names)]


@pytest.mark.filterwarnings("ignore")  # those of optax
@parametrize("of_all", [False], exhaustive=[True], ids=["two types", "all types"])
def test_types_promote_as_in_optax(of_all):
    for turn, (name, typed) in enumerate(TYPED.items()):
        case, compared, least = next(case for case in CASES if case.name == name), 0, 3 if of_all else 1
        pairs = pairs_of_types(turn) if of_all else [("bfloat16", "float32")]
        for kinds in dict.fromkeys(kinds[: len(typed)] for kinds in pairs):
            args = [x if isinstance(x, float) else jnp.asarray(x) for x in case.args]
            for i, kind in zip(typed, kinds, strict=True):
                args[i] = TYPES[kind](case.args[i])
            actual, expected = (type_of_result(loss, args) for loss in of_both(case))
            if isinstance(actual, Exception):  # what optax takes and we refuse, we refuse by name
                assert isinstance(expected, Exception) or f"{name}: " in str(actual), kinds
            elif not isinstance(expected, Exception):
                assert actual == expected, (name, kinds)
                compared += 1
        assert compared >= least, name


ROWS_FIRST = ["softmax_cross_entropy", "softmax_cross_entropy_with_integer_labels", "poly_loss_cross_entropy"]
ROWS_FIRST += ["multiclass_hinge_loss", "multiclass_perceptron_loss", "multiclass_sparsemax_loss"]
ROWS_FIRST += ["triplet_margin_loss", "binary_dice_loss"]
COLUMNS = ["kl_divergence", "kl_divergence_with_log_targets", "generalized_kl_divergence", "cosine_similarity"]
COLUMNS += ["cosine_distance", "convex_kl_divergence"]


@parametrize("name", ["softmax_cross_entropy"], exhaustive=[*ROWS_FIRST, *COLUMNS])
def test_a_mask_of_lower_rank_is_of_rows_or_as_numpy_has_it(name):
    scores, mask = np.float32([[0.5, 0.25], [0.75, 0.5]]), np.array([True, False])
    others = [np.array([0, 1])] if name in OF_LABELS else [scores[::-1], 2 * scores][: 1 + ("triplet" in name)]
    masks = mask, np.broadcast_to(mask[:, None] if name in ROWS_FIRST else mask[None], (2, 2))
    both = jax.jit(lambda scores: [getattr(masksafe.losses, name)(scores, *others, where=where) for where in masks])
    np.testing.assert_allclose(*both(scores), rtol=1e-6)
