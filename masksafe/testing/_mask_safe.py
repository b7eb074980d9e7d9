"""Whether the masked elements of a function's arguments are gone."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from masksafe._core.arguments import message
from masksafe.testing import _trees
from masksafe.testing._trees import Tree, is_float, only_floats, random_like

_OP = "assert_mask_safe"
_Transform = Literal["eager", "jit", "vmap", "disable_jit"]
_TRANSFORMS: tuple[_Transform, ...] = get_args(_Transform)


def assert_mask_safe(
    fn: Callable[..., Any],
    *args: Any,
    masked: Mapping[int, Any],
    output_mask: Any = None,
    order: int = 2,
    garbage: Sequence[float] | None = None,
    transforms: Sequence[_Transform] = _TRANSFORMS,
    seed: int = 0,
    empty: tuple[Any, ...] | None = None,
    allow_nan: bool = False,
) -> None:
    """Asserts that the values of masked elements influence nothing.

    The masked elements are filled first with harmless values, and then with one kind of garbage after another, in one
    argument at a time and in all of them at once. Each time,

    * every output is the same bit for bit;
    * the gradient with respect to every unmasked element is the same bit for bit, and exactly 0 with
      respect to every masked one;
    * so are Hessian-vector products, forward over reverse and reverse over reverse.

    With the harmless values, none of these is NaN: a NaN would be the same whatever the garbage is, and hide it.

    Gradients are taken of a random linear combination of the outputs, with respect to the floats of every argument,
    masked or not. If the axes of the arguments' mesh are explicit, `jax.set_mesh` has to be around the call.

    Args:
      fn: any JAX function of `args` that returns an array or a pytree of arrays. Wrap a flax, equinox or haiku module
        in a closure: `lambda x: module.apply(variables, x, mask)`.
      *args: arrays or pytrees of arrays. `fn` must be well defined for the unmasked elements.
      masked: from the position of each argument that has masked elements to a boolean array that broadcasts to its
        shape: **True where an element is masked**. For a batch that is a dict, a dict of arrays, `{1: {"x": m}}`; for
        another pytree, one of the same structure. A key that is missing, None and False mask nothing. A mask that `fn`
        computes from a masked argument, such as `ids != 0`, would change with the garbage: pass it as an argument.
      output_mask: booleans that broadcast to the output (or a pytree of them), True where the output itself is padding.
        There nothing is checked, and the cotangent is 0.
      order: the highest derivative to check: 0 for values, 1 for gradients, 2 for Hessian-vector products.
      garbage: the values to fill with. By default NaN, both infinities, the extremes of the dtype, 0, random numbers
        and a mixture of all these; for integers the extremes, -1, -100, 0, random numbers and a mixture. A value that
        an argument's dtype cannot hold is skipped for that argument.
      transforms: any of "eager", "jit", "vmap" (a batch of two copies) and "disable_jit" (operation by operation, with
        values and gradients only, for one garbage in all arguments at once: the first one). All but the last may
        pass `argmax(x * mask)` with a boolean mask, since XLA (jax 0.10, 0.12) makes a selection of such a product.
      seed: the seed of all random numbers.
      empty: the arguments of a call in which everything is masked. Its outputs and gradients must be finite, and the
        arguments that have masked elements must influence nothing there.
      allow_nan: whether a NaN with harmless values is meant. Then it has to be one with garbage, too.

    Raises:
      AssertionError: if a masked element is not gone, or if there is a NaN without garbage. The text names the
        argument, the garbage, the transform, the derivative and the first index that differs, with both values.
      ValueError: also if nothing would be compared, or if other processes hold a part of an array.

    Example:
      A mean that multiplies by its mask:

      >>> import jax.numpy as jnp
      >>> from masksafe.testing import assert_mask_safe
      >>> x, mask = jnp.array([1.0, 2.0, 4.0]), jnp.array([1, 1, 0])
      >>> def mean(x, mask):
      ...     return jnp.sum(x * mask) / jnp.sum(mask)
      >>> assert_mask_safe(mean, x, mask, masked={0: mask == 0}, order=0)
      Traceback (most recent call last):
      ...
      AssertionError: A masked element is not gone.
        argument:   0, float32[3], 1 of 3 elements masked
        garbage:    nan
        transform:  eager
        derivative: value
        1 of 1 elements changed, the first at index ():
          1.5 with harmless values under the mask, nan with garbage
    """
    __tracebackhide__ = True
    _check_arguments(args, masked, order, transforms, empty)
    _trees.check_addressable(_OP, args=args, masked=dict(masked), empty=empty)
    rng = _trees.generator(seed)
    masks = {i: _masks_of(args[i], masked[i], f"masked[{i}]") for i in masked}
    if not any(mask.any() for mask in jax.tree.leaves(masks)):
        raise ValueError(message(_OP, "masked", "nothing that is True", "True where an element is masked"))
    call = _Call(args, masks, garbage, rng)
    call = call._replace(args=call.replaced(masks, lambda x, mask: _harmless(x, mask, rng)))
    leaves = call.masked_leaves(masks)
    if not any(map(call.kinds, leaves)):
        dtypes = ", ".join(dict.fromkeys(str(leaf.dtype) for leaf in leaves))
        raise ValueError(message(_OP, "garbage", f"{list(garbage or ())}", f"numbers that {dtypes} can hold"))
    probe = _probe(fn, call.args, output_mask, order, rng)
    short_probe = _probe(fn, call.args, output_mask, min(order, 1), rng)

    for transform in transforms:
        by_operation = transform == "disable_jit"
        run = _transformed(short_probe if by_operation else probe, transform)
        expected = run(call.args)
        if not allow_nan:
            _assert_no_nan(expected, transform)
        for filling in [call.worst_filling()] if by_operation else call.fillings():
            _assert_gone(run(filling.args), expected, call, filling, transform)
    if empty is not None:
        _assert_empty_is_safe(_probe(fn, empty, output_mask, min(order, 1), rng), call, empty)


# The quantities to compare: the value, and each derivative with respect to each argument.


class _Quantity(NamedTuple):
    number: int  # the first field: JAX sorts the keys of a dictionary, and values belong before derivatives
    derivative: str
    argument: int | None

    def __str__(self) -> str:
        return self.derivative + ("" if self.argument is None else f" with respect to argument {self.argument}")


Quantities = dict[_Quantity, Tree]


def _probe(
    fn: Callable[..., Tree], args: tuple[Any, ...], output_mask: Tree, order: int, rng: np.random.Generator
) -> Callable[..., Quantities]:
    """A function of `args` that returns every quantity to compare."""
    outputs = jax.eval_shape(fn, *args)
    if not jax.tree.leaves(outputs):
        raise ValueError(message(_OP, "fn", "no output", "an array or a pytree of arrays"))
    kept = _kept_outputs(outputs, output_mask)
    weights = random_like(outputs, rng)
    floats = [i for i, arg in enumerate(args) if jax.tree.leaves(only_floats(arg))]
    directions = random_like([only_floats(args[i]) for i in floats], rng)
    if not floats or not any(is_float(out) for out in jax.tree.leaves(outputs)):
        order = 0

    def probe(*args: Any) -> Quantities:
        def combination(chosen: list[Tree]) -> Any:
            new = {i: _trees.replace_floats(args[i], tree) for i, tree in zip(floats, chosen, strict=True)}
            return _trees.weighted_sum(fn(*_trees.replace_arguments(args, new)), weights, kept)

        def slope(chosen: list[Tree]) -> Any:
            return _trees.weighted_sum(jax.grad(combination)(chosen), directions)

        values = jax.tree.map(lambda out, keep: jnp.where(keep, out, jnp.zeros_like(out)), fn(*args), kept)
        quantities: Quantities = {_Quantity(0, "value", None): values}
        chosen = [jax.tree.map(jnp.asarray, only_floats(args[i])) for i in floats]
        derivatives: list[tuple[str, list[Tree]]] = []
        if order >= 1:
            derivatives += [("gradient", jax.grad(combination)(chosen))]
        if order >= 2:
            tangents = jax.tree.map(lambda x, v: jnp.asarray(v, x.dtype), chosen, directions)
            forward = jax.jvp(jax.grad(combination), (chosen,), (tangents,))[1]
            derivatives += [("Hessian-vector product (forward over reverse)", forward)]
            derivatives += [("Hessian-vector product (reverse over reverse)", jax.grad(slope)(chosen))]
        for n, (name, trees) in enumerate(derivatives, 1):
            quantities |= {_Quantity(n, name, i): tree for i, tree in zip(floats, trees, strict=True)}
        return quantities

    return probe


def _kept_outputs(outputs: Tree, output_mask: Tree) -> Tree:
    """Where each output is to be compared."""
    output_mask = jax.tree.broadcast(np.False_ if output_mask is None else output_mask, outputs)
    kept = jax.tree.map(lambda out, mask: ~_expanded(mask, out.shape, "output_mask"), outputs, output_mask)
    if all(mask.size and not mask.any() for mask in jax.tree.leaves(kept)):
        raise ValueError(message(_OP, "output_mask", "nothing that is False", "False where the output is compared"))
    return kept


def _transformed(probe: Callable[..., Quantities], transform: str) -> Callable[[tuple[Any, ...]], Quantities]:
    """`probe` as a function of a tuple of arguments, run under a transform of JAX; it returns NumPy arrays."""
    ways: dict[str, Callable[..., Quantities]] = {
        "eager": probe,
        "jit": jax.jit(probe),
        "vmap": jax.jit(lambda *args: jax.vmap(probe)(*jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), args))),
        "disable_jit": jax.disable_jit()(probe),
    }
    as_jax = lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf  # noqa: E731
    return lambda args: jax.tree.map(np.asarray, ways[transform](*jax.tree.map(as_jax, args)))


# Filling the masks.


class _Filling(NamedTuple):
    """Arguments with garbage under the masks of some of them."""

    filled: Sequence[int]
    garbage: str
    args: tuple[Any, ...]


Kinds = dict[str, np.ndarray]  # arrays of garbage, by name


class _Call(NamedTuple):
    """A call with harmless values under its masks, and what to put there instead."""

    args: tuple[Any, ...]
    masks: Mapping[int, Tree]
    garbage: Sequence[float] | None
    rng: np.random.Generator

    def masked_leaves(self, arguments: Iterable[int]) -> list[Any]:
        return [leaf for i in arguments for leaf, _ in self._masked(i)]

    def described(self, i: int) -> str:
        leaves = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf, _ in self._masked(i))
        masks = [mask for _, mask in self._masked(i)]
        return f"{i}, {leaves}, {sum(m.sum() for m in masks)} of {sum(m.size for m in masks)} elements masked"

    def _masked(self, i: int) -> list[tuple[Any, np.ndarray]]:
        """The leaves of an argument that have masked elements, with their masks."""
        pairs = zip(jax.tree.leaves(self.args[i]), jax.tree.leaves(self.masks[i]), strict=True)
        return [(leaf, mask) for leaf, mask in pairs if mask.any()]

    def replaced(self, arguments: Iterable[int], replace: Callable[[Any, np.ndarray], Any]) -> tuple[Any, ...]:
        """All arguments, with `replace` applied to the leaves of some of them and their masks."""
        of_masked = lambda leaf, mask: replace(leaf, mask) if mask.any() else leaf  # noqa: E731
        new = {i: jax.tree.map(of_masked, self.args[i], self.masks[i]) for i in arguments}
        return _trees.replace_arguments(self.args, new)

    def fillings(self) -> Iterator[_Filling]:
        """Every way to fill the masks: with each garbage in one argument at a time, with a mixture in all at once."""
        for i in self.masks:
            for kind in dict.fromkeys(kind for leaf in self.masked_leaves([i]) for kind in self.kinds(leaf)):
                yield self._filling([i], kind, operator.methodcaller("get", kind))
        yield self._filling([*self.masks], "a mixture of all kinds", self._mixture)

    def worst_filling(self) -> _Filling:
        """All masks filled with the first garbage of each dtype."""
        names = dict.fromkeys(kind for leaf in self.masked_leaves(self.masks) for kind in [*self.kinds(leaf)][:1])
        return self._filling([*self.masks], ", ".join(names), lambda kinds: next(iter(kinds.values())))

    def _filling(self, arguments: Sequence[int], name: str, choose: Callable[[Kinds], np.ndarray | None]) -> _Filling:
        def fill(leaf: np.ndarray, mask: np.ndarray) -> np.ndarray:
            kinds = self.kinds(leaf)
            chosen = choose(kinds) if kinds else None  # a dtype may have no such garbage
            return leaf if chosen is None else np.where(mask, chosen, leaf)

        return _Filling(arguments, name, self.replaced(arguments, fill))

    def _mixture(self, kinds: Kinds) -> np.ndarray:
        arrays = np.stack([*kinds.values()])
        drawn = self.rng.integers(len(arrays), size=arrays.shape[1:])
        return np.asarray(arrays[(drawn, *np.indices(drawn.shape))])

    def kinds(self, leaf: Any) -> Kinds:
        """The garbage that an array of this dtype can hold, as JAX has it: without 64 bits, unless they are enabled."""
        drawn: np.ndarray
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if dtype == np.bool_:
            values: Sequence[float] = (False, True)
            drawn = self.rng.integers(2, size=leaf.shape)
        elif is_float(leaf):
            extremes = jnp.finfo(dtype)
            usual = (np.nan, np.inf, -np.inf, float(extremes.max), float(extremes.min), 0.0)
            values = usual if self.garbage is None else self.garbage
            drawn = self.rng.normal(scale=100.0, size=leaf.shape)
        else:
            least, largest = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
            chosen = (least, largest, -1, -100, 0) if self.garbage is None else self.garbage
            values = [int(v) for v in chosen if np.isfinite(v) and v == int(v) and least <= v <= largest]
            drawn = self.rng.integers(least, largest, leaf.shape, dtype=dtype, endpoint=True)
        kinds = {str(value): np.full(leaf.shape, np.asarray(value).astype(dtype)) for value in values}
        return kinds | {"random numbers": drawn.astype(dtype)} if self.garbage is None else kinds


def _masks_of(arg: Tree, mask: Tree, name: str) -> Tree:
    """The masks of all leaves of an argument; without a mask nothing is masked."""
    if jax.tree_util.all_leaves([arg]):
        if isinstance(mask, Mapping):
            raise ValueError(message(_OP, name, f"a {type(mask).__name__}", "a mask, since the argument is an array"))
        return _expanded(False if mask is None else mask, np.shape(arg), name)
    if mask is None or isinstance(mask, bool):
        return jax.tree.map(lambda x: np.full(np.shape(x), bool(mask)), arg)
    children, structure = _children(arg)
    if isinstance(mask, Mapping) and isinstance(arg, Mapping):
        if unknown := [key for key in mask if key not in arg]:
            raise ValueError(message(_OP, name, f"the keys {unknown}", f"some of {[*arg]}, the keys of the argument"))
        of_children = [mask.get(path[0].key) for path, _ in children]
    else:
        masks, structure_of_masks = _children(mask)
        if structure_of_masks != structure:
            found = f"masks in another structure, {structure_of_masks}"
            raise ValueError(message(_OP, name, found, f"{structure}, that of the argument"))
        of_children = [child for _, child in masks]
    paths = [name + jax.tree_util.keystr(path) for path, _ in children]
    trees = (child for _, child in children)
    return jax.tree.unflatten(structure, map(_masks_of, trees, of_children, paths))


def _children(tree: Tree) -> tuple[list[tuple[Any, Tree]], Any]:
    """The children of a node, each with its path, and the structure that holds them."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda child: child is not tree)


