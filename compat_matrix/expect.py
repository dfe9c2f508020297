"""Write what is expected of each cell: ``python -m compat_matrix.expect``.

The seam at which an architecture was patched, or that it was refused, goes to versions.toml, and a cell whose seam
changes later fails. The cells of the evidence are judged by xfail.toml, so that an entry there needs no new run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Callable

try:
    import tomlkit
except ModuleNotFoundError:
    raise SystemExit("this needs tomlkit, which is not installed. In a clone: pip install -e '.[matrix]'") from None

from . import environments, run
from .cells import Environment
from .results import read

NOTHING_FAILS = "xfail.toml expects "
"""How the error of a cell begins in which a known failure does not come."""


def main(arguments: list[str] | None = None) -> int:
    """Update versions.toml from the evidence, then what the evidence says of both files' expectations."""
    argparse.ArgumentParser(prog="python -m compat_matrix.expect", description=__doc__).parse_args(arguments)
    file, folder = environments.HERE / "versions.toml", environments.HERE / "evidence"
    document = tomlkit.parse(file.read_text(encoding="utf-8"))
    expecting(folder, lambda version, architecture: "")
    for environment in read(folder).environments:
        block = document["version"].get(environment.name)
        if block is not None and not environment.allowed_to_fail:
            block.update(expectation(environment))
    file.write_text(tomlkit.dumps(document), encoding="utf-8")
    known = environments.versions()
    expecting(folder, lambda version, architecture: known[version].seam_of(architecture) if version in known else "")
    return 0


def known_failures(found: dict[str, Any]) -> None:
    """Judge the cells of a version's evidence by xfail.toml, in place. What the points found stays as it is."""
    for name, cell in found["architectures"].items():
        for key in ("xfail", "link"):
            cell.pop(key, None)
        if cell.get("error", "").startswith(NOTHING_FAILS):
            del cell["error"]
        cell.update(run.known_failure(name, found["transformers"], cell, cell.get("points", found["points"])))


def expecting(folder: Path, seam_of: Callable[[str, str], str]) -> None:
    """Write what is expected of each architecture into the evidence of every version: its seam and known failures.

    Args:
        folder: The folder with the evidence.
        seam_of: Maps a version's name and an architecture to the expected seam; empty expects nothing.
    """
    for file in folder.glob("*.json"):
        found = json.loads(file.read_text(encoding="utf-8"))
        for name, cell in found["architectures"].items():
            cell.pop("expected_seam", None)
            expected = seam_of(found["name"], name)
            if expected:
                cell["expected_seam"] = expected.split(" and ")
        known_failures(found)
        file.write_text(run.text(found), encoding="utf-8")


def expectation(environment: Environment) -> dict[str, object]:
    """Compute a version's ``seam``, which most architectures have, and ``other_seams`` for the others."""
    found = {
        name: "refused" if cell.state == "refused" else " and ".join(cell.seam)
        for name, cell in environment.cells.items()
        if cell.state == "refused" or cell.seam
    }
    ((usual, _),) = Counter(seam for seam in found.values() if seam != "refused").most_common(1)
    others: dict[str, list[str]] = {}
    for name, seam in sorted(found.items()):
        if seam != usual:
            others.setdefault(seam, []).append(name)
    table = tomlkit.inline_table()
    table.update(others)
    return {"seam": usual, **({"other_seams": table} if others else {})}


if __name__ == "__main__":
    sys.exit(main())
