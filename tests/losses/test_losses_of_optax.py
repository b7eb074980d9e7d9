"""Every loss of optax: the same names, parameters, values and dtypes, and the contract of masked elements."""

import contextlib
import functools
import inspect
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import masksafe
from masksafe.testing import assert_consistent, assert_mask_safe

NAMES = sorted(name for name in dir(optax.losses) if not name.startswith("_"))
RNG = np.random.default_rng(0)
ROWS, CLASSES = 5, 4


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def probabilities(*shape):
    return np.asarray(jax.nn.softmax(floats(*shape)))


X, Y, P = floats(ROWS, CLASSES), floats(ROWS, CLASSES), probabilities(ROWS, CLASSES)
LABELS, BITS = RNG.integers(CLASSES, size=ROWS), RNG.random(X.shape) < 0.5
SIGNS = np.where(BITS, 1, -1).astype(np.float32)
PIXELS, TRUTH = floats(3, 2, 5, CLASSES), np.eye(CLASSES, dtype=np.float32)[RNG.integers(CLASSES, size=(3, 2, 5))]
FRAMES = np.arange(7) >= np.array([7, 5, 6, 0])[:, None]  # True is padding, as optax has it
LENGTHS = np.arange(3) >= np.array([3, 1, 2, 0])[:, None]
CTC = floats(4, 7, CLASSES), FRAMES.astype(np.float32), RNG.integers(1, CLASSES, (4, 3)), LENGTHS.astype(np.float32)

ELEMENTS = RNG.random((ROWS, CLASSES)) < 0.6
ELEMENTS[1], ELEMENTS[2] = False, True
ELEMENTS[0, LABELS[0]] = ELEMENTS[3, LABELS[3]] = ELEMENTS[4, LABELS[4]] = True
SOME_ROWS = np.array([True, False, True, True, False])


