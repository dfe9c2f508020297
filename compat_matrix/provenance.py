"""Check that no cell is stale and that all measurements were made with the present code.

``python -m compat_matrix.provenance``. A release needs it, a commit does not: evidence ages, and MATRIX.md says its
age. A cell is stale if its key is (``compat_matrix.stale``). Measurements are those of the bench, of the ecosystem's
stacks and integrations, and of the examples; :data:`commits.CODE` must not have changed after them.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import commits, environments, keys, stale
from .bench import figures
from .cells import Results, grouped
from .diffable import some
from .results import EVIDENCE, Malformed, read


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.provenance", description=__doc__)
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="folder of the evidence")
    given = parser.parse_args(arguments)
    try:
        results = read(given.evidence, environments.versions())
    except Malformed as error:
        parser.error(str(error))
    measured = dict(measurements())
    found = problems(results) + of_measurements(measured)
    print("\n".join(found) or (
        f"None of {len(results.made):,} cells is stale, and the present code made all {len(measured)} measurements of "
        "the bench, the ecosystem and the examples."
    ))  # fmt: skip
    return int(bool(found))


def problems(results: Results) -> list[str]:
    found = [f"There is no evidence of {name}." for name in results.missing if name != environments.MAIN]
    sources = keys.Sources(environments.HERE.parent)
    for environment in results.environments:
        old = list(stale.cells(environment, sources))
        if old:
            found.append(f"{len(old)} of {len(environment.cells)} cells of {environment.name} are stale: {some(old)}.")
    for code, count in Counter(made.code for made in results.made if made.dirty is not False).items():
        found.append(f"{count} cells were made with {code}.")
    return found


def measurements() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for file in sorted((environments.HERE / "bench" / "results").glob("*.json")):
        yield f"bench {file.stem}", figures.read(file)
    ecosystem = environments.HERE / "ecosystem" / "evidence"
    for file in sorted(ecosystem.glob("*.json")):
        for check, made in figures.read(file)["made"].items():
            yield f"{file.stem} {check}", made
    for row, found in figures.read(ecosystem / "integrations" / "tests.json").items():
        yield f"integration {row}", found
    for file in sorted((environments.HERE.parent / "examples").rglob("results.json")):
        commit = figures.read(file).get("commit") or ""
        yield f"examples {file.parent.name}", {"commit": commit.removesuffix("-dirty"), "dirty": "-dirty" in commit}


def of_measurements(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    named = grouped(((made.get("commit") or "", made.get("dirty")), name) for name, made in measured.items())
    found = []
    for (commit, dirty), names in named.items():
        against = _after(commit)
        if commit and dirty is not False:
            against.append("The code had uncommitted changes, or its commit was stated by hand.")
        found += [f"{sentence} Affected: {some(names)}." for sentence in against]
    return found


def _after(commit: str) -> list[str]:
    if not commit:
        return ["Some measurements do not say which commit made them."]
    try:
        changed = commits.changed(commit)
    except commits.NoCommit as error:
        return [f"This clone does not have commit {commit}, which measurements name: {error}"]
    said = f"{len(changed)} files that measurements depend on changed after commit {commit}: {some(changed)}."
    return [said] if changed else []


if __name__ == "__main__":
    sys.exit(main())
