"""Makes matrix.html, the evidence as one HTML file that loads nothing from the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ..cells import STATES, UPSTREAM_STATES, Cell, Checked, Environment, Results, Upstream
from . import links, sentences
from .bands import bands
from .markdown import gpu, missing
from .need import SEEDS
from .points import points

_WEB = Path(__file__).parent / "web"
_SCRIPTS = ("data.js", "stack.js", "address.js", "detail.js", "grid.js", "main.js")


def page(results: Results) -> str:
    """The text of the HTML file."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_WEB),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    total = results.score(*results.counted)
    alone = [cell.upstream.state for each in results.counted for cell in each.cells.values() if cell.upstream]
    return (
        templates.get_template("page.html.jinja").render(
            results=results,
            total=total,
            here={state: total.states[state] for state in STATES},
            alone={state: alone.count(state) for state in UPSTREAM_STATES},
            kinds=[sentences.ROWS.get(row, row) for row in results.upstream_rows],
            points=points(),
            days=sorted({made.when[:10] for environment in results.environments for made in environment.made}),
            code=sentences.code(results),
            devices=sorted({environment.device for environment in results.environments}),
            gpu=gpu(results),
            missing=missing(results),
            tables=f"{links.FOLDER}/MATRIX.md",
            style=Markup((_WEB / "page.css").read_text(encoding="utf-8")),
            script=Markup("\n".join((_WEB / name).read_text(encoding="utf-8") for name in _SCRIPTS)),
            data=data(results),
        )
        + "\n"
    )


class _Once(dict[Any, int]):
    """Numbers distinct values in order of appearance; thousands of cells share few reasons."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


def data(results: Results) -> dict[str, Any]:
    """The data of the page's script.

    A cell is three numbers, indices into ``cells`` (fa2patch), ``runs`` (Transformers alone) and ``made``, or 0 where
    the version does not have the architecture. Numbers in these tables are indices into ``texts``, except states,
    counts, and whether older code made the cell.
    """
    cells, runs, made, texts = _Once(), _Once(), _Once(), _Once()
    newest = results.code
    architectures = [
        [
            name,
            int(name in SEEDS),
            [
                [
                    cells[_cell(each.cells[name], texts)],
                    runs[_runs(each.cells[name].alone, texts)],
                    made[_made(each.cells[name], newest, texts)],
                ]
                if name in each.cells
                else 0
                for each in results.environments
            ],
        ]
        for name in results.architectures
    ]
    starts = [band.environments[0] for band in bands(results.environments)]
    return {
        "folder": links.FOLDER,
        "environments": [_environment(each, each in starts) for each in results.environments],
        "minors": _minors(results),
        "architectures": architectures,
        "cells": list(cells),
        "runs": list(runs),
        "made": list(made),
        "texts": list(texts),
    }


def _cell(cell: Cell, texts: _Once) -> tuple[Any, ...]:
    checked = tuple(_checked(name, run, texts) for name, run in cell.checked.items())
    said = [texts[text] for text in (sentences.verdict(cell), sentences.with_fa2patch(cell))]
    told = tuple((texts[names], texts[text]) for names, text in sentences.alone(cell))
    reasons = [texts[text] for text in (cell.reason, cell.link)]
    return STATES.index(cell.state), *said, told, *reasons, checked


def _checked(name: str, run: Checked, texts: _Once) -> tuple[Any, ...]:
    skipped, alone, failed = (
        tuple((texts[point], texts[reason]) for point, reason in reasons.items())
        for reasons in (run.not_applicable, run.alone_fails, run.failures)
    )
    return texts[name], run.ok, texts[sentences.held(run)], skipped, alone, failed


def _runs(alone: tuple[Upstream, ...], texts: _Once) -> tuple[Any, ...]:
    state = alone[0].state if alone else "unknown"
    runs = tuple(
        (
            texts[run.implementation],
            tuple((texts[sentences.ROWS.get(row, row)], texts[result]) for row, result in run.rows.items()),
        )
        for run in alone
    )
    return UPSTREAM_STATES.index(state), runs


def _made(cell: Cell, newest: str, texts: _Once) -> tuple[int, int]:
    return texts[sentences.made(cell, newest)], int(cell.made is not None and cell.made.code != newest)


def _minors(results: Results) -> dict[str, list[int]]:
    """The numbers of the environments of each minor; the one that is named as the release comes first."""
    found: dict[str, list[int]] = {}
    for number, environment in enumerate(results.environments):
        if not environment.allowed_to_fail:
            numbers = found.setdefault("{}.{}".format(*environment.minor), [])
            numbers.insert(0 if environment.name == environment.transformers else len(numbers), number)
    return found


def _environment(environment: Environment, starts_band: bool) -> dict[str, Any]:
    flash = {"stand-in": "a stand-in for flash-attn with the same signature", "none": "no flash-attn"}
    return {
        "name": environment.name,
        "release": environment.transformers,
        "torch": environment.torch.partition("+")[0],
        "label": " ".join(part for part in environment.name.split("-") if not part.startswith("py")),
        "band": starts_band,
        "allowed": not environment.counts,
        "about": (
            f"Transformers {environment.transformers}, torch {environment.torch}, Python {environment.python}, "
            f"wrapt {environment.wrapt}, {flash.get(environment.flash_attn, f'flash-attn {environment.flash_attn}')}, "
            f"on {environment.device} with the {environment.kernel} kernel."
        ),
    }
