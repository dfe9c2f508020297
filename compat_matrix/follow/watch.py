"""The watch: what a Transformers changed, from its sources alone, in a minute. Exits with 1 if it is red.

``python -m compat_matrix.follow.watch X.Y.Z`` compares a release with the one before it in versions.toml, and
``--sources FOLDER`` any sources, such as a checkout of main, with the newest release. ``--history`` reads all releases
and writes what the watch would have said of each to HISTORY.md, and every argument to seen.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from .. import diffable, environments
from ..cells import grouped
from ..screen import Progress, bars
from . import sources
from .changes import RULES, Changes, Seen, compared, listed
from .page import page

HISTORY = Path(__file__).with_name("HISTORY.md")
COMMAND = "python -m compat_matrix.follow.watch"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("release", nargs="?", help="a release; default: the newest of versions.toml")
    parser.add_argument("--sources", type=Path, help="a folder with sources, which are looked at in place of a release")
    parser.add_argument("--against", metavar="V", help="the release that it is compared with")
    parser.add_argument("--environments", type=Path, default=environments.HERE.parent / ".compat")
    parser.add_argument("--output", type=Path, help="where the page goes; default: the standard output")
    parser.add_argument("--accept", nargs="+", metavar="NAME", default=[], help="names that are red no longer")
    parser.add_argument("--because", metavar="WHY", help="what fa2patch does with them, or why it need not")
    parser.add_argument("--history", action="store_true", help="read all releases; write HISTORY.md and seen.json")
    given = parser.parse_args(arguments)
    if bool(given.accept) != bool(given.because):
        parser.error("--accept and --because go together: expected names and the reason")
    if given.history:
        history(given.environments)
        return 0
    release = given.release or environments.newest().name
    against = given.against or (environments.newest().name if given.sources else before(release))
    with bars() as progress:
        old = _read(against, sources.of_release(against, given.environments), progress)
        home = given.sources or sources.of_release(release, given.environments)
        new = _read(str(given.sources or release), home, progress)
    found = compared(old, new, Seen.read())
    if given.accept:
        accept(found, given.accept, given.because)
        found = compared(old, new, Seen.read())
    text = page(found)
    given.output.write_text(text, encoding="utf-8") if given.output else print(text, end="")
    return 1 if found.reds else 0


def before(release: str) -> str:
    older = [block.name for block in environments.releases() if Version(block.name) < Version(release)]
    if not older:
        raise SystemExit(f"versions.toml has no release before {release}. Name one with --against")
    return older[-1]


def accept(found: Changes, names: Sequence[str], because: str) -> None:
    red = {each.name for each in found.reds}
    if {*names} - red:
        raise SystemExit(f"not red in {found.after.release}: {', '.join(sorted({*names} - red))}. Red: {sorted(red)}")
    seen = Seen.read()
    seen.accepted.setdefault(found.after.release, {}).update(dict.fromkeys(names, because))
    seen.write()


def history(folder: Path) -> None:
    seen, rows = Seen(accepted=Seen.read().accepted), []
    old = None
    with bars() as progress:
        task = progress.add_task("releases", total=len(environments.releases()))
        for block in environments.releases():
            new = sources.read(sources.of_release(block.name, folder))
            if old is not None:
                rows.append(_row(compared(old, new, seen, as_then=True)))
            seen.learn(new)
            old = new
            progress.update(task, advance=1)
    seen.write()
    rules = [f"- **{rule}**: {meaning}." for rule, (meaning, _) in RULES.items()]
    head = ["release", "new folders", "forwards changed", "new arguments", "red"]
    parts = [
        "# What the watch would have said of each release",
        f"Each minor of Transformers beside the one before it, by their sources alone. Made by `{COMMAND} --history`.",
        "\n".join(rules),
        diffable.table(head, rows[::-1]),
    ]
    HISTORY.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _row(found: Changes) -> list[str]:
    by_rule = grouped((red.rule, red.name) for rule in RULES for red in found.reds if red.rule == rule)
    red = "; ".join(f"{rule}: {listed(names, len(names))}" for rule, names in by_rule.items())
    counts = len(found.after.folders - found.before.folders), len(found.moved), len(found.new)
    return [found.after.release, *map(str, counts), red or "–"]


def _read(name: str, home: Path, progress: Progress) -> sources.Sources:
    task = progress.add_task(name)
    return sources.read(home, lambda count: progress.update(task, advance=1, total=count))


if __name__ == "__main__":
    sys.exit(main())
