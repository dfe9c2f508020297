"""Write ECOSYSTEM.md and LONG_ROWS.md from the evidence: ``python -m compat_matrix.ecosystem.page [--check]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .. import environments
from ..publish import markdown
from . import page_long_rows
from .page_cells import number, stack_table, word
from .page_distributed import TRAINED, two_processes
from .page_fused import NAMED, fused_losses
from .stacks import HERE, checked, stacks

EVIDENCE = HERE / "evidence"
PAGE = HERE / "ECOSYSTEM.md"
LONG_ROWS = HERE / "LONG_ROWS.md"
TOLD = environments.tomllib.loads((HERE / "told.toml").read_text(encoding="utf-8"))
COMMAND = "python -m compat_matrix.ecosystem"
SINGLE = {
    "accumulation": "gradient accumulation",
    "checkpointing": "checkpointing, both modes",
    "lengths": "the collator's lengths",
    "verified": "`verify`",
    "streaming": "streaming",
    "evaluation": "evaluation in training",
    "predict": "`predict`",
    "resume": "resuming",
    "lora": "LoRA",
    "dora": "DoRA",
    "qlora": "QLoRA",
}
Evidence = dict[str, Any]


def read(folder: Path) -> dict[str, Evidence]:
    """Read the evidence in the order of stacks.toml; stacks without evidence are left out."""
    files = {name: folder / f"{name}.json" for name in stacks()}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def parted(by_stack: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part what is given by stack into that of ECOSYSTEM.md and that of LONG_ROWS.md."""
    of_page: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, value in by_stack.items():
        of_page[name.startswith(page_long_rows.PREFIX)][name] = value
    return of_page


def pages(found: dict[str, Evidence]) -> dict[Path, str]:
    """Return the text of each page."""
    of_ecosystem, of_long_rows = parted(found)
    _, known = parted(checked())
    return {PAGE: page(of_ecosystem), LONG_ROWS: page_long_rows.page(of_long_rows, known, COMMAND, TOLD)}


def page(found: dict[str, Evidence]) -> str:
    """Return the text of ECOSYSTEM.md."""
    known, _ = parted(checked())
    parts = [
        f"<!-- Made by {COMMAND}.page from evidence/*.json: do not edit. -->",
        "# With Trainer, TRL, PEFT, DDP, FSDP2 and DeepSpeed",
        f"    {COMMAND} [--stacks NAME ...]",
        TOLD["top"].strip(),
        stack_table(found, without=["wrapt"]),
        "## The loss curve, packed and padded",
        _curve(found),
        "## Everything else in one process",
        _single(found),
        "## How a loss is divided",
        _division(found),
        "## TRL's own packing",
        _own(found),
        "## Losses of other packages",
        fused_losses(_checks(found, *NAMED), TOLD["fused"].strip()),
        "## Two processes",
        two_processes(_checks(found, "raw"), _checks(found, *TRAINED), TOLD["distributed"].strip()),
    ]
    without = [name for name in known if name not in found]
    if without:
        parts.append(f"Without evidence: {', '.join(without)}.")
    return "\n\n".join(parts) + "\n"


