"""Fine-tunes a small language model with a verifiable reward by policy gradients: with masksafe, and as it is usual.

The model of `train_names.py` writes a function's name from its docstring. It is trained for a short while, and then
rewarded for names that begin with the docstring's verb, such as `set_value` for "Set the value.", which a few lines of
Python can verify. For each docstring it samples a group of names, of different lengths, in one padded batch; a name is
reinforced as far as it is better than its group (GRPO), with the clipped importance ratios of PPO and a penalty on the
divergence from the model at the start.

    python examples/policy_gradient.py    # about two minutes on two cores

The padding holds what the memory happened to hold. That changes no bit of a run with masksafe. The usual formula
computes ratios everywhere and multiplies them by the mask. As NaN * 0 is NaN, such a run ends at the first bad number;
which step that is depends on the seed.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import shared
import train_names
from rich.console import Console
from train_names import END, IGNORED, PAD, START, Params

import masksafe

MODEL = train_names.Config(
    docstring_length=12, name_length=20, width=64, decoder_layers=1, steps=400, evaluate_every=200
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The fine-tuning."""

    model: train_names.Config = MODEL
    groups: int = 12  # docstrings in a batch
    samples: int = 8  # names for each of them
    steps: int = 250
    updates: int = 2  # of the parameters, with each batch
    unanswered: float = 0.1  # the share of groups that get no reward, as if the verifier had not answered
    learning_rate: float = 1e-3
    temperature: float = 1.0
    clip: float = 0.2
    kl_weight: float = 0.02
    seed: int = 0


# The reward.


def reward(docstring: str, name: str | None) -> float:
    """How much of the docstring's first word, a verb, is the first of two words or more that make the name.

    As in `set_value`, "Set the value.": 1 for all of its letters, in part for those up to the first wrong one. 0 if the
    name is no identifier, or has not ended (None).
    """
    words = train_names.split_words(docstring)
    parts = [part for part in (name or "").lower().split("_") if part]
    if name is None or not name.isidentifier() or len(parts) < 2:
        return 0.0
    return common_prefix(parts[0], words[0]) / max(len(parts[0]), len(words[0]))


