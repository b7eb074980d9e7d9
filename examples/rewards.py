"""The batches of `policy_gradient.py`: groups of names, rewarded if they begin with the verb of their docstring."""

from typing import Any, NamedTuple

import jax
import names
import numpy as np
from names import IGNORED, PAD, START, Params

import masksafe

# fmt: off
VERBS = {
    "add", "check", "close", "convert", "create", "find", "get", "handle",
    "parse", "process", "read", "remove", "send", "set", "test", "write",
}
# fmt: on


def reward(docstring: str, name: str | None) -> float:
    """How much of the docstring's first word, a verb, is the first of two words or more that make the name.

    As in `set_value`, "Set the value.": 1 for all of its letters, in part for those up to the first wrong one. 0 if the
    name is no identifier, or has not ended (None).
    """
    verb = names.split_words(docstring)[0]
    parts = [part for part in (name or "").lower().split("_") if part]
    if name is None or not name.isidentifier() or len(parts) < 2:
        return 0.0
    wrong = (i for i, (x, y) in enumerate(zip(parts[0], verb, strict=False)) if x != y)
    return next(wrong, min(len(parts[0]), len(verb))) / max(len(parts[0]), len(verb))


class Prompts(NamedTuple):
    """Docstrings that begin with a verb, as texts and as tokens `[functions, docstring_length]`."""

    texts: list[str]
    tokens: np.ndarray


def prompts_of(functions: list[tuple[str, str]], data: names.Functions) -> Prompts:
    rows = [i for i, (docstring, _) in enumerate(functions) if names.split_words(docstring)[0] in VERBS]
    return Prompts([functions[i][0] for i in rows], data.docstrings[rows])


def rewards_of(texts: list[str], labels: np.ndarray) -> np.ndarray:
    found = [names.read(row) if names.END in row else None for row in labels]
    return np.array([reward(text, name) for text, name in zip(texts, found, strict=True)], np.float32)


class Batch(NamedTuple):
    """Names in groups, every array `[groups * samples, ...]`."""

    docstrings: jax.Array
    inputs: jax.Array  # [..., name_length], START, then all but the last character
    labels: jax.Array  # [..., name_length], the characters and END
    mask: jax.Array  # [..., name_length], integers: 0 behind END, and in groups without a reward; else 1
    old_log_probs: jax.Array  # [..., name_length], of the model that sampled
    ref_log_probs: jax.Array  # [..., name_length], of the model at the start
    rewards: jax.Array


BAD_SHARE = 1 / 100_000  # a handful of batches out of 250, if any


def leave_garbage(batch: Batch, generator: np.random.Generator) -> Batch:
    """Log-probabilities in buffers that nobody cleared: some number in the padding, and once in a while a NaN."""

    def pollute(log_probs: jax.Array) -> np.ndarray:
        garbage = generator.normal(-3.0, 3.0, log_probs.shape)
        garbage[generator.random(log_probs.shape) < BAD_SHARE] = np.nan
        return np.where(batch.mask, log_probs, garbage).astype(np.float32)

    return batch._replace(old_log_probs=pollute(batch.old_log_probs), ref_log_probs=pollute(batch.ref_log_probs))


class Sampler:
    """Samples names, whose log-probabilities are also those of the model at the start."""

    def __init__(self, start: Params, prompts: Prompts, config: Any) -> None:
        self.start, self.prompts, self.config = start, prompts, config
        self.log_probs = jax.jit(self._log_probs)

    def features(self, params: Params, batch: Batch) -> jax.Array:
        return names.features_of(params, batch.docstrings, batch.inputs, self.config.model.heads)

    def _log_probs(self, params: Params, batch: Batch) -> jax.Array:
        options = {"where": batch.mask > 0, "temperature": self.config.temperature}
        features = self.features(params, batch)
        return masksafe.losses.linear_log_probs(features, params["logits"], batch.labels, **options)

    def names(self, params: Params, tokens: np.ndarray, key: jax.Array) -> np.ndarray:
        return np.asarray(names.sample(params, tokens, key, self.config.model.heads, self.config.temperature))

    def draw(self, params: Params, generator: np.random.Generator) -> Batch:
        """Samples a batch with clean padding.

        A new batch is made in place of writing into one: JAX may read a NumPy array after the call has returned.
        """
        config = self.config
        groups = generator.integers(len(self.prompts.texts), size=config.groups)
        rows = np.repeat(groups, config.samples)
        labels = self.names(params, self.prompts.tokens[rows], jax.random.key(generator.integers(2**31)))
        rewards = rewards_of([self.prompts.texts[row] for row in rows], labels)
        is_answered = np.repeat(generator.random(config.groups) >= config.unanswered, config.samples)
        mask = ((labels != IGNORED) & is_answered[:, None]).astype(np.int32)
        labels = np.where(mask, labels, PAD)
        inputs = np.insert(labels[:, :-1], 0, START, axis=1)
        zeros = np.zeros(labels.shape, np.float32)
        rewards = np.where(is_answered, rewards, 0)
        batch = Batch(self.prompts.tokens[rows], inputs, labels, mask, zeros, zeros, rewards)
        old, ref = (np.asarray(self.log_probs(model, batch)) for model in (params, self.start))
        return batch._replace(old_log_probs=old, ref_log_probs=ref)
