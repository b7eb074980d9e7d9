"""Rule 2. The gradient with respect to a masked element is exactly 0."""

import jax
import jax.numpy as jnp
import numpy as np
from program import assert_is_nothing, each_op, polluted, run
from table import OPS

import masksafe


@each_op(by_weights=True)
def test_derivatives_by_what_is_masked_are_0(key):
    op = OPS[key]
    results = run(key, args=polluted(key, op.where))
    hidden = [op.hides(op.where)[i] for i in op.floats]
    for by_args in (results.gradients, results.forward_over_reverse):
        for of_arg, mask in zip(by_args, hidden, strict=True):
            assert_is_nothing(of_arg[mask])
            assert np.isfinite(of_arg).all()


def test_the_scale_of_a_row_without_weight_is_in_no_gradient():
    x, weights, scale = np.float32([[1, 3], [2, 5]]), np.float32([[0, 0], [1, 2]]), np.float32([np.nan, 2])
    loss = lambda *args: jnp.sum(jnp.sin(masksafe.batch_norm(args[0], scale, axis=0, weights=args[1])[0]))  # noqa: E731
    for gradient in jax.jit(jax.grad(loss, (0, 1)))(x, weights):
        assert_is_nothing(gradient[0])
        assert np.isfinite(gradient).all()