class Case(NamedTuple):
    """A call on clean input, and how it may be masked."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012
    masks: tuple[np.ndarray, ...] = ()
    maskable: tuple[int, ...] = (0, 1)  # the arguments that the mask covers


BOTH = ELEMENTS, SOME_ROWS
AS_ROWS = ELEMENTS, SOME_ROWS[:, None]
CASES = [
    Case("squared_error", (X, Y), masks=(ELEMENTS,)),
    Case("squared_error", (X,), masks=(ELEMENTS,), maskable=(0,)),
    Case("l2_loss", (X, Y), masks=(ELEMENTS,)),
    Case("huber_loss", (3 * X, Y), {"delta": 0.7}, masks=(ELEMENTS,)),
    Case("huber_loss", (3 * X,), masks=(ELEMENTS,), maskable=(0,)),
    Case("log_cosh", (X, Y), masks=(ELEMENTS,)),
    Case("cosine_similarity", (X, Y), {"epsilon": 1e-3}, masks=AS_ROWS),
    Case("cosine_similarity", (X, Y), {"axis": (0, 1)}, masks=(ELEMENTS,)),
    Case("cosine_distance", (X, Y), masks=AS_ROWS),
    Case("sigmoid_binary_cross_entropy", (X, BITS), masks=(ELEMENTS,), maskable=(0,)),
    Case("sigmoid_binary_cross_entropy", (X, P), masks=(ELEMENTS,)),
    Case("sigmoid_focal_loss", (X, P), masks=(ELEMENTS,)),
    Case("sigmoid_focal_loss", (X, BITS), {"alpha": 0.3, "gamma": 1.5}, masks=(ELEMENTS,)),
    Case("hinge_loss", (X, SIGNS), masks=(ELEMENTS,)),
    Case("perceptron_loss", (X, SIGNS), masks=(ELEMENTS,)),
    Case("sparsemax_loss", (X, BITS.astype(np.int32)), masks=(ELEMENTS,)),
    Case("multiclass_hinge_loss", (X, LABELS), masks=BOTH),
    Case("multiclass_perceptron_loss", (X, LABELS), masks=BOTH),
    Case("multiclass_sparsemax_loss", (X, LABELS), masks=BOTH),
    Case("softmax_cross_entropy", (X, P), masks=BOTH),
    Case("safe_softmax_cross_entropy", (X, P)),
    Case("softmax_cross_entropy_with_integer_labels", (X, LABELS), masks=BOTH),
    Case("poly_loss_cross_entropy", (X, P), masks=BOTH),
    Case("poly_loss_cross_entropy", (X, P), {"epsilon": -1.0, "axis": 0}, masks=(ELEMENTS,)),
    Case("kl_divergence", (np.log(P), P[::-1].copy()), masks=AS_ROWS),
    Case("kl_divergence", (np.log(P), P[::-1].copy()), {"axis": None}, masks=(ELEMENTS,)),
    Case("kl_divergence_with_log_targets", (np.log(P), np.log(P[::-1])), masks=AS_ROWS),
    Case("generalized_kl_divergence", (X, P), masks=AS_ROWS),
    Case("convex_kl_divergence", (X, P), {"axis": 0}, masks=(ELEMENTS,)),
    Case("ctc_loss", CTC, masks=(np.array([True, True, False, True]),), maskable=(0, 2)),
    Case("ctc_loss_with_forward_probs", CTC, {"blank_id": 1}),
    Case("ranking_softmax_loss", (X, P), masks=AS_ROWS),
    Case("ranking_softmax_loss", (X, P), {"reduce_fn": None, "weights": np.abs(Y)}, masks=AS_ROWS),
    Case("ranking_softmax_loss", (X, BITS.astype(np.int32)), {"reduce_fn": jnp.sum}, masks=AS_ROWS),
    Case("smooth_labels", (P, 0.1), masks=AS_ROWS, maskable=(0,)),
    Case("ntxent", (X, np.array([0, 1, 0, 1, 0])), masks=(np.array([True, True, True, True, False]),)),
    Case("triplet_margin_loss", (X, Y, P), {"margin": 2.0}, masks=BOTH, maskable=(0, 1, 2)),
    Case("dice_loss", (PIXELS, TRUTH), masks=(RNG.random((3, 2, 5, 1)) < 0.7, RNG.random(PIXELS.shape) < 0.7)),
    Case("dice_loss", (PIXELS, TRUTH), {"reduction": "none", "alpha": 0.3, "smooth": 0.5, "ignore_background": True}),
    Case("dice_loss", (PIXELS, TRUTH), {"reduction": "sum", "class_weights": np.arange(4.0), "axis": (1, 2)}),
    Case("dice_loss", (PIXELS[..., :1], TRUTH[..., 0]), masks=(np.array([True, False, True]),)),
    Case("multiclass_generalized_dice_loss", (PIXELS, TRUTH), masks=(RNG.random((3, 2, 5, 1)) < 0.7,)),
    Case("multiclass_generalized_dice_loss", (PIXELS, TRUTH), {"ignore_background": True}),
    Case("binary_dice_loss", (X, BITS), masks=(ELEMENTS, SOME_ROWS), maskable=(0,)),
]
OF_LABELS = {"multiclass_hinge_loss", "multiclass_perceptron_loss", "multiclass_sparsemax_loss", "ntxent"}
OF_LABELS |= {"ctc_loss", "ctc_loss_with_forward_probs", "softmax_cross_entropy_with_integer_labels"}
IDS = [f"{case.name}-{i}" for i, case in enumerate(CASES)]
MASKED = [(case, mask) for case in CASES for mask in case.masks]
MASKED_IDS = [f"{case.name}-rank {mask.ndim}-{i}" for i, (case, mask) in enumerate(MASKED)]


def ours(case, **kwargs):
    return functools.partial(getattr(masksafe.losses, case.name), **case.kwargs, **kwargs)


def theirs(case):
    return functools.partial(getattr(optax.losses, case.name), **case.kwargs)


def expanded(mask, x):
    """The mask at the rank of an argument: one of the loss's rank masks rows of it, one of labels less the classes."""
    x = np.asarray(x)
    if mask.ndim > x.ndim:
        return mask.any(tuple(range(x.ndim, mask.ndim)))
    return np.broadcast_to(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x.shape)


def floats_of(args):
    return [i for i, x in enumerate(args) if np.issubdtype(np.asarray(x).dtype, np.floating)]


# As optax has it.


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_the_parameters_of_optax(name):
    expected = list(inspect.signature(getattr(optax.losses, name)).parameters.values())
    actual = list(inspect.signature(getattr(masksafe.losses, name)).parameters.values())
    for a, e in zip(actual, expected, strict=False):
        assert (a.name, a.kind, a.default) == (e.name, e.kind, e.default)
    added = actual[len(expected) :]
    assert [p.kind for p in added] == [inspect.Parameter.KEYWORD_ONLY] * len(added)
    assert [p.name for p in added] in ([], ["where"], ["axis_name"])


