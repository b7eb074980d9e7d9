"""The example of a profile: what ran is found in the scopes of the ops."""

import jax
import profile_step
import pytest
from profile_step import Event


@pytest.mark.slow
def test_a_profile_of_a_step_has_the_ops_in_forward_and_in_reverse():
    events = profile_step.profile(jax.value_and_grad(profile_step.loss_fn), profile_step.make_arguments(2, 16, 32))
    sums = profile_step.totals(events)
    for op in ("dot_product_attention", "layer_norm", "softmax_cross_entropy_with_integer_labels"):
        assert min(sums[op]) > 0
    assert profile_step.OTHER in sums


def test_time_in_which_two_kernels_run_counts_once():
    events = [Event(0.0, 4.0, "a", False), Event(1.0, 2.0, "a", False), Event(5.0, 1.0, "a", True)]
    assert profile_step.totals(events) == {"a": (4.0, 1.0)}
