"""Trains a small language model in several processes, and compares the losses with those of one device.

The processes run on this machine, each with some virtual devices of its CPU, and find each other by `jax.distributed`;
on a cluster nothing changes but who starts them. The text is lines of Python's own standard library, several of them
packed into a row; the rows are of unequal length, and in one step half of them are empty.

    python examples/distributed.py --processes 2    # about a minute on two cores

One program serves all layouts, since the axes of the mesh decide what is split, and may have the size 1:

    data         the rows of a batch: the mean is over all of them, however unequal the parts (value_and_grad_of_mean)
    vocabulary   the classes of the output layer (linear_softmax_cross_entropy)
    time         the length of the rows: keys and values go round the devices (dot_product_attention)

Then a checkpoint is written by some processes and read by another number of them. A bad label on one process ends
every process with the same message. And the tools that find a NaN tell what they need.
"""

import argparse
import contextlib
import functools
import json
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import processes
from jax.experimental import checkify
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import Child, wait_for

import masksafe
from masksafe.testing import assert_consistent, nonfinite_report

Params = dict[str, Any]
AXES = ("data", "vocabulary", "time")
ROWS, LENGTH, WIDTH, HEADS, CHARACTERS = 16, 64, 32, 4, 128
MICROBATCHES = 2
EMPTY_STEP = 1  # in which half of the rows are empty, and with them whole devices
IGNORED = -100  # the label of padding
OPTIMIZER = optax.adam(3e-3, eps=1e-4)


# The data. Every process can make every batch, and hands JAX the part of its own devices.


class Batch(NamedTuple):
    """Rows, every array `[rows, length]`."""

    inputs: np.ndarray
    labels: np.ndarray  # the next character; IGNORED in padding
    segments: np.ndarray  # which line a character belongs to, from 1; 0 is padding
    positions: np.ndarray  # within the line


