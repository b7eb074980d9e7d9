"""What the ops exchange between devices: which collectives, how many, how many bytes, in which pass.

    python examples/benchmarks/exchanges.py            # eight H100, and 256 TPU v5e; no device is needed
    python examples/benchmarks/exchanges.py --target h100
    python examples/benchmarks/exchanges.py --plot-only

Every op is compiled for a mesh of one axis, over which its arrays are split. A device has as many tokens, classes or
features with 8 devices as with 256, so that the table tells what grows with their number. It needs what compiles for
the target (`pip install ".[gpu-compile]"` or `".[tpu-compile]"`); with `JAX_PLATFORMS=cpu` JAX looks for no device.
"""

import argparse
import datetime
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from measure import GRADIENT, PASSES, VALUE, versions, with_gradient
from programs import TARGETS, Program, compile_for, devices
from results import as_markdown, environment, fill, number, read_csv, write_csv
from rich.console import Console
from rich.progress import track

import masksafe
from masksafe import losses

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, TABLE = DOCS / "performance" / "devices.md", DOCS / "benchmarks" / "compiled" / "exchanges.csv"
NUMBERS = {"h100": 8, "v5e": 256}
MIB = 2**20
WHOLE = P()
Shape = tuple[tuple[int, ...], Any, P]  # an array: its shape, its dtype, and how it is split


@dataclass(frozen=True)
class Op:
    """A function of arrays that are split over the axis "d", or of the parts of one device if it is `manual`."""

    name: str
    split: str  # what is split, in words
    fn: Callable[..., Any]
    args: Callable[[int], Sequence[Shape]]  # for so many devices
    leaves: int = 1  # so many arguments have gradients; with 0 the function is a gradient itself
    manual: P | None = None  # how the result of a function inside `jax.shard_map` is split

    @property
    def passes(self) -> tuple[str, ...]:
        return PASSES if self.leaves else (GRADIENT,)


# The ops. `n` is the number of devices.


def tokens(n: int) -> Sequence[Shape]:
    return (
        ((1024 * n, 1024), jnp.bfloat16, P("d")),
        ((1024, 32768), jnp.bfloat16, WHOLE),
        ((1024 * n,), jnp.int32, P("d")),
    )


def classes(n: int) -> Sequence[Shape]:
    return (
        ((4096, 1024), jnp.bfloat16, WHOLE),
        ((1024, 4096 * n), jnp.bfloat16, P(None, "d")),
        ((4096,), jnp.int32, WHOLE),
    )


def heads_of(shape: tuple[int, ...], split: P) -> Sequence[Shape]:
    return ((shape, jnp.bfloat16, split),) * 3


def mean_loss(kernel: jax.Array, features: jax.Array, labels: jax.Array) -> masksafe.MaskedMean:
    is_live = labels >= 0
    per_token = losses.softmax_cross_entropy_with_integer_labels(features @ kernel, labels, where=is_live)
    return masksafe.MaskedMean.of(per_token, is_live)


def mean_over_devices(loss: jax.Array, where: jax.Array) -> jax.Array:
    return masksafe.mean(loss, where=where, axis_name="d")


def normalized_over_devices(x: jax.Array, scale: jax.Array, bias: jax.Array, where: jax.Array) -> jax.Array:
    return masksafe.batch_norm(x, scale, bias, where=where, axis_name="d")[0]


def attention(**arguments: Any) -> Callable[..., jax.Array]:
    return functools.partial(masksafe.dot_product_attention, implementation="xla", **arguments)


