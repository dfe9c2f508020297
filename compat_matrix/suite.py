"""Runs a folder of tests in several Transformers versions: ``python -m compat_matrix.suite tests/never_silent``."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable
from xml.etree import ElementTree

from . import environments
from .ecosystem.stacks import stacks
from .screen import Console, bars

# One version for each way in which Transformers computes attention, and the newest of both majors.
VERSIONS = ("4.36.2", "4.43.4", "4.48.3", "4.57.6", environments.newest().name)

# what the tests need beside the packages of the matrix
PINS = ("pytest", "packaging")

AT_A_TIME = 2

_PERCENT = re.compile(r"\[ *(\d+)%\]\s*$")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.suite", description=__doc__)
    parser.add_argument("tests", type=Path, nargs="+", help="folders or files of tests")
    parser.add_argument(
        "--versions", nargs="+", metavar="V", default=VERSIONS,
        help=f"releases, or blocks of versions.toml or ecosystem/stacks.toml; default: {' '.join(VERSIONS)}",
    )  # fmt: skip
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="only the tests that it matches, as for pytest")
    parser.add_argument("-m", default="not slow", metavar="MARKERS", help="only tests with these, as for pytest")
    parser.add_argument("--environments", type=Path, default=environments.HERE.parent / ".compat")
    given = parser.parse_args(arguments)
    out = Console(soft_wrap=True, highlight=False, markup=False)
    lines: dict[str, str] = {}
    failures: dict[str, list[str]] = {}
    with environments.only_our_packages() as packages, bars() as progress:
        tasks = {name: progress.add_task(name, total=100, start=False) for name in given.versions}

        def tested(name: str) -> tuple[str, list[str]]:
            progress.start_task(tasks[name])
            return run(name, given, packages, lambda percent: progress.update(tasks[name], completed=percent))

        for name, found in environments.done(tested, given.versions, AT_A_TIME):
            if isinstance(found, Exception):
                found = "0 passed, 1 failed", [f"{type(found).__name__}: {found}"]
            lines[name], failures[name] = found
            progress.update(tasks[name], completed=100)
    for name in given.versions:
        out.print(f"{name}: {lines[name]}")
    for name in given.versions:
        for failure in failures[name]:
            out.print(f"{name} FAILED {failure}")
    return int(any(failures.values()))


def run(name: str, given: argparse.Namespace, packages: Path, at: Callable[[int], None]) -> tuple[str, list[str]]:
    # A line of counts, and what failed, which may also say why a run broke off.
    begun = time.perf_counter()
    arguments = ["-m", given.m, *(["-k", given.k] if given.k else []), *(str(path.resolve()) for path in given.tests)]
    report = in_environment(name, arguments, given.environments, packages, at)
    passed = sum(case.outcome == "passed" for case in report.cases)
    skipped = Counter(case.said or "no reason" for case in report.cases if case.outcome == "skipped")
    failed = [case.failure for case in report.cases if case.outcome in ("failure", "error")]
    # A run in which no test passed has failed: a test that was not run is not ok.
    if not failed and (report.code or not passed):
        passed, failed = 0, [f"pytest ended with {report.code}, and no test passed"]
    reasons = "; ".join(f"{count} x {reason}" for reason, count in sorted(skipped.items()))
    out = f"{sum(skipped.values())} skipped{f' ({reasons})' if reasons else ''}"
    return f"{passed} passed, {len(failed)} failed, {out}, {time.perf_counter() - begun:.0f} s", failed


@dataclass(frozen=True)
class Case:
    name: str
    module: str
    outcome: str  # "passed", "skipped", "failure" or "error"
    said: str  # the reason of a skip, or the error
    seconds: float
    properties: dict[str, str]  # what the test recorded with pytest's record_property

    @property
    def failure(self) -> str:
        return f"{'::'.join(filter(None, (self.module, self.name)))}: {self.said.partition(chr(10))[0][:300]}"


@dataclass(frozen=True)
class Report:
    code: int
    cases: list[Case]
    properties: dict[str, str]  # what was recorded for the whole run


def in_environment(
    name: str, arguments: Iterable[str], folder: Path, packages: Path, at: Callable[[int], None]
) -> Report:
    # name: a release, or a block of versions.toml or ecosystem/stacks.toml. at: called with the progress in percent
    stack = stacks().get(name)
    wanted = (stack.environment if stack else environments.version(name)).changed(PINS)
    python = environments.make(wanted, folder.resolve())
    settings = environments.variables(packages, **(stack.variables if stack else {}), HF_HUB_OFFLINE="1")
    return reported([str(python), "-m", "pytest", "-p", "no:cacheprovider", *arguments], packages, settings, at)


def reported(
    command: Sequence[str], folder: Path, variables: Mapping[str, str] | None, at: Callable[[int], None]
) -> Report:
    lines = []
    with tempfile.TemporaryDirectory(prefix="fa2patch-") as home:
        report = Path(home, "report.xml")
        with subprocess.Popen(
            [*command, "-q", f"--junitxml={report}"],
            cwd=folder, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            for line in process.stdout or ():
                lines.append(line)
                if percent := _PERCENT.search(line):
                    at(int(percent[1]))
        if not report.exists():
            raise RuntimeError(f"pytest ended with {process.returncode} and without a report: {''.join(lines)[-1500:]}")
        tree = ElementTree.parse(report)
    return Report(process.returncode, [*map(_case, tree.iter("testcase"))], _properties(tree.find(".//testsuite")))


def _case(case: ElementTree.Element) -> Case:
    found = {child.tag: child for child in case if child.tag in ("failure", "error", "skipped")}
    outcome = next((kind for kind in ("failure", "error", "skipped") if kind in found), "passed")
    told = (found[outcome].get("message") or "") if found else ""
    if outcome == "error":  # whose message says only where it happened
        told = (found[outcome].text or "").strip().split("\n")[-1]
    about = case.get("name", ""), case.get("classname", ""), outcome, told.strip(), float(case.get("time", 0))
    return Case(*about, _properties(case))


def _properties(element: ElementTree.Element | None) -> dict[str, str]:
    found = () if element is None else element.iterfind("properties/property")
    return {one.attrib["name"]: one.attrib["value"] for one in found}


if __name__ == "__main__":
    sys.exit(main())
