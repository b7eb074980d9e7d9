"""Fine-tunes a small language model with a verifiable reward by policy gradients: with masksafe, and as it is usual.

The model of `names.py` writes a function's name from its docstring. It is trained for a short while, and then rewarded
for names that begin with the docstring's verb, such as `set_value` for "Set the value.", which a few lines of Python
can verify. For each docstring it samples a group of names, of different lengths, in one padded batch; a name is
reinforced as far as it is better than its group (GRPO), with the clipped importance ratios of PPO and a penalty on the
divergence from the model at the start.

    python examples/policy_gradient.py    # about two minutes on two cores

The padding holds what the memory happened to hold. That changes no bit of a run with masksafe. The usual formula
computes ratios everywhere and multiplies them by the mask. As NaN * 0 is NaN, such a run ends at the first bad number;
which step that is depends on the seed.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import names
import numpy as np
import optax
import shared
import train_names
from names import Params
from rewards import Batch, Prompts, Sampler, leave_garbage, prompts_of, rewards_of
from rich.console import Console

import masksafe

MODEL = names.Config(12, 20, width=64, decoder_layers=1, steps=400, evaluate_every=200)


@dataclasses.dataclass(frozen=True)
class Config:
    """The fine-tuning."""

    model: names.Config = MODEL
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


class Parts(NamedTuple):
    """What is reported of a batch: means over its characters."""

    kl: jax.Array
    entropy: jax.Array


def masksafe_loss(features: jax.Array, kernel: jax.Array, batch: Batch, config: Config) -> tuple[jax.Array, Parts]:
    """What is masked is gone before any arithmetic sees it."""
    where = batch.mask > 0
    rewards, has_reward = batch.rewards.reshape(-1, config.samples), where.any(1).reshape(-1, config.samples)
    advantages = masksafe.standardize(rewards, where=has_reward, epsilon=1e-8).reshape(-1, 1)
    log_probs, entropies = masksafe.losses.linear_log_probs(
        features, kernel, batch.labels, where=where, temperature=config.temperature, with_entropy=True
    )
    ratio = jnp.exp(masksafe.keep(log_probs - batch.old_log_probs, where=where))
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - config.clip, 1 + config.clip) * advantages)
    to_ref = masksafe.keep(batch.ref_log_probs - log_probs, where=where)
    kl = jnp.expm1(to_ref) - to_ref  # an estimate that is never negative
    loss = masksafe.mean(config.kl_weight * kl - gain, where=where)
    return loss, Parts(masksafe.mean(kl, where=where), masksafe.mean(entropies, where=where))


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
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - config.clip, 1 + config.clip) * advantages)
    to_ref = batch.ref_log_probs - log_probs
    kl = jnp.exp(to_ref) - to_ref - 1

    def mean(x: jax.Array) -> jax.Array:
        return (x * mask).sum() / jnp.maximum(mask.sum(), 1)

    return mean(config.kl_weight * kl - gain), Parts(mean(kl), mean(entropies))


# A loss of features [rows, name_length, width], the kernel of the output layer, and a batch.
Loss = Callable[[jax.Array, jax.Array, Batch, Config], tuple[jax.Array, Parts]]
RUNS: dict[str, tuple[Loss, bool]] = {  # and whether there is garbage in the padding
    "masksafe, clean": (masksafe_loss, False),
    "masksafe, garbage": (masksafe_loss, True),
    "usual formula, clean": (usual_loss, False),
    "usual formula, garbage": (usual_loss, True),
}


class Record(NamedTuple):
    """Of each step; a run that has become NaN ends there."""

    params: Params
    rewards: list[float]
    parts: list[Parts]
    has_ended: bool


class Trainer(Sampler):
    """Updates from the model at the start, which is also what the divergence is from."""

    def __init__(self, start: Params, prompts: Prompts, config: Config) -> None:
        super().__init__(start, prompts, config)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(config.learning_rate))

    def run(self, title: str, console: Console) -> Record:
        """A run of that title, with the same docstrings and the same garbage in every run."""
        loss, has_garbage = RUNS[title]

        @jax.jit
        def update(params: Params, state: Any, batch: Batch) -> tuple[Params, Any, Parts]:
            of_batch = lambda params: loss(self.features(params, batch), params["logits"], batch, self.config)  # noqa: E731
            gradient, parts = jax.grad(of_batch, has_aux=True)(params)
            updates, state = self.optimizer.update(gradient, state)
            return optax.apply_updates(params, updates), state, parts

        params, state = self.start, self.optimizer.init(self.start)
        prompts, garbage = np.random.default_rng(self.config.seed), np.random.default_rng(self.config.seed)
        rewards, all_parts = [], []
        with shared.progress(title, self.config.steps, console) as advance:
            for _ in range(self.config.steps):
                batch = self.draw(params, prompts)
                rewards.append(batch.rewards[batch.mask.any(1)].mean())
                batch = leave_garbage(batch, garbage) if has_garbage else batch
                for _ in range(self.config.updates):
                    params, state, parts = update(params, state, batch)
                all_parts.append(jax.tree.map(float, parts))
                advance(f"reward {rewards[-1]:.2f}")
                if np.isnan(optax.tree.norm(params)):
                    return Record(params, rewards, all_parts, True)
        return Record(params, rewards, all_parts, False)


def draw(records: dict[str, Record], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2), layout="constrained")
    colors, sizes = ("deepskyblue", "midnightblue", "orange", "firebrick"), (3.0, 1.2, 3.0, 1.2)
    window = max(1, max(len(record.rewards) for record in records.values()) // 20)
    for (name, record), color, size in zip(records.items(), colors, sizes, strict=True):
        steps, rewards = shared.smooth(record.rewards, window)
        steps = steps[-1:] if record.has_ended else steps
        shared.draw_run(left, name, steps, rewards, has_ended=record.has_ended, color=color, size=size)
    left.set(xlabel="step", ylabel=f"reward (mean of {window} steps)", title="Names that begin with the verb")
    parts = records["masksafe, clean"].parts
    right.plot(*shared.smooth([p.entropy for p in parts], window), color="seagreen", label="entropy of a character")
    right.plot(*shared.smooth([p.kl for p in parts], window), color="mediumpurple", label="KL from the start")
    right.set(xlabel="step", ylabel="nats per character", title="masksafe: what the reward costs")
    for axis in (left, right):
        axis.set_ylim(bottom=0)
        axis.legend()
    shared.save(figure, path)


def main() -> None:
    arguments, console = shared.parser_of(__doc__, steps=Config.steps, seed=Config.seed).parse_args(), Console()
    config = Config(steps=arguments.steps, seed=arguments.seed)
    functions = [function for function in names.read_functions() if function[0]]
    np.random.default_rng(config.seed).shuffle(functions)
    words = names.count_words(functions[1024:])
    data = [names.tokenise(part, words, config.model) for part in (functions[1024:], functions[:1024])]
    prompts, held_out = prompts_of(functions[1024:], data[0]), prompts_of(functions[:1024], data[1])
    console.print(f"{len(functions) - 1024} functions to learn names of; {len(prompts.texts)} are prompts")
    start = train_names.train(*data, config.model, console).params

    trainer, key = Trainer(start, prompts, config), jax.random.key(config.seed)
    records = {name: trainer.run(name, console) for name in RUNS}

    def score(params: Params) -> str:
        return f"{rewards_of(held_out.texts, trainer.names(params, held_out.tokens, key)).mean():.2f}"

    lines = [["before", "0", score(start)]]
    lines += [[name, str(len(r.rewards)), "NaN" if r.has_ended else score(r.params)] for name, r in records.items()]
    shared.show("Fine-tuning", ["", "steps", "reward of held-out docstrings"], lines, console)
    shared.tell_same(*(records[f"masksafe, {padding}"][:2] for padding in ("clean", "garbage")), console)
    draw(records, arguments.output / "policy_gradient.png")
    console.print(f"the curves are in {arguments.output}")


if __name__ == "__main__":
    main()
