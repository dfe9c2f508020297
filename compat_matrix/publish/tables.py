"""Makes every file that depends on the evidence, on the bench's results or on the kernels' classes."""

from __future__ import annotations

from pathlib import Path

from .. import environments
from ..cells import Results
from ..ecosystem import integrations
from ..results import Malformed, read
from . import bench_tables, integrations_table, kernel_table, long_rows_tables, need, readme
from .known import known
from .markdown import matrix
from .page import page
from .summary import summary


def made(root: Path) -> dict[Path, str]:
    """Return the path and the new text of every file that is made from the evidence.

    Raises:
        Malformed: The evidence or the markers in README or the pages of docs are not as expected, or a cell does not
            say which commit made it.
    """
    folder = root / "compat_matrix"
    blocks = folder / "versions.toml"
    wanted = environments.tomllib.loads(blocks.read_text())["version"] if blocks.exists() else ()
    results = read(folder / "evidence", wanted)
    require_commits(results)
    long_rows = {"engines": long_rows_tables.engines(), "costs": long_rows_tables.costs()}
    costs = {"reads": bench_tables.reads(), "overhead": bench_tables.overhead()}
    in_readme = {
        "matrix": readme.summary(results),
        "need": need.table(results),
        "integrations": integrations_table.made(integrations.EVIDENCE),
        **costs,
    }
    return {
        root / "README.md": between(root / "README.md", **in_readme),
        root / "docs" / "kernels.md": between(root / "docs" / "kernels.md", kernels=kernel_table.table(), **costs),
        root / "docs" / "long_rows.md": between(root / "docs" / "long_rows.md", **long_rows),
        folder / "MATRIX.md": matrix(results),
        folder / "matrix.html": page(results),
        root / "fa2patch" / "upstream.json": known(results),
        root / "fa2patch" / "cli" / "evidence.json": summary(results),
    }


def require_commits(results: Results) -> None:
    """Raise :class:`Malformed` if a cell does not say which commit made it, because its age could not be shown."""
    for environment in results.environments:
        unsaid = [name for name, cell in environment.cells.items() if cell.made is not None and not cell.made.commit]
        if unsaid:
            raise Malformed(
                f"{environment.name}: expected the commit that made each cell, found none in {len(unsaid)} of "
                f"{len(environment.cells)}, such as {unsaid[0]}. Run python -m compat_matrix --resume in a clone"
            )


def between(file: Path, **texts: str) -> str:
    """Return the text of a file with each of ``texts`` put between the markers of its name.

    Raises:
        Malformed: A marker is missing or appears twice.
    """
    text = file.read_text(encoding="utf-8")
    for name, inner in texts.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        parts = text.split(begin)
        rest = parts[-1].split(end)
        if len(parts) != 2 or len(rest) != 2:
            raise Malformed(f"{file}: expected {begin} and {end}, once each")
        text = f"{parts[0]}{begin}\n{inner}\n{end}{rest[1]}"
    return text
