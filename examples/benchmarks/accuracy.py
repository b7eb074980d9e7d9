"""How far results are from float64: every op and its peer, in three dtypes, over short and long rows, and far from 0.

    python examples/benchmarks/accuracy.py              # ten minutes on two cores; --only softmax for one op
    python examples/benchmarks/accuracy.py --quick      # one case of each op; writes nothing
    python examples/benchmarks/accuracy.py --plot-only  # the page from the CSV

An error is the largest of an array, in units of the array's largest number and of the epsilon of the inputs' dtype. The
reference is masksafe in float64, which tests/contract/test_precision.py holds to the definitions.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import attention
import drawn
import formulas
import jax
import jax.numpy as jnp
import linear
import losses
import normalization
import numpy as np
import segments
import sweep
from command import parser_of, run, tell
from compiled import compiled_candidates
from measure import Case, Row, cases_of, row_of, with_gradient
from results import NOTHING, Pair, as_markdown, csv_of, environment, fill_pages, grouped, pairs, read_csv

SHAPES = {"short": (256, 64), "long": (4, 32768), "offset": (64, 1024)}  # rows, and the elements of each
OFFSET = 1e4  # of numbers with a deviation of 1; 16 bits would not tell them apart
COLUMNS = [("float32", size) for size in SHAPES] + [(d, s) for d in ("bfloat16", "float16") for s in ("short", "long")]
SAME = 1e-6  # of the peer in float64; beyond it the peer's formula is another one
OTHER_FORMULA = -1.0
WORSE, FEW = 2, 2  # times the peer's error, and epsilons, beyond which an error is bold
IN_OTHER_SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {  # arguments of `prepare` for them
    **dict.fromkeys(segments.FORMULAS, (segments.prepare, {"short": ((1024, 8), 16), "long": ((131072, 2), 4)})),
    "batch norm": (normalization.prepare, {"short": ((64, 1024), -1), "long": ((32768, 16), -1)}),
    "group norm": (normalization.prepare, {"short": ((64, 8, 64), -1), "long": ((2, 4096, 64), -1)}),
    "attention": (attention.prepare, {"short": (4, 64, 64), "long": (1, 4, 32768)}),
    "linear": (linear.prepare, {"short": (256, 64, 64), "long": (4, 64, 32768)}),
    **dict.fromkeys(linear.LOG_PROBS, (linear.prepare_log_probs, {"short": (256, 64, 64), "long": (4, 64, 32768)})),
    **{
        direction: (linear.prepare_divergence, {"short": (256, 64, 96, 64), "long": (4, 64, 96, 32768)})
        for direction, _ in linear.DIVERGENCES
    },
    "ctc_loss": (losses.prepare, {"short": (4, 64, 8), "long": (1, 1024, 64)}),
}
# optax's gradient fails in 16 bits, and on a CPU jax.nn has no attention in float16.
LEFT_OUT = dict.fromkeys(losses.FLOAT32_ONLY, ("bfloat16", "float16")) | {"attention": ("float16",)}
AWAY_FROM_0 = {*formulas.SOFTMAX, *segments.FORMULAS, "standardize", "var_mean"}
AWAY_FROM_0 |= {"layer norm", "batch norm", "group norm", "integer cross-entropy", "one-hot cross-entropy"}
AWAY_FROM_0 |= {"safe_softmax_cross_entropy", "poly_loss_cross_entropy"}
AWAY_FROM_0 |= {"ranking_softmax_loss", "make_fenchel_young_loss"}


def cases() -> list[Case]:
    makers = {name: (make, SHAPES) for name, (_, make) in sweep.makers().items()}
    makers |= {name: (formulas.prepare_more, SHAPES) for name in formulas.MORE if name not in formulas.ALWAYS_MASKED}
    found = []
    for name, (make, shapes) in (makers | IN_OTHER_SHAPES).items():
        for size in ("short", "long", *["offset"] * (name in AWAY_FROM_0)):
            shape = shapes.get(size, shapes["short"])
            found += cases_of(make, {size: shape}, [(name, "none", "float32", size)], text=str)
    return found


def rows_of(benchmark: str, case: Case) -> Iterator[Row]:
    """The errors of each candidate in each dtype, for the same arguments and cotangents."""
    work = case.prepare()
    names = compiled_candidates(work)
    jitted = {name: jax.jit(with_gradient(work.functions[name], work.leaves)) for name in names}
    first, *others = work.args
    args = (first + OFFSET if case.size == "offset" else first, *others)
    shapes = jax.eval_shape(work.functions["masksafe"], *args)
    cotangents = jax.tree.map(lambda leaf: drawn.normal(leaf.shape, seed=1), shapes)

    def result(name: str, given: tuple[Any, ...]) -> Any:
        """The value, and the gradient for cotangents of the dtypes of the outputs."""
        outputs = jax.eval_shape(work.functions[name], *given[1:])
        cotangents = jax.tree.map(lambda x, of: x.astype(of.dtype), given[0], outputs)
        return jax.device_get(jitted[name](cotangents, *given[1:]))

    for dtype in (dtype for dtype, size in COLUMNS if size == case.size and dtype not in LEFT_OUT.get(case.work, ())):
        given = in_dtype(dtype, (cotangents, *args))
        with jax.enable_x64(True):
            wide = {name: result(name, in_dtype("float64", given)) for name in names}
        for name in names:
            found = result(name, given)
            for what, *of in zip(("value", "gradient"), found, wide["masksafe"], wide[name], strict=True):
                is_same = largest_error(of[2], of[1]) < SAME
                error = largest_error(of[0], of[1]) / float(jnp.finfo(dtype).eps) if is_same else OTHER_FORMULA
                named = dataclasses.replace(case, dtype=dtype)
                yield row_of(benchmark, named, what, name, error=float(f"{error:.3g}"))
    jax.clear_caches()


def in_dtype(dtype: str, tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def largest_error(found: Any, expected: Any) -> float:
    """Of the arrays of a tree; a NaN is infinitely far off."""

    def of_array(x: Any, e: Any) -> float:
        worst = np.max(abs(np.float64(x) - e))
        return math.inf if np.isnan(worst) else float(worst / (np.max(abs(e)) or 1))

    return max(jax.tree.leaves(jax.tree.map(of_array, found, expected)))


# Results


def table(rows: Sequence[Row]) -> str:
    lines = []
    for key, found in grouped(pairs(rows), lambda pair: (pair.row.work, pair.row.what, pair.peer.candidate)).items():
        of_column = {(pair.row.dtype, pair.row.size): pair for pair in found}
        lines.append([*key, *(of_both(of_column[c]) if c in of_column else NOTHING for c in COLUMNS)])
    return as_markdown(["op", "what", "against", *(f"{dtype}, {size}" for dtype, size in COLUMNS)], lines)


def of_both(pair: Pair) -> str:
    ours, theirs = ("other formula" if row.error == OTHER_FORMULA else f"{row.error:.2g}" for row in pair)
    return f"{f'**{ours}**' if is_worse(*pair) else ours} / {theirs}"


def is_worse(row: Row, other: Row) -> bool:
    return row.error > FEW and OTHER_FORMULA < other.error < row.error / WORSE


def section() -> str:
    rows = read_csv(csv_of("accuracy"))
    found = pairs(rows)
    ours, theirs = sum(is_worse(*pair) for pair in found), sum(is_worse(peer, row) for row, peer in found)
    told = f"Of {len(found)} pairs masksafe's error is above {FEW} and more than {WORSE} times the other's in {ours}"
    told += f" (bold), and the other's in {theirs}."
    link = "[CSV](../benchmarks/accuracy.csv)"
    return "\n\n".join([f"Measured {environment(rows)}.", told, table(rows), link])


def publish() -> None:
    fill_pages({"accuracy": section()})


def main(arguments: Sequence[str] | None = None) -> None:
    every = [("accuracy", case) for case in sorted(cases(), key=lambda case: case.work.lower())]
    options = parser_of().parse_args(arguments)
    tell(run(options, "Accuracy", every, rows_of, table, csv_of("accuracy"), publish, ["eager"]))


if __name__ == "__main__":
    main()
