"""Attention on one block and on many: many blocks of a few queries and keys each, of ragged sizes."""

import pytest
from attention_cases import shrink_blocks


@pytest.fixture
def many_blocks(monkeypatch):
    shrink_blocks(monkeypatch)


def both(*params):
    """A fixture that runs a test with many blocks and with one block for everything."""

    @pytest.fixture(params=params)
    def fixture(request, monkeypatch):
        if request.param == "many blocks":
            shrink_blocks(monkeypatch)
        return request.param

    return fixture


# Programs of many blocks take three times as long to compile: they are for what depends on blocks.
blocks = both("many blocks", pytest.param("one block", marks=pytest.mark.slow))
one_or_many_blocks = both("one block", pytest.param("many blocks", marks=pytest.mark.slow))
