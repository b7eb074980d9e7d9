"""What attention is a function of: the static `Plan`, and the `Operands`, which have gradients.

The letters are those of the papers, everywhere: queries `q`, keys `k`, values `v`, outputs `o`, the logsumexp `lse`,
the largest logit `m` and the sum of exponentials `l` of a query, and the cotangents `do`, `dlse`, `dq`, `dk`, `dv`.
"""

from typing import Any, NamedTuple

from masksafe._core.platforms import AttentionSizes
from masksafe._core.typing import Array, Arrays

# A query sees no key whose position is further before its own than the first number, or behind it than the second one.
Reach = tuple[int | None, int]


class Ring(NamedTuple):
    """Devices over which time is split, and on which keys and values go round."""

    axis_name: str | tuple[str, ...]
    size: int
    first: int  # in its first step a device works on the keys of the device so many places before it
    steps: int  # in each of the others on those of the next one before it


class Plan(NamedTuple):
    """The static parameters."""

    scale: float
    soft_cap: float | None
    dropout_rate: float
    reach: Reach | None  # that of the causal mask and the window; None is any distance
    sizes: AttentionSizes
    rounds: bool = True  # whether the output is rounded to the dtype of the queries
    ring: Ring | None = None  # None if all keys are here; else other devices have more of them
    on_accelerator: bool = False
    is_plain: bool = False  # whether JAX differentiates the program: then no loop has a length that depends on values
    needs_lse: bool = True  # whether anything depends on the logsumexp
    shares_segments: bool = False  # whether queries and keys have one array of segments
    is_differentiated: bool = True  # whether a reverse pass follows: in blocks it wants `m` and `l`
    function: Any = None  # the user's own kernel, a `_callable.Function`

    def scales(self, q: Array) -> tuple[float, float]:
        """The factors of the queries and of the logits: the scale is that of the queries, unless it would round them.

        The logits are the larger array.
        """
        return (self.scale, 1.0) if q.dtype.itemsize >= 4 else (1.0, self.scale)


class Operands(NamedTuple):
    """The arrays that have gradients, in the user's layout except for one batch dimension; or their gradients."""

    q: Array  # [B, T, N, H]
    k: Array  # [B, S, K, H]
    v: Array  # [B, S, K, width]
    bias: Array | None = None  # [B, N, T, S], or 1 where it broadcasts
    captured: Arrays = ()  # by `score_mod`


class Kernels(NamedTuple):
    """Of each kernel of another library: True if it is the one that the user has named, None if it is not taken."""

    cudnn: bool | None = None
    splash: bool | None = None
