"""The executor that the user passes: a function of their own, as a kernel of the contract.

Taken: where `implementation` is a function, on every platform.
Why: kernels that nobody here has written, such as those for a new GPU, get the contract.
Left out: sinks, dropout, a soft cap, functions of logits, a ring, an array as scale, the largest logit, symbolic sizes.

It is called as `jax.nn.dot_product_attention` is, with the keywords that the call needs. Masks that
it has no keyword for become a mask of pairs. So do masks that would leave a query without a key, for a kernel need not
support such a query; but queries beyond their length stay without one, since their lengths exist to leave them out.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from masksafe._core import sharding
from masksafe._core.arguments import message
from masksafe._core.precision import wide_dtype
from masksafe._core.run_time import any_of
from masksafe._core.typing import Array, DType
from masksafe.attention._contract import largest
from masksafe.attention._kernels import InContract, Kernel
from masksafe.attention._pairs import Pairs, all_unmasked, by_heads, by_user, static_reach
from masksafe.attention._plan import Choice, Operands, Plan

_KEY_LENGTHS = "key_value_seq_lengths"


def _lengths_of(pairs: Pairs) -> dict[str, Any]:
    """The lengths by their keywords."""
    return {"query_seq_lengths": pairs.queries.length, _KEY_LENGTHS: pairs.keys.length}


@dataclasses.dataclass(frozen=True)
class Function:
    """The user's function. Two `functools.partial` with equal parts are equal, so that they share a program."""

    fn: Callable[..., Any] = dataclasses.field(compare=False)
    parts: Any

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> "Function":
        for parts in (_parts(fn), fn):  # the parts may be arrays
            with contextlib.suppress(TypeError):
                hash(parts)
                return cls(fn, parts)
        hint = "Call it in a function of your own that you define once."
        raise cls(fn, None).error(TypeError, "which has no hash", "a function", hint)

    def takes(self, keyword: str) -> bool:
        """Whether it has a parameter of this name, or takes all."""
        try:
            parameters = inspect.signature(self.fn).parameters
        except ValueError:  # it is not written in Python
            return True
        kinds = {p.name: p.kind for p in parameters.values() if p.kind is not p.POSITIONAL_ONLY}
        return keyword in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()

    def error(self, kind: Callable[[str], Exception], found: str, expected: str, hint: str = "") -> Exception:
        """The error of a call with this function."""
        fn = self.fn.func if isinstance(self.fn, functools.partial) else self.fn
        found = f"the function {getattr(fn, '__name__', type(fn).__name__)}, {found}"
        return kind(message("dot_product_attention", "implementation", found, expected, hint))


def _parts(fn: Any) -> Any:
    if not isinstance(fn, functools.partial):
        return fn
    values = *fn.args, *fn.keywords.values()
    return _parts(fn.func), values, tuple(fn.keywords), tuple(map(type, values))  # types, since 1 equals True


def check(plan: Plan, given: dict[str, Any]) -> None:
    """Refuses arguments that no function gets; `given` has all arrays and functions of the user by name."""
    reasons = {
        "sinks": "sinks" in given,
        "score_mod": "score_mod" in given,
        "dropout": "dropout_key" in given,
        "logit_soft_cap": plan.soft_cap is not None,
        "axis_name": plan.ring is not None,
        "an array as scale": "scale" in given,
        "return_max_logit": plan.needs_max,
        "symbolic sizes": any(map(sharding.has_symbolic_size, (given["q"], given["k"], given["v"]))),
    }
    if (reason := next((reason for reason, holds in reasons.items() if holds), None)) is not None:
        hint = f"A function of yours is not called with {reason}."
        raise plan.function.error(ValueError, f"beside {reason}", "'xla' or None", hint)


def choose(choice: Choice) -> InContract | None:
    """The executor, if the user has passed a function."""
    return None if choice.plan.function is None else InContract(UsersKernel.of(choice.plan, choice.x, choice.pairs))


