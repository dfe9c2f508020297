"""Compares two Transformers by their sources, and says which changes a person must decide about.

Every release has new arguments: most belong to one new model. What fa2patch must know is red, by the rules of
:data:`RULES`. ``seen.json`` holds what earlier releases had, and what a person accepted.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from .. import diffable, environments
from ..cells import grouped
from .sources import Sources, folder

SEEN = Path(__file__).with_name("seen.json")

# An argument in so many folders of models is general: code for any model may pass it. From 4.34 to 5.24, nine arguments
# spread over so many folders in one release. Five folders are too few: that is what one family of new models shares.
SPREAD = 10

_BOUNDARIES = re.compile(r"cu_?seq|seq_?idx|seq_?len|(^|_)docs?(_|$)|document|segment|packed|packing|boundar")

# What makes a release red, each with what to do then.
RULES = {
    "spreads": (
        f"an argument that forwards of {SPREAD} folders or more gained, and that was in fewer before",
        "Read what it holds. If it is a cache, a mask, positions or boundaries, fa2patch must recognise it. Its test "
        "reads the name from a signature.",
    ),
    "replaces": (
        "an argument that no forward had before stands where one was that fa2patch relies on",
        "fa2patch still looks for the old name there. Let it recognise what the argument holds.",
    ),
    "keyword": (
        "a keyword that every forward accepts is new",
        "Any trainer may pass it. If it says where documents are, given_boundaries.py or names.py must read it.",
    ),
    "boundaries": (
        "an argument that no forward had before is called like boundaries of documents",
        "If it says where documents begin, read it or refuse it. A packed row must never be computed without it.",
    ),
    "derives": (
        "a function of the library that finds documents in position ids has come, gone or changed",
        "A patched model finds them itself. Read whether upstream still means the same by the ids, and whether batches "
        "must state lengths now: documents/find.py, docs/symptoms.md and README's table say what upstream does alone.",
    ),
    "implementation": (
        "a function is registered under a name that no release had: for attention, its masks or experts",
        "A user may load a model with it. Read what it computes and which masks it gets, and let fa2patch recognise "
        "the name: upstream/transformers_names.py.",
    ),
    "gone": (
        "a name that fa2patch relies on is gone from the library, or from most of the modeling files that had it",
        "Find what took its place, and what fa2patch does where it looks the name up.",
    ),
}


# the forwards that gained or lost an argument, by the argument
Moves = dict[str, list[tuple[str, str]]]


@dataclass(frozen=True)
class Red:
    rule: str  # a key of RULES
    name: str  # the argument
    where: str  # the places in words


@dataclass
class Seen:
    since: dict[str, list[str]] = field(default_factory=dict)  # by the release that had them first
    general: dict[str, list[str]] = field(default_factory=dict)  # by the release in which they became so
    accepted: dict[str, dict[str, str]] = field(default_factory=dict)  # reasons of a person, by release and argument

    @classmethod
    def read(cls, file: Path = SEEN) -> Seen:
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def write(self, file: Path = SEEN) -> None:
        rows = {part: {release: names for release, names in held.items() if names} for part, held in vars(self).items()}
        file.write_text(diffable.dumped(rows, 2) + "\n", encoding="utf-8")

    def before(self, release: str) -> tuple[frozenset[str], frozenset[str]]:
        had, general = (
            frozenset(name for each, names in rows.items() if Version(each) < Version(release) for name in names)
            for rows in (self.since, self.general)
        )
        return had, general

    def learn(self, sources: Sources) -> None:
        # Releases are learnt in their order.
        had, general = self.before(sources.release)
        wide = {name for name, folders in sources.takers.items() if len(folders) >= SPREAD}
        self.since[sources.release] = sorted({*sources.takers} - had)
        self.general[sources.release] = sorted(wide - general)


@dataclass(frozen=True)
class Changes:
    before: Sources
    after: Sources
    relied: Mapping[str, str]  # the names that fa2patch's sources spell, with their first places
    gained: Moves  # by forwards of both, as "lost"
    lost: Moves
    new: frozenset[str]  # arguments that no earlier release had
    reds: tuple[Red, ...]  # without those that are accepted
    accepted: tuple[Red, ...]

    @property
    def moved(self) -> set[tuple[str, str]]:
        # the forwards that changed their arguments
        return {place for moves in (self.gained, self.lost) for places in moves.values() for place in places}


def compared(before: Sources, after: Sources, seen: Seen, as_then: bool = False) -> Changes:
    # What was seen in "after" or later does not count. With as_then, what was accepted does not count either.
    gained, lost = _moved(before, after), _moved(after, before)
    had, general = seen.before(after.release)
    had |= before.takers.keys()
    new, relied = frozenset(after.takers.keys() - had), spelled()
    reds = [*_spread(before, after, gained, general)]
    known, keywords = (frozenset().union(*each.keywords.values()) for each in (before, after))
    for name in sorted(keywords - known) if before.keywords else ():
        having = [cls for cls, fields in after.keywords.items() if name in fields]
        reds.append(Red("keyword", name, f"in {listed(having)}"))
    for name in sorted(filter(_BOUNDARIES.search, new)):
        reds.append(Red("boundaries", name, f"in {listed(sorted(after.takers[name]))}"))
    reds += _functions(before, after)
    reds += _replacing(gained, lost, new, relied, {red.name for red in reds})
    reds += _gone(before, after, relied)
    accepted = {} if as_then else seen.accepted.get(after.release, {})
    return Changes(
        before, after, relied, gained, lost, new,
        tuple(red for red in reds if red.name not in accepted),
        tuple(red for red in reds if red.name in accepted),
    )  # fmt: skip


@functools.cache
def spelled(root: Path = environments.HERE.parent / "fa2patch") -> dict[str, str]:
    # fa2patch looks everything of Transformers up by names that its sources spell. The files of names come first:
    # upstream/transformers_names.py, and documents/names.py for arguments.
    found: dict[str, str] = {}
    for file in sorted(root.rglob("*.py"), key=lambda file: (not file.stem.endswith("names"), file)):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = node.value if isinstance(node, ast.Constant) else None
            if isinstance(name, str) and name.isidentifier() and len(name) > 2:
                found.setdefault(name, f"{file.relative_to(root).as_posix()}:{getattr(node, 'lineno', 0)}")
    return found


def _moved(before: Sources, after: Sources) -> Moves:
    return grouped(
        (name, place)
        for place, taken in after.forwards.items()
        if place in before.forwards
        for name in taken.keys() - before.forwards[place].keys()
    )


def folders(places: Iterable[tuple[str, str]]) -> list[str]:
    return sorted({folder(path) for path, _ in places})


def _spread(before: Sources, after: Sources, gained: Moves, general: frozenset[str]) -> Iterator[Red]:
    for name, places in sorted(gained.items()):
        had = len(before.takers.get(name, ()))
        if len(folders(places)) >= SPREAD and had < SPREAD and name not in general:
            where = f"{len(places)} forwards of {len(folders(places))} folders gained it; {had} folders had it"
            annotations = Counter(after.forwards[place][name] for place in places)
            yield Red("spreads", name, f"{where}. Annotated `{annotations.most_common(1)[0][0] or 'nothing'}`")


def _replacing(
    gained: Moves, lost: Moves, new: frozenset[str], relied: Mapping[str, str], told: set[str]
) -> Iterator[Red]:
    # A new argument replaces one that is gone from at least half of the same forwards, if no other name explains it.
    explained = {place for name in told for place in gained.get(name, ())}
    for name in sorted(new & gained.keys() - told):
        places = {*gained[name]} - explained
        gone = Counter(old for old, at in lost.items() if old in relied for place in at if place in places)
        for old, count in gone.most_common(1):
            if 2 * count >= len(places):
                yield Red("replaces", name, f"for `{old}`, in {listed(folders(places))}")


def _functions(before: Sources, after: Sources) -> Iterator[Red]:
    for name in sorted(before.derives.keys() | after.derives.keys()):
        had, has = before.derives.get(name), after.derives.get(name)
        if had != has:
            yield Red("derives", name, "is new" if had is None else "is gone" if has is None else "has another body")
    for name in sorted(after.implementations - before.implementations) if before.implementations else ():
        yield Red("implementation", name, "is registered")


def _gone(before: Sources, after: Sources, relied: Mapping[str, str]) -> Iterator[Red]:
    for name, place in sorted(relied.items()):
        had, has = (len(each.modeled.get(name, ())) for each in (before, after))
        if name in before.library and name not in after.library:
            yield Red("gone", name, f"gone from `{sorted(before.library[name])[0]}`. fa2patch: `{place}`")
        elif had >= SPREAD and 2 * has < had:
            yield Red("gone", name, f"in {has} modeling files; {had} had it. fa2patch: `{place}`")


def listed(names: Iterable[str], most: int = 4) -> str:
    return diffable.some((f"`{name}`" for name in names), most)
