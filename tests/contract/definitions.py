"""What each op computes, by its definition: in float64, of what is left when the masked elements are taken out.

A definition takes a mask and arrays, and returns a tuple of outputs. The formulas know of no mask: `elementwise`,
`by_row` and `of_attention` take out of the arrays what is masked before they call one.
"""

import functools
import itertools
import math

import numpy as np


def elementwise(formula):
    def definition(where, *args):
        out = np.zeros(where.shape)
        out[where] = formula(*(a[where] for a in args))
        return (out,)

    return definition


def by_row(formula, kinds, nothing=(0.0,), keeps_row=False):
    """The outputs of each row of which something is left; elsewhere `nothing`.

    With `keeps_row` an output has the shape of a row, and is `nothing` where that is masked. The kinds of arguments are
    those of `table.Op`.
    """

    def definition(where, *args):
        shape = where.shape if keeps_row else where.shape[:1]
        outputs = [np.full(shape, n) for n in nothing]
        for i in np.flatnonzero(where.any(tuple(range(1, where.ndim)))):
            parts = [part_of(kind, a, i, where[i]) for kind, a in zip(kinds, args, strict=True)]
            for number, result in zip(range(len(outputs)), as_tuple(formula(*parts)), strict=True):
                if not keeps_row and np.ndim(result) >= outputs[number].ndim:  # a row has several
                    outputs[number] = np.full((*shape, *np.shape(result)), nothing[number])
                outputs[number][(i, where[i]) if keeps_row else i] = result
        return tuple(outputs)

    return definition


def part_of(kind, a, i, left):
    """What is left of an argument for row `i`; a label becomes the number of its class among those left."""
    if kind == "row":
        return a[i][left] if left.ndim else a[i]
    if kind == "label":
        return np.concatenate([[0], np.cumsum(left)])[a[i]] if left.ndim else a[i]
    return {"along": lambda: a[left], "of row": lambda: a[i], "whole": lambda: a}[kind]()


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


def rows_times_matrices(where, x, matrices, groups):
    out = np.zeros((len(x), matrices.shape[2]))
    out[where] = np.einsum("mk,mkn->mn", x[where], matrices[groups[where]])
    return (out,)


# Elementwise losses.


def huber(x, y):
    e = np.abs(x - y)
    return np.where(e <= 1, e**2 / 2, e - 1 / 2)


def sigmoid_cross_entropy(x, t):
    return t * np.logaddexp(0, -x) + (1 - t) * np.logaddexp(0, x)


def focal(x, t, alpha=None, gamma=2):
    p = 1 / (1 + np.exp(-x))
    weight = 1 if alpha is None else alpha * t + (1 - alpha) * (1 - t)
    return weight * (p * (1 - t) + (1 - p) * t) ** gamma * sigmoid_cross_entropy(x, t)


def sparse_plus(x, t):
    z = x * (1 - 2 * t)
    return np.where(z <= -1, 0, np.where(z >= 1, z, (z + 1) ** 2 / 4))


# Of the logits, the scores or the probabilities of a row.


def logsumexp(x):
    return np.max(x) + np.log(np.sum(np.exp(x - np.max(x))))


def logmeanexp(x):
    return logsumexp(x) - np.log(len(x))


def log_softmax(x):
    return x - logsumexp(x)


def sum_and_sign(x, b):
    """The log of |sum b exp(x)|, and the sign of the sum."""
    total = np.sum(b * np.exp(x))
    return np.log(np.abs(total)), np.sign(total)


def softmax(x):
    return np.exp(log_softmax(x))


def cross_entropy(x, t):
    return np.sum(t * -log_softmax(x))


def ranking_of_weight_0(where, x, t, weights):
    """Whose scores have no weights."""
    return (np.array([cross_entropy(*row) for row in zip(x, np.where(where, t * weights, 0), strict=True)]),)


def poly(x, t, epsilon=2):
    return cross_entropy(x, t) + epsilon * np.sum(t * (1 - softmax(x)))


def of_label(x, label):
    return -log_softmax(x)[label]


def smoothed_of_label(x, label):
    return smoothed_and_weighted_of_label(x, 1.0, label)


