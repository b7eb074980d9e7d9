"""Platform-specific choices: block sizes, and loops over blocks or a single pass.

The sizes were measured on two CPU cores. A GPU would launch a dozen kernels for every block, so it computes in one pass
where possible. The choice depends on the platform that a program is lowered for, which need not be the default platform
of the process.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from masksafe._core import sharding
from masksafe._core.typing import Array, Pytree, Tree


class AttentionSizes(NamedTuple):
    """The sizes of attention's blocks."""

    # Heads of width 64: tiles of 512 are up to 1.6 times as fast as tiles of 256, whose products are too small, and
    # allow more blocks to be skipped than tiles of 1024. Where no block can be skipped, twice as many keys per block
    # are 10 to 30 % faster.
    query_tile: int = 512
    key_tile: int = 512
    key_tile_if_nothing_is_skipped: int = 1024
    fewest_queries: int = 128  # per tile, however many query heads share a key head

    # Problems are solved one after another if one has at least the first number of logits, and all of them have at
    # least the second. With fewer, such as 128 x 128 for one or 256 x 256 for each of eight, all at once are at least
    # as fast.
    in_turn_logits_of_one: int = 2**16
    in_turn_logits_of_all: int = 2**20

    # Up to this many queries for each key head, as in decoding, a sample goes through its keys in blocks of 256 KiB.
    few_queries: int = 16
    fewest_keys_of_few_queries: int = 512
    key_block_elements: int = 2**16

    # Values in kernels of XLA's library. Rows are queries times heads times samples: from `fewest_rows_of_one_kernel`
    # on two products and the softmax between them are one kernel. With fewer rows the logits are in memory, and below
    # `fewest_rows_of_kernels` blocks are faster. A causal mask of 1024 keys takes 0.8 of the time of blocks, one of
    # 3072 keys 1.2. Tiles of at least `fewest_queries_of_kernels` leave out keys that a static mask hides: 8 x 512 x 8
    # heads take 0.44 of jax.nn's time in one tile, 0.38 in two.
    fewest_rows_of_kernels: int = 2**10
    fewest_rows_of_one_kernel: int = 2**12
    fewest_queries_of_kernels: int = 256
    most_keys_of_kernels: int = 1024
    # With this many keys products of bfloat16 take 0.5 to 0.9 of the time of float32 on a CPU that multiplies bfloat16,
    # and 0.8 to 1.2 on one that does not. With fewer keys they take as long as float32, and twice as long.
    fewest_keys_of_bfloat16: int = 128

    # Up to this many logits in the whole batch, JAX's own derivative takes three quarters of the time of blocks. It
    # keeps all weights.
    most_weights_kept: int = 2**21

    # The reverse pass of short sequences has many arrays of the size of the logits. So it takes as many samples at once
    # as have this many logits, 1 MiB of float32, unless all problems together have fewer than
    # `in_turn_logits_of_all`.
    reverse_at_once_logits: int = 2**18

    # Elsewhere tiles of queries have all of their keys, so that a softmax reads its row once. A tile has at most
    # `row_tile_logits`, for all samples and heads that are computed together: 256 MiB of float32, in a few kernels
    # each. Where a static mask, such as a causal one, hides keys from a whole tile, a problem has up to
    # `skipping_row_tiles`, of at least `skipping_row_tile_logits`: four tiles of a causal mask leave out three eighths
    # of the pairs.
    row_tile_logits: int = 2**26
    skipping_row_tiles: int = 4
    skipping_row_tile_logits: int = 2**24
    row_tile_logits_of_derivatives: int = 2**20  # on a CPU, where JAX differentiates a loop over tiles of rows
    alignment: int = 64  # of the bounds of a tile's keys, for the matrix units of a GPU

    # cuDNN gets an array over pairs for masks that it does not have. In bfloat16 this array has 512 MiB at most.
    most_pairs_in_one_array: int = 2**28


class LinearSizes(NamedTuple):
    """The sizes of the blocks of losses of linear layers."""

    # A matrix product of 512 tokens runs at full speed, one of 128 tokens at three quarters of it (jax 0.10), since the
    # kernel and its gradient pass through the caches once per block. With many classes, 160 tokens are a compromise:
    # their logits take about a twentieth of the memory of those of 4096 tokens.
    token_block_elements: int = 2**23  # of the logits
    fewest_tokens: int = 160
    most_tokens: int = 512
    # Under a mask the last block is half empty on average. With 1024 tokens or more, 40 % of them unmasked, blocks of
    # 256 take 0.8 to 1 of the time of blocks of 512; with 512 tokens, so do blocks of 128.
    fewest_tokens_if_masked: int = 128
    most_tokens_if_masked: int = 256
    class_tile_elements: int = 2**20  # of the kernel or the logits, whichever is larger: these pass through the cache

    # On accelerators. Each tile of classes reads the features and their gradient again, each block of tokens the
    # kernel and its gradient; with eight logits for each feature this adds about a tenth to the memory traffic of the
    # logits. A tile has 128 to 512 MiB of float32 logits, but no more than a quarter of all. With a mask at least two
    # blocks are needed to skip one, and tiles of twice the size make up for the smaller blocks.
    logits_per_feature: int = 8
    least_logits: int = 2**25
    most_logits: int = 2**27
    least_tokens_if_masked: int = 2048  # in the largest block
    most_tokens_of_one_block: int = 512  # up to this many are one block, masked or not

    # Divergences need whole rows of logits of both sides: on accelerators 256 MiB of float32 of each.
    token_block_elements_on_accelerators: int = 2**26