def test_every_name_has_a_case():
    assert {case.name for case in CASES} == set(NAMES) - {"make_fenchel_young_loss"}


@pytest.mark.filterwarnings("ignore:The function convex_kl")
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_values_and_gradients_are_those_of_optax(case):
    args, numbers = [jnp.asarray(x) for x in case.args], floats_of(case.args)

    def value_and_gradients(loss):
        def total(*moving):
            new = dict(zip(numbers, moving, strict=True))
            out = loss(*(new.get(i, x) for i, x in enumerate(args)))
            return sum(jnp.vdot(jnp.cos(jnp.arange(x.size)), x) for x in jax.tree.leaves(out)), out

        return jax.value_and_grad(total, range(len(numbers)), has_aux=True)(*(args[i] for i in numbers))

    (_, actual), gradients = value_and_gradients(ours(case))
    (_, expected), expected_gradients = value_and_gradients(theirs(case))
    if "forward_probs" in case.name:  # what optax has behind the labels depends on what is in their padding
        np.testing.assert_allclose(actual[0], expected[0], rtol=2e-5)
        np.testing.assert_allclose(actual[1][..., :2], expected[1][..., :2], rtol=2e-5)
        np.testing.assert_allclose(actual[2][..., :1], expected[2][..., :1], rtol=2e-5)
        return
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-5)
    if "ctc" in case.name:  # optax has gradients for paddings, which are flags
        gradients, expected_gradients = gradients[:1], expected_gradients[:1]
    for a, e in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The function convex_kl")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_dtypes_are_those_of_optax(case, dtype):
    args = list(case.args)
    args[0] = jnp.asarray(args[0], dtype)
    actual, expected = (jax.eval_shape(loss(case), *args) for loss in (ours, theirs))
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)


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


def type_of_result(loss, args):
    """The dtype and weak type of the result, or the error; Python numbers among the arguments stay what they are."""
    arrays = [x for x in args if isinstance(x, jax.Array)]

    def of_arrays(*arrays):
        rest = iter(arrays)
        return loss(*(next(rest) if isinstance(x, jax.Array) else x for x in args))

    try:
        return [(x.dtype, x.weak_type) for x in jax.tree.leaves(jax.eval_shape(of_arrays, *arrays))]
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        return error


@pytest.mark.filterwarnings("ignore")  # those of optax
@pytest.mark.parametrize("name", TYPED)
def test_types_that_are_weak_or_mixed_promote_as_in_optax(name):
    case, compared = next(case for case in CASES if case.name == name), 0
    for kinds in itertools.product(TYPES, repeat=len(TYPED[name])):
        args = [x if isinstance(x, float) else jnp.asarray(x) for x in case.args]
        for i, kind in zip(TYPED[name], kinds, strict=True):
            args[i] = TYPES[kind](case.args[i])
        actual, expected = (type_of_result(loss(case), args) for loss in (ours, theirs))
        if isinstance(actual, Exception):  # what optax takes and we refuse, we refuse by name
            assert isinstance(expected, Exception) or f"{name}: " in str(actual), kinds
        elif not isinstance(expected, Exception):
            assert actual == expected, kinds
            compared += 1
    assert compared >= 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_narrow_floats_are_rounded_once(case, dtype):
    def narrow(x):
        x = jnp.asarray(x)
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    args = [narrow(x) for x in case.args]
    wide = [x.astype("float32") if x.dtype == dtype else x for x in args]
    actual, expected = (jax.tree.leaves(ours(case)(*a)) for a in (args, wide))
    for a, e in zip(actual, expected, strict=True):
        a, e = np.float64(a), np.float64(e.astype(a.dtype))
        np.testing.assert_allclose(a, e, rtol=2 * float(jnp.finfo(dtype).eps), atol=1e-6)


ELEMENTWISE = ["huber_loss", "log_cosh", "sigmoid_binary_cross_entropy", "sigmoid_focal_loss", "hinge_loss"]
ELEMENTWISE += ["sparsemax_loss"]
PAIRS_OF_SHAPES = [((3, 4), (4,)), ((4,), (3, 4)), ((2, 2), (2,)), ((), (3, 4)), ((3, 1), (1, 4))]


