"""Find public definitions that have no docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Union

from .counts import last_name
from .sources import Module

Definition = Union[ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef]

_NOT_ALONE = {"overload", "setter", "deleter"}
"""Decorators of functions that share the name, and the docstring, of another function."""


def undocumented(module: Module, package: Iterable[Module] = ()) -> Iterator[str]:
    """Modules, classes, functions and methods that are public by their names and have no docstring.

    Nothing in a module, folder or class with a leading underscore is public. A property counts. A nested function, a
    ``__dunder__`` and an overload do not count, nor does a method that overrides a documented one.

    Args:
        module: the file that is looked at.
        package: all files, where base classes are looked for by their names if the module does not define them.
    """
    if any(part.startswith("_") and not part.endswith("__") for part in module.name.split(".")):
        return
    if ast.get_docstring(module.tree) is None:
        yield module.place(module.tree, "(module)")
    classes = {name: node for other in (*package, module) for name, node in _classes(other.tree.body)}
    for name, node, owner in _public(module.tree.body):
        inherited = owner is not None and _has_documented_base(owner, node.name, classes)
        if ast.get_docstring(node) is None and not inherited:
            yield module.place(node, name)


def _public(
    body: Iterable[ast.AST], prefix: str = "", owner: ast.ClassDef | None = None
) -> Iterator[tuple[str, Definition, ast.ClassDef | None]]:
    """Yield each public definition with its qualified name and the class that contains it."""
    for node in _definitions(body):
        if node.name.startswith("_") or _NOT_ALONE.intersection(map(last_name, node.decorator_list)):
            continue
        yield prefix + node.name, node, owner
        if isinstance(node, ast.ClassDef):
            yield from _public(node.body, f"{prefix}{node.name}.", node)


def _definitions(body: Iterable[ast.AST]) -> Iterator[Definition]:
    """Yield the definitions in a body, also those in its ``if`` and ``try``, but not nested ones."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node
        else:
            yield from _definitions(ast.iter_child_nodes(node))


def _classes(body: Iterable[ast.AST], prefix: str = "") -> Iterator[tuple[str, ast.ClassDef]]:
    for node in _definitions(body):
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, node
            yield from _classes(node.body, f"{prefix}{node.name}.")


def _has_documented_base(owner: ast.ClassDef, method: str, classes: dict[str, ast.ClassDef]) -> bool:
    """Whether a base class, or one of its own bases, has the method with a docstring."""
    seen: set[str] = set()
    waiting = [owner]
    while waiting:
        for base in waiting.pop().bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            if name in classes and name not in seen:
                seen.add(name)
                waiting.append(classes[name])
                methods = (node for node in _definitions(classes[name].body) if node.name == method)
                if any(ast.get_docstring(node) is not None for node in methods):
                    return True
    return False
