"""Lines, functions and uses of ``Any`` of one module."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from typing import Union

from .sources import Module

Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_PATHS = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
)
"""Each of these adds one to a function's complexity, and so do the function itself and those inside it."""


def lines(module: Module) -> int:
    """All lines of the file."""
    return len(list(io.StringIO(module.text)))


def code_lines(module: Module) -> int:
    """Lines that are not blank and hold more than a comment or a docstring, one below an attribute included."""
    docstrings = [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    written = module.text.split("\n")
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type in _NOT_CODE:
            continue
        if token.type == tokenize.STRING and any(start <= token.start < end for start, end in docstrings):
            continue
        found.update(row for row in range(token.start[0], token.end[0] + 1) if written[row - 1].strip())
    return len(found)


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its qualified name: methods and nested functions too, lambdas not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if not isinstance(child, ast.ClassDef):
                yield prefix + child.name, child
            yield from functions(child, f"{prefix}{child.name}.")
        else:
            yield from functions(child, prefix)


def length(function: Function) -> int:
    """Lines of a function from its ``def`` to its end, without decorators."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def complexity(function: Function) -> int:
    """What ruff's C901 counts: one, and one for each branch.

    C901 does not count boolean operators, conditional expressions and comprehensions.
    """
    found = 0
    for node in ast.walk(function):
        found += isinstance(node, _PATHS)
        if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            found += bool(getattr(node, "orelse", None))
        elif sys.version_info >= (3, 10) and isinstance(node, ast.Match):
            last = node.cases[-1]
            found += len(node.cases) - (last.guard is None and _takes_everything(last.pattern))
    return found


def _takes_everything(pattern: ast.AST) -> bool:
    """Whether a pattern is ``_`` or a name, which is an ``else``."""
    if type(pattern).__name__ == "MatchOr":
        return any(_takes_everything(inner) for inner in ast.iter_child_nodes(pattern))
    return type(pattern).__name__ == "MatchAs" and all(map(_takes_everything, ast.iter_child_nodes(pattern)))


def uses_of_any(tree: ast.AST) -> int:
    """How often ``Any`` is read, in annotations and aliases, in quotes too; its import is not counted."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            found += last_name(node) == "Any" and isinstance(node.ctx, ast.Load)
        annotations = [getattr(node, field, None) for field in ("annotation", "returns")]
        if isinstance(node, ast.Call) and last_name(node.func) == "cast":
            annotations += node.args[:1]
        for annotation in annotations:
            found += sum(map(_in_quotes, _quoted(annotation))) if annotation is not None else 0
    return found


def last_name(node: ast.AST) -> str:
    """``Any`` of ``Any`` and of ``typing.Any``; empty where the expression is no name."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _quoted(annotation: ast.AST) -> Iterator[str]:
    """Strings of an annotation that are annotations themselves, which those of a ``Literal`` are not."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        yield annotation.value
    elif not (isinstance(annotation, ast.Subscript) and last_name(annotation.value) == "Literal"):
        for child in ast.iter_child_nodes(annotation):
            yield from _quoted(child)


def _in_quotes(text: str) -> int:
    try:
        return uses_of_any(ast.parse(text.strip(), mode="eval"))
    except SyntaxError:
        return 0
