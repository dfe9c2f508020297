"""Makes the documentation's table of kernels from their classes."""

from __future__ import annotations

from fa2patch import kernels

from . import markdown


def table() -> str:
    """List what every kernel can do at best; ``fa2patch kernels`` shows what it can do on a machine."""
    rows = (
        [
            f'`"{row["name"]}"`',
            row["what"],
            row["needs"],
            ", ".join(row["dtypes"] or ["any"]),
            str(row["head_dim"] or "any"),
            ", ".join(row["features"]),
        ]
        for row in kernels.rows()
    )
    head = ["kernel", "what", "needs", "dtypes", "head dim up to", "features"]
    return "\n".join(markdown.table(head, rows))
