"""Runs a folder of tests in several Transformers versions: ``python -m compat_matrix.suite tests/never_silent``."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable
from xml.etree import ElementTree

from . import environments
from .ecosystem.stacks import stacks
from .screen import BarColumn, Console, Progress, TextColumn, TimeElapsedColumn

VERSIONS = ("4.36.2", "4.43.4", "4.48.3", "4.57.6", environments.newest().name)
"""One version for each way in which Transformers computes attention, with the newest of both majors."""

PINS = ("pytest", "packaging")
"""Packages that the tests need in addition to those of the matrix."""

AT_A_TIME = 2

_PERCENT = re.compile(r"\[ *(\d+)%\]\s*$")


@dataclass(frozen=True)
class Result:
    """The result of one version's tests.

    Attributes:
        passed: The number of tests that passed.
        skipped: The number of tests that were skipped, by reason.
        failed: The name and the error of each test that failed, or why the run broke off.
        seconds: The run time.
    """

    passed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    failed: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """A one-line summary."""
        reasons = "; ".join(f"{count} x {reason}" for reason, count in sorted(self.skipped.items()))
        skipped = f"{sum(self.skipped.values())} skipped{f' ({reasons})' if reasons else ''}"
        return f"{self.passed} passed, {len(self.failed)} failed, {skipped}, {self.seconds:.0f} s"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 1 if any version fails."""
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.suite", description=__doc__)
    parser.add_argument("tests", type=Path, nargs="+", help="folders or files of tests")
    parser.add_argument(
        "--versions", nargs="+", metavar="V", default=VERSIONS,
        help=f"releases, or blocks of versions.toml or ecosystem/stacks.toml; default: {' '.join(VERSIONS)}",
    )  # fmt: skip
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="only the tests that it matches, as for pytest")
    parser.add_argument(
        "-m", default="not slow", metavar="MARKERS", help="only tests with these markers, as for pytest"
    )
    parser.add_argument("--environments", type=Path, default=environments.HERE.parent / ".compat")
    given = parser.parse_args(arguments)
    console, out = Console(stderr=True), Console(soft_wrap=True, highlight=False, markup=False)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn()
    results: dict[str, Result] = {}
    packages, threads = environments.only_our_packages(), ThreadPoolExecutor(AT_A_TIME)
    with packages as path, Progress(*columns, console=console) as progress, threads as pool:
        tasks = {name: progress.add_task(name, total=100, start=False) for name in given.versions}

        def started(name: str) -> Result:
            progress.start_task(tasks[name])
            return run(name, given, path, lambda percent: progress.update(tasks[name], completed=percent))

        for future in as_completed(futures := {pool.submit(started, name): name for name in given.versions}):
            name = futures[future]
            try:
                results[name] = future.result()
            except Exception as error:
                results[name] = Result(failed=(f"{type(error).__name__}: {error}",))
            progress.update(tasks[name], completed=100)
    for name in given.versions:
        out.print(f"{name}: {results[name].line}")
    for name in given.versions:
        for failure in results[name].failed:
            out.print(f"{name} FAILED {failure}")
    return 1 if any(results[name].failed for name in given.versions) else 0


def run(name: str, given: argparse.Namespace, packages: Path, at: Callable[[int], None]) -> Result:
    """Run the tests in one version's environment, in a separate process.

    A run in which no test passed counts as failed, because a test that was not run is not ok.

    Args:
        name: A block of versions.toml or of ecosystem/stacks.toml, or a release.
        given: The parsed command line.
        packages: The folder that ``environments.only_our_packages`` gives.
        at: Called with the progress in percent.
    """
    begun = time.perf_counter()
    arguments = ["-m", given.m, *(["-k", given.k] if given.k else []), *(str(path.resolve()) for path in given.tests)]
    with tempfile.TemporaryDirectory(prefix="fa2patch-") as folder:
        report = Path(folder, "report.xml")
        code, said = started(name, arguments, report, given.environments, packages, at)
        seconds = time.perf_counter() - begun
        if not report.exists():
            return Result(failed=(f"pytest ended with {code} and without a report: {said[-1500:]}",), seconds=seconds)
        result = read(report, seconds)
    if not result.failed and (code or not result.passed):
        return Result(0, result.skipped, (f"pytest ended with {code}, and no test passed",), seconds)
    return result


def started(
    name: str, arguments: Iterable[str], report: Path, folder: Path, packages: Path, at: Callable[[int], None]
) -> tuple[int, str]:
    """Run pytest in an environment, which is made if it does not exist; returns its exit code and its output.

    Args:
        name: A block of versions.toml or of ecosystem/stacks.toml, or a release.
        arguments: Further arguments of pytest's.
        report: The file for its JUnit XML report.
        folder: The folder of the environments.
        packages: The folder that ``environments.only_our_packages`` gives.
        at: Called with the progress in percent.
    """
    stack = stacks().get(name)
    wanted = (stack.environment if stack else environments.version(name)).changed(PINS)
    python = environments.make(wanted, folder.resolve())
    settings = environments.variables(packages, **(stack.variables if stack else {}), HF_HUB_OFFLINE="1")
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
    return _told(command, packages, settings, at)


def _told(command: list[str], folder: Path, variables: dict[str, str], at: Callable[[int], None]) -> tuple[int, str]:
    """Run pytest and report its progress; returns its exit code and its output."""
    lines = []
    with subprocess.Popen(
        command, cwd=folder, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            percent = _PERCENT.search(line)
            if percent:
                at(int(percent[1]))
    return process.returncode, "".join(lines)


@dataclass(frozen=True)
class Case:
    """One test of a report.

    Attributes:
        name: The test's name with its parameters.
        module: Its module.
        outcome: ``passed``, ``skipped``, ``failure`` or ``error``.
        said: The reason of a skip, or the error.
        seconds: The run time.
        properties: What the test recorded with pytest's ``record_property``.
    """

    name: str
    module: str
    outcome: str
    said: str
    seconds: float
    properties: dict[str, str]


def cases(report: Path) -> Iterator[Case]:
    """Read every test of pytest's JUnit XML report."""
    for case in ElementTree.parse(report).iter("testcase"):
        found = {child.tag: child for child in case if child.tag in ("failure", "error", "skipped")}
        outcome = next((kind for kind in ("failure", "error", "skipped") if kind in found), "passed")
        told = (found[outcome].get("message") or "") if found else ""
        if outcome == "error":  # whose message says only where it happened
            told = (found[outcome].text or "").strip().split("\n")[-1]
        properties = {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
        seconds = float(case.get("time", 0))
        yield Case(case.get("name", ""), case.get("classname", ""), outcome, told.strip(), seconds, properties)


def read(report: Path, seconds: float = 0.0) -> Result:
    """Count the tests of pytest's report."""
    passed, skipped, failed = 0, Counter[str](), []
    for case in cases(report):
        if case.outcome == "passed":
            passed += 1
        elif case.outcome == "skipped":
            skipped[case.said or "no reason"] += 1
        else:
            said = case.said.partition("\n")[0][:300]
            failed.append(f"{'::'.join(part for part in (case.module, case.name) if part)}: {said}")
    return Result(passed, skipped, tuple(failed), seconds)


if __name__ == "__main__":
    sys.exit(main())
