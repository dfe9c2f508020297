"""Makes the few figures of the bench that README and docs/kernels.md have, from its committed results."""

from __future__ import annotations

from ..bench import figures
from .markdown import table
from .readme import wrapped

WAYS = {
    "upstream": "Transformers",
    "upstream, lengths": "Transformers, with lengths",
    "fa2patch": "fa2patch",
    "fa2patch, lengths": "fa2patch, with lengths",
}
"""The names shown for the ways of the part ``syncs``."""

ARCHITECTURE = "llama"


def reads() -> str:
    """The table of reads from the device in one forward, by release and with or without the lengths."""
    found = [row for row in figures.committed("syncs")["rows"] if row["model"] == ARCHITECTURE]
    most = [column for column in found[0] if column.endswith(" layers")][-1]
    counts = {(row["way"], row["Transformers"]): str(row[most]) for row in found}
    releases = list(dict.fromkeys(row["Transformers"] for row in found))
    rows = [[shown, *(counts[way, release] for release in releases)] for way, shown in WAYS.items()]
    lengths = "*With lengths*: batches with the collator's `return_flash_attn_kwargs=True`."
    notes = wrapped(f"{lengths} *Refused*: that forward takes no such arguments.")
    return "\n".join([*table([f"reads in a forward of {most}", *releases], rows), "", *notes])


def overhead() -> str:
    """Sentences about the time that the patch takes: of the import, of ``apply``, per layer and per forward."""
    imported, applied = figures.committed("startup")["rows"]
    ids, lengths = figures.committed("overhead")["rows"]
    after, layers = imported["what"].split()[-1], applied["what"].partition(", ")[2]
    said = (
        f"On a CPU, `import fa2patch` takes {imported['ms']:.0f} ms after `import {after}`, and `apply` takes "
        f"{applied['ms']:.0f} ms on {layers}. In each forward the patch takes {ids['µs per forward']:.0f} µs, or "
        f"{lengths['µs per forward']:.0f} µs with lengths, and in each layer {ids['µs per layer']:.0f} µs, or "
        f"{lengths['µs per layer']:.0f} µs with lengths."
    )
    return "\n".join(wrapped(said))
