"""Reads and checks the evidence, one JSON file for each environment, and judges it by xfail.toml."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from . import environments, keys
from .cells import Cell, Checked, Environment, Made, Results, Upstream, grouped
from .check.found import ALONE, DOCUMENT, ON_TEXT, VOUCHED
from .tiny_configs import MEDIA, PAIRS

FORMAT = 3
EVIDENCE = Path(__file__).parent / "evidence"

# A cell is ok only if each of these points holds with at least one implementation.
CORE = (
    "every_layout", "inertness", "lengths", "no_dense_mask", "nothing_crosses", "packed_row", "packed_rows", "padding",
    "refusals", "reverted",
)  # fmt: skip

# The kinds of row that exist with pictures or sound, and of pairs; check.upstream makes them.
ROWS_WITH_MEDIA = ("one row", "mask of ones", "default cache")


class Malformed(ValueError):
    """A file is not evidence. The message names the file and what was expected."""


def read(folder: Path, wanted: Iterable[str] = ()) -> Results:
    here = sorted(map(read_file, folder.glob("*.json")), key=lambda environment: environment.order)
    if not here:
        raise Malformed(f"{folder}: expected evidence, found no JSON. Run python -m compat_matrix")
    names = {environment.name for environment in here}
    return Results(tuple(here), tuple(name for name in wanted if name not in names))


def read_file(file: Path, partial: bool = False) -> Environment:
    # A partial file may lack points of CORE, as after --points.
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Malformed(f"{file}: expected JSON, found {error}") from None
    return read_data(data, file.stem, partial, str(file))


class _Expected(Exception):
    pass


def read_data(data: Any, name: str, partial: bool = False, where: str = "evidence") -> Environment:
    try:
        return _environment(data, name, partial)
    except _Expected as expected:
        raise Malformed(f"{where}: expected {expected}") from None


def _environment(data: Any, stem: str, partial: bool) -> Environment:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise _Expected(f"format {FORMAT}, found {found}. Run python -m compat_matrix --versions {stem}")
    texts = {key: _take(data, key, str) for key in ("name", "transformers", "python", "wrapt", "device", "kernel")}
    if texts["name"] != stem:
        raise _Expected(f"name to be the file's, {stem!r}, found {texts['name']!r}")
    try:
        Version(texts["transformers"])
    except InvalidVersion as error:
        raise _Expected(f"transformers to be a version, found {error}") from None
    points, rows = tuple(_take(data, "points", list)), tuple(_take(data, "upstream_rows", list))
    missing = sorted(set(CORE) - set(points))
    if missing and not partial and texts["device"] == "cpu":
        raise _Expected(f"points to have {', '.join(missing)}")
    table = _take({"code": {}, **data}, "code", dict)
    cells = {}
    for name in _take(data, "architectures", dict):
        cell = _take(data["architectures"], name, dict, "architectures.")
        cell = {"points": points, **cell}  # a cell that is kept from an earlier run says with which points
        cell.update(judged(name, texts["transformers"], cell, cell["points"]))
        these = tuple(row for row in rows if row in ROWS_WITH_MEDIA) if name.endswith((*MEDIA, PAIRS)) else rows
        cells[name] = _cell(cell, these, f"architectures.{name}.", table)
    for name, cell in cells.items() if not partial else ():
        reasons = (reason for run in cell.checked.values() for reason in run.not_applicable.values())
        vouchers = {reason[len(VOUCHED) :] for reason in reasons if _is_vouched_for(reason)}
        without = sorted(each for each in vouchers if each not in cells or cells[each].state != "ok")
        if cell.state == "ok" and without:
            cells[name] = replace(cell, state="fail", reason=f"{VOUCHED}{', '.join(without)}, which is not ok")
    return Environment(
        **texts,
        flash_attn=data.get("flash_attn") or "none",
        points=points,
        upstream_rows=rows,
        cells=cells,
        requirements=tuple(data.get("requirements", ())),
        allowed_to_fail=bool(data.get("allowed_to_fail")),
    )


def _cell(data: dict[str, Any], rows: tuple[str, ...], where: str, table: dict[str, Any]) -> Cell:
    points = tuple(data["points"])
    made = _made(_take(data, "made", dict, where), where + "made.", table)
    alone = _alone(data.get("upstream") or {}, rows, where + "upstream.")
    state = next((state for state in ("error", "refused", "xfail") if state in data), None)
    checked = _checked(data, where) if state is None or "fa2patch" in data else {}
    if state is not None:
        reason, link, seam = _take(data, state, str, where), "", ()
        if state == "xfail":
            link, seam = _take(data, "link", str, where), tuple(data.get("seam", ()))
            if not link.startswith(("https://", "http://")):
                raise _Expected(f"{where}link to be a web address, found {link!r}")
        shown = "fail" if state == "error" else state
        return Cell(shown, reason, link, seam, checked, alone, made, points)
    seam = tuple(_take(data, "seam", list, where))
    found = grouped((problem, name) for name, run in checked.items() for problem in _problems(run, points))
    problems = [f"{', '.join(names)}: {problem}" for problem, names in found.items()] + _not_held(checked, points)
    return Cell("fail" if problems else "ok", "; ".join(problems), "", seam, checked, alone, made, points)


def _made(data: dict[str, Any], where: str, table: dict[str, Any]) -> Made:
    # Every cell must say what it was made with. An unknown commit or state is null.
    for name in ("commit", "dirty"):
        if name not in data:
            raise _Expected(f"{where}{name}, found nothing")
    texts = [_take(data, key, str, where) for key in ("torch", "when")]
    seconds = float(_take(data, "seconds", (int, float), where))
    key = keys.unpacked(table, [data["key"]])[0] if "key" in data else None
    return Made((data["commit"] or "")[:12], data["dirty"], *texts, seconds, key)


def _checked(data: dict[str, Any], where: str) -> dict[str, Checked]:
    checked = {}
    for name in _take(data, "fa2patch", dict, where):
        counts = {"ok": 0, "n/a": {}, ALONE: {}, "fail": {}, **_take(data["fa2patch"], name, dict, f"{where}fa2patch.")}
        reasons = (_take(counts, kind, dict, where) for kind in ("n/a", ALONE, "fail"))
        checked[name] = Checked(_take(counts, "ok", int, where), *reasons)
    return checked


def _problems(run: Checked, points: tuple[str, ...]) -> list[str]:
    problems = [f"{point}: {failure}" for point, failure in run.failures.items()]
    if not run.was_run:
        return problems
    others = [*run.not_applicable, *run.alone_fails, *run.failures]
    if run.ok + len(others) != len(points):
        problems.append(
            f"{run.ok} ok, {len(run.not_applicable)} n/a, {len(run.alone_fails)} failed alone and {len(run.failures)} "
            f"failed of {len(points)} points do not add up"
        )
    elif not set(others) <= set(points):
        problems.append("points that are not among those that were run")
    return problems


def _not_held(checked: Mapping[str, Checked], points: tuple[str, ...]) -> list[str]:
    # A core point that held nowhere makes a cell not ok although nothing fails.
    runs = [run for run in checked.values() if run.was_run]
    if not any(run.ok for run in runs):
        return ["no point was found to hold"]
    problems = []
    for point in [point for point in points if point in CORE] or points:
        others = [{**run.not_applicable, **run.alone_fails}.get(point, "") for run in runs]
        failed = any(point in run.failures for run in runs)  # which is a reason of its own
        if all(others) and not failed and ON_TEXT not in others and not all(map(_is_vouched_for, others)):
            problems.append(f"{point} held with no implementation: {others[0]}")
    return problems


def _is_vouched_for(reason: str) -> bool:
    return reason.startswith(VOUCHED)


def _alone(data: dict[str, Any], rows: tuple[str, ...], where: str) -> tuple[Upstream, ...]:
    runs = []
    for implementation in dict.fromkeys(("flash_attention_2", "sdpa", *data)):
        if implementation not in data:
            continue
        results = {row: str(data[implementation].get(row, "unknown")) for row in rows}
        for row, result in results.items():
            if result.partition(":")[0] not in ("ok", "leak", "error", "unknown"):
                raise _Expected(f"{where}{implementation}.{row} to be ok, leak or error: ..., found {result!r}")
        runs.append(Upstream(implementation, results))
    return tuple(runs)


def _take(data: Any, key: str, kind: Any, where: str = "") -> Any:
    if not isinstance(data, dict) or not isinstance(data.get(key), kind):
        found = type(data[key]).__name__ if isinstance(data, dict) and key in data else "nothing"
        raise _Expected(f"{where}{key} to be {getattr(kind, '__name__', 'a number')}, found {found}")
    return data[key]


def judged(architecture: str, transformers: str, cell: Mapping[str, Any], points: Sequence[str]) -> dict[str, str]:
    # A cell is an xfail only if every failure is the known one, in a point that the entry names. An entry of which
    # points were run and none fails is an error, so that it is removed.
    about = (each for each in _entries() if architecture in each["architectures"])
    known = next((e for e in about if any(f"{transformers}.".startswith(f"{v}.") for v in e["versions"])), None)
    if known is None or "refused" in cell or "error" in cell:
        return {}
    runs = list(cell.get("fa2patch", {}).values())
    failed = [found for run in runs for found in run.get("fail", {}).items()]
    if not any(run.get("ok") for run in runs):
        failed += [found for run in runs for found in run.get(ALONE, {}).items()]
    if not failed:
        works = f"xfail.toml expects {known['error']!r}, and nothing fails. Remove the version from the entry"
        return {"error": works} if {*known["points"]} & {*points, DOCUMENT} else {}
    if all(point in known["points"] and known["error"] in what for point, what in failed):
        return {"xfail": known["reason"], "link": known["link"]}
    return {}


@functools.cache
def _entries() -> list[dict[str, Any]]:
    return list(environments.tomllib.loads((environments.HERE / "xfail.toml").read_text())["xfail"])
