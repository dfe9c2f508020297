"""Makes MATRIX.md and matrix.html, which show every cell. The templates are in ``templates`` and ``web``."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Callable

from markupsafe import Markup

from ..cells import STATES, UPSTREAM_STATES, Cell, Checked, Environment, Results, Upstream, grouped
from ..check.found import ON_TEXT, VOUCHED
from ..gpu.store import Records
from . import words
from .need import SEEDS

HERE = {"ok": "✓", "refused": "R", "xfail": "x", "fail": "**FAIL**"}
ALONE = {"ok": "✓", "plain": "~", "leak": "✗", "error": "!", "unknown": "?"}
OLDER = "°"  # stands behind a cell that executed code which newer cells executed in another form

COLUMNS = 13  # versions side by side in MATRIX.md, at most

# How a reason counts for which a point was not run. Any other is one of the architecture's or of the version's.
WHY = {VOUCHED: "shared", ON_TEXT: "text"}

_FLASH = {"stand-in": "a stand-in for flash-attn with the same signature", "none": "no flash-attn"}
_WEB = Path(__file__).parent / "web"
_SCRIPTS = ("data.js", "stack.js", "address.js", "detail.js", "grid.js", "main.js")
_POINTS = Path(__file__).parents[1] / "check" / "points"


# By architecture: "ok", "fail" or "refused", and a sentence
OnGpu = Mapping[str, tuple[str, str]]


def tables(results: Results, gpu: OnGpu) -> str:
    cells = [cell for each in results.counted for cell in each.cells.values() if cell.state == "ok"]
    return words.rendered(
        "MATRIX.md.jinja",
        results=results,
        gpu=gpu,
        words=words,
        signs={"here": HERE, "alone": ALONE, "older": OLDER},
        rows="; ".join(words.ROWS.get(row, row) for row in results.upstream_rows),
        totals=_totals(results),
        parts=[part for band in words.bands(results.environments) for part in split(band, COLUMNS)],
        grid=lambda part: _grid(results, part, gpu),
        refused=_refused(results),
        known=_reasons(results, "xfail"),
        failing=_reasons(results, "fail"),
        loaded={"all": len(cells), **Counter(name for cell in cells for name, run in cell.checked.items() if run.ok)},
        runs=_runs_of_points(results),
        without={
            "What does not apply": _points(results, lambda run: run.not_applicable),
            "What Transformers alone fails at": _points(results, lambda run: run.alone_fails),
        },
    )


def on_gpus(records: Records) -> OnGpu:
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


def split(band: Sequence[Environment], columns: int) -> list[Sequence[Environment]]:
    parts = -(-len(band) // columns)
    ends = [round(part * len(band) / parts) for part in range(parts + 1)]
    return [band[start:end] for start, end in zip(ends, ends[1:])]


def _totals(results: Results) -> Iterator[list[str]]:
    def line(label: str, *environments: Environment) -> list[str]:
        found = results.score(*environments)
        alone = [found.one_row[result] for result in ("ok", "leak", "error")]
        return [label, *map(str, [*(found.states[state] for state in STATES), *alone, found.every_row])]

    for environment in results.environments:
        why = "allowed to fail" if environment.allowed_to_fail else "another stack of this release"
        yield line(f"{environment.name}{'' if environment.counts else f' ({why}, not counted)'}", environment)
    yield [f"**{text}**" for text in line("all", *results.counted)]


def _grid(results: Results, part: Sequence[Environment], gpu: OnGpu) -> tuple[list[str], list[list[str]]]:
    # The newest versions have a column with the newest result on a GPU, whatever release that is of.
    rows, last = [], results.environments[-1] in part
    for name in results.architectures:
        having = [environment for environment in part if name in environment.cells]
        if having:
            newest = max(having, key=lambda each: (each.order[0], each.name == each.transformers)).name
            signs = [_sign(each.cell(name), results) for each in part]
            rows.append([_linked(name, newest), *signs, *([gpu.get(name, ("", ""))[1]] if last else [])])
    named = [f"[{each.name}](evidence/{each.name}.json)" for each in part]
    return ["", *named, *(["[on a GPU](gpu/GPU.md)"] if last else [])], rows


def _linked(name: str, environment: str) -> str:
    return f"[`{name}`]({words.PAGE}#{words.address(name, environment)})"


def _sign(cell: Cell, results: Results) -> str:
    if cell.state == "absent":
        return ""
    older = f" {OLDER}" if cell.made and results.is_older(cell.made) else ""
    return f"{HERE[cell.state]} {ALONE[cell.upstream.state if cell.upstream else 'unknown']}{older}"


def _where(results: Results, state: str) -> dict[tuple[str, str], list[str]]:
    # The keys are reasons and links.
    found: dict[tuple[str, str], list[str]] = {}
    for name in results.architectures:
        cells = [(each.cell(name), each.name) for each in results.environments]
        for why, there in grouped(((cell.reason, cell.link), at) for cell, at in cells if cell.state == state).items():
            where = f"{_linked(name, there[-1])} {words.spans(results.environments, there)}"
            found.setdefault(why, []).append(where)
    return found


def _refused(results: Results) -> list[tuple[str, list[str]]]:
    # Cells are grouped by the common part of their reasons.
    found: dict[str, list[str]] = {}
    for (reason, _), cells in _where(results, "refused").items():
        sentence = reason.split(". ")[0].rstrip(".")
        common = re.sub(r"^(\w+: )?\w+:? ", "", sentence).split(", in ")[0]
        detail = sentence.partition(common)[2].lstrip(", ")
        found.setdefault(common, []).extend(f"{where}{detail and ': '}{words.plain(detail)}" for where in cells)
    return [(common, sorted(entries)) for common, entries in sorted(found.items())]


def _reasons(results: Results, state: str) -> list[str]:
    return [
        f"{'; '.join(where)}: {words.plain(reason)}{f' ([why]({link}))' if link else ''}"
        for (reason, link), where in sorted(_where(results, state).items())
    ]


def _runs_of_points(results: Results) -> Iterator[list[str]]:
    found: dict[str, Counter[str]] = {}
    for environment in results.counted:
        for point in environment.points:
            counts = found.setdefault(point, Counter())
            for cell in (cell for cell in environment.cells.values() if cell.state == "ok" and point in cell.points):
                runs = [run for run in cell.checked.values() if run.was_run]
                reasons = [{**run.not_applicable, **run.alone_fails}.get(point, "") for run in runs]
                why = (WHY[begun] for reason in reasons for begun in WHY if reason.startswith(begun))
                counts["ran" if not all(reasons) else next(why, "other")] += 1
    for point, counts in sorted(found.items()):
        yield [f"`{point}`", *(f"{counts[column]:,}" for column in ("ran", "shared", "text", "other"))]


def _points(results: Results, of: Callable[[Checked], Mapping[str, str]]) -> list[list[str]]:
    found = grouped(
        (why, name)
        for environment in results.environments
        for name, cell in environment.cells.items()
        for run in (cell.checked.values() if cell.state == "ok" else ())
        for why in of(run).items()
    )
    lines = []
    for (point, reason), having in sorted(found.items()):
        names = sorted({*having})
        shown = ", ".join(names) if len(names) < 8 else f"{len(names)} architectures"
        lines.append([f"`{point}`", words.plain(reason), shown])
    return lines


def page(results: Results, gpu: OnGpu) -> str:
    # The page loads nothing from the network.
    total = results.score(*results.counted)
    alone = [cell.upstream.state for each in results.counted for cell in each.cells.values() if cell.upstream]
    return words.rendered(
        "page.html.jinja",
        results=results,
        gpu=gpu,
        words=words,
        total=total,
        here={state: total.states[state] for state in STATES},
        alone={state: alone.count(state) for state in UPSTREAM_STATES},
        kinds=[words.ROWS.get(row, row) for row in results.upstream_rows],
        points=points(),
        devices=sorted({environment.device for environment in results.environments}),
        style=Markup((_WEB / "page.css").read_text(encoding="utf-8")),
        script=Markup("\n".join((_WEB / name).read_text(encoding="utf-8") for name in _SCRIPTS)),
        data={**data(results), "gpu": gpu},
    )


def points() -> dict[str, str]:
    # The points are parsed, because importing them needs torch.
    found = {}
    files = sorted(_POINTS.glob("*.py"), key=lambda file: not file.name.startswith("media"))
    for file in files:  # what is said of rows of text is kept, where rows with pictures have a point of the same name
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(name) == "point" for name in node.decorator_list):
                found[node.name] = (ast.get_docstring(node) or "").split("\n\n")[0].replace("``", "")
    return dict(sorted(found.items()))


def data(results: Results) -> dict[str, Any]:
    # A cell is three numbers: indices into "cells" (fa2patch), "runs" (Transformers alone) and "made". It is 0 where
    # the version does not have the architecture. In these tables, texts are indices into "texts"; states, counts, and
    # whether older code made the cell are numbers of their own. Each value is in a table once, because thousands of
    # cells share few reasons.
    cells, runs, made, texts = (defaultdict[Any, int](count().__next__) for _ in range(4))

    def numbered(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(map(numbered, value))
        return texts[value] if isinstance(value, str) else value

    def numbers(cell: Cell) -> list[int]:
        age = words.made(cell, results), int(cell.made is not None and results.is_older(cell.made))
        return [cells[numbered(_cell(cell))], runs[numbered(_runs(cell.alone))], made[numbered(age)]]

    every = results.environments
    starts = [band[0] for band in words.bands(every)]
    minors: dict[str, list[int]] = {}
    for place, each in enumerate(every):
        if not each.allowed_to_fail:
            places = minors.setdefault("{}.{}".format(*each.minor), [])
            places.insert(0 if each.name == each.transformers else len(places), place)  # the release's own comes first
    return {
        "architectures": [
            [name, int(name in SEEDS), [numbers(each.cells[name]) if name in each.cells else 0 for each in every]]
            for name in results.architectures
        ],
        "folder": words.FOLDER,
        "environments": [_environment(each, each in starts) for each in every],
        "minors": minors,
        "cells": list(cells),
        "runs": list(runs),
        "made": list(made),
        "texts": list(texts),
    }


def _cell(cell: Cell) -> list[Any]:
    checked = [
        [name, run.ok, words.held(run)]
        + [[*reasons.items()] for reasons in (run.not_applicable, run.alone_fails, run.failures)]
        for name, run in cell.checked.items()
    ]
    said = words.verdict(cell), words.with_fa2patch(cell), words.alone(cell)
    return [STATES.index(cell.state), *said, cell.reason, cell.link, checked]


def _runs(alone: tuple[Upstream, ...]) -> list[Any]:
    runs = [(run.implementation, [(words.ROWS.get(row, row), run.rows[row]) for row in run.rows]) for run in alone]
    return [UPSTREAM_STATES.index(alone[0].state if alone else "unknown"), runs]


def _environment(each: Environment, starts_band: bool) -> dict[str, Any]:
    about = f"Transformers {each.transformers}, torch {each.torch}, Python {each.python}, wrapt {each.wrapt}"
    flash = _FLASH.get(each.flash_attn, f"flash-attn {each.flash_attn}")
    return {
        "name": each.name,
        "release": each.transformers,
        "torch": each.torch.partition("+")[0],
        "label": " ".join(part for part in each.name.split("-") if not part.startswith("py")),
        "band": starts_band,
        "allowed": not each.counts,
        "about": f"{about}, {flash}, on {each.device} with the {each.kernel} kernel.",
    }
