"""What JAX logs of a failed callback; that the error itself is told once is in test_label_checks.py."""

import subprocess
import sys

import pytest

FAILING_TWICE = """
import jax
jax.debug.callback.__module__ = {module}  # where masksafe looks for JAX's log
import jax.numpy as jnp, masksafe
loss = jax.jit(masksafe.losses.softmax_cross_entropy_with_integer_labels)
for label in (7, 8):
    try:
        with masksafe.label_checks("raise"):
            loss(jnp.zeros((1, 7)), jnp.array([label])).block_until_ready()
    except jax.errors.JaxRuntimeError:
        print("raised")
"""
WARNING = "does not log the error of a callback in somewhere, as masksafe expects"


@pytest.mark.parametrize(("module", "warnings"), [("jax.debug.callback.__module__", 0), ("'somewhere'", 1)])
def test_a_log_of_jax_that_is_not_where_it_was_is_told_once(module, warnings):
    code = FAILING_TWICE.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.count("raised") == 2, done.stderr
    assert done.stderr.count(WARNING) == warnings
    assert done.stderr.count("jax.debug.callback failed") == 2 * warnings
