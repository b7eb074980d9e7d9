"""Every loss of optax: the same names, parameters, values and dtypes, and the contract of masked elements.

What costs is to compile. So each case has two programs, one without a mask and one in which the mask is an argument,
and the tests of a case run them on different arrays. The first case of each loss is in the default run.
"""

import functools
import inspect
import itertools
from typing import Any, NamedTuple

import chex
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

ELEMENTS = RNG.random((ROWS, CLASSES)) < 0.6
ELEMENTS[1], ELEMENTS[2] = False, True
for _row in (0, 3, 4, 5):
    ELEMENTS[_row, LABELS[_row]] = True
SOME_ROWS = np.array([True, False, True, True, False, True])


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
    Case("sigmoid_binary_cross_entropy", (X, P), masks=(ELEMENTS,)),
    Case("sigmoid_binary_cross_entropy", (X, BITS), masks=(ELEMENTS,), maskable=(0,)),
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
    Case("ntxent", (X, np.array([0, 1, 0, 1, 0, 1])), masks=(np.array([True, True, True, True, False, True]),)),
    Case("triplet_margin_loss", (X, Y, P), {"margin": 2.0}, masks=BOTH, maskable=(0, 1, 2)),
    Case("dice_loss", (PIXELS, TRUTH), masks=(RNG.random((4, 1, 5, 1)) < 0.7, RNG.random(PIXELS.shape) < 0.7)),
    Case("dice_loss", (PIXELS, TRUTH), {"reduction": "none", "alpha": 0.3, "smooth": 0.5, "ignore_background": True}),
    Case(
        "dice_loss",
        (PIXELS, TRUTH),
        {"reduction": "sum", "class_weights": np.float32([0, 1, 2, 3]), "axis": (1, 2)},
    ),
    Case("dice_loss", (PIXELS[..., :1], TRUTH[..., 0]), masks=(np.array([True, False, True, True]),)),
    Case("multiclass_generalized_dice_loss", (PIXELS, TRUTH), masks=(RNG.random((4, 1, 5, 1)) < 0.7,)),
    Case("multiclass_generalized_dice_loss", (PIXELS, TRUTH), {"ignore_background": True}),
    Case("binary_dice_loss", (X, BITS), masks=(ELEMENTS, SOME_ROWS), maskable=(0,)),
    Case("fenchel_young_loss", (X, P), masks=BOTH),
]
OF_LABELS = {"multiclass_hinge_loss", "multiclass_perceptron_loss", "multiclass_sparsemax_loss", "ntxent"}
OF_LABELS |= {"ctc_loss", "ctc_loss_with_forward_probs", "softmax_cross_entropy_with_integer_labels"}


def first_of_each_loss(cases, name=lambda case: case.name):
    """Parameters: the first case of each loss, and the others for the slow run."""
    seen, parameters = set(), []
    for i, case in enumerate(cases):
        marks = [pytest.mark.slow] if name(case) in seen else []
        seen.add(name(case))
        parameters.append(pytest.param(case, marks=marks, id=f"{name(case)}-{i}"))
    return parameters


def loss_of(module, name):
    if name == "fenchel_young_loss":
        maximum = masksafe.logsumexp if module is masksafe.losses else jax.scipy.special.logsumexp
        return module.make_fenchel_young_loss(maximum)
    return getattr(module, name)


def ours(case, **kwargs):
    return functools.partial(loss_of(masksafe.losses, case.name), **case.kwargs, **kwargs)


def theirs(case):
    return functools.partial(loss_of(optax.losses, case.name), **case.kwargs)


def expanded(mask, x):
    """The mask at the rank of an argument: one of the loss's rank masks rows of it, one of labels less the classes."""
    x = np.asarray(x)
    if mask.ndim > x.ndim:
        return mask.any(tuple(range(x.ndim, mask.ndim)))
    return np.broadcast_to(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x.shape)


def floats_of(args):
    return [i for i, x in enumerate(args) if np.ndim(x) and jnp.issubdtype(x.dtype, jnp.floating)]