@dataclasses.dataclass(frozen=True)
class UsersKernel(Kernel):
    """The kernel, with the masks that it has keywords for."""

    fn: Function
    static: tuple[tuple[str, Any], ...]  # the keywords
    lengths: tuple[str, ...]  # those that are lengths

    @classmethod
    def of(cls, plan: Plan, x: Operands, pairs: Pairs) -> "UsersKernel":
        fn: Function = plan.function
        left, right = static_reach(plan, pairs) or (None, -1)
        static: dict[str, Any] = {"scale": plan.scale}
        if right == 0 and fn.takes("is_causal"):
            static["is_causal"] = True
        # A late query may have no key in its window.
        sees_any = left is not None and min(left, right) >= 0 and x.q.shape[1] - left <= x.k.shape[1]
        if sees_any and fn.takes("local_window_size"):
            static["local_window_size"] = left, right
        given = _lengths_of(pairs)
        lengths = [name for name in given if given[name] is not None and fn.takes(name)]
        lengths = [name for name in lengths if name == "query_seq_lengths" or "local_window_size" not in static]
        return cls(fn, tuple(static.items()), tuple(lengths))

    def prepare(self, plan: Plan, x: Operands, pairs: Pairs, sees_any: Any) -> Any:
        """Queries, keys and values, and the arrays among the keywords."""
        (batch, num_queries, heads, _), (_, num_keys, key_heads, _) = x.q.shape, x.k.shape
        static, sizes, arrays = dict(self.static), (num_queries, num_keys), {}
        for name in self.lengths:
            size = sizes[name != "query_seq_lengths"]
            arrays[name] = jnp.broadcast_to(jnp.clip(_lengths_of(pairs)[name], 1, size), (batch,))
        pairs = pairs._replace(bias=by_heads(x.bias, key_heads))
        if x.bias is not None:
            # An element that is masked wherever it broadcasts is gone; a huge one must not outweigh a mask.
            unmasked = all_unmasked(plan, pairs, *sizes)
            assert unmasked is not None
            seen = any_of(
                by_user(unmasked, key_heads, heads, *sizes), [n for n in (0, 1) if x.bias.shape[n] == 1], keepdims=True
            )
            limit = min(largest(wide_dtype(x.bias.dtype), 1) ** 2, float(jnp.finfo(x.bias.dtype).max))
            arrays["bias"] = jnp.clip(jnp.where(seen & jnp.isfinite(x.bias), x.bias, 0), -limit, limit)
        queries, keys = pairs.queries._replace(length=None), pairs.keys
        pairs = pairs._replace(
            queries=queries, keys=keys._replace(length=None) if _KEY_LENGTHS in self.lengths else keys
        )
        if "local_window_size" in static or ("is_causal" in static and plan.reach == (None, 0)):
            plan = plan._replace(reach=None)
        mask = all_unmasked(plan, pairs, *sizes)
        if mask is not None:
            mask = mask if sees_any is None else mask | ~sees_any[..., None]
            arrays["mask"] = by_user(mask, key_heads, heads, *sizes)
        return x[:3], arrays

    def run(self, plan: Plan, prepared: Any) -> tuple[Array, Array]:
        """The output `[B, T, N, width]` and the logsumexp `[B, T, N]`, zeros if it is not needed."""
        (q, k, v), arrays = prepared
        keywords = dict(self.static) | arrays
        for name in (name for name in keywords if not self.fn.takes(name)):
            hint = "It gets the masks that it has no keyword for as mask." if name == "mask" else ""
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
        is_manual = jax.sharding.get_abstract_mesh().manual_axes  # there a kernel's results may not vary over devices
        return sharding.vary_with((o, lse), prepared) if is_manual else (o, lse)

    def _check(self, what: str, x: Any, shape: tuple[int, ...], *dtypes: DType) -> None:
        is_array = isinstance(x, jax.Array)
        if not (is_array and x.shape == shape and x.dtype in dtypes):
            kind = ValueError if is_array and x.shape != shape else TypeError
            found = f"shape {x.shape} and dtype {x.dtype}" if is_array else f"type {type(x).__name__}"
            raise self.fn.error(kind, f"whose {what} has {found}", f"shape {shape} and dtype {dtypes[0]}")
