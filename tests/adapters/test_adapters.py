"""The modules of layers as attributes of `masksafe.adapters`, with their libraries and without."""

import subprocess
import sys

import pytest
from tiers import parametrize

import masksafe

LIBRARY_OF = {"nnx": "flax", "linen": "flax", "equinox": "equinox"}


def test_each_is_loaded_on_first_use():
    program = 'import sys, masksafe; assert masksafe.adapters and not {"flax", "equinox"} & set(sys.modules)'
    subprocess.run([sys.executable, "-c", program], check=True)
    for name in LIBRARY_OF:
        assert getattr(masksafe.adapters, name).LayerNorm.__module__ == f"masksafe.adapters.{name}"


@parametrize(("name", "library"), [("nnx", "flax")], exhaustive=LIBRARY_OF.items())
def test_without_its_library_it_says_what_is_missing(name, library, monkeypatch):
    forget(name, monkeypatch)
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    with pytest.raises(ImportError, match=rf"^masksafe\.adapters\.{name} needs {library}, .*: pip install {library}$"):
        getattr(masksafe.adapters, name)
    assert name not in dir(masksafe.adapters)


def test_another_missing_module_is_named_as_it_is(monkeypatch):
    forget("nnx", monkeypatch)
    monkeypatch.setitem(sys.modules, "flax.nnx.module", None)
    with pytest.raises(ImportError, match=r"^import of flax\.nnx\.module"):
        _ = masksafe.adapters.nnx


def forget(name, monkeypatch):
    monkeypatch.delitem(sys.modules, f"masksafe.adapters.{name}", raising=False)
    monkeypatch.delitem(vars(masksafe.adapters), name, raising=False)


def test_what_there_is():
    assert set(dir(masksafe.adapters)) == {"Conversion", "flax_attention", *LIBRARY_OF}
    with pytest.raises(AttributeError, match="no attribute 'haiku'"):
        _ = masksafe.adapters.haiku
