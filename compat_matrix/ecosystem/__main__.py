"""Runs tests with other packages, in real releases, and writes what they found: ``python -m compat_matrix.ecosystem``.

A name is a stack, whose tests run in its environment, or a row of README's table of integrations, whose slow tests run
here and start what they need. pytest's report is the evidence. ``python -m compat_matrix.publish`` makes the pages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any, Callable
from xml.etree import ElementTree

from .. import commits, environments, suite
from ..screen import BarColumn, Console, Progress, TextColumn, TimeElapsedColumn
from .stacks import EVIDENCE, HERE, INTEGRATIONS, Row, Stack, rows, stack_of, stacks

ROOT = HERE.parents[1]
Found = dict[str, Any]
Outcomes = dict[str, list[str]]
"""Tests by outcome, each with what it said."""


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen stacks and rows, write their evidence and print a line for each.

    Args:
        arguments: the command line; None reads ``sys.argv``.

    Returns:
        The exit code: 1 if a test failed.
    """
    known: dict[str, Stack | Row] = {**{name: stack for name, stack in stacks().items() if stack.tests}, **rows()}
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.ecosystem", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(known)}")
    parser.add_argument("--environments", type=Path, default=ROOT / ".compat", help="where environments are kept")
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="the folder of the evidence")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in known]
    if unknown:
        parser.error(f"expected stacks or rows, found {', '.join(unknown)}. Known are {', '.join(known)}")
    failed = False
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn()
    with environments.only_our_packages() as packages, Progress(*columns, console=Console(stderr=True)) as progress:
        for name in given.names or known:
            task = progress.add_task(name, total=100)

            def at(percent: int, task: Any = task) -> None:
                progress.update(task, completed=percent)

            try:
                one = known[name]
                outcomes = of_stack(one, given, packages, at) if isinstance(one, Stack) else of_row(one, given)
            except RuntimeError as error:
                outcomes = {"failure": [str(error)]}
            at(100)
            bad = [said for kind in ("failure", "error") for said in outcomes.get(kind, ())]
            counts = ", ".join(f"{len(tests)} {kind}" for kind, tests in sorted(outcomes.items())) or "no test"
            print("\n  ".join([f"{name}: {counts}", *bad]), flush=True)
            failed = failed or bool(bad) or "passed" not in outcomes
    return int(failed)


def of_stack(stack: Stack, given: argparse.Namespace, packages: Path, at: Callable[[int], None]) -> Outcomes:
    """Run the tests of a stack in its environment, write its evidence, and return the tests by outcome."""
    chosen = [str(ROOT / word) if word.startswith("tests/") else word for word in stack.tests]
    with tempfile.TemporaryDirectory(prefix="fa2patch-") as folder:
        report = Path(folder, "report.xml")
        every = ["-m", "slow or not slow", *chosen]
        code, said = suite.started(stack.name, every, report, given.environments, packages, at)
        if not report.exists():
            raise RuntimeError(f"pytest ended with {code} and without a report: {said[-1500:]}")
        cases, versions = [*suite.cases(report)], _versions(report)
    checks = {check_of(case.name): finding(case) for case in cases if "finding" in case.properties}
    found = {"stack": stack.name, "versions": versions, "variables": stack.variables}
    found |= {"made": dict.fromkeys(checks, _made()), "checks": checks}
    _write(given.evidence / f"{stack.name}.json", found)
    return _by_outcome(cases)


def of_row(row: Row, given: argparse.Namespace) -> Outcomes:
    """Run the slow tests of a row, write how they ended, and return the tests by outcome."""
    with tempfile.TemporaryDirectory(prefix="fa2patch-") as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", *row.tests, f"--junitxml={report}"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode} and without a report: {done.stdout[-1500:]}")
        cases = [*suite.cases(report)]
    file = given.evidence / INTEGRATIONS.relative_to(EVIDENCE)
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found[row.name] = of_tests(row, cases)
    _write(file, {name: found[name] for name in rows() if name in found})
    return _by_outcome(cases)


def of_tests(row: Row, cases: list[suite.Case]) -> Found:
    """Return what is kept of a row's tests."""
    tests = {case.name: case.outcome for case in cases}
    used = {stack_of(test) for test in tests}
    return {
        "command": row.command,
        **_made(),
        "seconds": round(sum(case.seconds for case in cases)),
        "outcomes": dict(sorted(Counter(tests.values()).items())),
        "stacks": [name for name in stacks() if name in used],
        "tests": tests,
    }


def check_of(test: str) -> str:
    """Return the name in the evidence of a test: its parameter, such as ``trainer zero2``, or its own name."""
    name, _, parameter = test.partition("[")
    return parameter.rstrip("]") or name.removeprefix("test_")


def finding(case: suite.Case) -> Found:
    """Return what is kept of a stack's test: whether it holds, the numbers that it recorded, and why it does not."""
    if case.outcome == "skipped":
        return {"skipped": case.said}
    holds = case.outcome == "passed"
    found = {**json.loads(case.properties["finding"]), "ok": holds, "seconds": round(case.seconds, 1)}
    return found if holds else {**found, "error": case.said[:1000]}


def _versions(report: Path) -> dict[str, str]:
    """Return the versions of packages that the report names. tests/conftest.py records them."""
    properties = ElementTree.parse(report).iterfind(".//testsuite/properties/property")
    return {one.attrib["name"]: one.attrib["value"] for one in properties}


def _made() -> Found:
    return {**commits.of_code("compat_matrix/ecosystem", "tests"), "date": str(date.today())}


def _by_outcome(cases: list[suite.Case]) -> Outcomes:
    found: Outcomes = {}
    for case in cases:
        found.setdefault(case.outcome, []).append(f"{case.name}: {case.said.partition(chr(10))[0][:300]}")
    return found


def _write(file: Path, found: Found) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
