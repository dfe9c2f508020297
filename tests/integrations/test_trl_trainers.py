"""Every trainer of three releases of TRL, patched in three ways, and the table of docs/stack/trl.md that says so."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from in_stack import run_in

from compat_matrix.ecosystem.stacks import stacks

SCRIPT = Path(__file__).with_name("scripts") / "trl_all.py"
PAGE = Path(__file__).parents[2] / "docs" / "stack" / "trl.md"
STACKS = ("trl-0.19.1", "trl-0.25.1", "trl-1.16.0")
# Parts of the reasons of ``StaysPadded``, and what they mean in these trainings.
SHORT = {
    "each row of its mask must be zeros around one run of ones": "a pad token was sampled inside a text",
    "a model around it made a cache_position": "mixed sampling without a cache",
}

NOT_RUN = {"NotImplementedError: Cross-tokenizer ULD": "it takes byte-level tokenizers only"}

pytestmark = pytest.mark.slow


@functools.cache
def trainers(stack: str) -> dict[str, Any]:
    found = run_in(stack, SCRIPT)
    assert found["trl"] == stacks()[stack].pins["trl"]
    return {name.replace("Trainer", ""): ways for name, ways in found["trainers"].items() if name != "BaseTrainer"}


def verdict(ways: dict[str, Any]) -> str:
    if "not run" in ways:
        return f"not run: {NOT_RUN.get(ways['not run'].partition(' currently')[0], ways['not run'])}"
    whole = ways["packed_trainer"]
    reasons = [short for part, short in SHORT.items() if any(part in why for why in whole["why"])]
    assert len(reasons) == len(whole["why"]), whole["why"]
    if not whole["padded"]:
        return "packed"
    return f"packed, but padded: {', '.join(reasons)}" if whole["packed"] else f"padded: {', '.join(reasons)}"


@pytest.mark.parametrize("stack", STACKS)
def test_every_trainer_learns_what_it_learns_unpatched(stack: str) -> None:
    found = trainers(stack)
    assert {"SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO"} <= {name for name in found if "not run" not in found[name]}
    for name, ways in found.items():
        if "not run" in ways:
            continue
        assert not [way for way, run in ways.items() if "error" in run], (name, ways)
        assert ways["plain"]["padded"] > 0, f"{name} had no padding, so nothing is shown"
        for way in ("apply", "padded_batches", "packed_trainer"):
            # losses of advantages cancel each other, down to a thousandth of their terms
            assert 0 <= ways[way]["off"] < 1e-3 and ways[way]["moved"] < 1e-4, (name, way, ways[way])
        assert ways["apply"] == {**ways["plain"], "off": ways["apply"]["off"], "moved": ways["apply"]["moved"]}
        assert ways["packed_trainer"]["packed"] >= ways["padded_batches"]["packed"] > 0 or verdict(ways) != "packed"


def table() -> list[str]:
    found = {stack: trainers(stack) for stack in STACKS}
    names = sorted({name for each in found.values() for name in each}, key=str.lower)
    heads = ["trainer", *(stack.removeprefix("trl-") for stack in STACKS)]
    rows = [
        [name, *(verdict(found[stack][name]) if name in found[stack] else "" for stack in STACKS)] for name in names
    ]
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def test_the_page_has_the_verdicts() -> None:
    written = re.search(r"<!-- every trainer -->\n(.*?)\n\n", PAGE.read_text(encoding="utf-8"), re.S)
    assert written is not None and written[1].splitlines() == table(), "\n".join(table())
