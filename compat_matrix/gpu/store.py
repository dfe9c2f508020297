"""Results of tasks: lines of one file in the folder of a run, and a file for each step in this repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .. import diffable, keys

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"

Records = dict[str, dict[str, Any]]  # by the task's name


class Run:
    """What a run found, in one file: a machine that is lent may give back a few files, and be gone at any time."""

    # A line holds a result, whose key is a number: its n-th bit stands for the n-th item of code in lines of "items".

    def __init__(self, folder: Path) -> None:
        self.file = folder / "results.jsonl"
        self.records: Records = {}
        self._places: dict[tuple[str, str], int] = {}
        lines = self.file.read_text(encoding="utf-8").splitlines(keepends=True) if self.file.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        if whole != lines:  # a machine was gone while it wrote the last one
            diffable.write(self.file, "".join(whole))
        for told in map(json.loads, whole):
            for item in told.get("items", ()):
                self._places[item[0], item[1]] = len(self._places)
            if "task" in told:
                self._take(told.pop("task"), told)

    def _take(self, name: str, found: dict[str, Any]) -> None:
        bits, made = int(found["made"]["key"], 16), found["made"]
        key = {item: known for (item, known), place in self._places.items() if bits >> place & 1}
        self.records[name] = {**found, "made": {**made, "key": key}}

    def keep(self, name: str, found: dict[str, Any]) -> None:
        key = found["made"]["key"]
        new = [pair for pair in key.items() if pair not in self._places]
        for pair in new:
            self._places[pair] = len(self._places)
        number = f"{sum(1 << self._places[pair] for pair in key.items()):x}"
        lines = [{"items": new}] if new else []
        lines.append({"task": name, **found, "made": {**found["made"], "key": number}})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps(line)}\n" for line in lines))
        self.records[name] = found


def committed(folder: Path = RESULTS) -> Records:
    found: Records = {}
    for file in sorted(folder.glob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        for name, record in data["tasks"].items():
            if "key" in record["made"]:
                (record["made"]["key"],) = keys.unpacked(data["code"], [record["made"]["key"]])
            found[f"{file.stem}: {name}"] = record
    return found


def take(run: Path, folder: Path = RESULTS) -> int:
    """Write the results of a run beside those that are committed, or in their place, and return how many there are."""
    new = Run(run).records
    known = committed(folder) | new
    for step in dict.fromkeys(name.partition(": ")[0] for name in new):
        records = {name.partition(": ")[2]: found for name, found in known.items() if name.startswith(f"{step}: ")}
        keyed = {name: found["made"]["key"] for name, found in records.items() if "key" in found["made"]}
        code, numbers = keys.packed(keyed.values())
        short = dict(zip(keyed, numbers))
        tasks = {
            name: {**found, "made": {**found["made"], **({"key": short[name]} if name in short else {})}}
            for name, found in records.items()
        }
        text = diffable.dumped({"code": code, "tasks": tasks}, 3, code=2)
        diffable.write(folder / f"{step}.json", f"{text}\n")
    return len(new)


def is_done(record: dict[str, Any] | None, sources: keys.Sources) -> bool:
    """Whether there is a result, and none of the code that it executed was changed since."""
    return record is not None and "key" in record["made"] and not sources.changed(record["made"]["key"])