@pytest.mark.parametrize("shapes", PAIRS_OF_SHAPES, ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_arguments_broadcast_as_those_of_optax(name, shapes):
    scores, targets = (np.asarray(RNG.normal(size=shape), np.float32) for shape in shapes)
    targets = np.where(targets > 0, 1, -1 if name == "hinge_loss" else 0).astype(np.float32)
    for mask in ({}, {"where": np.ones(np.broadcast_shapes(*shapes), bool)}):
        actual = getattr(masksafe.losses, name)(scores, targets, **mask)
        np.testing.assert_allclose(actual, getattr(optax.losses, name)(scores, targets), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_strict_promotion(case):
    def same(x):
        x = jnp.asarray(x)
        return x if jnp.issubdtype(x.dtype, jnp.floating) or case.name in OF_LABELS else x.astype("float32")

    args = [same(x) for x in case.args]
    kwargs = {name: jnp.asarray(x, "float32") if isinstance(x, np.ndarray) else x for name, x in case.kwargs.items()}
    loss = getattr(masksafe.losses, case.name)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for mask in ({}, *({"where": mask} for mask in case.masks)):
            total = lambda x, mask=mask: jnp.sum(jax.tree.leaves(loss(x, *args[1:], **kwargs, **mask))[0])  # noqa: E731
            jax.grad(total)(args[0])


ROWS_FIRST = ["softmax_cross_entropy", "softmax_cross_entropy_with_integer_labels", "poly_loss_cross_entropy"]
COLUMNS = ["kl_divergence", "kl_divergence_with_log_targets", "generalized_kl_divergence", "cosine_similarity"]
COLUMNS += ["cosine_distance", "convex_kl_divergence"]


@pytest.mark.parametrize("name", [*ROWS_FIRST, *COLUMNS])
def test_a_mask_of_lower_rank_is_of_rows_or_as_numpy_has_it(name):
    scores, mask = jnp.array([[0.5, 0.25], [0.75, 0.5]]), np.array([True, False])
    labels = jnp.array([0, 1]) if "integer" in name else scores[::-1]
    loss = getattr(masksafe.losses, name)
    same = mask[:, None] if name in ROWS_FIRST else mask[None]
    actual, expected = (loss(scores, labels, where=where) for where in (mask, np.broadcast_to(same, (2, 2))))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["squared_error", "l2_loss", "huber_loss", "hinge_loss", "sigmoid_focal_loss"])
def test_an_elementwise_loss_refuses_a_mask_of_lower_rank_and_says_how_to_write_it(name):
    with pytest.raises(ValueError, match=rf"{name}: where: .* leading axes write where\[\.\.\., None\]\.$"):
        getattr(masksafe.losses, name)(jnp.zeros((2, 2)), jnp.ones((2, 2)), where=np.array([True, False]))


# On more than one device.


class Call(NamedTuple):
    """A loss of arrays that may be split over devices along their first axis."""

    loss: Any
    args: tuple[Any, ...]
    masks: tuple[np.ndarray, ...] = ()


def even(x):
    """What of an array can be split in two."""
    x = np.asarray(x)
    return x[: len(x) // 2 * 2] if x.ndim else x


CALLS = {
    case.name: Call(getattr(masksafe.losses, case.name), tuple(map(even, case.args)), tuple(map(even, case.masks)))
    for case in reversed(CASES)
    if not any(isinstance(x, np.ndarray) for x in case.kwargs.values())
}
LINEAR = masksafe.losses.linear_softmax_cross_entropy
CALLS["linear_softmax_cross_entropy"] = Call(
    lambda x, labels, **kwargs: LINEAR(x, jnp.ones((CLASSES, 3)), labels, **kwargs), (even(X), even(LABELS) % 3)
)
CALLS["fenchel_young_loss"] = Call(masksafe.losses.make_fenchel_young_loss(masksafe.logsumexp), (even(X), even(P)))


def value_and_gradients(loss, args, **kwargs):
    numbers = [i for i, x in enumerate(args) if x.ndim and jnp.issubdtype(x.dtype, jnp.floating)]

    def total(*moving):
        new = dict(zip(numbers, moving, strict=True))
        out = loss(*(new.get(i, x) for i, x in enumerate(args)), **kwargs)
        return sum(map(jnp.sum, jax.tree.leaves(out))), out

    return jax.value_and_grad(total, range(len(numbers)), has_aux=True)(*(args[i] for i in numbers))


@functools.cache
def on_one_device(name):
    call = CALLS[name]
    return jax.jit(functools.partial(value_and_gradients, call.loss))([jnp.asarray(x) for x in call.args])


def on_devices(x):
    return jax.device_put(x, PartitionSpec("data", *[None] * (x.ndim - 1))) if x.ndim else jnp.asarray(x)


def test_every_public_loss_is_called():
    assert set(CALLS) == set(NAMES) - {"make_fenchel_young_loss"} | {
        "linear_softmax_cross_entropy",
        "fenchel_young_loss",
    }


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_batch_split_over_devices(name, kind):
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(kind,))):
        args = [on_devices(x) for x in CALLS[name].args]
        actual = jax.jit(functools.partial(value_and_gradients, CALLS[name].loss))(args)
        for x, like in zip(
            actual[1], [x for x in args if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim], strict=True
        ):
            assert jax.typeof(x).sharding.spec == jax.typeof(like).sharding.spec
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(on_one_device(name)), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("split", [("scores",), ("scores", "labels"), ("scores", "labels", "where")], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_labels_and_masks_that_are_split_or_are_not(name, split):
    call = CALLS[name]
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))):
        first, *others = map(jnp.asarray, call.args)
        args = [on_devices(first), *(on_devices(x) if "labels" in split else x for x in others)]
        for mask in ({}, *({"where": on_devices(x) if "where" in split else jnp.asarray(x)} for x in call.masks)):
            _, gradients = jax.eval_shape(functools.partial(value_and_gradients, call.loss), args, **mask)
            assert gradients[0].shape == first.shape


