"""masksafe in the layers of other libraries: `flax_attention`, and a module of layers for each library.

`masksafe.adapters.nnx`, `masksafe.adapters.linen` and `masksafe.adapters.equinox` are imported by their names, and need
the library that they are for.
"""

from masksafe.adapters._flax_attention import flax_attention

__all__ = ["flax_attention"]
