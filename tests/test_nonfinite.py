"""nonfinite_report names the equation that made the NaN or the infinity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import masksafe
from masksafe.testing import nonfinite_report

X = jnp.array([1.0, 0.0, 4.0])


def entropy(p):
    return jnp.sum(p * jnp.log(p))


def mean_of_nothing(x):
    return jnp.sum(jnp.where(x > 9, x, 0)) / jnp.sum(x > 9)


def norm(x):
    return jnp.sum(jnp.sqrt(x))


def naive_softmax(x):
    return jnp.exp(100 * x) / jnp.sum(jnp.exp(100 * x))


def masked_softmax(x):
    return jax.nn.softmax(jnp.where(x > 9, x, -jnp.inf))


# The bug, whether it is in the gradient, and the primitive, index and inputs that the report must blame.
CLASSIC = {
    "log(0) * 0": (entropy, X, False, "log", (1,), (0.0,)),
    "mean of nothing": (mean_of_nothing, X, False, "div", (), (0.0, 0.0)),
    "sqrt at 0 in a gradient": (norm, X, True, "div", (1,), (0.5, 0.0)),
    "exp overflow": (naive_softmax, X, False, "exp", (0,), (100.0,)),
}


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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name, case in CLASSIC.items() if not case[2]])
def test_classic_bug_is_found_in_every_construct(name, way):
    fn, x, _, primitive, index, inputs = CLASSIC[name]
    report = nonfinite_report(WAYS[way](fn), x)
    assert report
    assert report.first.primitive == primitive
    assert report.first.index == index
    assert report.first.inputs == inputs
    assert f"{__file__}:" in report.first.place
    assert f"in {fn.__name__}" in report.first.place


@pytest.mark.parametrize("way", ["plain", "jit", "checkpoint", "scan"])
def test_gradient_of_a_square_root_at_zero(way):
    fn, x, grad, primitive, index, _ = CLASSIC["sqrt at 0 in a gradient"]
    assert not nonfinite_report(fn, x)
    report = nonfinite_report(lambda x: jnp.sum(WAYS[way](fn)(x)), x, grad=grad)
    assert (report.first.primitive, report.first.index) == (primitive, index)
    assert report.first.inputs[-1] == 0
    assert report.outputs[0].startswith("output[0], float32[3]: 1 of 3 elements, the first at index (1,)")


def test_softmax_of_nothing_but_minus_infinity():
    report = nonfinite_report(masked_softmax, X)
    assert report.sources == ()
    assert report.first.primitive == "sub"
    assert report.first.inputs == (-np.inf, -np.inf)
    assert "NaN made from infinities by:\n  sub gives nan from -inf, -inf" in str(report)


def test_bad_argument_is_named():
    report = nonfinite_report(lambda params, x: params["w"] * x, {"w": X.at[2].set(jnp.nan)}, X)
    assert report.sources == ()
    assert report.arguments == ("argument [0]['w'], float32[3]: 1 of 3 elements, the first at index (2,)",)


def test_two_bugs_are_both_found_and_in_their_order():
    report = nonfinite_report(lambda x: (jnp.log(x), 1 / (x - 1)), X)
    assert [source.primitive for source in report.sources] == ["log", "div"]
    assert [source.index for source in report.sources] == [(1,), (0,)]
    assert len(report.outputs) == 2


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


def test_rows_of_moved_and_summed_elements_are_followed():
    def fn(x):
        rows = jnp.stack([jnp.log(x), jnp.exp(200 * x)])
        return (rows.T[::-1] @ jnp.eye(2))[2, 0]  # log(x)[0], which is finite, times 1, and exp(...) times 0

    report = nonfinite_report(fn, X)
    assert [source.primitive for source in report.sources] == ["exp"]


def test_finite_function():
    report = nonfinite_report(masksafe.softmax, X)
    assert not report
    assert str(report) == "Everything is finite."


def test_ops_of_masksafe_are_replayed():
    def loss(x):
        attended = masksafe.dot_product_attention(x, x, x, key_value_seq_lengths=jnp.array([0, 2]))
        normalized = masksafe.layer_norm(attended, where=jnp.arange(4) < 3)
        return jnp.log(jnp.sum(normalized) * 0)

    x = jax.random.normal(jax.random.key(0), (2, 3, 1, 4)).at[0].set(jnp.nan)
    report = nonfinite_report(loss, x)
    assert report.first.primitive == "log"
    assert report.arguments == ()
    report = nonfinite_report(loss, x, grad=True)
    assert report.first is not None


def test_a_bad_label_is_found_in_the_loss():
    loss = masksafe.losses.softmax_cross_entropy_with_integer_labels
    report = nonfinite_report(lambda x: loss(x, jnp.array([0, 7])), jnp.ones((2, 3)))
    assert report.outputs == ("output, float32[2]: 1 of 2 elements, the first at index (1,)",)
    assert f"{__file__}:" in report.first.place


def test_scan_in_reverse_and_without_steps():
    def fn(x):
        _, logs = lax.scan(lambda c, x: (c, jnp.log(x)), 0.0, x, reverse=True)
        _, none = lax.scan(lambda c, x: (c, jnp.log(x)), 0.0, x[:0])
        return logs, none

    report = nonfinite_report(fn, X)
    assert len(report.outputs) == 1
    assert report.outputs[0].endswith("1 of 3 elements, the first at index (1,)")
    assert report.first.inputs == (0.0,)


OVERFLOWS_IN_ROW_1 = lambda x: jnp.stack([jnp.log(x[0] - 5), jnp.exp(x[1] * 100)])  # noqa: E731
ROWS = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
LAST = jnp.array([[False], [True]])


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: jnp.max(x, -1, keepdims=True),
        lambda x: jnp.prod(x, -1, keepdims=True),
        lambda x: jnp.sort(x, -1),
        lambda x: lax.cummax(x, 1),
        lambda x: lax.cumsum(x, 1, reverse=True),
        lambda x: lax.top_k(x, 2)[0],
        lambda x: jnp.fft.fft(x).real,
        lambda x: lax.reduce(x, 1.0, lambda a, b: a * b * 1.5, (1,))[:, None],
        lambda x: x @ jnp.ones((3, 2)),
        lambda x: jnp.linalg.cholesky(x[..., None] * jnp.eye(3))[..., 0],
    ],
    ids=["max", "prod", "sort", "cummax", "cumsum", "top_k", "fft", "reduce", "matmul", "cholesky"],
)
def test_rows_stay_apart_where_elements_of_a_row_are_mixed(mix):
    report = nonfinite_report(lambda x: jnp.where(LAST, mix(OVERFLOWS_IN_ROW_1(x)), 0), ROWS)
    assert report.first.primitive == "exp"
    assert report.first.index == (0,)


@pytest.mark.parametrize("mix", [lambda x: jnp.sum(x, -1), lambda x: x @ jnp.ones((3, 2))], ids=["sum", "matmul"])
def test_second_overflow_of_an_equation_is_found(mix):
    report = nonfinite_report(lambda x: mix(jnp.stack([jnp.log(x[0] - 5), x[1] * 4e37])), ROWS)
    log, mixed = report.sources
    assert (log.primitive, log.index[0]) == ("log", 0)
    assert mixed.index[0] == 1


@pytest.mark.parametrize(
    "fn",
    [jnp.sum, jnp.cumsum, lambda x: x @ jnp.zeros((3, 2)), lambda x: jnp.fft.fft(x).real],
    ids=["sum", "cumsum", "matmul", "fft"],
)
def test_nan_made_from_infinities_in_a_sum(fn):
    report = nonfinite_report(lambda x: fn(jnp.where(x > 1, jnp.inf, -jnp.inf)), X)
    assert report.sources == ()
    assert report.first.primitive in ("reduce_sum", "cumsum", "dot_general", "fft")
    assert np.isnan(np.real(report.first.value))


def test_bad_values_of_a_closure_and_written_infinities_have_a_source():
    data = np.array([1.0, np.nan, 2.0], np.float32)
    for captured in (data, jnp.asarray(data)):
        report = nonfinite_report(lambda w, captured=captured: jnp.sum(w * captured), X)
        assert (report.first.primitive, report.first.index) == ("mul", (1,))
    report = nonfinite_report(lambda x: jnp.where(x > 2, x, -jnp.inf), X)
    assert report.first.value == -np.inf
    assert f"{__file__}:" in report.first.place


def test_reducer_given_by_the_user_is_not_taken_for_a_call():
    product = lambda x: lax.reduce(x * 1e30, 1.0, lambda a, b: a * b * 1.0000001, (1,))  # noqa: E731
    report = nonfinite_report(product, ROWS)
    assert report.first.primitive == "reduce"
    assert report.first.result == "float32[2]"
    report = nonfinite_report(lambda x: lax.reduce_window(jnp.log(x - 1), 0.0, lax.add, (1, 2), (1, 1), "VALID"), ROWS)
    assert report.first.primitive == "log"


def test_loop_of_a_thousand_steps():
    def fn(x):
        step = lambda c, i: (c * jnp.where(i == 3, jnp.log(-c), 1.0), c)  # noqa: E731
        return lax.scan(step, x, jnp.arange(1000))

    report = nonfinite_report(fn, jnp.ones(()))
    assert (report.first.primitive, report.first.inputs) == ("log", (-1.0,))
    assert len(report.sources) == 1
    text = str(nonfinite_report(lambda x: lax.map(jnp.log, x), jnp.zeros(1000)))
    assert "and 999 more times" in text
    assert len(text.splitlines()) < 10


def test_complex_numbers():
    report = nonfinite_report(lambda x: jnp.abs((x + 1j) / (x - x)), X)
    assert report.first.primitive == "div"
    assert isinstance(report.first.inputs[0], complex)
    assert "div gives" in str(report)


def test_arguments_that_cannot_be_replayed_are_refused():
    with pytest.raises(TypeError, match=r"nonfinite_report: args\[0\] has type"):
        nonfinite_report(lambda f, x: f(x), jnp.log, X)
    with pytest.raises(TypeError, match="nonfinite_report: fn has no float output"):
        nonfinite_report(lambda x: jnp.argmax(x), X, grad=True)
    assert not nonfinite_report(lambda n, x: x / (n + 1), 0, 1.0, grad=True)


def test_mutable_reference_is_refused():
    def fn(x):
        ref = jax.new_ref(x)
        ref[...] = jnp.log(x)
        return ref[...]

    with pytest.raises(NotImplementedError, match="nonfinite_report: fn uses a mutable reference"):
        nonfinite_report(fn, X)