@pytest.mark.parametrize("name", CALLS)
def test_losses_and_gradients_trace_under_strict_promotion(name):
    call = CALLS[name]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        args = [jnp.asarray(x) for x in call.args]
        for mask in ({}, *({"where": jnp.asarray(x)} for x in call.masks)):
            for context in (contextlib.nullcontext, masksafe.forward_mode):
                with context():
                    assert jax.make_jaxpr(functools.partial(value_and_gradients, call.loss))(args, **mask).eqns


# The contract.


@pytest.mark.parametrize(("case", "mask"), MASKED, ids=MASKED_IDS)
def test_masked_elements_are_gone(case, mask):
    masked = {i: ~expanded(mask, case.args[i]) for i in case.maskable}
    masked = {i: hidden for i, hidden in masked.items() if hidden.any()}
    garbage = None if len(case.args) < 4 else [np.nan, 1e30]
    args = [jnp.asarray(x) for x in case.args]
    assert_mask_safe(ours(case, where=mask), *args, masked=masked, transforms=("jit",), garbage=garbage)


@pytest.mark.parametrize(("case", "mask"), MASKED, ids=MASKED_IDS)
def test_nothing_left_is_zero(case, mask):
    args, numbers = [jnp.asarray(x) for x in case.args], floats_of(case.args)
    hidden = [jnp.full_like(x, jnp.nan) if i in numbers and i in case.maskable else x for i, x in enumerate(args)]

    def total(*moving):
        new = dict(zip(numbers, moving, strict=True))
        out = ours(case, where=np.zeros_like(mask))(*(new.get(i, x) for i, x in enumerate(hidden)))
        return jnp.sum(jnp.cos(out) - 1 + out), out

    gradients, out = jax.grad(total, range(len(numbers)), has_aux=True)(*(hidden[i] for i in numbers))
    for x in (out, *gradients):
        np.testing.assert_array_equal(x, 0)


def removed(case, mask):
    """The arguments without the masked rows."""
    return [np.asarray(x)[mask] if np.ndim(x) else x for x in case.args]


ROW_MASKED = [(case, SOME_ROWS) for case in CASES if any(m is SOME_ROWS for m in case.masks)]


@pytest.mark.parametrize(("case", "mask"), ROW_MASKED, ids=[case.name for case, _ in ROW_MASKED])
def test_masking_rows_is_taking_them_out(case, mask):
    actual = ours(case, where=mask)(*case.args)
    np.testing.assert_allclose(actual[mask], ours(case)(*removed(case, mask)), rtol=1e-6)
    np.testing.assert_array_equal(actual[~mask], 0)


BY_CLASS = ["multiclass_hinge_loss", "multiclass_perceptron_loss", "multiclass_sparsemax_loss", "triplet_margin_loss"]
BY_CLASS += [
    "poly_loss_cross_entropy",
    "kl_divergence",
    "cosine_distance",
    "generalized_kl_divergence",
    "smooth_labels",
]


