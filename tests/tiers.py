"""Which cases of a test run by default, and how programs are compiled that have to be those of users."""

import functools
import itertools

import jax

# Ops of the contract's table: each of these has a loop, a layout or a rule of its own; the others are computed like one
# of them.
KINDS = ("softmax_cross_entropy", "softmax_cross_entropy_with_integer_labels", "cosine_similarity", "kl_divergence")
KINDS += ("layer_norm", "batch_norm", "log_softmax", "var", "max", "segment_max", "segment_softmax", "squared_error")
KINDS += ("linear_softmax_cross_entropy", "linear_kl_divergence", "info_nce_loss", "dot_product_attention")
# Those that run by default.
FEW = ("softmax_cross_entropy_with_integer_labels", "layer_norm", "segment_softmax", "linear_softmax_cross_entropy")
FEW += ("dot_product_attention",)
# Of these the contract's programs are compiled as those of users. Attention has large ones, and such tests of its own.
AS_OF_USERS = tuple(key for key in KINDS if key != "dot_product_attention")

# By default the tests' processes do without the emitters (conftest.py), which later versions always have.
EMITTERS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else None


def optimised_jit(fn):
    """`jax.jit` with them; within another program the function itself, for JAX refuses compiler options there."""
    program = jax.jit(fn, compiler_options=EMITTERS)

    @functools.wraps(fn)
    def run(*args):
        is_within = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
        return (fn if is_within else program)(*args)

    run.lower = program.lower
    return run


def pairs(*choices):
    """Rows of the product of some choices, as few as have every pair of two values: a fault seldom needs three."""
    rows = list(itertools.product(*choices))
    found = [set(itertools.combinations(enumerate(map(repr, row)), 2)) for row in rows]
    left, kept = set().union(*found), []
    while left:
        best = max(range(len(rows)), key=lambda i: len(found[i] & left))
        left -= found[best]
        kept.append(rows[best])
    return kept
