"""Arrays that are split over an explicit mesh, beside arrays on no mesh, outside of `jax.set_mesh`."""

import jax
import numpy as np
from comparisons import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import parametrize

import masksafe
from masksafe import losses

RNG = np.random.default_rng(0)
X, Y, KERNEL = (RNG.normal(size=shape).astype(np.float32) for shape in ((4, 8), (4, 8), (8, 8)))
LABELS, IDS = np.array([1, 0, 7, 3]), np.array([[1, 2], [0, -1], [3, 7], [3, 0]])
TARGETS = masksafe.softmax(Y)

FUNCTIONS = {
    "several labels": lambda x: losses.log_probs(x, IDS.clip(0)),
    "kept ids": lambda x: losses.log_probs(x, LABELS, kept_ids=IDS),
    "kept ids, linear": lambda x: losses.linear_log_probs(x, KERNEL, LABELS, kept_ids=IDS),
    "gradient, several labels, linear": jax.grad(lambda x: losses.linear_log_probs(x, KERNEL, IDS.clip(0)).sum()),
    "gradient, integer labels": jax.grad(lambda x: losses.softmax_cross_entropy_with_integer_labels(x, LABELS).sum()),
    "gradient, KL divergence": jax.grad(lambda x: losses.kl_divergence(x, TARGETS).sum()),
    "gradient, focal loss": jax.grad(lambda x: losses.sigmoid_focal_loss(x, TARGETS).sum()),
}


@parametrize(
    ("name", "split"),
    [("kept ids", P("x")), ("gradient, several labels, linear", P("x")), ("gradient, KL divergence", P(None, "x"))],
    exhaustive=[(name, split) for name in FUNCTIONS for split in (P("x"), P(None, "x"))],
    ids=str,
)
def test_others_may_be_on_no_mesh(name, split):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    function = jax.jit(FUNCTIONS[name])
    assert_close(function(jax.device_put(X, NamedSharding(mesh, split))), function(X))
