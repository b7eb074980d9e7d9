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

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import train_names
from rich.console import Console
from rich.table import Table
from train_names import END, IGNORED, PAD, START, Params

import masksafe

matplotlib.use("Agg")
import matplotlib.pyplot as plt

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


def without_reward(batch: Batch, rows: int) -> Batch:
    """The batch with the first rows masked, as those of groups to which the verifier has not answered."""
    return batch._replace(mask=np.where(np.arange(len(batch.mask))[:, None] < rows, 0, batch.mask))


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

    def run(self, name: str, pollute: Pollute) -> Record:
        """Fine-tunes with the loss of that name, with the same docstrings and the same garbage in every run."""
        update, params, state = self.updates[name], self.start, self.optimizer.init(self.start)
        prompts, garbage = np.random.default_rng(self.config.seed), np.random.default_rng(self.config.seed)
        rewards, all_parts = [], []
        for _ in range(self.config.steps):
            batch = self.draw(params, prompts)
            rewards.append(batch.rewards[batch.mask.any(1)].mean())
            batch = pollute(batch, garbage)
            for _ in range(self.config.updates):
                params, state, parts = update(params, state, batch)
            all_parts.append(jax.tree.map(float, parts))
            if np.isnan(optax.tree.norm(params)):
                return Record(params, rewards, all_parts, True)
        return Record(params, rewards, all_parts, False)


# What garbage does to one step, and what a step costs.


def gradients_of(loss: Loss, config: Config) -> Callable[..., Any]:
    """The loss and its gradients, of features, kernel and batch."""
    function = functools.partial(loss, config=config)
    return jax.jit(jax.value_and_grad(lambda *args: function(*args)[0], argnums=(0, 1)))


Inputs = tuple[jax.Array, jax.Array, Batch]  # features, kernel, batch


def garbage_of(inputs: Inputs) -> dict[str, Inputs]:
    """The same inputs with other padding, of each kind."""
    features, kernel, batch = inputs

    def padded_with(garbage: float, x: jax.Array) -> jax.Array:
        mask = batch.mask.reshape(batch.mask.shape + (1,) * (x.ndim - 2))
        return jnp.where(mask, x, jnp.asarray(garbage, x.dtype))

    def replaced(**fields: Any) -> Inputs:
        return features, kernel, batch._replace(**fields)

    return {
        "labels: -100": replaced(labels=padded_with(IGNORED, batch.labels)),
        "old log-probabilities: NaN": replaced(old_log_probs=padded_with(np.nan, batch.old_log_probs)),
        "old log-probabilities: -1e4": replaced(old_log_probs=padded_with(-1e4, batch.old_log_probs)),
        "reference log-probabilities: 1e4": replaced(ref_log_probs=padded_with(1e4, batch.ref_log_probs)),
        "rewards not given: NaN": replaced(rewards=jnp.where(batch.mask.any(1), batch.rewards, np.nan)),
        "features: NaN": (padded_with(np.nan, features), kernel, batch),
    }


def effect(clean: Any, polluted: Any) -> str:
    """Of the garbage, on a loss and its gradients, or on any other two trees."""
    if all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (clean, polluted)), strict=True)):
        return "the same bits"
    value_is_nan, gradient_is_nan = (any(np.isnan(x).any() for x in jax.tree.leaves(part)) for part in polluted)
    if gradient_is_nan:
        return "NaN in loss and gradient" if value_is_nan else "NaN in the gradient"
    return "NaN in the loss" if value_is_nan else "other numbers"


class Cost(NamedTuple):
    """The cost of a compiled function."""

    seconds: float
    temporary_bytes: int


