"""Write README's blocks, the matrix pages, docs' tables and the package's JSON files, or ``--check`` them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .. import environments
from ..results import Malformed
from .tables import made

COMMAND = "python -m compat_matrix.publish"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 1 if the evidence is malformed or, with ``--check``, a file is out of date."""
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


if __name__ == "__main__":
    sys.exit(main())
