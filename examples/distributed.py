"""Trains a small language model in several processes, and compares the losses with those of one device.

The processes run on this machine, each with some virtual devices of its CPU, and find each other by `jax.distributed`;
on a cluster nothing changes but who starts them. The model is that of `gradient_accumulation.py`; its lines of text are
of unequal length, and in one step half of them are empty.

    python examples/distributed.py --processes 2    # about a minute on two cores

One program serves all layouts, since the axes of the mesh decide what is split, and may have the size 1:

    data         the lines of a batch: the mean is over all of them, however unequal the parts (value_and_grad_of_mean)
    vocabulary   the classes of the output layer (linear_softmax_cross_entropy)
    time         the length of the lines: keys and values go round the devices (dot_product_attention)

Then a bad label on one process ends every process with the same message.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable

import gradient_accumulation as model
import jax
import jax.numpy as jnp
import numpy as np
import optax
import processes
import shared
from gradient_accumulation import CHARACTERS, IGNORED, LENGTH, WIDTH, Params
from jax.experimental import checkify
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import Batch, State, layouts, make_mesh, place_batch, place_state, specs_of

import masksafe

ROWS, MICROBATCHES = 16, 2
EMPTY_STEP = 1  # in which half of the rows are empty, and with them whole devices
OPTIMIZER = optax.adam(3e-3, eps=1e-4)


read_lines = functools.cache(model.read_lines)


def draw_batch(step: int) -> Batch:
    lines, generator = read_lines(), np.random.default_rng(step)
    rows = lines[generator.integers(len(lines), size=ROWS)]
    if step == EMPTY_STEP:
        rows[ROWS // 2 :] = 0
    labels = np.where(rows[:, 1:] > 0, rows[:, 1:], IGNORED)
    return Batch(rows[:, :-1], labels, np.broadcast_to(np.arange(LENGTH), labels.shape))


def initial_state() -> State:
    """The same in every process: arrays of NumPy."""
    kernel = 0.1 * np.random.default_rng(0).standard_normal((WIDTH, CHARACTERS), np.float32)
    params = model.make_params(jax.random.key(0)) | {"kernel": kernel}
    return jax.tree.map(np.asarray, State(params, OPTIMIZER.init(params)))


def mean_loss(params: Params, batch: Batch) -> masksafe.MaskedMean:
    """The mean loss per character of the part of one device, not yet divided. It runs inside jax.shard_map."""
    mask = batch.labels != IGNORED
    features = model.features_of(params, batch.inputs, batch.positions, axis_name="time")
    linear_loss = functools.partial(masksafe.losses.linear_softmax_cross_entropy, axis_name="vocabulary")
    total = linear_loss(features, params["kernel"], batch.labels, where=mask, reduction="sum")
    return masksafe.MaskedMean(total, jnp.sum(mask))


# Training.


Step = Callable[[State, Batch], tuple[State, jax.Array]]


def make_step(mesh: Mesh, microbatches: int = MICROBATCHES) -> Step:
    value_and_grad = masksafe.value_and_grad_of_mean(mean_loss, microbatches=microbatches, axis_name=("data", "time"))

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        specs = specs_of(state.params)
        split = {"in_specs": (specs, P("data", "time")), "out_specs": (P(), specs)}
        value, gradients = jax.shard_map(value_and_grad, mesh=mesh, **split)(state.params, batch)
        updates, optimizer = OPTIMIZER.update(gradients, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), optimizer), value

    return step


# What the processes do. Each part is run by all of them together.


def train_in_all_layouts(steps: int) -> None:
    for name, layout in layouts().items():
        mesh, losses = make_mesh(layout), []
        run, state = jax.jit(make_step(mesh)), place_state(mesh, initial_state())
        for step in range(steps):
            state, loss = run(state, place_batch(mesh, draw_batch(step)))
            losses.append(round(loss.item(), 6))  # it is on every device, so every process can read it
        if jax.process_index() == 0:
            print(json.dumps({name: losses}), file=sys.stderr, flush=True)


def with_a_bad_label() -> tuple[Mesh, State, Batch]:
    """The arguments of a step, with a bad label in the rows of the last process only."""
    mesh, batch = make_mesh(layouts()["data"]), draw_batch(0)
    if jax.process_index() == jax.process_count() - 1:
        batch.labels[-1, 0] = CHARACTERS + 1
    return mesh, place_state(mesh, initial_state()), place_batch(mesh, batch)


def check_labels_with_checkify(steps: int) -> None:
    """The error is an array like any other: replicated, every process can read it, alone or together with others.

    JAX cannot lift a check out of the loop over micro-batches inside a `jax.shard_map`: hence one.
    """
    mesh, state, batch = with_a_bad_label()
    everywhere = NamedSharding(mesh, P())
    run = jax.jit(checkify.checkify(make_step(mesh, microbatches=1)), out_shardings=(everywhere, None))
    with masksafe.label_checks("checkify"):
        error, _ = run(state, batch)
    error.throw()


def check_labels_with_raise(steps: int) -> None:
    """The processes exchange what they have found, and all of their devices fail."""
    mesh, state, batch = with_a_bad_label()
    with masksafe.label_checks("raise"):
        jax.block_until_ready(jax.jit(make_step(mesh))(state, batch))


PARTS = {"train": train_in_all_layouts, "checkify": check_labels_with_checkify, "raise": check_labels_with_raise}


# The processes are started, and what they tell is compared.


def command(part: str, number: int, steps: int = 1) -> list[str]:
    return [sys.executable, __file__, "--processes", str(number), "--steps", str(steps), "--part", part]


def losses_of(number: int, devices: int, steps: int) -> dict[str, list[float]]:
    """The losses in each layout."""
    statuses, lines = processes.outcome(command("train", number, steps), number, devices)
    if any(statuses):
        raise RuntimeError(f"exit statuses {statuses}")
    found = [json.loads(line) for of_process in lines for line in of_process if line.startswith("{")]
    return {name: losses for of_layout in found for name, losses in of_layout.items()}


def error_of(number: int, devices: int, mode: str) -> str:
    """The message with which every process ends."""
    statuses, lines = processes.outcome(command(mode, number), number, devices)
    messages = {"".join(of_process[-1:]) for of_process in lines}  # before it JAX logs what failed on each device
    if len(messages) != 1 or set(statuses) != {1}:
        raise RuntimeError(f"{mode}: exit statuses {statuses}, messages {messages}")
    return messages.pop()


def main() -> None:
    parser = shared.parser_of(__doc__, writes=False, processes=2, devices=2, steps=12)
    for name, type_ in (("--coordinator", str), ("--process-id", int), ("--part", str)):
        parser.add_argument(name, type=type_, help=argparse.SUPPRESS)  # what the processes are started with
    arguments = parser.parse_args()
    if arguments.process_id is not None:
        processes.join(arguments.coordinator, arguments.processes, arguments.process_id)
        try:
            PARTS[arguments.part](arguments.steps)
        except (jax.errors.JaxRuntimeError, checkify.JaxRuntimeError) as error:
            processes.end(error)
        return
    number, devices, steps = arguments.processes, arguments.devices, arguments.steps
    if ROWS % (number * devices * MICROBATCHES):
        parser.error(f"{number * devices} devices in all, but {ROWS} rows in {MICROBATCHES} micro-batches are split")
    print("one process with one device", flush=True)
    expected = losses_of(1, 1, steps)["one device"]
    print(f"{number} processes, {devices} devices in each", flush=True)
    found = losses_of(number, devices, steps)
    differences = {name: np.abs(np.divide(losses, expected) - 1).max() for name, losses in found.items()}
    print("\nHow far the losses are from those of one device:")
    for name, difference in differences.items():
        print(f"  {name:20} {difference:.1g}")
    if not all(difference < 1e-4 for difference in differences.values()):  # a NaN is a difference, too
        sys.exit("the losses differ by more than rounding")
    print("\nA bad label on one process:", flush=True)
    for mode in ("checkify", "raise"):
        print(f"  {mode}: every process ended with\n    {error_of(number, devices, mode)}", flush=True)


if __name__ == "__main__":
    main()
