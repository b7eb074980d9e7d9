"""The forms of attention: weights kept, one block, many of few queries and keys, blocks of keys alone, and rows."""

import pytest
from attention_cases import by_rows, decode_always, shrink_blocks
from tiers import exhaustive_params

# The table of the contract has many blocks and rows: by default the rest is tried in another one.
FORMS = {
    "blocks of keys": decode_always,
    "rows": by_rows,
    "many blocks": shrink_blocks,
    "one block": lambda choose: choose(attention=dict(most_weights_kept=0)),
    "weights kept": lambda choose: None,
}


@pytest.fixture(params=["blocks of keys", *exhaustive_params(name for name in FORMS if name != "blocks of keys")])
def form(request, choose):
    FORMS[request.param](choose)
    return request.param


@pytest.fixture
def many_blocks(choose):
    shrink_blocks(choose)
