"""The items of a file's code, each with a hash, and the names that it mentions.

A *function* is its parameters and its body, under its qualified name. A *definition*, ``@name``, is what runs where a
module defines a class, a function or a constant: no bodies of functions. The *rest* of the module has the empty name.
Comments, docstrings, annotations of parameters and line numbers do not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

# Hashes by item. Outside its file an item is named "file::name".
Items = dict[str, str]

_LEFT_OUT = ("ctx", "kind", "returns", "type_comment", "type_params")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_RUNNING = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


@dataclass(frozen=True)
class File:
    items: Items = field(default_factory=dict)  # hashes by item, without the file's name
    # the qualified name of each function, by its name and the first line of its code object
    lines: Mapping[tuple[str, int], str] = field(default_factory=dict)
    # the names in the code of each item, which may mean definitions of this file and of others
    mentions: Mapping[str, frozenset[str]] = field(default_factory=dict)
    defined: frozenset[str] = frozenset()


def read(tree: ast.Module) -> File:
    parts: dict[str, list[Any]] = {"": []}
    words: dict[str, set[str]] = {}
    ours = _ours(tree)
    for statement in tree.body:
        names = _defines(statement, ours) or [""]
        for item in (f"@{name}" if name else "" for name in names):
            parts.setdefault(item, []).append(statement)
            words.setdefault(item, set()).update(_words(_where_defined(statement)))
    lines = {}
    for name, function in _functions(tree):
        parts.setdefault(name, []).extend([function.args, function.body])  # a property has several of a name
        words.setdefault(name, set()).update(_words([function]))
        lines[function.name, min([function.lineno, *(each.lineno for each in function.decorator_list)])] = name
    hashes = {item: sha256(_told(held).encode()).hexdigest()[:8] for item, held in parts.items()}
    defined = frozenset(item[1:] for item in parts if item.startswith("@"))
    return File(hashes, lines, {item: frozenset(found) for item, found in words.items()}, defined)


def _defines(statement: ast.stmt, ours: Collection[str]) -> list[str]:
    # Only a statement that does nothing else defines names. A decorator of this project may keep what it decorates, as
    # a metaclass may. Python itself asks for names such as __getattr__.
    names = []
    if isinstance(statement, _DEFINITIONS):
        is_kept = any(_root(decorator) in ours for decorator in statement.decorator_list)
        names = [] if is_kept or getattr(statement, "keywords", ()) else [statement.name]
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if not any(isinstance(node, _RUNNING) for node in ast.walk(statement)):
            names = [target.id if isinstance(target, ast.Name) else "" for target in targets]
    return names if all(name and not name.startswith("__") for name in names) else []


def _ours(tree: ast.Module) -> set[str]:
    """The names of what this project wrote: the module's own definitions, and what it imports from beside it."""
    found = {statement.name for statement in tree.body if isinstance(statement, _DEFINITIONS)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            found.update(alias.asname or alias.name for alias in node.names)
    return found


def _root(node: Any) -> str:
    # The root of functools.cache(...) is "functools".
    while not isinstance(node, ast.Name):
        node = getattr(node, "func", None) or getattr(node, "value", None)
        if node is None:
            return ""
    return node.id


def _where_defined(statement: Any) -> list[Any]:
    # These parts run where the statement stands; bodies of functions do not. What a module imports from beside it
    # counts where it is used. If it gets another name there, that is taken for use.
    if isinstance(statement, _FUNCTIONS):
        return [*statement.decorator_list, *statement.args.defaults, *filter(None, statement.args.kw_defaults)]
    if isinstance(statement, ast.ClassDef):
        within = [part for each in statement.body for part in _where_defined(each)]
        return [*statement.decorator_list, *statement.bases, *statement.keywords, *within]
    if isinstance(statement, ast.ImportFrom) and statement.level:
        return [alias for alias in statement.names if alias.asname]
    return [statement]


def _words(nodes: Iterable[ast.AST]) -> Iterator[str]:
    # A text without a space may name an attribute.
    for node in (node for each in nodes for node in ast.walk(each)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield from re.findall(r"\w+", node.value)


def _functions(node: ast.AST, inside: str = "") -> Iterator[tuple[str, Any]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            yield inside + child.name, child
            yield from _functions(child, f"{inside}{child.name}.<locals>.")
        else:
            yield from _functions(child, f"{inside}{child.name}." if isinstance(child, ast.ClassDef) else inside)


def _told(node: Any) -> str:
    # Two pieces of code have the same text if they do the same, in every Python that parses them. The text of a
    # function holds what runs where it is defined: decorators, name, parameters and their defaults.
    if isinstance(node, list):
        return f"[{','.join(_told(each) for each in node if not _is_text(each))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: getattr(node, name, None) for name in node._fields if name not in _LEFT_OUT}
    if isinstance(node, _FUNCTIONS):
        del fields["body"]
    if isinstance(node, ast.arg):
        del fields["annotation"]
    said = (f"{name}={_told(value)}" for name, value in fields.items() if value not in (None, []))
    return f"{type(node).__name__}({','.join(said)})"


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
