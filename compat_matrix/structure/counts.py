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
"""Each of these nodes adds one to a function's complexity, the function itself and nested functions included."""


def lines(module: Module) -> int:
    """Return the number of lines of the file."""
    return len(list(io.StringIO(module.text)))


def code_lines(module: Module) -> int:
    """Return the number of lines that hold code: more than a comment, a docstring or an attribute's docstring."""
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
    """Yield every function with its qualified name, including methods and nested functions, but not lambdas."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if not isinstance(child, ast.ClassDef):
                yield prefix + child.name, child
            yield from functions(child, f"{prefix}{child.name}.")
        else:
            yield from functions(child, prefix)


def length(function: Function) -> int:
    """Return the lines of a function from its ``def`` to its end, without decorators."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def complexity(function: Function) -> int:
    """Return the complexity as ruff's C901 counts it: one, plus one for each branch.

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
    """Whether a pattern is ``_`` or a name, so that its case acts as an ``else``."""
    if type(pattern).__name__ == "MatchOr":
        return any(_takes_everything(inner) for inner in ast.iter_child_nodes(pattern))
    return type(pattern).__name__ == "MatchAs" and all(map(_takes_everything, ast.iter_child_nodes(pattern)))


def uses_of_any(tree: ast.AST) -> int:
    """Count where ``Any`` is used, in annotations and aliases, also in quotes. Its import is not counted."""
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
    """Return ``Any`` for ``Any`` and ``typing.Any``, or an empty string if the expression is not a name."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _quoted(annotation: ast.AST) -> Iterator[str]:
    """Yield the strings of an annotation that are annotations themselves. Strings in a ``Literal`` are not."""
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