def smoothed_and_weighted_of_label(x, class_weights, label):
    costs = class_weights * -log_softmax(x)
    return 0.9 * costs[label] + 0.1 * np.mean(costs), 0.01 * logsumexp(x) ** 2


def log_prob(x, label):
    p = softmax(x)
    return log_softmax(x)[label], -np.sum(np.where(p == 0, 0, p * log_softmax(x)))


def divergence(log_q, p):
    return np.sum(p * np.where(p == 0, 0, np.log(p) - log_q))


def generalized_divergence(log_q, p):
    return divergence(log_q, p) + np.sum(np.exp(log_q) - p)


def fenchel_young(x, t):
    return logsumexp(x) - np.sum(x * t)


def hinge_of_label(s, label):
    return np.max(s + (np.arange(len(s)) != label)) - s[label]


def perceptron_of_label(s, label):
    return np.max(s) - s[label]


def sparsemax_of_label(s, label):
    ordered = np.sort(s)[::-1]
    thresholds = (np.cumsum(ordered) - 1) / np.arange(1, len(s) + 1)
    p = np.maximum(s - thresholds[np.sum(ordered > thresholds) - 1], 0)
    return np.sum(p * (s - s[label])) + (1 - np.sum(p**2)) / 2


def cosine(a, b):
    return np.sum(a * b) / np.sqrt(np.sum(a**2) * np.sum(b**2))


def triplet(a, p, n):
    distance = lambda u, v: np.sqrt(np.sum((u - v) ** 2) + 1e-6)  # noqa: E731
    return np.maximum(0, distance(a, p) - distance(a, n) + 1)


def smoothed(t):
    return 0.9 * t + 0.1 / len(t)


def nt_xent(z, labels):
    """Of what is left of a batch."""
    unit = z / np.sqrt(np.sum(z**2, -1, keepdims=True))
    x = unit @ unit.T / 0.07
    same = labels[:, None] == labels
    pairs = [(i, j) for i, j in itertools.permutations(range(len(z)), 2) if same[i, j]]
    of_pair = [x[i, j] - logsumexp(np.append(x[i][~same[i]], x[i, j])) for i, j in pairs]
    return -np.mean(of_pair) if pairs else 0.0


def ctc(logits, label):
    """Minus the log probability that a path of classes, one for each frame, reads as the label."""
    log_p = np.stack([log_softmax(frame) for frame in logits])
    frames, classes = log_p.shape

    def reads(path):
        return [c for i, c in enumerate(path) if c and (not i or path[i - 1] != c)] == list(label)

    paths = [path for path in itertools.product(range(classes), repeat=frames) if reads(path)]
    return -logsumexp(np.array([sum(log_p[range(frames), path]) for path in paths])) if paths else 1e5


def _pairs_of_batch(where, x, y, scale, ids):
    """The logits of what is left, which pairs are negatives, and an array for the losses of all rows."""
    ids = np.arange(len(x)) if ids is None else ids
    left = np.flatnonzero(where)
    return scale * x[left] @ y[left].T, ids[left][:, None] != ids[left], left, np.zeros(len(x))


def info_nce(where, x, y, scale, ids=None, symmetric=True):
    z, negative, left, out = _pairs_of_batch(where, x, y, scale, ids)
    for k, i in enumerate(left):
        others = negative[k] | (np.arange(len(left)) == k)
        of_row, of_column = (logsumexp(v[others]) - z[k, k] for v in (z[k], z[:, k]))
        out[i] = (of_row + of_column) / 2 if symmetric else of_row
    return (out,)


def sigmoid_contrastive(where, x, y, scale, bias, ids=None):
    z, negative, left, out = _pairs_of_batch(where, x, y, scale, ids)
    for k, i in enumerate(left):
        out[i] = np.logaddexp(0, -z[k, k] - bias[0]) + np.sum(np.logaddexp(0, z[k] + bias[0])[negative[k]])
    return (out,)


# Segmentation: of the pixels [pixels, classes] that are left of a sample.


def dice_of_classes(p, t):
    both = np.sum(p * t, 0)
    return 1 - (both + 1) / ((np.sum(p, 0) + np.sum(t, 0)) / 2 + 1)


