"""Signatures with types, under the short names that the source gives them.

autodoc evaluates types, which turns `ArrayLike` into a union of nine, and shows the overloads of a function, which are
for type checkers. So it is asked for no types (`autodoc_typehints = "none"`), and they are added here.
"""

import ast
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args, get_origin

from sphinx.application import Sphinx

import masksafe

DOCUMENTED = {"function", "method", "class"}
NAMES = {id(masksafe.testing.CONSISTENCY_MODES): "CONSISTENCY_MODES"}


class Text:
    """What a signature shows as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class Shortened(ast.NodeTransformer):
    """Names without their modules; of a literal, also of one that has a name, its values."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names  # those of the function's module

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Name(node.attr)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        named = self.names.get(node.id)
        return one_of(map(ast.Constant, get_args(named))) if get_origin(named) is Literal else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        node = self.generic_visit(node)
        if not (isinstance(node.value, ast.Name) and node.value.id == "Literal"):
            return node
        return one_of(node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])


def one_of(values: Iterable[ast.expr]) -> ast.expr:
    return functools.reduce(lambda first, second: ast.BinOp(first, ast.BitOr(), second), values)


def type_of(annotation: Any, names: dict[str, Any]) -> Any:
    if annotation is inspect.Signature.empty:
        return annotation
    source = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return Text(ast.unparse(Shortened(names).visit(ast.parse(source, mode="eval"))))


def default_of(default: Any) -> Any:
    if id(default) in NAMES:
        return Text(NAMES[id(default)])
    is_named = inspect.isfunction(default) or (inspect.isclass(default) and default is not inspect.Parameter.empty)
    if is_named:
        return Text(default.__name__)
    return Text("...") if " object at 0x" in repr(default) else default  # a mark of another library's


def with_types(
    app: Sphinx, what: str, name: str, documented: Callable[..., Any], options: Any, signature: str | None, returns: Any
) -> tuple[str, str | None] | None:
    if what not in DOCUMENTED or signature is None or signature.endswith("**options)"):  # as the page has it
        return None
    # Classes of flax have metaclasses, whose own calls take anything.
    found = inspect.signature(documented.__init__ if what == "class" else documented)
    names = vars(inspect.getmodule(inspect.unwrap(documented)))
    parameters = [
        p.replace(annotation=type_of(p.annotation, names), default=default_of(p.default))
        for p in found.parameters.values()
        if p.name != "self"
    ]
    result = inspect.Signature.empty if what == "class" else type_of(found.return_annotation, names)
    return str(inspect.Signature(parameters)), None if result is inspect.Signature.empty else repr(result)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-signature", with_types)
    app.config.autodoc_typehints = "none"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
