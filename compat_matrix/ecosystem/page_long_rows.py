"""The page LONG_ROWS.md: rows that several processes share, for each engine with and without fa2patch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..publish import markdown
from .distributed import split
from .page_cells import number, stack_table

Cell = dict[str, Any]
Evidence = dict[str, Any]
Cells = dict[str, dict[str, list[tuple[int, Cell]]]]
"""By engine and feature: the number of processes and the cell of each run."""

PREFIX = "long-rows-"
"""How the names of the stacks start whose evidence this page is made of."""

ENGINES = {
    "ulysses": "DeepSpeed's Ulysses",
    "ulysses_engine loop": "accelerate's `sp_size`",
    "ulysses_engine trainer": "Trainer's `sp_size`",
    "tensor_parallel": "tensor parallelism",
    "split_rows torch": "torch's `context_parallel`",
    "split_rows accelerate": "accelerate's `cp_size`",
    "split_rows Trainer": "Trainer's `cp_size`",
    "split_rows ring_flash_attn": "ring_flash_attn",
}

IDS = ("packed rows by ids", "documents that cross the border")
FEATURES = {
    "ids": IDS,
    "lengths": ("packed rows by lengths",),
    "seq_idx": ("packed rows by `seq_idx`",),
    "window": ("windows",),
    "one key head": ("fewer key heads than processes",),
    "mixers": ("mixers, documents cut",),
    "qwen2": ("Qwen2",),
    "labels": ("labels of first tokens",),
}
"""The rows of the tables that a script's feature stands for, where they have other names."""


