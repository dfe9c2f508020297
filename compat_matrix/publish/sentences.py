"""Says what a cell holds in plain sentences, for the page."""

from __future__ import annotations

from collections.abc import Iterable

from ..cells import Cell, Checked, Results, Upstream

ROWS = {
    "one row": "one packed row",
    "two rows": "two packed rows in a batch",
    "first document of one token": "a packed row that starts with a document of one token",
    "mask of ones": "a packed row with an attention mask of ones",
    "default cache": "a packed row with the default cache",
}
"""What each kind of packed row is called in a sentence, by its name in the evidence."""

_HERE = {
    "ok": "fa2patch isolates the documents",
    "refused": "fa2patch refuses this model and gives the reason",
    "xfail": "this is a known failure of Transformers, with and without fa2patch",
    "fail": "this fails with fa2patch",
}
_RESULTS = {"ok": "right for", "leak": "leaks for", "error": "raises an error for", "unknown": "not run for"}


def code(results: Results) -> str:
    """One sentence about the code that the cells were checked with."""
    every = results.made
    newest = results.code
    older = sum(made.code != newest for made in every)
    if not older:
        return f"All {len(every):,} cells were checked with the code of {newest}."
    return f"{older:,} of {len(every):,} cells were checked with older code than that of {newest}."


def made(cell: Cell, newest: str) -> str:
    """When a cell was checked, and with which code."""
    if cell.made is None:
        return ""
    older = f" That is older than {newest}." if cell.made.code != newest else ""
    return f"Checked on {cell.made.when[:10]} with the code of {cell.made.code} and torch {cell.made.torch}.{older}"


def verdict(cell: Cell) -> str:
    """One sentence about a cell: fa2patch, then Transformers alone."""
    return f"{_capital(_HERE[cell.state])}; {_alone(cell.upstream)}."


def with_fa2patch(cell: Cell) -> str:
    """One sentence about a cell with fa2patch, with the reason if it is not isolated."""
    if cell.state != "ok":
        word = {"refused": "refused, because", "xfail": "known failure:", "fail": "fails:"}[cell.state]
        return f"{word} {cell.reason}"
    loaded = [name for name, run in cell.checked.items() if run.ok]
    return f"isolated. Every point that was run holds, with the model loaded as {listed(loaded)}."


def alone(cell: Cell) -> list[tuple[str, str]]:
    """Implementations and one sentence about them without fa2patch; those with the same results are joined."""
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in cell.alone:
        results = tuple((row, result.partition(":")[0]) for row, result in run.rows.items())
        found.setdefault(results, []).append(run.implementation)
    return [(listed(names, "or"), _results(dict(results))) for results, names in found.items()]


def held(run: Checked) -> str:
    """How many points of one implementation hold, without those that do not apply."""
    if not run.was_run and run.not_applicable:
        return "cannot be loaded this way in this environment"
    if not run.was_run:
        return "not run, because Transformers alone fails on one document in float32"
    if run.failures:
        return f"{run.ok} of the {run.ok + len(run.failures)} points that were run hold"
    return f"all {run.ok} points that were run hold" if run.ok else "no point was run"


def listed(words: Iterable[str], joint: str = "and") -> str:
    """Join words with commas and ``joint``."""
    *first, last = words
    return f"{', '.join(first)} {joint} {last}" if first else last


def _results(results: dict[str, str]) -> str:
    """A sentence such as ``right for one packed row; leaks for a packed row with the default cache.``"""
    by: dict[str, list[str]] = {}
    for row, result in results.items():
        by.setdefault(result, []).append(ROWS.get(row, row))
    if len(by) == 1:
        return f"{_RESULTS[next(iter(by))]} all {len(results)} kinds of packed row."
    parts = (f"{word} {listed(by[result])}" for result, word in _RESULTS.items() if result in by)
    return f"{'; '.join(parts)}."


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


def _capital(text: str) -> str:
    return text if text.startswith("fa2patch") else text[:1].upper() + text[1:]
