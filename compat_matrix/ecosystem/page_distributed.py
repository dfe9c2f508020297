"""The section of ECOSYSTEM.md about data parallelism in two processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..publish import markdown
from .page_cells import number, word

Findings = Iterable[tuple[str, dict[str, Any]]]
"""Names of stacks, each with what a check found there."""

TRAINED = ("trainer ddp", "trainer zero2", "trainer zero3")
"""The runs of Trainer."""


def two_processes(raw: Findings, trained: Findings, told: str) -> str:
    """Return the section: the introduction ``told``, and a table with one row for each engine."""
    rows = []
    for stack, finding in raw:
        for name, one in finding.items():
            if isinstance(one, dict):
                off = ", ".join(
                    f"{key.removesuffix('_off_by')} {number(one[key])}" for key in one if key.endswith("_off_by")
                )
                rows.append([stack, name, f"{finding['steps']} steps of SGD: {off}", "isolated", word(one)])
    for stack, finding in trained:
        if "error" in finding:
            rows.append([stack, finding["check"], "", "", "**failed**"])
            continue
        what = f"Trainer, {finding['wrapped_in']}" + (
            f", ZeRO-{finding['zero_stage']}" if "zero_stage" in finding else ""
        )
        off = f"loss {number(finding['largest_relative_difference'])}, weight {number(finding['weights_off_by'])}"
        said = "; ".join(f"{name}: {text}" for name, text in finding["verify"].items())
        accumulated = f"{finding['steps']} steps of {finding['gradient_accumulation_steps']} accumulated"
        rows.append([stack, what, f"{accumulated}: {off}", said, word(finding)])
    return f"{told}\n\n" + "\n".join(
        markdown.table(["stack", "engine", "off from one process by", "`verify`", ""], rows)
    )
