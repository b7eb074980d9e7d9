"""The data of `two_towers.py`: docstrings and names of functions as bags of words and their trigrams, hashed."""

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from names import split_words
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

DOCSTRING, NAME = 64, 24  # the most features of a text
ROWS = 256  # of a batch, with padding
FEATURES = 2**14


class Texts(NamedTuple):
    features: np.ndarray  # [N, most], indices of the table
    weights: np.ndarray  # [N, most], rare features weigh more
    lengths: np.ndarray  # [N], how many there are; 0 is padding


class Pairs(NamedTuple):
    """Docstrings and names of the same functions."""

    docstrings: Texts
    names: Texts
    ids: np.ndarray  # [N], equal for functions with the same name, or the same docstring

    def rows(self, index: Any) -> "Pairs":
        return jax.tree.map(lambda x: x[index], self)


def split_name(name: str) -> list[str]:
    """The words of a name in snake case or camel case."""
    return re.findall(r"[a-z]+|[0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())


def features_of(words: list[str]) -> list[str]:
    return [f for w in words for f in (w, *(f"<{w}>"[i : i + 3] for i in range(len(w)) if len(w) > 2))]


def hashed(feature: str) -> int:
    return zlib.crc32(feature.encode()) % FEATURES


def make_texts(texts: list[list[str]], rarity: dict[str, float], most: int) -> Texts:
    features, weights = np.zeros((len(texts), most), np.int32), np.zeros((len(texts), most), np.float32)
    for i, text in enumerate(texts):
        features[i, : len(text)] = [hashed(f) for f in text[:most]]
        weights[i, : len(text)] = [rarity[f] for f in text[:most]]
    return Texts(features, weights, np.minimum([len(text) for text in texts], most).astype(np.int32))


def number_alike(functions: list[tuple[str, str]]) -> np.ndarray:
    """A number for each function, the same for those with equal names or equal docstrings."""
    columns = [np.unique(column, return_inverse=True)[1] for column in zip(*functions, strict=True)]
    ends = columns[0], columns[1] + max(columns[0]) + 1
    size = max(ends[1]) + 1
    return connected_components(coo_array((np.ones(len(functions)), ends), shape=(size, size)))[1][ends[0]]


def make_pairs(functions: list[tuple[str, str]]) -> Pairs:
    docstrings = [features_of([w for w in split_words(d) if w.isalnum()]) for d, _ in functions]
    names = [features_of(split_name(n)) for _, n in functions]
    counts = Counter(f for text in (*docstrings, *names) for f in set(text))
    rarity = {f: math.log(2 * len(functions) / n) for f, n in counts.items()}
    return Pairs(make_texts(docstrings, rarity, DOCSTRING), make_texts(names, rarity, NAME), number_alike(functions))


def select_functions(functions: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those with a docstring and a name that tell something, each once."""
    return sorted({(d, n) for d, n in functions if len(split_words(d)) > 2 and not n.startswith("__")})


def hold_out(pairs: Pairs, number: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the functions to train on, and of so many others, of which no two are alike."""
    ids, first = np.unique(pairs.ids, return_index=True)
    chosen = generator.permutation(len(ids))[:number]
    return np.flatnonzero(~np.isin(pairs.ids, ids[chosen])), first[chosen]


# Batches, and what stands in their padding.

ZEROS, LAST_ROW, GARBAGE = "zeros", "the last row again", "NaN, inf, 1e38"
GARBAGE_NUMBERS = [np.nan, np.inf, -np.inf, 1e38, -1e38]
GARBAGE_FEATURES = [-1, FEATURES, np.iinfo(np.int32).max, np.iinfo(np.int32).min]


class Batch(NamedTuple):
    pairs: Pairs
    where: np.ndarray  # [ROWS], False is padding


def draw_batches(pairs: Pairs, epochs: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """The functions of each batch, from a quarter of the rows to all of them."""
    for _ in range(epochs):
        order, first = generator.permutation(len(pairs.ids)), 0
        while first < len(order):
            number = generator.integers(ROWS // 4, ROWS + 1)
            yield order[first : first + number]
            first += number


def pad_texts(texts: Texts, where: np.ndarray, padding: str, generator: np.random.Generator) -> Texts:
    """The texts with zeros or garbage behind the end of each, and in all of the rows of padding."""
    lengths = np.where(where, texts.lengths, 0)
    is_real = np.arange(texts.features.shape[1]) < lengths[:, None]
    numbers, features = (GARBAGE_NUMBERS, GARBAGE_FEATURES) if padding == GARBAGE else ([0.0], [0])
    return Texts(
        np.where(is_real, texts.features, generator.choice(features, is_real.shape)).astype(np.int32),
        np.where(is_real, texts.weights, generator.choice(numbers, is_real.shape)).astype(np.float32),
        lengths,
    )


def make_batch(pairs: Pairs, index: np.ndarray, padding: str, generator: np.random.Generator) -> Batch:
    where = np.arange(ROWS) < len(index)
    rows = pairs.rows(np.pad(index, (0, ROWS - len(index)), mode="edge"))
    if padding == LAST_ROW:
        return Batch(rows, where)
    docstrings, names = (pad_texts(texts, where, padding, generator) for texts in (rows.docstrings, rows.names))
    return Batch(Pairs(docstrings, names, np.where(where, rows.ids, 0)), where)
