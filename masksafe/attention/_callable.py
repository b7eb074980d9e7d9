"""The user's own kernel, as a kernel of the contract.

It is called as `jax.nn.dot_product_attention` is, with the keywords that the call needs. What it has no keyword for
becomes a mask of pairs; and so does what would leave a query without a key, which no kernel has to cope with.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from masksafe._core import sharding
from masksafe._core.arguments import message
from masksafe._core.precision import wide_dtype
from masksafe._core.typing import Array, DType
from masksafe._core.unfolded import any_of
from masksafe.attention._contract import largest
from masksafe.attention._pairs import Pairs, all_unmasked, by_heads, by_user, static_reach
from masksafe.attention._plan import Operands, Plan, Reach

_OP = "dot_product_attention"
_LENGTHS = {"query_seq_lengths": "query_lengths", "key_value_seq_lengths": "key_lengths"}


class Function:
    """The user's function. Two `functools.partial` of equal parts are equal, so that JAX finds their program again."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self._parts = fn, _parts(fn)
        try:
            self._hash = hash(self._parts)
        except TypeError as error:
            found, hint = f"{self}, which has no hash", "Call it in a function of your own, which you define once."
            raise TypeError(message(_OP, "implementation", found, "a function", hint)) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self._parts == other._parts

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        fn = self.fn.func if isinstance(self.fn, functools.partial) else self.fn
        return f"the function {getattr(fn, '__name__', type(fn).__name__)}"

    def takes(self, keyword: str) -> bool:
        """Whether it has a parameter of this name, or takes all."""
        try:
            parameters = inspect.signature(self.fn).parameters
        except ValueError:  # it is not written in Python
            return True
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return True
        return keyword in parameters and parameters[keyword].kind is not inspect.Parameter.POSITIONAL_ONLY

    def error(self, kind: Callable[[str], Exception], found: str, expected: str, hint: str = "") -> Exception:
        """The error of a call with this function."""
        return kind(message(_OP, "implementation", f"{self}, {found}", expected, hint))


def _parts(fn: Any) -> Any:
    if not isinstance(fn, functools.partial):
        return fn
    keywords = sorted(fn.keywords.items())
    types = *map(type, fn.args), *(type(x) for _, x in keywords)  # 1 is equal to True
    return _parts(fn.func), fn.args, tuple(keywords), types


