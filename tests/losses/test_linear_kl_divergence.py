"""What divergences of linear layers have of their own: directions, digits of each, teachers known in part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import in_float64
from linear_cases import CLASSES, DIRECTIONS, FEATURES, KERNEL, TARGETS, TOKENS, top_k_targets
from tiers import parametrize

import masksafe
from masksafe.losses import linear_kl_divergence, linear_kl_divergence_with_top_k_targets

ARGS = FEATURES, KERNEL, *TARGETS.values()
top_k = functools.partial(linear_kl_divergence_with_top_k_targets, block_size=9)
pytestmark = pytest.mark.usefixtures("small_tiles")


def plain(x, kernel, y, target_kernel, bias=0.0, target_bias=0.0, temperature=1.0, **options):
    """The formula with all logits in memory, which JAX differentiates in any dtype."""
    log_q = jax.nn.log_softmax((jnp.matmul(x, kernel) + bias) / temperature)
    log_p = jax.nn.log_softmax((jnp.matmul(y, target_kernel) + target_bias) / temperature)
    kl, beta = lambda a, b: jnp.sum(jnp.exp(a) * (a - b), -1), options.get("beta", 0.5)
    log_m = jnp.logaddexp(log_p + np.log(beta), log_q + np.log(1 - beta))
    losses = {
        "forward": lambda: kl(log_p, log_q),
        "reverse": lambda: kl(log_q, log_p),
        "jensen_shannon": lambda: beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m),
    }[options["direction"]]()
    return {"none": lambda x: x, "sum": jnp.sum, "mean": jnp.mean}[options.get("reduction", "mean")](losses)


@parametrize("temperature", [1e-38], exhaustive=[1e-3])
@parametrize("direction", ["reverse"], exhaustive=["jensen_shannon"])
def test_a_low_temperature_costs_no_digits(direction, temperature):
    """The largest logit is subtracted first: the quotients alone would lose their difference, or overflow."""
    student, teacher, kernel = np.array([[3.3, 3.3, -5, -7]]), np.array([[3.3, 3.3, 3.3, -7]]), np.eye(4)
    of = lambda fn: lambda x: fn(x, kernel, teacher, kernel, temperature=temperature, direction=direction)  # noqa: E731
    value, gradient = jax.jit(jax.value_and_grad(of(linear_kl_divergence)))(student)
    with jax.enable_x64(True):
        np.testing.assert_allclose(value, of(plain)(student), rtol=1e-6)  # compiled, jax 0.12 makes it infinite
    assert not np.isnan(gradient).any()


def test_teacher_has_no_gradients_unless_asked():
    loss = lambda *args: linear_kl_divergence(*args[:4], target_bias=args[4])  # noqa: E731
    gradients = jax.jit(jax.grad(loss, range(5)))(*ARGS, np.ones(CLASSES))
    assert [bool(np.any(g)) for g in gradients] == [True, True, False, False, False]
    with masksafe.forward_mode():
        along = jax.jit(lambda t: jax.jvp(lambda t: loss(*ARGS[:2], t, ARGS[3], np.ones(CLASSES)), (t,), (t,))[1])
        assert along(ARGS[2]) == 0


@parametrize("direction", ["forward"], exhaustive=DIRECTIONS)
@parametrize("noise", [1e-3], exhaustive=[1.0])
def test_the_error_is_that_of_the_formula(direction, noise):
    """In float32, against float64: at most twice that of the plain formula, or a few units in the last place of 1."""
    rng = np.random.default_rng(1)
    teacher = np.float32(rng.normal(size=(8, 50)) * 3)
    student = np.float32(teacher + noise * rng.normal(size=teacher.shape))

    def of(fn, student, teacher):
        loss = lambda x: fn(x, jnp.eye(50), teacher, jnp.eye(50), reduction="none", direction=direction, beta=0.3)  # noqa: E731
        return loss(student), jax.grad(lambda x: loss(x).sum())(student)

    both = jax.jit(lambda *rows: [of(fn, *rows) for fn in (linear_kl_divergence, plain)])(student, teacher)
    exact = in_float64(jax.jit(functools.partial(of, plain)), student, teacher)
    for ours, peers, desired in zip(*both, exact, strict=True):
        of_ours, of_peers = (np.abs(x - desired).max() for x in (ours, peers))
        assert of_ours <= max(2 * of_peers, 4 * np.finfo(np.float32).eps * max(1, np.abs(desired).max()))


@parametrize("direction", ["reverse"], exhaustive=["forward"])
def test_float16_gradients_of_a_sum_do_not_overflow_at_a_low_temperature(direction):
    near, far = np.float16([[1.0, 0.98, -1.0]]), np.float16([[-1.0, 0.5, 1.0]])
    eye = np.eye(3, dtype="float16")
    options = {"direction": direction, "temperature": 0.01, "reduction": "sum"}
    of = lambda fn, eye, far: jax.jit(jax.grad(lambda x: fn(x, eye, far, eye, **options)))  # noqa: E731
    gradient = of(linear_kl_divergence, eye, far)(near)
    desired = in_float64(lambda eye, far, near: of(plain, eye, far)(near), eye, far, near)
    np.testing.assert_allclose(gradient, desired, rtol=4e-3, atol=1e-3 * abs(desired).max())


@parametrize("direction", ["forward"], exhaustive=["jensen_shannon"])
def test_second_derivatives_of_improbable_classes(direction):
    """In a mixture the square of their probability is no float32."""
    rows = np.float32(np.random.default_rng(1).normal(size=(2, 30)) * 4)
    rows[:, :3] -= 60

    @jax.jit
    def derivatives(student, teacher):
        zero, kernel = jnp.zeros((1, 1)), jnp.zeros((1, 30))

        def loss(*biases):
            options = {"bias": biases[0], "target_bias": biases[1], "target_gradients": True}
            return linear_kl_divergence(zero, kernel, zero, kernel, direction=direction, **options)

        return jax.jvp(jax.grad(loss, (0, 1)), (student, teacher), (jnp.cos(student), jnp.sin(teacher)))

    both = derivatives(*rows), in_float64(derivatives, *rows)
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * abs(b).max())


@parametrize("direction", ["reverse"], exhaustive=["forward", "jensen_shannon"])
def test_classes_of_probability_zero(direction):
    """0 log 0 = 0; what one side excludes and the other does not is infinitely far, for one of the directions."""
    excluded = np.where(np.arange(CLASSES) < 3, -np.inf, 0)

    @jax.jit
    def step(features, kernel, bias, target_bias):
        options = {"bias": bias, "target_bias": target_bias, "direction": direction}
        of = lambda *args: linear_kl_divergence(*args, **TARGETS, **options)  # noqa: E731
        lowest = {name: jnp.maximum(options[name], -1e4) for name in ("bias", "target_bias")}
        return *jax.value_and_grad(of, (0, 1))(features, kernel), plain(*ARGS, **options | lowest)

    for who, biases in {"both": (1, 1), "student": (1, 0), "teacher": (0, 1)}.items():
        biases = [excluded if given else np.zeros(CLASSES) for given in biases]
        value, gradients, expected = step(FEATURES, KERNEL, *biases)
        if (who, direction) in (("student", "forward"), ("teacher", "reverse")):
            assert value == np.inf
            continue
        assert all(np.isfinite(g).all() for g in gradients)
        if who != "teacher":
            np.testing.assert_array_equal(gradients[1][:, :3], 0)
        np.testing.assert_allclose(value, expected, rtol=1e-5)


# Teachers of which only the most probable classes are known.


def test_a_sure_teacher_leaves_no_infinity():
    @jax.jit
    def of_each(log_probs):
        of = functools.partial(top_k, jnp.eye(1), jnp.array([[1.0, 0.0, -1.0]]), log_probs, jnp.array([[0]]))
        return [of(direction=direction) for direction in DIRECTIONS]

    assert np.isfinite(of_each(np.array([[1e-6]]))).all()  # the sum is above 1


def test_label_checks_of_top_k_targets():
    log_probs, classes = top_k_targets().values()
    out_of_range, repeated, above = classes.copy(), classes.copy(), log_probs.copy()
    out_of_range[5, 1], repeated[4, 3], above[2, 0] = CLASSES, repeated[4, 0], 0.3
    of = jax.jit(functools.partial(top_k, FEATURES, KERNEL))
    where, every_class = np.ones_like(classes, bool), np.ones(CLASSES, bool)
    where[5, 1] = where[4, 3] = where[2, 0] = False
    with masksafe.label_checks("raise"):
        for bad, text in (
            ((log_probs, out_of_range), r"target_classes are outside \[0, 24\); first at \(5, 1\): 24"),
            ((log_probs, repeated), r"target_classes are repeated in their row; first at \(4, 3\)"),
            ((above, classes), r"target_log_probs are logarithms above 0 or NaN; first at \(2, 0\)"),
        ):
            with pytest.raises(Exception, match=text):
                jax.block_until_ready(of(*bad, where=where | True, class_mask=every_class))
            jax.block_until_ready(of(*bad, where=where, class_mask=every_class))
        masked, rows = np.arange(CLASSES) != classes[8, 0], np.arange(TOKENS)[:, None] > 5
        rows = np.broadcast_to(rows, where.shape)
        jax.block_until_ready(of(above, out_of_range, where=rows, class_mask=every_class))
        with pytest.raises(Exception, match="target_classes are at a masked class"):
            jax.block_until_ready(of(log_probs, classes, where=rows, class_mask=masked))


def test_a_target_at_a_masked_class_costs_infinity():
    targets = top_k_targets()
    classes = targets["target_classes"]
    of = functools.partial(top_k, **targets, class_mask=np.arange(CLASSES) != classes[8, 0], reduction="none")
    np.testing.assert_array_equal(np.isinf(jax.jit(of)(FEATURES, KERNEL)), (classes == classes[8, 0]).any(-1))
