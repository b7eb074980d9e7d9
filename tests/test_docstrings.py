"""Docstrings of public functions: at most a page, in step with the signature, with an example that can be pasted."""

import doctest
import inspect
import re
from collections.abc import Callable

import masksafe

MODULES = (masksafe, masksafe.losses, masksafe.testing, masksafe.attention_masks, masksafe.adapters)
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in MODULES
    for name in module.__all__
    if callable(getattr(module, name)) and not isinstance(getattr(module, name), masksafe.attention_masks.AttentionMask)
}

MOST_LINES = 60
# They have 24 parameters and 16.
LONGER = {"masksafe.dot_product_attention": 90, "masksafe.losses.linear_softmax_cross_entropy": 76}
WIDEST_EXAMPLE = 88  # of a block of code on the site

SECTION = re.compile(r"^([A-Z][a-z ]+):$", re.MULTILINE)
PARAMETER = re.compile(r"^  (\*{0,2}\w+): ", re.MULTILINE)
STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def sections(documented: Callable) -> dict[str, str]:
    """The text of each section under its title."""
    _, *parts = SECTION.split(inspect.getdoc(documented))
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_at_most_a_page_with_an_example_that_fits_a_block_of_code():
    for name, documented in PUBLIC.items():
        text = inspect.getdoc(documented)
        lines, examples = text.splitlines(), doctest.DocTestParser().get_examples(text)
        assert len(lines) <= LONGER.get(name, MOST_LINES), name
        assert examples, name
        assert "Example" in sections(documented), name
        for example in examples:
            end = example.lineno + len((example.source + example.want).splitlines())
            for line in lines[example.lineno : end]:
                assert len(line) <= WIDEST_EXAMPLE, line


def test_arguments_and_results_are_those_of_the_signature():
    for name, function in PUBLIC.items():
        if inspect.isclass(function):
            continue
        signature, parts = inspect.signature(function), sections(function)
        expected = [STARS.get(p.kind, "") + p.name for p in signature.parameters.values()]
        assert PARAMETER.findall(parts.get("Args", "")) == expected, name
        returns_nothing = signature.return_annotation in (None, "None")  # assertions and setters
        assert ("Returns" in parts) != returns_nothing, name
