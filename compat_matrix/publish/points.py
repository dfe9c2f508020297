"""Reads what every point of the matrix checks from the first line of its docstring, without importing torch."""

from __future__ import annotations

import ast
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "check" / "points"


def points() -> dict[str, str]:
    """The points' names and what each of them says, sorted by name."""
    found = {}
    for file in _FOLDER.glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(name) == "point" for name in node.decorator_list):
                found[node.name] = (ast.get_docstring(node) or "").split("\n\n")[0].replace("``", "")
    return dict(sorted(found.items()))
