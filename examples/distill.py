"""Distils a small language model from a larger one, on the standard library's source, without the logits of either.

The models are those of `language_model.py`: they write the body of a Python function from its signature and docstring,
and only the tokens of bodies count. A teacher is trained on labels. Then a student of a fraction of its size is trained
twice, on the same batches: on labels, and on the teacher's probabilities of all classes.

    python examples/distill.py    # about two minutes on two cores

A step with `masksafe.losses.linear_kl_divergence` is compared with the plain one, which has both arrays of logits in
memory and multiplies `optax.kl_divergence` by the mask: the loss is the same, time and memory are not. The picture
shows the losses on held-out functions, and what a step costs.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import language_model
import matplotlib.pyplot as plt
import numpy as np
import optax
import shared
from bodies import IGNORED, Rows, prepare_data
from flax import nnx
from language_model import Config, Trainer
from rich.console import Console

import masksafe

TEACHER = Config(vocabulary=8192, length=256, batch_size=8, width=192, layers=2, steps=160, evaluate_every=40)
STUDENT_WIDTH, STUDENT_LAYERS = 64, 1
TEMPERATURE = 1.0
FROM_LABELS, FROM_TEACHER = "from labels", "from the teacher"
MASKSAFE, PLAIN = "masksafe", "both logits and optax"

# Of the student's features and kernel, those of the teacher, and the mask [batch, length].
Distillation = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def masksafe_divergence(
    features: jax.Array, kernel: jax.Array, target_features: jax.Array, target_kernel: jax.Array, mask: jax.Array
) -> jax.Array:
    divergence = masksafe.losses.linear_kl_divergence(
        features, kernel, target_features, target_kernel, where=mask, temperature=TEMPERATURE
    )
    return TEMPERATURE**2 * divergence


def plain_divergence(
    features: jax.Array, kernel: jax.Array, target_features: jax.Array, target_kernel: jax.Array, mask: jax.Array
) -> jax.Array:
    targets = jax.nn.softmax(target_features @ target_kernel / TEMPERATURE)
    log_predictions = jax.nn.log_softmax(features @ kernel / TEMPERATURE)
    divergences = optax.kl_divergence(log_predictions, jax.lax.stop_gradient(targets))
    return TEMPERATURE**2 * jnp.sum(divergences * mask) / jnp.maximum(jnp.sum(mask), 1)


DIVERGENCES: dict[str, Distillation] = {PLAIN: plain_divergence, MASKSAFE: masksafe_divergence}


class Distiller(Trainer):
    """A student, trained on what a teacher predicts; evaluated on labels, like every model."""

    def __init__(self, config: Config, teacher: Trainer, params_of_teacher: Any) -> None:
        super().__init__(config)
        self.teacher = nnx.merge(teacher.graph, params_of_teacher)
        self.evaluate = jax.jit(functools.partial(super().loss_of, language_model.masksafe_loss))

    def loss_of(self, loss: Distillation, params: Any, batch: Rows) -> jax.Array:  # type: ignore[override]
        student, teacher = nnx.merge(self.graph, params), self.teacher
        features = student.within_segments(batch), teacher.within_segments(batch)
        kernels = student.kernel[...], teacher.kernel[...]
        return loss(features[0], kernels[0], features[1], kernels[1], batch.labels != IGNORED)


def student_of(config: Config, width: int = STUDENT_WIDTH, layers: int = STUDENT_LAYERS) -> Config:
    return dataclasses.replace(config, width=width, layers=layers)


def train_all(
    config: Config, of_student: Config, data: Rows, held_out: Rows, console: Console
) -> tuple[dict[str, shared.Record], dict[str, shared.Cost]]:
    """Trains the teacher and both students, and compares the steps of distillation."""

    def trained(name: str, trainer: Trainer, loss: Any) -> shared.Record:
        console.rule(name)
        return language_model.train(trainer, loss, data, held_out, console)

    teacher = Trainer(config)
    histories = {"the teacher": trained("the teacher", teacher, language_model.masksafe_loss)}
    distiller = Distiller(of_student, teacher, histories["the teacher"].params)
    costs = language_model.compare(distiller, data, rounds=9, losses=DIVERGENCES)
    histories[FROM_LABELS] = trained(f"a student, {FROM_LABELS}", Trainer(of_student), language_model.masksafe_loss)
    histories[FROM_TEACHER] = trained(f"the same, {FROM_TEACHER}", distiller, masksafe_divergence)
    return histories, costs


def draw(histories: dict[str, shared.Record], costs: dict[str, shared.Cost], path: Path) -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 4), width_ratios=(3, 1, 1), layout="constrained")
    colors = dict(zip(histories, ("black", "firebrick", "deepskyblue"), strict=True))
    for name, history in histories.items():
        style = "--" if name not in (FROM_LABELS, FROM_TEACHER) else "o-"
        label = name if style == "--" else f"a student, {name}"
        left.plot(*zip(*history.scores, strict=True), style, color=colors[name], label=label)
    left.set(xlabel="step", ylabel="cross-entropy of labels (nats)", title="Held-out functions")
    left.legend()
    numbers = {
        "ms": [1e3 * c.seconds for c in costs.values()],
        "MiB": [c.temporary_bytes / 2**20 for c in costs.values()],
    }
    for ax, (unit, values), title in zip(
        (middle, right), numbers.items(), ("Time of a step", "Its memory"), strict=True
    ):
        bars = ax.bar([name.replace(" and ", "\nand ") for name in costs], values, color=("lightgrey", "deepskyblue"))
        ax.bar_label(bars, fmt="%.0f")
        ax.set(title=f"{title} ({unit})", ylim=(0, 1.15 * max(values)))
    shared.save(figure, path)


def main() -> None:
    arguments, console = shared.parser_of(__doc__, steps=TEACHER.steps, seed=TEACHER.seed).parse_args(), Console()
    config = dataclasses.replace(TEACHER, steps=arguments.steps, seed=arguments.seed)
    data, held_out, *_ = prepare_data(config)
    histories, costs = train_all(config, student_of(config), data, held_out, console)
    shared.show_costs({"a step of distillation": costs}, "With each loss", console)
    for name, history in histories.items():
        size = sum(np.size(x) for x in jax.tree.leaves(history.params))
        console.print(f"{name}: {size / 1e6:.1f} M parameters, held-out loss {history.scores[-1][1]:.4f}")
    draw(histories, costs, arguments.output / "distill.png")
    console.print(f"the losses and the costs are in {arguments.output / 'distill.png'}")


if __name__ == "__main__":
    main()
