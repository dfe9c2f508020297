"""The table of part ``collator``."""

from __future__ import annotations

from .table import Found, Table


def tables(found: Found) -> list[Table]:
    """Times of both collators for an example, and their ratio."""
    rows = [
        [
            f"{row['kind']}, {row['columns']}{', and lengths' if row['lengths'] else ''}",
            f"{row['examples']} x {row['tokens']}",
            *(f"{row[f'{name}_us']:,.1f}" for name in ("fa2patch", "upstream")),
            f"{row['ratio']:.2f}",
        ]
        for row in found["rows"]
    ]
    notes = (
        f"Microseconds per example, as medians of {found['repeats']} rounds taken in turns. The ratio is fa2patch's "
        "time divided by upstream's, as the median over the rounds. An example has half to one and a half times as "
        "many tokens as the table says. *And lengths*: with `return_flash_attn_kwargs` and `return_seq_idx`. Upstream "
        "reads only `input_ids` and `labels`, and checks neither. fa2patch checks and converts all columns, finds the "
        "documents in the examples' `position_ids`, and returns the weights."
    )
    head = ["examples hold", "examples x tokens", "fa2patch, µs", "upstream, µs", "ratio"]
    return [Table("A batch of examples", head, rows, notes)]
