"""nonfinite_report names the equation that made the NaN or the infinity."""

import gc

import jax
import jax.lax.linalg
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.extend.core import Primitive
from tiers import parametrize

import masksafe
from masksafe import losses
from masksafe.testing import _devices, _replay, _rules, nonfinite_report

X = jax.device_put(np.float32([1, 0, 4]))


def entropy(p):
    return jnp.sum(p * jnp.log(p))


def mean_of_nothing(x):
    return jnp.sum(jnp.where(x > 9, x, 0)) / jnp.sum(x > 9)


def naive_softmax(x):
    return jnp.exp(100 * x) / jnp.sum(jnp.exp(100 * x))


# The bug, and the primitive, index and inputs that the report must blame.
MEAN_OF_NOTHING = mean_of_nothing, ["div", (), (0.0, 0.0)]
CLASSIC = [
    MEAN_OF_NOTHING,
    (entropy, ["log", (1,), (0.0,)]),
    (naive_softmax, ["exp", (0,), (100.0,)]),
]


def in_scan(fn):
    return lambda x: lax.scan(lambda carry, _: (carry, fn(x)), 0.0, None, length=3)[1]


def in_while(fn):
    def looped(x):
        step = lambda c: (c[0] + 1, c[1] + jnp.sum(fn(x)))  # noqa: E731
        return lax.while_loop(lambda c: c[0] < 2, step, (0, 0.0))[1]

    return looped


def with_custom_jvp(fn):
    custom = jax.custom_jvp(fn)
    custom.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return custom


def with_custom_vjp(fn):
    custom = jax.custom_vjp(fn)
    custom.defvjp(lambda x: jax.vjp(fn, x), lambda pull_back, d: pull_back(d))
    return custom


WAYS = {
    "plain": lambda fn: fn,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": in_scan,
    "while": in_while,
    "cond": lambda fn: lambda x: lax.cond(x[0] > 0, fn, lambda x: fn(x) * 0, x),
    "custom_jvp": with_custom_jvp,
    "custom_vjp": with_custom_vjp,
}


@parametrize("way", ["plain"], exhaustive=WAYS)
@parametrize(("fn", "blamed"), [MEAN_OF_NOTHING], exhaustive=CLASSIC)
def test_classic_bug_is_found_in_every_construct(fn, blamed, way):
    report = nonfinite_report(WAYS[way](fn), X)
    assert report
    assert [report.first.primitive, report.first.index, report.first.inputs] == blamed
    assert f"{__file__}:" in report.first.place
    assert f"in {fn.__name__}" in report.first.place


@parametrize("way", ["plain"], exhaustive=["jit", "checkpoint", "scan"])
def test_gradient_of_a_square_root_at_zero(way):
    norm = lambda x: jnp.sum(jnp.sqrt(x))  # noqa: E731
    assert not nonfinite_report(norm, X)
    report = nonfinite_report(lambda x: jnp.sum(WAYS[way](norm)(x)), X, grad=True)
    assert (report.first.primitive, report.first.index, report.first.inputs[-1]) == ("div", (1,), 0)
    assert report.outputs[0].startswith("output[0], float32[3]: 1 of 3 elements, the first at index (1,)")


DATA = np.array([1.0, np.nan, 2.0], np.float32)
OF_JAX = jax.device_put(DATA)
ROWS = np.float32([[1, 2, 3], [4, 5, 6]])


def with_attention_and_norm(x):
    attended = masksafe.dot_product_attention(HEADS, x, x, key_value_seq_lengths=jnp.array([2]))
    normalized = masksafe.layer_norm(attended, where=jnp.arange(4) < 3)
    return jnp.log(jnp.sum(normalized) * 0)


def moved_and_summed(x):
    rows = jnp.stack([jnp.log(x), jnp.exp(200 * x)])
    return (rows.T[::-1] @ jnp.eye(2))[2, 0]  # log(x)[0], which is finite, times 1, and exp(...) times 0


def in_one_step_of_many(x):
    step = lambda c, i: (c * jnp.where(i == 3, jnp.log(-c), 1.0), c)  # noqa: E731
    return lax.scan(step, x, jnp.arange(100))


def in_reverse_and_without_steps(x):
    scan = lambda x: lax.scan(lambda c, x: (c + x, jnp.log(1.5 + c)), 0.0, x, reverse=True)[1]  # noqa: E731
    return scan(x)[0], scan(x[:0])