def of_floats(fn, args):
    """A function of those of the arguments that are arrays of floats."""
    numbers = floats_of(args)

    def fn_of_floats(*moving):
        new = dict(zip(numbers, moving, strict=True))
        return fn(*(new.get(i, x) for i, x in enumerate(args)))

    return fn_of_floats, tuple(args[i] for i in numbers)


def weighted(tree):
    """A sum with weights that are not all alike."""
    return sum(jnp.sum(x * np.cos(np.arange(x.size)).reshape(x.shape).astype(x.dtype)) for x in jax.tree.leaves(tree))


def value_and_gradients(loss, args):
    fn, moving = of_floats(loss, args)

    def total(*moving):
        out = fn(*moving)
        return weighted(out), out

    gradients, out = jax.grad(total, range(len(moving)), has_aux=True)(*moving)
    return out, gradients


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
    assert {case.name for case in CASES} == set(NAMES) - {"make_fenchel_young_loss"} | {"fenchel_young_loss"}


class Unmasked(NamedTuple):
    """A case, and its values and gradients in both libraries as one compiled function of the arguments."""

    case: Case
    both: Any


@pytest.fixture(scope="module", params=first_of_each_loss(CASES))
def unmasked(request):
    case = request.param
    return Unmasked(case, jax.jit(lambda *args: [value_and_gradients(f(case), args) for f in (ours, theirs)]))


@pytest.mark.filterwarnings("ignore:The function convex_kl")
def test_values_and_gradients_are_those_of_optax(unmasked):
    (actual, gradients), (expected, expected_gradients) = unmasked.both(*unmasked.case.args)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    if "forward_probs" in unmasked.case.name:  # what optax has behind the labels depends on what is in their padding
        np.testing.assert_allclose(actual[0], expected[0], rtol=2e-5)
        np.testing.assert_allclose(actual[1][..., :2], expected[1][..., :2], rtol=2e-5)
        np.testing.assert_allclose(actual[2][..., :1], expected[2][..., :1], rtol=2e-5)
        return
    chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=1e-5)
    if "ctc" in unmasked.case.name:  # optax has gradients for paddings, which are flags
        gradients, expected_gradients = gradients[:1], expected_gradients[:1]
    chex.assert_trees_all_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The function convex_kl")
def test_a_nan_shows_in_its_own_row_only(unmasked):
    case = unmasked.case
    bad = np.array(case.args[0])
    bad[(0,) * bad.ndim] = np.nan
    of_bad, of_good = (unmasked.both(x, *case.args[1:])[0] for x in (bad, case.args[0]))
    if not has_rows(case):
        assert np.isnan(of_bad[0]).any()
        return
    assert np.isnan(jax.tree.leaves(of_bad[0])[0][0]).any()
    for i in range(2):  # the loss, and its gradient with respect to the first argument
        changed, same = (jax.tree.leaves(results[i])[0] for results in (of_bad, of_good))
        np.testing.assert_array_equal(changed[1:], same[1:])


def has_rows(case):
    """Whether there is a loss for each row of the first argument."""
    return case.kwargs.get("axis", -1) == -1 and jax.tree.leaves(jax.eval_shape(ours(case), *case.args))[0].ndim > 0


def on_devices(x):
    return jax.device_put(x, PartitionSpec("data", *[None] * (x.ndim - 1))) if np.ndim(x) else jnp.asarray(x)


@pytest.mark.filterwarnings("ignore:The function convex_kl")
@pytest.mark.parametrize(
    "kind", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)], ids=["explicit", "auto"]
)
def test_a_batch_split_over_devices(unmasked, kind):
    case = unmasked.case
    if any(isinstance(x, np.ndarray) for x in case.kwargs.values()):
        pytest.skip("an array that is on one device")
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(kind,))):
        args = [on_devices(x) for x in case.args]
        out, gradients = jax.jit(functools.partial(value_and_gradients, ours(case)))(args)
        for x, like in zip(gradients, [args[i] for i in floats_of(case.args)], strict=True):
            assert jax.typeof(x).sharding.spec == jax.typeof(like).sharding.spec
    expected = unmasked.both(*case.args)[0]
    chex.assert_trees_all_close(jax.device_get((out, gradients)), jax.device_get(expected), rtol=1e-4, atol=1e-5)


