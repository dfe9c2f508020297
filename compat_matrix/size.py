"""How large fa2patch is, and how straight, at several commits: ``python -m compat_matrix.size v0.1.0 HEAD``.

Each row of the table counts one thing over ``fa2patch/``. A name means two things if several modules define a public
function or class of this name at their top level. ``--names`` lists these.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter, defaultdict
from pathlib import PurePosixPath

from rich.console import Console
from rich.table import Table

LONG = 30  # lines of a function, without its docstring, that fit a screen

HALF = 60  # lines of a file that may be half an idea

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def files_of(commit: str, folder: str) -> dict[str, str]:
    packed = subprocess.run(["git", "archive", commit, folder], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        files = {member.name: archive.extractfile(member) for member in archive if member.name.endswith(".py")}
        return {name: file.read().decode() for name, file in sorted(files.items()) if file is not None}


def _docstring(node: ast.AST) -> ast.Expr | None:
    if not isinstance(node, (ast.Module, *_DEFINITIONS)) or ast.get_docstring(node, clean=False) is None:
        return None
    said = node.body[0]
    return said if isinstance(said, ast.Expr) else None


def _lines(node: ast.expr | ast.stmt | None) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1 if node is not None else 0


def counted(files: dict[str, str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for text in files.values():
        lines, nodes = text.splitlines(), list(ast.walk(ast.parse(text)))
        said = sum(_lines(_docstring(node)) for node in nodes)
        comments = sum(line.strip().startswith("#") for line in lines)
        told = {n for at in filter(None, map(_docstring, nodes)) for n in range(at.lineno - 1, at.end_lineno or 0)}
        blank = sum(not line.strip() for number, line in enumerate(lines) if number not in told)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        found.update(
            {
                "files": 1,
                f"files under {HALF} lines": int(len(lines) < HALF),
                "lines": len(lines),
                "lines of code": len(lines) - said - comments - blank,
                "lines of docstrings": said,
                "lines of imports": sum(map(_lines, imports)),
                "comments": sum(token.type == tokenize.COMMENT for token in tokens),
                f"functions over {LONG} lines": sum(_lines(one) - _lines(_docstring(one)) > LONG for one in functions),
                "functions": len(functions),
                "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
                "`Any`": sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
            }
        )
    found["rooms"] = len({PurePosixPath(name).parent for name in files})
    return found


def names_twice(files: dict[str, str]) -> dict[str, list[str]]:
    # The names of files count, too.
    homes: dict[str, list[str]] = defaultdict(list)
    for path, text in files.items():
        homes[PurePosixPath(path).name.replace("__init__.py", path).replace("__main__.py", path)].append(path)
        for node in ast.parse(text).body:
            if isinstance(node, _DEFINITIONS) and not node.name.startswith("_"):
                homes[node.name].append(path)
    return {name: paths for name, paths in sorted(homes.items()) if len(paths) > 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("commits", nargs="*", default=["HEAD"], help="what git can name; HEAD if left out")
    parser.add_argument("--folder", default="fa2patch")
    parser.add_argument("--names", action="store_true", help="list the names that mean two things in the last commit")
    given = parser.parse_args()
    table = Table("", *given.commits, title=given.folder)
    columns = []
    for commit in given.commits:
        files = files_of(commit, given.folder)
        twice = names_twice(files)
        columns.append({**counted(files), "names that mean two things": len(twice)})
    for row in columns[-1]:
        table.add_row(row, *(f"{column.get(row, 0):,}" for column in columns))
    console = Console()
    console.print(table)
    for name, paths in twice.items() if given.names else ():
        console.print(f"{name}: {', '.join(paths)}")


if __name__ == "__main__":
    main()
