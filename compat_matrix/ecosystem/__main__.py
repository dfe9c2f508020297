"""Runs tests with other packages, in real releases, and writes what they found: ``python -m compat_matrix.ecosystem``.

A name is a stack, whose tests run in its environment, or a row of README's table of integrations, whose slow tests run
here and start what they need. pytest's report is the evidence. ``python -m compat_matrix.publish`` makes the pages.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any, Callable

from .. import commits, environments, suite
from ..bench import figures
from ..cells import grouped
from ..screen import bars
from .stacks import EVIDENCE, HERE, INTEGRATIONS, Row, Stack, rows, stack_of, stacks

ROOT = HERE.parents[1]
Found = dict[str, Any]
# tests by outcome, each with what it said
Outcomes = dict[str, list[str]]


def main(arguments: list[str] | None = None) -> int:
    known: dict[str, Stack | Row] = {**{name: stack for name, stack in stacks().items() if stack.tests}, **rows()}
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.ecosystem", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(known)}")
    parser.add_argument("--environments", type=Path, default=ROOT / ".compat", help="where environments are kept")
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="the folder of the evidence")
    parser.add_argument(
        "-k", default="", metavar="EXPRESSION", help="only the tests of stacks that it matches, as for pytest"
    )
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in known]
    if unknown:
        parser.error(f"expected stacks or rows, found {', '.join(unknown)}. Known are {', '.join(known)}")
    failed = False
    with environments.only_our_packages() as packages, bars() as progress:
        for name in given.names or known:
            task = progress.add_task(name, total=100)

            def at(percent: int, task: Any = task) -> None:
                progress.update(task, completed=percent)

            try:
                one = known[name]
                outcomes = of_stack(one, given, packages, at) if isinstance(one, Stack) else of_row(one, given, at)
            except RuntimeError as error:
                outcomes = {"failure": [str(error)]}
            at(100)
            bad = [said for kind in ("failure", "error") for said in outcomes.get(kind, ())]
            counts = ", ".join(f"{len(tests)} {kind}" for kind, tests in sorted(outcomes.items())) or "no test"
            print("\n  ".join([f"{name}: {counts}", *bad]), flush=True)
            failed = failed or bool(bad) or "passed" not in outcomes
    return int(failed)


def of_stack(stack: Stack, given: argparse.Namespace, packages: Path, at: Callable[[int], None]) -> Outcomes:
    chosen = [str(ROOT / word) if word.startswith("tests/") else word for word in stack.tests]
    every = ["-m", "slow or not slow", *chosen, *(["-k", given.k] if given.k else [])]
    report = suite.in_environment(stack.name, every, given.environments, packages, at)
    checks = {check_of(case.name): finding(case) for case in report.cases if "finding" in case.properties}
    found = {"stack": stack.name, "versions": report.properties, "variables": stack.variables}
    found |= {"made": dict.fromkeys(checks, _made()), "checks": checks}
    file = given.evidence / f"{stack.name}.json"
    if given.k and file.exists():  # what was not run stays
        found |= {name: {**figures.read(file)[name], **found[name]} for name in ("made", "checks")}
    figures.write(file, found)
    return _by_outcome(report.cases)


def of_row(row: Row, given: argparse.Namespace, at: Callable[[int], None]) -> Outcomes:
    command = [sys.executable, "-m", "pytest", "-m", "slow", *row.tests]
    cases = suite.reported(command, ROOT, None, at).cases
    file = given.evidence / INTEGRATIONS.relative_to(EVIDENCE)
    found = figures.read(file) if file.exists() else {}
    found[row.name] = of_tests(row, cases)
    figures.write(file, {name: found[name] for name in rows() if name in found})
    return _by_outcome(cases)


def of_tests(row: Row, cases: list[suite.Case]) -> Found:
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
    # A check is named by its test's parameter, such as "trainer zero2", else by the test.
    name, _, parameter = test.partition("[")
    return parameter.rstrip("]") or name.removeprefix("test_")


def finding(case: suite.Case) -> Found:
    if case.outcome == "skipped":
        return {"skipped": case.said}
    holds = case.outcome == "passed"
    found = {**json.loads(case.properties["finding"]), "ok": holds, "seconds": round(case.seconds, 1)}
    return found if holds else {**found, "error": case.said[:1000]}


def _made() -> Found:
    return {**commits.of_code("compat_matrix/ecosystem", "tests"), "date": str(date.today())}


def _by_outcome(cases: list[suite.Case]) -> Outcomes:
    return grouped((case.outcome, f"{case.name}: {case.said.partition(chr(10))[0][:300]}") for case in cases)


if __name__ == "__main__":
    sys.exit(main())
