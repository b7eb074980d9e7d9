"""Layer, RMS, batch and group norm against flax and torch.

The gradients are those of input, scale and bias. torch has no masks.
"""

from collections.abc import Callable
from typing import Any

import drawn
import jax
import jax.numpy as jnp
from measure import Benchmark, Work, against, by_x, cases_of, eager_too, functional

import masksafe

SIZES = {
    "tiny": ((8, 64), -1),
    "narrow": ((65536, 64), -1),
    "middle": ((2048, 768), -1),
    "wide": ((512, 4096), -1),
    "axis 1": ((64, 1024, 128), 1),
    "images": ((32, 32, 32, 64), -1),
    "large": ((8192, 1024), -1),
}
SIZES_OF = {
    ("layer norm", "float32"): tuple(SIZES),
    ("layer norm", "bfloat16"): ("middle", "large"),
    ("RMS norm", "float32"): ("tiny", "middle", "large"),
    ("RMS norm", "bfloat16"): ("large",),
    ("batch norm", "float32"): ("tiny", "middle", "images"),
    ("batch norm", "bfloat16"): ("images",),
    ("group norm", "float32"): ("images",),
    ("group norm", "bfloat16"): ("images",),
}
MASKS = ["none", "rows", "elements"]
EPSILON = 1e-6
GROUPS = 8


def of_masksafe(work: str, axis: int) -> Callable[..., jax.Array]:
    norm = {
        "layer norm": masksafe.layer_norm,
        "RMS norm": masksafe.rms_norm,
        "batch norm": lambda *args, **kwargs: masksafe.batch_norm(*args, **kwargs)[0],
        "group norm": lambda x, *args, **kwargs: masksafe.group_norm(x, GROUPS, *args, **kwargs),
    }[work]
    return lambda x, where, *params: norm(x, *params, axis=axis, where=where, epsilon=EPSILON)


def of_flax(work: str, axis: int) -> Callable[..., jax.Array]:
    def norm(x: jax.Array, where: jax.Array | None, *params: jax.Array) -> jax.Array:
        import flax.linen as nn  # which need not be installed

        names = {"params": dict(zip(("scale", "bias"), params, strict=False))}
        of = {"epsilon": EPSILON, "dtype": x.dtype}
        if work == "group norm":
            mask = None if where is None else jnp.broadcast_to(where, x.shape)
            return nn.GroupNorm(GROUPS, **of).apply(names, x, mask=mask)
        if work == "batch norm":
            averages = {"batch_stats": {"mean": jnp.zeros(x.shape[-1]), "var": jnp.ones(x.shape[-1])}}
            layer = nn.BatchNorm(use_running_average=False, **of)
            return layer.apply(names | averages, x, mask=where, mutable="batch_stats")[0]
        layer = {"layer norm": nn.LayerNorm, "RMS norm": nn.RMSNorm}[work]
        return layer(reduction_axes=axis, feature_axes=axis, **of).apply(names, x, mask=where)

    return norm


def of_torch(work: str, axis: int) -> Callable[..., Any]:
    def norm(x: Any, *params: Any) -> Any:
        torch, of, moved = functional(), {"eps": EPSILON}, x.movedim(axis, -1)
        if work == "batch norm":
            return torch.batch_norm(x.movedim(-1, 1), None, None, *params, training=True, **of).movedim(1, -1)
        if work == "group norm":
            return torch.group_norm(x.movedim(-1, 1), GROUPS, *params, **of).movedim(1, -1)
        fn = torch.layer_norm if work == "layer norm" else torch.rms_norm
        return fn(moved, moved.shape[-1:], *params, **of).movedim(-1, axis)

    return norm


def prepare(work: str, mask: str, dtype: str, sizes: tuple[tuple[int, ...], int]) -> Work:
    shape, axis = sizes
    one_of_each = tuple(1 if a == axis % len(shape) else n for a, n in enumerate(shape))  # row or position
    where = {"none": None, "rows": drawn.bits(one_of_each, 0.7), "elements": drawn.bits(shape, 0.7)}[mask]
    leaves = drawn.normal(shape, dtype), *[jnp.ones(shape[axis], dtype)] * (1 if work == "RMS norm" else 2)
    with_mask_last = lambda norm: lambda x, *rest: norm(x, rest[-1], *rest[:-1])  # noqa: E731
    functions = {"masksafe": with_mask_last(of_masksafe(work, axis)), "flax": with_mask_last(of_flax(work, axis))}
    functions |= {"torch": of_torch(work, axis)} if mask == "none" else {}
    return Work(functions, (*leaves, where), leaves=len(leaves), torch_args=leaves)


GRID = [(work, mask, dtype, s) for (work, dtype), sizes in SIZES_OF.items() for mask in MASKS for s in sizes]
CASES = cases_of(prepare, SIZES, GRID, lambda sizes: by_x(sizes[0]))
BENCHMARKS = [Benchmark("normalization", "Norms", against("flax", "torch"), eager_too(CASES))]
