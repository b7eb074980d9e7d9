"""Every public op has its name in profiles, and refuses keywords of jax.numpy and torch by an error that names ours."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import parametrize

import masksafe
from masksafe._core.public_op import public_op

SWITCHES = "forward_mode", "label_checks", "set_label_checks"
NO_OPS = {*SWITCHES, "RouterStatistics", "MaskedMean", "value_and_grad_of_mean"}
MAKES_AN_OP = "make_fenchel_young_loss"
X = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("op", "keyword", "value", "way_out"),
    [
        ("var", "ddof", 1, "expected the keyword correction"),
        ("var_mean", "unbiased", False, "unbiased=True is correction=1"),
        ("mean", "dtype", np.float32, r"Convert the array: masksafe\.mean\(x\.astype\(dtype\)\)"),
        ("mean", "mask", X > 0, "expected the keyword where"),
        ("mean", "weight", X, "expected the keyword weights"),
        ("max", "initial", 0.0, r"jnp\.maximum\(masksafe\.max"),
        ("min", "out", X, "JAX does not write into arrays"),
        ("sum", "keepdim", True, "expected the keyword keepdims"),
        ("softmax", "dim", 1, "expected the keyword axis"),
        ("log_softmax", "dtype", np.float32, r"masksafe\.log_softmax\(x\.astype"),
        ("logsumexp", "keepdim", True, "expected the keyword keepdims"),
        ("layer_norm", "eps", 1e-5, "expected the keyword epsilon"),
        ("rms_norm", "weight", X, "expected the keyword scale"),
        ("batch_norm", "mask", X > 0, "expected the keyword where"),
        ("standardize", "dim", 1, "expected the keyword axis"),
        ("standardize", "var", X, "expected the keyword variance"),
        ("batch_norm", "variance", X[0], "expected the keyword var"),
        ("l2_normalize", "eps", 1e-5, "expected the keyword epsilon"),
        (
            "dot_product_attention",
            "key_padding_mask",
            X > 0,
            r"keyword mask\. There True masks.*~key_padding_mask\[:, None",
        ),
        ("softmax", "weights", X, r"keyword where\. .*masksafe\.mean\(softmax\(\.\.\.\), weights=weights\)"),
        ("dot_product_attention", "segment_ids", X > 0, "keywords query_segment_ids and key_value_segment_ids"),
    ],
)
def test_refusal_names_our_keyword(op, keyword, value, way_out):
    with pytest.raises(TypeError, match=f"^{op}: {keyword}: got a keyword of another library; .*{way_out}"):
        getattr(masksafe, op)(X, **{keyword: value})


@parametrize(
    ("module", "name", "way_out"),
    [(masksafe, "softmax_cross_entropy", r"write masksafe\.losses\.softmax_cross_entropy$")],
    exhaustive=[
        (masksafe.losses, "cross_entropy", r"write masksafe\.losses\.softmax_cross_entropy_with_integer_labels, or"),
        (masksafe.losses, "mse_loss", r"write masksafe\.losses\.squared_error$"),
    ],
)
def test_an_unknown_name_names_ours(module, name, way_out):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': {way_out}"):
        getattr(module, name)


def test_names_of_other_libraries_are_not_ours():
    for name, ours in masksafe.losses._OURS.items():
        assert not hasattr(masksafe.losses, name)
        assert ours.split(",")[0].split()[0] in masksafe.losses.__all__


def test_weights_of_a_loss_are_of_classes_or_of_its_mean():
    of_classes, of_rows = "softmax_cross_entropy_with_integer_labels", "squared_error"
    for op, keyword, ours in (
        (of_classes, "weight", "class_weights"),
        (of_classes, "weights", "class_weights"),
        (of_rows, "weights", "where"),
    ):
        with pytest.raises(TypeError, match=f"^{op}: {keyword}: got .* expected the keyword {ours}"):
            getattr(masksafe.losses, op)(X, X, **{keyword: X})


def test_other_keywords_are_refused_as_by_any_function():
    with pytest.raises(TypeError, match=r"^mean\(\) got an unexpected keyword argument 'axes'"):
        masksafe.mean(X, axes=1)


def test_every_public_op_is_one():
    found = {name: getattr(module, name) for module in (masksafe, masksafe.losses) for name in module.__all__}
    found[MAKES_AN_OP] = masksafe.losses.make_fenchel_young_loss(masksafe.logsumexp)
    ops = {name: fn for name, fn in found.items() if not inspect.ismodule(fn) and name not in NO_OPS}
    assert len(ops) > 50
    assert not [name for name, fn in ops.items() if fn.__code__ is not public_op(lambda: None).__code__]


def test_a_profile_names_the_ops():
    def loss(x):
        return masksafe.mean(masksafe.losses.squared_error(x, jnp.ones_like(x)), weights=jnp.exp(x))

    program = jax.jit(jax.grad(loss)).lower(X).as_text(debug_info=True)
    for scope in ("jvp(masksafe.squared_error)", "transpose(jvp(masksafe.mean))"):
        assert scope in program
