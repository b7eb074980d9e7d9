"""Whether a function's derivatives match its values."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.test_util import check_grads

from masksafe._core.arguments import message
from masksafe._core.switches import forward_mode
from masksafe.testing import _trees
from masksafe.testing._trees import only_floats, random_like

_OP = "assert_gradients"
_Mode = Literal["fwd", "rev"]
_MODES: tuple[_Mode, ...] = get_args(_Mode)


def assert_gradients(
    fn: Callable[..., Any],
    *args: Any,
    order: int = 2,
    modes: Sequence[_Mode] = _MODES,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> None:
    r"""Asserts that the derivatives of a function, in both modes of autodiff, match its values.

    All floats are widened to float64, and the function runs on one device of the CPU, to which sharded arguments are
    copied. Each mode is compared with finite differences along random directions, up to derivatives of the given order.
    The two modes are compared with each other, for random tangents :math:`v` of the arguments and cotangents :math:`w`
    of the outputs:

    .. math:: \langle w, J v \rangle = \langle J^T w, v \rangle.

    Reverse mode goes through the hand-written rules of `jax.custom_vjp` functions. Forward mode runs inside
    `masksafe.forward_mode`.

    Args:
      fn: any JAX function of `args` that returns an array or a pytree of arrays. Arrays that it closes over or converts
        to float32 are not widened: pass those that the precision of the result depends on as arguments.
      *args: arrays or pytrees of arrays at which `fn` is smooth. Derivatives are taken with respect to their floats.
      order: the highest derivative to check, 1 or more.
      modes: "fwd", "rev" or both. A `jax.custom_vjp` function of another library has reverse mode only.
      rtol: allowed relative error against finite differences; by default the one of `jax.test_util.check_grads`.
      atol: allowed absolute error; by default the same.
      seed: the seed of the random directions in which the modes are compared.

    Raises:
      AssertionError: if a derivative is wrong.
      ValueError: also if nothing would be compared, or if other processes hold a part of an argument.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from masksafe.testing import assert_gradients
      >>> @jax.custom_vjp
      ... def square(x):
      ...     return x**2
      >>> square.defvjp(lambda x: (x**2, x), lambda x, d: (x * d,))  # should be 2 * x * d
      >>> assert_gradients(square, jnp.array(3.0), modes=("rev",))
      Traceback (most recent call last):
      ...
      AssertionError: ...

    References:
      `jax.test_util.check_grads <https://docs.jax.dev/en/latest/_autosummary/jax.test_util.check_grads.html>`_, which
      makes the comparison with finite differences.
    """
    __tracebackhide__ = True
    if not modes or not set(modes) <= set(_MODES):
        raise ValueError(message(_OP, "modes", f"{list(modes)}", f"some of {_MODES}"))
    if order < 1:
        raise ValueError(message(_OP, "order", f"value {order}", "1 or more"))
    _trees.check_tolerances(_OP, rtol=rtol, atol=atol)
    if not jax.tree.leaves(only_floats(args)):
        raise ValueError(message(_OP, "args", "no floats", "an array to differentiate with respect to"))
    _trees.check_addressable(_OP, args=args)
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        args = jax.tree.map(_copied, args)
        wide = jax.tree.map(lambda leaf: jnp.asarray(_trees.as_double(leaf)), only_floats(args))

        def differentiable(floats: Any) -> Any:
            return only_floats(fn(*_trees.replace_floats(args, floats)))

        if not jax.tree.leaves(jax.eval_shape(differentiable, wide)):
            raise ValueError(message(_OP, "fn", "no output of floats", "one to differentiate"))
        for mode in sorted(modes, reverse=True):
            with forward_mode() if mode == "fwd" else contextlib.nullcontext():
                check_grads(differentiable, (wide,), order, (mode,), atol=atol, rtol=rtol)
        if set(modes) == set(_MODES):
            _assert_modes_agree(differentiable, wide, _trees.generator(seed))


def _copied(leaf: Any) -> Any:
    """A copy of an array of JAX on the default device; a random key as it is."""
    return jnp.asarray(np.asarray(leaf)) if isinstance(leaf, jax.Array) and not _trees.is_key(leaf) else leaf


def _assert_modes_agree(fn: Callable[[Any], Any], primal: Any, rng: np.random.Generator) -> None:
    __tracebackhide__ = True
    tangent = random_like(primal, rng)
    with forward_mode():
        outputs, forward = jax.jvp(fn, (primal,), (tangent,))
    cotangent = jax.tree.map(lambda leaf, w: w.astype(leaf.dtype), outputs, random_like(outputs, rng))
    (reverse,) = jax.vjp(fn, primal)[1](cotangent)
    along, back = _products(cotangent, forward), _products(reverse, tangent)
    # A derivative of 0 is a difference of larger values, and has their rounding error.
    scale = sum(np.abs(products).sum() for products in (along, back, _products(cotangent, outputs)))
    if not abs(along.sum() - back.sum()) <= 1e-9 * scale:
        raise AssertionError(
            "The two modes of autodiff disagree.\n"
            f"  forward: the cotangent times the output's tangent is {along.sum()}\n"
            f"  reverse: the input's cotangent times the tangent is {back.sum()}"
        )


def _products(one: Any, other: Any) -> np.ndarray:
    """The products of all elements of two trees, in one vector."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return np.concatenate([np.ravel(np.asarray(a) * np.asarray(b)) for a, b in pairs])
