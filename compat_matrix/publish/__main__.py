"""Write README's blocks, the pages, docs' tables and the package's JSON files from the evidence, or ``--check`` them.

Cells of older code than the present are accepted: what is published says how old they are.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .. import environments, split_rows
from ..cells import Results
from ..gpu import page, store
from ..results import Malformed, read
from . import blocks, matrix, need, package, stacks

COMMAND = "python -m compat_matrix.publish"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not as it would be")
    parser.add_argument("--root", type=Path, default=environments.HERE.parent, help="of the repository")
    given = parser.parse_args(arguments)
    try:
        files = made(given.root)
    except Malformed as error:
        print(error, file=sys.stderr)
        return 1
    drifted = [file for file, text in files.items() if not file.exists() or file.read_text(encoding="utf-8") != text]
    for file in drifted:
        name = file.relative_to(given.root)
        if given.check:
            print(f"{name} is not what the evidence says. Run {COMMAND} and commit it.", file=sys.stderr)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(files[file].encode())
            print(f"wrote {name}")
    return 1 if given.check and drifted else 0


def made(root: Path) -> dict[Path, str]:
    folder = root / "compat_matrix"
    listed = folder / "versions.toml"
    wanted = environments.tomllib.loads(listed.read_text())["version"] if listed.exists() else ()
    results = read(folder / "evidence", wanted)
    require_commits(results)
    costs = {"reads": blocks.reads(), "overhead": blocks.overhead()}
    on_gpu = store.committed(folder / "gpu" / "results")
    of_architectures = matrix.on_gpus(on_gpu)
    costs["gpu"] = blocks.throughput(on_gpu)
    in_readme = {"matrix": blocks.summary(results), "need": need.table(results), "integrations": stacks.integrations()}
    in_long_rows = {"engines": blocks.engines(), "costs": blocks.costs(), "parts": split_rows.rendered()}
    return {
        root / "README.md": between(root / "README.md", **in_readme, **costs),
        root / "docs" / "kernels.md": between(root / "docs" / "kernels.md", kernels=blocks.kernel_table(), **costs),
        root / "docs" / "long_rows.md": between(root / "docs" / "long_rows.md", **in_long_rows),
        folder / "MATRIX.md": matrix.tables(results, of_architectures),
        folder / "matrix.html": matrix.page(results, of_architectures),
        folder / "gpu" / "GPU.md": f"<!-- Made by {COMMAND} from results/*.json. -->\n\n{page.page(on_gpu)}\n",
        **stacks.pages(folder / "ecosystem"),
        root / "fa2patch" / "upstream.json": package.upstream(results),
        root / "fa2patch" / "evidence.json": package.summary(results),
    }


def require_commits(results: Results) -> None:
    # Without its commit, a cell's age could not be shown.
    for environment in results.environments:
        unsaid = [name for name, cell in environment.cells.items() if cell.made is not None and not cell.made.commit]
        if unsaid:
            raise Malformed(
                f"{environment.name}: expected the commit that made each cell, found none in {len(unsaid)} of "
                f"{len(environment.cells)}, such as {unsaid[0]}. Run python -m compat_matrix --stale in a clone"
            )


def between(file: Path, **texts: str) -> str:
    text = file.read_text(encoding="utf-8")
    for name, inner in texts.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        parts = text.split(begin)
        rest = parts[-1].split(end)
        if len(parts) != 2 or len(rest) != 2:
            raise Malformed(f"{file}: expected {begin} and {end}, once each")
        text = f"{parts[0]}{begin}\n{inner}\n{end}{rest[1]}"
    return text


if __name__ == "__main__":
    sys.exit(main())
