"""What the ops exchange between devices: which collectives, how many, how many bytes, in which pass.

    python examples/benchmarks/exchanges.py            # eight H100, and 256 TPU v5e; no device is needed
    python examples/benchmarks/exchanges.py --only h100    # tells it, and writes nothing
    python examples/benchmarks/exchanges.py --plot-only

Every op is compiled for a mesh of one axis, over which its arrays are split. A device has as many tokens, classes or
features with 8 devices as with 256, so that the table tells what grows with their number. It needs what compiles for
the target (`pip install ".[gpu-compile]"` or `".[tpu-compile]"`); with `JAX_PLATFORMS=cpu` JAX looks for no device.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
from command import parser_of, run, tell
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from measure import GRADIENT, PASSES, VALUE, Row, environment_now, with_gradient
from programs import Program, check, compile_for, devices
from results import MIB, as_markdown, csv_of, environment, fill_pages, grouped, number, read_csv

import masksafe
from masksafe import losses

TABLE = csv_of("compiled/exchanges")
NUMBERS = {"h100": 8, "v5e": 256}
F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
WHOLE, D, SECOND = P(), P("d"), P(None, "d")
Shape = tuple[tuple[int, ...], Any, P]  # an array: its shape, its dtype, and how it is split


@dataclass(frozen=True)
class Op:
    """A function of arrays that are split over the axis "d", or of the parts of one device if it is `manual`."""

    work: str
    split: str  # what is split, in words
    fn: Callable[..., Any]
    args: Callable[[int], Sequence[Shape]]  # for so many devices
    leaves: int = 1  # so many arguments have gradients; with 0 the function is a gradient itself
    manual: P | None = None  # how the result of a function inside `jax.shard_map` is split

    @property
    def passes(self) -> tuple[str, ...]:
        return PASSES if self.leaves else (GRADIENT,)

    def __str__(self) -> str:
        return f"{self.work}, {self.split}"


# The ops. `n` is the number of devices.


def mean_loss(kernel: jax.Array, features: jax.Array, labels: jax.Array) -> masksafe.MaskedMean:
    mask = labels >= 0
    per_token = losses.softmax_cross_entropy_with_integer_labels(features @ kernel, labels, where=mask)
    return masksafe.MaskedMean.of(per_token, mask)


def attention(**arguments: Any) -> Callable[..., jax.Array]:
    return functools.partial(masksafe.dot_product_attention, implementation="xla", **arguments)


def in_time(n: int) -> Sequence[Shape]:
    return (((1, 1024 * n, 8, 64), BF16, SECOND),) * 3


ring = functools.partial(attention, is_causal=True, axis_name="d")
linear, integers = losses.linear_softmax_cross_entropy, losses.softmax_cross_entropy_with_integer_labels
in_microbatches = masksafe.value_and_grad_of_mean(mean_loss, microbatches=4, axis_name="d")
pairs = functools.partial(losses.info_nce_loss, axis_name="d")
OPS = [
    Op(
        *("`mean(axis_name)`", "elements"),
        lambda loss, where: masksafe.mean(loss, where=where, axis_name="d"),
        lambda n: (((1024 * n,), F32, D), ((1024 * n,), bool, D)),
        manual=WHOLE,
    ),
    Op(
        *("`batch_norm(axis_name)`, 256 features", "batch"),
        lambda x, scale, bias, where: masksafe.batch_norm(x, scale, bias, where=where, axis_name="d")[0],
        lambda n: (((4096 * n, 256), F32, D), *(((256,), F32, WHOLE),) * 2, ((4096 * n, 1), bool, D)),
        *(3, D),
    ),
    Op(
        *("`layer_norm(axis_name)`, 4096 rows", "features"),
        lambda x, scale: masksafe.layer_norm(x, scale, axis_name="d"),
        lambda n: (((4096, 128 * n), F32, SECOND), ((128 * n,), F32, D)),
        *(2, SECOND),
    ),
    Op("`softmax`, 4096 rows", "classes", masksafe.softmax, lambda n: (((4096, 512 * n), F32, SECOND),)),
    Op(
        *("`softmax_cross_entropy_with_integer_labels`", "rows", integers),
        lambda n: (((1024 * n, 4096), F32, D), ((1024 * n,), I32, D)),
    ),
    Op(
        *("`softmax_cross_entropy_with_integer_labels`, 4096 rows", "classes", integers),
        lambda n: (((4096, 512 * n), F32, SECOND), ((4096,), I32, WHOLE)),
    ),
    Op(
        *("`linear_softmax_cross_entropy`, kernel 1024x32768", "tokens", linear),
        lambda n: (((1024 * n, 1024), BF16, D), ((1024, 32768), BF16, WHOLE), ((1024 * n,), I32, D)),
        leaves=2,
    ),
    Op(
        *("`linear_softmax_cross_entropy`, 4096 tokens", "classes", linear),
        lambda n: (((4096, 1024), BF16, WHOLE), ((1024, 4096 * n), BF16, SECOND), ((4096,), I32, WHOLE)),
        leaves=2,
    ),
    Op(
        *("`value_and_grad_of_mean`, 4 micro-batches, kernel 1024x4096", "batch", in_microbatches),
        lambda n: (((1024, 4096), F32, WHOLE), ((1024 * n, 1024), F32, D), ((1024 * n,), I32, D)),
        *(0, WHOLE),
    ),
    Op("`dot_product_attention`", "batch", attention(), lambda n: (((n, 1024, 8, 64), BF16, D),) * 3, 3),
    Op(
        "`dot_product_attention`",
        "heads",
        attention(),
        lambda n: (((1, 1024, n, 64), BF16, P(None, None, "d")),) * 3,
        3,
    ),
    Op("`dot_product_attention`, 1024 times a device, 8 heads", "time", attention(is_causal=True), in_time, 3),
    Op("`dot_product_attention(axis_name)`, 1024 times a device, 8 heads", "time", ring(), in_time, 3, SECOND),
    Op(
        "`dot_product_attention(axis_name)`, a window of 2048",
        "time",
        ring(local_window_size=(2048, 0)),
        in_time,
        3,
        SECOND,
    ),
    Op(
        *("`info_nce_loss(axis_name)`, 1024 pairs a device, 512 wide", "rows", pairs),
        lambda n: (((1024 * n, 512), F32, D),) * 2,
        *(2, WHOLE),
    ),
]


# What they exchange


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


def rows_of(target: str, op: Op) -> Iterator[Row]:
    number_of_devices = NUMBERS[target]
    for what in op.passes:
        program = compiled(op, target, what, number_of_devices)
        yield Row(
            op=op.work,
            split=op.split,
            target=target,
            devices=number_of_devices,
            what=what,
            collectives=", ".join(f"{n} {kind}" for kind, n in sorted(program.collectives.items())) or "none",
            received_bytes=hlo.received_bytes(program.exchanges, number_of_devices),
            temporary_bytes=program.temporary_bytes,
            **environment_now(),
        )
    jax.clear_caches()


def table(rows: Sequence[Row]) -> str:
    """A line for each op and pass."""
    targets = [target for target in NUMBERS if target in {row.target for row in rows}]
    lines = []
    for (name, split, what), of_op in grouped(rows, lambda row: (row.op, row.split, row.what)).items():
        of = {row.target: [row.collectives, number(row.received_bytes / MIB)] for row in of_op}
        if len(of) == len(targets):
            cells = [cell for target in targets for cell in of[target]]
            lines.append([name, split, "value" if what == VALUE else "with gradient", *cells])
    of_targets = [name for target in targets for name in (f"{NUMBERS[target]} {target.upper()}", "MiB")]
    return f"Compiled {environment(rows)}.\n\n{as_markdown(['op', 'split', 'pass', *of_targets], lines)}"


def publish() -> None:
    fill_pages({"exchanges": table(read_csv(TABLE))})


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser_of([*NUMBERS, *(op.work for op in OPS)]).parse_args(arguments)
    for target in [] if options.plot_only else NUMBERS:
        check(target)
    cases = [(target, op) for target in NUMBERS for op in OPS]
    tell(run(options, "Compiling", cases, rows_of, table, TABLE, publish, ["machine", "python"]))


if __name__ == "__main__":
    main()
