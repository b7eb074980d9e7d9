"""The losses of the guide on RL: as on the same answers without padding, whatever the padding holds."""

import ast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from pages import names_of
from tiers import parametrize

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def guide():
    """The names that the guide defines."""
    prints = lambda statement: isinstance(statement, ast.Expr | ast.With)  # noqa: E731
    return names_of("docs/guides/rl_and_preference_tuning.md", lambda statement: not prints(statement))


def numbers(tree):
    return ravel_pytree(tree)[0]


def assert_agree(a, b):
    assert jnp.allclose(numbers(a), numbers(b), atol=1e-6)


def assert_same_bits(guide, step, *trees):
    def padded(garbage):
        return jax.tree.map(lambda x: jnp.where(jnp.expand_dims(guide["mask"], range(2, x.ndim)), x, garbage), trees)

    expected, *others = (numbers(step(*padded(x))) for x in (0, jnp.nan, jnp.inf))
    assert all(jnp.array_equal(expected, x) for x in others)


def alone(guide, fn, *trees):
    """What `fn` gives for each answer without its padding."""
    return [fn(*jax.tree.map(lambda x: x[i, :n], trees)) for i, n in enumerate(guide["lengths"]) if n > 0]  # noqa: B023


def gae_of_answer(rewards, values, decay=0.95):
    """For a discount of 1."""
    errors = rewards + np.append(values[1:], 0) - values
    powers = decay ** np.arange(len(errors))
    return np.stack([errors[t:] @ powers[: len(errors) - t] for t in range(len(errors))])


def test_advantages(guide):
    rewards, values, mask = jax.device_get((guide["rewards"], guide["old_values"], guide["mask"]))
    expected = alone(guide, gae_of_answer, rewards, values)
    assert_agree(guide["estimates"][mask], expected)
    assert_agree(guide["white"][mask], jax.nn.standardize(numbers(expected), epsilon=1e-8))
    assert_same_bits(guide, jax.jit(lambda *arrays: guide["gae"](*arrays, mask)), rewards, values)


def test_an_answer_with_the_output_of_a_tool_in_it(guide):
    rewards, values = jax.device_get((guide["rewards"], guide["old_values"]))
    tokens = np.array([0, 1, 3, 4])
    found = guide["gae"](rewards, values, guide["mask"].at[0, 2].set(False), across=True)[0]
    assert_agree(found[tokens], gae_of_answer(rewards[0, tokens], values[0, tokens]))
    assert found[2] == 0


def check(guide, loss, loss_alone, *trees):
    step = jax.jit(jax.value_and_grad(loss))
    assert_agree(step(*trees), jax.jit(jax.value_and_grad(loss_alone))(*trees))
    assert_same_bits(guide, step, *trees)


def test_ppo(guide):
    def loss_alone(*trees):
        return numbers(alone(guide, guide["ppo_of_tokens"], *trees, guide["tokens"], guide["mask"])).mean()

    check(guide, guide["ppo_loss"], loss_alone, guide["outputs"], guide["ppo_batch"])


@parametrize(
    ("average", "mean"),
    [("token_mean", lambda losses: numbers(losses).mean())],
    exhaustive=[
        ("sequence_mean", lambda losses: jnp.stack([x.mean() for x in losses]).mean()),
        ("over_constant", lambda losses: numbers(losses).sum() / 30),
    ],
)
def test_grpo(guide, average, mean):
    def loss(*trees):
        return guide["grpo_loss"](*trees, guide[average])

    def loss_alone(*trees):
        return mean(alone(guide, guide["grpo_of_tokens"], *trees, guide["tokens"], guide["mask"]))

    check(guide, loss, loss_alone, guide["logits"], guide["grpo_batch"])


def test_dpo(guide):
    rows, prompts, ends = guide["rows"], guide["prompts"], guide["ends"]

    def dpo_alone(table):
        ratios = jax.nn.log_softmax(table) - jax.nn.log_softmax(guide["reference_table"])

        def of_answer(side, i):
            row = rows[side, i, prompts[i] - 1 : ends[side, i, 0]]
            return ratios[row[:-1], row[1:]].sum()

        margins = jnp.stack([of_answer(0, i) - of_answer(1, i) for i in range(3)])
        return -jax.nn.log_sigmoid(0.1 * margins).mean()

    table, reference = guide["table"], guide["reference"].at[1, 3].set(jnp.nan)  # of the pair that is left out
    first, *others = (
        guide["dpo_step"](table, reference, jnp.where(guide["place"] < ends, rows, x), guide["of_answers"])
        for x in (-100, 3, 2**31 - 1)
    )
    assert_agree(first, jax.value_and_grad(dpo_alone)(table))
    assert all(jnp.array_equal(numbers(first), numbers(x)) for x in others)
