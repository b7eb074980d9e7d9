"""Where the time of a training step goes, by op of masksafe, in a profile of `jax.profiler`.

The operations of each op lie in a scope of its name, `masksafe.mean`, in forward and in reverse. On a GPU or a TPU,
TensorBoard and XProf show the scopes. A profile of a CPU has the names that XLA gave to its fusions: the text of the
compiled program tells the scope of each.

    python examples/profile_step.py

It draws one step of a small model, and prints the milliseconds of each op.
"""

import argparse
import gzip
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib

import masksafe

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HEADS, WIDTH = 4, 32
OTHER = "the model's own"


class Event(NamedTuple):
    """A kernel that ran, or a loop with the kernels in it: when, of which op, and whether in the reverse pass."""

    start: float  # milliseconds
    duration: float
    op: str
    is_reverse: bool


def loss_fn(params: dict[str, jax.Array], x: jax.Array, labels: jax.Array, live: jax.Array) -> jax.Array:
    """Attention over the unmasked tokens, a norm, and the mean cross-entropy."""
    query, key, value = (jnp.einsum("btd,dhw->bthw", x, params[name]) for name in ("query", "key", "value"))
    seen = masksafe.dot_product_attention(query, key, value, mask=live[:, None, None], is_causal=True)
    hidden = masksafe.layer_norm(x + seen.reshape(x.shape), where=live[..., None])
    # Of tokens in one axis: XLA for a CPU transposes the logits of several for the gradient, which takes twice as long.
    tokens, labels, live = hidden.reshape(-1, x.shape[-1]), labels.reshape(-1), live.reshape(-1)
    losses = masksafe.losses.softmax_cross_entropy_with_integer_labels(tokens @ params["out"], labels, where=live)
    return masksafe.mean(losses, where=live)


def make_arguments(batch: int = 8, time: int = 512, classes: int = 4096) -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(0), 6))
    d = HEADS * WIDTH
    params = {name: jax.random.normal(next(keys), (d, HEADS, WIDTH)) / d**0.5 for name in ("query", "key", "value")}
    params["out"] = jax.random.normal(next(keys), (d, classes)) / d**0.5
    live = masksafe.length_mask(jnp.linspace(time // 4, time, batch, dtype=jnp.int32), time)
    labels = jax.random.randint(next(keys), (batch, time), 0, classes)
    return params, jax.random.normal(next(keys), (batch, time, d)), labels, live


def scopes_of(program: str) -> dict[str, str]:
    """For each instruction of a compiled program, the path of scopes from which it comes."""
    found = re.findall(r'^\s*(?:ROOT )?%?([\w.-]+) = .*?metadata=\{[^}]*op_name="([^"]*)"', program, re.MULTILINE)
    return dict(found)


def profile(step: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Event]:
    """The events of one call."""
    compiled = jax.jit(step).lower(*arguments).compile()
    scopes = scopes_of(compiled.as_text())
    for _ in range(3):
        jax.block_until_ready(compiled(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compiled(*arguments))
        (trace,) = Path(folder).rglob("*.trace.json.gz")
        records = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event_of(r, scopes[r["name"]]) for r in records if "hlo_op" in r.get("args", {}) and r["name"] in scopes]


def event_of(record: dict[str, Any], scope: str) -> Event:
    op = re.search(r"masksafe\.(\w+)", scope)
    name = op.group(1) if op else OTHER
    return Event(record["ts"] / 1000, record["dur"] / 1000, name, "transpose(" in scope)


def covered(events: list[Event]) -> float:
    """The milliseconds during which any of the events ran."""
    total, end = 0.0, float("-inf")
    for event in sorted(events):
        stop = event.start + event.duration
        total += max(stop - max(event.start, end), 0)
        end = max(end, stop)
    return total


def totals(events: list[Event]) -> dict[str, tuple[float, float]]:
    """The milliseconds of each op, forward and in reverse, the longest first."""
    sums = {}
    for op in {e.op for e in events}:
        of_op = [e for e in events if e.op == op]
        sums[op] = covered([e for e in of_op if not e.is_reverse]), covered([e for e in of_op if e.is_reverse])
    return dict(sorted(sums.items(), key=lambda item: -sum(item[1])))


def draw(events: list[Event], path: Path) -> None:
    sums, begin = totals(events), min(e.start for e in events)
    figure, axis = plt.subplots(figsize=(8.5, 0.6 + 0.5 * len(sums)), layout="constrained")
    for row, op in enumerate(sums):
        for is_reverse, colour, label in ((False, "tab:blue", "forward"), (True, "tab:orange", "reverse")):
            bars = [(e.start - begin, e.duration) for e in events if e.op == op and e.is_reverse == is_reverse]
            axis.broken_barh(bars, (row - 0.4, 0.8), color=colour, label="" if row else label)
    axis.set_yticks(range(len(sums)), [f"{op}: {sum(ms):.1f} ms" for op, ms in sums.items()])
    axis.invert_yaxis()
    axis.set(xlabel="milliseconds", title="A training step on a CPU, and the milliseconds in kernels of each scope")
    axis.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("examples/output"), help="default: %(default)s")
    arguments = parser.parse_args()
    events = profile(jax.value_and_grad(loss_fn), make_arguments())
    print("ms forward, in reverse")
    for op, (forward, reverse) in totals(events).items():
        print(f"{forward:10.2f} {reverse:11.2f}  {op}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    picture = arguments.output / "profile_step.png"
    draw(events, picture)
    print(f"The step is drawn in {picture}.")


if __name__ == "__main__":
    main()
