"""Time and memory of the layer norm: forward, and with the gradient, against flax, plain jax.numpy and torch.

    python examples/benchmarks/normalization.py [--markdown FILE] [--rounds N] [--quick]

Times are medians of alternating runs in one process; only their ratios mean anything on another machine. A copy of
the input is the floor: the result is as large and has to be written.
"""

import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from measure import compiled, is_installed, make_parser, measure, show

import masksafe

CASES = [((8192, 1024), -1), ((32768, 256), -1), ((65536, 64), -1), ((64, 1024, 128), 1)]
QUICK_CASES = [((64, 32), -1), ((4, 32, 8), 1)]
DTYPES = ["float32", "bfloat16"]
MASKS = ["no mask", "rows masked", "elements masked"]
EPSILON = 1e-6
HEADER = ["shape", "axis", "dtype", "mask", "pass", "copy ms", "masksafe ms", "flax ms", "plain ms", "torch ms"]
HEADER += ["masksafe/flax", "masksafe/torch", "masksafe/copy", "masksafe MiB", "flax MiB", "plain MiB"]

Norm = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]


def ours(axis: int) -> Norm:
    return lambda x, scale, bias, where: masksafe.layer_norm(x, scale, bias, axis=axis, where=where, epsilon=EPSILON)


def of_flax(axis: int) -> Norm:
    def norm(x: jax.Array, scale: jax.Array, bias: jax.Array, where: jax.Array | None) -> jax.Array:
        layer = nn.LayerNorm(EPSILON, dtype=x.dtype, reduction_axes=axis, feature_axes=axis)
        return layer.apply({"params": {"scale": scale, "bias": bias}}, x, mask=where)

    return norm


def plain(axis: int) -> Norm:
    """As people write it: two passes, in float32, and a mask by multiplication."""

    def norm(x: jax.Array, scale: jax.Array, bias: jax.Array, where: jax.Array | None) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide, axis, keepdims=True, where=where)
        variance = jnp.mean((wide - mean) ** 2, axis, keepdims=True, where=where)
        shape = [n if a == axis % x.ndim else 1 for a, n in enumerate(x.shape)]
        y = (wide - mean) * jax.lax.rsqrt(variance + EPSILON) * scale.reshape(shape) + bias.reshape(shape)
        return (y if where is None else y * where).astype(x.dtype)

    return norm


def with_gradients(norm: Norm) -> Callable[..., Any]:
    def step(x: jax.Array, scale: jax.Array, bias: jax.Array, where: jax.Array | None, d_y: jax.Array) -> Any:
        y, pull_back = jax.vjp(lambda *args: norm(*args, where), x, scale, bias)
        return y, pull_back(d_y)

    return step


def of_torch(x: jax.Array, scale: jax.Array, d_y: jax.Array, axis: int, backward: bool) -> Callable[[], Any]:
    import torch

    as_torch = lambda a: torch.from_numpy(np.array(a, np.float32)).to(getattr(torch, str(a.dtype)))  # noqa: E731
    x_t, d_t = (as_torch(a) for a in (x, d_y))
    scale_t, bias_t = (torch.from_numpy(np.array(scale)).to(x_t.dtype) for _ in range(2))
    leaves = [x_t, scale_t, bias_t]
    for leaf in leaves:
        leaf.requires_grad_(backward)

    def run() -> None:
        moved = x_t.movedim(axis, -1)
        y = torch.nn.functional.layer_norm(moved, moved.shape[-1:], scale_t, bias_t, EPSILON).movedim(-1, axis)
        if backward:
            torch.autograd.grad(y, leaves, d_t)

    return run


def make_mask(kind: str, shape: tuple[int, ...], axis: int) -> jax.Array | None:
    if kind == "no mask":
        return None
    if kind == "rows masked":
        shape = tuple(1 if a == axis % len(shape) else n for a, n in enumerate(shape))
    return jax.random.bernoulli(jax.random.key(2), 0.7, shape)


def measure_case(
    shape: tuple[int, ...], axis: int, dtype: str, mask: str, backward: bool, rounds: int, with_torch: bool
) -> list[str]:
    x, d_y = jax.random.normal(jax.random.key(0), (2, *shape)).astype(dtype)
    scale = bias = jnp.ones(shape[axis])
    where = make_mask(mask, shape, axis)
    # The number keeps the compiler from returning the input itself.
    candidates = {"copy": compiled(lambda x: x + jnp.ones((), x.dtype), x)[0]}
    memory = {}
    for name, norm in (("masksafe", ours(axis)), ("flax", of_flax(axis)), ("plain", plain(axis))):
        program, args = (with_gradients(norm), (d_y,)) if backward else (norm, ())
        candidates[name], memory[name] = compiled(program, x, scale, bias, where, *args)
    if with_torch and where is None:
        candidates["torch"] = of_torch(x, scale, d_y, axis, backward)
    seconds = measure(candidates, rounds)
    names = ("copy", "masksafe", "flax", "plain", "torch")
    times = [f"{1e3 * seconds[name]:.1f}" if name in seconds else "-" for name in names]
    peers = ("flax", "torch", "copy")
    ratios = [f"{seconds['masksafe'] / seconds[name]:.2f}" if name in seconds else "-" for name in peers]
    sizes = [f"{memory[name] / 2**20:.1f}" for name in ("masksafe", "flax", "plain")]
    passes = "forward, backward" if backward else "forward"
    return ["x".join(map(str, shape)), str(axis), dtype, mask, passes, *times, *ratios, *sizes]


def main() -> None:
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument("--quick", action="store_true", help="small arrays, to see that it runs")
    arguments = parser.parse_args()

    with_torch = is_installed("torch")
    rows = []
    for mask in MASKS:
        for dtype in DTYPES:
            for shape, axis in QUICK_CASES if arguments.quick else CASES:
                for backward in (False, True):
                    print(f"\033[Kmeasuring {mask}, {dtype}, {shape}", end="\r", file=sys.stderr, flush=True)
                    rows.append(measure_case(shape, axis, dtype, mask, backward, arguments.rounds, with_torch))
    show(HEADER, rows, arguments.markdown)
    if not with_torch:
        print("torch is not installed: its columns are empty.")


if __name__ == "__main__":
    main()