def _checks(found: dict[str, Evidence], *names: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield stacks and findings of these checks, where they were run and apply."""
    for stack, evidence in found.items():
        for name in names:
            finding = evidence["checks"].get(name)
            if finding is not None and "skipped" not in finding:
                yield stack, {**finding, "check": name}


def _curve(found: dict[str, Evidence]) -> str:
    rows = []
    steps, bound = set(), set()
    for stack, finding in _checks(found, "curve"):
        if "error" in finding:
            rows.append([stack, "", "", f"**failed**: {finding['error']}"])
            continue
        steps.add(finding["steps"])
        bound.add(finding["bound"])
        runs = ("packed", "two_rows", "packed_alone", "two_rows_alone")
        numbers = [number(finding[run]["largest_relative_difference"]) for run in runs]
        rows.append([stack, f"{finding['first_loss']:.4f}", f"{finding['last_loss']:.4f}", *numbers, word(finding)])
    head = [
        "stack",
        "padded: first loss",
        "last",
        "**one row**",
        "**two rows, mask**",
        "one row, alone",
        "two rows, alone",
        "",
    ]
    told = TOLD["curve"].strip().format(steps=_only(steps), bound=_only(bound))
    return f"{told}\n\n" + "\n".join(markdown.table(head, rows))


def _only(values: set[Any]) -> str:
    return " or ".join(map(str, sorted(values)))


def _single(found: dict[str, Evidence]) -> str:
    rows = []
    for stack, evidence in found.items():
        if not {*SINGLE} & {*evidence["checks"]}:
            continue
        cells = [_cell(evidence["checks"].get(name)) for name in SINGLE]
        rows.append([stack, *cells])
    told = TOLD["single"].strip()
    return f"{told}\n\n" + "\n".join(markdown.table(["stack", *SINGLE.values()], rows))


def _cell(finding: dict[str, Any] | None) -> str:
    if finding is None:
        return ""
    if "skipped" in finding:
        return "–"
    if not finding["ok"]:
        return "**failed**"
    numbers = [*_differences(finding)]
    return f"ok ({number(max(numbers))})" if numbers else "ok"


def _differences(finding: dict[str, Any]) -> Iterable[float]:
    wanted = ("largest_relative_difference", "logits_off_by")
    if "resumed_at" in finding:
        wanted = ("weights_off_by",)
    for name, value in finding.items():
        if name in wanted:
            yield value
        elif isinstance(value, dict) and name not in ("alone", "losses"):
            yield from _differences(value)


def _division(found: dict[str, Evidence]) -> str:
    counted = dict(_checks(found, "counting"))
    rows = [
        [
            stack,
            finding.get("loss_is_a_mean_over", ""),
            number(finding.get("largest_relative_difference")),
            f"{counted[stack]['padded_by_packed']:.4f}" if stack in counted and "error" not in counted[stack] else "",
        ]
        for stack, finding in _checks(found, "accumulation")
    ]
    told = TOLD["division"].strip()
    head = ["stack", "mean over", "packed against padded", "upstream's padded loss by packed"]
    return f"{told}\n\n" + "\n".join(markdown.table(head, rows))


def _own(found: dict[str, Evidence]) -> str:
    rows = []
    for stack, finding in _checks(found, "completion_collator", "own_padding_free", "own_packing"):
        if "error" in finding:
            rows.append([stack, finding["check"], "", f"**failed**: {finding['error']}"])
        elif finding["check"] == "completion_collator":
            said = f"as padded ({number(finding['largest_relative_difference'])}, {finding['steps']} steps)"
            rows.append([stack, "its completion collator, `padding_free`", _batch(finding["batch"]), said])
        else:
            for name in ("as_sdpa", "named_flash_attention_2"):
                one = finding[name]
                model = {"as_sdpa": "model as sdpa"}.get(name, "named flash_attention_2")
                asked = f"`{finding['check'].removeprefix('own_')}=True`, {model}"
                rows.append([stack, asked, _batch(one["batch"]), _outcome(one)])
    told = TOLD["own"].strip()
    return f"{told}\n\n" + "\n".join(markdown.table(["stack", "asked for", "in the batch", "with fa2patch"], rows))


def _batch(batch: dict[str, str]) -> str:
    return ", ".join(
        f"{name} {shape[shape.find('[') :] if '[' in shape else ''}".strip() for name, shape in batch.items()
    )


def _outcome(one: dict[str, Any]) -> str:
    if one["verify"] == "isolated":
        return f"isolated, {one['documents']} documents; loss off by {number(one['off_by'])} from by hand"
    return f"nothing to isolate by: `verify` raises {one['verify']}"


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or compare them with the evidence.

    Args:
        arguments: the command line; None reads ``sys.argv``.

    Returns:
        The exit code: 1 if ``--check`` finds a difference.
    """
    parser = argparse.ArgumentParser(prog=f"{COMMAND}.page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not the evidence's")
    given = parser.parse_args(arguments)
    found = read(EVIDENCE)
    other = 0
    for file, text in pages(found).items():
        if not given.check:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            print(f"{file.name} is not what the evidence gives: run {COMMAND}.page", file=sys.stderr)
            other = 1
    return other


if __name__ == "__main__":
    sys.exit(main())
