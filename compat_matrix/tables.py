"""Write what is made: README's tables, MATRIX.md, matrix.html, upstream.json. ``--check`` compares."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import environments, kernel_table, readme
from .known import known
from .markdown import matrix
from .page import page
from .results import Malformed, read

COMMAND = "python -m compat_matrix.tables"


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
            file.write_bytes(files[file].encode())
            print(f"wrote {name}")
    return 1 if given.check and drifted else 0


def made(root: Path) -> dict[Path, str]:
    """Every file that is made from the evidence, and its text.

    Raises:
        Malformed: the evidence, or README's markers, are not as expected.
    """
    folder = root / "compat_matrix"
    blocks = folder / "versions.toml"
    wanted = environments.tomllib.loads(blocks.read_text())["version"] if blocks.exists() else ()
    results = read(folder / "evidence", wanted)
    return {
        root / "README.md": between(root / "README.md", matrix=readme.table(results), kernels=kernel_table.table()),
        folder / "MATRIX.md": matrix(results),
        folder / "matrix.html": page(results),
        root / "fa2patch" / "upstream.json": known(results),
    }


def between(file: Path, **texts: str) -> str:
    """The file's text with each of these between the markers of its name."""
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