class Reasons:
    """The texts of refusals and errors. Each one is numbered when it is met first."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, said: str) -> int:
        """Return the number of a text, of which the first line is kept."""
        text = said.partition("\n")[0].replace("off_by is", "The number is")
        text = text if len(text) <= 400 else f"{text[:400]} …"
        return self.numbers.setdefault(text, len(self.numbers) + 1)

    def listed(self) -> str:
        return "\n".join(f"{number}. {markdown.plain(text)}" for text, number in self.numbers.items())


def page(found: dict[str, Evidence], known: Iterable[str], command: str, told: dict[str, str]) -> str:
    """Return the text of LONG_ROWS.md.

    Args:
        found: the evidence by stack.
        known: the names of all stacks of this page, also of those without evidence.
        command: the command that makes the evidence.
        told: the texts of told.toml.
    """
    reasons = Reasons()
    missing = [name for name in known if name not in found]
    parts = [
        f"<!-- Made by {command}.page from evidence/*.json: do not edit. -->",
        "# Rows that several processes share",
        f"    {command} --stacks {' '.join(known)}",
        told["long_rows"].strip(),
        stack_table(found),
        *([f"Without evidence: {', '.join(missing)}."] if missing else []),
        *failures(found),
        "## With fa2patch",
        *tables(found, "table", reasons),
        "## Without fa2patch",
        told["long_rows_alone"].strip(),
        *tables(found, "alone", reasons),
        "## Reasons",
        reasons.listed(),
        "## Every architecture under Ulysses",
        told["long_rows_architectures"].strip(),
        architectures(found),
        "## Bytes that a process sends",
        told["long_rows_bytes"].strip(),
        bytes_sent(found),
    ]
    return "\n\n".join(parts) + "\n"


def failures(found: dict[str, Evidence]) -> list[str]:
    """Return a paragraph for each run that failed."""
    return [
        f"**failed**: {stack}, {entry}" + (f": {markdown.plain(finding['error'])}" if "error" in finding else "")
        for stack, evidence in found.items()
        for entry, finding in evidence["checks"].items()
        if not finding["ok"]
    ]


def tables(found: dict[str, Evidence], kind: str, reasons: Reasons) -> list[str]:
    """Return a heading and a table of features and engines for each stack. ``kind`` is ``table`` or ``alone``."""
    parts = []
    for stack, evidence in found.items():
        cells = by_engine(evidence, kind)
        features = dict.fromkeys(feature for of_engine in cells.values() for feature in of_engine)
        rows = [[feature, *(said(one.get(feature, []), reasons) for one in cells.values())] for feature in features]
        parts += [f"### {stack}", "\n".join(markdown.table(["", *(ENGINES[engine] for engine in cells)], rows))]
    return parts


def by_engine(evidence: Evidence, kind: str) -> Cells:
    """Collect the cells of a stack. An engine that was not run there has none, and no column."""
    cells: Cells = {}
    for engine in ENGINES:
        for entry, finding in evidence["checks"].items():
            script, processes = split(entry)
            if script == engine or script.startswith(f"{engine} "):
                for feature, cell in of_finding(script, finding, kind):
                    cells.setdefault(engine, {}).setdefault(feature, []).append((processes, cell))
    return cells


def of_finding(script: str, finding: dict[str, Any], kind: str) -> Iterable[tuple[str, Cell]]:
    """Yield the rows of a finding, and their cells."""
    if script.startswith("ulysses_engine"):
        yield from of_training(script, finding, kind)
        return
    for name, cell in finding.get(kind, {}).items():
        for feature in FEATURES.get(name, (name,)):
            yield feature, cell


def of_training(script: str, finding: dict[str, Any], kind: str) -> Iterable[tuple[str, Cell]]:
    """Yield the rows that ten steps of training by accelerate or Trainer stand for."""
    if "error" in finding:
        return
    if "alone" in finding:
        yield from ((feature, finding["alone"]) for feature in IDS if kind == "alone")
    elif kind == "table":
        cell = {"found": "right" if finding["ok"] else "wrong", "off_by": max(finding["loss"], finding["weight"])}
        yield from ((feature, cell) for feature in IDS)
        yield f"ten steps with ZeRO-{script[-1]}", {**cell, "gradients_times": finding["gradients_times"]}
        yield "verify", {"found": "right" if finding["verify"].startswith("isolated") else "wrong"}


def said(runs: list[tuple[int, Cell]], reasons: Reasons) -> str:
    """Return the text of a cell. What holds for every run is said once, with the largest number."""
    groups: dict[str, list[tuple[int, Cell]]] = {}
    for processes, cell in runs:
        groups.setdefault(cell["found"].lower(), []).append((processes, cell))
    texts = []
    for word, of_word in groups.items():
        cells = [cell for _, cell in of_word]
        text = bold(word)
        if word in ("refused", "upstream", "error", "wrong") and cells[0].get("said"):
            text += f" [{reasons.number(cells[0]['said'])}]"
        numbers = [one for cell in cells for one in off(cell.get("off_by"))]
        text += f" ({two_digits(max(numbers))})" if numbers else ""
        times = max(cell.get("gradients_times", 1) for cell in cells)
        text += f", gradients × {times}" if times > 1 else ""
        where = " and ".join(str(processes) for processes, _ in of_word)
        texts.append(f"{text} with {where} processes" if len(groups) > 1 else text)
    return "; ".join(texts)


def bold(word: str) -> str:
    """Return the word for what became of a run, in bold if nobody is told that it is wrong."""
    return f"**{word}**" if word in ("wrong", "leaks") else word


def off(value: Any) -> list[float]:
    """Return the numbers of an ``off_by``: a number, several by name, or None."""
    if isinstance(value, dict):
        return [*value.values()]
    return [] if value is None else [value]


def two_digits(value: float) -> str:
    """Return a difference: with two digits if it is more than rounding."""
    return f"{value:.2g}" if value > 1e-3 else number(value)


def architectures(found: dict[str, Evidence]) -> str:
    """Return a table with the number of architectures by what became of them, and the names of those that are few."""
    rows, names = [], []
    for stack, evidence in found.items():
        groups: dict[str, list[str]] = {outcome: [] for outcome in OUTCOMES}
        for name, one in evidence["checks"].get("ulysses_architectures", {}).get("architectures", {}).items():
            groups[outcome(one)].append(name)
        rows.append([stack, *(str(len(group)) for group in groups.values())])
        few = {outcome: group for outcome, group in groups.items() if group and outcome != "right"}
        names += [f"- {stack}, {bold(one)}: {', '.join(f'`{name}`' for name in group)}" for one, group in few.items()]
    return "\n".join([*markdown.table(["stack", *OUTCOMES], rows), "", *names])


OUTCOMES = ("right", "right if documents lie whole", "refused", "upstream", "wrong")


def outcome(one: dict[str, Cell]) -> str:
    """Return what became of an architecture: one of ``OUTCOMES``."""
    first, *more = [run["found"].lower() for run in one.values()]
    if "wrong" in (first, *more):
        return "wrong"
    return "right if documents lie whole" if first == "refused" and "right" in more else first


def bytes_sent(found: dict[str, Evidence]) -> str:
    """Return a table of the bytes counted, those on paper, and those without fa2patch."""
    rows = []
    for stack, evidence in found.items():
        for entry, finding in evidence["checks"].items():
            for case, counts in finding.get("bytes", {}).items():
                for what, one in counts.items():
                    numbers = (one.get(column) for column in ("counted", "on paper", "without fa2patch"))
                    texts = ("" if value is None else f"{value:,.0f}" for value in numbers)
                    rows.append([stack, str(split(entry)[1]), case, what, *texts])
    head = ["stack", "processes", "model and batch", "", "counted", "on paper", "without fa2patch"]
    return "\n".join(markdown.table(head, rows))
