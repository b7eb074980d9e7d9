"""Docstrings of public functions: at most a page, in step with the signature, with an example that can be pasted."""

import doctest
import inspect
import re
from collections.abc import Callable

import pytest

import masksafe

MODULES = (masksafe, masksafe.losses, masksafe.testing, masksafe.attention_masks, masksafe.adapters)
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in MODULES
    for name in module.__all__
    if callable(getattr(module, name)) and not isinstance(getattr(module, name), masksafe.attention_masks.AttentionMask)
}
FUNCTIONS = {name: fn for name, fn in PUBLIC.items() if not inspect.isclass(fn)}

MOST_LINES = 60
# They have 24 parameters and 16.
LONGER = {"masksafe.dot_product_attention": 90, "masksafe.losses.linear_softmax_cross_entropy": 76}
WIDEST_EXAMPLE = 88  # of a block of code on the site

SECTION = re.compile(r"^([A-Z][a-z ]+):$", re.MULTILINE)
PARAMETER = re.compile(r"^  (\*{0,2}\w+): ", re.MULTILINE)
STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def each(objects: dict[str, Callable]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "documented"), objects.items(), ids=list(objects))


def sections(documented: Callable) -> dict[str, str]:
    """The text of each section under its title."""
    _, *parts = SECTION.split(inspect.getdoc(documented))
    return dict(zip(parts[::2], parts[1::2], strict=True))


@each(PUBLIC)
def test_at_most_a_page(name, documented):
    assert len(inspect.getdoc(documented).splitlines()) <= LONGER.get(name, MOST_LINES)


@each(PUBLIC)
def test_an_example_that_fits_a_block_of_code(name, documented):
    text = inspect.getdoc(documented)
    examples = doctest.DocTestParser().get_examples(text)
    assert examples
    assert "Example" in sections(documented)
    lines = text.splitlines()
    for example in examples:
        end = example.lineno + len((example.source + example.want).splitlines())
        for line in lines[example.lineno : end]:
            assert len(line) <= WIDEST_EXAMPLE, line


@each(FUNCTIONS)
def test_args_are_those_of_the_signature(name, documented):
    parameters = inspect.signature(documented).parameters.values()
    expected = [STARS.get(p.kind, "") + p.name for p in parameters]
    assert PARAMETER.findall(sections(documented).get("Args", "")) == expected


@each(FUNCTIONS)
def test_what_is_returned(name, documented):
    returns_nothing = inspect.signature(documented).return_annotation in (None, "None")  # assertions and setters
    assert ("Returns" in sections(documented)) != returns_nothing
