"""What ``apply`` finds in every cell, compared with the committed snapshots: ``python -m compat_matrix.plans``.

Snapshots are made without a forward, for all environments, on every change of fa2patch. A cell whose snapshot is not
the committed one must be run. They also say which architectures share a plan, so that one vouches for the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import diffable, environments, keys, run
from .screen import bars

PLANS = environments.HERE / "plans.json"

# By architecture, then by attn_implementation: what check.plan.of returns.
Snapshots = dict[str, dict[str, Any]]


@dataclass
class Planned:
    snapshots: Snapshots
    key: keys.Items  # the items of code that were executed for the snapshots
    made_of: list[str]  # of its environment


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.plans", description=__doc__)
    parser.add_argument("--versions", nargs="+", metavar="V", help="blocks of versions.toml, or releases; default: all")
    parser.add_argument("--write", action="store_true", help="write the snapshots that were made into plans.json")
    parser.add_argument("--all", action="store_true", help="also versions of which no code that finds plans changed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="versions at a time")
    parser.add_argument("--environments", type=Path, default=environments.HERE.parent / ".compat")
    given = parser.parse_args(arguments)
    known, sources = read(), keys.Sources(environments.HERE.parent)
    blocks = environments.versions().values()
    named = [environments.version(name) for name in given.versions or ()]
    wanted = named or [block for block in blocks if not block.allowed_to_fail]
    left = []
    for each in wanted:
        plan = known.get(each.name)
        fresh = plan and plan.made_of == each.stated and plan.key and not sources.changed(plan.key)
        left += [each] if given.all or not fresh else []
    wrong, broken, count = False, False, 0
    with environments.only_our_packages() as packages, bars() as progress:
        task = progress.add_task("plans", total=len(left))

        def planned(version: environments.Version) -> tuple[Snapshots, keys.Items]:
            return run.plans(version, given.environments, packages)

        for version, found in environments.done(planned, left, given.jobs):
            progress.advance(task)
            if isinstance(found, Exception):  # the other versions' plans are kept
                broken = True
                print(f"{version.name}: {type(found).__name__}: {found}", flush=True)
                continue
            made, key = found
            count += len(made)
            before = known[version.name].snapshots if version.name in known else {}
            for line in differences(before, made):
                wrong = True
                print(f"{version.name}: {line}", flush=True)
            known[version.name] = Planned(made, key, version.stated)
            if given.write:
                write(known)
    print(
        f"{count:,} architectures in {len(left)} environments, {'some' if wrong else 'none'} found otherwise. In "
        f"{len(wanted) - len(left)} environments no code changed that finds plans."
    )
    return int(broken or (wrong and not given.write))


def differences(before: Snapshots, now: Snapshots) -> Iterator[str]:
    for name in sorted({*now, *before}):
        if name not in now or name not in before:
            yield f"{name}: {'is new' if name in now else 'is gone'}"
        elif before[name] != now[name]:
            where, old, new = next(_differ(before[name], now[name]))
            yield f"{name}: {where}: committed {_short(old)}, found {_short(new)}"


def _differ(old: Any, new: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                yield from _differ(old.get(name), new.get(name), f"{where}.{name}".strip("."))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, both in enumerate(zip(old, new)):
            if both[0] != both[1]:
                yield from _differ(*both, f"{where}[{place}]")
    elif old != new:
        yield where, old, new


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def read(file: Path = PLANS) -> dict[str, Planned]:
    if not file.exists():
        return {}
    data = json.loads(file.read_text(encoding="utf-8"))
    table, code = data.pop("plans"), data.pop("code")

    def snapshot(entry: list[Any]) -> dict[str, Any]:
        place, *model = entry
        return {**table[place], **({"model": model[0]} if model else {})}

    found = {}
    for version, said in data.items():
        number, made_of = said.pop("key"), said.pop("made of")
        snapshots = {
            name: {implementation: snapshot(entry) for implementation, entry in entries.items()}
            for name, entries in said.items()
        }
        (key,) = keys.unpacked(code, [number])
        found[version] = Planned(snapshots, key, made_of)
    return found


def write(known: Mapping[str, Planned], file: Path = PLANS) -> None:
    # Equal snapshots are written once.
    order = [name for name in environments.versions() if name in known]
    known = {name: known[name] for name in dict.fromkeys([*order, *known])}
    places: dict[str, int] = {}

    def entry(snapshot: dict[str, Any]) -> list[Any]:
        text = json.dumps({name: held for name, held in snapshot.items() if name != "model"})
        return [places.setdefault(text, len(places)), *([snapshot["model"]] if "model" in snapshot else [])]

    code, numbers = keys.packed(planned.key for planned in known.values())
    found: dict[str, Any] = {}
    for (version, planned), number in zip(known.items(), numbers):
        entries = {
            name: {implementation: entry(snapshot) for implementation, snapshot in snapshots.items()}
            for name, snapshots in planned.snapshots.items()
        }
        found[version] = {"made of": planned.made_of, "key": number, **entries}
    found |= {"plans": [*map(json.loads, places)], "code": code}
    diffable.write(file, diffable.dumped(found, 2) + "\n")


def seams(snapshots: Mapping[str, Any]) -> set[str]:
    layers = (layer for snapshot in snapshots.values() for layer in snapshot.get("layers", ()))
    return {layer.rpartition(": ")[2] for layer in layers}


def vouchers(snapshots: Snapshots) -> dict[str, str]:
    # The first one of a plan vouches, in the order of the check, and only if all layers are at the interface seam.
    first: dict[str, str] = {}
    found = {}
    for name, plans in snapshots.items():
        shape = json.dumps({implementation: _shape(snapshot) for implementation, snapshot in plans.items()})
        if seams(plans) == {"interface"} and first.setdefault(shape, name) != name:
            found[name] = first[shape]
    return found


def _shape(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    # Architectures with one plan differ in the names of modules, classes and layers, which are left out.
    if "layers" not in snapshot:
        return {"error": snapshot.get("error", snapshot.get("refused"))}
    registry = {name: held for name, held in snapshot["found"]["registry"].items() if name != "model_type"}
    return {
        "layers": sorted({layer.rpartition(": ")[2] for layer in snapshot["layers"]}),
        "sites": sorted({site.partition(".")[2] for site in snapshot["sites"]}),
        "found": {**snapshot["found"], "registry": registry},
        "route": snapshot["route"],
        "roles": snapshot["roles"],
    }


if __name__ == "__main__":
    sys.exit(main())