class Choices(NamedTuple):
    """What is chosen for a platform. It is part of the key of a compiled program."""

    form: Literal["cpu", "accelerator", "cuda", "tpu"] | None = None  # on every platform; None: each has its own
    attention: AttentionSizes = AttentionSizes()
    linear: LinearSizes = LinearSizes()
    executors_left_out: tuple[str, ...] = ()  # of attention, by their names in its table
    interprets: Pytree = False  # kernels of Pallas; or `pltpu.InterpretParams`

    # Rows of an array: 1 MiB of float32, about the size of a core's second-level cache. Between 2**17 and 2**20 the
    # time of the cross-entropy hardly changes (jax 0.12, 8192x1024, bfloat16: by 6 %); smaller blocks add overhead,
    # larger ones do not fit into the cache.
    row_block_elements: int = 2**18

    # Whether XLA's CPU compiler has a library that makes one fusion of arithmetic and the sums over rows within it,
    # which jax 0.12 has and jax 0.10 has not. What lies between was not measured.
    has_fusion_library: bool = jax.__version_info__ >= (0, 12)

    # A CPU's allocator keeps temporaries below 32 MiB, which are a few arrays of this many float32. For larger ones it
    # asks the system in every call, which takes longer than the work: there blocks win, while below they take up to
    # twice as long (jax 0.12, a layer norm's gradient: 0.5 to 0.8 of the time in one pass). Without the library, rows
    # of more than 2**20 elements take longer in one pass.
    most_elements_in_one_pass: int = 2**21 if has_fusion_library else 2**20

    # A row of this many elements is still in the cache for the second sum over it. One of 50257 is not: the
    # logsumexps of such rows take about half of the time in blocks (jax 0.12, 1024x50257: 51 ms for 91).
    longest_row_of_fusions: int = 2**15
    fewest_elements_of_fusions: int = 2**12  # the library leaves smaller arrays alone

    # The logits of a block of rows, of all pairs of a batch: 16 MiB of float32 on a CPU, where blocks of a quarter of
    # that take a tenth longer; on accelerators 128 MiB.
    pair_block_elements: int = 2**22
    pair_block_elements_on_accelerators: int = 2**25
    fewest_rows_of_pairs: int = 64

    # With at least this many rows per segment, and in all, rows are added up in chunks. A chunk has 16 rows per
    # segment: the sums of all chunks take a 16th of the memory of the data.
    fewest_rows_of_segments_in_chunks: int = 2**7
    fewest_rows_in_chunks: int = 2**12
    rows_of_chunk_by_segments: int = 2**4


_choices = jax.make_user_context(default_value=Choices())


def choices() -> Choices:
    return _choices.value


@contextlib.contextmanager
def chosen(
    *, attention: Mapping[str, int] | None = None, linear: Mapping[str, int] | None = None, **others: Pytree
) -> Iterator[None]:
    """Context with other choices, for measuring and testing. JAX traces functions again when the choices change."""
    now = choices()
    attention_sizes, linear_sizes = now.attention._replace(**attention or {}), now.linear._replace(**linear or {})
    with _choices(now._replace(attention=attention_sizes, linear=linear_sizes, **others)):
        yield


def unfused(results: Tree, *, on: Literal["cpu", "gpu"] | None = None) -> Tree:
    """`results`, which XLA neither fuses with later operations nor shares with equal ones, on one platform or all.

    On a CPU XLA would fuse the mean of all rows with the computation of each row, which makes it up to ten times as
    slow (jax 0.12, mean of `cosine_similarity` of 8192x1024: 57 ms for 5.3; jax 0.10: 12 for 11): XLA splits the work
    on rows between the cores, but not the work on one number.
    """
    # One barrier for each array: in shard_map the arrays of one barrier have to vary over the same axes.
    barrier = functools.partial(jax.tree.map, lax.optimization_barrier)
    same = lambda results: results  # noqa: E731
    match on:
        case None:
            return barrier(results)
        case "cpu":
            return by_platform(same, results, cpu=barrier)
        case "gpu":  # there are several platforms of GPUs
            return by_platform(barrier, results, cpu=same, tpu=same)


