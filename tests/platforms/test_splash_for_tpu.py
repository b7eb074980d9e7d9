"""Splash attention under the contract, compiled for a TPU v5e that need not be there, beside the bare kernel.

The compiler tells bytes and temporaries, of kernels what they read and write. The numbers of the kernels are shown, in
interpretation, by `tests/attention/test_attention_splash.py`.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from programs import devices

import masksafe

pytestmark = pytest.mark.optimised

B, T, N, H = 2, 4096, 8, 128


def bare(q, k, v):
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((T, T))]),
        block_sizes=splash_attention_kernel.BlockSizes(**dict.fromkeys(names, 512)),
        head_shards=1,
        q_seq_shards=1,
    )
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in ((q * H**-0.5).astype(q.dtype), k, v))
    return jnp.swapaxes(jax.vmap(kernel)(q, k, v), 1, 2)


def ours(q, k, v):
    return masksafe.dot_product_attention(q, k, v, is_causal=True, implementation="splash")


def compiled(target, fn, *shapes):
    program = jax.jit(fn, in_shardings=jax.sharding.SingleDeviceSharding(devices(target)[0])).lower(*shapes).compile()
    return program.cost_analysis()["bytes accessed"], program.memory_analysis().temp_size_in_bytes, program.as_text()


def with_gradients(fn):
    def run(d_out, *inputs):
        out, reverse = jax.vjp(fn, *inputs)
        return out, reverse(d_out)

    return run


# The most kernels, bytes and temporaries, in units of the bare kernel's.
AIMS = {"value": (lambda fn: fn, 1, 1.1, 1.0), "both": (with_gradients, 3, 1.15, 1.4)}


@pytest.mark.parametrize("what", AIMS)
def test_against_the_bare_kernel(v5e, what):
    program_of, kernels, moved, temporaries = AIMS[what]
    shapes = [jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)] * (3 if what == "value" else 4)
    (own, own_temporaries, text), (peer, peer_temporaries, _) = (
        compiled(v5e, program_of(fn), *shapes) for fn in (ours, bare)
    )
    assert text.count('custom_call_target="tpu_custom_call"') == kernels
    assert own / peer < moved
    assert own_temporaries <= temporaries * peer_temporaries + 2**20
