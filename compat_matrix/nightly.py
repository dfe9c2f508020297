"""The questions of the nightly workflow: which versions to check, and which of them fail."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from . import environments

if TYPE_CHECKING:
    from .cells import Cell


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.nightly", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    versions = commands.add_parser("versions", help="print them as a JSON list")
    versions.add_argument("--newest", metavar="V", help="the newest release there is; added if it has no block")
    versions.add_argument("--torch-next", action="store_true", help="and the newest release with the next torch")
    versions.add_argument("--only", nargs="*", metavar="V", help="these instead of all")
    red = commands.add_parser("red", help="print what is not ok, as Markdown; exits with 1 if anything is")
    red.add_argument("evidence", type=Path)
    red.add_argument("--wanted", type=json.loads, required=True, metavar="JSON", help="what `versions` printed")
    given = parser.parse_args(arguments)
    if given.command == "versions":
        print(json.dumps(given.only or wanted(given.newest, given.torch_next)))
        return 0
    found = failures(given.evidence, given.wanted)
    print("\n".join(found) or "Every cell is as it should be.")
    return 1 if found else 0


def wanted(newest: str | None = None, torch_next: bool = False) -> list[str]:
    blocks = environments.versions()
    names = [name for name in blocks if name != environments.MAIN]
    known = {block.transformers for block in blocks.values()}
    if newest and newest not in known and not Version(newest).is_prerelease:
        names.append(newest)
    return [*names, environments.MAIN, *([environments.TORCH_NEXT] if torch_next else [])]


def failures(evidence: Path, names: list[str]) -> list[str]:
    # A version that is allowed to fail is what comes next. It may have no evidence, because it may not be installable
    # on some days.
    from .results import Malformed, read_file  # it needs packages that listing the versions must do without

    lines = []
    for name in names:
        file, allowed_to_fail = evidence / f"{name}.json", environments.version(name).allowed_to_fail
        if not file.exists():
            said = [] if allowed_to_fail else ["no evidence; its job failed before the check was done"]
        else:
            try:
                found = read_file(file)
                said = moved(found.cells) if allowed_to_fail else found.failing
            except Malformed as error:
                said = [str(error)]
        lines += [f"- {name}: {line}" for line in said]
    return lines


def moved(cells: Mapping[str, Cell]) -> list[str]:
    # A seam has moved if its architectures fail, or are patched at another one than in the newest release.
    from . import plans

    newest = plans.read()[environments.newest().name].snapshots
    found: dict[str, dict[str, str]] = {}
    for name, cell in cells.items():
        seams = plans.seams(newest.get(name, {}))
        of_seam = found.setdefault(" and ".join(sorted(seams)), {})
        if cell.state == "fail":
            of_seam[name] = cell.reason
        elif cell.state == "ok" and seams != {*cell.seam}:
            of_seam[name] = f"patched at the seam {' and '.join(cell.seam)}"
    return [
        f"the seam {seam} moved in {len(reasons)} architectures ({', '.join(list(reasons)[:5])}): "
        f"{next(iter(reasons.values()))}"
        for seam, reasons in found.items()
        if reasons
    ]


if __name__ == "__main__":
    raise SystemExit(main())