def computed_once(x: Tree) -> Tree:
    """The arrays, which a program for a CPU writes to memory before anything uses them.

    For a cotangent: after a matrix product with several axes of rows, one of the two products of the reverse pass reads
    the cotangent transposed. XLA would compute it twice, once in each order, with all of its exponentials (jax 0.12,
    8x128x256 @ 256x2048: 24 MiB of temporaries for 16, 1.3 times as long). For results of rows: XLA would compute all
    rows and their mean in one kernel, on one core (see `unfused`).
    """
    return unfused(x, on="cpu") if sharding.are_whole(x) else x


def by_platform(default: Callable[..., Tree], *args: Pytree, **branches: Callable[..., Tree]) -> Tree:
    """Calls the function for the platform of the program, chosen when it is lowered, or the default one."""
    form = choices().form
    if form is not None:
        return branches.get(form, default)(*args)
    return lax.platform_dependent(*args, **branches, default=default) if branches else default(*args)


def on_one_device(
    kernel: Callable[..., Tree],
    otherwise: Callable[..., Tree],
    can_run: Callable[[], bool],
    likes: Tree,
    *args: Pytree,
) -> Tree:
    """`kernel(*args)` in a program for one TPU, or for each TPU by itself, as inside `jax.shard_map`, if it can run.

    The compiler cannot split a kernel over devices (jax 0.12: an error): there it is `otherwise(*args)`. The number of
    devices is known when the program is lowered, and only then is `can_run` asked, and one of the two traced. The
    results have the types of `likes`.
    """
    leaves, tree = jax.tree.flatten(args)
    like_leaves, result_tree = jax.tree.flatten(likes)

    def flat(fn: Callable[..., Tree]) -> Callable[..., list[Array]]:
        return lambda *arrays: jax.tree.leaves(fn(*jax.tree.unflatten(tree, arrays[: len(leaves)])))

    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    static = {"number": len(like_leaves), "interprets": bool(choices().interprets), "precision": precision}
    fns = {"kernel": flat(kernel), "otherwise": flat(otherwise), "can_run": can_run}
    results = _on_one_device.bind(*leaves, *like_leaves, **fns, **static)
    return jax.tree.unflatten(result_tree, results)


def _lower_on_one_device(
    ctx: Pytree,
    *operands: Pytree,
    kernel: Pytree,
    otherwise: Pytree,
    can_run: Callable[[], bool],
    interprets: bool,
    precision: Pytree,
    **_: Pytree,
) -> Pytree:
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        is_one = set(context.mesh.axis_names) == context.manual_axes | set(context.mesh.manual_axes)
    else:
        is_one = getattr(context, "num_devices", 1) == 1
    if not (interprets and is_one and can_run()):
        return mlir.lower_fun(otherwise)(ctx, *operands)

    def traced() -> Pytree:
        with jax.default_matmul_precision(precision), jax.enable_x64(False):  # kernels have indices of 32 bits
            return jax.make_jaxpr(kernel)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ctx.avals_in))

    # In a thread of its own: in `jax.shard_map` a kernel would have to say over which axes its results vary.
    with ThreadPoolExecutor(1) as pool:
        program = pool.submit(traced).result()
    if ctx.platforms is not None:  # some of those of the module
        ctx = ctx.replace(module_context=ctx.module_context.replace(platforms=ctx.platforms))
    return mlir.core_call_lowering(ctx, *operands, name="kernel", call_jaxpr=program)


def _lower_on_one_tpu(ctx: Pytree, *operands: Pytree, interprets: bool, **params: Pytree) -> Pytree:
    return _lower_on_one_device(ctx, *operands, interprets=True, **params)


_on_one_device = Primitive("on_one_device")
_on_one_device.multiple_results = True
_on_one_device.def_abstract_eval(lambda *avals, number, **_: list(avals[-number:]))
_on_one_device.def_impl(lambda *args, kernel, otherwise, can_run, **_: (kernel if can_run() else otherwise)(*args))
mlir.register_lowering(_on_one_device, _lower_on_one_device)
mlir.register_lowering(_on_one_device, _lower_on_one_tpu, platform="tpu")


def refused_when_lowered(text: str, x: Array) -> Array:
    """`x`; lowering a program that contains this call raises a ValueError with this text."""
    return _refused.bind(lax.stop_gradient(x), text=text)


def _refuse(_: Pytree, *operands: Pytree, text: str) -> Pytree:
    raise ValueError(text)


_refused = Primitive("refused_when_lowered")
_refused.def_abstract_eval(lambda x, *, text: x)
mlir.register_lowering(_refused, _refuse)
batching.primitive_batchers[_refused] = lambda args, axes, *, text: (refused_when_lowered(text, *args), axes[0])
