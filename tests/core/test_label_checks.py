"""The checks of labels, in their three modes."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from comparisons import assert_close
from jax import lax
from jax.experimental import checkify
from jax.sharding import PartitionSpec
from tiers import parametrize

import masksafe

CLASSES = 5
LOGITS = np.random.default_rng(0).normal(size=(4, 3, CLASSES)).astype(np.float32)
LABELS = np.int32([[0, 1, 2], [3, 5, 4], [0, -1, 7], [1, 1, 1]])
GOOD = np.clip(LABELS, 0, CLASSES - 1)
SOFT = np.eye(CLASSES, dtype=np.float32)[GOOD]
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
TEXT = "softmax_cross_entropy_with_integer_labels: 3 of 12 labels are outside [0, 5); first at (1, 1): 5"
IGNORED = 9

integer_loss = masksafe.losses.softmax_cross_entropy_with_integer_labels
soft_loss = masksafe.losses.softmax_cross_entropy


def changed(array, *changes):
    """A copy with other numbers at some indices."""
    array = np.array(array)
    for index, number in changes:
        array[index] = number
    return array


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
    def looped(*rows):
        step = lambda carry: (carry[0] + 1, carry[1] + fn(*(jnp.asarray(x)[carry[0]] for x in rows)))  # noqa: E731
        return lax.while_loop(lambda carry: carry[0] < len(LABELS), step, (0, 0.0))[1]

    return looped


def in_cond(fn):
    return lambda logits, labels: lax.cond(logits[0, 0, 0] < 1e9, fn, lambda *_: 0.0, logits, labels)


def over_rows(mesh, fn):
    rows = PartitionSpec("rows")
    return jax.shard_map(lambda *args: fn(*args)[None], mesh=mesh, in_specs=rows, out_specs=rows)


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
    "shard_map": lambda fn: over_rows(mesh_of_rows(), fn),
}


@parametrize("way", ["jit of vmap of grad"], exhaustive=WAYS)
def test_each_way_tells_which_label_is_bad_and_is_quiet_on_masked_ones(way):
    for mode in ("checkify", "raise"):
        errors = checkify.all_checks if way in ("vmap", "while") else checkify.user_checks
        report = checked(mode, WAYS[way](padded_loss), errors)
        assert report(LOGITS, np.where(LABELS == GOOD, LABELS, IGNORED)) is None
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
    with masksafe.label_checks("checkify"):
        outside = jax.jit(jax.grad(lambda logits: checkify.checkify(mean_loss)(logits, GOOD)[1]))(LOGITS)
        error, inside = jax.jit(checkify.checkify(jax.grad(mean_loss)))(LOGITS, GOOD)
        error.throw()
    assert_close((outside, inside), (jax.grad(mean_loss)(LOGITS, GOOD),) * 2, rtol=1e-5, atol=1e-7)


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


@parametrize("axis_type", ["Explicit"], exhaustive=["Auto"])
def test_raise_stops_every_device(axis_type):
    """A device that went on alone would wait for the others in the gradient's sum until JAX aborts the process."""
    mesh, labels = mesh_of_rows(8, axis_type), np.zeros(16, np.int32)

    def two_steps(kernel, inputs, labels):
        for _ in range(2):
            kernel -= jax.grad(lambda kernel: mean_loss(jnp.tanh(inputs @ kernel), labels))(kernel)
        return kernel

    report = checked("raise", two_steps)
    with jax.set_mesh(mesh):
        kernel = jax.device_put(jnp.ones((4, CLASSES)), jax.sharding.NamedSharding(mesh, PartitionSpec()))
        assert report(kernel, *split_over(mesh, jnp.ones((16, 4)), labels)) is None
        text = report(kernel, *split_over(mesh, jnp.ones((16, 4)), changed(labels, (9, 5))))
    assert "1 of 16 labels are outside [0, 5); first at (9,): 5" in text


