"""Note in versions.toml on which seam each architecture was found, or that it was refused: a change turns red."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import tomlkit

from . import environments
from .cells import Environment
from .results import read


def main() -> int:
    file = environments.HERE / "versions.toml"
    document = tomlkit.parse(file.read_text(encoding="utf-8"))
    for environment in read(Path(environments.HERE, "evidence")).environments:
        block = document["version"].get(environment.name)
        if block is not None and not environment.allowed_to_fail:
            block.update(expectation(environment))
    file.write_text(tomlkit.dumps(document), encoding="utf-8")
    return 0


def expectation(environment: Environment) -> dict[str, object]:
    """``seam``, which most architectures of a version have, and ``other_seams``: those that have another."""
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
