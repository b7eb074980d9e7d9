"""What each platform wants: how large a block is, and where a loop over blocks beats a single pass.

The sizes were measured on two CPU cores. A GPU would launch a dozen kernels for every block, so it gets the one pass
where there is one. Which it is belongs to the platform that a program is lowered for, not to the default one of the
process that lowers it.
"""

from collections.abc import Callable
from typing import Any

from jax import lax

# Rows of an array: 1 MiB of float32, about a core's second-level cache. Between 2**17 and 2**20 the time of the
# cross-entropy hardly changes; smaller blocks pay for their number, larger ones leave the cache.
ROW_BLOCK_ELEMENTS = 2**18

# Attention with heads of width 64: tiles of 512 are up to 1.6 times faster than tiles of 256, whose products are too
# small, and let more be skipped than tiles of 1024. Where nothing can be skipped, twice as many keys at a time are 10
# to 30 % faster.
QUERY_TILE = 512
KEY_TILE = 512
KEY_TILE_IF_NOTHING_IS_SKIPPED = 1024
FEWEST_QUERIES = 128  # in a tile, however many query heads share a key head

# Attention goes through its problems in turn if one of them and all together have this many logits. With fewer,
# 128 x 128 for one or 256 x 256 for eight, the dense form of all at once is as fast or faster.
IN_TURN_LOGITS_OF_ONE = 2**16
IN_TURN_LOGITS_OF_ALL = 2**20

# The linear cross-entropy: a product of 512 tokens runs at full speed, one of 128 at three quarters of it, since the
# kernel and its gradient pass through the caches once for each block. Where there are many classes, 160 tokens are a
# compromise: their logits take a twentieth of the memory of those of 4096.
TOKEN_BLOCK_ELEMENTS = 2**23  # of the logits
FEWEST_TOKENS, MOST_TOKENS = 160, 512
FEWEST_TOKENS_OF_A_SMALL_BLOCK = 32  # for less, a second size of block is not worth its time to compile
CLASS_TILE_ELEMENTS = 2**20  # of the kernel or the logits, whichever has more: these go through the cache


def on_cpu_or_elsewhere(on_cpu: Callable[..., Any], elsewhere: Callable[..., Any], *args: Any) -> Any:
    """`on_cpu(*args)` where the program is lowered for a CPU, and `elsewhere(*args)` on any other platform."""
    return lax.platform_dependent(*args, cpu=on_cpu, default=elsewhere)
