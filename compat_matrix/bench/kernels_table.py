"""The table of part ``kernels``."""

from __future__ import annotations

from typing import Any

from .table import Found, Table

BY_HAND = ("one by one", "batched", "padded")
"""The rivals that call SDPA by hand on nothing but documents."""


def kernels(found: Found) -> list[Table]:
    """The reference's times, the other ways' as multiples of it, and its time as a multiple of the best of them."""
    rows = []
    for row in found["rows"]:
        cells = [row["row"]]
        for what in ("forward", "forward_backward"):
            of_way = {name: ways[what] for name, ways in row["causal"].items()}
            best = min(of_way[name]["to_reference"] for name in BY_HAND if name in of_way)
            cells += [f"{of_way['reference']['median_ms']:.1f} ms", *(_multiple(of_way, name) for name in BY_HAND)]
            cells.append(f"{1 / best:.2f}")
        apart = row.get("not_causal", row["causal"])
        both = {name: ways["forward_backward"] for name, ways in {**row["causal"], **_only(apart, "jagged")}.items()}
        rows.append([*cells, _multiple(both, "block mask"), _multiple(both, "jagged")])
    head = ["documents"]
    for what in ("forward", "fwd + bwd"):
        head += [f"{what}: reference", *BY_HAND, "reference to best"]
    errors = {row["jagged_causal_error"] for row in found["rows"] if "jagged_causal_error" in row}
    notes = (
        f"One row of {found['tokens']} tokens; {found['query_heads']} query and {found['key_heads']} key heads of "
        f"{found['head_dim']}, {found['dtype']}, causal. The reference's time is the median of {found['repeats']} "
        "rounds, taken in turns; the other ways' times are multiples of it, medians over the rounds. *One by one*, "
        "*batched* (documents of equal length only) and *padded* call SDPA by hand; *reference to best* is the "
        "reference's time as a multiple of the best of these three. *Block mask* and *jagged* are forward and backward."
    )
    if errors:
        notes += (
            " Jagged attention is measured without causal masking, against the reference without it. With it, it "
            f"raises `{errors.pop()}`."
        )
    return [
        Table("Attention of one row as documents get more and shorter", [*head, "block mask", "jagged"], rows, notes)
    ]


def _only(ways: Found, name: str) -> Found:
    return {name: ways[name]} if name in ways else {}


def _multiple(of_way: dict[str, Any], name: str) -> str:
    return f"{of_way[name]['to_reference']:.2f}" if name in of_way else ""
