"""Transformers' own modeling tests, plain and patched: ``python -m compat_matrix.upstream_tests X.Y.Z``.

A test that passes plain and not patched is a regression, and the command then returns 1. The tests come with the source
distribution of the release, which pip downloads. What they import and it lacks is stood in for by empty classes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

from . import environments
from .screen import Console, Progress, bars
from .suite import PINS, Report, reported

# The common tests import these modules, which a source distribution lacks. Each has the class that they take of it.
ABSENT = {"exporters/test_export.py": "ExportTesterMixin", "generation/test_utils.py": "GenerationTesterMixin"}

# If it is set, every model is patched before its first call.
PATCHED = "FA2PATCH_UPSTREAM_PATCHED"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.upstream_tests", description=__doc__)
    parser.add_argument("release", nargs="?", default=environments.NEWEST)
    parser.add_argument("--environments", type=Path, default=environments.HERE.parent / ".compat")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="only the tests that it matches, as for pytest")
    given = parser.parse_args(arguments)
    wanted = environments.version(given.release).changed((*PINS, "parameterized", "rich"))
    python = environments.make(wanted, given.environments.resolve())
    out = Console(soft_wrap=True, highlight=False, markup=False)
    with environments.only_our_packages() as packages, tempfile.TemporaryDirectory() as folder, bars() as progress:
        tests = _tests_of(wanted.transformers, Path(folder))
        plain, patched = (_run(python, packages, tests, given.k, how, progress) for how in ("", "patched"))
    for name, report in (("plain", plain), ("patched", patched)):
        out.print(f"{name}: {dict(Counter(case.outcome for case in report.cases))}")
    out.print(f"models: {patched.properties}")
    was = {(case.module, case.name): case for case in plain.cases}
    worse = [
        f"{case.module}::{case.name}: plain {was[case.module, case.name].outcome}, patched {case.outcome}: {case.said}"
        for case in patched.cases
        if case.outcome != was[case.module, case.name].outcome
    ]
    for line in worse:
        out.print(line)
    out.print(f"{len(worse)} of {len(was)} tests end otherwise when patched")
    return 1 if worse or not int(patched.properties.get("patched", "0")) else 0


def _tests_of(release: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(folder), f"transformers=={release}"], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, [each for each in files.getmembers() if "/tests/" in each.name])
    (tests,) = folder.glob("transformers-*/tests")
    for name, cls in ABSENT.items():
        module = tests / name
        module.parent.mkdir(exist_ok=True)
        if not module.exists():
            module.write_text(f"class {cls}:\n    pass\n", encoding="utf-8")
    return tests.parent


def _run(python: Path, packages: Path, tests: Path, matching: str, how: str, progress: Progress) -> Report:
    task = progress.add_task(how or "plain", total=100)
    variables = environments.variables(packages, HF_HUB_OFFLINE="1", **{PATCHED: how})
    variables["PYTHONPATH"] += f":{tests}"
    file = packages / "compat_matrix" / "check" / "modeling_tests.py"
    only = ["-k", matching] if matching else []
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", *only, str(file)]
    return reported(command, packages, variables, lambda percent: progress.update(task, completed=percent))


if __name__ == "__main__":
    sys.exit(main())
