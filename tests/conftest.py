"""Eight virtual CPU devices for the tests of sharding, the profile of the property tests, and the long variants."""

import importlib.metadata
import os

FLAGS = ["--xla_force_host_platform_device_count=8"]
# Compiling is most of the time. Set it to 0 to test what XLA makes of the programs otherwise, as CI does.
if os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") != "0":
    FLAGS.append("--xla_cpu_parallel_codegen_split_count=1")
    # It takes two thirds of the time. XLA does not start with a flag that it does not know: later ones have lost it.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*FLAGS, os.environ.get("XLA_FLAGS", "")])

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# An example compiles a program or two: its time says nothing, and random ones would make CI a lottery.
hypothesis.settings.register_profile("masksafe", deadline=None, derandomize=True, max_examples=10)
hypothesis.settings.load_profile("masksafe")

# Variants that take long to compile and have shorter siblings.
LONG = (
    "test_attention.py::test_16_bit_gradients_are_as_good_as_those_of_jax_nn[many blocks]",
    "test_attention.py::test_16_bit_inputs_are_rounded_once[many blocks-bfloat16",
    "test_attention.py::test_dropout_draws_the_same_weights_in_reverse[many blocks]",
    "test_attention.py::test_extra_batch_dimensions[many blocks-(1, 2)]",
    "test_attention.py::test_masked_large_numbers_and_a_soft_cap[many blocks]",
    "test_attention.py::test_masked_pairs_are_gone[many blocks-causal, dead rows]",
    "test_attention.py::test_masked_pairs_are_gone[many blocks-pairs]",
    "test_attention_transforms.py::test_blocks_with_nothing_unmasked_are_skipped[2-causal, dead rows]",
    "test_attention_transforms.py::test_checkify_is_quiet_on_padding[many blocks",
    "test_attention_transforms.py::test_contract_is_kept_around_cudnn[causal]",
    "test_attention_transforms.py::test_forward_mode[many blocks]",
    "test_attention_transforms.py::test_gradient_through_a_jvp[many blocks]",
    "test_attention_transforms.py::test_hessian_and_reverse_over_reverse[many blocks]",
    "test_attention_transforms.py::test_memory_of_the_gradient[plain]",
    "test_attention_transforms.py::test_shard_map[(1, 2)-bias]",
    "test_attention_transforms.py::test_sharded_arrays_agree_with_one_device[bias-batch-AxisType.Explicit]",
    "test_attention_transforms.py::test_vmap_over_any_argument[0]",
    "test_cross_entropy.py::test_forward_mode_is_mask_safe[where0]",
    "test_cross_entropy.py::test_hessian_of_integer_labels_is_that_of_optax[blocks]",
    "test_cross_entropy.py::test_soft_labels_are_mask_safe[blocks-where0]",
    "test_ctc.py::test_more_labels_than_frames[-100000.0]",
    "test_linear_cross_entropy.py::test_second_derivatives_and_forward_mode_with_split_classes[sum]",
    "test_margin.py::test_sparsemax_has_right_second_derivatives",
    "test_normalization_transforms.py::test_one_answer[float32--1-layer_norm]",
    "test_normalization_transforms.py::test_one_answer[float32-(2, 1)-layer_norm]",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if any(long in item.nodeid for long in LONG):
            item.add_marker(pytest.mark.slow)