def dice(x, t):
    return np.mean(dice_of_classes(np.stack([softmax(pixel) for pixel in x]), t))


def binary_dice(x, t):
    return dice_of_classes(1 / (1 + np.exp(-x)), t)


def generalized_dice(where, x, t):
    """Of a batch [batch, pixels, classes] with a mask of pixels."""
    if not where.any():
        return (0.0,)
    frequencies = t[where].sum(0)
    weights = 1 / (frequencies**2 + 1e-7)
    weights = weights / np.mean(weights)
    samples = [(p[left], t[left]) for left, p, t in zip(where, x, t, strict=True) if left.any()]
    of_classes = [dice_of_classes(np.stack([softmax(pixel) for pixel in p]), t) for p, t in samples]
    return (np.mean(np.stack(of_classes) * weights),)


# Of linear layers: one token.


def linear_cross_entropy(f, kernel, label):
    return of_label(f @ kernel, label)


def soft_capped(x):
    """By 3; a logit of -inf excludes its class as without a cap."""
    return np.where(x == -np.inf, x, 3 * np.tanh(x / 3))


def weighted_linear_cross_entropy(class_weights, f, kernel, bias, weight, label):
    """With a smoothing of 0.1 and a z-loss of 0.01."""
    x = soft_capped(f @ kernel + bias)
    costs = class_weights * -log_softmax(x)
    return weight * (0.9 * costs[label] + 0.1 * np.mean(costs) + 0.01 * logsumexp(x) ** 2)


def mean_of_linear_cross_entropy(where, *args):
    (losses,) = by_row(linear_cross_entropy, ("row", "whole", "label"))(where, *args)
    return (np.sum(losses) / max(1, where.sum()),)


def weighted_mean_of_linear_cross_entropy(class_weights, where, *args):
    kinds = ("row", "whole", "whole", "row", "label")
    (losses,) = by_row(lambda *row: weighted_linear_cross_entropy(class_weights, *row), kinds)(where, *args)
    weights, labels = (a[where] for a in args[3:])
    return (np.sum(losses) / max(np.sum(weights * class_weights[labels]), 1e-300),)


def divergence_of_linear_layers(classes, direction, f, kernel, g, target_kernel, bias, target_bias):
    """Among some classes, of logits divided by 1.5; p has a part of 0.3 in the mixture."""
    log_q = log_softmax((f @ kernel + bias)[classes] / 1.5)
    log_p = log_softmax((g @ target_kernel + target_bias)[classes] / 1.5)
    p, q = np.exp(log_p), np.exp(log_q)
    if direction == "reverse":
        return divergence(log_p, q)
    log_m = np.log(0.3 * p + 0.7 * q)
    return 0.3 * divergence(log_m, p) + 0.7 * divergence(log_m, q)


def linear_log_prob(f, kernel, label):
    return log_prob(f @ kernel, label)


def linear_divergence(f, kernel, g, target_kernel):
    return divergence(log_softmax(f @ kernel), softmax(g @ target_kernel))


def top_k_divergence(f, kernel, target_log_probs, classes):
    """Over the classes of the target and one more, for all of the rest."""
    q, p = softmax(f @ kernel)[classes], np.exp(target_log_probs)
    return np.sum(p * np.log(p / q)) + (1 - p.sum()) * np.log((1 - p.sum()) / (1 - q.sum()))


def top_k_divergence_without_rest(f, kernel, target_log_probs, classes):
    return divergence(log_softmax(target_log_probs), softmax((f @ kernel)[classes]))


# Reductions and norms of a row.


def weighted_mean(x, w):
    return np.sum(w * x) / np.sum(w)


def mean_of_all(where, x, w=None):
    """Of a batch; 0 of nothing."""
    weights = np.ones(x.shape) if w is None else w
    return (np.sum((x * weights)[where]) / max(np.sum(weights[where]), 1e-300),)


def mean_of_means(where, x, ids, w=None):
    """Of the segments of all rows; 0 of nothing."""
    weights = np.ones(x.shape) if w is None else w
    left = [where[row] & (ids[row] == i) for row in range(len(x)) for i in np.unique(ids[row])]
    rows = [row for row in range(len(x)) for _ in np.unique(ids[row])]
    means = [weighted_mean(x[row][s], weights[row][s]) for row, s in zip(rows, left, strict=True) if s.any()]
    return (np.sum(means) / max(1, len(means)),)


