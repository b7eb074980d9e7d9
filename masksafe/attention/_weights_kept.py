"""The executor of short sequences on a CPU: the textbook's formula, with JAX's own derivative.

Taken: on a CPU for up to 2^21 logits in the whole batch, of fewer than 512 keys.
Why: a gradient by the loop, which computes the weights again, takes 1.16 to 1.27 times as long (24x96x6x64,
8x128x8x64; AMD EPYC, two cores, jax 0.12).
Left out: a bias, and what the formula leaves out; and longer sequences, since all weights are kept.
"""

import math

from masksafe.attention._formula import Formula, serves
from masksafe.attention._kernels import InContract
from masksafe.attention._plan import Choice


def choose(choice: Choice) -> InContract | None:
    """The executor, or None if it does not serve the call."""
    sizes, x = choice.plan.sizes, choice.x
    num_keys = x.k.shape[1]
    if not serves(choice) or x.bias is not None or num_keys >= sizes.fewest_keys_of_few_queries:
        return None
    num_logits = math.prod(x.q.shape[:3]) * num_keys
    return InContract(Formula(choice.plan.reach)) if num_logits <= sizes.most_weights_kept else None
