"""One table of measurements, for the terminal and as Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import screen

Found = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table with a title.

    Attributes:
        notes: what a reader must know to read the numbers, in Markdown.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    notes: str = ""

    def as_rich(self) -> screen.Table:
        """Return the table for the terminal; all columns but the first are right-aligned."""
        notes = self.notes.replace("*", "").replace("`", "")
        made = screen.Table(title=self.title, caption=notes or None, title_justify="left", caption_justify="left")
        for place, name in enumerate(self.head):
            made.add_column(name, justify="right" if place else "left")
        for row in self.rows:
            made.add_row(*row)
        return made

    def as_markdown(self) -> str:
        """Return title, table and notes as Markdown."""
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join(part for part in (f"### {self.title}", table, self.notes) if part)