# A Fenchel-Young loss is a jax.vmap of a function that it is given, and wants the mask split as the scores are.
CASES_WITH_MASKS = [case for case in CASES if case.masks and case.name != "fenchel_young_loss"]


@pytest.mark.parametrize(
    "split", ["scores", *(pytest.param(s, marks=pytest.mark.slow) for s in ("scores and labels", "where too"))]
)
@pytest.mark.parametrize("case", first_of_each_loss(CASES_WITH_MASKS))
def test_labels_and_masks_that_are_split_or_are_not(case, split):
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))):
        first, *others = map(jnp.asarray, case.args)
        args = [on_devices(first), *(others if split == "scores" else map(on_devices, others))]
        mask = (on_devices if split == "where too" else jnp.asarray)(case.masks[0])
        step = lambda args, mask: value_and_gradients(ours(case, where=mask), args)  # noqa: E731
        assert jax.eval_shape(step, args, mask)[1][0].shape == first.shape


@pytest.mark.parametrize("case", first_of_each_loss(CASES))
def test_losses_and_gradients_trace_under_strict_promotion(case):
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        args = [jnp.asarray(x) for x in case.args]
        for mask in ({}, *({"where": jnp.asarray(x)} for x in case.masks[:1])):
            assert jax.make_jaxpr(functools.partial(value_and_gradients, ours(case, **mask)))(args).eqns
            with masksafe.forward_mode():
                fn, moving = of_floats(ours(case, **mask), args)
                assert jax.make_jaxpr(functools.partial(jax.jvp, fn))(moving, moving).eqns


@pytest.mark.parametrize("case", first_of_each_loss(CASES))
def test_value_and_gradients_lower_for_cuda(case):
    mask = {"where": jnp.asarray(case.masks[0])} if case.masks else {}
    step = jax.jit(lambda args, mask: value_and_gradients(ours(case, **mask), args))
    exported = jax.export.export(step, platforms=["cuda"])([jnp.asarray(x) for x in case.args], mask)
    assert exported.platforms == ("cuda",)


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


PAIRS_OF_TYPES = [
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float16", "bool"),
    ("bfloat16", "int32"),
    ("number", "bfloat16"),
    ("weak float", "float16"),
    ("bfloat16", "weak int"),
]


@pytest.mark.filterwarnings("ignore")  # those of optax
@pytest.mark.parametrize(
    "pairs", [PAIRS_OF_TYPES, pytest.param([*itertools.product(TYPES, TYPES)], marks=pytest.mark.slow)], ids=["", "all"]
)
@pytest.mark.parametrize("name", TYPED)
def test_types_that_are_narrow_weak_or_mixed_promote_as_in_optax(name, pairs):
    case, compared = next(case for case in CASES if case.name == name), 0
    for kinds in dict.fromkeys(kinds[: len(TYPED[name])] for kinds in pairs):
        args = [x if isinstance(x, float) else jnp.asarray(x) for x in case.args]
        for i, kind in zip(TYPED[name], kinds, strict=True):
            args[i] = TYPES[kind](case.args[i])
        actual, expected = (type_of_result(loss(case), args) for loss in (ours, theirs))
        if isinstance(actual, Exception):  # what optax takes and we refuse, we refuse by name
            assert isinstance(expected, Exception) or f"{name}: " in str(actual), kinds
        elif not isinstance(expected, Exception):
            assert actual == expected, kinds
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", first_of_each_loss(CASES))
def test_narrow_floats_are_rounded_once(case, dtype):
    args = [np.asarray(x).astype(dtype) if i in floats_of(case.args) else x for i, x in enumerate(case.args)]

    def narrow_and_wide(*args):
        wide = [x.astype("float32") if jnp.asarray(x).dtype == dtype else x for x in args]
        return [jax.tree.leaves(ours(case)(*a)) for a in (args, wide)]

    # XLA may leave out a rounding between two steps, and with it the mistake.
    of_each = jax.jit(narrow_and_wide, compiler_options={"xla_allow_excess_precision": False})(*args)
    for a, e in zip(*of_each, strict=True):
        a, e = np.float64(a), np.float64(e.astype(a.dtype))
        np.testing.assert_allclose(a, e, rtol=2 * float(jnp.finfo(dtype).eps), atol=1e-6)


