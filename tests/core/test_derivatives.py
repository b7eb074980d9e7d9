"""forward_mode and the wrapper of reverse rules."""

import traceback

import jax
import numpy as np
import pytest

import masksafe

LOGITS = np.array([[1.0, 2.0, -1.0], [0.5, 0.0, 3.0]], np.float32)
LABELS = np.array([0, 2])
# Other forms of its transformations that JAX tries; `.ci/coming_forms` turns them on.
VJP3, JVP3, REMAT3 = (getattr(jax.config, f"jax_{name}", False) for name in ("custom_vjp3", "custom_jvp3", "remat3"))
IS_OLD = jax.__version_info__ < (0, 12)


def loss(logits):
    return masksafe.losses.softmax_cross_entropy_with_integer_labels(logits, LABELS)


def test_jacfwd_and_linearize_agree_with_reverse_mode_up_to_third_derivatives():
    def along(x):
        return loss(LOGITS * x).sum()

    with masksafe.forward_mode():
        second = jax.jacfwd(jax.jacfwd(along))
        forward = jax.jit(lambda x: (jax.jacfwd(second)(x), jax.linearize(second, x)[1](1.0)))(1.0)
    # Terms that cancel, in float32.
    np.testing.assert_allclose(forward, [jax.jit(jax.grad(jax.grad(jax.grad(along))))(1.0)] * 2, rtol=1e-4)


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
    "linearize": pytest.param(
        lambda x: jax.linearize(loss, x)[1](x),
        marks=pytest.mark.xfail(VJP3 and IS_OLD, strict=True, reason="JAX has another error"),
    ),
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_refusal_inside_a_compiled_function_shows_the_way_out(late):
    with pytest.raises(TypeError, match="custom_vjp") as caught:
        late(LOGITS)
    assert "`with masksafe.forward_mode():`" in "".join(traceback.format_exception(caught.value))


def gradient(op):
    return jax.grad(lambda x: op(x).sum())


def gradient_of_a_loop(op):
    return gradient(lambda x: jax.lax.scan(lambda total, _: (total + op(x).sum(), None), 0.0, length=2)[0])


def second_derivative(op):
    return lambda x: jax.jvp(gradient(op), (x,), (x,))[1]


@pytest.mark.xfail(
    VJP3 and (IS_OLD or (REMAT3 and not JVP3)), strict=True, reason="a rule with static arguments is not rematerialised"
)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("derivative", [gradient, gradient_of_a_loop, second_derivative])
def test_rematerialisation_changes_no_derivative(derivative, op):
    expected, actual = (jax.jit(derivative(f))(LOGITS) for f in (op, jax.checkpoint(op)))
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