@parametrize("check_vma", [True], exhaustive=[False])
def test_raise_stops_every_device_of_a_shard_map(check_vma):
    mesh = jax.make_mesh((2, 4), ("rows", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def step(logits, labels):
        return jax.lax.pmean(jax.value_and_grad(mean_loss)(logits, labels), "rows")

    specs = {"in_specs": (PartitionSpec("rows"),) * 2, "out_specs": PartitionSpec()}
    report = checked("raise", jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs))
    assert report(LOGITS, GOOD) is None
    assert re.search(r"first at \(0, 1\) of shard [4-7]: -1", report(LOGITS, changed(GOOD, ((2, 1), -1))))


def test_raise_reports_once_for_all_elements_of_a_vmap():
    logits, labels = (
        np.zeros((1000, 3, CLASSES), np.float32),
        changed(np.zeros((1000, 3), int), ((700, 1), 9), (800, -1)),
    )
    by_row = jax.jit(jax.vmap(jax.vmap(integer_loss)))
    with masksafe.label_checks("raise"):
        assert by_row.lower(logits, labels).as_text().count("callback") < 5
    text = "4 of 3000 labels are outside [0, 5); first at (700, 1): 9"
    assert text in checked("raise", by_row)(logits, labels)
    shared = checked("raise", jax.jit(jax.vmap(integer_loss, (0, None))))(logits[:, :2], np.array([0, 9]))
    assert "1 of 2 labels" in shared
    assert shared.count("; first at (1,): 9") == 1


def test_raise_tells_once_of_an_eager_vmap_with_a_shared_mask():
    run = jax.vmap(lambda logits, labels: soft_loss(logits, labels, where=np.arange(3)[:, None] < 2))
    text = r"1 of 4 rows of labels .* first at \(1, 0\): 0.5"
    with masksafe.label_checks("raise"), pytest.raises(ValueError, match=text) as error:
        run(LOGITS[:2], changed(SOFT[:2], ((1, 0), [0.5, 0, 0, 0, 0])))
    assert str(error.value).count("; first at ") == 1


def test_gradient_of_labels_is_checked():
    report = checked("raise", jax.grad(lambda labels: jnp.sum(soft_loss(LOGITS, labels))))
    assert report(SOFT) is None
    assert "first at (1, 0, 0): -1.0" in report(changed(SOFT, ((1, 0, 0), -1)))


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


@parametrize(
    ("way", "mode"),
    [("eager", "raise")],
    exhaustive=[
        *((way, "raise") for way in REPEATED if way != "eager"),
        *((way, "checkify") for way in ("jit of value_and_grad", "vmap of grad of remat")),
        ("vmap of vmap", "off"),
    ],
)
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
import sys, jax, numpy as np, masksafe
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[4]))
by_row = jax.sharding.NamedSharding(jax.make_mesh((4,), ("rows",)), jax.sharding.PartitionSpec("rows"))
rows = lambda x: jax.make_array_from_callback(x.shape, by_row, lambda index: x[index])
loss = masksafe.losses.softmax_cross_entropy_with_integer_labels
step = jax.jit(jax.value_and_grad(lambda logits, labels: masksafe.mean(loss(logits, labels))))
try:
    with jax.set_mesh(by_row.mesh), masksafe.label_checks("raise"):
        jax.block_until_ready(step(rows(np.zeros((8, 7), np.float32)), rows(np.arange(8, dtype=np.int32))))
except jax.errors.JaxRuntimeError as error:
    print("raised", str(error).splitlines()[-1], file=sys.stderr)  # a callback that fails is logged there, too