ELEMENTWISE = ["huber_loss", "log_cosh", "sigmoid_binary_cross_entropy", "sigmoid_focal_loss", "hinge_loss"]
ELEMENTWISE += ["sparsemax_loss"]
PAIRS_OF_SHAPES = [((3, 4), (4,)), ((4,), (3, 4)), ((), (3, 4)), ((3, 1), (1, 4))]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_arguments_broadcast_as_those_of_optax(name):
    rng = np.random.default_rng(1)
    pairs = [[rng.normal(size=shape).astype(np.float32) for shape in shapes] for shapes in PAIRS_OF_SHAPES]
    pairs = [(x, np.where(y > 0, 1, -1 if name == "hinge_loss" else 0).astype(np.float32)) for x, y in pairs]
    ours, theirs = (getattr(module, name) for module in (masksafe.losses, optax.losses))

    @jax.jit
    def of_all(pairs):
        masks = [np.ones(np.broadcast_shapes(*shapes), bool) for shapes in PAIRS_OF_SHAPES]
        masked = [ours(*pair, where=mask) for pair, mask in zip(pairs, masks, strict=True)]
        return masked, [ours(*pair) for pair in pairs], [theirs(*pair) for pair in pairs]

    masked, actual, expected = of_all(pairs)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(masked, expected, rtol=1e-5, atol=1e-6)


ROWS_FIRST = ["softmax_cross_entropy", "softmax_cross_entropy_with_integer_labels", "poly_loss_cross_entropy"]
COLUMNS = ["kl_divergence", "kl_divergence_with_log_targets", "generalized_kl_divergence", "cosine_similarity"]
COLUMNS += ["cosine_distance", "convex_kl_divergence"]


@pytest.mark.parametrize("name", [*ROWS_FIRST, *COLUMNS])
def test_a_mask_of_lower_rank_is_of_rows_or_as_numpy_has_it(name):
    scores, mask = np.array([[0.5, 0.25], [0.75, 0.5]], np.float32), np.array([True, False])
    labels = np.array([0, 1]) if "integer" in name else scores[::-1]
    loss = getattr(masksafe.losses, name)
    same = mask[:, None] if name in ROWS_FIRST else mask[None]
    masks = mask, np.broadcast_to(same, (2, 2))
    actual, expected = jax.jit(lambda *args: [loss(*args, where=where) for where in masks])(scores, labels)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["squared_error", "l2_loss", "huber_loss", "hinge_loss", "sigmoid_focal_loss"])
def test_an_elementwise_loss_refuses_a_mask_of_lower_rank_and_says_how_to_write_it(name):
    with pytest.raises(ValueError, match=rf"{name}: where: .* leading axes write where\[\.\.\., None\]\.$"):
        getattr(masksafe.losses, name)(jnp.zeros((2, 2)), jnp.ones((2, 2)), where=np.array([True, False]))


# The contract.


class Masked(NamedTuple):
    """A case with one of its masks, and the compiled function of a mask and the arguments that gives all results."""

    case: Case
    mask: np.ndarray
    results: Any

    def hidden(self):
        """Per argument, what the mask hides of it."""
        masks = {i: ~expanded(self.mask, self.case.args[i]) for i in self.case.maskable}
        return {i: mask for i, mask in masks.items() if mask.any()}


