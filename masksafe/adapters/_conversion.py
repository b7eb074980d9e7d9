"""Which layers of a model are replaced, and the record of it. No other library is imported here."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What `convert` did with the norms and attention layers of a model: `str` and `print` make a table of it.

    A path is that of the attributes and indices from the model to the layer, joined by dots; of a layer in several
    places it is one of them. Layers that were masksafe's before are in neither dictionary.

    Attributes:
      replaced: from the path of each replaced layer to the name of its class.
      left: from the path of each other one to the name of its class and the reason.

    Example:
      Layers at the same place of several blocks share a line:

      >>> from masksafe.adapters import Conversion
      >>> lacking = "LayerNorm", "masksafe has no axis_index_groups"
      >>> replaced = {"blocks.0.norm": "LayerNorm", "blocks.1.norm": "LayerNorm"}
      >>> print(Conversion(replaced, {"norm": lacking}))
      blocks.*.norm  LayerNorm x 2  replaced
      norm           LayerNorm      left: masksafe has no axis_index_groups
    """

    replaced: dict[str, str] = dataclasses.field(default_factory=dict)
    left: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        outcomes = [(path, name, "replaced") for path, name in self.replaced.items()]
        outcomes += [(path, name, f"left: {reason}") for path, (name, reason) in self.left.items()]
        alike = defaultdict(list)
        for path, name, outcome in outcomes:
            pattern = ".".join("*" if part.isdecimal() else part for part in path.split("."))
            alike[pattern, name, outcome].append(path)
        rows = [
            (paths[0] or "(model)", name, outcome) if len(paths) == 1 else (pattern, f"{name} x {len(paths)}", outcome)
            for (pattern, name, outcome), paths in alike.items()
        ]
        if not rows:
            return "nothing replaced"
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:2]
        return "\n".join(f"{path:{widths[0]}}  {name:{widths[1]}}  {outcome}" for path, name, outcome in rows)


def replacement(
    record: Conversion,
    path: str,
    layer: object,
    ours: Mapping[type, type],
    others: Mapping[type, str],
    what_ours_lacks: Callable[[Any], str | None],
) -> type | None:
    """Masksafe's class for a layer, or None where it stays; the record gets either.

    `ours` has the class for each of the library, and `others` the reason why those of further classes stay.
    """
    kind = type(layer)
    if kind in ours:
        reason = what_ours_lacks(layer)
        if reason is None:
            record.replaced[path] = kind.__name__
            return ours[kind]
    elif isinstance(layer, tuple(ours.values())):
        return None
    else:
        reasons = {known: f"a subclass of {known.__name__}" for known in ours} | dict(others)
        reason = next((reason for known, reason in reasons.items() if isinstance(layer, known)), None)
    if reason is not None:
        record.left[path] = kind.__name__, reason
    return None