def measure(functions: dict[str, Callable[..., Any]], args: tuple[Any, ...], rounds: int) -> dict[str, Cost]:
    """The least of several times, in turn."""
    compiled = {name: jax.jit(function).lower(*args).compile() for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            times[name].append(time.perf_counter() - start)
    return {name: Cost(min(times[name]), f.memory_analysis().temp_size_in_bytes) for name, f in compiled.items()}


def large_inputs(shortest: int, rows: int = 32, length: int = 128, width: int = 256, vocabulary: int = 32768) -> Inputs:
    """Of a larger model: completions of any length from `shortest` to that of the batch."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(rows, length, width)).astype(np.float32)
    kernel = (rng.normal(size=(width, vocabulary)) * width**-0.5).astype(np.float32)
    labels = rng.integers(vocabulary, size=(rows, length))
    mask = (np.arange(length) < np.linspace(shortest, length, rows)[:, None]).astype(np.int32)
    log_probs = np.full((rows, length), -np.log(vocabulary), np.float32)
    rewards = rng.random(rows).astype(np.float32)
    return features, kernel, Batch(None, None, labels, mask, log_probs, log_probs, rewards)


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


def show_runs(records: dict[str, Record], trainer: Trainer, held_out: Prompts, console: Console) -> None:
    table = Table("", "steps", "reward", "held out", "KL", "entropy", title="Fine-tuning, at the end")
    table.add_row("before", "0", "", f"{mean_reward(trainer, trainer.start, held_out):.2f}", "0", "")
    for name, record in records.items():
        last = slice(-max(1, len(record.rewards) // 10), None)
        if record.has_ended:
            table.add_row(name, f"NaN at {len(record.rewards)}")
            continue
        kl, entropy, _ = np.mean(record.parts[last], 0)
        values = np.mean(record.rewards[last]), mean_reward(trainer, record.params, held_out), kl, entropy
        table.add_row(name, str(len(record.rewards)), *(f"{value:.2f}" for value in values))
    console.print(table)


def show_names(trainer: Trainer, params: Params, prompts: Prompts, console: Console, number: int = 6) -> None:
    table = Table("docstring", "before", "after", title="Names for held-out docstrings")
    drawn = [trainer.names(p, prompts.tokens, jax.random.key(trainer.config.seed)) for p in (trainer.start, params)]
    for text, *names in list(zip(prompts.texts, *drawn, strict=True))[:number]:
        table.add_row(text[:60], *map(train_names.read, names))
    console.print(table)


def show_effects(inputs: Inputs, config: Config, console: Console) -> None:
    table = Table("what the padding holds", *LOSSES, title="One step")
    functions = [gradients_of(loss, config) for loss in LOSSES.values()]
    clean = [function(*inputs) for function in functions]
    for name, polluted in garbage_of(inputs).items():
        table.add_row(name, *(effect(c, f(*polluted)) for c, f in zip(clean, functions, strict=True)))
    console.print(table)


def show_costs(costs: dict[str, dict[str, Cost]], console: Console) -> None:
    table = Table("", *LOSSES, title="Cost: time, temporary memory")
    for name, row in costs.items():
        cells = (f"{c.seconds * 1e3:.0f} ms, {c.temporary_bytes / 2**20:.1f} MiB" for c in row.values())
        table.add_row(name, *cells)
    console.print(table)


def smooth(values: list[float], window: int) -> tuple[np.ndarray, np.ndarray]:
    """The means of `window` values, and where they end."""
    means = np.convolve(values, np.ones(window) / window, "valid")
    return np.arange(len(means)) + window, means


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
        steps, rewards = smooth(record.rewards, min(window, len(record.rewards)))
        left.plot(steps, rewards, color=color, linewidth=width, label=name)
        if record.has_ended:
            left.plot(steps[-1], rewards[-1], "X", color=color, markersize=11)
            note = f"NaN at step {len(record.rewards)}"
            left.annotate(note, (steps[-1], rewards[-1]), (-10, 8), textcoords="offset points", color=color, ha="right")
    left.set(
        xlabel="step", ylabel=f"reward (mean of {window} steps)", title="Names that begin with the docstring's verb"
    )
    left.set_ylim(bottom=0)
    left.legend()
    parts = records["masksafe, clean"].parts
    for label, values, color in (
        ("entropy of a character", [p.entropy for p in parts], "seagreen"),
        ("divergence from the start (KL)", [p.kl for p in parts], "mediumpurple"),
    ):
        right.plot(*smooth(values, window), color=color, label=label)
    right.set(xlabel="step", ylabel="nats per character", title="masksafe: what the reward costs")
    right.set_ylim(bottom=0)
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Config.steps, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=Config.seed, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("examples/output"), help="default: %(default)s")
    arguments = parser.parse_args()
    config, console = Config(steps=arguments.steps, seed=arguments.seed), Console()
    data, held_out_data, prompts, held_out = prepare_data(config)
    console.print(f"{len(data.labels)} functions, whose names the model learns first; {len(prompts.texts)} are prompts")
    start = train_names.train(train_names.masksafe_loss, data, held_out_data, config.model, console).params

    trainer, records = Trainer(start, prompts, config), {}
    for name, (loss, pollute) in RUNS.items():
        began = time.perf_counter()
        records[name] = trainer.run(loss, pollute)
        console.print(f"{name}: {len(records[name].rewards)} steps in {time.perf_counter() - began:.0f} s")
    show_runs(records, trainer, held_out, console)
    clean, garbage = (records[name] for name in RUNS if name.startswith(MASKSAFE))
    show_names(trainer, clean.params, held_out, console)
    same = effect(clean[:2], garbage[:2])
    console.print(f"masksafe, with garbage in the padding: {same} in every reward and parameter")

    batch = without_reward(trainer.draw(start, np.random.default_rng(config.seed)), config.samples)
    features = train_names.features_of(start, batch.docstrings, batch.inputs, config.model.heads)
    show_effects((features, start["logits"], batch), config, console)
    update = measure(trainer.updates, (start, trainer.optimizer.init(start), batch), rounds=30)
    gradients = {name: gradients_of(loss, config) for name, loss in LOSSES.items()}
    costs = {
        "update of this model": update,
        "4096 tokens x 256, 32768 classes": measure(gradients, large_inputs(shortest=128), rounds=2),
        "half of them padding": measure(gradients, large_inputs(shortest=1), rounds=2),
    }
    show_costs(costs, console)
    arguments.output.mkdir(parents=True, exist_ok=True)
    picture = arguments.output / "policy_gradient.png"
    draw(records, picture)
    console.print(f"the curves are in {picture}")


if __name__ == "__main__":
    main()
