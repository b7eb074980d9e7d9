"""forward_mode and the wrapper of reverse rules."""

import traceback

import jax
import numpy as np
import pytest

import masksafe

LOGITS = np.array([[1.0, 2.0, -1.0], [0.5, 0.0, 3.0]], np.float32)
LABELS = np.array([0, 2])


def loss(logits):
    return masksafe.losses.softmax_cross_entropy_with_integer_labels(logits, LABELS)


def test_jvp_linearize_and_jacfwd_work_inside():
    @jax.jit
    def derivatives(logits):
        along = jax.jvp(loss, (logits,), (logits,))[1], jax.linearize(loss, logits)[1](logits)
        return along, jax.jacfwd(loss)(logits)

    with masksafe.forward_mode():
        along, jacobian = derivatives(LOGITS)
    expected = jax.jit(jax.jacrev(loss))(LOGITS)
    for tangent in along:  # float32 has seven digits
        np.testing.assert_allclose(tangent, np.sum(expected * LOGITS, (1, 2)), rtol=1e-5)
    np.testing.assert_allclose(jacobian, expected, rtol=1e-5)


def test_third_derivatives_agree_between_the_modes():
    def along(x):
        return loss(LOGITS * x).sum()

    with masksafe.forward_mode():
        forward = jax.jit(jax.jacfwd(jax.jacfwd(jax.jacfwd(along))))(1.0)
    # Terms that cancel, in float32.
    np.testing.assert_allclose(jax.jit(jax.grad(jax.grad(jax.grad(along))))(1.0), forward, rtol=1e-4)


OPS = {
    "an op": loss,
    "attention": lambda x: masksafe.dot_product_attention(*[x[None, :, None]] * 3),
    "a reduction": masksafe.var,
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_refusal_of_forward_mode_names_the_way_out(op):
    with pytest.raises(TypeError, match=r"custom_vjp function\..*with masksafe\.forward_mode\(\)") as caught:
        jax.jvp(op, (LOGITS,), (LOGITS,))
    assert str(caught.value).count("masksafe.forward_mode()") == 1


LATE = {
    "jvp of jit": lambda x: jax.jvp(jax.jit(loss), (x,), (x,)),
    "jacfwd of jit": jax.jacfwd(jax.jit(loss)),
    "linearize": lambda x: jax.linearize(loss, x)[1](x),
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_refusal_inside_a_compiled_function_shows_the_way_out(late):
    with pytest.raises(TypeError, match="custom_vjp") as caught:
        late(LOGITS)
    assert "`with masksafe.forward_mode():`" in "".join(traceback.format_exception(caught.value))
