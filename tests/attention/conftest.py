"""Attention on one block, on many blocks of a few queries and keys each, of ragged sizes, and as in decoding."""

import pytest
from attention_cases import decode_always, shrink_blocks


@pytest.fixture
def many_blocks(choose):
    shrink_blocks(choose)


def both(*params):
    """A fixture that runs a test with many blocks, with one block for everything, and with blocks of keys alone."""

    @pytest.fixture(params=params)
    def fixture(request, choose):
        if request.param == "many blocks":
            shrink_blocks(choose)
        if request.param == "blocks of keys":
            decode_always(choose)
        return request.param

    return fixture


# Programs of many blocks take three times as long to compile: they are for what depends on blocks.
blocks = both("many blocks", pytest.param("one block", marks=pytest.mark.slow))
one_or_many_blocks = both("one block", "blocks of keys", pytest.param("many blocks", marks=pytest.mark.slow))