def ragged_product(row):
    return lambda x: lax.ragged_dot(jnp.log(x), jnp.ones((2, 2, 2)), jnp.array([1, 2]))[row].sum()


def wide_product(x):
    return jnp.dot(jnp.log(x).astype(jnp.bfloat16), jnp.ones((2, 2), jnp.bfloat16), preferred_element_type=x.dtype)


def of_the_last_row(mix):
    """Elements of each row are mixed; in row 0 a logarithm is bad."""

    def fn(x):
        return jnp.where(LAST, mix(jnp.stack([jnp.log(x[0] - 5), jnp.exp(x[1] * 100)])), 0)

    return fn


def overflowing(mix):
    """The mixture of row 0 is bad already, and that of row 1 overflows."""
    return lambda x: mix(jnp.stack([jnp.log(x[0] - 5), x[1] * 4e37]))


LAST = np.array([[False], [True]])
MIXTURES = [
    lambda x: x @ jnp.ones((3, 2)),
    lambda x: jnp.max(x, -1, keepdims=True),
    lambda x: lax.cumsum(x, 1, reverse=True),
    lambda x: lax.reduce(x, 1.0, lambda a, b: a * b * 1.5, (1,))[:, None],
    lambda x: jnp.prod(x, -1, keepdims=True),
    lambda x: jnp.sort(x, -1),
    lambda x: lax.cummax(x, 1),
    lambda x: lax.top_k(x, 2)[0],
    lambda x: jnp.fft.fft(x).real,
    lambda x: jnp.linalg.cholesky(x[..., None] * jnp.eye(3))[..., 0],
]
HEADS = np.linspace(0.1, 1, 24, dtype=np.float32).reshape(1, 3, 2, 4)
BETWEEN = np.float32([-1, 1, -1])
# What is run on what, and the sources: their primitives, and the indices of their first bad elements.
TWO_SOURCES = (lambda x: (jnp.log(x), 1 / (x - 1))), X, [("log", (1,)), ("div", (0,))]
SOURCES = [
    (moved_and_summed, X, [("exp", (0,))]),
    (with_attention_and_norm, HEADS + np.float32([0, 0, np.nan]).reshape(3, 1, 1), [("log", ())]),
    (in_one_step_of_many, np.float32(1), [("log", ())]),
    (lambda x: lax.cumsum(jnp.log(x))[1], BETWEEN, [("log", (0,))]),
    (lambda x: lax.cumsum(jnp.log(x), reverse=True)[1], BETWEEN, [("log", (2,))]),
    (lambda x: jnp.sum(x * DATA), X, [("mul", (1,))]),
    (lambda x: jnp.sum(x * OF_JAX), X, [("mul", (1,))]),
    (lambda x: jnp.where(jnp.isfinite(OF_JAX).all(), x, jnp.nan), X, [("is_finite", (1,))]),
    (lambda x: lax.reduce(x * 1e30, 1.0, lambda a, b: a * b * 1.0000001, (1,)), ROWS, [("reduce", (0,))]),
    (lambda x: lax.reduce_window(jnp.log(x - 1), 0.0, lax.add, (1, 2), (1, 1), "VALID"), ROWS, [("log", (0, 0))]),
    (in_reverse_and_without_steps, np.float32([1.0, -2.0, 0.0]), [("log", ())]),
    (ragged_product(0), np.float32([[1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]]), [("log", (0, 1))]),
    (ragged_product(2), np.float32([[1.0, 1.0], [-1.0, 1.0], [-1.0, 1.0]]), [("log", (2, 0))]),
    (wide_product, np.float32([[1.0, 2.0], [3.0, -1.0]]), [("log", (1, 1))]),
    (lambda x: jnp.abs((x + 1j) / (x - x)), X, [("div", (0,))]),
    (lambda x: masksafe.apply_where(x < 0, x, lambda x: jnp.log(x), fill_value=0.0), np.float32([-1]), [("log", (0,))]),
    (overflowing(lambda x: jnp.sum(x, -1)), ROWS, [("log", (0,)), ("reduce_sum", (1,))]),
    (overflowing(lambda x: x @ jnp.ones((3, 2))), ROWS, [("log", (0,)), ("dot_general", (1, 0))]),
    *((of_the_last_row(mix), ROWS, [("exp", (0,))]) for mix in MIXTURES),
]


@parametrize(("fn", "x", "expected"), [TWO_SOURCES], exhaustive=SOURCES)
def test_sources_are_found(fn, x, expected):
    report = nonfinite_report(fn, x)
    assert [(source.primitive, source.index) for source in report.sources] == expected
    assert report.arguments == ()
    assert report.first.inside_of == ""
    assert f"{__file__}:" in report.first.place
    assert f"{report.first.primitive} gives " in str(report)


