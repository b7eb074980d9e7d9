"""Every op, with its gradients, is exported with symbolic sizes for CPU, GPU and TPU, whatever platform runs here."""

import functools

import jax
import pytest
from program import assert_close, cotangents_of, each_kind, run, value_and_gradients
from table import OPS, SEGMENTS_OF_ROWS

PLATFORMS = "cpu", "cuda", "tpu"


def exported(key):
    """The op with its gradients, and arrays to call it with."""
    scope = jax.export.SymbolicScope()

    def symbolic(a):
        sizes = ",".join(size_of(key, axis, n) for axis, n in enumerate(a.shape))
        return jax.ShapeDtypeStruct(jax.export.symbolic_shape(sizes, scope=scope), a.dtype)

    args = OPS[key].where, OPS[key].args, cotangents_of(key)
    step = jax.jit(functools.partial(value_and_gradients, key))
    return jax.export.export(step, platforms=PLATFORMS)(*jax.tree.map(symbolic, args)), args


def size_of(key, axis, n):
    """A symbol, where the op takes one; of a variant, whose options may be arrays, only the number of rows is one."""
    name = OPS[key].name
    is_fixed = n < 3 or (name == "dot_product_attention" and axis == 3) or (key != name and n != len(OPS[key].where))
    is_fixed |= name.startswith(("segment_", "ragged_dot")) and n == SEGMENTS_OF_ROWS
    return str(n) if is_fixed else f"2 * half_of_{n}" if name == "group_norm" else f"n{n}"


@each_kind()
def test_export_with_symbolic_sizes_asks_for_no_platform_and_gives_the_same(key, monkeypatch):
    with monkeypatch.context() as patches:
        for name in ("default_backend", "devices", "local_devices"):
            patches.setattr(jax, name, lambda *_, **__: pytest.fail("what an op does is decided when it is lowered"))
        program, args = exported(key)
    assert program.platforms == PLATFORMS
    assert_close(jax.export.deserialize(program.serialize()).call(*args), run(key)[:2])
