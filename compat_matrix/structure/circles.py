"""Find modules that import each other in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from .sources import Module


def circles(modules: Iterable[Module]) -> list[list[str]]:
    """Return the modules of each circle by name: the strongly connected components of more than one module."""
    modules = list(modules)
    known = {module.name for module in modules}
    graph = {module.name: set(imports(module, known)) for module in modules}
    reached = {name: _reached(name, graph) for name in graph}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(circle) for circle in found if len(circle) > 1)


def imports(module: Module, known: set[str]) -> Iterator[str]:
    """Yield the modules of the package that a module imports: at its top, in a function or for the type checker only.

    Only modules that are named in the import count. Python also runs the ``__init__.py`` of the folders above, but
    counting those would make a circle of every ``__init__.py`` that imports from its folder.
    """
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(module, node)
            named = ((f"{origin}.{alias.name}", origin) for alias in node.names)
            yield from (next(name for name in names if name in known) for names in named if known.intersection(names))


def _origin(module: Module, node: ast.ImportFrom) -> str:
    """The full name of the module between ``from`` and ``import``."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    above = parts[: len(parts) - node.level + module.is_package] if node.level <= len(parts) else []
    return ".".join([*above, *([node.module] if node.module else [])])


def _reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    """A module and every module that it imports, directly or indirectly."""
    reached, waiting = {start}, [start]
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached
