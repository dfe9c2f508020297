"""Makes README's table of integrations from the outcomes of their tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..ecosystem import integrations
from ..results import Malformed
from . import links
from .markdown import table


def made(evidence: Path) -> str:
    """The table: what runs with which releases of a package, and the command that shows it.

    Raises:
        Malformed: The tests of a row were not run, or not all of them passed.
    """
    found = json.loads(evidence.read_text(encoding="utf-8")) if evidence.exists() else {}
    head = ["with", "releases", "what runs", "tests", "`python -m pytest -m slow`"]
    return "\n".join(table(head, _lines(found)))


def _lines(found: dict[str, Any]) -> Iterator[list[str]]:
    for name, row in integrations.rows().items():
        run = found.get(name)
        if run is None or set(run["outcomes"]) != {"passed"} or run["command"] != row.command:
            raise Malformed(
                f"{integrations.EVIDENCE.name}: expected the passed tests of {row.command}, found "
                f"{run and run['outcomes']}. Run {integrations.COMMAND} --rows {name}"
            )
        numbers = ", ".join(integrations.releases(row, run["stacks"]))
        tests = " ".join(f'"{word}"' if " " in word else word for word in row.tests)
        page = f"[{row.title}]({links.DOCS}/{row.page})"
        yield [page, numbers, row.what, f"{run['outcomes']['passed']} passed", f"`{tests}`"]
