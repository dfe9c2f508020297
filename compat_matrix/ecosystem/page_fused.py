"""The section of ECOSYSTEM.md about losses that other packages compute: each case is right, refused, or off."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..publish import markdown

NAMED = {
    "liger_on_the_class": "Liger, on the class",
    "liger_on_the_object": "Liger, on the object",
    "cut_cross_entropy": "cut-cross-entropy, its torch path",
    "trl_fused_head": "TRL's `add_fused_lm_head`",
    "trainer_with_liger": "Trainer's `use_liger_kernel`",
    "sft_with_its_fused_head": "SFTTrainer",
    "run_with_liger": "`fa2patch run --collate` of a script with Liger",
}


def fused_losses(findings: Iterable[tuple[str, dict[str, Any]]], told: str) -> str:
    """Return the section: the introduction ``told``, and a table with one row for each case."""
    rows = []
    for stack, finding in findings:
        named = NAMED[finding["check"]]
        if "error" in finding:
            rows.append([stack, named, "", f"**failed**: {finding['error']}"])
        for case, said in finding.get("cases", {}).items():
            right = said == "right" or said.startswith("refused")
            rows.append([stack, named, case, said if right else f"**failed**: {said}"])
    return f"{told}\n\n" + "\n".join(markdown.table(["stack", "what replaces the forward", "case", ""], rows))
