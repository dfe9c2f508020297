"""What all tables and pages say in the same words: addresses, ranges of versions, ages, and sentences about a cell."""

from __future__ import annotations

import textwrap
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from fa2patch.evidence import stretches

from .. import diffable
from ..cells import Cell, Checked, Environment, Results, Upstream, grouped

FOLDER = "https://github.com/fa2patch/fa2patch/blob/main/compat_matrix"
DOCS = "https://fa2patch.github.io/fa2patch"
PAGE = f"{DOCS}/matrix.html"

# what each kind of packed row is called in a sentence
ROWS = {
    "one row": "one packed row",
    "two rows": "two packed rows in a batch",
    "first document of one token": "a packed row that starts with a document of one token",
    "mask of ones": "a packed row with an attention mask of ones",
    "default cache": "a packed row with the default cache",
}

# The first minor of each band, within which the attention code kept its structure. In order: an attention class for
# each implementation; one flash function for all models; one attention interface for all models; one module that makes
# masks; version 5.
STARTS = ((4, 34), (4, 43), (4, 48), (4, 53), (5, 0))

_RESULTS = {"ok": "right for", "leak": "leaks for", "error": "raises an error for", "unknown": "not run for"}


def rendered(template: str, **context: Any) -> str:
    # Only HTML is escaped.
    here = Path(__file__).parent
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader([here / "templates", here / "web"]),
        autoescape=jinja2.select_autoescape(["html.jinja"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    templates.filters.update(plain=plain, number=number, wrapped=wrapped)
    templates.globals.update(table=diffable.table)
    return templates.get_template(template).render(**context).rstrip("\n") + "\n"


def wrapped(text: str) -> str:
    # README's lines are as long.
    return textwrap.fill(text, 145, break_long_words=False, break_on_hyphens=False)


def plain(text: str) -> str:
    # Markdown's markup is escaped.
    text = " ".join(text.split())
    for mark in ("\\", "<", "*", "_", "`", "["):
        text = text.replace(mark, "\\" + mark)
    return text


def number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.0e}"


def listed(words: Iterable[str], joint: str = "and") -> str:
    *first, last = words
    return f"{', '.join(first)} {joint} {last}" if first else last


def address(architecture: str, environment: str) -> str:
    # This is the part of a cell's address after "#", for example "llama-4.43.4".
    return f"{architecture}-{environment}"


def span(first: tuple[int, int], last: tuple[int, int]) -> str:
    return "\N{EN DASH}".join(f"{major}.{minor}" for major, minor in dict.fromkeys((first, last)))


def label(band: Sequence[Environment]) -> str:
    return span(band[0].minor, band[-1].minor)


def bands(environments: Iterable[Environment], starts: Sequence[tuple[int, int]] = STARTS) -> list[list[Environment]]:
    # What is older than the first band is in it, too.
    return [*grouped((max(bisect_right(starts, each.minor), 1), each) for each in environments).values()]


def spans(environments: Sequence[Environment], names: Iterable[str]) -> str:
    # Neighbours are joined, for example "4.34.1 to 4.42.4, 5.0.0".
    found = stretches([environment.name for environment in environments], set(names))
    return ", ".join(" to ".join(dict.fromkeys(run)) for run in found)


def age(results: Results) -> str:
    # The sentence names days, not a number of days, so that the same evidence gives the same text every day.
    every = results.made
    days, older = sorted(made.when[:10] for made in every), sum(map(results.is_older, every))
    when = f"on {days[0]}" if days[0] == days[-1] else f"from {days[0]} to {days[-1]}"
    if not older:
        return f"All {len(every):,} cells were checked {when}, and the code that they executed is the same in all."
    return (
        f"All {len(every):,} cells were checked {when}. {older:,} of them executed code that was changed before newer "
        "cells were checked; each cell names its commit."
    )


def gpu(found: Mapping[str, tuple[str, str]]) -> str:
    right = sum(state == "ok" for state, _ in found.values())
    return f"On a GPU, {right} of {len(found)} architectures were right." if found else "None ran on a GPU yet."


def made(cell: Cell, results: Results) -> str:
    if cell.made is None:
        return ""
    older = " What it executed has been changed since." if results.is_older(cell.made) else ""
    return f"Checked on {cell.made.when[:10]} with the code of {cell.made.code} and torch {cell.made.torch}.{older}"


def verdict(cell: Cell) -> str:
    here = {
        "ok": "fa2patch isolates the documents",
        "refused": "fa2patch refuses this model and gives the reason",
        "xfail": "This is a known failure of Transformers, with and without fa2patch",
        "fail": "This fails with fa2patch",
    }[cell.state]
    return f"{here}; {_alone(cell.upstream)}."


def with_fa2patch(cell: Cell) -> str:
    if cell.state != "ok":
        word = {"refused": "refused, because", "xfail": "known failure:", "fail": "fails:"}[cell.state]
        return f"{word} {cell.reason}"
    loaded = [name for name, run in cell.checked.items() if run.ok]
    return f"isolated. Every point that was run holds, with the model loaded as {listed(loaded)}."


def alone(cell: Cell) -> list[tuple[str, str]]:
    # Implementations with the same results are joined.
    found = grouped(
        (tuple((row, result.partition(":")[0]) for row, result in run.rows.items()), run.implementation)
        for run in cell.alone
    )
    return [(listed(names, "or"), _results(dict(results))) for results, names in found.items()]


def held(run: Checked) -> str:
    if not run.was_run and run.not_applicable:
        return "cannot be loaded this way in this environment"
    if not run.was_run:
        return "not run, because Transformers alone fails on one document in float32"
    if run.failures:
        return f"{run.ok} of the {run.ok + len(run.failures)} points that were run hold"
    return f"all {run.ok} points that were run hold" if run.ok else "no point was run"


def _results(results: dict[str, str]) -> str:
    # It is such as "right for one packed row; leaks for a packed row with the default cache."
    by = grouped((result, ROWS.get(row, row)) for row, result in results.items())
    if len(by) == 1:
        return f"{_RESULTS[next(iter(by))]} all {len(results)} kinds of packed row."
    return "; ".join(f"{word} {listed(by[result])}" for result, word in _RESULTS.items() if result in by) + "."


def _alone(run: Upstream | None) -> str:
    if run is None or run.state == "unknown":
        return "Transformers alone was not run"
    words = {
        "ok": f"is right for all {len(run.rows)} kinds of packed row",
        "plain": "is right for one packed row, but not for every kind",
        "leak": "leaks, even for one packed row",
        "error": "raises an error for one packed row",
    }
    return f"Transformers alone, loaded as {run.implementation}, {words[run.state]}"
