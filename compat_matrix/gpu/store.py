"""Results of tasks: one file each in the folder of a run, and one for each step in this repository."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .. import diffable, keys

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"

Records = dict[str, dict[str, Any]]  # by the task's name


def keep(folder: Path, name: str, found: dict[str, Any]) -> None:
    step, _, what = name.partition(": ")
    called = re.sub(r"[^\w.+-]+", "-", what)
    diffable.write(folder / step / f"{called}.json", diffable.dumped({"task": name, **found}, 2) + "\n")


def of_run(folder: Path) -> Records:
    files = (json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*/*.json")))
    return {found.pop("task"): found for found in files}


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
    new = of_run(run)
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


def of_architectures(records: Records) -> dict[str, tuple[str, str]]:
    """By architecture: "ok", "fail" or "refused", and a sentence with the newest result, or the newest right one."""
    found: dict[str, tuple[str, str]] = {}
    cells = [(record["row"]["architecture"], record) for record in records.values()
             if "architecture" in record.get("row", {})]  # fmt: skip
    for architecture, record in sorted(cells, key=lambda cell: str(cell[1]["made"]["when"])):
        state = "fail" if record["wrong"] else "refused" if record["refused"] else "ok"
        if state == "refused" and architecture in found:
            continue
        made, kernels = record["made"], record["row"]["kernels"]
        said = {"ok": f"Right with {kernels}", "fail": "Wrong", "refused": "Not computed"}[state]
        on = f"{made['device']}, {made['when'][:10]}, Transformers {made['transformers']}"
        found[architecture] = state, f"{said} on {on}."
    return found