jax.distributed.shutdown()  # JAX does not get to it at exit, where it tells the error once more (jax 0.12)
"""


@pytest.mark.slow
def test_an_error_is_raised_in_both_of_two_processes():
    statuses, lines = processes.outcome([sys.executable, "-c", TWO_PROCESSES], 2, 2)
    assert statuses == [0, 0]
    for told in lines:
        (message,) = [line for line in told if line.startswith("raised")]
        assert "1 of 8 labels are outside [0, 7); first at (7,): 7" in message


# The text.


@parametrize(
    ("labels", "kwargs", "text"),
    [(np.full((4, 3), 2**40), {}, "12 of 12 labels are outside [0, 5); first at (0, 0): 2147483647")],
    exhaustive=[
        (LABELS, {"where": np.arange(4)[:, None] > 1}, "2 of 6 labels are outside [0, 5); first at (2, 1): -1"),
        (LABELS[2, 2], {}, "1 of 1 labels are outside [0, 5); first at (): 7"),
        (LABELS.astype(np.int8) - np.int8(100), {}, "12 of 12 labels are outside [0, 5); first at (0, 0): -100"),
        (GOOD, {"where": np.arange(5)[None, None] != 3}, "1 of 12 labels are at a masked class; first at (1, 0): 3"),
    ],
)
def test_text_of_integer_labels(labels, kwargs, text):
    logits = LOGITS[(0,) * (2 - np.ndim(labels))]
    with masksafe.label_checks("raise"), pytest.raises(ValueError, match=re.escape(text)) as error:
        integer_loss(logits, labels, **kwargs)
    assert f"called at {__file__}:" in str(error.value)


@parametrize("axis", [(2, 1)], exhaustive=[(1, 2)], ids=str)
def test_label_over_several_axes_at_a_masked_class(axis):
    where = changed(np.ones((4, 3, 5), bool), ((2, 1, 3), False))
    label = 1 * 5 + 3 if axis == (1, 2) else 3 * 3 + 1
    report = checked("raise", lambda where: integer_loss(LOGITS, jnp.full(4, label), axis=axis, where=where))
    assert report(where | True) is None
    assert f"1 of 4 labels are at a masked class; first at (2,): {label}" in report(where)


@parametrize(
    ("loss", "dtype"),
    [(soft_loss, "float32")],
    exhaustive=[(soft_loss, "float16"), (masksafe.losses.safe_softmax_cross_entropy, "bfloat16")],
)
def test_distributions(loss, dtype):
    soft, report = PROBABILITIES.astype(jnp.dtype(dtype)), checked("raise", loss)
    for labels in (soft, changed(soft, (2, 0))):
        assert report(LOGITS, labels) is None
    negative, sums = "labels are negative or not finite", "rows of labels sum to neither 1 nor 0"
    for text, *changes in (
        (f"1 of 60 {negative}; first at (1, 2, 3): nan", ((1, 2, 3), np.nan)),
        (f"2 of 60 {negative}; first at (1, 2, 3): -0.5", ((1, 2, slice(3, 5)), -0.5)),
        (f"1 of 60 {negative}; first at (0, 0, 0): inf", ((0, 0, 0), np.inf)),
        (f"1 of 12 {sums}; first at (3, 0): ", ((3, 0), 0.5)),
        (f"1 of 12 {sums}; first at (3, 1): 0.5", ((3, 1), [0.5, 0, 0, 0, 0])),
    ):
        assert f"{loss.__name__}: {text}" in report(LOGITS, changed(soft, *changes))


SOME = changed(np.ones(LOGITS.shape, bool), (0, False), ((1, 2, 3), False))
UNUSUAL = {
    "masked rows": (functools.partial(soft_loss, where=SOME), LOGITS, np.where(SOME, SOFT, np.nan)),
    "4 bits": (integer_loss, np.zeros((2, 5)), np.array([4, 0], jnp.int4)),
    "no labels": (integer_loss, np.zeros((3, 0, 5)), np.zeros((3, 0), int)),
    "no rows": (soft_loss, np.zeros((3, 0, 5)), np.zeros((3, 0, 5))),
    "integers": (soft_loss, LOGITS, SOFT.astype(int)),
    "many classes": (soft_loss, np.zeros((1, 100_000)), np.full((1, 100_000), 1e-5, "float16")),
    "no classes": (integer_loss, np.zeros((3, 0)), np.zeros(3, "uint8")),
}


@parametrize(
    ("name", "mode"),
    [("masked rows", "raise")],
    exhaustive=[
        *((name, "raise") for name in UNUSUAL if name != "masked rows"),
        *((name, "checkify") for name in ("masked rows", "no rows", "no classes")),
    ],
)
def test_unusual_labels(name, mode):
    loss, *args = UNUSUAL[name]
    text = checked(mode, loss, checkify.float_checks | checkify.user_checks)(*args)
    assert "3 of 3 labels are outside [0, 0)" in text if name == "no classes" else text is None


one_hot = functools.partial(jax.nn.one_hot, num_classes=CLASSES, dtype=jnp.float32)
STRICT = {
    "integers": lambda labels: integer_loss(LOGITS, labels, where=jnp.arange(CLASSES)[None, None] != 4),
    "rows": lambda labels: integer_loss(LOGITS, labels, where=labels > 0),
    "distributions": lambda labels: soft_loss(LOGITS, one_hot(labels), where=labels[..., None] > 0),
    "elements": lambda labels: masksafe.losses.sigmoid_binary_cross_entropy(LOGITS, labels[..., None] > 0),
    "probabilities": lambda labels: predictions(PROBABILITIES, one_hot(labels)),
}


@parametrize("mode", ["raise"], exhaustive=["checkify"])
@parametrize("loss", ["integers"], exhaustive=STRICT)
def test_checks_promote_nothing(loss, mode):
    through = (lambda fn: fn) if mode == "raise" else checkify.checkify
    strict = jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")
    with masksafe.label_checks(mode), strict[0], strict[1]:
        for is_wide in (False, True):
            with jax.enable_x64(is_wide):
                labels = np.minimum(GOOD, 3).astype(np.int64 if is_wide else np.int32)
                jax.make_jaxpr(through(STRICT[loss]))(labels)
                jax.make_jaxpr(through(jax.vmap(STRICT[loss])))(labels[None])


def predictions(probabilities, labels):
    return masksafe.losses.dice_loss(probabilities, labels, apply_softmax=False)


IMPROBABLE = changed(PROBABILITIES, ((2, 1, 3), 2))
FINDINGS = {
    "predictions": (predictions, (IMPROBABLE, SOFT), "1 of 60 predictions are outside [0, 1]; first at (2, 1, 3): 2.0"),
    "labels": (integer_loss, (LOGITS, LABELS), TEXT),
    "distributions": (soft_loss, (LOGITS, IMPROBABLE), "1 of 12 rows of labels sum to neither 1 nor 0"),
}


@parametrize(
    ("finding", "mode"),
    [("predictions", "raise")],
    exhaustive=[("labels", "raise"), ("distributions", "raise"), ("labels", "checkify")],
)
def test_sharded_labels_and_probabilities_are_checked(mode, finding):
    loss, args, text = FINDINGS[finding]
    mesh = jax.make_mesh((4,), ("rows",))
    with jax.set_mesh(mesh):
        assert text in checked(mode, loss)(*split_over(mesh, *args))


# The switch.


def test_off_costs_nothing(monkeypatch):
    def lowered():
        losses = lambda logits: mean_loss(logits, LABELS) + masksafe.mean(soft_loss(logits, SOFT))  # noqa: E731
        return jax.jit(jax.value_and_grad(losses)).lower(LOGITS).as_text()

    off = lowered()
    with masksafe.label_checks("raise"):
        assert lowered() != off
    for name in ("check_integer_labels", "check_distributions"):
        monkeypatch.setattr(f"masksafe._core.label_checks.{name}", lambda *args: None)
    assert lowered() == off


@pytest.mark.parametrize("mode", ["on", "", None, True])
def test_unknown_mode_is_refused(mode):
    text = r"^label_checks: mode: got value .*; expected one of 'off', 'checkify'"
    with pytest.raises(ValueError, match=text), masksafe.label_checks(mode):
        pass
    with pytest.raises(ValueError, match="set_label_checks: mode: got value"):
        masksafe.set_label_checks(mode)


@parametrize(
    ("value", "text"),
    [("raise", "2 of 2 labels are outside")],
    exhaustive=[("loud", "MASKSAFE_LABEL_CHECKS: got value 'loud'")],
)
def test_environment_variable(value, text):
    code = "import jax.numpy as jnp, masksafe; "
    code += "masksafe.losses.softmax_cross_entropy_with_integer_labels(jnp.zeros((2, 3)), jnp.array([3, -1]))"
    environment = os.environ | {"MASKSAFE_LABEL_CHECKS": value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert text in done.stderr
