"""Whether sequences packed into rows, or padded, give what each of them gives alone."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from masksafe._core.arguments import as_index_array, as_size, message
from masksafe._reductions import MaskedMean
from masksafe._reductions._masked_mean import HINT_OF_ARRAYS, check_returned
from masksafe.testing import _closeness, _trees

_OP = "assert_packing_safe"

# Compiling is most of the time, and these optimisations of a CPU's programs half of that.
_FAST_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# In place of the number of a sequence.
_PADDING = -1
_WHOLE_BATCH = -2


def assert_packing_safe(
    fn: Callable[..., Any],
    params: Any,
    sequences: Sequence[Any],
    *,
    max_length: int | None = None,
    packs: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> None:
    """Asserts that sequences packed into rows, or padded, give what each of them gives alone.

    Each sequence alone, in a row without padding, is compared with these layouts: padded right, padded left, packed in
    one row, packed in two rows, and packed in another order. Padding holds tokens of the sequences, drawn at random.
    The function may return one of

    * floats per token, `[rows, time]` or with more axes behind, such as losses or logits. They are compared sequence by
      sequence, and so is the gradient of their sum. At padding they may be anything;
    * a `masksafe.MaskedMean` of scalars. The value, its gradient and the count are those of the whole batch, compared
      with those of the sequences alone added up.

    Args:
      fn: a function of `(params, tokens, segment_ids, positions)` without randomness, run under `jax.jit`. The last
        three are int32, `[rows, time]`. The sequences of a row have the segment ids 1, 2, and so on, and positions that
        count from 0 in each; padding has 0 in both. A model that knows padding by its token begins with
        `tokens = jnp.where(segment_ids > 0, tokens, pad)`.
      params: a pytree. Gradients are taken with respect to its arrays of floats.
      sequences: two or more vectors of integers, best three of different lengths. Each length compiles a program.
      max_length: the length of padded and packed rows. By default all sequences fit into one, with 1 to 8 of padding.
      packs: if False, a row has one sequence: the layouts are the padded ones, and the segment ids are a mask.
      rtol: the allowed error of an element relative to its size. By default 1e-9 for float64, 1e-4 for float32, 1e-2
        for float16 and 5e-2 for bfloat16, whichever of these is the narrowest among parameters and values. Set it for a
        function that computes in 16 bits between them. For float32 on a GPU or a TPU, put
        `jax.default_matmul_precision("highest")` around the call.
      atol: the absolute error allowed on top. By default `rtol` times the largest element of the array, plus a few
        roundings of the largest of all gradients, or of all values and parameters.
      seed: the seed of the tokens in padding.

    Raises:
      AssertionError: if a layout changes a result. The text names the first such layout and its first sequence, what
        differs, where, and what is known of the cause. Also if a change of a token changes nothing, since then nothing
        is tested; and if a sequence alone gives NaN.
      ValueError, TypeError: also if `fn` returns something else, such as a mean that is already divided.

    Example:
      >>> import jax.numpy as jnp
      >>> from masksafe.testing import assert_packing_safe
      >>> def score(params, tokens, segment_ids, positions):
      ...     place = jnp.arange(tokens.shape[1])  # should be positions
      ...     return params[tokens] * (1 + place)
      >>> assert_packing_safe(score, jnp.array([0.5, 1.0, 2.0]), [[1, 2], [2, 0, 1]])
      Traceback (most recent call last):
      ...
      AssertionError: A layout changes the result.
        layout:   padded left, 2 rows of 8 tokens
        sequence: 0, of 2 tokens
        differs:  value
        2 of 2 elements differ, the first at index (0,):
          1.0 alone, 7.0 in this layout
        No other token changes it: look at positions, and at the shape of the batch.
        Layouts that agree: padded right.
    """
    __tracebackhide__ = True
    _trees.check_tolerances(_OP, rtol=rtol, atol=atol)
    _trees.check_addressable(_OP, params=params)
    vectors = _as_vectors(sequences)
    layouts = _layouts(vectors, _length_of_rows(vectors, max_length, packs), packs, _trees.generator(seed))
    separate = [_laid_out("alone", vectors, [[n]], vector.size) for n, vector in enumerate(vectors)]
    program = _Program.of(fn, params, separate[0])
    alone = program.results(separate)
    tolerance = _Tolerance.of(program, alone, rtol, atol)
    _assert_no_nan(alone)
    _assert_tokens_matter(program, separate, tolerance)
    _assert_layouts_agree(program, layouts, alone, tolerance)


# The layouts.


class _Layout(NamedTuple):
    name: str
    tokens: np.ndarray  # each [rows, time]
    segment_ids: np.ndarray
    positions: np.ndarray
    owners: np.ndarray  # the number of the sequence that a token is of, or _PADDING

    def __str__(self) -> str:
        rows, length = self.tokens.shape
        return f"{self.name}, {rows} row{'s' * (rows > 1)} of {length} tokens"

    @property
    def batch(self) -> tuple[np.ndarray, ...]:
        return self.tokens, self.segment_ids, self.positions

    def with_others(self, where: np.ndarray) -> "_Layout":
        """The layout with other tokens at some places, of those that it has, or one that it has not."""
        known = np.unique(self.tokens)
        known = known if known.size > 1 else np.append(known, known[0] - 1 if known[0] else 1)
        others = known[(np.searchsorted(known, self.tokens) + 1) % known.size]
        return self._replace(tokens=np.where(where, others, self.tokens))


def _layouts(vectors: list[np.ndarray], length: int, packs: bool, rng: np.random.Generator) -> list[_Layout]:
    numbers = [*range(len(vectors))]
    padded, half = [[n] for n in numbers], (len(numbers) + 1) // 2
    rows = {"padded right": padded, "padded left": padded}
    if packs:
        rows |= {"packed in one row": [numbers]}
        # Two sequences would be in a row each, as they are if padded.
        rows |= {"packed in two rows": [numbers[:half], numbers[half:]]} if len(numbers) > 2 else {}
        rows |= {"packed in another order": [numbers[::-1]]}
    tokens = np.concatenate(vectors)
    return [_laid_out(name, vectors, of, length, rng.choice(tokens, (len(of), length))) for name, of in rows.items()]


def _laid_out(
    name: str, vectors: list[np.ndarray], rows: list[list[int]], length: int, padding: np.ndarray | None = None
) -> _Layout:
    """The sequences of each row, one behind the other, and what padding holds behind them, or before them."""
    tokens, segment_ids, positions, owners = np.zeros((4, len(rows), length), np.int32)
    layout = _Layout(name, tokens, segment_ids, positions, owners + _PADDING)
    if padding is not None:
        layout.tokens[:] = padding
    for row, numbers in enumerate(rows):
        start = length - sum(vectors[n].size for n in numbers) if name == "padded left" else 0
        for segment, n in enumerate(numbers, 1):
            end = start + vectors[n].size
            for array, values in zip(layout[1:], (vectors[n], segment, np.arange(end - start), n), strict=True):
                array[row, start:end] = values
            start = end
    return layout


# Running.

# What is compared, by name, of each sequence, or of the batch as a whole.
_Results = dict[int, dict[str, np.ndarray]]


class _Program(NamedTuple):
    """The function with its gradient, compiled for each shape of a batch."""

    run: Callable[..., Any]
    floats: dict[str, Any]  # the parameters by which to differentiate, by name
    others: dict[str, Any]  # the other arrays among them
    is_mean: bool

    @classmethod
    def of(cls, fn: Callable[..., Any], params: Any, example: _Layout) -> "_Program":
        paths, tree = jax.tree_util.tree_flatten_with_path(params)
        leaves = {f"params{jax.tree_util.keystr(path)}": leaf for path, leaf in paths}
        arrays = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, jax.Array | np.ndarray | np.generic)}
        floats = {name: leaf for name, leaf in arrays.items() if _trees.is_float(leaf)}
        others = {name: leaf for name, leaf in arrays.items() if name not in floats}

        def call(floats: dict[str, Any], others: dict[str, Any], batch: tuple[Any, ...]) -> Any:
            return fn(jax.tree.unflatten(tree, [*(leaves | others | floats).values()]), *batch)

        def sum_of_tokens(floats: dict[str, Any], others: dict[str, Any], batch: tuple[Any, ...], where: Any) -> Any:
            values = call(floats, others, batch)
            _check_shape(values.shape, (*batch[0].shape, *axes))
            where = where.reshape(where.shape + (1,) * len(axes))
            return jnp.sum(jnp.where(where, values, 0), dtype=jnp.promote_types(values.dtype, jnp.float32)), values

        def part_of_mean(floats: dict[str, Any], others: dict[str, Any], batch: tuple[Any, ...], whole: Any) -> Any:
            """Its gradient is what this part adds to the gradient of the mean of the whole batch."""
            part = call(floats, others, batch)
            return (part.total - whole["value"] * part.count) / whole["count"], part

        returned = jax.eval_shape(call, floats, others, example.batch)
        _check_returned(returned, example.tokens.shape)
        is_mean, axes = isinstance(returned, MaskedMean), getattr(returned, "shape", ())[2:]
        value_and_grad = jax.value_and_grad(part_of_mean if is_mean else sum_of_tokens, has_aux=True)
        options = _FAST_TO_COMPILE if jax.default_backend() == "cpu" else None
        return cls(jax.jit(value_and_grad, compiler_options=options), floats, others, is_mean)

    def results(self, layouts: Sequence[_Layout]) -> _Results:
        """The results of each sequence in the layouts; of a mean those of all layouts as one batch."""
        if self.is_mean:
            return {_WHOLE_BATCH: self._of_mean(layouts)}
        return {n: self._of_tokens(x, x.owners == n) for x in layouts for n in np.unique(x.owners) if n != _PADDING}

    def _of_tokens(self, layout: _Layout, where: np.ndarray) -> dict[str, np.ndarray]:
        (_, values), gradients = self.run(self.floats, self.others, layout.batch, where)
        return {"value": np.asarray(values)[where]} | _named("gradient of the sum of its values", gradients)

    def _of_mean(self, layouts: Sequence[_Layout]) -> dict[str, np.ndarray]:
        def parts(value: Any, count: Any) -> list[Any]:
            whole = {"value": np.float64(value), "count": np.float64(count)}
            return [self.run(self.floats, self.others, layout.batch, whole) for layout in layouts]

        mean = MaskedMean.sum(part for (_, part), _ in parts(0, 1))
        gradients = [gradient for _, gradient in parts(mean.value, mean.count if mean.count else 1)]
        added = {name: sum(_trees.as_double(gradient[name]) for gradient in gradients) for name in self.floats}
        return {"value": np.asarray(mean.value), "count": np.asarray(mean.count)} | _named("gradient", added)


def _is_gradient(name: str) -> bool:
    return name.startswith("gradient")


def _named(kind: str, gradients: dict[str, Any]) -> dict[str, np.ndarray]:
    return {f"{kind} with respect to {name}": np.asarray(gradient) for name, gradient in gradients.items()}


# Comparing.


class _Tolerance(NamedTuple):
    relative: float
    absolute: float | None  # None: so much of the largest element, and the rounding
    rounding_of_values: float
    rounding_of_gradients: float

    @classmethod
    def of(cls, program: _Program, alone: _Results, rtol: float | None, atol: float | None) -> "_Tolerance":
        params = [np.asarray(leaf) for leaf in program.floats.values()]
        values = [results["value"] for results in alone.values()]
        gradients = [array for results in alone.values() for name, array in results.items() if _is_gradient(name)]
        dtypes = _closeness.float_dtypes(params + values)
        relative = _closeness.default_relative(dtypes) if rtol is None else rtol
        largest = [max(map(_closeness.largest, arrays), default=0.0) for arrays in (params + values, gradients)]
        rounding = _closeness.widest_rounding(dtypes)
        number = 2 if rounding > 1e-4 else 16  # 16 bits are summed in float32
        return cls(relative, atol, *(number * rounding * size for size in largest))

    def wrong(self, name: str, found: np.ndarray, expected: np.ndarray) -> np.ndarray:
        """Which elements differ."""
        error, size = _closeness.distance_and_size(found, expected)
        rounding = self.rounding_of_gradients if _is_gradient(name) else self.rounding_of_values
        of_largest = self.relative * max(map(_closeness.largest, (found, expected))) + rounding
        absolute = of_largest if self.absolute is None else self.absolute
        return np.asarray(error > absolute + self.relative * size)

    def differences(self, found: _Results, expected: _Results) -> list[tuple[int, str]]:
        """The sequences that differ, with the names of what differs."""
        every = [(n, name) for n, results in found.items() for name in results]
        return [(n, name) for n, name in every if self.wrong(name, found[n][name], expected[n][name]).any()]


def _assert_no_nan(alone: _Results) -> None:
    __tracebackhide__ = True
    for n, results in alone.items():
        for name, array in results.items():
            if np.isnan(_trees.as_double(array)).any():
                where = f"  sequence: {_describe(n, results)}\n  NaN in:   {name}"
                raise AssertionError(f"Without padding and packing the result is NaN already.\n{where}")


def _assert_tokens_matter(program: _Program, separate: list[_Layout], tolerance: _Tolerance) -> None:
    """Asserts that some other token would be noticed: what depends on none is the same in every layout."""
    __tracebackhide__ = True
    for layout in separate:
        before = program.results([layout])
        for place in range(layout.tokens.size):
            after = program.results([layout.with_others(np.arange(layout.tokens.size) == place)])
            if any(name == "value" for _, name in tolerance.differences(after, before)):
                return
    raise AssertionError(
        "Changing one token changes nothing, so nothing is tested.\n"
        "  The function does not depend on its tokens, or by less than the tolerances allow."
    )


def _assert_layouts_agree(program: _Program, layouts: list[_Layout], alone: _Results, tolerance: _Tolerance) -> None:
    __tracebackhide__ = True
    agreeing, wrong = [], []
    for layout in layouts:
        found = program.results([layout])
        differences = tolerance.differences(found, alone)
        if differences:
            wrong.append((layout, found, *differences[0]))
        else:
            agreeing.append(layout.name)
    if not wrong:
        return
    layout, found, n, name = wrong[0]
    here, expected = found[n][name], alone[n][name]
    differing = tolerance.wrong(name, here, expected)
    index = _trees.first_index(differing)
    raise AssertionError(
        "A layout changes the result.\n"
        f"  layout:   {layout}\n"
        f"  sequence: {_describe(n, alone[n])}\n"
        f"  differs:  {name}\n"
        f"  {differing.sum()} of {differing.size} elements differ, the first at index {index}:\n"
        f"    {expected[index]} alone, {here[index]} in this layout\n"
        f"  {_influences(program, layout, n, name, here, tolerance) or _reason(name, found[n], alone[n])}\n"
        f"  Layouts that agree: {', '.join(agreeing) or 'none'}."
    )


def _describe(n: int, results: dict[str, np.ndarray]) -> str:
    return "all, as one mean" if n == _WHOLE_BATCH else f"{n}, of {len(results['value'])} tokens"


def _influences(program: _Program, layout: _Layout, n: int, name: str, here: np.ndarray, tolerance: _Tolerance) -> str:
    """Which tokens change what they should not: those in padding, or in other sequences."""
    is_padding = layout.owners == _PADDING
    places = {"What padding holds changes it.": is_padding}
    if n != _WHOLE_BATCH:
        places |= {"Tokens of other sequences change it.": ~is_padding & (layout.owners != n)}
    after = {text: program.results([layout.with_others(where)])[n][name] for text, where in places.items()}
    return " ".join(text for text, result in after.items() if tolerance.wrong(name, result, here).any())


def _reason(name: str, found: dict[str, np.ndarray], alone: dict[str, np.ndarray]) -> str:
    """What is known if no token changes what it should not."""
    if np.isnan(_trees.as_double(found[name])).any():
        return "It is NaN, whatever padding holds: masksafe.testing.nonfinite_report says where that begins."
    if "count" not in alone:
        return "No other token changes it: look at positions, and at the shape of the batch."
    if found["count"] != alone["count"]:
        return f"The count is {alone['count']:g} alone, added up, and {found['count']:g} in this layout."
    return "The count is that of the sequences alone. Values per token would tell which of them differs."


# The arguments, and what the function returns.


def _as_vectors(sequences: Sequence[Any]) -> list[np.ndarray]:
    vectors = []
    for n, sequence in enumerate(sequences):
        argument, shape = f"sequences[{n}]", np.shape(sequence)
        if len(shape) != 1 or not shape[0]:
            raise ValueError(message(_OP, argument, f"shape {shape}", "a vector of one or more tokens"))
        vectors.append(np.asarray(as_index_array(_OP, argument, sequence), np.int32))
    if len(vectors) < 2:
        raise ValueError(message(_OP, "sequences", f"{len(vectors)}", "two or more, of different lengths"))
    return vectors


def _length_of_rows(vectors: list[np.ndarray], max_length: int | None, packs: bool) -> int:
    sizes = [vector.size for vector in vectors]
    least = sum(sizes) if packs else max(sizes)
    if max_length is None:
        return least + 8 - least % 8
    if as_size(_OP, "max_length", max_length, 1) < least:
        expected = f"{least} or more, " + ("so that all sequences fit into one row" if packs else "as the longest has")
        raise ValueError(message(_OP, "max_length", f"value {max_length}", expected, "Give shorter sequences."))
    return max_length


def _check_returned(returned: Any, shape: tuple[int, ...]) -> None:
    """Refuses anything but floats per token and a mean that is not yet divided."""
    hint = HINT_OF_ARRAYS
    if isinstance(returned, MaskedMean):
        check_returned(_OP, returned)
    elif not hasattr(returned, "shape"):
        found = f"a function that returns {type(returned).__name__}"
        raise TypeError(message(_OP, "fn", found, "floats per token, or a MaskedMean", hint))
    elif not _trees.is_float(returned):
        found = f"a function that returns dtype {returned.dtype}"
        raise TypeError(message(_OP, "fn", found, "floats per token, or a MaskedMean"))
    elif returned.shape[:2] != shape:
        found = f"a function that returns shape {returned.shape} for tokens {shape}"
        raise ValueError(message(_OP, "fn", found, "floats per token [rows, time, ...], or a MaskedMean", hint))


def _check_shape(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        found = f"a function that returns shape {shape} for tokens {expected[:2]}"
        raise ValueError(message(_OP, "fn", found, f"{expected}, as of a sequence alone"))
