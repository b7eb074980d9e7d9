"""masksafe in the layers of other libraries: `flax_attention`, and a module of layers for each library.

`masksafe.adapters.nnx`, `masksafe.adapters.linen` and `masksafe.adapters.equinox` are imported when they are first
used, and need the library that they are for.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

from masksafe.adapters._conversion import Conversion
from masksafe.adapters._flax_attention import flax_attention

if TYPE_CHECKING:
    from masksafe.adapters import equinox as equinox
    from masksafe.adapters import linen as linen
    from masksafe.adapters import nnx as nnx

__all__ = ["Conversion", "flax_attention"]  # what needs no other library

_LIBRARY_OF = {"equinox": "equinox", "linen": "flax", "nnx": "flax"}


def __getattr__(name: str) -> object:
    """Imports the layers for a library on first use."""
    library = _LIBRARY_OF.get(name)
    if library is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        text = f"{__name__}.{name} needs {library}, which is not installed: pip install {library}"
        raise ModuleNotFoundError(text, name=library) from error


def __dir__() -> list[str]:
    return [*__all__, *(name for name, library in _LIBRARY_OF.items() if importlib.util.find_spec(library))]
