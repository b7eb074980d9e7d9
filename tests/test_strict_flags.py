"""Everything but the losses and attention where JAX refuses to promote ranks and dtypes by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe

X = np.ones((3, 4, 5), np.float32)
ROW = np.ones(5, np.float32)
PARAMETER = np.ones((4, 5), np.float32)
WHERES = {"no mask": None, "elements": np.ones((3, 4, 5), bool), "columns": np.ones(5, bool)}
OPS = {
    "softmax": lambda x, where: masksafe.softmax(x, where=where),
    "log_softmax": lambda x, where: masksafe.log_softmax(x, (0, 2), where),
    "logsumexp": lambda x, where: masksafe.logsumexp(x, -1, where=where),
    "logsumexp with factors": lambda x, where: masksafe.logsumexp(x, -1, x.astype(jnp.float32), where=where),
    "layer_norm": lambda x, where: masksafe.layer_norm(x, ROW, ROW, where=where),
    "layer_norm over two axes": lambda x, where: masksafe.layer_norm(x, PARAMETER, axis=(1, 2), where=where),
    "rms_norm": lambda x, where: masksafe.rms_norm(x, ROW, where=where, epsilon=0),
    "standardize": lambda x, where: masksafe.standardize(x, where=where),
    "standardize with statistics": lambda x, where: masksafe.standardize(x, -1, ROW, ROW, where=where),
    "sum": lambda x, where: masksafe.sum(x, 1, where),
    "mean": lambda x, where: masksafe.mean(x, where=where),
    "var": lambda x, where: masksafe.var(x, -1, where),
    "var_mean": lambda x, where: masksafe.var_mean(x, (0, 1), where, correction=1),
    "mask_where": lambda x, where: masksafe.mask_where(np.ones(5, bool) if where is None else where, x, 0),
    "apply_where": lambda x, where: masksafe.apply_where(
        np.ones(x.shape, bool) if where is None else where, (x, ROW), lambda x, y: x + y, fill_value=0.0
    ),
}


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("where", ["no mask", "columns", pytest.param("elements", marks=pytest.mark.slow)])
def test_value_and_derivatives_are_traced(op, where):
    total = lambda x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(op(x, WHERES[where])))  # noqa: E731
    along = lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]  # noqa: E731
    jax.eval_shape(along(jax.grad(total)), X)
    jax.eval_shape(jax.grad(lambda x: jnp.sum(jax.grad(total)(x))), X)
    with masksafe.forward_mode():
        jax.eval_shape(along(total), X)


@pytest.mark.parametrize(
    "name", sorted(set(OPS) - {"logsumexp with factors", "standardize with statistics", "apply_where"})
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_value_and_gradient_of_16_bit_inputs_are_traced(name, dtype):
    total = lambda x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(OPS[name](x, WHERES["elements"])))  # noqa: E731
    assert jax.eval_shape(jax.grad(total), X.astype(dtype)).dtype == dtype