def direction(i, x):
    return np.cos(np.arange(x.size, dtype=np.float32) + i).reshape(x.shape)


def all_results(case):
    """The loss and its derivatives: by all arguments, and along a direction."""

    def results(mask, *args):
        fn, moving = of_floats(ours(case, where=mask), args)
        directions = tuple(direction(i, x) for i, x in enumerate(moving))
        total = lambda moving: weighted(fn(*moving))  # noqa: E731
        along = lambda moving: sum(map(jnp.vdot, jax.grad(total)(moving), directions))  # noqa: E731
        with masksafe.forward_mode():
            slope = jax.jvp(total, (moving,), (directions,))[1]
        return {
            "value": fn(*moving),
            "gradient": jax.grad(total)(moving),
            "slope": slope,
            "forward over reverse": jax.jvp(jax.grad(total), (moving,), (directions,))[1],
            "reverse over reverse": jax.grad(along)(moving),
        }

    return jax.jit(results)


MASKED = [(case, mask) for case in CASES for mask in case.masks]


@pytest.fixture(scope="module", params=first_of_each_loss(MASKED, lambda pair: pair[0].name))
def masked(request):
    case, mask = request.param
    return Masked(case, mask, all_results(case))


def test_masked_elements_are_gone(masked):
    run = functools.partial(masked.results, masked.mask)
    assert_mask_safe(run, *masked.case.args, masked=masked.hidden(), order=0, transforms=("eager",))
    results, numbers = run(*masked.case.args), floats_of(masked.case.args)
    for derivatives in ("gradient", "forward over reverse", "reverse over reverse"):
        by_argument = dict(zip(numbers, results[derivatives], strict=True))
        for i in by_argument.keys() & masked.hidden().keys():
            np.testing.assert_array_equal(by_argument[i][masked.hidden()[i]], 0)


def test_the_two_modes_of_autodiff_agree(masked):
    results = masked.results(masked.mask, *masked.case.args)
    slope = sum(np.vdot(x, direction(i, x)) for i, x in enumerate(results["gradient"]))
    np.testing.assert_allclose(results["slope"], slope, rtol=1e-4, atol=1e-4)
    chex.assert_trees_all_close(results["forward over reverse"], results["reverse over reverse"], rtol=1e-4, atol=1e-4)


def test_nothing_left_is_zero(masked):
    case, numbers = masked.case, floats_of(masked.case.args)
    garbage = {i: np.full_like(case.args[i], np.nan if i in numbers else -100) for i in case.maskable}
    results = masked.results(np.zeros_like(masked.mask), *(garbage.get(i, x) for i, x in enumerate(case.args)))
    chex.assert_trees_all_equal(jax.device_get(results), jax.tree.map(np.zeros_like, jax.device_get(results)))


def test_a_nan_that_is_not_masked_shows(masked):
    bad = np.array(masked.case.args[0])
    bad[tuple(np.argwhere(expanded(masked.mask, bad))[0])] = np.nan
    assert np.isnan(masked.results(masked.mask, bad, *masked.case.args[1:])["value"]).any()


def test_an_elementwise_loss_is_the_same_where_nothing_is_masked(masked):
    case = masked.case
    if case.name not in (*ELEMENTWISE, "squared_error", "l2_loss", "perceptron_loss"):
        pytest.skip("a sum over elements")
    some, all_ = (masked.results(mask, *case.args)["value"] for mask in (masked.mask, np.ones_like(masked.mask)))
    np.testing.assert_array_equal(some, np.where(masked.mask, all_, 0))


def removed(case, mask):
    """The arguments without the masked rows."""
    return [np.asarray(x)[mask] if np.ndim(x) else x for x in case.args]


ROW_MASKED = [(case, SOME_ROWS) for case in CASES if any(m is SOME_ROWS for m in case.masks)]


