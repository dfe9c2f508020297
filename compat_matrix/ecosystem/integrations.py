"""Run the slow tests of README's table of integrations: ``python -m compat_matrix.ecosystem.integrations``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .. import commits, environments
from ..results import Malformed
from .stacks import HERE, stacks

ROOT = HERE.parents[1]
EVIDENCE = HERE / "evidence" / "integrations" / "tests.json"
COMMAND = "python -m compat_matrix.ecosystem.integrations"


@dataclass(frozen=True)
class Row:
    """One row of integrations.toml.

    Attributes:
        name: a short name, by which the command line chooses rows.
        package: the package whose releases the table lists, as a pin of stacks.toml names it.
        what: what runs, in words.
        tests: the files of tests, and pytest's ``-k`` if only some of them belong to the row.
        title: the package's name in the table.
        page: its page in the documentation.
    """

    name: str
    package: str
    what: str
    tests: tuple[str, ...]
    title: str
    page: str

    @property
    def command(self) -> str:
        """The command that runs the row's tests."""
        words = (f'"{word}"' if " " in word else word for word in self.tests)
        return f"python -m pytest -m slow {' '.join(words)}"


def rows() -> dict[str, Row]:
    """Return the rows of integrations.toml by name, in the file's order."""
    file = environments.tomllib.loads((HERE / "integrations.toml").read_text(encoding="utf-8"))
    return {
        name: Row(name, **{"package": name, **block, "tests": tuple(block["tests"])})
        for name, block in file["integration"].items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen rows and write what was found; returns 1 if a test failed."""
    known = rows()
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=known, metavar="R", default=[*known], help=", ".join(known))
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="the JSON file; rows that do not run are kept")
    given = parser.parse_args(arguments)
    found = json.loads(given.evidence.read_text(encoding="utf-8")) if given.evidence.exists() else {}
    for number, name in enumerate(given.rows, 1):
        print(f"{name} ({number} of {len(given.rows)}): {known[name].command}", file=sys.stderr, flush=True)
        found[name] = ran(known[name])
        print(f"  {found[name]['outcomes']} in {found[name]['seconds']} s", file=sys.stderr, flush=True)
        given.evidence.parent.mkdir(parents=True, exist_ok=True)
        in_order = {each: found[each] for each in known if each in found}
        given.evidence.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")
    return 1 if any(set(found[name]["outcomes"]) - {"passed"} for name in given.rows) else 0


def ran(row: Row) -> dict[str, Any]:
    """Run a row's tests, and return how they ended, with the commit that they ran on."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fa2patch-") as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", *row.tests, f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT)
        cases = read(report) if report.exists() else {}
    return {
        "command": row.command,
        **commits.of_code("compat_matrix/ecosystem", "tests"),
        "date": str(date.today()),
        "seconds": round(time.perf_counter() - started),
        "outcomes": dict(sorted(Counter(cases.values()).items())),
        "stacks": [name for name in stacks() if any(name == _stack(case) for case in cases)],
        "tests": cases,
    }


def read(report: Path) -> dict[str, str]:
    """Read pytest's report: the outcome of every test, by name."""
    return {case.attrib["name"]: _outcome(case) for case in ElementTree.parse(report).iter("testcase")}


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return next((kind for kind in ("failure", "error", "skipped") if kind in kinds), "passed")


def _stack(case: str) -> str:
    """The stack that a test's parameters name, or an empty string. The longest name that fits is meant."""
    parameters = case.partition("[")[2].rstrip("]")
    fitting = (name for name in stacks() if f"-{name}-" in f"-{parameters}-")
    return max(fitting, key=len, default="")


def releases(row: Row, names: Sequence[str]) -> list[str]:
    """The releases of a row's package in these stacks, each once.

    Raises:
        Malformed: A stack does not pin the package.
    """
    found = []
    for name in names:
        wanted = stacks()[name].environment
        pins = dict(pin.split("==") for pin in wanted.pins if "==" in pin)
        release = {"transformers": wanted.transformers, **pins}.get(row.package)
        if release is None:
            raise Malformed(f"stacks.toml: {name} runs tests of {row.name} and does not pin {row.package}")
        found.append(release)
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    sys.exit(main())
