"""Follow a release of Transformers: ``python -m compat_matrix.follow X.Y.Z``. Exits with 1 if it or a cell is red.

It adds the release's block to versions.toml, makes its environment and its plans, and writes RELEASE.md: what is new
since the release before, and what a person must decide. Then it checks every architecture, makes the tables, and leaves
one commit to look at. After a stop it goes on where it was.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

from packaging.version import Version

from .. import __main__ as matrix
from .. import commits, environments, plans
from ..results import read_file
from . import newest, sources, watch
from .changes import Changes, Seen, compared
from .page import page, verdict

ROOT = environments.HERE.parent
PAGE = Path(__file__).with_name("RELEASE.md")
# The commit holds these.
WRITTEN = (
    "README.md",
    "docs",
    "tests/constraints.txt",
    "compat_matrix",
    "fa2patch/evidence.json",
    "fa2patch/upstream.json",
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.follow", description=__doc__)
    parser.add_argument("release", help="its number")
    parser.add_argument("--environments", type=Path, default=ROOT / ".compat", help="where environments are kept")
    parser.add_argument("--no-run", action="store_true", help="stop after the page")
    parser.add_argument("--no-commit", action="store_true", help="leave everything uncommitted")
    given = parser.parse_args(arguments)
    if not (given.no_commit or given.no_run) and commits.git("status", "--porcelain", "--", *WRITTEN):
        parser.error("expected no changes in what the commit will hold: commit them first, or give --no-commit")
    add_block(given.release)
    found = look(given.release, given.environments)
    print(PAGE.read_text(encoding="utf-8"))
    if given.no_run:
        return int(bool(found.reds))
    failed = matrix.main(["--versions", given.release, "--environments", str(given.environments), "--stale"])
    from ..publish import __main__ as publish  # it needs the extra ``matrix``, which the page does not

    newest.main(["--write"])
    publish.main([])
    if not given.no_commit:
        commit(given.release, found)
    return int(bool(found.reds or failed))


def add_block(release: str) -> None:
    # One patch release of each minor is checked, so a release takes the place of its minor's block. Another one goes
    # behind the newest block, with its settings.
    if release in environments.versions():
        return
    last = environments.newest().name
    if Version(release) < Version(last):
        raise SystemExit(f"{release} is older than {last}, the newest release. Add its block to versions.toml by hand")
    file = environments.HERE / "versions.toml"
    text = file.read_text(encoding="utf-8")
    block = re.search(rf'^\[version\."{re.escape(last)}"\]\n(?:[^\[\n].*\n)*', text, re.M)
    assert block is not None
    added = block[0].replace(f'"{last}"', f'"{release}"', 1)
    same_minor = Version(release).release[:2] == Version(last).release[:2]
    file.write_text(text.replace(block[0], added if same_minor else block[0] + added), encoding="utf-8")


def look(release: str, folder: Path) -> Changes:
    before = watch.before(release)
    plans.main(["--versions", before, release, "--environments", str(folder), "--write"])
    planned = plans.read()
    old, new = (sources.read(sources.of_release(name, folder)) for name in (before, release))
    seen = Seen.read()
    found = compared(old, new, seen)
    seen.learn(new)
    seen.write()
    PAGE.write_text(page(found, (planned[before].snapshots, planned[release].snapshots)), encoding="utf-8")
    return found


def commit(release: str, found: Changes) -> None:
    checked = read_file(environments.HERE / "evidence" / f"{release}.json")
    states = Counter(cell.state for cell in checked.cells.values())
    counted = ", ".join(f"{count} {state}" for state, count in states.most_common())
    failing = [f"- {failure}"[:160] for failure in checked.failing]
    subject = f"Transformers {release}: {counted} of {len(checked.cells)} cells{', RED' if found.reds else ''}"
    body = "\n".join([verdict(found).replace("*", ""), *failing, "", "What is new: compat_matrix/follow/RELEASE.md"])
    commits.git("add", "--", *WRITTEN)
    commits.git("commit", "-m", subject, "-m", body)


if __name__ == "__main__":
    sys.exit(main())