def common_prefix(a: str, b: str) -> int:
    """The number of letters that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# Sampling from a cache of keys and values.


@functools.partial(jax.jit, static_argnames=("heads", "temperature"))
def sample(params: Params, docstrings: jax.Array, key: jax.Array, heads: int, temperature: float) -> jax.Array:
    """Names [rows, name_length], a character at a time; IGNORED behind END."""
    context, lengths = train_names.encode(params, docstrings, heads)
    layers = params["decoder"]
    crossed = [train_names.keys_and_values(layer["cross"], context, heads) for layer in layers]
    rows, (length, width) = len(docstrings), params["character_positions"].shape
    # No query sees a place that is not yet written, so it may hold anything.
    places = jnp.full((rows, length, heads, width // heads), jnp.nan)

    def step(state: Any, at: jax.Array) -> Any:
        caches, character, is_done = state
        x = (params["characters"][character] + params["character_positions"][at])[:, None]
        written = []
        for layer, cache, cross in zip(layers, caches, crossed, strict=True):
            normal = train_names.normalise(x)
            new = train_names.keys_and_values(layer["self"], normal, heads)
            cache = tuple(old.at[:, at].set(x[:, 0]) for old, x in zip(cache, new, strict=True))
            x += train_names.attend(layer["self"], normal, *cache, key_value_seq_lengths=jnp.full(rows, at + 1))
            normal = train_names.normalise(x)
            x += train_names.attend(layer["cross"], normal, *cross, key_value_seq_lengths=lengths)
            x += train_names.feed_forward(layer, x)
            written.append(cache)
        logits = train_names.normalise(x)[:, 0] @ params["logits"]
        character = jax.random.categorical(jax.random.fold_in(key, at), logits / temperature)
        return (written, character, is_done | (character == END)), jnp.where(is_done, IGNORED, character)

    start = [(places, places)] * len(layers), jnp.full(rows, START), jnp.zeros(rows, bool)
    return jax.lax.scan(step, start, jnp.arange(length))[1].T


# The data: functions with docstrings, and among these the ones that begin with a frequent verb.

# fmt: off
VERBS = {
    "add", "check", "close", "convert", "create", "find", "get", "handle",
    "parse", "process", "read", "remove", "send", "set", "test", "write",
}
# fmt: on


class Prompts(NamedTuple):
    """The docstrings that begin with a verb, as texts and as tokens `[functions, docstring_length]`."""

    texts: list[str]
    tokens: np.ndarray


def prepare_data(config: Config) -> tuple[train_names.Functions, train_names.Functions, Prompts, Prompts]:
    """Functions to train with, functions held out, and the prompts among both."""
    functions = [function for function in train_names.read_functions() if function[0]]
    np.random.default_rng(config.seed).shuffle(functions)
    parts = functions[1024:], functions[:1024]
    words = train_names.count_words(parts[0])
    data = [train_names.tokenise(part, words, config.model) for part in parts]
    prompts = []
    for part, tokens in zip(parts, data, strict=True):
        rows = [i for i, (docstring, _) in enumerate(part) if train_names.split_words(docstring)[0] in VERBS]
        prompts.append(Prompts([part[i][0] for i in rows], tokens.docstrings[rows]))
    return (*data, *prompts)


# A batch, and what stands in its padding.


class Batch(NamedTuple):
    """Names in groups, every array `[groups * samples, ...]`.

    A new batch is made in place of writing into one: JAX may read a NumPy array after the call has returned.
    """

    docstrings: jax.Array
    inputs: jax.Array  # [..., name_length], START, then all but the last character
    labels: jax.Array  # [..., name_length], the characters and END
    mask: jax.Array  # [..., name_length], integers: 0 behind END, and in groups without a reward; else 1
    old_log_probs: jax.Array  # [..., name_length], of the model that sampled
    ref_log_probs: jax.Array  # [..., name_length], of the model at the start
    rewards: jax.Array


Pollute = Callable[[Batch, np.random.Generator], Batch]


def leave_clean(batch: Batch, generator: np.random.Generator) -> Batch:
    """Zeros in all padding."""
    return batch


def leave_garbage(batch: Batch, generator: np.random.Generator, bad_share: float = 1 / 100_000) -> Batch:
    """Log-probabilities in buffers that nobody cleared: some number in the padding, and once in a while a NaN.

    One place in 100000: a handful of batches out of 250, if any.
    """

    def pollute(log_probs: jax.Array) -> np.ndarray:
        garbage = generator.normal(-3.0, 3.0, log_probs.shape)
        garbage[generator.random(log_probs.shape) < bad_share] = np.nan
        return np.where(batch.mask, log_probs, garbage).astype(np.float32)

    return batch._replace(old_log_probs=pollute(batch.old_log_probs), ref_log_probs=pollute(batch.ref_log_probs))


# The losses, of features [rows, name_length, width], the kernel of the output layer, and a batch.


class Parts(NamedTuple):
    """What is reported of a batch: means over its characters."""

    kl: jax.Array
    entropy: jax.Array
    clipped: jax.Array


Loss = Callable[[jax.Array, jax.Array, Batch, Config], tuple[jax.Array, Parts]]


def masksafe_loss(features: jax.Array, kernel: jax.Array, batch: Batch, config: Config) -> tuple[jax.Array, Parts]:
    """What is masked is gone before any arithmetic sees it."""
    where = batch.mask > 0
    rewards, has_reward = batch.rewards.reshape(-1, config.samples), where.any(1).reshape(-1, config.samples)
    advantages = masksafe.standardize(rewards, where=has_reward, epsilon=1e-8).reshape(-1, 1)
    log_probs, entropies = masksafe.losses.linear_log_probs(
        features, kernel, batch.labels, where=where, temperature=config.temperature, with_entropy=True
    )
    ratio = jnp.exp(masksafe.mask_where(~where, log_probs - batch.old_log_probs, 0))
    clipped_ratio = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
    gain = jnp.minimum(ratio * advantages, clipped_ratio * advantages)
    to_ref = masksafe.mask_where(~where, batch.ref_log_probs - log_probs, 0)
    kl = jnp.expm1(to_ref) - to_ref  # an estimate that is never negative
    mean = functools.partial(masksafe.mean, where=where)
    return mean(config.kl_weight * kl - gain), Parts(mean(kl), mean(entropies), mean(ratio != clipped_ratio))


def usual_loss(features: jax.Array, kernel: jax.Array, batch: Batch, config: Config) -> tuple[jax.Array, Parts]:
    """As libraries for fine-tuning have it: everything is computed everywhere, and multiplied by the mask.

    A mask of integers, as theirs. (Were it boolean, XLA would make a selection of the product when it compiles; that
    spares the loss, and not every gradient.) Some clip the logarithm of the ratio, which stops inf but not NaN.
    """
    mask, rewards = batch.mask, batch.rewards.reshape(-1, config.samples)
    deviations = rewards - rewards.mean(1, keepdims=True)
    advantages = (deviations / (rewards.std(1, keepdims=True) + 1e-4)).reshape(-1, 1)
    all_log_probs = jax.nn.log_softmax(features @ kernel / config.temperature)
    log_probs = jnp.take_along_axis(all_log_probs, batch.labels[..., None], -1)[..., 0]
    entropies = -(jnp.exp(all_log_probs) * all_log_probs).sum(-1)
    ratio = jnp.exp(log_probs - batch.old_log_probs)
    clipped_ratio = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
    gain = jnp.minimum(ratio * advantages, clipped_ratio * advantages)
    to_ref = batch.ref_log_probs - log_probs
    kl = jnp.exp(to_ref) - to_ref - 1

    def mean(x: jax.Array) -> jax.Array:
        return (x * mask).sum() / jnp.maximum(mask.sum(), 1)

    return mean(config.kl_weight * kl - gain), Parts(mean(kl), mean(entropies), mean(ratio != clipped_ratio))


MASKSAFE, USUAL = "masksafe", "usual formula"
LOSSES: dict[str, Loss] = {MASKSAFE: masksafe_loss, USUAL: usual_loss}


# Fine-tuning.


class Record(NamedTuple):
    """Of each step; a run that has become NaN ends there."""

    params: Params
    rewards: list[float]
    parts: list[Parts]
    has_ended: bool


class Trainer:
    """Samples and updates from the model at the start, which is also what the divergence is from."""

    def __init__(self, start: Params, prompts: Prompts, config: Config, reward: Callable[..., float] = reward) -> None:
        self.start, self.prompts, self.config, self.reward = start, prompts, config, reward
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(config.learning_rate))
        self.log_probs = jax.jit(self._log_probs)
        self.updates = {name: self.make_update(loss) for name, loss in LOSSES.items()}

    def _log_probs(self, params: Params, batch: Batch) -> jax.Array:
        features = train_names.features_of(params, batch.docstrings, batch.inputs, self.config.model.heads)
        temperature = self.config.temperature
        linear_log_probs = masksafe.losses.linear_log_probs
        where = batch.mask > 0
        return linear_log_probs(features, params["logits"], batch.labels, where=where, temperature=temperature)

    def names(self, params: Params, tokens: np.ndarray, key: jax.Array) -> np.ndarray:
        return np.asarray(sample(params, tokens, key, self.config.model.heads, self.config.temperature))

    def score(self, texts: list[str], labels: np.ndarray) -> np.ndarray:
        names = [train_names.read(row) if END in row else None for row in labels]
        return np.array([self.reward(text, name) for text, name in zip(texts, names, strict=True)], np.float32)

    def draw(self, params: Params, generator: np.random.Generator) -> Batch:
        """Samples a batch with clean padding."""
        config = self.config
        groups = generator.integers(len(self.prompts.texts), size=config.groups)
        rows = np.repeat(groups, config.samples)
        labels = self.names(params, self.prompts.tokens[rows], jax.random.key(generator.integers(2**31)))
        rewards = self.score([self.prompts.texts[row] for row in rows], labels)
        is_answered = np.repeat(generator.random(config.groups) >= config.unanswered, config.samples)
        mask = ((labels != IGNORED) & is_answered[:, None]).astype(np.int32)
        labels = np.where(mask, labels, PAD)
        inputs = np.insert(labels[:, :-1], 0, START, axis=1)
        zeros = np.zeros(labels.shape, np.float32)
        rewards = np.where(is_answered, rewards, 0)
        batch = Batch(self.prompts.tokens[rows], inputs, labels, mask, zeros, zeros, rewards)
        old, ref = (np.asarray(self.log_probs(model, batch)) for model in (params, self.start))
        return batch._replace(old_log_probs=old, ref_log_probs=ref)

    def make_update(self, loss: Loss) -> Callable[..., Any]:
        @jax.jit
        def update(params: Params, state: Any, batch: Batch) -> tuple[Params, Any, Parts]:
            def batch_loss(params: Params) -> tuple[jax.Array, Parts]:
                features = train_names.features_of(params, batch.docstrings, batch.inputs, self.config.model.heads)
                return loss(features, params["logits"], batch, self.config)

            gradient, parts = jax.grad(batch_loss, has_aux=True)(params)
            updates, state = self.optimizer.update(gradient, state)
            return optax.apply_updates(params, updates), state, parts

        return update

    def run(self, title: str, console: Console) -> Record:
        """A run of that title, with the same docstrings and the same garbage in every run."""
        name, pollute = RUNS[title]
        update, params, state = self.updates[name], self.start, self.optimizer.init(self.start)
        prompts, garbage = np.random.default_rng(self.config.seed), np.random.default_rng(self.config.seed)
        rewards, all_parts = [], []
        with shared.progress(title, self.config.steps, console) as advance:
            for _ in range(self.config.steps):
                batch = self.draw(params, prompts)
                rewards.append(batch.rewards[batch.mask.any(1)].mean())
                batch = pollute(batch, garbage)
                for _ in range(self.config.updates):
                    params, state, parts = update(params, state, batch)
                all_parts.append(jax.tree.map(float, parts))
                advance(f"reward {rewards[-1]:.2f}")
                if np.isnan(optax.tree.norm(params)):
                    return Record(params, rewards, all_parts, True)
        return Record(params, rewards, all_parts, False)


# The program.


RUNS: dict[str, tuple[str, Pollute]] = {
    "masksafe, clean": (MASKSAFE, leave_clean),
    "masksafe, garbage": (MASKSAFE, leave_garbage),
    "usual formula, clean": (USUAL, leave_clean),
    "usual formula, garbage": (USUAL, leave_garbage),
}


def mean_reward(trainer: Trainer, params: Params, prompts: Prompts) -> float:
    """Of one name for each docstring."""
    labels = trainer.names(params, prompts.tokens, jax.random.key(trainer.config.seed))
    return float(trainer.score(prompts.texts, labels).mean())


def line_of(record: Record, trainer: Trainer, held_out: Prompts) -> list[str]:
    """Steps, and means at the end of the run."""
    if record.has_ended:
        return [f"NaN at {len(record.rewards)}"]
    last = slice(-max(1, len(record.rewards) // 10), None)
    kl, entropy, _ = np.mean(record.parts[last], 0)
    values = np.mean(record.rewards[last]), mean_reward(trainer, record.params, held_out), kl, entropy
    return [str(len(record.rewards)), *(f"{value:.2f}" for value in values)]


def draw(records: dict[str, Record], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2), layout="constrained")
    styles = {
        "usual formula, clean": ("orange", 3.0),
        "usual formula, garbage": ("firebrick", 1.2),
        "masksafe, clean": ("deepskyblue", 3.0),
        "masksafe, garbage": ("midnightblue", 1.2),
    }
    window = max(1, max(len(record.rewards) for record in records.values()) // 20)
    for name, (color, width) in styles.items():
        record = records[name]
        steps, rewards = shared.smooth(record.rewards, window)
        left.plot(steps, rewards, color=color, linewidth=width, label=name)
        if record.has_ended:
            left.plot(steps[-1], rewards[-1], "X", color=color, markersize=11)
            note = f"NaN at step {len(record.rewards)}"
            left.annotate(note, (steps[-1], rewards[-1]), (-10, 8), textcoords="offset points", color=color, ha="right")
    title = "Names that begin with the docstring's verb"
    left.set(xlabel="step", ylabel=f"reward (mean of {window} steps)", title=title)
    parts = records["masksafe, clean"].parts
    for label, values, color in (
        ("entropy of a character", [p.entropy for p in parts], "seagreen"),
        ("divergence from the start (KL)", [p.kl for p in parts], "mediumpurple"),
    ):
        right.plot(*shared.smooth(values, window), color=color, label=label)
    right.set(xlabel="step", ylabel="nats per character", title="masksafe: what the reward costs")
    for axis in (left, right):
        axis.set_ylim(bottom=0)
        axis.legend()
    shared.save(figure, path)


def main() -> None:
    arguments, console = shared.parser_of(__doc__, steps=Config.steps, seed=Config.seed).parse_args(), Console()
    config = Config(steps=arguments.steps, seed=arguments.seed)
    data, held_out_data, prompts, held_out = prepare_data(config)
    console.print(f"{len(data.labels)} functions, whose names the model learns first; {len(prompts.texts)} are prompts")
    start = train_names.train(data, held_out_data, config.model, console).params

    trainer = Trainer(start, prompts, config)
    records = {name: trainer.run(name, console) for name in RUNS}
    lines = [["before", "0", "", f"{mean_reward(trainer, start, held_out):.2f}", "0", ""]]
    lines += [[name, *line_of(record, trainer, held_out)] for name, record in records.items()]
    shared.show("Fine-tuning, at the end", ["", "steps", "reward", "held out", "KL", "entropy"], lines, console)
    clean, garbage = (records[name] for name in RUNS if name.startswith(MASKSAFE))
    key = jax.random.key(config.seed)
    drawn = (trainer.names(params, held_out.tokens, key)[:6] for params in (start, clean.params))
    names = zip(*(map(train_names.read, rows) for rows in drawn), strict=True)
    lines = [[text[:60], *both] for text, both in zip(held_out.texts[:6], names, strict=True)]
    shared.show("Names for held-out docstrings", ["docstring", "before", "after"], lines, console)
    same = "the same bits" if shared.same_bits(clean[:2], garbage[:2]) else "OTHER NUMBERS"
    console.print(f"masksafe, with garbage in the padding: {same} in every reward and parameter")
    picture = arguments.output / "policy_gradient.png"
    draw(records, picture)
    console.print(f"the curves are in {picture}")


if __name__ == "__main__":
    main()