def weighted_var(x, w):
    return weighted_mean((x - weighted_mean(x, w)) ** 2, w)


def weighted_var_mean(x, w):
    return weighted_var(x, w), weighted_mean(x, w)


def var_mean(x):
    return np.var(x), np.mean(x)


def layer_norm(x, scale=1.0, bias=0.0, epsilon=1e-6):
    return standardize(x, epsilon) * scale + bias


def rms_norm(x, scale):
    return x / np.sqrt(np.mean(x**2) + 1e-6) * scale


def standardize(x, epsilon=1e-5):
    return standardize_by(x, np.mean(x), np.var(x), epsilon)


def standardize_by(x, mean, variance, epsilon=1e-5):
    return (x - mean) / np.sqrt(variance + epsilon)


def weighted_layer_norm(x, w):
    return standardize_by(x, weighted_mean(x, w), weighted_var(x, w), 1e-6)


def weighted_rms_norm(x, w):
    return standardize_by(x, 0, weighted_mean(x**2, w), 1e-6)


def weighted_standardize(x, w):
    return standardize_by(x, weighted_mean(x, w), weighted_var(x, w))


def l2_normalize(x):
    return x / np.sqrt(np.sum(x**2))


# Segments of the rows [rows, columns], column by column; and tokens of a router.


def by_segment(formula, number, nothing=0.0, keeps_row=False):
    """As `by_row`, of what is left in each column of the rows of a segment; the last argument has their numbers."""

    def definition(where, *args):
        *arrays, ids = args
        where = np.broadcast_to(where.reshape(len(ids), -1), arrays[0].shape)
        out = np.full(arrays[0].shape if keeps_row else (number, *arrays[0].shape[1:]), nothing)
        for s, column in itertools.product(range(number), range(arrays[0].shape[1])):
            left = (ids == s) & where[:, column]
            if left.any():
                parts = (np.broadcast_to(a.reshape(len(ids), -1), where.shape)[left, column] for a in arrays)
                out[(left, column) if keeps_row else (s, column)] = formula(*parts)
        return (out,)

    return definition


def load_balance(where, p, indices):
    """Of tokens [tokens] with assignments [tokens, k], of which -1 is none."""
    experts = p.shape[1]
    assigned = indices[where][indices[where] >= 0]
    if not len(assigned):
        return (np.zeros(()),)
    shares = np.bincount(assigned, minlength=experts) / len(assigned)
    return (experts * np.sum(shares * p[where].mean(0)),)


def batch_norm(where, x, scale, bias):
    """Of features [features, batch]: the result, and the moments."""
    rows = by_row(lambda x, scale, bias: standardize(x) * scale + bias, ("row", "of row", "of row"), keeps_row=True)
    return (*rows(where, x, scale, bias), *by_row(lambda x: (np.mean(x), np.var(x)), ("row",), (0.0, 0.0))(where, x))


def group_norm(where, x, scale, bias):
    """Of two groups of the channels [samples, channels]."""
    formula = functools.partial(layer_norm, epsilon=0.5)
    of_group = by_row(formula, ("row", "along", "along"), keeps_row=True)
    halves = [of_group(*(np.array_split(a, 2, -1)[k] for a in (where, x, scale, bias)))[0] for k in range(2)]
    return (np.concatenate(halves, -1),)


def group_norm_of_positions(where, x, scale, bias):
    """The same of samples [samples, 2 positions * 4 channels]."""
    out = np.zeros(where.shape)
    for columns in ([0, 1, 4, 5], [2, 3, 6, 7]):
        normalized = by_row(layer_norm, ("row",), keeps_row=True)(where[:, columns], x[:, columns])[0]
        channels = np.array(columns) % 4
        out[:, columns] = np.where(where[:, columns], normalized * scale[channels] + bias[channels], 0)
    return (out,)


# Attention: q [B, T, N, H], k and v [B, S, K, H], a mask [B, T, S].


