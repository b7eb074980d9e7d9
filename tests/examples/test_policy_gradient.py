"""The example of policy gradients: the reward rises, and what stands in the padding changes no bit."""

import dataclasses

import jax
import names
import numpy as np
import policy_gradient as example
import pytest
import rewards
import shared
from rich.console import Console

MODEL = names.Config(docstring_length=4, name_length=8, width=16, heads=2, decoder_layers=1)
CONFIG = example.Config(model=MODEL, groups=4, samples=8, steps=20, learning_rate=0.03, unanswered=0.25)
TEXTS = ["set value", "get", "read the file", "add a"]


def share_of_small_letters(docstring, name):
    return sum(character.islower() for character in name or "") / MODEL.name_length


@pytest.fixture(scope="module")
def trainer():
    words = names.count_words([(text, "") for text in TEXTS])
    tokens = names.tokenise([(text, "") for text in TEXTS], words, MODEL).docstrings
    start = jax.tree.map(np.asarray, names.init_params(MODEL))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewards, "reward", share_of_small_letters)
        yield example.Trainer(start, rewards.Prompts(TEXTS, tokens), CONFIG)


@pytest.fixture(scope="module")
def batch(trainer):
    """The first group has no reward."""
    batch = trainer.draw(trainer.start, np.random.default_rng(1))
    return batch._replace(mask=np.where(np.arange(len(batch.mask))[:, None] < CONFIG.samples, 0, batch.mask))


@pytest.fixture(scope="module")
def inputs(trainer, batch):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(*batch.mask.shape, MODEL.width)).astype(np.float32)
    old = np.float32(batch.old_log_probs + 0.1 * rng.normal(size=batch.mask.shape) * batch.mask)
    return features, trainer.start["logits"], batch._replace(old_log_probs=old)


@pytest.mark.parametrize(
    ("docstring", "name", "expected"),
    [
        ("Set the value.", "set_value", 1.0),
        ("Return it.", "ret_it", 0.5),
        ("Return it.", "returned_it", 0.75),
        ("Set the value.", "value_set", 0.0),
        ("Set the value.", None, 0.0),
    ],
)
def test_reward(docstring, name, expected):
    assert rewards.reward(docstring, name) == expected


@pytest.mark.slow
def test_names_have_different_lengths_and_one_padded_batch(trainer, batch):
    lengths = batch.mask.sum(1)
    assert 0 in lengths
    assert len(set(lengths)) > 2
    assert (np.diff(batch.mask, axis=1) <= 0).all()  # the padding is behind
    np.testing.assert_array_equal(batch.old_log_probs, batch.ref_log_probs)
    drawn = trainer.draw(trainer.start, np.random.default_rng(1))
    assert {type(x) for x in drawn} == {np.ndarray}  # it is finished: no call computes or reads one of them


def gradients(loss, inputs, config=CONFIG):
    """The loss and its gradients of features and kernel."""
    function = jax.jit(jax.value_and_grad(lambda *args: loss(*args, config)[0], argnums=(0, 1)))
    return function(*inputs)


@pytest.mark.slow
def test_both_formulas_are_the_same_on_clean_padding(inputs):
    ours, theirs = (gradients(loss, inputs) for loss in (example.masksafe_loss, example.usual_loss))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-5), ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "garbage"), [("old_log_probs", np.nan), ("old_log_probs", -1e4), ("ref_log_probs", 1e4), ("labels", -100)]
)
def test_garbage_changes_no_bit_of_ours_and_makes_the_other_nan(inputs, name, garbage):
    features, kernel, batch = inputs
    x = getattr(batch, name)
    polluted = features, kernel, batch._replace(**{name: np.where(batch.mask, x, garbage).astype(x.dtype)})
    assert shared.same_bits(gradients(example.masksafe_loss, inputs), gradients(example.masksafe_loss, polluted))
    found = gradients(example.usual_loss, polluted)
    assert any(np.isnan(x).any() for x in jax.tree.leaves(found))


@pytest.mark.slow
def test_groups_of_equal_rewards_and_without_any_have_no_part(inputs):
    """At the model that sampled, and without a divergence, nothing is left of the gradient."""
    features, kernel, batch = inputs
    config = dataclasses.replace(CONFIG, kl_weight=0.0)
    equal = batch._replace(rewards=np.repeat([0.3, 0.7, 1.0, 0.0], CONFIG.samples).astype(np.float32))
    value, found = gradients(example.masksafe_loss, (features, kernel, equal), config)
    assert value == 0
    assert not any(np.any(gradient) for gradient in found)


@pytest.mark.slow
def test_reward_rises_with_garbage_as_without_and_the_usual_formula_ends_at_the_first_nan(trainer, monkeypatch):
    monkeypatch.setattr(rewards, "BAD_SHARE", 0.1)
    names_of_runs = "masksafe, clean", "masksafe, garbage", "usual formula, garbage"
    clean, garbage, usual = (trainer.run(name, Console(quiet=True)) for name in names_of_runs)
    assert np.mean(clean.rewards[-5:]) > np.mean(clean.rewards[:5]) + 0.1
    assert shared.same_bits(clean[:2], garbage[:2])
    assert usual.has_ended
    assert len(usual.rewards) == 1


def test_picture(tmp_path):
    parts = example.Parts(0.1, 1.0)
    records = {name: example.Record({}, [0.1, 0.2], [parts] * 2, "usual" in name) for name in example.RUNS}
    example.draw(records, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
