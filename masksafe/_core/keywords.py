"""Keywords of jax.numpy and torch that have another name here, or none: the error says which."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from masksafe._core.arguments import message

Function = TypeVar("Function", bound=Callable[..., Any])

# The parameters that may have their place; an op has at most one of them.
_OURS = {
    "a": ("x",),
    "ddof": ("correction",),
    "dim": ("axis",),
    "eps": ("epsilon",),
    "input": ("x", "a"),
    "keepdim": ("keepdims",),
    "mask": ("where",),
    "unbiased": ("correction",),
    "weight": ("scale", "weights"),
}
_HINTS = {
    "dtype": "Convert the array: masksafe.{op}(x.astype(dtype)). 16 bits are summed in float32 without it.",
    "initial": "Combine the result with it, as in jnp.maximum(masksafe.max(x), initial).",
    "out": "JAX does not write into arrays: use the result.",
    "unbiased": "unbiased=True is correction=1, False is correction=0.",
}


def explains_keywords(fn: Function) -> Function:
    """Decorates an op: its refusal of a keyword that another library has names ours. Type checkers see the op as is."""

    @functools.wraps(fn)
    def explaining(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # no line of the op has run
                _refuse_keywords(fn.__name__, inspect.signature(fn).parameters.keys(), kwargs)
            raise

    return explaining  # type: ignore[return-value]


def _refuse_keywords(op: str, parameters: Collection[str], keywords: Iterable[str]) -> None:
    for name in keywords:
        if name in parameters:
            continue
        ours = next((f"the keyword {other}" for other in _OURS.get(name, ()) if other in parameters), "")
        if ours or name in _HINTS:
            hint = _HINTS.get(name, "").format(op=op)
            text = message(op, name, "a keyword of another library", ours or "no such keyword", hint)
            raise TypeError(text) from None
