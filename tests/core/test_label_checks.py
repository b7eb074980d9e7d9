"""The checks of labels, in their three modes."""

import functools
import os
import re
import socket
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import PartitionSpec

import masksafe

CLASSES = 5
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, CLASSES)), jnp.float32)
LABELS = jnp.array([[0, 1, 2], [3, 5, 4], [0, -1, 7], [1, 1, 1]])
GOOD = jnp.clip(LABELS, 0, CLASSES - 1)
TEXT = "softmax_cross_entropy_with_integer_labels: 3 of 12 labels are outside [0, 5); first at (1, 1): 5"
SOFT = jax.nn.one_hot(GOOD, CLASSES)
IGNORED = 9
PADDED = jnp.where(LABELS == GOOD, LABELS, IGNORED)

integer_loss = masksafe.losses.softmax_cross_entropy_with_integer_labels
soft_losses = [masksafe.losses.softmax_cross_entropy, masksafe.losses.safe_softmax_cross_entropy]


def mesh_of_rows(devices=4, axis_type="Auto"):
    return jax.make_mesh((devices,), ("rows",), axis_types=(getattr(jax.sharding.AxisType, axis_type),))


def split_over(mesh, *arrays):
    return jax.device_put(arrays, jax.sharding.NamedSharding(mesh, PartitionSpec("rows")))


def checked(mode, fn, errors=checkify.user_checks):
    """A compiled function of arguments that returns what the checks report of them, or None."""
    program = jax.jit(checkify.checkify(fn, errors=errors) if mode == "checkify" else fn)

    def report(*args):
        with masksafe.label_checks(mode):
            if mode == "checkify":
                return program(*args)[0].get()
            try:
                jax.block_until_ready(program(*args))
            except jax.errors.JaxRuntimeError as error:
                return str(error)
        return None

    return report


def mean_loss(logits, labels):
    return masksafe.mean(integer_loss(logits, labels))


def padded_loss(logits, labels):
    """The mean over what is not to be ignored, whose logits are NaN."""
    where = labels != IGNORED
    logits = jnp.where(where[..., None], logits, jnp.nan)
    return masksafe.mean(integer_loss(logits, labels, where=where), where=where)


def in_scan(fn):
    """The sum over the rows, each in a step of a scan."""

    def scanned(logits, labels):
        step = lambda total, row: (total + fn(*row), None)  # noqa: E731
        return lax.scan(step, 0.0, (logits, labels))[0]

    return scanned


def in_while(fn):
    def looped(logits, labels):
        step = lambda carry: (carry[0] + 1, carry[1] + fn(logits[carry[0]], labels[carry[0]]))  # noqa: E731
        return lax.while_loop(lambda carry: carry[0] < len(labels), step, (0, 0.0))[1]

    return looped


def in_cond(fn):
    return lambda logits, labels: lax.cond(logits[0, 0, 0] < 1e9, fn, lambda *_: 0.0, logits, labels)


def over_rows(mesh, fn):
    rows = PartitionSpec("rows")
    return jax.shard_map(lambda *args: fn(*args)[None], mesh=mesh, in_specs=rows, out_specs=rows)


def in_shard_map(fn):
    return over_rows(mesh_of_rows(), fn)