def attention(where, q, k, v, scale=None, change=lambda x, *pairs: x):
    """The output, and the logsumexp [B, T, N]; `change` gets the logits of a query, and the indices of the pairs."""
    groups, scale = q.shape[2] // k.shape[2], 1 / math.sqrt(q.shape[3]) if scale is None else scale
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], -np.inf)
    for b, t, n in np.ndindex(q.shape[:3]):
        left = np.flatnonzero(where[b, t])
        if left.size:
            x = change(scale * k[b, left, n // groups] @ q[b, t, n], b, n, t, left)
            out[b, t, n], lse[b, t, n] = softmax(x) @ v[b, left, n // groups], logsumexp(x)
    return out, lse


def largest_logits(where, q, k, v):
    """Of each head [N]; -inf of no pair."""
    found = np.full(q.shape[2], -np.inf)
    for b, t, n in np.ndindex(q.shape[:3]):
        left = np.flatnonzero(where[b, t])
        logits = k[b, left, n * k.shape[2] // q.shape[2]] @ q[b, t, n] / math.sqrt(q.shape[3])
        found[n] = np.max(logits, initial=found[n])
    return (found,)


def attention_with_options(where, q, k, v, bias, sinks, scale, slopes, behind):
    """With a soft cap of 2, then a bias, a `score_mod` of the distance, and sinks, which the logsumexp leaves out."""

    def change(x, b, n, t, s):
        return (2 * np.tanh(x / 2) + bias[0, n, t, s]) * (1 + slopes[n] * (1 + b) * np.sqrt(behind[b, t, s]))

    out, lse = attention(where, q, k, v, scale, change)
    return out / (1 + np.exp(sinks - np.where(np.isfinite(lse), lse, 0)))[..., None], lse


def merge(where, outs, lses):
    """Of parts [parts, T, N, H] that a query sees or not [parts, T, N]."""
    out, lse = np.zeros(outs.shape[1:]), np.full(lses.shape[1:], -np.inf)
    for index in np.ndindex(lse.shape):
        left = where[:, *index]
        if left.any():
            x = lses[left, *index]
            out[index], lse[index] = softmax(x) @ outs[left, *index], logsumexp(x)
    return out, lse


# Derivatives of a definition, by differences.


BEND = 0.1  # of the function of the outputs whose second derivatives are taken


def derivatives(op, cotangents, directions, step=1e-3):
    """By each of the floats: the gradients of the outputs' sum with cotangents, and the slopes of others.

    These are the gradients of the sum of y + BEND y^2 / 2 for outputs y, with the cotangents; the slopes are along
    the directions. An element of each row is moved at once, where outputs belong to rows: no other row has a part in
    them.
    """
    args = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in op.args]

    def totals(along, number, index, distance):
        """Of each row, or of everything: the two sums."""
        moved = list(args)
        for i, v in zip(op.floats, directions, strict=True):
            moved[i] = args[i] + along * step * v
        moved[number] = np.array(moved[number])
        moved[number][index] += distance * step
        outputs = [np.where(np.isfinite(x), x, 0) for x in op.definition(op.where, *moved)]
        terms = [np.stack([x * c, (x + BEND * x * x / 2) * c]) for x, c in zip(outputs, cotangents, strict=True)]
        if index[0] == slice(None):
            return sum(x.reshape(*x.shape[:2], -1).sum(2) for x in terms)
        return sum(x.reshape(2, -1).sum(1) for x in terms)

    gradients = {along: [np.zeros((2, *args[i].shape)) for i in op.floats] for along in (-1, 1)}
    for along, of_floats in gradients.items():
        for gradient, number in zip(of_floats, op.floats, strict=True):
            by_row = op.has_rows and op.kinds[number] in ("row", "of row")
            indices = np.ndindex(gradient.shape[2:]) if by_row else np.ndindex(gradient.shape[1:])
            for index in indices:
                index = (slice(None), *index) if by_row else index
                above, below = (totals(along, number, index, distance) for distance in (1, -1))
                gradient[(slice(None), *index)] = (above - below) / (2 * step)
    pairs = list(zip(gradients[-1], gradients[1], strict=True))
    return [(a[0] + b[0]) / 2 for a, b in pairs], [(b[1] - a[1]) / (2 * step) for a, b in pairs]