def check(plan: Plan, given: dict[str, Any]) -> None:
    """Refuses what no function gets: `given` are all arrays and functions that the user gave, by their names."""
    fn: Function = plan.function
    reasons = {
        "sinks": "sinks" in given,
        "score_mod": "score_mod" in given,
        "dropout": "dropout_key" in given,
        "logit_soft_cap": plan.soft_cap is not None,
        "axis_name": plan.ring is not None,
        "an array as scale": "scale" in given,
        "symbolic sizes": any(map(sharding.has_symbolic_size, (given["q"], given["k"], given["v"]))),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        hint = f"A function of yours is not called with {found[0]}."
        raise fn.error(ValueError, f"beside {found[0]}", "'xla' or None", hint)


@dataclasses.dataclass(frozen=True)
class UsersKernel:
    """The kernel, for the masks that it knows by itself."""

    merges_batches: ClassVar[bool] = False  # `jax.vmap` treats it as any function

    fn: Function
    is_causal: bool
    window: Reach | None
    lengths: tuple[str, ...]  # the keywords

    @classmethod
    def of(cls, fn: Function, plan: Plan, x: Operands, pairs: Pairs) -> "UsersKernel":
        left, right = static_reach(plan, pairs) or (None, -1)
        # To the left of its window a late query may have no key at all.
        sees_any = left is not None and min(left, right) >= 0 and x.q.shape[1] - left <= x.k.shape[1]
        window = (left, right) if sees_any and fn.takes("local_window_size") else None
        given = [name for name, field in _LENGTHS.items() if getattr(pairs, field) is not None and fn.takes(name)]
        lengths = given if window is None else [name for name in given if name == "query_seq_lengths"]
        return cls(fn, right == 0 and fn.takes("is_causal"), window, tuple(lengths))

    def prepare(self, plan: Plan, x: Operands, pairs: Pairs, sees_any: Any) -> Any:
        """Queries, keys and values, and the arrays among the keywords."""
        (batch, num_queries, heads, _), (_, num_keys, key_heads, _) = x.q.shape, x.k.shape
        sizes, arrays, bias = {"query_seq_lengths": num_queries, "key_value_seq_lengths": num_keys}, {}, x.bias
        for name in self.lengths:
            arrays[name] = jnp.broadcast_to(jnp.clip(getattr(pairs, _LENGTHS[name]), 1, sizes[name]), (batch,))
        if bias is not None:
            # What is masked for all that share an element is gone; what is huge must not outweigh what masks.
            seen = all_unmasked(plan, pairs._replace(bias=by_heads(bias, key_heads)), num_queries, num_keys)
            seen = by_user(seen, key_heads, heads, num_queries, num_keys)
            seen = any_of(seen, [n for n in (0, 1) if bias.shape[n] == 1], keepdims=True)
            limit = min(largest(wide_dtype(bias.dtype), 1) ** 2, float(jnp.finfo(bias.dtype).max))
            arrays["bias"] = jnp.clip(jnp.where(seen & jnp.isfinite(bias), bias, 0), -limit, limit)
        known = ["query_lengths", *(_LENGTHS[name] for name in self.lengths)]
        rest = pairs._replace(bias=by_heads(bias, key_heads), **dict.fromkeys(known))
        knows_reach = self.window is not None or (self.is_causal and plan.reach == (None, 0))
        mask = all_unmasked(plan._replace(reach=None) if knows_reach else plan, rest, num_queries, num_keys)
        if mask is not None:
            mask = mask if sees_any is None else mask | ~sees_any[..., None]
            arrays["mask"] = by_user(mask, key_heads, heads, num_queries, num_keys)
        return x[:3], arrays

    def run_for_reverse(self, plan: Plan, prepared: Any) -> tuple[Array, Array]:
        return self.run(plan, prepared)

    def run(self, plan: Plan, prepared: Any) -> tuple[Array, Array]:
        """The output `[B, T, N, width]` and the logsumexp `[B, T, N]`, zeros if it is not needed."""
        (q, k, v), arrays = prepared
        keywords = {"scale": plan.scale, **arrays}
        if self.is_causal:
            keywords["is_causal"] = True
        if self.window is not None:
            keywords["local_window_size"] = self.window
        for name in keywords:
            if not self.fn.takes(name):
                hint = "What it has no other keyword for reaches it as mask." if name == "mask" else ""
                raise self.fn.error(TypeError, f"which takes no keyword {name}", f"one that takes {name}", hint)
        results = self.fn.fn(q, k, v, **keywords)
        o, lse = results if isinstance(results, tuple | list) and len(results) == 2 else (results, None)
        wide = wide_dtype(q.dtype)
        self._check("output", o, (*q.shape[:3], v.shape[3]), q.dtype, wide)
        if not plan.needs_lse:
            lse = jnp.zeros_like(o[..., 0], wide)
        elif lse is None:
            found, expected = "which returns no logsumexp", "one that returns (output, logsumexp)"
            raise self.fn.error(ValueError, found, expected, "return_residual=True needs it.")
        else:
            self._check("logsumexp", lse, q.shape[:3], wide)
        is_manual = jax.sharding.get_abstract_mesh().manual_axes  # there a kernel's results need not vary by themselves
        return sharding.vary_with((o, lse), prepared) if is_manual else (o, lse)

    def _check(self, what: str, x: Any, shape: tuple[int, ...], *dtypes: DType) -> None:
        if not isinstance(x, jax.Array):
            raise self.fn.error(TypeError, f"whose {what} is of type {type(x).__name__}", "an array")
        if x.shape != shape:
            raise self.fn.error(ValueError, f"whose {what} has shape {x.shape}", f"{shape}")
        if x.dtype not in dtypes:
            raise self.fn.error(TypeError, f"whose {what} has dtype {x.dtype}", f"{dtypes[0]}")
