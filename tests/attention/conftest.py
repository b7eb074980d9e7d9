"""The forms of attention: weights kept, one block, many of few queries and keys, blocks of keys alone, and rows."""

import pytest
from attention_cases import by_rows, decode_always, shrink_blocks
from tiers import few_of

FORMS = {
    "weights kept": lambda choose: None,
    "one block": lambda choose: choose(attention=dict(most_weights_kept=0)),
    "many blocks": shrink_blocks,
    "blocks of keys": decode_always,
    "rows": by_rows,
}


def forms(*by_default):
    """A fixture that runs a test in each form."""

    @pytest.fixture(params=list(FORMS))
    def form(request, choose):
        FORMS[request.param](choose)
        return request.param

    return form


# The table of the contract has many blocks and rows: what is tried in one form alone is tried in another one.
form = forms("blocks of keys")
whole_form = forms("one block")
looping_form = forms("blocks of keys", "rows")
split_form = forms("many blocks", "blocks of keys", "rows")
each_form = forms(*FORMS)


@pytest.fixture
def many_blocks(choose):
    shrink_blocks(choose)
