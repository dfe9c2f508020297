"""Imports of fa2patch point one way: from the command line down to the ground floor, and never in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fa2patch"

FLOORS = (
    ("_compile", "binding", "errors", "trying"),
    ("documents", "packing"),
    ("kernels",),
    ("upstream",),
    ("probing",),
    ("patch",),
    ("data",),
    ("proof", "run"),
    ("cli", "preference", "testing"),
    ("__init__", "__main__"),
)
"""A module imports from its own room and from lower floors. A room is a folder, or a file beside them."""

MODULES = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}


def imports(parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Modules of fa2patch that a module imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(MODULES[parts].read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        package = (*parts[: len(parts) - node.level], *(node.module or "").split("."))
        package = tuple(part for part in package if part)
        for alias in node.names:
            named = ((*package, alias.name), (*package, alias.name, "__init__"), package, (*package, "__init__"))
            found = next((module for module in named if module in MODULES), None)
            if found is not None and found != parts:
                yield found


def floor(parts: tuple[str, ...]) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if parts[0] in rooms)


@pytest.mark.parametrize("parts", sorted(MODULES), ids=".".join)
def test_a_module_imports_from_its_room_and_from_below(parts: tuple[str, ...]) -> None:
    above = [found for found in imports(parts) if floor(found) >= floor(parts) and found[0] != parts[0]]
    assert not above, f"{'.'.join(parts)} imports {above}, on the same floor or above"


def test_there_is_no_circle() -> None:
    TopologicalSorter({parts: set(imports(parts)) for parts in MODULES}).prepare()
