"""The table of ops: how each is called, with which arrays, what its mask hides of them, and what it has to compute.

Every rule of the contract is a file of tests beside this one, which goes through the table. A new op is a new row:

    "kl_divergence": _of_rows(
        losses.kl_divergence,
        of.divergence,
        {"log_predictions": masked(np.log(P)), "targets": masked(Q)},
        stands_for="rows of two distributions",
    ),

is a function, its definition in NumPy for a row without masked elements, and its arguments by name, each with what the
mask hides of it. `stands_for` says what this op has that no other row has: tests that compile a program of their own
take only such ops, and those with `by_default` run by default.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import definitions as of
import jax
import jax.numpy as jnp
import numpy as np

import masksafe
from masksafe import losses
from masksafe._core.linear import without_sign_of_zero


class Argument(NamedTuple):
    """An array, and what a mask of elements `[rows, ...]` or of rows `[rows]` hides of it."""

    array: np.ndarray
    kind: str
    is_constant: bool = False  # of a float, whether it has no gradient


def masked(array: np.ndarray, **options: Any) -> Argument:
    """`[rows, ...]`, of which the mask hides what is masked."""
    return Argument(array, "row", **options)


def of_row(array: np.ndarray) -> Argument:
    """`[rows, ...]`, of which the mask hides what belongs to an empty row."""
    return Argument(array, "of row")


def label(array: np.ndarray) -> Argument:
    """`[rows]`, the same; the class of a row, or the number of its segment."""
    return Argument(array, "label")


def along(array: np.ndarray, **options: Any) -> Argument:
    """Of the shape of a row; the mask hides what is masked in all rows."""
    return Argument(array, "along", **options)


def whole(array: np.ndarray) -> Argument:
    """Of which the mask hides nothing."""
    return Argument(array, "whole")


class Op(NamedTuple):
    """An op with a mask and arrays, all of which are arguments of its programs."""

    fn: Callable[..., Any]  # of the mask, the arguments by name, and options
    arguments: dict[str, Argument]
    where: np.ndarray
    definition: Callable[..., tuple[Any, ...]]  # of the mask and the arrays
    nothing: tuple[float, ...] = (0.0,)  # the outputs of an empty row
    has_axis: bool = False  # whether `fn` takes the axis of the elements of a row, the last
    may_be_unmasked: bool = True  # whether `fn` takes None for a mask
    outputs: tuple[str, ...] = ("row",)  # what each belongs to: a "row", an "element" of the mask, or the "whole" call
    hidden: Callable[..., list[np.ndarray]] | None = None  # by the mask, if the kinds do not tell
    classes: int = 0  # among which labels are
    weights: str = ""  # the argument whose 0 masks an element
    masked_apart: str = ""  # the "row" or "element" that has derivatives even if its weights are 0
    name: str = ""  # of the function
    stands_for: str = ""  # the loop, layout or rule that this op has and no other row has
    by_default: bool = False  # whether its tests run by default

    def call(self, where: Any, *arrays: Any, **options: Any) -> Any:
        return self.fn(where, **{**dict(zip(self.arguments, arrays, strict=True)), **options})

    @property
    def args(self) -> tuple[np.ndarray, ...]:
        return tuple(a.array for a in self.arguments.values())

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(a.kind for a in self.arguments.values())

    @property
    def floats(self) -> list[int]:
        """The arguments that have gradients."""
        given = enumerate(self.arguments.values())
        return [i for i, a in given if a.array.dtype.kind == "f" and not a.is_constant]

    @property
    def has_rows(self) -> bool:
        """Whether all outputs belong to a row, as the first axis numbers them."""
        return "whole" not in self.outputs

    def hides(self, where: np.ndarray, shapes: Any = None) -> list[np.ndarray]:
        """What a mask hides of each argument, maybe in other shapes."""
        if self.hidden is not None:
            return self.hidden(where)
        shapes = [a.shape for a in self.args] if shapes is None else shapes
        return [_hidden(kind, where, shape) for kind, shape in zip(self.kinds, shapes, strict=True)]


def _hidden(kind: str, where: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    gone = {
        "row": lambda: ~where,
        "of row": lambda: ~where.any(tuple(range(1, where.ndim))),
        "label": lambda: ~where.any(tuple(range(1, where.ndim))),
        "along": lambda: ~where.any(0),
        "whole": lambda: np.zeros((), bool),
    }[kind]()
    return np.broadcast_to(gone.reshape(*gone.shape, *[1] * (len(shape) - gone.ndim)), shape)


# Arrays. Six rows of four elements: of the second nothing is left, of the third everything.

RNG = np.random.default_rng(0)
ROWS, CLASSES = 6, 4


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def distributions(*shape: int) -> np.ndarray:
    return RNG.dirichlet(np.full(shape[-1], 3.0), shape[:-1]).astype(np.float32)


X, Y, Z, P, Q = *(floats(ROWS, CLASSES) for _ in range(3)), *(distributions(ROWS, CLASSES) for _ in range(2))
LABELS = np.array([0, 3, 2, 1, 1, 3], np.int32)
BITS = (RNG.random((ROWS, CLASSES)) < 0.5).astype(np.float32)
SIGNS = 2 * BITS - 1
WEIGHTS = RNG.random((ROWS, CLASSES)).astype(np.float32) + np.float32(0.1)
SCALE, BIAS = floats(2, CLASSES)
TALL = np.concatenate([X, Y], 1)
ELEMENTS = RNG.random((ROWS, CLASSES)) < 0.6
ELEMENTS[1], ELEMENTS[2], ELEMENTS[:, 0] = False, True, [1, 0, 1, 0, 1, 1]
ELEMENTS[np.arange(ROWS) != 1, LABELS[np.arange(ROWS) != 1]] = True
SEVERAL_LABELS = np.stack([LABELS, np.where(ELEMENTS[:, 0], 0, LABELS)], 1)
COLUMNS = ELEMENTS & (np.arange(CLASSES) != 2)  # an element that is masked in all rows
SOME_POSITIONS = np.concatenate([ELEMENTS, ELEMENTS[::-1] & ELEMENTS.any(1, keepdims=True)], 1)
SOME_ROWS = np.array([True, False, True, True, False, True])
FEATURES, KERNEL, TARGET_FEATURES, TARGET_KERNEL = floats(ROWS, 3), floats(3, 5), floats(ROWS, 2), floats(2, 5)
PIXELS, TRUTH = floats(3, 4, 3), np.eye(3, dtype=np.float32)[np.array([[0, 1, 0, 2], [1, 1, 2, 0], [2, 1, 0, 1]])]
SOME_PIXELS = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]], bool)
FRAMES, SOME_FRAMES = floats(3, 4, 3), np.array([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 1]], bool)
TEXTS = np.array([[1, 2], [2, 1], [2, 2]], np.int32)
# Rows of segments: of the second only what is masked is left, the others are empty. Experts of tokens; -1 is dropped.
SEGMENT_IDS, SEGMENTS_OF_ROWS = np.array([0, 1, 2, 0, 2, 0], np.int32), 5
DOCUMENTS = np.array([[7, -1, 7, -1], [0, 0, 1, 1], [2, 2, 2, 3], [0, 1, 2, 3], [5, 5, 5, 5], [1, 0, 1, 0]], np.int32)
PAIR_IDS = np.array([0, 1, 0, 2, 1, 3], np.int32)
EXPERTS = np.array([[0, 1], [2, 3], [3, -1], [1, 0], [0, 2], [2, 1]], np.int32)
# The ids of five classes of eight, and of four of five, in any order, some of them twice.
KEPT_IDS = np.array(
    [[0, 1, 2, 3, 6], [6, 3, 2, 1, 0], [2, 6, 0, 1, 3], [1, 0, 3, 6, 2], [3, 2, 6, 0, 1], [6, 0, 1, 2, 3]], np.int32
)
KEPT_IDS = np.concatenate([KEPT_IDS, np.array([[-1, 2], [0, -1], [-1, -1], [3, 3], [1, -1], [2, 6]], np.int32)], 1)
KEPT_OF_FIVE = np.where(KEPT_IDS == 6, -1, KEPT_IDS)
TOP_CLASSES = np.array([[1, 4], [0, 3], [4, 2], [2, 1], [3, 0], [0, 1]], np.int32)

# Of attention. Query 0 of the first sample sees no key, no query sees its key 2, and each kind of mask hides a pair
# that no other one hides. The numbers have 32 bits, since JAX leaves those of an array that a function closes over as
# they were when it was traced with 64 bits.
B, T, S, HEADS = 2, 4, 6, 2
PAIRS = np.ones((B, T, S), bool)
PAIRS[0, 0], PAIRS[0, :, 2], PAIRS[0, 1, 4], PAIRS[1] = False, False, False, False
LENGTHS = {"query_seq_lengths": np.int32([4, 3]), "key_value_seq_lengths": np.int32([5, 4])}
IN_LENGTHS = (np.arange(T) < [[4], [3]])[:, :, None] & (np.arange(S) < [[5], [4]])[:, None]
SEGMENTS = {
    "query_segment_ids": np.int32([[0, 0, 0, 0], [7, 7, 7, 2]]),
    "key_value_segment_ids": np.int32([[0, 5, 0, 0, 0, 0], [9, 7, 7, 7, 2, 2]]),
}
IN_SEGMENTS = SEGMENTS["query_segment_ids"][:, :, None] == SEGMENTS["key_value_segment_ids"][:, None]
POSITIONS = {
    "query_positions": np.int32([[2, 3, 4, 5]]),
    "key_positions": np.int32([[0, 1, 2, 3, 4, 5], [1, 0, 2, 3, 4, 5]]),
}
QUERY_AT, KEY_AT = POSITIONS["query_positions"][:, :, None], POSITIONS["key_positions"][:, None]
BEHIND = QUERY_AT - KEY_AT
ONE_QUERY = np.array([[[1, 1, 0, 1, 0]], [[0, 0, 0, 0, 0]]], bool)
ONE_KEY = np.array([[[1], [0], [1]], [[0], [0], [0]]], bool)
PARTS = np.array([[1, 0, 1], [1, 0, 0]], bool)[:, :, None] & np.ones(2, bool)


# Of the variants of losses.

LOSS_RNG = np.random.default_rng(1)
CLASS_BIAS, TARGET_BIAS = LOSS_RNG.normal(size=(2, 5)).astype(np.float32)
TOKEN_WEIGHTS, CLASS_WEIGHTS = (LOSS_RNG.uniform(0.2, 2, n).astype(np.float32) for n in (ROWS, 5))
SOME_CLASSES = np.array([True, True, False, True, True])
PADDED = np.arange(5) < 4  # the last class is padding of the vocabulary
GROUPS, MATRICES = np.array([3, 1, 0, 3, 4, 0], np.int32), LOSS_RNG.normal(size=(5, CLASSES, 3)).astype(np.float32)
SMOOTHED, OF_EACH = {"label_smoothing": 0.1, "z_loss": 0.01}, {"reduction": "none", "block_size": 2}

# The arrays of several ops.
COMPARED = {"predictions": masked(X), "targets": masked(Y)}
DISTRIBUTED = {"logits": masked(X), "labels": masked(P)}
DISTRIBUTIONS = {"log_predictions": masked(np.log(P)), "targets": masked(Q)}
LABELLED = {"logits": masked(X), "labels": label(LABELS)}
SCORED = {"scores": masked(X), "labels": label(LABELS)}
LAYER = {"features": masked(FEATURES), "kernel": whole(KERNEL), "labels": label(LABELS)}
LAYER_WITH_WEIGHTS = {
    **{"features": masked(FEATURES), "kernel": whole(KERNEL), "bias": whole(CLASS_BIAS)},
    **{"weights": masked(TOKEN_WEIGHTS), "labels": label(LABELS)},
}
LAYERS = {
    **{"features": masked(FEATURES), "kernel": whole(KERNEL)},
    **{"target_features": masked(TARGET_FEATURES), "target_kernel": whole(TARGET_KERNEL)},
}
TOP_K = {
    **{"features": masked(FEATURES), "kernel": whole(KERNEL)},
    **{"target_log_probs": masked(np.log(P[:, :2]), is_constant=True), "target_classes": masked(TOP_CLASSES)},
}


# The rows.


def _of_elements(
    op: Callable[..., Any], formula: Callable[..., Any], arguments: dict[str, Argument], **others: Any
) -> Op:
    return Op(_with_where(op), arguments, ELEMENTS, of.elementwise(formula), outputs=("element",), **others)


def _of_rows(
    op: Callable[..., Any],
    formula: Callable[..., Any],
    arguments: dict[str, Argument],
    where: np.ndarray = ELEMENTS,
    nothing: tuple[float, ...] = (0.0,),
    keeps_row: bool = False,
    **others: Any,
) -> Op:
    """An op that has an axis, unless it says otherwise."""
    kinds = tuple(a.kind for a in arguments.values())
    options = {"has_axis": True, "classes": CLASSES * ("label" in kinds), **others}
    outputs = ("element" if keeps_row else "row",) * len(nothing)
    definition = of.by_row(formula, kinds, nothing, keeps_row)
    return Op(_with_where(op), arguments, where, definition, nothing, outputs=outputs, **options)


def _with_where(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, **given: op(where=w, **given)


def _of_tokens(
    op: Callable[..., Any], formula: Callable[..., Any], arguments: dict[str, Argument], **others: Any
) -> Op:
    options = {"classes": 5 * ("labels" in arguments), "has_axis": False, **others}
    return _of_rows(op, formula, arguments, SOME_ROWS, **options)


def _of_pairs(
    op: Callable[..., Any],
    formula: Callable[..., Any],
    numbers: dict[str, float],
    ids: np.ndarray | None = None,
    symmetric: bool | None = None,
    **others: Any,
) -> Op:
    """A loss of the rows of two batches; its numbers are arguments of the program."""
    static = {} if symmetric is None else {"symmetric": symmetric}

    def fn(w: Any, *, x: Any, y: Any, ids: Any = None, **given: Any) -> Any:
        given.update({name: given[name][0] for name in numbers if np.ndim(given[name])})
        return op(x, y, where=w, ids=ids, **{"reduction": "none", "block_size": 4, **static, **given})

    def definition(w: np.ndarray, *args: np.ndarray) -> Any:
        return formula(w, *args[: 2 + len(numbers)], ids=None if ids is None else args[-1], **static)

    arguments = {"x": masked(X), "y": masked(Y), **{name: whole(np.float32([n])) for name, n in numbers.items()}}
    arguments |= {} if ids is None else {"ids": label(ids)}
    return Op(fn, arguments, SOME_ROWS, definition, outputs=("whole",), **others)


def _of_segments(
    op: Callable[..., Any],
    formula: Callable[..., Any],
    nothing: float = 0.0,
    keeps_row: bool = False,
    where: np.ndarray = ELEMENTS,
    weights: Argument | None = None,
    options: Any = None,
    **others: Any,
) -> Op:
    def fn(w: Any, **given: Any) -> Any:
        return op(num_segments=SEGMENTS_OF_ROWS, where=w, **{**(options or {}), **given})

    return Op(
        fn,
        {"data": masked(X), **({} if weights is None else {"weights": weights}), "segment_ids": label(SEGMENT_IDS)},
        where,
        of.by_segment(formula, SEGMENTS_OF_ROWS, nothing, keeps_row),
        (nothing,),
        outputs=("whole",),
        weights="" if weights is None else "weights",
        **others,
    )


def _attention_over(
    allowed: np.ndarray,
    definition: Callable[..., Any],
    more: dict[str, np.ndarray] | None = None,
    options: Any = dict,
    where: np.ndarray = PAIRS,
    key_heads: int = 1,
    largest: bool = False,
    **others: Any,
) -> Op:
    """Attention with `options` of the arrays behind the value; they allow no more than the pairs `allowed`.

    Its results are the output and the logsumexp, or the largest logits alone, which have no gradient.
    """
    batch, num_queries, num_keys = where.shape
    shapes = (batch, num_queries, HEADS, 4), (batch, num_keys, key_heads, 4), (batch, num_keys, key_heads, 3)
    more = more or {}

    def fn(w: Any, *, query: Any, key: Any, value: Any, **given: Any) -> Any:
        arrays, changed = (
            {n: a for n, a in given.items() if n in more},
            {n: a for n, a in given.items() if n not in more},
        )
        returned = {"return_max_logit" if largest else "return_residual": True}
        named = {"mask": None if w is None else w[:, None], **returned, **options(**arrays), **changed}
        results = masksafe.dot_product_attention(query, key, value, **named)
        return results[1] if largest else results

    def hidden(where: np.ndarray) -> list[np.ndarray]:
        seen = where & allowed
        of_queries, of_keys = ~seen.any(2)[..., None, None], ~seen.any(1)[..., None, None]
        of_pairs = [~seen.any(0) if x.shape[-2:] == (T, S) else False for x in more.values()]
        gone = of_queries, of_keys, of_keys, *of_pairs
        return [np.broadcast_to(h, x) for h, x in zip(gone, (*shapes, *(x.shape for x in more.values())), strict=True)]

    of_shapes = (masked(floats(*shape), is_constant=largest) for shape in shapes)
    arrays = zip(("query", "key", "value"), of_shapes, strict=True)
    return Op(
        fn,
        {**dict(arrays), **{name: whole(x) for name, x in more.items()}},
        where,
        lambda w, *args: definition(w & allowed, *args),
        (-np.inf,) if largest else (0.0, -np.inf),
        outputs=("whole",) if largest else ("row", "row"),
        hidden=hidden,
        **others,
    )


def _all_options(*, bias: Any, sinks: Any, scale: Any, slopes: Any) -> Any:
    def score(x: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:  # at a masked pair NaN, and so its derivatives
        slope = jnp.asarray(slopes)[head].astype(x.dtype) * (1 + batch).astype(x.dtype)
        return x + slope * jnp.sqrt((q - k).astype(x.dtype)) * x

    mods = {"score_mod": score, "mask_mod": lambda b, h, q, k: q + k != 9}
    band = {"is_causal": True, "local_window_size": (3, 1), **POSITIONS}
    return {"bias": bias, "sinks": sinks, "scale": scale, "logit_soft_cap": 2.0, **mods, **band, **LENGTHS, **SEGMENTS}


def _merged(w: Any, *, outs: Any, logsumexps: Any) -> Any:
    return masksafe.merge_attention(outs, masksafe.mask_where(~w, logsumexps, -np.inf))


def _of_batch(
    op: Callable[..., Any], definition: Any, arguments: dict[str, Argument], where: np.ndarray, **others: Any
) -> Op:
    """An op whose result belongs to no row."""
    return Op(_with_where(op), arguments, where, definition, outputs=("whole",), **others)


def _of_pixels(op: Callable[..., Any], definition: Callable[..., Any], **others: Any) -> Op:
    def fn(w: Any, **given: Any) -> Any:
        return op(where=None if w is None else w[..., None], **given)

    return Op(fn, {"predictions": masked(PIXELS), "targets": masked(TRUTH)}, SOME_PIXELS, definition, **others)


def _of_frames(op: Callable[..., Any]) -> Op:
    def fn(w: Any, *, logits: Any, labels: Any, **options: Any) -> Any:
        return op(logits, ~w, labels, jnp.zeros_like(labels, bool), **options)

    arguments, definition = {"logits": masked(FRAMES), "labels": of_row(TEXTS)}, of.by_row(of.ctc, ("row", "of row"))
    return Op(fn, arguments, SOME_FRAMES, definition, may_be_unmasked=False)


def _doubled(w: Any, *, x: Any) -> Any:
    return masksafe.apply_where(w, x, lambda x: 2 * x, fill_value=0.0)


def _with_padding(op: Callable[..., Any], formula: Callable[..., Any], arguments: Any, **others: Any) -> Op:
    """A loss of tokens whose kernel and bias, which are whole, have a masked class."""

    def hidden(where: np.ndarray) -> list[np.ndarray]:
        of_tokens = {name: _hidden(a.kind, where, a.array.shape) for name, a in arguments.items()}
        return [h | ~PADDED if arguments[name].kind == "whole" else h for name, h in of_tokens.items()]

    def of_classes_left(f: Any, k: Any, b: Any, *row: Any) -> Any:
        return formula(f, k[:, PADDED], b[PADDED], *row)

    with_mask = functools.partial(op, class_mask=PADDED)
    return _of_tokens(with_mask, of_classes_left, arguments, hidden=hidden, **others)


def _of_kept(op: Callable[..., Any], arguments: dict[str, Argument], where: np.ndarray, logits_of: Any = None) -> Op:
    """Log-probabilities over kept sets, the same for all rows, which hide the other classes."""
    ids = arguments["kept_ids"].array
    number = arguments["kernel" if logits_of else "logits"].array.shape[1]
    is_kept = np.isin(np.arange(number), ids)

    def counts(where: np.ndarray) -> np.ndarray:
        return (where[:, None] if logits_of else where) & is_kept

    def hidden(where: np.ndarray) -> list[np.ndarray]:
        of_masks = {name: _hidden(a.kind, where, a.array.shape) for name, a in arguments.items()}
        of_sets = {"logits": ~counts(where), "labels": ~counts(where).any(1), "kernel": ~is_kept, "bias": ~is_kept}
        return [h | of_sets.get(name, False) for name, h in of_masks.items()]

    def definition(where: np.ndarray, *args: np.ndarray) -> Any:
        *floats, _, labels = args
        logits = logits_of(*floats) if logits_of else floats[0]
        return of.by_row(of.log_prob, ("row", "label"), (0.0, 0.0))(counts(where), logits, labels)

    outputs = {"nothing": (0.0, 0.0), "outputs": ("row", "row")}
    return Op(_with_where(op), arguments, where, definition, hidden=hidden, classes=number, **outputs)


def _linear_divergence(direction: str) -> Op:
    options = {"direction": direction, "beta": 0.3, "temperature": 1.5, "class_mask": SOME_CLASSES}
    fn = functools.partial(losses.linear_kl_divergence, **options, target_gradients=True, **OF_EACH)
    definition = functools.partial(of.divergence_of_linear_layers, SOME_CLASSES, direction)
    return _of_tokens(fn, definition, {**LAYERS, "bias": whole(CLASS_BIAS), "target_bias": whole(TARGET_BIAS)})


def _ragged_dot(where: Any, *, lhs: Any, rhs: Any, groups: Any) -> Any:
    """Of rows in any order: masked ones are moved behind the groups."""
    number = rhs.shape[0]
    groups = groups if where is None else jnp.where(where, groups, number)
    order = jnp.argsort(groups)
    sizes = jnp.sum(groups[None] == jnp.arange(number, dtype=groups.dtype)[:, None], 1)
    with jax.debug_nans(False):  # a masked row may be NaN before the op
        lhs = jnp.asarray(lhs)[order]
    return masksafe.ragged_dot(lhs, rhs, sizes)[jnp.argsort(order)]


def _group_norm_of_positions(x: Any, where: Any, **given: Any) -> Any:
    where = where.reshape(-1, 2, 4) if where is not None and where.shape == x.shape else where
    return masksafe.group_norm(x.reshape(-1, 2, 4), 2, where=where, **given).reshape(x.shape)


def _masked_mean(where: Any, x: Any, **given: Any) -> Any:
    return masksafe.MaskedMean.of(x, where, **given).value


def _weighted(op: Callable[..., Any], formula: Callable[..., Any], **others: Any) -> Op:
    return _of_rows(
        functools.partial(op, axis=-1),
        formula,
        {"x": masked(X), "weights": masked(WEIGHTS)},
        weights="weights",
        **others,
    )


def _of_weight_0(op: Op) -> Op:
    """The op whose mask is a weight of 0."""

    def fn(w: Any, **given: Any) -> Any:
        if w is None:
            return op.fn(None, **given)
        given[op.weights] = masksafe.mask_where(~w, given[op.weights], 0)
        of_gradients = [name for i, name in enumerate(op.arguments) if i in op.floats]
        out = op.fn(None, **{**given, **{name: without_sign_of_zero(given[name]) for name in of_gradients}})
        if not op.masked_apart:
            return out
        has_weight = w.any(given.get("axis", -1)) if op.masked_apart == "row" else w
        return masksafe.mask_where(~has_weight, out, 0)

    return op._replace(fn=fn)


_two_zeros = {"nothing": (0.0, 0.0)}
_norm = {"keeps_row": True, "masked_apart": "element"}
_log_probs = functools.partial(losses.log_probs, with_entropy=True)
_linear = functools.partial(losses.linear_softmax_cross_entropy, block_size=2)
_linear_of_classes = functools.partial(_linear, logit_soft_cap=3.0, class_weights=CLASS_WEIGHTS, **SMOOTHED)
_linear_log_probs = functools.partial(losses.linear_log_probs, with_entropy=True, block_size=2)
_top_k = functools.partial(losses.linear_kl_divergence_with_top_k_targets, **OF_EACH)
_ranking = functools.partial(losses.ranking_softmax_loss, reduce_fn=None)
_by_segment = functools.partial(_masked_mean, by="segment")

OPS = {
    "squared_error": _of_elements(
        losses.squared_error,
        lambda x, y: (x - y) ** 2,
        COMPARED,
        stands_for="elements",
    ),
    "l2_loss": _of_elements(losses.l2_loss, lambda x, y: (x - y) ** 2 / 2, COMPARED),
    "huber_loss": _of_elements(losses.huber_loss, of.huber, {"predictions": masked(2 * X), "targets": masked(Y)}),
    "log_cosh": _of_elements(losses.log_cosh, lambda x, y: np.log(np.cosh(x - y)), COMPARED),
    "hinge_loss": _of_elements(
        losses.hinge_loss,
        lambda s, t: np.maximum(0, 1 - s * t),
        {"predictor_outputs": masked(X), "targets": masked(SIGNS)},
    ),
    "perceptron_loss": _of_elements(
        losses.perceptron_loss,
        lambda s, t: np.maximum(0, -s * t),
        {"predictor_outputs": masked(X), "targets": masked(SIGNS)},
    ),
    "sparsemax_loss": _of_elements(
        losses.sparsemax_loss, of.sparse_plus, {"logits": masked(X), "labels": masked(BITS, is_constant=True)}
    ),
    "sigmoid_binary_cross_entropy": _of_elements(
        losses.sigmoid_binary_cross_entropy, of.sigmoid_cross_entropy, DISTRIBUTED
    ),
    "sigmoid_focal_loss": _of_elements(losses.sigmoid_focal_loss, of.focal, DISTRIBUTED),
    "sigmoid_focal_loss, alpha and gamma": _of_elements(
        functools.partial(losses.sigmoid_focal_loss, alpha=0.3, gamma=1.5),
        functools.partial(of.focal, alpha=0.3, gamma=1.5),
        DISTRIBUTED,
    ),
    "softmax_cross_entropy": _of_rows(
        losses.softmax_cross_entropy,
        of.cross_entropy,
        DISTRIBUTED,
        stands_for="rows of logits with targets",
    ),
    "softmax_cross_entropy, rows": _of_rows(losses.softmax_cross_entropy, of.cross_entropy, DISTRIBUTED, SOME_ROWS),
    "softmax_cross_entropy_with_integer_labels": _of_rows(
        losses.softmax_cross_entropy_with_integer_labels,
        of.of_label,
        LABELLED,
        stands_for="rows of logits with labels",
        by_default=True,
    ),
    "softmax_cross_entropy_with_integer_labels, rows": _of_rows(
        losses.softmax_cross_entropy_with_integer_labels, of.of_label, LABELLED, SOME_ROWS
    ),
    "softmax_cross_entropy_with_integer_labels, smoothing": _of_rows(
        functools.partial(losses.softmax_cross_entropy_with_integer_labels, with_components=True, **SMOOTHED),
        of.smoothed_of_label,
        LABELLED,
        **_two_zeros,
    ),
    "softmax_cross_entropy_with_integer_labels, weighted classes": _of_rows(
        functools.partial(losses.softmax_cross_entropy_with_integer_labels, with_components=True, **SMOOTHED),
        of.smoothed_and_weighted_of_label,
        {"logits": masked(X), "class_weights": along(WEIGHTS[0], is_constant=True), "labels": label(LABELS)},
        **_two_zeros,
    ),
    "poly_loss_cross_entropy": _of_rows(losses.poly_loss_cross_entropy, of.poly, DISTRIBUTED),
    "poly_loss_cross_entropy, epsilon": _of_rows(
        losses.poly_loss_cross_entropy,
        of.poly,
        {"logits": masked(X), "labels": masked(P), "epsilon": of_row(TOKEN_WEIGHTS)},
        has_axis=False,
    ),
    "log_probs": _of_rows(_log_probs, of.log_prob, LABELLED, **_two_zeros),
    "log_probs, temperature": _of_rows(
        functools.partial(_log_probs, temperature=0.6),
        lambda x, label: of.log_prob(x / 0.6, label),
        LABELLED,
        **_two_zeros,
    ),
    "log_probs, several labels": _of_rows(
        _log_probs, of.log_prob, {"logits": masked(X), "labels": label(SEVERAL_LABELS)}, **_two_zeros
    ),
    "log_probs, kept ids": _of_kept(
        _log_probs, {"logits": masked(TALL), "kept_ids": of_row(KEPT_IDS), "labels": label(LABELS)}, SOME_POSITIONS
    ),
    "kl_divergence": _of_rows(
        losses.kl_divergence,
        of.divergence,
        DISTRIBUTIONS,
        stands_for="rows of two distributions",
    ),
    "generalized_kl_divergence": _of_rows(
        losses.generalized_kl_divergence,
        of.generalized_divergence,
        DISTRIBUTIONS,
    ),
    "convex_kl_divergence": _of_rows(
        losses.convex_kl_divergence,
        of.generalized_divergence,
        DISTRIBUTIONS,
    ),
    "kl_divergence_with_log_targets": _of_rows(
        losses.kl_divergence_with_log_targets,
        lambda q, p: of.divergence(q, np.exp(p)),
        {"log_predictions": masked(np.log(P)), "log_targets": masked(np.log(Q))},
    ),
    "cosine_similarity": _of_rows(
        losses.cosine_similarity,
        of.cosine,
        COMPARED,
        stands_for="rows of two vectors",
    ),
    "cosine_distance": _of_rows(losses.cosine_distance, lambda a, b: 1 - of.cosine(a, b), COMPARED),
    "multiclass_hinge_loss": _of_rows(losses.multiclass_hinge_loss, of.hinge_of_label, SCORED, has_axis=False),
    "multiclass_perceptron_loss": _of_rows(
        losses.multiclass_perceptron_loss, of.perceptron_of_label, SCORED, has_axis=False
    ),
    "multiclass_sparsemax_loss": _of_rows(
        losses.multiclass_sparsemax_loss, of.sparsemax_of_label, SCORED, has_axis=False
    ),
    "ranking_softmax_loss": _of_rows(_ranking, of.cross_entropy, DISTRIBUTED, has_axis=False),
    "ranking_softmax_loss, weights": _of_rows(
        _ranking,
        lambda x, t, v: of.cross_entropy(x, t * v),
        {"logits": masked(X), "labels": masked(P), "weights": masked(WEIGHTS)},
        has_axis=False,
    ),
    # The scores have no weights: an item of weight 0 stays in the softmax.
    "ranking_softmax_loss, weights of 0": _of_weight_0(
        _of_rows(
            _ranking,
            lambda x, t, v: of.cross_entropy(x, t * v),
            {"logits": whole(X), "labels": masked(P), "weights": masked(WEIGHTS)},
            weights="weights",
            masked_apart="row",
            has_axis=False,
        )
    )._replace(definition=of.ranking_of_weight_0),
    "make_fenchel_young_loss": _of_rows(
        losses.make_fenchel_young_loss(masksafe.logsumexp),
        of.fenchel_young,
        {"scores": masked(X), "targets": masked(P)},
        has_axis=False,
    ),
    "smooth_labels": _of_rows(
        functools.partial(losses.smooth_labels, alpha=0.1), of.smoothed, {"labels": masked(P)}, keeps_row=True
    ),
    "triplet_margin_loss": _of_rows(
        losses.triplet_margin_loss,
        of.triplet,
        {"anchors": masked(X), "positives": masked(Y), "negatives": masked(Z)},
    ),
    "ntxent": _of_batch(
        lambda where, embeddings, **options: losses.ntxent(
            embeddings, jnp.arange(embeddings.shape[0]) % 2, where=where, **options
        ),
        lambda w, z: (of.nt_xent(z[w], np.flatnonzero(w) % 2),),
        {"embeddings": masked(X)},
        SOME_ROWS,
    ),
    "info_nce_loss": _of_pairs(losses.info_nce_loss, of.info_nce, {"scale": 3.0}, stands_for="pairs of two batches"),
    "info_nce_loss, ids": _of_pairs(losses.info_nce_loss, of.info_nce, {"scale": 3.0}, PAIR_IDS, symmetric=False),
    "sigmoid_contrastive_loss": _of_pairs(
        losses.sigmoid_contrastive_loss, of.sigmoid_contrastive, {"scale": 3.0, "bias": -1.0}
    ),
    "sigmoid_contrastive_loss, ids": _of_pairs(
        losses.sigmoid_contrastive_loss, of.sigmoid_contrastive, {"scale": 3.0, "bias": -1.0}, PAIR_IDS
    ),
    "binary_dice_loss": _of_rows(
        losses.binary_dice_loss, of.binary_dice, {"predictions": masked(X), "targets": masked(BITS)}, has_axis=False
    ),
    "dice_loss": _of_pixels(losses.dice_loss, of.by_row(of.dice, ("row", "row"))),
    "multiclass_generalized_dice_loss": _of_pixels(
        losses.multiclass_generalized_dice_loss, of.generalized_dice, outputs=("whole",)
    ),
    "ctc_loss": _of_frames(losses.ctc_loss),
    "ctc_loss_with_forward_probs": _of_frames(lambda *a, **named: losses.ctc_loss_with_forward_probs(*a, **named)[0]),
    "linear_softmax_cross_entropy": _of_tokens(
        functools.partial(_linear, reduction="none"),
        of.linear_cross_entropy,
        LAYER,
        stands_for="tokens of a linear layer with labels",
        by_default=True,
    ),
    "linear_softmax_cross_entropy, mean": _of_batch(_linear, of.mean_of_linear_cross_entropy, LAYER, SOME_ROWS),
    "linear_softmax_cross_entropy, weights": _of_tokens(
        functools.partial(_linear_of_classes, reduction="none"),
        functools.partial(of.weighted_linear_cross_entropy, CLASS_WEIGHTS),
        LAYER_WITH_WEIGHTS,
        weights="weights",
    ),
    "linear_softmax_cross_entropy, mean with weights": _of_batch(
        _linear_of_classes,
        functools.partial(of.weighted_mean_of_linear_cross_entropy, CLASS_WEIGHTS),
        LAYER_WITH_WEIGHTS,
        SOME_ROWS,
        weights="weights",
    ),
    "linear_softmax_cross_entropy, a masked class": _with_padding(
        functools.partial(_linear_of_classes, reduction="none"),
        functools.partial(of.weighted_linear_cross_entropy, CLASS_WEIGHTS[PADDED]),
        LAYER_WITH_WEIGHTS,
    ),
    "linear_log_probs": _of_tokens(_linear_log_probs, of.linear_log_prob, LAYER, **_two_zeros),
    "linear_log_probs, a masked class": _with_padding(
        functools.partial(_linear_log_probs, temperature=0.7, logit_soft_cap=3.0),
        lambda f, k, b, label: of.log_prob(of.soft_capped(f @ k + b) / 0.7, label),
        {name: LAYER_WITH_WEIGHTS[name] for name in ("features", "kernel", "bias", "labels")},
        **_two_zeros,
    ),
    "linear_log_probs, several labels, a masked class": _with_padding(
        functools.partial(_linear_log_probs, temperature=0.7, logit_soft_cap=3.0),
        lambda f, k, b, label: of.log_prob(of.soft_capped(f @ k + b) / 0.7, label),
        {
            **{name: LAYER_WITH_WEIGHTS[name] for name in ("features", "kernel", "bias")},
            "labels": label(SEVERAL_LABELS),
        },
        **_two_zeros,
    ),
    "linear_log_probs, kept ids": _of_kept(
        functools.partial(_linear_log_probs, temperature=0.7, logit_soft_cap=3.0),
        {
            **{name: LAYER_WITH_WEIGHTS[name] for name in ("features", "kernel", "bias")},
            **{"kept_ids": of_row(KEPT_OF_FIVE), "labels": label(LABELS)},
        },
        SOME_ROWS,
        lambda f, k, b: of.soft_capped(f @ k + b) / 0.7,
    ),
    "linear_kl_divergence": _of_tokens(
        functools.partial(losses.linear_kl_divergence, target_gradients=True, **OF_EACH),
        of.linear_divergence,
        LAYERS,
        stands_for="tokens of two linear layers",
    ),
    "linear_kl_divergence_with_top_k_targets": _of_tokens(_top_k, of.top_k_divergence, TOP_K),
    "linear_kl_divergence, reverse": _linear_divergence("reverse"),
    "linear_kl_divergence, jensen_shannon": _linear_divergence("jensen_shannon"),
    "linear_kl_divergence_with_top_k_targets, reverse without a rest": _of_tokens(
        functools.partial(_top_k, rest="drop", direction="reverse"), of.top_k_divergence_without_rest, TOP_K
    ),
    "softmax": _of_rows(masksafe.softmax, of.softmax, {"x": masked(X)}, keeps_row=True),
    "log_softmax": _of_rows(
        masksafe.log_softmax,
        of.log_softmax,
        {"x": masked(X)},
        nothing=(-np.inf,),
        keeps_row=True,
        stands_for="a softmax of rows",
    ),
    "logsumexp": _of_rows(
        functools.partial(masksafe.logsumexp, axis=-1), of.logsumexp, {"a": masked(X)}, nothing=(-np.inf,)
    ),
    "logmeanexp": _of_rows(
        functools.partial(masksafe.logmeanexp, axis=-1), of.logmeanexp, {"x": masked(X)}, nothing=(-np.inf,)
    ),
    **{
        f"{op.__name__}, empty value": _of_rows(
            functools.partial(op, axis=-1, empty_value=0.5), formula, {argument: masked(X)}, nothing=(0.5,)
        )
        for op, formula, argument in (
            (masksafe.logsumexp, of.logsumexp, "a"),
            (masksafe.logmeanexp, of.logmeanexp, "x"),
            (masksafe.max, np.max, "x"),
            (masksafe.min, np.min, "x"),
        )
    },
    "logsumexp, factors": _of_rows(
        functools.partial(masksafe.logsumexp, return_sign=True, axis=-1),
        of.sum_and_sign,
        {"a": masked(X), "b": masked(Y)},
        nothing=(-np.inf, 0.0),
    ),
    "layer_norm": _of_rows(
        masksafe.layer_norm,
        of.layer_norm,
        {"x": masked(X), "scale": along(SCALE), "bias": along(BIAS)},
        COLUMNS,
        keeps_row=True,
        stands_for="a norm of rows",
        by_default=True,
    ),
    "rms_norm": _of_rows(
        masksafe.rms_norm, of.rms_norm, {"x": masked(X), "scale": along(SCALE)}, COLUMNS, keeps_row=True
    ),
    "standardize": _of_rows(masksafe.standardize, of.standardize, {"x": masked(X)}, keeps_row=True),
    "l2_normalize": _of_rows(masksafe.l2_normalize, of.l2_normalize, {"x": masked(X)}, keeps_row=True),
    "batch_norm": Op(
        _with_where(functools.partial(masksafe.batch_norm, axis=0)),
        {"x": masked(X), "scale": of_row(floats(ROWS)), "bias": of_row(floats(ROWS))},
        ELEMENTS,
        of.batch_norm,
        (0.0, 0.0, 0.0),
        outputs=("element", "row", "row"),
        stands_for="a norm of channels, and its statistics",
    ),
    # Two elements have gradients of 0 but for epsilon: of a small one only rounding errors would be left.
    "group_norm": Op(
        _with_where(functools.partial(masksafe.group_norm, num_groups=2, epsilon=0.5)),
        {"x": masked(X), "scale": along(SCALE), "bias": along(BIAS)},
        COLUMNS,
        of.group_norm,
        outputs=("element",),
    ),
    "group_norm, positions": Op(
        _with_where(_group_norm_of_positions),
        {"x": masked(TALL), "scale": whole(SCALE), "bias": whole(BIAS)},
        SOME_POSITIONS,
        of.group_norm_of_positions,
        outputs=("element",),
    ),
    "standardize, statistics": _of_rows(
        masksafe.standardize,
        of.standardize_by,
        {"x": masked(X), "mean": masked(Y), "variance": masked(WEIGHTS)},
        keeps_row=True,
    ),
    "batch_norm, statistics": Op(
        lambda w, **given: masksafe.batch_norm(axis=0, where=w, **given)[0],
        {"x": masked(X), "mean": of_row(Y[:, 0]), "var": of_row(WEIGHTS[:, 0])},
        ELEMENTS,
        of.by_row(of.standardize_by, ("row", "of row", "of row"), keeps_row=True),
        outputs=("element",),
    ),
    "layer_norm, weights": _weighted(masksafe.layer_norm, of.weighted_layer_norm, **_norm),
    "rms_norm, weights": _weighted(masksafe.rms_norm, of.weighted_rms_norm, **_norm),
    "standardize, weights": _weighted(masksafe.standardize, of.weighted_standardize, **_norm),
    "group_norm, weights": Op(
        _with_where(functools.partial(masksafe.group_norm, num_groups=1)),
        {"x": masked(X), "weights": masked(WEIGHTS)},
        ELEMENTS,
        of.by_row(of.weighted_layer_norm, ("row", "row"), keeps_row=True),
        outputs=("element",),
        weights="weights",
        masked_apart="element",
    ),
    "batch_norm, weights": Op(
        lambda w, **given: masksafe.batch_norm(axis=0, where=w, **given)[0],
        {"x": masked(X), "scale": of_row(Y[:, 0]), "weights": masked(WEIGHTS)},
        ELEMENTS,
        of.by_row(lambda x, scale, v: scale * of.weighted_standardize(x, v), ("row", "of row", "row"), keeps_row=True),
        outputs=("element",),
        weights="weights",
        masked_apart="element",
    ),
    "sum": _of_rows(functools.partial(masksafe.sum, axis=-1), np.sum, {"x": masked(X)}),
    "mean": _of_rows(functools.partial(masksafe.mean, axis=-1), np.mean, {"x": masked(X)}),
    "var": _of_rows(functools.partial(masksafe.var, axis=-1), np.var, {"x": masked(X)}, stands_for="a moment of rows"),
    "var_mean": _of_rows(functools.partial(masksafe.var_mean, axis=-1), of.var_mean, {"x": masked(X)}, **_two_zeros),
    "max": _of_rows(
        functools.partial(masksafe.max, axis=-1),
        np.max,
        {"x": masked(X)},
        nothing=(-np.inf,),
        stands_for="an extremum of rows",
    ),
    "min": _of_rows(functools.partial(masksafe.min, axis=-1), np.min, {"x": masked(X)}, nothing=(np.inf,)),
    "mean, weights": _weighted(masksafe.mean, of.weighted_mean),
    "var, weights": _weighted(masksafe.var, of.weighted_var),
    "sum, weights": _weighted(masksafe.sum, lambda x, w: np.sum(w * x), masked_apart="row"),
    "var_mean, weights": _weighted(masksafe.var_mean, of.weighted_var_mean, **_two_zeros),
    "MaskedMean, weights": _of_batch(
        _masked_mean, of.mean_of_all, {"x": masked(X), "weights": masked(WEIGHTS)}, ELEMENTS, weights="weights"
    ),
    "MaskedMean": _of_batch(_masked_mean, of.mean_of_all, {"x": masked(X)}, ELEMENTS),
    "MaskedMean, by sequence": _of_batch(
        functools.partial(_masked_mean, by="sequence"),
        lambda w, x: of.mean_of_means(w, x, np.zeros(x.shape)),
        {"x": masked(X)},
        ELEMENTS,
    ),
    "MaskedMean, by segment": _of_batch(
        _by_segment, of.mean_of_means, {"x": masked(X), "segment_ids": masked(DOCUMENTS)}, ELEMENTS
    ),
    "MaskedMean, weights by segment": _of_batch(
        _by_segment,
        of.mean_of_means,
        {"x": masked(X), "segment_ids": masked(DOCUMENTS), "weights": masked(WEIGHTS)},
        ELEMENTS,
        weights="weights",
    ),
    "segment_sum": _of_segments(masksafe.segment_sum, np.sum),
    "segment_sum, rows": _of_segments(masksafe.segment_sum, np.sum, where=SOME_ROWS),
    "segment_mean": _of_segments(masksafe.segment_mean, np.mean),
    "segment_var": _of_segments(masksafe.segment_var, np.var),
    "segment_var, rows": _of_segments(masksafe.segment_var, np.var, where=SOME_ROWS),
    "segment_max": _of_segments(masksafe.segment_max, np.max, -np.inf, stands_for="an extremum of segments"),
    "segment_min": _of_segments(masksafe.segment_min, np.min, np.inf),
    "segment_logsumexp": _of_segments(masksafe.segment_logsumexp, of.logsumexp, -np.inf),
    **{
        f"{op.__name__}, empty value": _of_segments(op, formula, 0.5, options={"empty_value": 0.5})
        for op, formula in (
            (masksafe.segment_max, np.max),
            (masksafe.segment_min, np.min),
            (masksafe.segment_logsumexp, of.logsumexp),
        )
    },
    "segment_softmax": _of_segments(
        masksafe.segment_softmax, of.softmax, keeps_row=True, stands_for="a softmax of segments", by_default=True
    ),
    "segment_softmax, rows": _of_segments(masksafe.segment_softmax, of.softmax, keeps_row=True, where=SOME_ROWS),
    "segment_log_softmax": _of_segments(masksafe.segment_log_softmax, of.log_softmax, -np.inf, keeps_row=True),
    # As in `group_norm`.
    "segment_standardize": _of_segments(
        masksafe.segment_standardize, lambda x: of.standardize(x, 0.5), keeps_row=True, options={"epsilon": 0.5}
    ),
    "segment_sum, weights": _of_segments(masksafe.segment_sum, lambda x, v: np.sum(v * x), weights=masked(WEIGHTS)),
    "segment_mean, weights": _of_segments(masksafe.segment_mean, of.weighted_mean, weights=masked(WEIGHTS)),
    "segment_mean, weights of rows": _of_segments(
        masksafe.segment_mean, of.weighted_mean, where=SOME_ROWS, weights=of_row(TOKEN_WEIGHTS)
    ),
    "segment_var, weights": _of_segments(masksafe.segment_var, of.weighted_var, weights=masked(WEIGHTS)),
    "segment_var, weights of rows": _of_segments(
        masksafe.segment_var, of.weighted_var, where=SOME_ROWS, weights=of_row(TOKEN_WEIGHTS)
    ),
    "load_balancing_loss": _of_batch(
        losses.load_balancing_loss,
        of.load_balance,
        {"router_probs": masked(P), "expert_indices": masked(EXPERTS)},
        SOME_ROWS,
    ),
    "router_z_loss": _of_rows(losses.router_z_loss, lambda x: of.logsumexp(x) ** 2, {"router_logits": masked(X)}),
    "ragged_dot": Op(
        _ragged_dot,
        {"lhs": masked(X), "rhs": whole(MATRICES), "groups": masked(GROUPS)},
        SOME_ROWS,
        of.rows_times_matrices,
    ),
    "keep": Op(
        lambda w, x: masksafe.keep(x, where=w),
        {"x": masked(X)},
        ELEMENTS,
        of.elementwise(lambda x: x),
        outputs=("element",),
        may_be_unmasked=False,
    ),
    "mask_where": Op(
        lambda w, x: masksafe.mask_where(~w, x, np.zeros((), x.dtype)),
        {"x": masked(X)},
        ELEMENTS,
        of.elementwise(lambda x: x),
        outputs=("element",),
        may_be_unmasked=False,
    ),
    "apply_where": Op(
        _doubled,
        {"x": masked(X)},
        ELEMENTS,
        of.elementwise(lambda x: 2 * x),
        outputs=("element",),
        may_be_unmasked=False,
    ),
    # Not by default: by default its own tests run.
    "dot_product_attention": _attention_over(
        np.ones((T, S), bool), of.attention, stands_for="pairs of queries and keys"
    ),
    "dot_product_attention, options": _attention_over(
        (BEHIND >= 0) & (BEHIND <= 3) & (QUERY_AT + KEY_AT != 9) & IN_LENGTHS & IN_SEGMENTS,
        functools.partial(of.attention_with_options, behind=BEHIND),
        {
            **{"bias": floats(1, HEADS, T, S), "sinks": floats(HEADS)},
            **{"scale": np.float32([0.6]), "slopes": floats(HEADS)},
        },
        _all_options,
        may_be_unmasked=False,  # which costs one more program
    ),
    "dot_product_attention, largest logit": _attention_over(np.ones((T, S), bool), of.largest_logits, largest=True),
    # Products of matrices with a side of 1, which XLA computes in other ways.
    "dot_product_attention, one query": _attention_over(
        np.ones_like(ONE_QUERY), of.attention, where=ONE_QUERY, key_heads=HEADS
    ),
    "dot_product_attention, one key": _attention_over(np.ones_like(ONE_KEY), of.attention, where=ONE_KEY),
    "merge_attention": Op(
        _merged,
        {"outs": masked(floats(2, 3, 2, 4)), "logsumexps": masked(floats(2, 3, 2))},
        PARTS,
        of.merge,
        (0.0, -np.inf),
        outputs=("whole", "whole"),
        may_be_unmasked=False,
    ),
}
OPS |= {f"{key} of 0": _of_weight_0(op) for key, op in OPS.items() if op.weights and not key.endswith(" of 0")}
OPS = {key: op._replace(name=key.split(",")[0]) for key, op in OPS.items()}

NO_ROW = {
    "RouterStatistics": "the parts of load_balancing_loss",
    "adapters": "modules of other libraries around dot_product_attention",
    "attention_masks": "masks for dot_product_attention",
    "forward_mode": "a switch",
    "label_checks": "a switch",
    "length_mask": "a mask of lengths",
    "losses": "a module",
    "next_tokens": "labels and masks of tokens, which have no gradient",
    "safe_softmax_cross_entropy": "softmax_cross_entropy, without a mask",
    "set_label_checks": "a switch",
    "testing": "a module",
    "undo_zigzag": "a permutation",
    "value_and_grad_of_mean": "a transformation of functions that return a MaskedMean",
    "zigzag": "a permutation",
}