def test_bad_argument_is_named():
    report = nonfinite_report(lambda params, x: params["w"] * x, {"w": X.at[2].set(jnp.nan)}, X)
    assert report.sources == ()
    assert report.arguments == ("argument [0]['w'], float32[3]: 1 of 3 elements, the first at index (2,)",)


def test_what_a_selection_takes_away_is_harmless():
    report = nonfinite_report(lambda x: jnp.where(x > 0, jnp.log(x), 0), X)
    assert not report
    assert report.first is None
    assert [source.primitive for source in report.harmless] == ["log"]
    assert "Harmless, for it makes no output bad:\n  log gives -inf from 0" in str(report)


def test_harmless_and_harmful_elements_of_the_same_value_are_told_apart():
    fn = lambda x: jnp.where(jnp.array([True, False, True]), 1 / x, 0)  # noqa: E731
    assert not nonfinite_report(fn, jnp.array([1.0, 0.0, 4.0]))
    report = nonfinite_report(fn, jnp.array([1.0, 0.0, 0.0]))
    assert (report.first.primitive, report.first.index, report.first.count) == ("div", (2,), 1)


# Ops. That each of them hands a NaN on to the report, and that a bad label is called one, are tests of the contract.


@parametrize("grad", [True], exhaustive=[False])
def test_what_an_op_makes_and_hides_is_named_as_its_own(grad):
    def fn(x):
        return masksafe.logsumexp(masksafe.log_softmax(x, where=jnp.array([[True], [True], [False]])), where=x < 0)

    ours = nonfinite_report(fn, jnp.ones((3, 4)), grad=grad).harmless[0]
    assert (ours.primitive, ours.inside_of) == ("log", "masksafe.log_softmax")
    assert str(ours).startswith("log inside of masksafe.log_softmax gives -inf from 0, at ")
    assert ours.place.startswith(f"{__file__}:{fn.__code__.co_firstlineno + 1}, in ")


def test_infinity_of_an_op_without_labels_has_a_note_without_labels():
    report = nonfinite_report(lambda x: masksafe.logsumexp(x, where=x > 9), X)
    assert report.first.note == "logsumexp writes it on purpose"


# Constants that a predicate of bad values chooses, in users' code. The NaN is made in row 1, by a logarithm.


def in_a_while(z, y):
    still = lambda c: jnp.isfinite(c[0])  # noqa: E731
    return lax.while_loop(still, lambda c: (c[0] * jnp.nan, y), (z[1], jnp.full_like(y, jnp.inf)))[1]


def nan_unless_finite(z, y):
    return jnp.where(jnp.isfinite(z).all(), y, jnp.nan)


PREDICATES = [
    lambda z, y: y * jnp.where(jnp.isnan(z), jnp.nan, 1),
    lambda z, y: y + jnp.where(z != z, jnp.nan, 0),
    lambda z, y: jnp.where(jnp.max(z) > -5, y, jnp.nan),
    lambda z, y: jnp.where(jnp.eye(3) @ jnp.isnan(z).astype(float) > 0, jnp.nan, y),
    lambda z, y: jnp.where(~(jnp.isfinite(z) & (y > 0)) | (y > 9), jnp.nan, y),
    lambda z, y: jnp.where(jnp.isnan(z), jnp.inf, y),
    lambda z, y: jnp.where(jnp.isnan(z), jnp.inf, y) - jnp.where(jnp.isnan(z), jnp.inf, y),
    lambda z, y: y / jnp.sum(jnp.isfinite(z[1:2])),
    lambda z, y: jnp.take(y, jnp.where(jnp.isnan(z), 7, 0)),
    lambda z, y: lax.select_n(jnp.isnan(z).astype(jnp.int32), y, y * jnp.nan),
    lambda z, y: lax.cond(jnp.isfinite(z).all(), lambda y: y, lambda y: jnp.full_like(y, jnp.nan), y),
    lambda z, y: lax.switch(jnp.isnan(z).any().astype(int), [lambda: y, lambda: y * jnp.nan]),
    in_a_while,
    lambda z, y: y * jnp.where(jnp.sum(jnp.isnan(z).astype(jnp.float32)) > 0, jnp.nan, 1),
    lambda z, y: y.at[jnp.argmax(jnp.isnan(z))].set(jnp.nan),
]


