"""Time and memory of attention, forward and with the gradient, against jax.nn and torch.

    python examples/benchmarks/attention.py [--markdown FILE] [--lengths 512,1024,4096,8192] [--rounds N]

One sample, 8 heads of width 64. Times are medians of alternating runs in one process; only their ratios mean
anything on another machine. At 8192 jax.nn needs 8 GiB for the gradient.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import compiled, is_installed, make_parser, measure, show

import masksafe

HEADS, WIDTH, WINDOW, SEGMENTS = 8, 64, 256, 8
MASKS = ["plain", "causal", "padded", "packed", "window"]
HEADER = ["mask", "dtype", "length", "pass", "masksafe ms", "jax.nn ms", "torch ms", "jax.nn/masksafe"]
HEADER += ["masksafe/torch", "masksafe MiB", "jax.nn MiB"]


def segments(length: int) -> np.ndarray:
    return np.arange(length)[None] * SEGMENTS // length


def allowed_pairs(mask: str, length: int) -> np.ndarray | None:
    """The mask as booleans [length, length], for the library that has nothing better."""
    query, key = np.arange(length)[:, None], np.arange(length)
    ids = segments(length)[0]
    return {
        "plain": None,
        "causal": None,
        "padded": np.broadcast_to(key < length // 2, (length, length)),
        "packed": ids[:, None] == ids,
        "window": abs(query - key) <= WINDOW // 2,
    }[mask]


def our_arguments(mask: str, length: int) -> dict[str, Any]:
    ids = jnp.asarray(segments(length))
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "padded": {"key_value_seq_lengths": jnp.array([length // 2], jnp.int32)},
        "packed": {"query_segment_ids": ids, "key_value_segment_ids": ids},
        "window": {"local_window_size": WINDOW // 2},
    }[mask]


def their_arguments(mask: str, length: int) -> dict[str, Any]:
    if mask == "packed":
        return {"mask": jnp.asarray(allowed_pairs(mask, length))}
    return our_arguments(mask, length)


def with_arrays_traced(fn: Callable[..., jax.Array], arguments: dict[str, Any]) -> tuple[Callable[..., Any], Any]:
    """The attention as a function of q, k, v and its arrays, which the compiler must not fold into the program."""
    arrays = {name: value for name, value in arguments.items() if isinstance(value, jax.Array)}
    static = {name: value for name, value in arguments.items() if name not in arrays}
    return lambda q, k, v, arrays: fn(q, k, v, **arrays, **static), arrays


def with_gradient(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> Any:
        *arrays, weights = rest

        def loss(*inputs: jax.Array) -> jax.Array:
            return jnp.sum((fn(*inputs, *arrays) * weights).astype(jnp.float32))

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    return step


def torch_step(mask: str, length: int, dtype: str, inputs: tuple[jax.Array, ...], gradient: bool) -> Callable[[], Any]:
    import torch

    def converted(x: jax.Array) -> Any:
        tensor = torch.from_numpy(np.array(x, np.float32).transpose(0, 2, 1, 3).copy()).to(getattr(torch, dtype))
        return tensor.requires_grad_(gradient)

    q, k, v, weights = map(converted, inputs)
    allowed = allowed_pairs(mask, length)
    attn_mask = None if allowed is None else torch.from_numpy(allowed.copy())

    def run() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=mask == "causal")
        if gradient:
            (out * weights.detach()).float().sum().backward()

    return run


def measure_case(mask: str, dtype: str, length: int, rounds: int, with_torch: bool) -> list[list[str]]:
    shape = (1, length, HEADS, WIDTH)
    inputs = tuple(jax.random.normal(key, shape).astype(dtype) for key in jax.random.split(jax.random.key(0), 4))
    libraries = {
        "masksafe": with_arrays_traced(masksafe.dot_product_attention, our_arguments(mask, length)),
        "jax.nn": with_arrays_traced(jax.nn.dot_product_attention, their_arguments(mask, length)),
    }
    rows = []
    for gradient in (False, True):
        candidates, mebibytes = {}, {}
        for name, (fn, arrays) in libraries.items():
            args = (*inputs[:3], arrays, *inputs[3:]) if gradient else (*inputs[:3], arrays)
            candidates[name], size = compiled(with_gradient(fn) if gradient else fn, *args)
            mebibytes[name] = size / 2**20
        if with_torch:
            candidates["torch"] = torch_step(mask, length, dtype, inputs, gradient)
        seconds = measure(candidates, rounds)
        times = [f"{1e3 * seconds[name]:.1f}" if name in seconds else "-" for name in ("masksafe", "jax.nn", "torch")]
        ratios = [f"{seconds['jax.nn'] / seconds['masksafe']:.2f}"]
        ratios += [f"{seconds['masksafe'] / seconds['torch']:.2f}" if with_torch else "-"]
        memory = [f"{mebibytes[name]:.0f}" for name in libraries]
        rows.append([mask, dtype, str(length), "gradient" if gradient else "forward", *times, *ratios, *memory])
    return rows


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--lengths", default="512,1024,4096,8192", help="default: %(default)s")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="default: %(default)s")
    parser.add_argument("--masks", default=",".join(MASKS), help="default: %(default)s")
    arguments = parser.parse_args()

    with_torch = is_installed("torch")
    rows = []
    for length in map(int, arguments.lengths.split(",")):
        for dtype in arguments.dtypes.split(","):
            for mask in arguments.masks.split(","):
                print(f"\033[Kmeasuring {mask}, {dtype}, {length}", end="\r", file=sys.stderr, flush=True)
                rows += measure_case(mask, dtype, length, arguments.rounds, with_torch)
    show(HEADER, rows, arguments.markdown)
    if not with_torch:
        print("torch is not installed: its columns are empty.")


if __name__ == "__main__":
    main()