@pytest.mark.parametrize("name", BY_CLASS)
def test_masking_classes_is_taking_them_out(name):
    case = next(case for case in CASES if case.name == name)
    kept = np.array([True, False, True, True])
    labels = np.array([0, 2, 2, 0, 3])
    args = [labels if x is LABELS else x for x in case.args]
    shorter = [np.array([0, 1, 1, 0, 2]) if x is labels else x[:, kept] if np.ndim(x) == 2 else x for x in args]
    actual, expected = ours(case, where=np.broadcast_to(kept, X.shape))(*args), ours(case)(*shorter)
    actual = actual[:, kept] if actual.ndim == 2 else actual
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)


def has_rows(case):
    """Whether there is a loss for each row of the first argument."""
    return case.kwargs.get("axis", -1) == -1 and jax.tree.leaves(jax.eval_shape(ours(case), *case.args))[0].ndim > 0


OF_ROWS = [case for case in CASES if has_rows(case)]


@pytest.mark.parametrize("case", OF_ROWS, ids=[case.name for case in OF_ROWS])
def test_a_nan_shows_in_its_own_row_only(case):
    x = np.array(case.args[0])
    out = np.asarray(jax.tree.leaves(ours(case)(*case.args))[0])
    x[(0,) * x.ndim] = np.nan
    changed = np.asarray(jax.tree.leaves(ours(case)(x, *case.args[1:]))[0])
    assert np.isnan(changed[0]).any()
    np.testing.assert_array_equal(changed[1:], out[1:])


# Without the probabilities of CTC: those of what cannot be are about -1e5, of which float32 keeps few digits.
IN_EVERY_MODE = [case for case in CASES if "forward_probs" not in case.name]


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_EVERY_MODE, ids=[case.name for case in IN_EVERY_MODE])
def test_one_answer_in_every_mode(case):
    numbers = floats_of(case.args)

    def fn(*moving):
        new = dict(zip(numbers, moving, strict=True))
        return ours(case)(*(new.get(i, x) for i, x in enumerate(case.args)))

    assert_consistent(fn, *(jnp.asarray(case.args[i]) for i in numbers))


@pytest.mark.parametrize(("case", "mask"), MASKED, ids=MASKED_IDS)
def test_forward_mode_agrees_with_reverse_mode(case, mask):
    numbers, args = floats_of(case.args), [jnp.asarray(x) for x in case.args]

    def total(x):
        return jnp.sum(ours(case, where=mask)(x, *args[1:]))

    assert 0 in numbers
    direction = jnp.cos(args[0])
    with masksafe.forward_mode():
        slope = jax.jvp(total, (args[0],), (direction,))[1]
    np.testing.assert_allclose(slope, jnp.vdot(jax.grad(total)(args[0]), direction), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("case", "mask"), MASKED, ids=MASKED_IDS)
def test_quiet_under_debug_nans(case, mask):
    x = jnp.asarray(np.where(expanded(mask, case.args[0]), case.args[0], np.nan).astype(np.float32))
    with jax.debug_nans(True):
        jax.grad(lambda x: jnp.sum(ours(case, where=mask)(x, *case.args[1:])))(x)


# What a mask may be.

STRICT = [case for case in CASES if "where" not in inspect.signature(getattr(optax.losses, case.name)).parameters]
STRICT = [case for case in STRICT if case.masks]


@pytest.mark.parametrize("case", STRICT, ids=[case.name for case in STRICT])
def test_a_mask_of_another_rank_is_refused(case):
    ranks = {mask.ndim for mask in case.masks} | {np.ndim(case.args[0]), np.ndim(ours(case)(*case.args))}
    rank = next(r for r in range(5) if r not in ranks)
    if case.name == "ntxent":
        rank = 3
    with pytest.raises(ValueError, match=f"^{case.name}: where: got shape"):
        ours(case, where=np.ones((1,) * rank, bool))(*case.args)


@pytest.mark.parametrize("case", [case for case in CASES if case.masks], ids=lambda case: case.name)
def test_a_mask_that_is_not_boolean_is_refused(case):
    with pytest.raises(TypeError, match="where: got dtype"):
        ours(case, where=np.ones(case.masks[0].shape))(*case.args)