@parametrize("chosen", [nan_unless_finite], exhaustive=PREDICATES)
def test_chosen_constant_is_followed_through_its_predicate(chosen):
    def fn(x, y):
        made = jnp.log(x)
        return chosen(made, y)

    report = nonfinite_report(fn, jnp.array([1.0, -1.0, 4.0]), jnp.array([1.0, 2.0, 3.0]))
    assert report
    assert report.first.primitive == "log"
    assert report.first.place.startswith(f"{__file__}:{fn.__code__.co_firstlineno + 1}, in ")
    assert len(report.sources) == 1
    assert report.harmless == ()


# Sources that are beside a NaN which decides nothing about them.
SELECTED = (lambda z, x: jnp.where(x > 3, jnp.nan, x)), "select_n"
OWN_SOURCES = [
    (lambda z, x: jnp.where(jnp.nanmean(z) < 3, jnp.nan, x), "select_n"),
    (lambda z, x: jnp.log(jnp.nanmean(z) - 50), "log"),
    (lambda z, x: jnp.log(masksafe.mean(z, where=jnp.isfinite(z)) - 50), "log"),
    (lambda z, x: jnp.nansum(z) / (x[0] - 1), "div"),
    (lambda z, x: jnp.sum(jnp.isfinite(z)) * (x * 3e38), "mul"),
    (lambda z, x: jnp.take(x, jnp.array([0, 7])), "gather"),
    (lambda z, x: jnp.concatenate([x * jnp.nan, x]), "mul"),
    (lambda z, x: jnp.full(3, jnp.nan), "broadcast_in_dim"),
]


@parametrize(("fn", "primitive"), [SELECTED], exhaustive=OWN_SOURCES)
def test_source_that_no_bad_value_decided_is_blamed_itself(fn, primitive):
    report = nonfinite_report(lambda x: fn(jnp.arccosh(-x), x), jnp.array([1.0, 2.0, 4.0]).at[1].set(-2.0))
    assert report.first.primitive == primitive
    assert f"{__file__}:" in report.first.place
    assert [source.primitive for source in report.harmless if source.primitive == primitive] == []


def test_predicate_of_two_causes_blames_both_and_each_for_its_elements():
    def fn(x):
        return jnp.where(x > 3, jnp.nan, x) * jnp.where(jnp.isnan(jnp.sqrt(x)), jnp.nan, 1)

    chosen, made = sorted(nonfinite_report(fn, jnp.array([1.0, -1.0, 4.0])).sources, key=lambda s: s.primitive)
    assert (chosen.primitive, chosen.index, chosen.count) == ("select_n", (2,), 1)
    assert (made.primitive, made.index) == ("sqrt", (1,))


def test_infinities_of_a_mask_come_behind_the_nan_that_they_met():
    def fn(x, keep):
        mask = jnp.log(keep)
        made = jnp.sqrt(x)
        return jax.nn.softmax(made + mask)

    report = nonfinite_report(fn, jnp.array([-1.0, -2.0, 4.0]), jnp.array([0.0, 1.0, 1.0]))
    assert [source.primitive for source in report.sources] == ["sqrt", "log"]
    assert report.first.count == 2


def test_nan_in_a_closure_is_not_said_to_be_written_by_the_op():
    report = nonfinite_report(lambda x: masksafe.mean(DATA, where=x > 0) + losses.l2_loss(x, DATA), X)
    assert report
    assert [source.note for source in report.sources if source.note] == []


@parametrize("solver", [lambda x, b: b / jnp.sqrt(x)], exhaustive=[lambda x, b: b / x])
def test_custom_linear_solve_is_replayed(solver):
    fn = lambda x: lax.custom_linear_solve(lambda v: x * v, jnp.sqrt(x), lambda _, b: solver(x, b), symmetric=True)  # noqa: E731
    report = nonfinite_report(fn, jnp.array([1.0, -1.0, 4.0]))
    assert {source.primitive for source in report.sources} == {"sqrt"}
    assert report.first.index == (1,)


def in_all_devices(x):
    y = jnp.log(x)
    return y - lax.pmean(jnp.sum(y), "a") + lax.ppermute(y, "b", [(0, 1), (1, 0)])


def in_one_device(x):
    return lax.cond(lax.axis_index("a") == 1, jnp.log, lambda x: x, x)


