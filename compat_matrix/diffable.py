"""Writes JSON and tables of Markdown whose changes a person reads: one line for each entry."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def dumped(value: Any, levels: int, depth: int = 0, **others: int) -> str:
    """Return JSON in which each entry of the first levels has a line of its own."""
    # others: the number of levels for entries of these names
    if not levels or not value or not isinstance(value, (dict, list)):
        return json.dumps(value)
    if isinstance(value, dict):
        deeper = {name: others.get(name, levels) - 1 for name in value}
        entries = [f"{json.dumps(name)}: {dumped(each, deeper[name], depth + 1)}" for name, each in value.items()]
    else:
        entries = [dumped(each, levels - 1, depth + 1) for each in value]
    inside, begin, end = "\n" + " " * (depth + 1), *("{}" if isinstance(value, dict) else "[]")
    return f"{begin}{inside}{f',{inside}'.join(entries)}\n{' ' * depth}{end}"


def some(names: Iterable[str], most: int = 5) -> str:
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> str:
    lines = [head, ["---", *["---:" if numbers else "---"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in lines)


def of_results(rows: Iterable[Mapping[str, Any]]) -> str:
    rows = list(rows)
    head = list(dict.fromkeys(name for row in rows for name in row))
    return table(head, ([_shown(row.get(name, "")) for name in head] for row in rows), numbers=True)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write(file: Path, text: str) -> None:
    # A stop meanwhile leaves the old file whole.
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)
