"""The table of ops: how each is called, with which arrays, what its mask hides of them, and what it has to compute.

Every rule of the contract is a file of tests beside this one, which goes through the table. A new op is a new row.
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


class Op(NamedTuple):
    """An op with a mask and arrays, all of which are arguments of its programs.

    A kind says what the mask, of elements `[rows, ...]` or of rows `[rows]`, hides of an argument:

    * "row": `[rows, ...]`, what is masked
    * "of row": `[rows, ...]`, what belongs to a row with nothing left
    * "label": `[rows]`, the same; the class of a row among `classes`
    * "along": of the shape of a row, what is masked in all rows
    * "whole": nothing
    """

    call: Callable[..., Any]  # of the mask and the arguments, and of options by name
    args: tuple[np.ndarray, ...]
    kinds: tuple[str, ...]
    where: np.ndarray
    definition: Callable[..., tuple[Any, ...]]
    name: str = ""  # of the function
    nothing: tuple[float, ...] = (0.0,)  # the outputs if nothing is left
    has_axis: bool = False  # whether `call` takes the axis of the elements of a row, the last
    may_be_unmasked: bool = True  # whether `call` takes None for a mask
    has_rows: bool = True  # whether an output belongs to a row, as the first axis numbers them
    hidden: Callable[..., list[np.ndarray]] | None = None  # by the mask, if kinds do not tell
    constants: tuple[int, ...] = ()  # floats that have no gradient
    classes: int = 0

    @property
    def floats(self) -> list[int]:
        """The arguments that have gradients."""
        is_float = [a.dtype.kind == "f" for a in self.args]
        return [i for i, f in enumerate(is_float) if f and i not in self.constants]

    def hides(self, where: np.ndarray) -> list[np.ndarray]:
        """What a mask hides of each argument."""
        if self.hidden is not None:
            return self.hidden(where)
        return [_hidden(kind, where, a.shape) for kind, a in zip(self.kinds, self.args, strict=True)]


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

# The arrays of several ops, with their kinds.
LABELLED = (X, LABELS), "row, label"
LAYER = (FEATURES, KERNEL, LABELS), "row, whole, label"
LAYER_WITH_WEIGHTS = (FEATURES, KERNEL, CLASS_BIAS, TOKEN_WEIGHTS, LABELS), "row, whole, whole, row, label"
LAYERS = (FEATURES, KERNEL, TARGET_FEATURES, TARGET_KERNEL), "row, whole, row, whole"
TOP_K = (FEATURES, KERNEL, np.log(P[:, :2]), TOP_CLASSES), "row, whole, row, row"


# The rows.


def _elementwise(name: str, formula: Callable[..., Any], *args: np.ndarray, **options: Any) -> Op:
    op = functools.partial(getattr(losses, name), **options)
    call = lambda w, *a, **changed: op(*a, where=w, **changed)  # noqa: E731
    return Op(call, args, ("row",) * len(args), ELEMENTS, of.elementwise(formula))


def _by_row(
    op: Callable[..., Any],
    formula: Callable[..., Any],
    args: tuple[np.ndarray, ...],
    kinds: str = "row, row",
    where: np.ndarray = ELEMENTS,
    nothing: tuple[float, ...] = (0.0,),
    keeps_row: bool = False,
    **others: Any,
) -> Op:
    """An op that has an axis, unless it says otherwise."""
    names = tuple(kinds.split(", "))
    options = {"has_axis": True, "classes": CLASSES * ("label" in names), **others}

    def call(w: Any, *args: Any, **changed: Any) -> Any:
        return op(*args, where=w, **changed)

    definition = of.by_row(formula, names, nothing, keeps_row)
    return Op(call, args, names, where, definition, nothing=nothing, **options)


def _of_tokens(op: Callable[..., Any], formula: Callable[..., Any], args: Any, kinds: str, **others: Any) -> Op:
    options = {"classes": 5 * ("label" in kinds), **others}
    return _by_row(op, formula, args, kinds, SOME_ROWS, has_axis=False, **options)


def _of_pairs(name: str, formula: Callable[..., Any], ids: np.ndarray | None = None, **options: Any) -> Op:
    """A loss of the rows of two batches; its numbers are arguments of the program, and the last one are the ids."""
    numbers = tuple(np.float32([options[number]]) for number in ("scale", "bias") if number in options)
    static = {key: value for key, value in options.items() if key not in ("scale", "bias")}
    static_options = {"reduction": "none", "block_size": 4, **static}
    of_ids: tuple[np.ndarray, ...] = () if ids is None else (ids,)

    def call(w: Any, x: Any, y: Any, *others: Any, **changed: Any) -> Any:
        named = {name: number[0] for name, number in zip(("scale", "bias"), others[: len(numbers)], strict=False)}
        some_ids = None if ids is None else others[-1]
        return getattr(losses, name)(x, y, where=w, ids=some_ids, **{**named, **static_options, **changed})

    def definition(w: np.ndarray, *args: np.ndarray) -> Any:
        return formula(w, *args[: 2 + len(numbers)], ids=None if ids is None else args[-1], **static)

    kinds = ("row", "row", *["whole"] * len(numbers), *["label"] * len(of_ids))
    return Op(call, (X, Y, *numbers, *of_ids), kinds, SOME_ROWS, definition, has_rows=False)


def _of_segments(
    name: str,
    formula: Callable[..., Any],
    nothing: float = 0.0,
    keeps_row: bool = False,
    where: np.ndarray = ELEMENTS,
    weights: np.ndarray | None = None,
    **others: Any,
) -> Op:
    options = others.pop("options", {})

    def call(w: Any, x: Any, *more: Any, **changed: Any) -> Any:
        weighted = {} if weights is None else {"weights": more[0]}
        return getattr(masksafe, name)(x, more[-1], SEGMENTS_OF_ROWS, where=w, **weighted, **{**options, **changed})

    kind = "row" if weights is None or weights.ndim > 1 else "of row"
    return Op(
        call,
        (X, SEGMENT_IDS) if weights is None else (X, weights, SEGMENT_IDS),
        ("row", "label") if weights is None else ("row", kind, "label"),
        where,
        of.by_segment(formula, SEGMENTS_OF_ROWS, nothing, keeps_row),
        nothing=(nothing,),
        has_rows=False,
        **others,
    )


def _attention_over(
    allowed: np.ndarray,
    definition: Callable[..., Any],
    *more: np.ndarray,
    options: Any = dict,
    where: np.ndarray = PAIRS,
    key_heads: int = 1,
    **others: Any,
) -> Op:
    """Attention with `options` of the arrays behind the value; they allow no more than the pairs `allowed`."""
    batch, num_queries, num_keys = where.shape
    shapes = (batch, num_queries, HEADS, 4), (batch, num_keys, key_heads, 4), (batch, num_keys, key_heads, 3)

    def call(w: Any, q: Any, k: Any, v: Any, *more: Any, **changed: Any) -> Any:
        named = {"mask": None if w is None else w[:, None], "return_residual": True, **options(*more), **changed}
        return masksafe.dot_product_attention(q, k, v, **named)

    def hidden(where: np.ndarray) -> list[np.ndarray]:
        live = where & allowed
        of_queries, of_keys = ~live.any(2)[..., None, None], ~live.any(1)[..., None, None]
        of_pairs = [~live.any(0) if x.shape[-2:] == (T, S) else False for x in more]
        gone = of_queries, of_keys, of_keys, *of_pairs
        return [np.broadcast_to(h, x) for h, x in zip(gone, (*shapes, *(x.shape for x in more)), strict=True)]

    return Op(
        call,
        (*(floats(*shape) for shape in shapes), *more),
        ("row",) * 3 + ("whole",) * len(more),
        where,
        lambda w, *args: definition(w & allowed, *args),
        hidden=hidden,
        nothing=(0.0, -np.inf),
        **others,
    )


def _all_options(bias: Any, sinks: Any, scale: Any, slopes: Any) -> Any:
    def score(x: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:  # at a masked pair NaN, and so its derivatives
        slope = jnp.asarray(slopes)[head].astype(x.dtype) * (1 + batch).astype(x.dtype)
        return x + slope * jnp.sqrt((q - k).astype(x.dtype)) * x

    mods = {"score_mod": score, "mask_mod": lambda b, h, q, k: q + k != 9}
    band = {"is_causal": True, "local_window_size": (3, 1), **POSITIONS}
    return {"bias": bias, "sinks": sinks, "scale": scale, "logit_soft_cap": 2.0, **mods, **band, **LENGTHS, **SEGMENTS}


def _merged(w: Any, outs: Any, lses: Any) -> Any:
    return masksafe.merge_attention(outs, masksafe.mask_where(~w, lses, -np.inf))


def _of_batch(call: Callable[..., Any], args: Any, kinds: str, where: np.ndarray, definition: Any, **others: Any) -> Op:
    """An op whose result belongs to no row."""
    return Op(call, args, tuple(kinds.split(", ")), where, definition, has_rows=False, **others)


def _of_pixels(op: Callable[..., Any], definition: Callable[..., Any], **others: Any) -> Op:
    def call(w: Any, p: Any, t: Any, **changed: Any) -> Any:
        return op(p, t, where=None if w is None else w[..., None], **changed)

    return Op(call, (PIXELS, TRUTH), ("row", "row"), SOME_PIXELS, definition, **others)


def _of_frames(op: Callable[..., Any]) -> Op:
    def call(w: Any, x: Any, y: Any, **changed: Any) -> Any:
        return op(x, ~w, y, jnp.zeros_like(y, bool), **changed)

    kinds = ("row", "of row")
    return Op(call, (FRAMES, TEXTS), kinds, SOME_FRAMES, of.by_row(of.ctc, kinds), may_be_unmasked=False)


def _doubled(w: Any, x: Any) -> Any:
    return masksafe.apply_where(w, x, lambda x: 2 * x, fill_value=0.0)


def _batch_norm(w: Any, x: Any, scale: Any, bias: Any, **changed: Any) -> Any:
    return masksafe.batch_norm(x, scale, bias, axis=0, where=w, **changed)


def _group_norm(w: Any, x: Any, scale: Any, bias: Any, epsilon: float = 0.5) -> Any:
    return masksafe.group_norm(x, 2, scale, bias, where=w, epsilon=epsilon)


def _named(op: Callable[..., Any], names: str, **options: Any) -> Callable[..., Any]:
    """The op of arrays that have these names."""
    return lambda *args, **others: op(**dict(zip(names.split(), args, strict=True)), **{**options, **others})


def _with_padding(op: Callable[..., Any], formula: Callable[..., Any], args: Any, kinds: str, **others: Any) -> Op:
    """A loss of tokens whose kernel and bias, which are whole, have a masked class."""

    def hidden(where: np.ndarray) -> list[np.ndarray]:
        of_tokens = [_hidden(kind, where, x.shape) for kind, x in zip(kinds.split(", "), args, strict=True)]
        return [h | ~PADDED if kind == "whole" else h for kind, h in zip(kinds.split(", "), of_tokens, strict=True)]

    def of_classes_left(f: Any, k: Any, b: Any, *row: Any) -> Any:
        return formula(f, k[:, PADDED], b[PADDED], *row)

    with_mask = functools.partial(op, class_mask=PADDED)
    return _of_tokens(with_mask, of_classes_left, args, kinds, hidden=hidden, **others)


def _linear_divergence(direction: str) -> Op:
    options = {"direction": direction, "beta": 0.3, "temperature": 1.5, "class_mask": SOME_CLASSES}
    names = "features kernel target_features target_kernel bias target_bias"
    call = _named(losses.linear_kl_divergence, names, **options, target_gradients=True, **OF_EACH)
    definition = functools.partial(of.divergence_of_linear_layers, SOME_CLASSES, direction)
    arrays, kinds = LAYERS
    return _of_tokens(call, definition, (*arrays, CLASS_BIAS, TARGET_BIAS), f"{kinds}, whole, whole")


def _ragged_dot(where: Any, x: Any, matrices: Any, groups: Any) -> Any:
    """Of rows in any order: masked ones are moved behind the groups."""
    number = matrices.shape[0]
    groups = groups if where is None else jnp.where(where, groups, number)
    order = jnp.argsort(groups)
    sizes = jnp.sum(groups[None] == jnp.arange(number, dtype=groups.dtype)[:, None], 1)
    with jax.debug_nans(False):  # a masked row may be NaN before the op
        x = jnp.asarray(x)[order]
    return masksafe.ragged_dot(x, matrices, sizes)[jnp.argsort(order)]


_two_zeros = {"nothing": (0.0, 0.0)}
_keeps = {"kinds": "row", "keeps_row": True}
_reduces = {"kinds": "row"}
_NORMS = "layer_norm", "rms_norm", "standardize", "group_norm", "batch_norm"


def _group_norm_of_positions(w: Any, x: Any, scale: Any, bias: Any) -> Any:
    where = w.reshape(-1, 2, 4) if w is not None and w.shape == x.shape else w
    return masksafe.group_norm(x.reshape(-1, 2, 4), 2, scale, bias, where=where).reshape(x.shape)


def _weighted(op: Callable[..., Any], formula: Callable[..., Any], **others: Any) -> Op:
    return _by_row(_named(op, "x weights", axis=-1), formula, (X, WEIGHTS), **others)


def _of_weight_0(op: Op, key: str) -> Op:
    """The op whose mask is a weight of 0. What has derivatives even there is masked apart: see below."""
    at, name = next(i for i, a in enumerate(op.args) if a is WEIGHTS or a is TOKEN_WEIGHTS), key.split(",")[0]

    def call(w: Any, *args: Any, **axis: int) -> Any:
        if w is None:
            return op.call(None, *args, **axis)
        args = *args[:at], masksafe.mask_where(~w, args[at], 0), *args[at + 1 :]
        args = tuple(without_sign_of_zero(a) if i in op.floats else a for i, a in enumerate(args))  # of gradients
        out = op.call(None, *args, **axis)
        if name in ("sum", "ranking_softmax_loss"):  # a row of no weight
            return masksafe.mask_where(~w.any(axis.get("axis", -1)), out, 0)
        return masksafe.mask_where(~w, out, 0) if name in _NORMS else out  # an element of no weight

    if name == "ranking_softmax_loss":  # whose scores have no weights
        formula = lambda x, t, v, left: of.cross_entropy(x, np.where(left, t * v, 0))  # noqa: E731
        of_rows = of.by_row(formula, ("row",) * 4)
        definition = lambda w, *args: of_rows(np.ones_like(w), *args, w)  # noqa: E731
        op = op._replace(kinds=("whole", "row", "row"), definition=definition)
    return op._replace(call=call)


def _masked_mean(w: Any, x: Any, weights: Any = None, **by: Any) -> Any:
    return masksafe.MaskedMean.of(x, w, weights=weights, **by).value


def _by_segment(w: Any, x: Any, ids: Any, weights: Any = None) -> Any:
    return _masked_mean(w, x, weights, by="segment", segment_ids=ids)


def _reduction(op: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(op, axis=-1)


_log_probs = functools.partial(losses.log_probs, with_entropy=True)
_class_weighted = _named(
    losses.softmax_cross_entropy_with_integer_labels, "logits class_weights labels", **SMOOTHED, with_components=True
)
_linear = functools.partial(losses.linear_softmax_cross_entropy, block_size=2)
_linear_with_weights = _named(
    _linear, "features kernel bias weights labels", logit_soft_cap=3.0, class_weights=CLASS_WEIGHTS, **SMOOTHED
)
_linear_log_probs = functools.partial(losses.linear_log_probs, with_entropy=True, block_size=2)
_top_k = functools.partial(losses.linear_kl_divergence_with_top_k_targets, **OF_EACH)

OPS = {
    "squared_error": _elementwise("squared_error", lambda x, y: (x - y) ** 2, X, Y),
    "l2_loss": _elementwise("l2_loss", lambda x, y: (x - y) ** 2 / 2, X, Y),
    "huber_loss": _elementwise("huber_loss", of.huber, 2 * X, Y),
    "log_cosh": _elementwise("log_cosh", lambda x, y: np.log(np.cosh(x - y)), X, Y),
    "hinge_loss": _elementwise("hinge_loss", lambda s, t: np.maximum(0, 1 - s * t), X, SIGNS),
    "perceptron_loss": _elementwise("perceptron_loss", lambda s, t: np.maximum(0, -s * t), X, SIGNS),
    "sparsemax_loss": _elementwise("sparsemax_loss", of.sparse_plus, X, BITS)._replace(constants=(1,)),
    "sigmoid_binary_cross_entropy": _elementwise("sigmoid_binary_cross_entropy", of.sigmoid_cross_entropy, X, P),
    "sigmoid_focal_loss": _elementwise("sigmoid_focal_loss", of.focal, X, P),
    "sigmoid_focal_loss, alpha and gamma": _elementwise(
        "sigmoid_focal_loss", functools.partial(of.focal, alpha=0.3, gamma=1.5), X, P, alpha=0.3, gamma=1.5
    ),
    "softmax_cross_entropy": _by_row(losses.softmax_cross_entropy, of.cross_entropy, (X, P)),
    "softmax_cross_entropy, rows": _by_row(losses.softmax_cross_entropy, of.cross_entropy, (X, P), where=SOME_ROWS),
    "softmax_cross_entropy_with_integer_labels": _by_row(
        losses.softmax_cross_entropy_with_integer_labels, of.of_label, *LABELLED
    ),
    "softmax_cross_entropy_with_integer_labels, rows": _by_row(
        losses.softmax_cross_entropy_with_integer_labels, of.of_label, *LABELLED, SOME_ROWS
    ),
    "softmax_cross_entropy_with_integer_labels, smoothing": _by_row(
        functools.partial(losses.softmax_cross_entropy_with_integer_labels, with_components=True, **SMOOTHED),
        of.smoothed_of_label,
        *LABELLED,
        **_two_zeros,
    ),
    "softmax_cross_entropy_with_integer_labels, weighted classes": _by_row(
        _class_weighted,
        of.smoothed_and_weighted_of_label,
        (X, WEIGHTS[0], LABELS),
        "row, along, label",
        constants=(1,),
        **_two_zeros,
    ),
    "poly_loss_cross_entropy": _by_row(losses.poly_loss_cross_entropy, of.poly, (X, P)),
    "poly_loss_cross_entropy, epsilon": _by_row(
        _named(losses.poly_loss_cross_entropy, "logits labels epsilon"),
        of.poly,
        (X, P, TOKEN_WEIGHTS),
        "row, row, of row",
        has_axis=False,
    ),
    "log_probs": _by_row(_log_probs, of.log_prob, *LABELLED, **_two_zeros),
    "log_probs, temperature": _by_row(
        functools.partial(_log_probs, temperature=0.6),
        lambda x, label: of.log_prob(x / 0.6, label),
        *LABELLED,
        **_two_zeros,
    ),
    "kl_divergence": _by_row(losses.kl_divergence, of.divergence, (np.log(P), Q)),
    "generalized_kl_divergence": _by_row(losses.generalized_kl_divergence, of.generalized_divergence, (np.log(P), Q)),
    "convex_kl_divergence": _by_row(losses.convex_kl_divergence, of.generalized_divergence, (np.log(P), Q)),
    "kl_divergence_with_log_targets": _by_row(
        losses.kl_divergence_with_log_targets, lambda q, p: of.divergence(q, np.exp(p)), (np.log(P), np.log(Q))
    ),
    "cosine_similarity": _by_row(losses.cosine_similarity, of.cosine, (X, Y)),
    "cosine_distance": _by_row(losses.cosine_distance, lambda a, b: 1 - of.cosine(a, b), (X, Y)),
    "multiclass_hinge_loss": _by_row(losses.multiclass_hinge_loss, of.hinge_of_label, *LABELLED, has_axis=False),
    "multiclass_perceptron_loss": _by_row(
        losses.multiclass_perceptron_loss, of.perceptron_of_label, *LABELLED, has_axis=False
    ),
    "multiclass_sparsemax_loss": _by_row(
        losses.multiclass_sparsemax_loss, of.sparsemax_of_label, *LABELLED, has_axis=False
    ),
    "ranking_softmax_loss": _by_row(
        functools.partial(losses.ranking_softmax_loss, reduce_fn=None), of.cross_entropy, (X, P), has_axis=False
    ),
    "ranking_softmax_loss, weights": _by_row(
        _named(losses.ranking_softmax_loss, "logits labels weights", reduce_fn=None),
        lambda x, t, v: of.cross_entropy(x, t * v),
        (X, P, WEIGHTS),
        "row, row, row",
        has_axis=False,
    ),
    "make_fenchel_young_loss": _by_row(
        losses.make_fenchel_young_loss(masksafe.logsumexp), of.fenchel_young, (X, P), has_axis=False
    ),
    "smooth_labels": _by_row(
        functools.partial(losses.smooth_labels, alpha=0.1), of.smoothed, (P,), "row", keeps_row=True
    ),
    "triplet_margin_loss": _by_row(losses.triplet_margin_loss, of.triplet, (X, Y, Z), "row, row, row"),
    "ntxent": _of_batch(
        lambda w, z, **changed: losses.ntxent(z, jnp.arange(z.shape[0]) % 2, where=w, **changed),
        (X,),
        "row",
        SOME_ROWS,
        lambda w, z: (of.nt_xent(z[w], np.flatnonzero(w) % 2),),
    ),
    "info_nce_loss": _of_pairs("info_nce_loss", of.info_nce, scale=3.0),
    "info_nce_loss, ids": _of_pairs("info_nce_loss", of.info_nce, PAIR_IDS, scale=3.0, symmetric=False),
    "sigmoid_contrastive_loss": _of_pairs("sigmoid_contrastive_loss", of.sigmoid_contrastive, scale=3.0, bias=-1.0),
    "sigmoid_contrastive_loss, ids": _of_pairs(
        "sigmoid_contrastive_loss", of.sigmoid_contrastive, PAIR_IDS, scale=3.0, bias=-1.0
    ),
    "binary_dice_loss": _by_row(losses.binary_dice_loss, of.binary_dice, (X, BITS), has_axis=False),
    "dice_loss": _of_pixels(losses.dice_loss, of.by_row(of.dice, ("row", "row"))),
    "multiclass_generalized_dice_loss": _of_pixels(
        losses.multiclass_generalized_dice_loss, of.generalized_dice, has_rows=False
    ),
    "ctc_loss": _of_frames(losses.ctc_loss),
    "ctc_loss_with_forward_probs": _of_frames(lambda *a, **named: losses.ctc_loss_with_forward_probs(*a, **named)[0]),
    "linear_softmax_cross_entropy": _of_tokens(
        functools.partial(_linear, reduction="none"), of.linear_cross_entropy, *LAYER
    ),
    "linear_softmax_cross_entropy, mean": _of_batch(
        lambda w, *args: _linear(*args, where=w), *LAYER, SOME_ROWS, of.mean_of_linear_cross_entropy
    ),
    "linear_softmax_cross_entropy, weights": _of_tokens(
        functools.partial(_linear_with_weights, reduction="none"),
        functools.partial(of.weighted_linear_cross_entropy, CLASS_WEIGHTS),
        *LAYER_WITH_WEIGHTS,
    ),
    "linear_softmax_cross_entropy, mean with weights": _of_batch(
        lambda w, *args: _linear_with_weights(*args, where=w),
        *LAYER_WITH_WEIGHTS,
        SOME_ROWS,
        functools.partial(of.weighted_mean_of_linear_cross_entropy, CLASS_WEIGHTS),
    ),
    "linear_softmax_cross_entropy, a masked class": _with_padding(
        functools.partial(_linear_with_weights, reduction="none"),
        functools.partial(of.weighted_linear_cross_entropy, CLASS_WEIGHTS[PADDED]),
        *LAYER_WITH_WEIGHTS,
    ),
    "linear_log_probs": _of_tokens(_linear_log_probs, of.linear_log_prob, *LAYER, **_two_zeros),
    "linear_log_probs, a masked class": _with_padding(
        _named(_linear_log_probs, "features kernel bias labels", temperature=0.7, logit_soft_cap=3.0),
        lambda f, k, b, label: of.log_prob(of.soft_capped(f @ k + b) / 0.7, label),
        (FEATURES, KERNEL, CLASS_BIAS, LABELS),
        "row, whole, whole, label",
        **_two_zeros,
    ),
    "linear_kl_divergence": _of_tokens(
        functools.partial(losses.linear_kl_divergence, target_gradients=True, **OF_EACH), of.linear_divergence, *LAYERS
    ),
    "linear_kl_divergence_with_top_k_targets": _of_tokens(_top_k, of.top_k_divergence, *TOP_K, constants=(2,)),
    "linear_kl_divergence, reverse": _linear_divergence("reverse"),
    "linear_kl_divergence, jensen_shannon": _linear_divergence("jensen_shannon"),
    "linear_kl_divergence_with_top_k_targets, reverse without a rest": _of_tokens(
        functools.partial(_top_k, rest="drop", direction="reverse"),
        of.top_k_divergence_without_rest,
        *TOP_K,
        constants=(2,),
    ),
    "softmax": _by_row(masksafe.softmax, of.softmax, (X,), **_keeps),
    "log_softmax": _by_row(masksafe.log_softmax, of.log_softmax, (X,), nothing=(-np.inf,), **_keeps),
    "logsumexp": _by_row(_reduction(masksafe.logsumexp), of.logsumexp, (X,), nothing=(-np.inf,), **_reduces),
    "logmeanexp": _by_row(_reduction(masksafe.logmeanexp), of.logmeanexp, (X,), nothing=(-np.inf,), **_reduces),
    "logsumexp, factors": _by_row(
        _named(masksafe.logsumexp, "a b", return_sign=True, axis=-1), of.sum_and_sign, (X, Y), nothing=(-np.inf, 0.0)
    ),
    "layer_norm": _by_row(
        masksafe.layer_norm, of.layer_norm, (X, SCALE, BIAS), "row, along, along", COLUMNS, keeps_row=True
    ),
    "rms_norm": _by_row(masksafe.rms_norm, of.rms_norm, (X, SCALE), "row, along", COLUMNS, keeps_row=True),
    "standardize": _by_row(masksafe.standardize, of.standardize, (X,), **_keeps),
    "l2_normalize": _by_row(masksafe.l2_normalize, of.l2_normalize, (X,), **_keeps),
    "batch_norm": Op(
        _batch_norm,
        (X, floats(ROWS), floats(ROWS)),
        ("row", "of row", "of row"),
        ELEMENTS,
        of.batch_norm,
        nothing=(0.0, 0.0, 0.0),
    ),
    # Two elements have gradients of 0 but for epsilon: of a small one only rounding errors would be left.
    "group_norm": Op(_group_norm, (X, SCALE, BIAS), ("row", "along", "along"), COLUMNS, of.group_norm),
    "group_norm, positions": Op(
        _group_norm_of_positions,
        (TALL, SCALE, BIAS),
        ("row", "whole", "whole"),
        SOME_POSITIONS,
        of.group_norm_of_positions,
    ),
    "standardize, statistics": _by_row(
        _named(masksafe.standardize, "x mean variance"),
        of.standardize_by,
        (X, Y, WEIGHTS),
        "row, row, row",
        keeps_row=True,
    ),
    "batch_norm, statistics": Op(
        lambda w, x, mean, var: masksafe.batch_norm(x, axis=0, where=w, mean=mean, var=var)[0],
        (X, Y[:, 0], WEIGHTS[:, 0]),
        ("row", "of row", "of row"),
        ELEMENTS,
        of.by_row(of.standardize_by, ("row", "of row", "of row"), keeps_row=True),
    ),
    "layer_norm, weights": _weighted(masksafe.layer_norm, of.weighted_layer_norm, keeps_row=True),
    "rms_norm, weights": _weighted(masksafe.rms_norm, of.weighted_rms_norm, keeps_row=True),
    "standardize, weights": _weighted(masksafe.standardize, of.weighted_standardize, keeps_row=True),
    "group_norm, weights": Op(
        lambda w, x, v: masksafe.group_norm(x, 1, where=w, weights=v),
        (X, WEIGHTS),
        ("row", "row"),
        ELEMENTS,
        of.by_row(of.weighted_layer_norm, ("row", "row"), keeps_row=True),
    ),
    "batch_norm, weights": Op(
        lambda w, x, scale, v: masksafe.batch_norm(x, scale, axis=0, where=w, weights=v)[0],
        (X, Y[:, 0], WEIGHTS),
        ("row", "of row", "row"),
        ELEMENTS,
        of.by_row(lambda x, scale, v: scale * of.weighted_standardize(x, v), ("row", "of row", "row"), keeps_row=True),
    ),
    "sum": _by_row(_reduction(masksafe.sum), np.sum, (X,), **_reduces),
    "mean": _by_row(_reduction(masksafe.mean), np.mean, (X,), **_reduces),
    "var": _by_row(_reduction(masksafe.var), np.var, (X,), **_reduces),
    "var_mean": _by_row(_reduction(masksafe.var_mean), of.var_mean, (X,), "row", **_two_zeros),
    "max": _by_row(_reduction(masksafe.max), np.max, (X,), nothing=(-np.inf,), **_reduces),
    "min": _by_row(_reduction(masksafe.min), np.min, (X,), nothing=(np.inf,), **_reduces),
    "mean, weights": _weighted(masksafe.mean, of.weighted_mean),
    "var, weights": _weighted(masksafe.var, of.weighted_var),
    "sum, weights": _weighted(masksafe.sum, lambda x, w: np.sum(w * x)),
    "var_mean, weights": _weighted(masksafe.var_mean, of.weighted_var_mean, **_two_zeros),
    "MaskedMean, weights": _of_batch(_masked_mean, (X, WEIGHTS), "row, row", ELEMENTS, of.mean_of_all),
    "MaskedMean": _of_batch(_masked_mean, (X,), "row", ELEMENTS, of.mean_of_all),
    "MaskedMean, by sequence": _of_batch(
        functools.partial(_masked_mean, by="sequence"),
        (X,),
        "row",
        ELEMENTS,
        lambda w, x: of.mean_of_means(w, x, np.zeros(x.shape)),
    ),
    "MaskedMean, by segment": _of_batch(_by_segment, (X, DOCUMENTS), "row, row", ELEMENTS, of.mean_of_means),
    "MaskedMean, weights by segment": _of_batch(
        _by_segment, (X, DOCUMENTS, WEIGHTS), "row, row, row", ELEMENTS, of.mean_of_means
    ),
    "segment_sum": _of_segments("segment_sum", np.sum),
    "segment_sum, rows": _of_segments("segment_sum", np.sum, where=SOME_ROWS),
    "segment_mean": _of_segments("segment_mean", np.mean),
    "segment_var": _of_segments("segment_var", np.var),
    "segment_var, rows": _of_segments("segment_var", np.var, where=SOME_ROWS),
    "segment_max": _of_segments("segment_max", np.max, -np.inf),
    "segment_min": _of_segments("segment_min", np.min, np.inf),
    "segment_logsumexp": _of_segments("segment_logsumexp", of.logsumexp, -np.inf),
    "segment_softmax": _of_segments("segment_softmax", of.softmax, keeps_row=True),
    "segment_softmax, rows": _of_segments("segment_softmax", of.softmax, keeps_row=True, where=SOME_ROWS),
    "segment_log_softmax": _of_segments("segment_log_softmax", of.log_softmax, -np.inf, keeps_row=True),
    # As in `group_norm`.
    "segment_standardize": _of_segments(
        "segment_standardize", lambda x: of.standardize(x, 0.5), keeps_row=True, options={"epsilon": 0.5}
    ),
    "segment_sum, weights": _of_segments("segment_sum", lambda x, v: np.sum(v * x), weights=WEIGHTS),
    "segment_mean, weights": _of_segments("segment_mean", of.weighted_mean, weights=WEIGHTS),
    "segment_mean, weights of rows": _of_segments(
        "segment_mean", of.weighted_mean, where=SOME_ROWS, weights=TOKEN_WEIGHTS
    ),
    "segment_var, weights": _of_segments("segment_var", of.weighted_var, weights=WEIGHTS),
    "segment_var, weights of rows": _of_segments(
        "segment_var", of.weighted_var, where=SOME_ROWS, weights=TOKEN_WEIGHTS
    ),
    "load_balancing_loss": _of_batch(
        lambda w, *args: losses.load_balancing_loss(*args, where=w),
        (P, EXPERTS),
        "row, row",
        SOME_ROWS,
        of.load_balance,
    ),
    "router_z_loss": _by_row(losses.router_z_loss, lambda x: of.logsumexp(x) ** 2, (X,), "row"),
    "ragged_dot": Op(_ragged_dot, (X, MATRICES, GROUPS), ("row", "whole", "row"), SOME_ROWS, of.rows_times_matrices),
    "mask_where": Op(
        lambda w, x: masksafe.mask_where(~w, x, np.zeros((), x.dtype)),
        (X,),
        ("row",),
        ELEMENTS,
        of.elementwise(lambda x: x),
        may_be_unmasked=False,
    ),
    "apply_where": Op(_doubled, (X,), ("row",), ELEMENTS, of.elementwise(lambda x: 2 * x), may_be_unmasked=False),
    "dot_product_attention": _attention_over(np.ones((T, S), bool), of.attention),
    "dot_product_attention, options": _attention_over(
        (BEHIND >= 0) & (BEHIND <= 3) & (QUERY_AT + KEY_AT != 9) & IN_LENGTHS & IN_SEGMENTS,
        functools.partial(of.attention_with_options, behind=BEHIND),
        floats(1, HEADS, T, S),
        floats(HEADS),
        np.float32([0.6]),
        floats(HEADS),
        options=_all_options,
        may_be_unmasked=False,  # which costs one more program
    ),
    # Products of matrices with a side of 1, which XLA computes in other ways.
    "dot_product_attention, one query": _attention_over(
        np.ones_like(ONE_QUERY), of.attention, where=ONE_QUERY, key_heads=HEADS
    ),
    "dot_product_attention, one key": _attention_over(np.ones_like(ONE_KEY), of.attention, where=ONE_KEY),
    "merge_attention": Op(
        _merged,
        (floats(2, 3, 2, 4), floats(2, 3, 2)),
        ("row", "row"),
        PARTS,
        of.merge,
        nothing=(0.0, -np.inf),
        may_be_unmasked=False,
        has_rows=False,
    ),
}
OPS |= {f"{key} of 0": _of_weight_0(op, key) for key, op in OPS.items() if "weights" in key}
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
