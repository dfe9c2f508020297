"""Makes matrix.html, the evidence as one HTML file that loads nothing from the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from ..cells import STATES, UPSTREAM_STATES, Cell, Environment, Results, Upstream
from .bands import bands
from .markdown import gpu


def page(results: Results) -> str:
    """The text of the HTML file."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
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
            kinds=len(results.upstream_rows),
            dates=sorted({environment.date for environment in results.environments}),
            devices=sorted({environment.device for environment in results.environments}),
            gpu=gpu(results),
            data=_data(results),
        )
        + "\n"
    )


class _Once(dict[Any, int]):
    """Numbers distinct values in order of appearance; thousands of cells share few reasons."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


def _data(results: Results) -> dict[str, Any]:
    """The data of the page's script: two numbers per architecture and version, and the tables that they index."""
    cells, runs, texts = _Once(), _Once(), _Once()
    architectures = {
        name: [
            [cells[_cell(each.cell(name), texts)], runs[_run(each.cell(name).upstream, texts)]]
            for each in results.environments
        ]
        for name in results.architectures
    }
    starts = [band.environments[0] for band in bands(results.environments)]
    return {
        "environments": [_environment(each, each in starts) for each in results.environments],
        "architectures": list(architectures.items()),
        "cells": list(cells),
        "runs": list(runs),
        "texts": list(texts),
    }


def _cell(cell: Cell, texts: _Once) -> tuple[Any, ...]:
    def numbered(reasons: Any) -> tuple[tuple[int, int], ...]:
        return tuple((texts[point], texts[reason]) for point, reason in reasons.items())

    checked = tuple(
        (texts[name], run.ok, numbered(run.not_applicable), numbered(run.failures))
        for name, run in cell.checked.items()
    )
    return STATES.index(cell.state), texts[cell.reason], texts[cell.link], texts[", ".join(cell.seam)], checked


def _run(run: Upstream | None, texts: _Once) -> tuple[Any, ...]:
    if run is None:
        return (UPSTREAM_STATES.index("unknown"),)
    results = tuple((texts[row], texts[result]) for row, result in run.rows.items())
    return UPSTREAM_STATES.index(run.state), texts[run.implementation], results


def _environment(environment: Environment, starts_band: bool) -> dict[str, Any]:
    release, _, variant = environment.name.partition("-")
    return {
        "name": environment.name,
        "label": variant.partition("-")[0] or release,
        "band": starts_band,
        "points": len(environment.points),
        "allowed": environment.allowed_to_fail,
        "about": [
            f"Transformers {environment.transformers}",
            f"torch {environment.torch}",
            f"Python {environment.python}",
            f"wrapt {environment.wrapt}",
            f"flash-attn: {environment.flash_attn}",
            f"{environment.device}, {environment.kernel} kernel",
            environment.date,
        ],
    }
