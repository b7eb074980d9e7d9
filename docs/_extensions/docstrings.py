"""What docstrings, doctests and tables of names need to be read as pages.

Single backticks are code, and a link where they name a public function of masksafe. The empty line with which the
expected output of a doctest ends is not shown. Names in a table may break behind an underscore, a dot or a bracket.
"""

import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst.states import Inliner
from sphinx import addnodes
from sphinx.application import Sphinx

import masksafe

PUBLIC = {
    f"{module.__name__}.{name}"
    for module in (masksafe, masksafe.losses, masksafe.testing, masksafe.attention_masks, masksafe.adapters)
    for name, value in vars(module).items()
    if callable(value) and not name.startswith("_")
}


def code(
    role: str, rawtext: str, text: str, line: int, inliner: Inliner, options: Any = None, content: Any = None
) -> tuple[list[nodes.Node], list[nodes.Node]]:
    text = nodes.unescape(text)
    literal = nodes.literal(rawtext, text, classes=["code"])
    if text not in PUBLIC:
        return [literal], []
    document = inliner.document.settings.env.current_document.docname
    link = addnodes.pending_xref(
        rawtext, literal, refdomain="py", reftype="func", reftarget=text, refdoc=document, refexplicit=True
    )
    return [link], []


def strip_blocks(app: Sphinx, document: nodes.document) -> None:
    for block in document.findall(nodes.literal_block):
        block.rawsource = block.astext().rstrip()
        block[:] = [nodes.Text(block.rawsource)]


def let_names_break(app: Sphinx, document: nodes.document, name: str) -> None:
    for entry in document.findall(nodes.entry):
        for literal in list(entry.findall(nodes.literal)):
            first, *others = re.findall(r"[^_.(]*[_.(]*", literal.astext())[:-1]
            literal[:] = [nodes.Text(first)]
            for part in others:
                literal += [nodes.raw("", "<wbr>", format="html"), nodes.Text(part)]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_role("code-or-link", code)
    app.connect("doctree-read", strip_blocks)
    app.connect("doctree-resolved", let_names_break)
    app.config.default_role = "code-or-link"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
