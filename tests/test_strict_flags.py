"""Several axes and masks that broadcast, where JAX refuses to promote ranks and dtypes by itself.

The programs of the contract, whose masks are whole and whose axis is one, run under the same flags.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe

X, PARAMETER = np.ones((3, 4, 5), np.float32), np.ones((4, 5), np.float32)
OPS = {
    "log_softmax": lambda x, where: masksafe.log_softmax(x, (0, 2), where),
    "layer_norm": lambda x, where: masksafe.layer_norm(x, PARAMETER, axis=(1, 2), where=where),
    "var_mean": lambda x, where: masksafe.var_mean(x, (0, 1), where, correction=1),
    "mean": lambda x, where: masksafe.mean(x, where=where),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_value_and_derivatives_are_traced(op, dtype):
    total = lambda x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(op(x, np.ones(5, bool))))  # noqa: E731
    along = lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]  # noqa: E731
    x = X.astype(jnp.dtype(dtype))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(along(jax.grad(total)), x).dtype == dtype
        jax.eval_shape(jax.grad(lambda x: jnp.sum(jax.grad(total)(x))), x)
        with masksafe.forward_mode():
            jax.eval_shape(along(total), x)
