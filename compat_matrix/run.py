"""Checks one version in its environment: runs two processes and merges their findings, cell by cell."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Callable

from . import commits, diffable, environments, keys
from .check.found import ALONE, DOCUMENT, EXECUTED, REFUSED_AND_PATCHED
from .results import FORMAT

# One process runs without flash-attn, one with its stand-in.
PARTS = ("without", "with")

Found = dict[str, Any]
# a process's name, the architecture and the cell
Line = tuple[str, str, "Found | None"]


def evidence(
    version: environments.Version,
    folder: Path,  # of the environments
    packages: Path,  # of environments.only_our_packages
    *options: str,  # of python -m compat_matrix.check
    doing: Callable[[str], None] = lambda what: None,
    # called with each cell as soon as it is checked: what evidence says beside cells, its name and the cell
    keep: Callable[[Found, str, Found], None] = lambda header, name, cell: None,
) -> Found:
    doing(f"preparing an environment with {', '.join(version.requirements)}")
    code = commits.of_code()
    python = environments.make(version, folder.resolve())
    sources = keys.Sources(packages)
    header: Found = {}
    cells: dict[str, Found] = {}
    processes = {part: ["compat_matrix.check", "--flash-attn", part, *options] for part in PARTS}
    for name, found in lines(python, packages, processes):
        first, second = (found.get(part, {}) for part in PARTS)
        if not name:
            header = {"format": FORMAT, "name": version.name, **first, "flash_attn": second["flash_attn"]}
            header |= {"requirements": version.stated, **({"allowed_to_fail": True} if version.allowed_to_fail else {})}
            continue
        now = commits.of_code()
        cell = merged(first, second, {**code, "dirty": True} if now != code else code)
        executed = [part["made"].pop("executed") for part in (first, second) if part and "executed" in part["made"]]
        if executed:
            cell["made"]["key"] = sources.key(*executed)
        cells[name] = cell
        doing(f"{name} checked")
        keep(header, name, cell)
    return written(header, cells)


def plans(version: environments.Version, folder: Path, packages: Path) -> tuple[dict[str, Found], keys.Items]:
    python = environments.make(version, folder.resolve())
    options = ["--families", *version.families] if version.families else []
    snapshots = lines(python, packages, {"plans": ["compat_matrix.check", "--plans", *options]})
    made = {name: found["plans"] for name, found in snapshots}
    key = keys.Sources(packages).key(made.pop(EXECUTED), without=())
    return made, key


def lines(
    python: Path, packages: Path, processes: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, dict[str, Found]]]:
    # Each architecture is yielded with its cells by process, as soon as all are there. An empty name stands for the
    # environment. A process that does not have the architecture gives no cell.
    came: queue.Queue[Line] = queue.Queue()
    waiting: dict[str, dict[str, Found]] = {}
    with contextlib.ExitStack() as stack:
        for part, module in processes.items():
            errors = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            process = subprocess.Popen(
                [str(python), "-m", *module],
                cwd=packages, env=environments.variables(packages), text=True, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
            reader = threading.Thread(target=_read, args=(process, errors, part, came))
            reader.start()
            stack.callback(reader.join)
            stack.callback(process.terminate)  # which is the first of both
        running = len(processes)
        while running:
            part, name, cell = came.get()
            if cell is None:
                running -= 1
                if name:
                    raise RuntimeError(name)
                continue
            waiting.setdefault(name, {})[part] = cell
            if len(waiting[name]) == len(processes):
                yield name, waiting.pop(name)
    yield from waiting.items()


def _read(process: subprocess.Popen[str], errors: IO[str], part: str, came: queue.Queue[Line]) -> None:
    # None comes at the end, with the error as the name if the process fails.
    for line in process.stdout or ():
        said = json.loads(line)
        name = said.get("architecture", "")
        came.put((part, name, said["cell"] if name else said))
    failed = process.wait()
    errors.seek(0)
    why = errors.read()[-1500:] or f"it ended with {failed}"
    came.put((part, why if failed else "", None))


def merged(first: Found, second: Found, code: Found) -> Found:
    # The cell of a process without the architecture is empty. code: the "commit" and "dirty" of what was checked
    # It takes both processes' seconds, and the time of the first one.
    made = [part["made"] for part in (first, second) if part]
    about = {name: value for name, value in made[0].items() if name != "executed"}
    seconds = round(sum(part["seconds"] for part in made), 1)
    cell = {**first, **second, "made": {**code, **about, "seconds": seconds}}
    for key in ("fa2patch", "upstream"):
        if key in first or key in second:
            cell[key] = {**first.get(key, {}), **second.get(key, {})}
    if "refused" in cell and "seam" in cell:
        failing = _failing_alone(first if "refused" in first else second)
        if failing:  # what cannot be computed without fa2patch need not be refused
            del cell["refused"]
            cell["fa2patch"].update(failing)
        else:
            cell.setdefault("error", f"{REFUSED_AND_PATCHED}: {cell['refused']}"[:400])
    if first.get("seam", second.get("seam")) != second.get("seam", first.get("seam")):
        cell["error"] = f"seam {first['seam']} without flash-attn, {second['seam']} with it"
    return cell


def _failing_alone(part: Found) -> Found:
    # No point is run if Transformers alone raises errors for every row with all implementations.
    outcomes = {implementation: [*rows.values()] for implementation, rows in part["upstream"].items()}
    if not all(rows and all(row.startswith("error: ") for row in rows) for rows in outcomes.values()):
        return {}
    return {implementation: {ALONE: {DOCUMENT: rows[0][len("error: ") :]}} for implementation, rows in outcomes.items()}


def written(header: Found, cells: dict[str, Found]) -> Found:
    # The keys are packed into one table. A cell that was run with other points than the header's says so itself.
    keyed = {name: cell["made"]["key"] for name, cell in cells.items() if "key" in cell["made"]}
    table, numbers = keys.packed(keyed.values())
    packed = dict(zip(keyed, numbers))
    architectures = {}
    for name, cell in cells.items():
        key = {"key": packed[name]} if name in packed else {}
        architectures[name] = {**cell, "made": {**cell["made"], **key}}
        if cell.get("points") == header["points"]:
            del architectures[name]["points"]
    return {**header, "code": table, "architectures": architectures}


def unwritten(evidence: Found) -> dict[str, Found]:
    found = {}
    for name, cell in evidence["architectures"].items():
        found[name] = {"points": evidence["points"], **cell}
        if "key" in cell["made"]:
            (key,) = keys.unpacked(evidence["code"], [cell["made"]["key"]])
            found[name]["made"] = {**cell["made"], "key": key}
    return found


def text(evidence: Found) -> str:
    return diffable.dumped(evidence, 9, code=2, architectures=2) + "\n"
