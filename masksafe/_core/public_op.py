"""What surrounds a public op: its name in profiles, and errors that translate keywords of jax.numpy and torch."""

import functools
import inspect
from collections.abc import Iterable, Set

import jax

from masksafe._core import compiler_faults, switches
from masksafe._core.arguments import message
from masksafe._core.typing import Function, Pytree

# The parameters that may have their place: the first of them that an op has, or the two that stand together.
_OURS = {
    "a": ("x",),
    "ddof": ("correction",),
    "dim": ("axis",),
    "eps": ("epsilon",),
    "input": ("x", "a"),
    "keepdim": ("keepdims",),
    "key_padding_mask": ("mask",),
    "mask": ("where",),
    "segment_ids": ("query_segment_ids and key_value_segment_ids",),
    "unbiased": ("correction",),
    "var": ("variance",),
    "variance": ("var",),
    "weight": ("scale", "class_weights", "weights"),
    "weights": ("class_weights", "where"),
}
_HINTS = {
    "dtype": "Convert the array: masksafe.{op}(x.astype(dtype)). 16 bits are summed in float32 without it.",
    "initial": "Combine the result with it, as in jnp.maximum(masksafe.max(x), initial). For empty rows: empty_value.",
    "key_padding_mask": "There True masks, here it keeps: mask=~key_padding_mask[:, None, None, :].",
    "out": "JAX does not write into arrays: use the result.",
    "unbiased": "unbiased=True is correction=1, False is correction=0.",
    "weights": "Weights of rows go to their mean, masksafe.mean({op}(...), weights=weights); those of 0 and 1 may be "
    "where=weights != 0.",
}


_FORWARD_MODE_HINT = (
    "masksafe's ops have forward mode (jax.jvp, jax.linearize, jax.jacfwd) inside `with masksafe.forward_mode():`."
)


def public_op(fn: Function) -> Function:
    """Decorates a public op. Type checkers see the op as it is.

    Its operations are in the scope `masksafe.<op>`, which profiles and HLO show. The error for a keyword of another
    library names the keyword of the op. JAX's error for forward mode gets a hint; inside a compiled function JAX raises
    it later, without the hint.
    """
    scope = f"masksafe.{fn.__name__}"

    @functools.wraps(fn)
    def named(*args: Pytree, **kwargs: Pytree) -> Pytree:
        try:
            with jax.named_scope(scope), switches.finding_nans():
                results = fn(*args, **kwargs)
                return results if compiler_faults.fault is None else compiler_faults.told_on_cpu(results)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # no line of the op has run
                _refuse_keywords(fn.__name__, inspect.signature(fn).parameters.keys(), kwargs)
            if "custom_vjp" in str(error) and _FORWARD_MODE_HINT not in str(error):
                error.args = (f"{error} {_FORWARD_MODE_HINT}",)
            raise

    return named  # type: ignore[return-value]


def _refuse_keywords(op: str, parameters: Set[str], keywords: Iterable[str]) -> None:
    for name in keywords:
        if name in parameters:
            continue
        ours = next((other for other in _OURS.get(name, ()) if parameters >= {*other.split(" and ")}), "")
        if ours or name in _HINTS.keys() - _OURS.keys():
            hint = _HINTS.get(name, "").format(op=op)
            expected = f"the keyword{'s' if ' and ' in ours else ''} {ours}" if ours else "no such keyword"
            raise TypeError(message(op, name, "a keyword of another library", expected, hint)) from None
