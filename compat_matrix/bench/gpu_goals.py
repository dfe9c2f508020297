"""What a GPU's results say about each goal: the table at the end of ``compat_matrix.bench.first_gpu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import commits
from .table import Table

SHARE, OVERHEAD = 0.97, 0.01
MEMORY = {"FLAN-like": 0.20, "OrcaMath-like": 0.06}
"""The least part of the padded peak of memory that packed training saves."""

Results = dict[str, dict[str, Any]]
"""The result files of all stages, by stage and job."""


@dataclass(frozen=True)
class Goal:
    """A goal, what was found, and whether that meets it; None if nothing was measured."""

    goal: str
    found: str
    met: bool | None


def goals(results: Results) -> list[Goal]:
    """Return all goals, also those that nothing was measured for."""
    return [_kernels(results.get("kernels", {})), _models(results.get("models", {})), *_training(results)]


def table(found: list[Goal], header: dict[str, Any]) -> Table:
    """Return the goals as a table that names commit, versions and device."""
    met = {True: "yes", False: "**no**", None: "not measured"}
    notes = (
        f"Measured on {commits.named(header)}; {header['device']}, torch {header['torch']}, Transformers "
        f"{header['transformers']}."
    )
    return Table("Goals", ["", "found", "met"], [[goal.goal, goal.found, met[goal.met]] for goal in found], notes)


def absent(results: Results) -> dict[str, str]:
    """Return the packages of hybrids that were missing, and the reasons."""
    return {name: why for found in results.get("hybrids", {}).values() for name, why in found["missing"].items()}


def _kernels(results: dict[str, Any]) -> Goal:
    ran = {
        f"{kernel}: {name}": case["ok"]
        for kernel, result in results.items()
        for name, case in result["cases"].items()
        if "refused" not in case
    }
    wrong = [name for name, ok in ran.items() if not ok]
    return _all_right("every kernel equals the reference, gradients too", "cases", len(ran), wrong)


def _models(results: dict[str, Any]) -> Goal:
    ran = {
        f"{name}: {family}": "error" not in cell
        and not any(counts["fail"] for counts in cell.get("fa2patch", {}).values())
        for name, result in results.items()
        for family, cell in result["architectures"].items()
    }
    wrong = [name for name, ok in ran.items() if not ok]
    return _all_right("tiny models are right with every kernel", "models", len(ran), wrong)


def _all_right(goal: str, what: str, ran: int, wrong: list[str]) -> Goal:
    if not ran:
        return Goal(goal, "", None)
    said = f"{ran - len(wrong)} of {ran} {what}"
    return Goal(goal, f"{said}; wrong: {', '.join(wrong[:5])}" if wrong else said, not wrong)


def _training(results: Results) -> Iterator[Goal]:
    shapes = results.get("training", {}).get("training", {}).get("shapes", {})
    for shape, runs in (shapes or {"training": {"distributions": dict.fromkeys(MEMORY, {"variants": {}})}}).items():
        for distribution, run in runs["distributions"].items():
            good = {name: variant for name, variant in run["variants"].items() if "error" not in variant}
            yield from _of_a_distribution(f"{shape}, {distribution}", MEMORY[distribution], good)


def _of_a_distribution(where: str, saved: float, variants: dict[str, Any]) -> Iterator[Goal]:
    """All goals are about packed batches with their lengths, computed by the kernel that runs by hand too."""
    kernel = next((name.partition(":")[2] for name in variants if name.startswith("by-hand:")), "")
    padded = [variants[name] for name in variants if name.startswith("padded:")]
    own, bare = (variants.get(name, {}) for name in (f"fa2patch:{kernel}+lengths", f"by-hand:{kernel}"))
    share = own.get("share_of_limit")
    yield _goal(f"{where}: at least {SHARE:.0%} of the padding limit", share, share and share >= SHARE, "{:.1%}")
    rates = [variant.get("real_tokens_per_second") for variant in (bare, own)]
    over = rates[0] / rates[1] - 1 if all(rates) else None
    yield _goal(f"{where}: at most {OVERHEAD:.0%} over the bare kernel", over, (over or 0) <= OVERHEAD, "{:+.2%}")
    waits = own.get("synchronisations_per_forward")
    yield _goal(f"{where}: no synchronisation in a forward", waits, waits == 0, "{:g}")
    least = min((variant["peak_bytes"] for variant in padded), default=None)
    less = 1 - own["peak_bytes"] / least if own and least else None
    goal = f"{where}: peak memory at least {saved:.0%} below padded"
    yield _goal(goal, less, (less or 0) >= saved, "{:.1%} below")


def _goal(goal: str, found: float | None, met: bool | None, shown: str) -> Goal:
    return Goal(goal, "", None) if found is None else Goal(goal, shown.format(found), bool(met))
