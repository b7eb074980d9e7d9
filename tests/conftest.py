"""Eight virtual CPU devices for the tests of sharding, and the profile of the property tests."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import hypothesis

# An example compiles a program or two: its time says nothing, and random ones would make CI a lottery.
hypothesis.settings.register_profile("masksafe", deadline=None, derandomize=True, max_examples=10)
hypothesis.settings.load_profile("masksafe")
