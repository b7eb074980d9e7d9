"""A warning about two versions of XLA's CPU compiler that compute wrong sums or crash.

They are good for GPUs and TPUs, so they may be installed. Whether the faulty compiler gets a program is known only when
the program is lowered, or when an op runs without `jax.jit`: the warning comes there.
"""

import os
import warnings

import jax
import jaxlib.version
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from masksafe._core import call_site
from masksafe._core.typing import Array, Pytree, Tree

_CRASHES = "may crash on arrays of rank 7 and 8"
_FAULTS = {"0.10.2": f"silently computes wrong sums, and {_CRASHES}", "0.11.0": _CRASHES}
_FLAG = "--xla_cpu_experimental_ynn_fusion_type="  # empty: XLA uses nothing of the library that is at fault

known = _FAULTS.get(jaxlib.version.__version__)
fault = known  # None once the user has been warned


def told_on_cpu(results: Tree) -> Tree:
    """`results`; lowering a program that contains this call warns of the fault, if it is for a CPU."""
    return jax.tree.map(lambda x: _told.bind(x) if isinstance(x, jax.Array) else x, results)


def described(found: str | None) -> str | None:
    """A fault and the way out; None if there is none, or a flag avoids it."""
    # Of several flags the last one counts.
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.startswith(_FLAG)]
    if found is None or flags[-1:] == [_FLAG]:
        return None
    return (
        f"On CPUs jaxlib {jaxlib.version.__version__} {found}, also without masksafe. Install another version of jax "
        f"and jaxlib, or set XLA_FLAGS={_FLAG} before JAX starts."
    )


def _tell(x: Pytree) -> Pytree:
    global fault
    text, fault = described(fault), None
    if text is not None:
        frame = call_site.frame_of_user()
        warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)
    return x


def _told_of_value(x: Array) -> Array:
    return _tell(x) if isinstance(x, jax.Array) and any(d.platform == "cpu" for d in x.devices()) else x


_told = Primitive("told_on_cpu")
_told.def_impl(_told_of_value)
_told.def_abstract_eval(lambda x: x)
mlir.register_lowering(_told, lambda _, x: [x])
mlir.register_lowering(_told, lambda _, x: [_tell(x)], platform="cpu")
ad.deflinear2(_told, lambda cotangent, _: [_told.bind(cotangent)])
batching.primitive_batchers[_told] = lambda args, axes: (_told.bind(*args), axes[0])
