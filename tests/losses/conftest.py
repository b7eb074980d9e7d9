"""The forms in which the losses of a linear layer are computed."""

import pytest
from linear_cases import use_platform
from tiers import exhaustive_params


@pytest.fixture(params=["cpu", *exhaustive_params(["accelerator"])])
def platform(request, choose):
    use_platform(choose, request.param)
    return request.param


@pytest.fixture
def small_tiles(choose):
    use_platform(choose, "cpu")