WAYS = {
    "jit of vmap of grad": lambda fn: jax.jit(jax.vmap(jax.grad(fn))),
    "eager": lambda fn: fn,
    "jit": jax.jit,
    "grad of jit": lambda fn: jax.grad(jax.jit(fn)),
    "vmap": jax.vmap,
    "scan": in_scan,
    "while": in_while,
    "cond": in_cond,
    "grad of remat": lambda fn: jax.grad(jax.checkpoint(fn)),
    "shard_map": in_shard_map,
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_tells_which_label_is_bad_and_is_quiet_on_masked_ones(way):
    for mode in ("checkify", "raise"):
        errors = checkify.all_checks if way in ("vmap", "while") else checkify.user_checks
        report = checked(mode, WAYS[way](padded_loss), errors)
        assert report(LOGITS, PADDED) is None
        text = report(LOGITS, LABELS)
        first = r"\d of \d+ labels are outside \[0, 5\); first at \(\d,( \d)?\)( of shard \d)?: (5|-1|7)"
        assert re.search(first, text)
        assert mode == "checkify" or text.count("; first at ") == 1
        if mode == "raise" or way in ("eager", "jit"):
            assert f"called at {__file__}:" in text
        if way in ("eager", "jit"):
            assert TEXT in text


# checkify


def test_gradient_of_the_checked_function_is_the_checked_gradient():
    @jax.jit
    def gradients(logits):
        checked = checkify.checkify(mean_loss)
        outside = jax.grad(lambda logits: checked(logits, GOOD)[1])(logits)
        return outside, checkify.checkify(jax.grad(mean_loss))(logits, GOOD)

    with masksafe.label_checks("checkify"):
        outside, (error, inside) = gradients(LOGITS)
        error.throw()
    exp = np.exp(np.asarray(LOGITS, np.float64))
    expected = (exp / exp.sum(-1, keepdims=True) - SOFT) / GOOD.size
    # Numbers below 1 out of sums of five: float32 has seven digits.
    np.testing.assert_allclose(outside, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(inside, expected, rtol=1e-5, atol=1e-7)


def test_function_that_checkify_has_not_been_through_fails_loudly():
    with masksafe.label_checks("checkify"):
        with pytest.raises(Exception, match=r"labels are outside \[0, 5\)"):
            mean_loss(LOGITS, LABELS)
        with pytest.raises(ValueError, match="checkify"):
            jax.jit(mean_loss)(LOGITS, LABELS)
    for _ in range(2):  # the second time JAX finds the trace in its cache
        with pytest.raises(ValueError, match="stages such checks: compile") as error, masksafe.label_checks("checkify"):
            jax.jit(mean_loss)(LOGITS, LABELS)
        assert 'label_checks("raise")' in str(error.value)
    with pytest.raises(KeyError), masksafe.label_checks("checkify"):  # other errors are as they were
        raise KeyError


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_checkify_around_a_shard_map_over_the_set_mesh_is_refused(axis_type):
    mesh = mesh_of_rows(axis_type=axis_type)
    step = jax.jit(checkify.checkify(jax.jit(over_rows(mesh, mean_loss))))
    text = r"integer_labels: label_checks: got mode \"checkify\" in a jax.shard_map .*; expected mode \"raise\""
    with jax.set_mesh(mesh), masksafe.label_checks("checkify"), pytest.raises(ValueError, match=text):
        step(*split_over(mesh, LOGITS, LABELS))


# raise


@pytest.mark.parametrize("axis_type", ["Explicit", "Auto"])
def test_raise_stops_every_device(axis_type):
    """A device that went on alone would wait for the others in the gradient's sum until JAX aborts the process."""
    mesh, labels = mesh_of_rows(8, axis_type), jnp.zeros(16, int)

    def two_steps(kernel, inputs, labels):
        for _ in range(2):
            kernel -= jax.grad(lambda kernel: mean_loss(jnp.tanh(inputs @ kernel), labels))(kernel)
        return kernel

    report = checked("raise", two_steps)
    with jax.set_mesh(mesh):
        kernel = jax.device_put(jnp.ones((4, CLASSES)), jax.sharding.NamedSharding(mesh, PartitionSpec()))
        assert report(kernel, *split_over(mesh, jnp.ones((16, 4)), labels)) is None
        text = report(kernel, *split_over(mesh, jnp.ones((16, 4)), labels.at[9].set(5)))
    assert "1 of 16 labels are outside [0, 5); first at (9,): 5" in text


@pytest.mark.parametrize("check_vma", [True, False])
def test_raise_stops_every_device_of_a_shard_map(check_vma):
    mesh = jax.make_mesh((2, 4), ("rows", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def step(logits, labels):
        return jax.lax.pmean(jax.value_and_grad(mean_loss)(logits, labels), "rows")

    specs = {"in_specs": (PartitionSpec("rows"),) * 2, "out_specs": PartitionSpec()}
    report = checked("raise", jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs))
    assert report(LOGITS, GOOD) is None
    assert re.search(r"first at \(0, 1\) of shard [4-7]: -1", report(LOGITS, GOOD.at[2, 1].set(-1)))


def test_raise_reports_once_for_all_elements_of_a_vmap():
    logits, labels = jnp.zeros((1000, 3, CLASSES)), jnp.zeros((1000, 3), int).at[700, 1].set(9).at[800].set(-1)
    by_row = jax.jit(jax.vmap(jax.vmap(integer_loss)))
    with masksafe.label_checks("raise"):
        assert by_row.lower(logits, labels).as_text().count("callback") < 5
    text = "4 of 3000 labels are outside [0, 5); first at (700, 1): 9"
    assert text in checked("raise", by_row)(logits, labels)


def shared_mask(logits, labels):
    return soft_losses[0](logits, labels, where=jnp.arange(3)[:, None] < 2)


HALF = SOFT[:2].at[1, 0].set(0).at[1, 0, 0].set(0.5)
FAILING = {
    "labels that a vmap shares": (
        lambda: jax.jit(jax.vmap(integer_loss, (0, None)))(jnp.zeros((3, 2, CLASSES)), jnp.array([0, 9])),
        r"1 of 2 labels .* first at \(1,\): 9",
    ),
    "eager vmap with a shared mask": (
        lambda: jax.vmap(shared_mask)(LOGITS[:2], HALF),
        r"1 of 4 rows of labels .* first at \(1, 0\): 0.5",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_raise_tells_once_in_unusual_programs(name):
    run, text = FAILING[name]
    expected = ValueError if name.startswith("eager") else jax.errors.JaxRuntimeError
    with masksafe.label_checks("raise"), pytest.raises(expected, match=text) as error:
        jax.block_until_ready(run())
    assert str(error.value).count("; first at ") == 1


def test_gradient_of_labels_is_checked():
    report = checked("raise", jax.grad(lambda labels: jnp.sum(soft_losses[0](LOGITS, labels))))
    assert report(SOFT) is None
    assert "first at (1, 0, 0): -1.0" in report(SOFT.at[1, 0, 0].set(-1))


# Each call makes new functions, as code does that is not written for a benchmark.
REPEATED = {
    "eager": mean_loss,
    "jit of value_and_grad": jax.jit(jax.value_and_grad(mean_loss)),
    "vmap of vmap": lambda *args: jax.vmap(jax.vmap(lambda *args: integer_loss(*args)))(*args),
    "vmap of grad of remat": lambda *args: jax.vmap(jax.grad(jax.checkpoint(lambda *args: mean_loss(*args))))(*args),
    "scan": lambda *args: lax.scan(step_of_scan, 0.0, args)[0],
}


def step_of_scan(total, row):
    return total + mean_loss(*row), None


@pytest.mark.parametrize("mode", ["raise", "off", "checkify"])
@pytest.mark.parametrize("way", REPEATED)
def test_repeated_calls_compile_nothing(way, mode, compilations):
    # An eager checkify compiles at each call in jax 0.10, also without masksafe.
    fn = jax.jit(checkify.checkify(REPEATED[way])) if mode == "checkify" else REPEATED[way]
    jax.jit(lambda x: x + 1)(0)
    assert compilations  # so they count
    with masksafe.label_checks(mode):
        jax.block_until_ready(fn(LOGITS, GOOD))
        compilations.clear()
        for _ in range(2):
            jax.block_until_ready(fn(LOGITS, GOOD))
    assert not compilations


TWO_PROCESSES = """
import sys, jax, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
import masksafe
by_row = jax.sharding.NamedSharding(jax.make_mesh((4,), ("rows",)), jax.sharding.PartitionSpec("rows"))
rows = lambda x: jax.make_array_from_callback(x.shape, by_row, lambda index: x[index])
loss = masksafe.losses.softmax_cross_entropy_with_integer_labels
step = jax.jit(jax.value_and_grad(lambda logits, labels: masksafe.mean(loss(logits, labels))))
try:
    with jax.set_mesh(by_row.mesh), masksafe.label_checks("raise"):
        jax.block_until_ready(step(rows(np.zeros((8, 7), np.float32)), rows(np.arange(8, dtype=np.int32))))
except jax.errors.JaxRuntimeError as error:
    print(str(error).splitlines()[-1])
jax.distributed.shutdown()  # JAX does not get to it at exit, where it tells the error once more (jax 0.12)
"""


@pytest.mark.slow
def test_an_error_is_raised_in_both_of_two_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        command = [sys.executable, "-c", TWO_PROCESSES, str(free.getsockname()[1])]
    flags = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, number], env=flags, **pipes) for number in "01"]
    for process in processes:
        told, _ = process.communicate(timeout=600)
        assert told.count("1 of 8 labels are outside [0, 7); first at (7,): 7") == 1
        assert process.returncode == 0


# The text.


@pytest.mark.parametrize(
    ("labels", "kwargs", "text"),
    [
        (LABELS, {"where": jnp.arange(4)[:, None] > 1}, "2 of 6 labels are outside [0, 5); first at (2, 1): -1"),
        (LABELS[2, 2], {}, "1 of 1 labels are outside [0, 5); first at (): 7"),
        (LABELS.astype(jnp.int8) - 100, {}, "12 of 12 labels are outside [0, 5); first at (0, 0): -100"),
        (np.full((4, 3), 2**40), {}, "12 of 12 labels are outside [0, 5); first at (0, 0): 2147483647"),
        (GOOD, {"where": jnp.arange(5)[None, None] != 3}, "1 of 12 labels are at a masked class; first at (1, 0): 3"),
    ],
)
def test_text_of_integer_labels(labels, kwargs, text):
    logits = LOGITS[(0,) * (2 - np.ndim(labels))]
    with masksafe.label_checks("raise"), pytest.raises(ValueError, match=re.escape(text)) as error:
        integer_loss(logits, labels, **kwargs)
    assert f"called at {__file__}:" in str(error.value)


@pytest.mark.parametrize("axis", [(2, 1), (1, 2)], ids=str)
def test_label_over_several_axes_at_a_masked_class(axis):
    where = jnp.ones((4, 3, 5), bool).at[2, 1, 3].set(False)
    label = 1 * 5 + 3 if axis == (1, 2) else 3 * 3 + 1
    report = checked("raise", lambda where: integer_loss(LOGITS, jnp.full(4, label), axis=axis, where=where))
    assert report(where.at[2].set(True)) is None
    assert f"1 of 4 labels are at a masked class; first at (2,): {label}" in report(where)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("loss", soft_losses)
def test_distributions(loss, dtype):
    soft, report = jnp.asarray(jax.nn.softmax(LOGITS), dtype), checked("raise", loss)
    is_bad, sums = (
        "labels are negative or not finite; first at",
        "1 of 12 rows of labels sum to neither 1 nor 0; first at",
    )
    bad = {
        f"1 of 60 {is_bad} (1, 2, 3): nan": soft.at[1, 2, 3].set(jnp.nan),
        f"2 of 60 {is_bad} (1, 2, 3): -0.5": soft.at[1, 2, 3:].set(-0.5),
        f"1 of 60 {is_bad} (0, 0, 0): inf": soft.at[0, 0, 0].set(jnp.inf),
        f"{sums} (3, 0): ": soft.at[3, 0].set(0.5),
        f"{sums} (3, 1): 0.5": soft.at[3, 1].set(0).at[3, 1, 0].set(0.5),
    }
    for labels in (soft, soft.at[2].set(0)):
        assert report(LOGITS, labels) is None
    for text, labels in bad.items():
        assert f"{loss.__name__}: {text}" in report(LOGITS, labels)


def test_masked_probabilities_are_not_looked_at():
    where = jnp.ones(LOGITS.shape, bool).at[0].set(False).at[1, 2, 3].set(False)
    report = checked("raise", lambda logits, labels: soft_losses[0](logits, labels, where=where))
    assert report(LOGITS, jnp.where(where, SOFT, jnp.nan)) is None


UNUSUAL = {
    "4 bits": (integer_loss, jnp.zeros((2, 5)), jnp.array([4, 0], "int4")),
    "no labels": (integer_loss, jnp.zeros((3, 0, 5)), jnp.zeros((3, 0), int)),
    "no rows": (soft_losses[0], jnp.zeros((3, 0, 5)), jnp.zeros((3, 0, 5))),
    "integers": (soft_losses[0], LOGITS, SOFT.astype(int)),
    "many classes": (soft_losses[0], jnp.zeros((1, 100_000)), jnp.full((1, 100_000), 1e-5, "float16")),
    "no classes": (integer_loss, jnp.zeros((3, 0)), jnp.zeros(3, "uint8")),
}


@pytest.mark.parametrize("mode", ["raise", "checkify"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_labels(name, mode):
    loss, *args = UNUSUAL[name]
    text = checked(mode, loss, checkify.float_checks | checkify.user_checks)(*args)
    assert "3 of 3 labels are outside [0, 0)" in text if name == "no classes" else text is None


PROBABILITIES = jax.nn.softmax(LOGITS)
ONE_HOT = functools.partial(jax.nn.one_hot, num_classes=CLASSES)
STRICT = {
    "integers": lambda labels: integer_loss(LOGITS, labels, where=jnp.arange(CLASSES)[None, None] != 4),
    "rows": lambda labels: integer_loss(LOGITS, labels, where=labels > 0),
    "distributions": lambda labels: soft_losses[0](LOGITS, ONE_HOT(labels), where=labels[..., None] > 0),
    "elements": lambda labels: masksafe.losses.sigmoid_binary_cross_entropy(LOGITS, labels[..., None] > 0),
    "probabilities": lambda labels: masksafe.losses.dice_loss(PROBABILITIES, ONE_HOT(labels), apply_softmax=False),
}


@pytest.mark.parametrize("mode", ["raise", "checkify"])
@pytest.mark.parametrize("loss", STRICT)
def test_checks_promote_nothing(loss, mode):
    labels = jnp.minimum(GOOD, 3)
    through = (lambda fn: fn) if mode == "raise" else checkify.checkify
    with masksafe.label_checks(mode), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.make_jaxpr(through(STRICT[loss]))(labels)
        jax.make_jaxpr(through(jax.vmap(STRICT[loss])))(labels[None])


def predictions(probabilities, labels):
    return masksafe.losses.dice_loss(probabilities, labels, apply_softmax=False)


IMPROBABLE = PROBABILITIES.at[2, 1, 3].set(2)
FINDINGS = {
    "predictions": (predictions, (IMPROBABLE, SOFT), "1 of 60 predictions are outside [0, 1]; first at (2, 1, 3): 2.0"),
    "labels": (integer_loss, (LOGITS, LABELS), TEXT),
    "distributions": (soft_losses[0], (LOGITS, IMPROBABLE), "1 of 12 rows of labels sum to neither 1 nor 0"),
}


@pytest.mark.parametrize("mode", ["raise", "checkify"])
@pytest.mark.parametrize("finding", FINDINGS)
def test_sharded_labels_and_probabilities_are_checked(mode, finding):
    loss, args, text = FINDINGS[finding]
    mesh = jax.make_mesh((4,), ("rows",))
    with jax.set_mesh(mesh):
        assert text in checked(mode, loss)(*split_over(mesh, *args))


# The switch.


@pytest.mark.parametrize("gradient", [False, True])
def test_off_costs_nothing(gradient, monkeypatch):
    def lowered():
        def losses(logits, labels, soft):
            total = mean_loss(logits, labels)
            return total + sum(masksafe.mean(loss(logits, soft)) for loss in soft_losses)

        return jax.jit(jax.grad(losses) if gradient else losses).lower(LOGITS, LABELS, SOFT).as_text()

    off = lowered()
    with masksafe.label_checks("raise"):
        assert lowered() != off
    for name in ("check_integer_labels", "check_distributions"):
        monkeypatch.setattr(f"masksafe._core.label_checks.{name}", lambda *args: None)
    assert lowered() == off


def test_switching_retraces_and_switching_back_does_not():
    traces = []

    @jax.jit
    def step(logits, labels):
        traces.append(len(traces))
        return mean_loss(logits, labels)

    for _ in range(2):
        step(LOGITS, GOOD)
        with masksafe.label_checks("raise"):
            step(LOGITS, GOOD)
            with masksafe.label_checks("off"):
                step(LOGITS, LABELS)
    assert len(traces) == 2


def test_switch_belongs_to_its_thread_and_the_other_one_to_the_process():
    def complains():
        try:
            mean_loss(LOGITS, LABELS)
        except ValueError:
            return True
        return False

    def in_another_thread():
        found = []
        thread = threading.Thread(target=lambda: found.append(complains()))
        thread.start()
        thread.join()
        return found[0]

    with masksafe.label_checks("raise"):
        assert complains()
        assert not in_another_thread()
    try:
        masksafe.set_label_checks("raise")
        assert complains()
        assert in_another_thread()
        with masksafe.label_checks("off"):
            assert not complains()
    finally:
        masksafe.set_label_checks("off")
    assert not complains()


@pytest.mark.parametrize("mode", ["on", "", None, True])
def test_unknown_mode_is_refused(mode):
    text = r"^label_checks: mode: got value .*; expected one of 'off', 'checkify'"
    with pytest.raises(ValueError, match=text), masksafe.label_checks(mode):
        pass
    with pytest.raises(ValueError, match="set_label_checks: mode: got value"):
        masksafe.set_label_checks(mode)


@pytest.mark.parametrize(
    ("value", "text"),
    [("raise", "2 of 2 labels are outside"), ("loud", "MASKSAFE_LABEL_CHECKS: got value 'loud'")],
)
def test_environment_variable(value, text):
    code = "import jax.numpy as jnp, masksafe; "
    code += "masksafe.losses.softmax_cross_entropy_with_integer_labels(jnp.zeros((2, 3)), jnp.array([3, -1]))"
    environment = os.environ | {"MASKSAFE_LABEL_CHECKS": value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert text in done.stderr
