"""The data of `language_model.py`: functions of the standard library, as prompts and bodies, packed into rows."""

import ast
import collections
import contextlib
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import shared

IGNORED = -100  # the label of a masked token
END, FIRST_BYTE, FIRST_WORD = 0, 1, 257  # a word that is not in the vocabulary is spelled in bytes


class Function(NamedTuple):
    """Signature and docstring, and the body that follows."""

    prompt: str
    body: str


def read_functions() -> list[Function]:
    found: list[Function] = []
    for tree, source in shared.library_sources():
        with contextlib.suppress(UnicodeDecodeError):
            found += functions_of(tree, source.decode("utf-8").splitlines(keepends=True))
    return found


def functions_of(tree: ast.AST, lines: list[str]) -> Iterator[Function]:
    """The functions of a module and the methods of its classes, without those nested in functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            statements = node.body[1:] if has_docstring else node.body
            if statements and statements[0].lineno > node.lineno:
                start, middle, end = node.lineno - 1, statements[0].lineno - 1, node.end_lineno
                text = textwrap.dedent("".join(lines[start:end])).splitlines()
                prompt, body = text[: middle - start], text[middle - start :]
                yield Function("\n".join(prompt), "".join(f"\n{line}" for line in body))
        else:
            yield from functions_of(node, lines)


def split_words(text: str) -> list[str]:
    """Splits into words of names with a leading space or underscores, digits, signs, and line ends with indentation."""
    return re.findall(r"\n *| ?_*[A-Z]?[a-z]+| ?_*[A-Z]+| ?\d| ?[^\w\s]|\w|\s", text)


class Vocabulary:
    """The most frequent words; all others are spelled in bytes, so nothing is unknown."""

    def __init__(self, functions: Iterable[Function], size: int) -> None:
        counts = collections.Counter(word for f in functions for word in split_words(f.prompt + f.body))
        self.words = [word for word, _ in counts.most_common(size - FIRST_WORD)]
        self.tokens = {word: FIRST_WORD + i for i, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        def tokens_of(word: str) -> list[int]:
            return [self.tokens[word]] if word in self.tokens else [FIRST_BYTE + b for b in word.encode()]

        return [token for word in split_words(text) for token in tokens_of(word)]

    def decode(self, tokens: Iterable[int]) -> str:
        def bytes_of(token: int) -> bytes:
            if token < FIRST_WORD:
                return bytes([token - FIRST_BYTE]) if token != END else b""
            return self.words[token - FIRST_WORD].encode()

        return b"".join(bytes_of(int(token)) for token in tokens).decode(errors="replace")


class Rows(NamedTuple):
    """Packed rows, every array `[rows, length]`."""

    inputs: np.ndarray
    labels: np.ndarray  # the next token; IGNORED in prompts and padding
    segments: np.ndarray  # which function a token belongs to, from 1; 0 is padding
    positions: np.ndarray  # within the function

    def __getitem__(self, index: Any) -> "Rows":  # type: ignore[override]
        return Rows(*(array[index] for array in tuple(self)))


def pack(functions: Iterable[Function], vocabulary: Vocabulary, length: int) -> Rows:
    """Packs functions one after another, and starts a new row if one does not fit. Long ones are cut."""
    rows: list[tuple[np.ndarray, ...]] = []
    used, segment = length, 0
    for function in functions:
        prompt, body = vocabulary.encode(function.prompt), vocabulary.encode(function.body)
        tokens = np.array([*prompt, *body, END][: length + 1])
        number = len(tokens) - 1
        if used + number > length:
            rows.append((np.full(length, END), np.full(length, IGNORED), np.zeros(length, int), np.zeros(length, int)))
            used, segment = 0, 0
        inputs, labels, segments, positions = (array[used : used + number] for array in rows[-1])
        used, segment = used + number, segment + 1
        inputs[:], segments[:], positions[:] = tokens[:-1], segment, np.arange(number)
        labels[len(prompt) - 1 :] = tokens[len(prompt) :]
    return Rows(*map(np.stack, zip(*rows, strict=True)))


def prepare_data(config: Any) -> tuple[Rows, Rows, list[Function], Vocabulary]:
    """Rows for training, rows held out, the functions of these, and the vocabulary."""
    functions = read_functions()
    np.random.default_rng(config.seed).shuffle(functions)
    held_out, training = functions[:256], functions[256:]
    vocabulary = Vocabulary(training, config.vocabulary)
    return pack(training, vocabulary, config.length), pack(held_out, vocabulary, config.length), held_out, vocabulary
