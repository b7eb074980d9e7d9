"""JAX's primitives: what the search for a NaN has to know of them, by name.

The differences between the versions of JAX are here. A test holds every name to those of the JAX at hand.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jax.extend import core


def has_program(params: Mapping[str, Any]) -> bool:
    """Whether a program, with or without constants, is among the parameters of an equation."""
    return any(True for _ in core.jaxprs_in_params(params))


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Programs inside of equations.

# Those that only run the program in one of their parameters.
CALLS = _names("call closed_call custom_jvp_call custom_vjp_call custom_vmap_call jit remat2")
PROGRAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")  # the names of that parameter
# Those whose program only combines two numbers.
COMBINING = ("reduce", "scatter", "select_and_")  # beginnings of names

# Devices.

# Those that only change the mesh axes over which an array in a shard_map is said to vary.
RETYPINGS = _names("pbroadcast pvary reduced_vary_cast vary_unreduced_cast")
# Those that move an array between devices.
PLACEMENTS = _names("device_put reshard sharding_constraint")
SUMS_OVER_DEVICES = _names("psum psum_invariant")
# Here each element that a device receives comes from elements at the same index.
ELEMENTWISE_EXCHANGES = SUMS_OVER_DEVICES | {"pmax", "pmin", "ppermute"}
EXCHANGES = ELEMENTWISE_EXCHANGES | _names("""
    all_gather all_gather_invariant all_gather_reduced all_to_all axis_index reduce_scatter unreduced_psum
    unreduced_reduce_scatter
""")

# What influences what.

SELECTIONS = _names("select_n")
# Each element of the result depends only on the elements of the operands at the same index.
ELEMENTWISE = _names("""
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj convert_element_type
    copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le le_to
    lgamma log log1p logistic lt lt_to max min mul ne neg nextafter not or population_count pow real reduce_precision
    rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub
    tan tanh without_sign_of_zero xor
""")
# Each element of the result is an element of an operand.
MOVES = _names("""
    broadcast_in_dim concatenate dynamic_slice dynamic_update_slice gather pad reshape rev scatter slice
    split squeeze stack tile transpose
""")
# Each element of the result is a sum of elements of the operands, or of their products.
LINEAR = MOVES | {"conv_general_dilated", "dot_general", "ragged_dot_general", "reduce_window_sum", "scatter-add"}
# Where among the operands the indices start.
FIRST_INDEX = dict.fromkeys(("gather", "scatter", "scatter-add", "dynamic_slice"), 1)
FIRST_INDEX |= dict.fromkeys(("dynamic_update_slice", "ragged_dot_general"), 2)
RESHAPES = _names("reshape squeeze")
REDUCTIONS = _names("argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")
CUMULATIVE = _names("cumlogsumexp cummax cummin cumprod cumsum")
MATRIX_OPS = _names("cholesky eig eigh householder_product lu qr schur svd triangular_solve tridiagonal_solve")
# The axes along which elements are mixed, from the parameters and the rank.
MIXED_AXES: dict[str, Callable[[Mapping[str, Any], int], tuple[int, ...]]] = {
    "sort": lambda params, ndim: (params["dimension"],),
    "top_k": lambda params, ndim: (params.get("axis", -1) % ndim,),
    "fft": lambda params, ndim: tuple(range(ndim - len(params["fft_lengths"]), ndim)),
}
EXTREMES = _names("and max min or reduce_and reduce_max reduce_min reduce_or")
PRODUCTS = _names("mul reduce_prod")
# They pass on a NaN that the program wrote as one that it wrote.
ARITHMETIC = _names("add div mul sub")
