"""Reads what every point of the matrix checks from the first line of its docstring, without importing torch."""

from __future__ import annotations

import ast
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "check" / "points"


def points() -> dict[str, str]:
    """The points' names and what each of them says, sorted by name."""
    found = {}
    files = sorted(_FOLDER.glob("*.py"), key=lambda file: not file.name.startswith("media"))
    for file in files:  # what is said of rows of text is kept, where rows with pictures have a point of the same name
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(name) == "point" for name in node.decorator_list):
                found[node.name] = (ast.get_docstring(node) or "").split("\n\n")[0].replace("``", "")
    return dict(sorted(found.items()))
