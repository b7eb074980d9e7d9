"""Attention on a mesh whose explicit axes split batch or heads: each device solves the problems of its own."""

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec

from masksafe._core.own_shard_map import Split, on_each_device, split_of
from masksafe._core.typing import Array
from masksafe.attention._batch import attend_over_batch
from masksafe.attention._formulas import Config
from masksafe.attention._mask import Pairs
from masksafe.attention._mods import Mods


def attend(
    config: Config,
    q: Array,
    k: Array,
    v: Array,
    scale: Array | None,
    bias: Array | None,
    mask: Array | None,
    pairs: Pairs,
    mods: Mods,
    sinks: Array | None,
) -> tuple[Array, Array]:
    """As `attend_over_batch`, on each device by itself if the arrays are split."""
    args = q, k, v, scale, bias, mask, pairs, mods, sinks
    split = split_of(args, _dimensions(*args))
    run = attend_over_batch if split is None else functools.partial(_attend_on_each_device, split)
    results: tuple[Array, Array] = run(config, *args)
    return results


def _attend_on_each_device(split: Split, config: Config, *args: Any) -> tuple[Array, Array]:
    of_operands, *_ = names = _dimensions(*args)
    on_device = functools.partial(attend_over_batch, config)
    results: tuple[Array, Array] = on_each_device(on_device, split, args, names, (of_operands, of_operands))
    return results


def _dimensions(
    q: Array,
    k: Array,
    v: Array,
    scale: Array | None,
    bias: Array | None,
    mask: Array | None,
    pairs: Pairs,
    mods: Mods,
    sinks: Array | None,
) -> tuple[Any, ...]:
    """The names of the dimensions of each array. Queries and keys are whole, as are arrays that a mod closes over."""
    batch = [f"batch {axis}" for axis in range(q.ndim - 3)]
    of_operands, of_pairs = PartitionSpec(*batch, None, "heads"), PartitionSpec(*batch, "heads")
    of_heads = PartitionSpec(*batch, "heads", "heads" if k.shape[-2] == 1 else None)
    by_name = {"heads": of_heads, "query_words": of_heads}
    of_structure = Pairs(*(_alike(x, by_name.get(name, PartitionSpec(*batch))) for name, x in pairs._asdict().items()))
    return (
        of_operands,
        of_operands,
        of_operands,
        _alike(scale, PartitionSpec()),
        _alike(bias, of_pairs),
        _alike(mask, of_pairs),
        of_structure,
        _alike(mods, PartitionSpec()),
        _alike(sinks, PartitionSpec("heads")),
    )


def _alike(tree: Any, names: PartitionSpec) -> Any:
    return jax.tree.map(lambda _: names, tree)
