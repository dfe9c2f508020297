"""Makes MATRIX.md, all evidence as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Callable

from fa2patch.cli.evidence import runs

from ..cells import STATES, Cell, Checked, Environment, Results, Score
from . import links, ran, sentences
from .bands import Band, bands, split

HERE = {"ok": "✓", "refused": "R", "xfail": "x", "fail": "**FAIL**"}
ALONE = {"ok": "✓", "plain": "~", "leak": "✗", "error": "!", "unknown": "?"}
OLDER = "°"
"""Stands behind a cell that older code made than the newest cell's."""

COLUMNS = 13
"""The largest number of versions side by side in MATRIX.md."""


def matrix(results: Results) -> str:
    """The text of MATRIX.md: totals, every cell, reasons and environments."""
    rows = "; ".join(sentences.ROWS.get(row, row) for row in results.upstream_rows)
    return "\n".join(
        [
            "# Which architecture, in which Transformers version",
            "",
            "<!-- Made by `python -m compat_matrix.publish` from compat_matrix/evidence; edit that, not this. -->",
            "",
            f"[The page]({links.PAGE}) shows the same as a map and answers for one stack. {gpu(results)}",
            *missing(results),
            "",
            "## By version",
            "",
            "The numbers are architectures. *Isolated*: every point that was run holds. *Refused*: `apply` raises an "
            "error with the reason.",
            f"*All kinds*: {rows}. Rows with pictures or sound are of three of these kinds: the plain row, the mask of "
            "ones and the default cache.",
            "",
            *_totals(results),
            "",
            "## Every cell",
            "",
            "A name links to its newest cell on the page, a version to its evidence. A version without the "
            "architecture is empty.",
            "",
            f"- First sign, with fa2patch: {HERE['ok']} isolated, {HERE['refused']} refused, {HERE['xfail']} known "
            f"failure, {HERE['fail']}.",
            f"- Second sign, Transformers alone, loaded as flash_attention_2 if possible: {ALONE['ok']} right, "
            f"{ALONE['plain']} right for one packed row but not for all kinds,",
            f"  {ALONE['leak']} leaks for one packed row, {ALONE['error']} raises an error for one packed row, "
            f"{ALONE['unknown']} not run.",
            f"- {OLDER}: the cell was checked with older code than the newest cell. {sentences.code(results)}",
            *(
                line
                for band in bands(results.environments)
                for part in split(band, COLUMNS)
                for line in _grid(results, part)
            ),
            "",
            *_refused(results),
            *_reasons("Known failures", results, "xfail"),
            *_reasons("Failing", results, "fail"),
            "## Which points were run",
            "",
            f"{ran.sentence(results)} compat_matrix/README.md says what a shared seam vouches for.",
            "",
            *table(*ran.table(results)),
            "",
            *_points("What does not apply", results, lambda run: run.not_applicable),
            *_points("What Transformers alone fails at", results, lambda run: run.alone_fails),
            "## Environments",
            "",
            *_environments(results.environments),
            *(["", "On a GPU:", "", *_environments(results.gpu)] if results.gpu else []),
            "",
        ]
    )


def gpu(results: Results) -> str:
    """One sentence about the evidence from GPUs."""
    if not results.gpu:
        return "No GPU evidence exists yet."
    runs = []
    for environment in results.gpu:
        states = [cell.state for cell in environment.cells.values()]
        runs.append(f"{environment.name} on {environment.device}, {states.count('ok')} of {len(states)} ok")
    return f"GPU evidence: {'; '.join(runs)}."


def missing(results: Results) -> list[str]:
    """A sentence for each wanted environment that has no evidence."""
    return [f"Version {name} has not been checked yet." for name in results.missing]


def spans(environments: Sequence[Environment], names: Iterable[str]) -> str:
    """Names of environments with neighbours joined, for example ``4.34.1 to 4.42.4, 5.0.0``."""
    found = runs([environment.name for environment in environments], set(names))
    return ", ".join(" to ".join(dict.fromkeys(run)) for run in found)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in lines]


def _totals(results: Results) -> list[str]:
    head = [
        "Transformers",
        *("isolated", "refused", "known failure", "failing", "not in it"),
        *("alone: one packed row right", "leaks", "error", f"all {len(results.upstream_rows)} kinds right"),
    ]

    def line(label: str, found: Score) -> list[str]:
        alone = [found.one_row[result] for result in ("ok", "leak", "error")]
        return [label, *(str(found.states[state]) for state in STATES), *map(str, alone), str(found.every_row)]

    rows = []
    for environment in results.environments:
        why = "allowed to fail" if environment.allowed_to_fail else "another stack of this release"
        label = environment.name if environment.counts else f"{environment.name} ({why}, not counted)"
        rows.append(line(label, results.score(environment)))
    bold = [f"**{text}**" if text else "" for text in line("all", results.score(*results.counted))]
    return table(head, [*rows, bold])


