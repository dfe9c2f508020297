"""The table of part ``compile``."""

from __future__ import annotations

from .table import Found, Table

NAMES = {"position_ids": "position_ids only", "lengths": "the collator's lengths"}


def tables(found: Found) -> list[Table]:
    """Graphs and times of a compiled model, by what its batches say about their documents."""
    rows = [
        [
            NAMES[row["way"]],
            str(row["graphs"]),
            str(row["whole_graphs"]),
            *(f"{row[f'{name}_ms']:,.1f}" for name in ("compiled", "eager")),
            f"{row['ratio']:.2f} ({row['ratio_range'][0]:.2f} to {row['ratio_range'][1]:.2f})",
            f"{row['first_pass_seconds']:.0f}",
        ]
        for row in found["rows"]
    ]
    notes = (
        f"Forward and backward of a Llama of {found['layers']} layers, hidden size {found['hidden']}, float32, with "
        f"the reference kernel, on {found['layouts']} packed rows of different layouts; `torch.compile` with "
        f'`backend="{found["backend"]}"`. *Graphs* are those that the compiler is given for all layouts, a forward '
        "and its backward together. An error's name stands for a model that `fullgraph=True` refuses. Milliseconds "
        f"per row are medians of {found['repeats']} passes over all rows, taken in turns after all is compiled. The "
        "ratio is compiled / eager, as the median over the passes and their range. The first pass compiles."
    )
    sizes = found["sizes"]
    notes += (
        f' `mode="reduce-overhead"` records a CUDA graph for each combination of sizes: {sizes["as_they_are"]} for '
        f"these rows, {sizes['documents_and_max_seqlen_rounded']} if the documents' number and `max_seqlen` were "
        f"rounded up to powers of two, and {sizes['tokens_rounded_too']} if the rows' lengths were, too."
    )
    head = ["", "graphs", "graphs with fullgraph", "compiled, ms", "eager, ms", "ratio", "first pass, s"]
    return [Table("A compiled model on many layouts", head, rows, notes)]
