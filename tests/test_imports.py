"""Imports point one way: in fa2patch from the command line down to the ground floor, and nowhere in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FLOORS = (
    ("_compile", "_types", "binding", "errors", "trying"),
    ("documents", "packing"),
    ("kernels",),
    ("upstream",),
    ("probing",),
    ("patch",),
    ("data",),
    ("proof", "run"),
    ("cli", "preference", "testing", "traits"),
    ("__init__", "__main__"),
)
"""A module imports from its own room and from lower floors. A room is a folder, or a file beside them."""

Parts = tuple[str, ...]
"""A module's path inside its package, for example ``("kernels", "flex")``."""

PACKAGES = {
    package: {path.relative_to(ROOT / package).with_suffix("").parts: path for path in (ROOT / package).rglob("*.py")}
    for package in ("fa2patch", "compat_matrix")
}
MODULES = PACKAGES["fa2patch"]


def imports(parts: Parts, modules: dict[Parts, Path], package: str) -> Iterator[Parts]:
    """Modules of the same package that a module imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(modules[parts].read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        names = tuple((node.module or "").split("."))
        if node.level:
            home = (*parts[: len(parts) - node.level], *names)
        elif names[0] == package:
            home = names[1:]
        else:
            continue
        home = tuple(part for part in home if part)
        for alias in node.names:
            named = ((*home, alias.name), (*home, alias.name, "__init__"), home, (*home, "__init__"))
            found = next((module for module in named if module in modules), None)
            if found is not None and found != parts:
                yield found


def floor(parts: Parts) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if parts[0] in rooms)


@pytest.mark.parametrize("parts", sorted(MODULES), ids=".".join)
def test_a_module_imports_from_its_room_and_from_below(parts: Parts) -> None:
    found = imports(parts, MODULES, "fa2patch")
    above = [other for other in found if floor(other) >= floor(parts) and other[0] != parts[0]]
    assert not above, f"{'.'.join(parts)} imports {above}, on the same floor or above"


@pytest.mark.parametrize("package", PACKAGES)
def test_there_is_no_circle(package: str) -> None:
    modules = PACKAGES[package]
    TopologicalSorter({parts: set(imports(parts, modules, package)) for parts in modules}).prepare()