@pytest.mark.parametrize(("case", "mask"), ROW_MASKED, ids=[case.name for case, _ in ROW_MASKED])
def test_masking_rows_is_taking_them_out(case, mask):
    both = jax.jit(lambda args, kept: (ours(case, where=mask)(*args), ours(case)(*kept)))
    actual, expected = both(case.args, removed(case, mask))
    np.testing.assert_allclose(actual[mask], expected, rtol=1e-6)
    np.testing.assert_array_equal(actual[~mask], 0)


BY_CLASS = ["multiclass_hinge_loss", "multiclass_perceptron_loss", "multiclass_sparsemax_loss", "triplet_margin_loss"]
BY_CLASS += ["poly_loss_cross_entropy", "kl_divergence", "kl_divergence_with_log_targets", "cosine_distance"]
BY_CLASS += ["cosine_similarity", "generalized_kl_divergence", "smooth_labels", "softmax_cross_entropy"]
BY_CLASS += ["softmax_cross_entropy_with_integer_labels", "ranking_softmax_loss", "fenchel_young_loss"]


@pytest.mark.parametrize("name", BY_CLASS)
def test_masking_classes_is_taking_them_out(name):
    case = next(case for case in CASES if case.name == name)
    kept = np.array([True, False, True, True])
    labels = np.array([0, 2, 2, 0, 3, 3])
    args = [labels if x is LABELS else x for x in case.args]
    shorter = [np.array([0, 1, 1, 0, 2, 2]) if x is labels else x[:, kept] if np.ndim(x) == 2 else x for x in args]
    mask = np.broadcast_to(kept, X.shape)
    actual, expected = jax.jit(lambda *args: (ours(case, where=mask)(*args[0]), ours(case)(*args[1])))(args, shorter)
    actual = actual[:, kept] if actual.ndim == 2 else actual
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)


# Without the probabilities of CTC: those of what cannot be are about -1e5, of which float32 keeps few digits.
MODES = "jit", "vmap", "vmap, last axis", "scan", "checkpoint", "transposed", "donated", "sharded", "float64"
IN_EVERY_MODE = {case.name: case for case in reversed(CASES) if "forward_probs" not in case.name}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_EVERY_MODE)
def test_one_answer_in_every_mode(name):
    fn, moving = of_floats(ours(IN_EVERY_MODE[name]), IN_EVERY_MODE[name].args)
    assert_consistent(fn, *moving, modes=MODES)


@pytest.mark.slow  # JAX looks at each step of what is not compiled
@pytest.mark.parametrize("pair", MASKED, ids=[f"{case.name}-{i}" for i, (case, _) in enumerate(MASKED)])
def test_quiet_under_debug_nans(pair):
    case, mask = pair
    x = jnp.asarray(np.where(expanded(mask, case.args[0]), case.args[0], np.nan).astype(np.float32))
    with jax.debug_nans(True):
        jax.grad(lambda x: jnp.sum(ours(case, where=mask)(x, *case.args[1:])))(x)


# What a mask may be.

STRICT = [case for case in CASES if "where" not in inspect.signature(theirs(case)).parameters]
STRICT = [case for case in STRICT if case.masks]


@pytest.mark.parametrize("case", STRICT, ids=[case.name for case in STRICT])
def test_a_mask_of_another_rank_is_refused(case):
    ranks = {mask.ndim for mask in case.masks} | {np.ndim(case.args[0]), jax.eval_shape(ours(case), *case.args).ndim}
    rank = next(r for r in range(5) if r not in ranks)
    if case.name == "ntxent":
        rank = 3
    with pytest.raises(ValueError, match=f"^{case.name}: where: got shape"):
        ours(case, where=np.ones((1,) * rank, bool))(*case.args)


@pytest.mark.parametrize("case", [case for case in CASES if case.masks], ids=lambda case: case.name)
def test_a_mask_that_is_not_boolean_is_refused(case):
    with pytest.raises(TypeError, match="where: got dtype"):
        ours(case, where=np.ones(case.masks[0].shape))(*case.args)
