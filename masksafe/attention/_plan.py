"""The arguments of attention inside a program: the static `Plan`, and the `Operands`, which have gradients.

The letters are those of the papers, everywhere: queries `q`, keys `k`, values `v`, outputs `o`, the logsumexp `lse`,
the largest logit `m` and the sum of exponentials `l` of a query, and the cotangents `do`, `dlse`, `dq`, `dk`, `dv`.
"""

from typing import Any, NamedTuple, Protocol

from masksafe._core.platforms import AttentionSizes
from masksafe._core.typing import Array, Arrays

# A query sees keys at most the first number before its own position, and at most the second behind it; None: any.
Reach = tuple[int | None, int]


class Ring(NamedTuple):
    """Devices over which time is split, and on which keys and values go round."""

    axis_name: str | tuple[str, ...]
    size: int
    first: int  # in the first step a device has the keys of the device this many places before it
    steps: int  # in each further step, those of the device one more place before it


class Plan(NamedTuple):
    """The static parameters."""

    scale: float
    soft_cap: float | None
    dropout_rate: float
    reach: Reach | None  # of the causal mask and the window; None: any distance
    sizes: AttentionSizes
    rounds: bool = True  # whether the output is rounded to the dtype of the queries
    ring: Ring | None = None  # None: this device has all keys
    on_accelerator: bool = False
    is_plain: bool = False  # whether JAX differentiates the program: then no loop has a length that depends on values
    needs_lse: bool = True  # whether the logsumexp is needed
    needs_max: bool = False  # whether the largest logits are needed
    shares_segments: bool = False  # whether queries and keys have one array of segments
    function: Any = None  # the user's own kernel, a `_callable.Function`

    def scales(self, q: Array) -> tuple[float, float]:
        """The factors of the queries and of the logits, one of which is the scale.

        Queries are the smaller array; but those of 16 bits would be rounded again.
        """
        return (self.scale, 1.0) if q.dtype.itemsize >= 4 else (1.0, self.scale)


class Operands(NamedTuple):
    """The arrays that have gradients, in the user's layout except for one batch dimension; or their gradients."""

    q: Array  # [B, T, N, H]
    k: Array  # [B, S, K, H]
    v: Array  # [B, S, K, width]
    bias: Array | None = None  # [B, N, T, S], or 1 where it broadcasts
    captured: Arrays = ()  # the floats that `score_mod` captured


class Kernels(NamedTuple):
    """For each kernel of another library: True if the user has named it, False if it may be taken, None if not."""

    cudnn: bool | None = None
    splash: bool | None = None


class Executor(Protocol):
    """What computes attention: operands may hold anything, and results keep the contract. Batches are merged."""

    def value(self, plan: Plan, x: Operands, pairs: Any) -> Arrays:
        """The output `[B, T, N, width of v]` and the logsumexp `[B, T, N]`; if it is needed, the largest logit as well.

        A logsumexp that `plan` does not need may be any number, but is -inf for a query that sees no key. The largest
        logit of a query that sees something bad may be any number.
        """

    def forward(self, plan: Plan, x: Operands, pairs: Any) -> tuple[Arrays, Any]:
        """The same, and what the reverse pass needs."""

    def reverse(self, plan: Plan, x: Operands, pairs: Any, residuals: Any, d: tuple[Array, Array]) -> Operands:
        """The cotangents of the operands, from those of the output and the logsumexp."""

    def marks(self, residuals: Any) -> tuple[Array, Array]:
        """Which queries are bad or see something bad, and which see no key, `[B, T, N]`."""


class Choice(NamedTuple):
    """What is known of a call while it is traced."""

    plan: Plan
    kernels: Kernels
    x: Operands
    pairs: Any  # with the bias
    values: Executor | None = None  # what computes the values