@functools.cache
def read_lines() -> list[np.ndarray]:
    """The lines of some modules of the standard library, as ASCII codes behind a zero."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "\n".join((library / name).read_text("utf8") for name in ("ast.py", "inspect.py", "textwrap.py"))
    lines = (line.strip()[: LENGTH // 3].encode("ascii", "replace") for line in text.splitlines())
    return [np.frombuffer(b"\0" + line, np.uint8) for line in lines if line]


def draw_batch(step: int) -> Batch:
    """Rows with as many lines as fit into a random part of them."""
    lines, generator = read_lines(), np.random.default_rng(step)
    batch = Batch(*(np.full((ROWS, LENGTH), fill, np.int32) for fill in (0, IGNORED, 0, 0)))
    for row in range(ROWS // 2 if step == EMPTY_STEP else ROWS):
        used, segment, most = 0, 1, generator.integers(LENGTH + 1)
        while used + len(line := lines[generator.integers(len(lines))]) - 1 <= most:
            at = np.s_[row, used : used + len(line) - 1]
            batch.inputs[at], batch.labels[at] = line[:-1], line[1:]
            batch.segments[at], batch.positions[at] = segment, np.arange(len(line) - 1)
            used, segment = used + len(line) - 1, segment + 1
    return batch


# The model: one layer of causal attention. It runs inside jax.shard_map, on the part of one device.


class State(NamedTuple):
    """The state that a step updates."""

    params: Params
    optimizer: Any


def initial_state() -> State:
    """The same in every process: arrays of NumPy."""
    shapes = {
        "embedding": (CHARACTERS, WIDTH),
        "position": (LENGTH, WIDTH),
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
        "kernel": (WIDTH, CHARACTERS),
    }
    generator = np.random.default_rng(0)
    params = {name: 0.1 * generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return jax.tree.map(np.asarray, State(params, OPTIMIZER.init(params)))


def mean_loss(params: Params, batch: Batch) -> masksafe.MaskedMean:
    """The mean loss per character of the device's part, not yet divided."""
    is_live = batch.labels != IGNORED
    x = params["embedding"][batch.inputs] + params["position"][batch.positions]
    heads = (masksafe.rms_norm(x) @ params["qkv"]).reshape(*x.shape[:2], 3 * HEADS, WIDTH // HEADS)
    attended = masksafe.dot_product_attention(
        *jnp.split(heads, 3, axis=2),
        is_causal=True,
        query_segment_ids=batch.segments,
        key_value_segment_ids=batch.segments,
        axis_name="time",
    )
    x += attended.reshape(x.shape) @ params["out"]
    x += jax.nn.gelu(masksafe.rms_norm(x) @ params["up"]) @ params["down"]
    total = masksafe.losses.linear_softmax_cross_entropy(
        masksafe.rms_norm(x),
        params["kernel"],
        batch.labels,
        where=is_live,
        reduction="sum",
        axis_name="vocabulary",
    )
    return masksafe.MaskedMean(total, jnp.sum(is_live))


# The layout of arrays over the devices of all processes.


def make_mesh(layout: Sequence[int]) -> Mesh:
    return jax.make_mesh(tuple(layout), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def specs_of(state: Any) -> Any:
    """The kernel of the output layer is split, and what the optimizer keeps for it; the rest is on every device."""

    def spec(path: Any, _: Any) -> P:
        return P(None, "vocabulary") if jax.tree_util.keystr(path).endswith("['kernel']") else P()

    return jax.tree.map_with_path(spec, state)


def place(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Global arrays, of which every process hands over the parts of its own devices."""

    def placed(x: np.ndarray, spec: P) -> jax.Array:
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

    return jax.tree.map(placed, tree, specs)


def place_state(mesh: Mesh, state: State) -> State:
    return place(mesh, state, specs_of(state))


def place_batch(mesh: Mesh, batch: Batch) -> Batch:
    return place(mesh, batch, Batch(*[P("data", "time")] * 4))


def gathered(mesh: Mesh, tree: Any) -> Any:
    """A copy on every device, as arrays of NumPy. All processes have to call it, for their devices exchange parts."""
    copied = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(tree)
    return jax.tree.map(np.asarray, copied)


# Training.


Step = Callable[[State, Batch], tuple[State, jax.Array]]


def make_step(mesh: Mesh, microbatches: int = MICROBATCHES) -> Step:
    value_and_grad = masksafe.value_and_grad_of_mean(mean_loss, microbatches=microbatches, axis_name=("data", "time"))

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        specs = specs_of(state.params)
        of_devices = jax.shard_map(
            value_and_grad, mesh=mesh, in_specs=(specs, P("data", "time")), out_specs=(P(), specs)
        )
        value, gradients = of_devices(state.params, batch)
        updates, optimizer = OPTIMIZER.update(gradients, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), optimizer), value

    return step


def train(run: Step, mesh: Mesh, state: State, steps: range) -> tuple[State, list[float]]:
    losses = []
    for step in steps:
        state, loss = run(state, place_batch(mesh, draw_batch(step)))
        losses.append(loss.item())  # it is on every device, so every process can read it
    return state, losses


# Checkpoints: whole arrays in a file of NumPy, whatever the number of processes.


def save(mesh: Mesh, state: State, path: Path) -> None:
    whole = gathered(mesh, state)
    if jax.process_index() == 0:
        np.savez(path, **{jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(whole)})


def load(mesh: Mesh, path: Path) -> State:
    with np.load(path) as file:
        state = jax.tree.map_with_path(lambda p, _: file[jax.tree_util.keystr(p)], initial_state())
    return place_state(mesh, state)


# What the processes do. Each part is run by all of them together.


class Job(NamedTuple):
    """What the processes are told."""

    steps: int
    output: Path
    checkpoint: Path | None = None  # to go on from


def layouts() -> dict[str, tuple[int, int, int]]:
    """The sizes of the axes; the last layouts cross processes along the data only."""
    devices, processes = jax.device_count(), jax.process_count()
    if devices == 1:
        return {"one device": (1, 1, 1)}
    local = devices // processes
    return {
        "data": (devices, 1, 1),
        "vocabulary": (1, devices, 1),
        "time": (1, 1, devices),
        "data and time": (processes, 1, local),
        "data and vocabulary": (processes, local, 1),
    }


def train_in_all_layouts(job: Job) -> None:
    for name, layout in layouts().items():
        mesh, half, is_last = make_mesh(layout), job.steps // 2, name == list(layouts())[-1]
        run = jax.jit(make_step(mesh))
        state, losses = train(run, mesh, place_state(mesh, initial_state()), range(half))
        if is_last:  # one in which the kernel of the output layer is split
            save(mesh, state, checkpoint_of(job, jax.process_count()))
        _, more = train(run, mesh, state, range(half, job.steps))
        write_losses(job, name, losses + more)


def go_on_from_checkpoint(job: Job) -> None:
    assert job.checkpoint is not None
    mesh = make_mesh(list(layouts().values())[-1])
    run = jax.jit(make_step(mesh))
    _, losses = train(run, mesh, load(mesh, job.checkpoint), range(job.steps // 2, job.steps))
    write_losses(job, f"from {job.checkpoint.stem}", losses)


def with_a_bad_label() -> tuple[Mesh, State, Batch]:
    """The arguments of a step, with a bad label in the rows of the last process only."""
    mesh, batch = make_mesh(layouts()["data"]), draw_batch(0)
    if jax.process_index() == jax.process_count() - 1:
        batch.labels[-1, 0] = CHARACTERS + 1
    return mesh, place_state(mesh, initial_state()), place_batch(mesh, batch)


def check_labels_with_checkify(job: Job) -> None:
    """The error is an array like any other: replicated, every process can read it, alone or together with others.

    JAX cannot lift a check out of the loop over micro-batches inside a `jax.shard_map`: hence one.
    """
    mesh, state, batch = with_a_bad_label()
    everywhere = NamedSharding(mesh, P())
    run = jax.jit(checkify.checkify(make_step(mesh, microbatches=1)), out_shardings=(everywhere, None))
    with masksafe.label_checks("checkify"):
        error, _ = run(state, batch)
    error.throw()


def check_labels_with_raise(job: Job) -> None:
    """The processes exchange what they have found, and all of their devices fail."""
    mesh, state, batch = with_a_bad_label()
    with masksafe.label_checks("raise"):
        jax.block_until_ready(jax.jit(make_step(mesh))(state, batch))


def find_a_nan(job: Job) -> None:
    """The tools look at single elements: so they take a copy of all of them, not arrays of several processes."""
    mesh, state = make_mesh(layouts()["data"]), initial_state()
    state.params["out"][0, 0] = np.inf
    params = place_state(mesh, state).params

    def total(params: Params) -> jax.Array:
        return jnp.sum(jnp.sin(params["out"]))

    for tool in (nonfinite_report, assert_consistent):
        try:
            tool(total, params)
        except ValueError as error:
            say(f"refused: {error}")
    found = nonfinite_report(total, gathered(mesh, params)).first
    say(f"on a gathered copy: {found.primitive} gives {found.value} from {found.inputs[0]} at index {found.index}")


PARTS: dict[str, Callable[[Job], None]] = {
    "train": train_in_all_layouts,
    "resume": go_on_from_checkpoint,
    "checkify": check_labels_with_checkify,
    "raise": check_labels_with_raise,
    "nan": find_a_nan,
}


def say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def write_losses(job: Job, name: str, losses: list[float]) -> None:
    name = f"{name}, by {jax.process_count()}"
    say(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    if jax.process_index() == 0:
        (job.output / f"{name}.json").write_text(json.dumps(losses))


def work(arguments: argparse.Namespace) -> None:
    """What one of the processes does."""
    processes.exit_with_parent()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # A process that fails alone ends without waiting long for the others, and they hear of it.
    limits = {"initialization_timeout": 300, "heartbeat_timeout_seconds": 30, "shutdown_timeout_seconds": 30}
    jax.distributed.initialize(arguments.coordinator, arguments.processes, arguments.process_id, **limits)
    job = Job(arguments.steps, arguments.output, arguments.checkpoint)
    try:
        for part in arguments.parts:
            PARTS[part](job)
    except (jax.errors.JaxRuntimeError, checkify.JaxRuntimeError) as error:
        sys.exit(str(error).strip().splitlines()[-1])


# Starting the processes.


def started(
    number: int, devices: int, parts: Sequence[str], job: Job
) -> contextlib.AbstractContextManager[list[Child]]:
    """Processes of so many devices each, which do those parts."""
    command = ["--processes", str(number), "--steps", str(job.steps), "--output", str(job.output), "--parts", *parts]
    command += ["--checkpoint", str(job.checkpoint)] if job.checkpoint else []
    return processes.started([sys.executable, __file__, *command], number, devices)


def run(number: int, devices: int, parts: Sequence[str], job: Job) -> None:
    """Runs parts that are to succeed.

    Raises:
      RuntimeError: if a process fails.
      TimeoutError: if it does not end.
    """
    with started(number, devices, parts, job) as children:
        statuses = wait_for(children)
    if any(statuses):
        raise RuntimeError(f"exit statuses {statuses} of {parts}")


def run_to_an_error(number: int, devices: int, part: str, job: Job) -> str:
    """Runs a part that is to end every process with one message, which is returned.

    Raises:
      RuntimeError: if it does not.
      TimeoutError: if a process does not end.
    """
    with started(number, devices, [part], job) as children:
        statuses = wait_for(children)
    messages = {"\n".join(child.lines) for child in children}
    if len(messages) != 1 or set(statuses) != {1}:
        raise RuntimeError(f"{part}: exit statuses {statuses}, messages {messages}")
    return messages.pop()


# The report.


def checkpoint_of(job: Job, number: int) -> Path:
    return job.output / f"checkpoint_of_{number}.npz"


def compare_losses(job: Job) -> dict[str, float]:
    """The largest difference of each curve from that of one device, relative to the loss."""
    curves = {path.stem: np.array(json.loads(path.read_text())) for path in sorted(job.output.glob("*.json"))}
    expected = curves.pop("one device, by 1")
    return {
        name: float(np.max(np.abs(losses / expected[-len(losses) :] - 1), initial=0)) for name, losses in curves.items()
    }


def train_everywhere(number: int, devices: int, job: Job) -> dict[str, float]:
    """Trains alone and together, each going on from the other's checkpoint, too; returns the differences."""
    job.output.mkdir(parents=True, exist_ok=True)
    for path in job.output.glob("*.json"):
        path.unlink()
    print("one process with one device", flush=True)
    run(1, 1, ["train"], job)
    print(f"{number} processes, {devices} devices in each", flush=True)
    run(number, devices, ["train", "resume", "nan"], job._replace(checkpoint=checkpoint_of(job, 1)))
    print("one process, from their checkpoint", flush=True)
    run(1, 1, ["resume"], job._replace(checkpoint=checkpoint_of(job, number)))
    return compare_losses(job)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--devices", type=int, default=2, help="of each process; default: %(default)s")
    parser.add_argument("--steps", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("examples/output/distributed"), help="default: %(default)s")
    hidden = {"help": argparse.SUPPRESS}  # what the processes are started with
    parser.add_argument("--coordinator", **hidden)
    parser.add_argument("--process-id", type=int, **hidden)
    parser.add_argument("--parts", nargs="+", choices=PARTS, **hidden)
    parser.add_argument("--checkpoint", type=Path, **hidden)
    arguments = parser.parse_args()
    total = arguments.processes * arguments.devices
    if arguments.process_id is None and (total < 2 or ROWS % (total * MICROBATCHES)):
        parser.error(f"{total} devices in all, but {ROWS} rows in {MICROBATCHES} micro-batches are to be split")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.process_id is not None:
        work(arguments)
        return
    number, devices, job = arguments.processes, arguments.devices, Job(arguments.steps, arguments.output)
    differences = train_everywhere(number, devices, job)
    print("\nHow far the losses are from those of one device, by so many processes:")
    for name, difference in differences.items():
        print(f"  {name:42} {difference:.1g}")
    if not all(difference < 1e-4 for difference in differences.values()):  # a NaN is a difference, too
        sys.exit("the losses differ by more than rounding")
    print("\nA bad label on one process:")
    for mode in ("checkify", "raise"):
        message = run_to_an_error(number, devices, mode, job)
        print(f"  {mode}: every process ended with\n    {message}")


if __name__ == "__main__":
    main()
