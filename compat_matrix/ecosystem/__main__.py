"""Train through the packages around Transformers, in real versions: ``python -m compat_matrix.ecosystem``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from .. import commits, environments
from ..screen import Console, Table
from . import distributed
from .stacks import HERE, Stack, checked

ROOT = HERE.parents[1]
EVIDENCE = HERE / "evidence"
FORMAT = 1


def main(arguments: list[str] | None = None) -> int:
    """Run the checks of the chosen stacks, write their evidence and print a summary.

    Args:
        arguments: the command line; None reads ``sys.argv``.

    Returns:
        The exit code: 1 if any check failed.
    """
    known = checked()
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.ecosystem", description=__doc__)
    parser.add_argument("--stacks", nargs="+", choices=known, metavar="S", default=[*known], help=", ".join(known))
    parser.add_argument("--checks", nargs="+", metavar="C", help="default: all; the others' evidence is kept")
    parser.add_argument("--environments", type=Path, default=ROOT / ".compat", help="where environments are kept")
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="where a JSON for each stack goes")
    given = parser.parse_args(arguments)
    given.evidence.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    found: dict[str, Any] = {}
    with environments.only_our_packages() as packages:
        for number, name in enumerate(given.stacks, 1):
            console.print(f"{name} ({number} of {len(given.stacks)})", highlight=False)
            try:
                found[name] = examined(known[name], given, packages, console)
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
    report(found, Console() if sys.stdout.isatty() else Console(width=150))
    return 1 if any(failures(one) for one in found.values()) else 0


def examined(stack: Stack, given: argparse.Namespace, packages: Path, console: Console) -> dict[str, Any]:
    """Run the checks of one stack, merge them with earlier evidence if only some were asked for, and write the file."""
    python = environments.make(stack.environment, given.environments.resolve())
    file = given.evidence / f"{stack.name}.json"
    wanted = given.checks or []
    before = json.loads(file.read_text(encoding="utf-8")) if wanted and file.exists() else {}
    variables = environments.variables(packages, **stack.variables, HF_HUB_OFFLINE="1")
    scripts = [script for script in stack.distributed if not wanted or script in wanted]
    single = [check for check in wanted if check not in stack.distributed]
    found: dict[str, Any] = {"checks": {}, "versions": before.get("versions", {})}
    in_one_process = single if wanted else stack.checks
    if in_one_process is None or in_one_process:
        found = _in_one_process(stack, python, packages, variables, [*(in_one_process or ())])
    for script in scripts:
        try:
            result = distributed.launched(script, python, variables)
        except RuntimeError as error:
            console.print(f"{script} FAILED: {error}", highlight=False, markup=False)
            result = {"finding": {"ok": False, "error": str(error)[-1000:]}}
        found["checks"][script] = result["finding"]
        found["versions"] = {**found["versions"], **result.get("versions", {})}
    evidence = merged(stack, before, found)
    file.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    return evidence


def merged(stack: Stack, before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return the evidence of a stack.

    Args:
        stack: the stack.
        before: earlier evidence, of which the checks that did not run now stay, each with what it was made with.
        found: ``versions`` and ``checks`` of what ran now.
    """
    made = {**commits.of_code("compat_matrix/ecosystem", "tests/distributed"), "date": str(date.today())}
    checks = {**before.get("checks", {}), **found["checks"]}
    return {
        "format": FORMAT,
        "stack": stack.name,
        "seconds": round(sum(finding.get("seconds", 0) for finding in checks.values())),
        "versions": found["versions"],
        "variables": stack.variables,
        "made": {**before.get("made", {}), **dict.fromkeys(found["checks"], made)},
        "checks": checks,
    }


def _in_one_process(
    stack: Stack, python: Path, packages: Path, variables: dict[str, str], wanted: list[str]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fa2patch-") as folder:  # checkpoints are written there too
        out = Path(folder, "found.json")
        command = [str(python), "-m", "compat_matrix.ecosystem.child", stack.name, str(out), *wanted]
        done = subprocess.run(command, cwd=packages, env={**variables, "TMPDIR": folder})
        if done.returncode or not out.exists():
            raise RuntimeError(f"the checks of {stack.name} ended with {done.returncode}")
        return dict(json.loads(out.read_text(encoding="utf-8")))


def failures(evidence: dict[str, Any]) -> list[str]:
    """Return the names of the checks that neither passed nor were skipped."""
    if "error" in evidence:
        return [evidence["error"]]
    return [name for name, finding in evidence["checks"].items() if not finding.get("ok") and "skipped" not in finding]


def report(found: dict[str, Any], console: Console) -> None:
    """Print how many checks passed in each stack, which do not apply, and which failed."""
    table = Table("stack", "held", "does not apply", "failed", "seconds", title="fa2patch with the ecosystem")
    for name, evidence in found.items():
        if "error" in evidence:
            table.add_row(name, "-", "-", evidence["error"], "-")
            continue
        skipped = [check for check, finding in evidence["checks"].items() if "skipped" in finding]
        failed = failures(evidence)
        held = len(evidence["checks"]) - len(skipped) - len(failed)
        table.add_row(name, str(held), ", ".join(skipped), ", ".join(failed), f"{evidence['seconds']:.0f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
