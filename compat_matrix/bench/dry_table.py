"""The table of part ``dry``."""

from __future__ import annotations

from typing import Any

from .table import Found, Table

KINDS = ("kernel", "copies", "others", "reads")
"""``copies`` move values without computing any. ``others`` are neither kernels, copies nor reads."""

HEAD = [
    "", "torch", "forward: kernel calls", "copies", "others", "backward: kernel calls", "copies", "others",
    "once per batch", "reads",
]  # fmt: skip


def tables(found: Found) -> list[Table]:
    """Operators of a layer beyond its kernel, for every kind of layer. Kernels with the same counts share a row."""
    bare = {
        (row["kernel"], torch, way): row[way]["bare"]
        for row in found["rows"]
        for way in ("forward", "backward")
        for torch in row["torch"]
        if "bare" in row.get(way, {})
    }
    lines: dict[tuple[str, ...], list[str]] = {}
    for case in dict.fromkeys(row["case"] for row in found["rows"]):
        for row in (row for row in found["rows"] if row["case"] == case):
            cells = (case, versions(row["torch"], found["torch_versions"]), *_cells(row, bare))
            lines.setdefault(cells, []).append(row["kernel"])
    rows = [[f"{case}: {', '.join(names)}", *cells] for (case, *cells), names in lines.items()]
    notes = (
        "Each layer of a packed row after the batch's first one, traced by torch on fake tensors: nothing is computed. "
        "*Copies* and *others* are the operators that `packed_attention` starts besides those of the kernel when it is "
        "called by hand with the boundaries at hand; views and allocations start nothing. *Once per batch*: "
        "how many operators the first layer's forward adds. *Reads*: from the device, in both directions and both "
        "layers. Rows of trees have five segments, rows of spans two spans. flash-attn and FlexAttention are "
        "fake operators with their signatures. MLA has head dimensions 192 and 128." + _not_traced(found)
    )
    return [Table("Operators of a layer beyond its kernel", HEAD, rows, notes)]


def _not_traced(found: Found) -> str:
    ways = (row.get(way, {}) for row in found["rows"] for way in ("forward", "backward"))
    reasons = dict.fromkeys(way["why"] for way in ways if "why" in way)
    return f" *Not traced*: torch's fake kernel fails, with `{'`, `'.join(reasons)}`." if reasons else ""


def versions(some: list[str], every: list[str]) -> str:
    """The versions in words: ``all``, or runs such as ``2.4 to 2.6``."""
    if some == every:
        return "all"
    runs: list[list[str]] = []
    for version in some:
        if runs and every.index(version) == every.index(runs[-1][-1]) + 1:
            runs[-1].append(version)
        else:
            runs.append([version])
    shorter = [[version.rpartition(".")[0] for version in run] for run in runs]
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in shorter)


def _cells(row: dict[str, Any], bare: dict[Any, dict[str, int]]) -> list[str]:
    if "why" in row:
        return [row["why"], *[""] * (len(HEAD) - 3)]
    cells, reads = [], 0
    for way in ("forward", "backward"):
        counts = row[way]
        if "why" in counts:
            cells += ["not traced", "", ""]
            continue
        by_hand = bare[row["kernel"], row["torch"][-1], way]
        later = counts["later"]
        cells += [str(later["kernel"]), *(str(later[kind] - by_hand[kind]) for kind in ("copies", "others"))]
        reads += later["reads"] + counts["first"]["reads"]
    once = ""
    if "why" not in row["forward"]:
        first, later = row["forward"]["first"], row["forward"]["later"]
        once = str(sum(first[kind] - later[kind] for kind in KINDS))
    return [*cells, once, str(reads)]
