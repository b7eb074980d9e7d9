"""The example of distillation: both losses are one, at different costs, and the student comes closer to its teacher."""

import _collections_abc
import ast
import dataclasses
import inspect
import io

import bodies
import distill
import jax
import language_model
import numpy as np
import pytest
from rich.console import Console

CONFIG = dataclasses.replace(
    distill.TEACHER, vocabulary=400, length=64, batch_size=2, width=16, layers=1, steps=4, evaluate_every=2
)
STUDENT = distill.student_of(CONFIG, width=8, layers=1)
SOURCE = inspect.getsource(_collections_abc)  # many short methods


@pytest.fixture(scope="module")
def data():
    functions = list(bodies.functions_of(ast.parse(SOURCE), SOURCE.splitlines(keepends=True)))
    return bodies.pack(functions, bodies.Vocabulary(functions, CONFIG.vocabulary), CONFIG.length)


@pytest.mark.slow
def test_one_loss_and_no_gradient_for_the_teacher(data):
    teacher = language_model.Trainer(CONFIG)
    distiller, batch = distill.Distiller(STUDENT, teacher, teacher.params), data[:2]
    values, gradients = zip(
        *(
            jax.jit(jax.value_and_grad(lambda params, loss=loss: distiller.loss_of(loss, params, batch)))(
                distiller.params
            )
            for loss in distill.DIVERGENCES.values()
        ),
        strict=True,
    )
    np.testing.assert_allclose(*values, rtol=1e-3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), *gradients)


@pytest.mark.slow
def test_both_students_learn(data, tmp_path):
    console = Console(file=io.StringIO())
    histories, costs = distill.train_all(CONFIG, STUDENT, data, data[:2], console)
    assert list(histories) == ["the teacher", distill.FROM_LABELS, distill.FROM_TEACHER]
    for history in histories.values():
        assert [step for step, _ in history.scores] == [0, 2, 4]
        assert history.scores[-1][1] < history.scores[0][1]
    assert list(costs) == [distill.PLAIN, distill.MASKSAFE]
    distill.draw(histories, costs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_step_needs_less_memory(data):
    config = dataclasses.replace(CONFIG, vocabulary=8192, length=256, batch_size=8)
    student = distill.student_of(config, width=8)
    teacher = language_model.Trainer(config)
    distiller = distill.Distiller(student, teacher, teacher.params)
    batch = bodies.Rows(*(np.zeros((8, 256), int) for _ in bodies.Rows._fields))
    compiled = {
        name: distiller.make_step(loss).lower(distiller.initial_state(), batch).compile()
        for name, loss in distill.DIVERGENCES.items()
    }
    of = {name: program.memory_analysis().temp_size_in_bytes for name, program in compiled.items()}
    assert of[distill.MASKSAFE] < of[distill.PLAIN] / 2