TIME = P(None, "d")
OF_LINEAR = losses.linear_softmax_cross_entropy
OF_INTEGERS = losses.softmax_cross_entropy_with_integer_labels
OPS = [
    Op(
        "`mean(axis_name)`",
        "elements",
        mean_over_devices,
        lambda n: (((1024 * n,), jnp.float32, P("d")), ((1024 * n,), bool, P("d"))),
        manual=WHOLE,
    ),
    Op(
        "`batch_norm(axis_name)`, 256 features",
        "batch",
        normalized_over_devices,
        lambda n: (
            ((4096 * n, 256), jnp.float32, P("d")),
            *(((256,), jnp.float32, WHOLE),) * 2,
            ((4096 * n, 1), bool, P("d")),
        ),
        leaves=3,
        manual=P("d"),
    ),
    Op(
        "`layer_norm(axis_name)`, 4096 rows",
        "features",
        lambda x, scale: masksafe.layer_norm(x, scale, axis_name="d"),
        lambda n: (((4096, 128 * n), jnp.float32, P(None, "d")), ((128 * n,), jnp.float32, P("d"))),
        leaves=2,
        manual=P(None, "d"),
    ),
    Op(
        "`softmax`, 4096 rows",
        "classes",
        masksafe.softmax,
        lambda n: (((4096, 512 * n), jnp.float32, P(None, "d")),),
    ),
    Op(
        "`softmax_cross_entropy_with_integer_labels`",
        "rows",
        OF_INTEGERS,
        lambda n: (((1024 * n, 4096), jnp.float32, P("d")), ((1024 * n,), jnp.int32, P("d"))),
    ),
    Op(
        "the same, 4096 rows",
        "classes",
        OF_INTEGERS,
        lambda n: (((4096, 512 * n), jnp.float32, P(None, "d")), ((4096,), jnp.int32, WHOLE)),
    ),
    Op("`linear_softmax_cross_entropy`, kernel 1024x32768", "tokens", OF_LINEAR, tokens, leaves=2),
    Op("the same, 4096 tokens", "classes", OF_LINEAR, classes, leaves=2),
    Op(
        "`value_and_grad_of_mean`, 4 micro-batches, kernel 1024x4096",
        "batch",
        masksafe.value_and_grad_of_mean(mean_loss, microbatches=4, axis_name="d"),
        lambda n: (
            ((1024, 4096), jnp.float32, WHOLE),
            ((1024 * n, 1024), jnp.float32, P("d")),
            ((1024 * n,), jnp.int32, P("d")),
        ),
        leaves=0,
        manual=WHOLE,
    ),
    Op("`dot_product_attention`", "batch", attention(), lambda n: heads_of((n, 1024, 8, 64), P("d")), leaves=3),
    Op(
        "the same",
        "heads",
        attention(),
        lambda n: heads_of((1, 1024, n, 64), P(None, None, "d")),
        leaves=3,
    ),
    Op(
        "the same, 1024 times a device, 8 heads",
        "time",
        attention(is_causal=True),
        lambda n: heads_of((1, 1024 * n, 8, 64), TIME),
        leaves=3,
    ),
    Op(
        "the same with `axis_name`",
        "time",
        attention(is_causal=True, axis_name="d"),
        lambda n: heads_of((1, 1024 * n, 8, 64), TIME),
        leaves=3,
        manual=TIME,
    ),
    Op(
        "the same, a window of 2048",
        "time",
        attention(is_causal=True, local_window_size=(2048, 0), axis_name="d"),
        lambda n: heads_of((1, 1024 * n, 8, 64), TIME),
        leaves=3,
        manual=TIME,
    ),
    Op(
        "`info_nce_loss(axis_name)`, 1024 pairs a device, 512 wide",
        "rows",
        functools.partial(losses.info_nce_loss, axis_name="d"),
        lambda n: (((1024 * n, 512), jnp.float32, P("d")),) * 2,
        leaves=2,
        manual=WHOLE,
    ),
]


# What they exchange.


@dataclass(frozen=True)
class Row:
    """One line of the CSV."""

    op: str
    split: str
    target: str
    devices: int
    what: str
    collectives: str
    received_bytes: float
    temporary_bytes: int
    date: str
    versions: str


def compiled(op: Op, target: str, what: str, number_of_devices: int) -> Program:
    kind = AxisType.Explicit if op.manual is None else AxisType.Auto
    mesh = Mesh(np.array(devices(target, number_of_devices)), ("d",), axis_types=(kind,))
    placed = lambda shape, dtype, split: jax.ShapeDtypeStruct(  # noqa: E731
        shape, dtype, sharding=NamedSharding(mesh, split)
    )
    args = op.args(number_of_devices)
    fn, shapes = op.fn, [placed(*arg) for arg in args]
    if op.manual is not None:
        fn = jax.shard_map(fn, mesh=mesh, in_specs=tuple(split for *_, split in args), out_specs=op.manual)
    with jax.set_mesh(mesh):
        if what == GRADIENT and op.leaves:
            result = jax.eval_shape(fn, *shapes)
            split = result.sharding.spec if op.manual is None else op.manual
            fn, shapes = with_gradient(fn, op.leaves), [placed(result.shape, result.dtype, split), *shapes]
        return compile_for(target, fn, *shapes)


def rows_of(op: Op, target: str, number_of_devices: int) -> Iterable[Row]:
    for what in op.passes:
        program = compiled(op, target, what, number_of_devices)
        found = ", ".join(f"{times} {kind}" for kind, times in sorted(program.collectives.items()))
        received = hlo.received_bytes(program.exchanges, number_of_devices)
        yield Row(
            op=op.name,
            split=op.split,
            target=target,
            devices=number_of_devices,
            what=what,
            collectives=found or "none",
            received_bytes=received,
            temporary_bytes=program.temporary_bytes,
            date=datetime.date.today().isoformat(),
            versions=versions(),
        )


# The page.


def table(rows: Sequence[Row]) -> str:
    """A line for each op and pass."""
    header, lines = ["op", "split", "pass"], {}
    for target, n in NUMBERS.items():
        header += [f"{n} {target.upper()}", "MiB"]
        for row in rows:
            if row.target == target:
                key = row.op, row.split, "value" if row.what == VALUE else "with gradient"
                lines.setdefault(key, list(key)).extend([row.collectives, number(row.received_bytes / MIB)])
    found = as_markdown(header, [line for line in lines.values() if len(line) == len(header)])
    return f"Compiled {environment(rows)}.\n\n{found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=NUMBERS, action="append", help="may be given again; default: both")
    parser.add_argument("--plot-only", action="store_true", help="compile nothing: the page from the CSV")
    arguments = parser.parse_args()
    console = Console()
    rows = read_csv(TABLE, Row) if TABLE.exists() else []
    if not arguments.plot_only:
        for target in arguments.target or NUMBERS:
            if not TARGETS[target].is_installed:
                raise SystemExit(f"{target}: {TARGETS[target].module} is not installed: {TARGETS[target].install}")
            rows = [row for row in rows if row.target != target]
            for op in track(OPS, f"Compiling for {NUMBERS[target]} {target}", console=console):
                rows += rows_of(op, target, NUMBERS[target])
                jax.clear_caches()
        write_csv(TABLE, rows, Row)
    PAGE.write_text(fill(PAGE.read_text(), "exchanges", table(rows)))
    console.print(table(rows), markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