def _expanded(mask: Any, shape: tuple[int, ...], argument: str) -> np.ndarray:
    mask = np.asarray(mask)
    if mask.dtype != np.bool_:
        raise ValueError(message(_OP, argument, f"dtype {mask.dtype}", "bool, True where masked"))
    try:
        return np.broadcast_to(mask, shape)
    except ValueError as error:
        expected = f"a shape that broadcasts to {shape}"
        raise ValueError(message(_OP, argument, f"shape {mask.shape}", expected)) from error


def _harmless(leaf: Any, mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`leaf` with unmasked values, for which the function is well defined, under its mask."""
    filled = np.array(leaf)
    unmasked = filled[~mask]
    filled[mask] = rng.choice(unmasked, int(mask.sum())) if unmasked.size else np.zeros((), filled.dtype)
    return filled


# The assertions.


def _assert_no_nan(quantities: Quantities, transform: str) -> None:
    __tracebackhide__ = True
    for quantity, tree in quantities.items():
        for path, array in jax.tree_util.tree_leaves_with_path(tree):
            wrong = np.isnan(array)
            if wrong.any():
                place, index = jax.tree_util.keystr(path), _trees.first_index(wrong)
                raise AssertionError(
                    "NaN without garbage: with harmless values under the mask, a result is NaN.\n"
                    f"  transform:  {transform}\n"
                    f"  derivative: {quantity}{place if quantity.argument is not None else f' of output{place}'}\n"
                    f"  {wrong.sum()} of {wrong.size} elements, the first at index {index}\n"
                    "  To see what made it, run masksafe.testing.nonfinite_report. If it is meant: allow_nan=True."
                )


def _assert_gone(actual: Quantities, expected: Quantities, call: _Call, filling: _Filling, transform: str) -> None:
    __tracebackhide__ = True
    for quantity, tree in actual.items():
        for leak in _leaks(quantity, tree, expected[quantity], call):
            arguments = "; ".join(map(call.described, filling.filled))
            raise AssertionError(
                "A masked element is not gone.\n"
                f"  argument:   {arguments}\n"
                f"  garbage:    {filling.garbage}\n"
                f"  transform:  {transform}\n"
                f"  derivative: {quantity}\n"
                f"  {leak}{_hint(call, filling)}"
            )


def _hint(call: _Call, filling: _Filling) -> str:
    """For masked integers, of which many programs compute their mask: that cannot be told from a leak."""
    if not any(jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in call.masked_leaves(filling.filled)):
        return ""
    return (
        "\n  The garbage may have changed a mask that is computed from these integers (ids != 0): if so, pass the mask "
        "as an argument of its own."
    )


def _leaks(quantity: _Quantity, actual: Tree, expected: Tree, call: _Call) -> Iterator[str]:
    """A text for each array of derivatives that are not 0 under their mask, and for each that has changed."""
    if quantity.argument is not None and quantity.argument in call.masks:
        arg, masks = call.args[quantity.argument], call.masks[quantity.argument]
        masks = jax.tree.map(lambda leaf, mask: mask if is_float(leaf) else None, arg, masks)
        for array, leaf_mask in zip(jax.tree.leaves(actual), jax.tree.leaves(masks), strict=True):
            mask = np.broadcast_to(leaf_mask, array.shape)
            wrong = mask & (array != 0)
            if wrong.any():
                index, name = _trees.first_index(wrong), quantity.derivative.split(" (")[0]
                place = f"the first at index {index}: {array[index]}"
                yield f"{wrong.sum()} of {mask.sum()} masked elements have a {name} that is not 0, {place}"
    for array, reference in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        wrong = _trees.bits(array) != _trees.bits(reference)
        if wrong.any():
            index = _trees.first_index(wrong)
            yield (
                f"{wrong.sum()} of {wrong.size} elements changed, the first at index {index}:\n"
                f"    {reference[index]} with harmless values under the mask, {array[index]} with garbage"
            )


def _assert_empty_is_safe(probe: Callable[..., Quantities], call: _Call, empty: tuple[Any, ...]) -> None:
    """Asserts that a call with `empty` is finite, and that arrays with masks in `call` influence nothing there."""
    __tracebackhide__ = True
    run = _transformed(probe, "jit")
    expected = run(empty)
    for quantity, tree in expected.items():
        for array in jax.tree.leaves(tree):
            wrong = ~np.isfinite(np.asarray(array, np.float64))
            if wrong.any():
                index = _trees.first_index(wrong)
                raise AssertionError(
                    "With everything masked, a result is not finite.\n"
                    f"  derivative: {quantity}\n"
                    f"  {wrong.sum()} of {wrong.size} elements, the first at index {index}: {array[index]}"
                )
    masks = {i: jax.tree.map(lambda x, m: np.full(np.shape(x), m.any()), empty[i], call.masks[i]) for i in call.masks}
    everything = call._replace(args=empty, masks=masks)
    everything = everything._replace(args=everything.replaced(masks, lambda x, _: np.asarray(x)))
    filling = everything.worst_filling()
    try:
        _assert_gone(run(filling.args), expected, everything, filling, "jit")
    except AssertionError as error:
        raise AssertionError(f"In the call of `empty`, which should mask everything: {error}") from None


def _check_arguments(
    args: Tree, masked: Mapping[int, Tree], order: int, transforms: Sequence[str], empty: Tree
) -> None:
    if not isinstance(masked, Mapping):
        found, expected = f"type {type(masked).__name__}", "a mapping from positions of arguments to masks"
        raise TypeError(message(_OP, "masked", found, expected, "For a mask of the first argument write {0: mask}."))
    if order not in (0, 1, 2):
        raise ValueError(message(_OP, "order", f"value {order}", "0, 1 or 2"))
    if not transforms or not set(transforms) <= set(_TRANSFORMS):
        raise ValueError(message(_OP, "transforms", f"{list(transforms)}", f"some of {_TRANSFORMS}"))
    if not masked or not set(masked) <= set(range(len(args))):
        expected = f"positions of arguments, in [0, {len(args)})"
        raise ValueError(message(_OP, "masked", f"keys {sorted(masked)}", expected))
    if empty is not None and len(empty) != len(args):
        raise ValueError(message(_OP, "empty", f"{len(empty)} arguments", f"{len(args)}, as many as in a call"))
