"""Check that one commit made all cells, and that only documents changed after it.

``python -m compat_matrix.provenance``. A release needs it. Between releases MATRIX.md marks the cells of older code.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from . import commits, environments
from .cells import Results
from .results import Malformed, read


def main(arguments: list[str] | None = None) -> int:
    """Print the commit of all cells, or everything that is against it; returns 1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.provenance", description=__doc__)
    parser.add_argument("--evidence", type=Path, default=environments.HERE / "evidence", help="folder of the evidence")
    given = parser.parse_args(arguments)
    try:
        results = read(given.evidence, environments.versions())
    except Malformed as error:
        parser.error(str(error))
    found = problems(results)
    good = f"All {len(results.made):,} cells were made with the code of {results.code}, which is the present code."
    print("\n".join(found) or good)
    return int(bool(found))


def problems(results: Results) -> list[str]:
    """What is against it that the present code made all cells, in one sentence each."""
    made = Counter(made.code for made in results.made)
    found = [f"There is no evidence of {name}." for name in results.missing if name != environments.MAIN]
    if len(made) > 1:
        counts = ", ".join(f"{count:,} of {code}" for code, count in made.items())
        found.append(f"Expected cells of one commit, found {counts}.")
    if commits.of_code()["dirty"] is not False:
        found.append("The code that cells depend on has uncommitted changes, or this folder is no clone.")
    for commit in sorted({made.commit for made in results.made}):
        found += _after(commit)
    return found


def _after(commit: str) -> list[str]:
    """What changed after a commit in the code that cells depend on, in no or one sentence."""
    if not commit:
        return ["Some cells do not say which commit made them."]
    try:
        changed = commits.changed(commit)
    except commits.NoCommit as error:
        return [f"This clone does not have commit {commit}, which cells name: {error}"]
    shown = ", ".join(changed[:5])
    return [f"{len(changed)} files that cells depend on changed after commit {commit}: {shown}."] if changed else []


if __name__ == "__main__":
    sys.exit(main())
