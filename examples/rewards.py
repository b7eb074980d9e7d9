"""The verifiable reward of `policy_gradient.py`: whether a name begins with the verb of its docstring."""

from typing import NamedTuple

import names
import numpy as np

# fmt: off
VERBS = {
    "add", "check", "close", "convert", "create", "find", "get", "handle",
    "parse", "process", "read", "remove", "send", "set", "test", "write",
}
# fmt: on


def reward(docstring: str, name: str | None) -> float:
    """How much of the docstring's first word, a verb, is the first of two words or more that make the name.

    As in `set_value`, "Set the value.": 1 for all of its letters, in part for those up to the first wrong one. 0 if the
    name is no identifier, or has not ended (None).
    """
    verb = names.split_words(docstring)[0]
    parts = [part for part in (name or "").lower().split("_") if part]
    if name is None or not name.isidentifier() or len(parts) < 2:
        return 0.0
    wrong = (i for i, (x, y) in enumerate(zip(parts[0], verb, strict=False)) if x != y)
    return next(wrong, min(len(parts[0]), len(verb))) / max(len(parts[0]), len(verb))


class Prompts(NamedTuple):
    """Docstrings that begin with a verb, as texts and as tokens `[functions, docstring_length]`."""

    texts: list[str]
    tokens: np.ndarray


def prompts_of(functions: list[tuple[str, str]], data: names.Functions) -> Prompts:
    rows = [i for i, (docstring, _) in enumerate(functions) if names.split_words(docstring)[0] in VERBS]
    return Prompts([functions[i][0] for i in rows], data.docstrings[rows])


def rewards_of(texts: list[str], labels: np.ndarray) -> np.ndarray:
    found = [names.read(row) if names.END in row else None for row in labels]
    return np.array([reward(text, name) for text, name in zip(texts, found, strict=True)], np.float32)
