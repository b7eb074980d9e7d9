"""What log-probabilities and entropies of a linear layer have of their own: the two apart, ties and temperatures."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from linear_cases import BAD, BIAS, CLASSES, FEATURES, KERNEL, LABELS, TOKENS, WIDTH, bad_rows, singles

from masksafe.losses import linear_log_probs

both = functools.partial(linear_log_probs, with_entropy=True)
pytestmark = pytest.mark.usefixtures("small_tiles")


def plain(features, kernel, labels, **_):
    """The formula with all logits in memory, which JAX differentiates in any dtype."""
    log_p = jax.nn.log_softmax(jnp.matmul(features, kernel))
    return jnp.take_along_axis(log_p, labels[:, None], -1)[:, 0], -jnp.sum(jnp.exp(log_p) * log_p, -1)


@pytest.mark.parametrize(("temperature", "entropy"), [(1e-38, 0), (1e38, TOKENS * np.log(CLASSES))])
def test_extreme_temperatures(platform, temperature, entropy):
    of = functools.partial(both, kernel=np.float32(KERNEL), labels=LABELS, temperature=temperature)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: jnp.sum(of(x)[1])))(np.float32(FEATURES) / 8)
    np.testing.assert_allclose(value, entropy, rtol=1e-6)
    assert np.isfinite(gradient).all()


# A label out of range leaves the entropy; a bad logit does not.


@pytest.mark.parametrize("platform", ["elsewhere", "cpu"], indirect=True)
def test_what_is_bad_reaches_the_outputs_that_depend_on_it(platform):
    """A label out of range, which leaves the entropy; and a logit that overflows."""

    @jax.jit
    def step(features, labels, kernel):
        outputs = lambda f: both(f, kernel, labels, bias=np.float32(BIAS), block_size=9)  # noqa: E731
        kept = lambda f: jnp.sum(jnp.where(BAD, 0, sum(outputs(f))))  # noqa: E731
        of_each = [jax.grad(lambda f, k=k: jnp.sum(outputs(f)[k]))(features) for k in (0, 1)]
        return outputs(features), of_each, jax.grad(kept)(features)

    features, kernel = singles((FEATURES, KERNEL))
    (_, entropies), (_, of_entropies), _ = step(features, LABELS, kernel)
    (log_probs, actual), (of_log_probs, d_actual), _ = step(features, np.where(BAD, CLASSES, LABELS), kernel)
    assert bad_rows(log_probs) == bad_rows(of_log_probs) == [5]
    assert_close((actual, d_actual), (entropies, of_entropies), rtol=1e-6, atol=1e-7)
    overflow = np.where(BAD[:, None] & (np.arange(WIDTH) == 0), 3, features * (np.arange(WIDTH) > 0))
    kernel = np.where(np.arange(WIDTH)[:, None] == 0, np.where(np.arange(CLASSES) == 3, 3e38, 0), kernel)
    outputs, gradients, kept = step(overflow, LABELS, np.float32(kernel))
    bad_log_probs = bad_rows(np.where(np.isfinite(outputs[0]), 0, np.nan))  # -inf beside another logit of +inf
    assert [bad_log_probs, *map(bad_rows, (outputs[1], *gradients))] == [[5]] * 4
    assert not np.isnan(kept).any()  # a weight of 3e38 gives infinite ones
    assert not kept[5].any()


TIED = np.array(
    [
        [0, 0, 0, 0, 0, 0, 0, 0],  # ties between and within devices
        [1, 0, 0, 0, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 30],  # the largest on the last device, nearly certain
        [0, 25, 0, 0, 0, 0, 0, 0],
        [-1e4, -1e4, 0, 1, -1e4, -1e4, -1e4, 2],  # nothing on some devices
        [2, -1e4, 2, 1, 0, 0, 1, 2],
        [0, 1, 0, 0, np.nan, 0, 2, 0],
    ],
    np.float32,
)


def test_ties_between_devices_and_a_bad_logit(platform):
    labels = np.array([0, 6, 7, 0, 3, 7, 1])

    def total(fn):
        def of(features, kernel):
            outputs = fn(features, kernel, labels, with_entropy=True)
            return jnp.sum(outputs[0] * (1 + np.arange(7)) + outputs[1] * (2 + np.arange(7))), jnp.stack(outputs)

        return of

    mesh = jax.make_mesh((4,), ("classes",), axis_types=(AxisType.Auto,))
    ours = functools.partial(linear_log_probs, axis_name="classes")
    split = jax.shard_map(total(ours), mesh=mesh, in_specs=(P(), P(None, "classes")), out_specs=P())
    gradient, actual = jax.jit(jax.grad(split, has_aux=True))(TIED, np.eye(8, dtype="float32"))
    with jax.enable_x64(True):
        d_exact, exact = jax.jit(jax.grad(total(plain), has_aux=True))(np.float64(TIED), np.eye(8))
    np.testing.assert_allclose(actual[:, :-1], exact[:, :-1], rtol=5e-6, atol=2e-7)
    np.testing.assert_allclose(gradient[:-1], d_exact[:-1], rtol=1e-5, atol=2e-6)
    assert np.isnan(actual[:, -1]).all()
    assert np.isnan(gradient[-1]).all()
