"""Writes JSON whose changes a person reads: one line for each entry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def dumped(value: Any, levels: int, depth: int = 0, **others: int) -> str:
    """Return JSON with a line of its own for each entry of the first levels. What is deeper is in its entry's line.

    Args:
        value: what is written.
        levels: the number of levels.
        depth: how deep the value lies.
        others: the numbers of levels for entries of these names, where they are others.
    """
    if not levels or not value or not isinstance(value, (dict, list)):
        return json.dumps(value)
    if isinstance(value, dict):
        deeper = {name: others.get(name, levels) - 1 for name in value}
        entries = [f"{json.dumps(name)}: {dumped(each, deeper[name], depth + 1)}" for name, each in value.items()]
    else:
        entries = [dumped(each, levels - 1, depth + 1) for each in value]
    inside, begin, end = "\n" + " " * (depth + 1), *("{}" if isinstance(value, dict) else "[]")
    return f"{begin}{inside}{f',{inside}'.join(entries)}\n{' ' * depth}{end}"


def write(file: Path, text: str) -> None:
    """Write a file so that a stop leaves it whole."""
    beside = file.with_suffix(".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)