ON_DEVICES = [
    (in_one_device, "Auto"),
    (in_all_devices, "Auto"),
    (lambda x: x * jnp.where(lax.psum(jnp.sum(jnp.isnan(jnp.log(x))), ("a", "b")) > 0, jnp.nan, 1), "Auto"),
    (lambda x: x + jnp.sum(lax.all_gather(jnp.log(x), "b")), "Explicit"),
    (lambda x: lax.scan(lambda c, _: (c + lax.psum(jnp.log(x), "a"), None), x, None, length=2)[0], "Explicit"),
    (in_one_device, "Explicit"),
]


@parametrize(("fn", "axis_type"), [(in_one_device, "Auto")], exhaustive=ON_DEVICES)
def test_shard_map_is_replayed(fn, axis_type):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(getattr(jax.sharding.AxisType, axis_type),) * 2)
    spec = jax.sharding.PartitionSpec("a", "b")
    x = jnp.arange(1.0, 17.0).reshape(4, 4).at[2, 1].set(-1.0)
    x = jax.device_put(x, jax.NamedSharding(mesh, spec))
    report = nonfinite_report(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec), x)
    assert report
    assert {source.primitive for source in report.sources} == {"log"}
    assert f"{__file__}:" in report.first.place
    assert (report.first.index, report.first.inputs, report.first.note) == ((0, 1), (-1.0,), "")
    assert report.first.device == {"a": 1, "b": 0}


@pytest.mark.exhaustive
def test_equation_that_hides_a_program_says_so():
    def kernel(x_ref, y_ref):
        y_ref[...] = jnp.log(x_ref[...])

    call = pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(X.shape, X.dtype), interpret=True)
    report = nonfinite_report(lambda x: call(x), X)
    assert report.first.primitive == "pallas_call"
    assert "what is inside of it was not looked into" in str(report)


def test_nan_made_from_infinities():
    infinities = {
        "reduce_sum": jnp.sum,
        "cumsum": jnp.cumsum,
        "dot_general": lambda x: x @ jnp.zeros((3, 2)),
        "fft": lambda x: jnp.fft.fft(x).real,
        "sub": lambda x: jax.nn.softmax(jnp.minimum(x, -jnp.inf)),
    }
    for primitive, fn in infinities.items():
        report = nonfinite_report(lambda x: fn(jnp.where(x > 1, jnp.inf, -jnp.inf)), X)  # noqa: B023
        assert report.sources == ()
        assert report.first.primitive == primitive
        assert np.isnan(np.real(report.first.value))
    assert report.first.inputs == (-np.inf, -np.inf)
    assert "NaN made from infinities by:\n  sub gives nan from -inf, -inf" in str(report)


def test_sources_of_all_steps_of_a_loop_share_a_line():
    text = str(nonfinite_report(lambda x: lax.map(jnp.log, x), jnp.zeros(100)))
    assert "and 99 more times" in text
    assert len(text.splitlines()) < 10


def test_arguments_that_cannot_be_replayed_are_refused():
    with pytest.raises(TypeError, match=r"nonfinite_report: args\[0\]: got type"):
        nonfinite_report(lambda f, x: f(x), jnp.log, X)
    with pytest.raises(TypeError, match="nonfinite_report: fn: got no output of floats"):
        nonfinite_report(lambda x: jnp.argmax(x), X, grad=True)
    assert not nonfinite_report(lambda n, x: x / (n + 1), 0, 1.0, grad=True)


def test_mutable_reference_is_refused():
    def fn(x):
        ref = jax.new_ref(x)
        ref[...] = jnp.log(x)
        return ref[...]

    with pytest.raises(NotImplementedError, match="nonfinite_report: fn uses a mutable reference"):
        nonfinite_report(fn, X)


# The names of JAX's primitives, by which the search knows what an equation does.

IS_NEW = jax.__version_info__ >= (0, 12)
NAMES_OF_OTHER_VERSIONS = {"call", "closed_call"} if IS_NEW else {"reduced_vary_cast", "vary_unreduced_cast"}


@pytest.mark.exhaustive
def test_every_name_is_that_of_a_primitive():
    of_programs = _replay.CALLS | _replay.RETYPINGS | _replay.PLACEMENTS | _replay.ARITHMETIC | set(_replay._STRUCTURES)
    of_rules = {*_rules.KINDS, *_rules.FIRST_INDEX, *_rules.MIXED_AXES, *_rules.DECIDING}
    names = of_programs | of_rules | _devices.EXCHANGES
    assert len(names) > 150
    known = {x.name for x in gc.get_objects() if isinstance(x, Primitive)}
    assert names - known == NAMES_OF_OTHER_VERSIONS