def _grid(results: Results, band: Band) -> list[str]:
    newest = results.code
    names = [name for name in results.architectures if any(name in each.cells for each in band.environments)]
    return [
        "",
        f"### {band.label}",
        "",
        *table(
            ["", *(f"[{environment.name}](evidence/{environment.name}.json)" for environment in band.environments)],
            (
                [_name(name, band.environments), *(_cell(each.cell(name), newest) for each in band.environments)]
                for name in names
            ),
        ),
    ]


def _name(name: str, environments: Sequence[Environment]) -> str:
    """An architecture's name with a link to its cell in the newest release among these environments."""
    having = [environment for environment in environments if name in environment.cells]
    newest = max(having, key=lambda each: (each.order[0], each.name == each.transformers)).name
    return f"[`{name}`]({links.cell(name, newest)})"


def _cell(cell: Cell, newest: str) -> str:
    if cell.state == "absent":
        return ""
    older = f" {OLDER}" if cell.made is not None and cell.made.code != newest else ""
    return f"{HERE[cell.state]} {ALONE[cell.upstream.state if cell.upstream else 'unknown']}{older}"


def _refused(results: Results) -> list[str]:
    """The refused cells, grouped by the common part of their reasons."""
    found: dict[str, list[str]] = {}
    for (reason, _), cells in _where(results, "refused").items():
        sentence = reason.split(". ")[0].rstrip(".")
        common = re.sub(r"^(\w+: )?\w+:? ", "", sentence).split(", in ")[0]
        for name, there in cells.items():
            detail = sentence.partition(common)[2].lstrip(", ")
            where = f"[`{name}`]({links.cell(name, there[-1])}) {spans(results.environments, there)}"
            line = f"- {where}{detail and ': '}{plain(detail)}"
            found.setdefault(common, []).append(line)
    lines = ["## Refused", ""] if found else []
    for common, entries in sorted(found.items()):
        lines += [f"Reason: {plain(common)}:", "", *sorted(entries), ""]
    return lines


def _reasons(title: str, results: Results, state: str) -> list[str]:
    """Each reason once, with its architectures and versions."""
    found = _where(results, state)
    lines = [f"## {title}", ""] if found else []
    for (reason, link), where in sorted(found.items()):
        names = "; ".join(
            f"[`{name}`]({links.cell(name, there[-1])}) {spans(results.environments, there)}"
            for name, there in where.items()
        )
        lines.append(f"- {names}: {plain(reason)}{f' ([why]({link}))' if link else ''}")
    return [*lines, ""] if lines else []


def _where(results: Results, state: str) -> dict[tuple[str, str], dict[str, list[str]]]:
    """Names of environments, by reason and link and then by architecture."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name in results.architectures:
        for environment in results.environments:
            cell = environment.cell(name)
            if cell.state == state:
                where = found.setdefault((cell.reason, cell.link), {})
                where.setdefault(name, []).append(environment.name)
    return found


def _points(title: str, results: Results, of: Callable[[Checked], Mapping[str, str]]) -> list[str]:
    """Points that say nothing about fa2patch, with their reasons and architectures."""
    found: dict[tuple[str, str], set[str]] = {}
    for environment in results.environments:
        for name, cell in environment.cells.items():
            for run in cell.checked.values() if cell.state == "ok" else ():
                for point, reason in of(run).items():
                    found.setdefault((point, reason), set()).add(name)
    if not found:
        return []
    rows = (
        [f"`{point}`", plain(reason), ", ".join(sorted(names)) if len(names) < 8 else f"{len(names)} architectures"]
        for (point, reason), names in sorted(found.items())
    )
    return [f"## {title}", "", *table(["point", "reason", "in some version of"], rows), ""]


def _environments(environments: Iterable[Environment]) -> list[str]:
    head = ["", "Python", "torch", "wrapt", "flash-attn", "device", "kernel", "points", "code", "checked"]
    return table(
        head,
        (
            [each.name, each.python, each.torch, each.wrapt, each.flash_attn, each.device, each.kernel]
            + [str(len(each.points)), ", ".join(each.codes), each.dates]
            for each in environments
        ),
    )


def plain(text: str) -> str:
    """The text of an exception on one line, with Markdown's markup escaped."""
    text = " ".join(text.split())
    for mark in ("\\", "<", "*", "_", "`", "["):
        text = text.replace(mark, "\\" + mark)
    return text
