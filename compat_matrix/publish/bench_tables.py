"""Makes the few figures of the bench that README and docs/kernels.md have, from its committed results."""

from __future__ import annotations

from ..bench import about, figures, tables
from ..bench.table import Found
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
    versions = _result("syncs")["versions"]
    most = max(next(iter(versions.values()))["counts"][ARCHITECTURE]["fa2patch"], key=int)
    counts = {name: run["counts"][ARCHITECTURE] for name, run in versions.items()}
    rows = [[shown, *(_reads(counts[name][way][most]) for name in counts)] for way, shown in WAYS.items()]
    head = [f"reads in a forward of {most} layers", *counts]
    lengths = "*With lengths*: batches with the collator's `return_flash_attn_kwargs=True`."
    return "\n".join([*table(head, rows), "", *wrapped(f"{lengths} *Refused*: that forward takes no such arguments.")])


def overhead() -> str:
    """Sentences about the time that the patch takes: of the import, of ``apply``, per layer and per forward."""
    startup, found = _result("startup"), _result("overhead")
    layer, forward = (
        [found[way][f"us_per_{what}"] for way in ("position_ids", "lengths")] for what in ("layer", "forward")
    )
    said = (
        f"On a CPU, `import fa2patch` takes {startup['import']['median_ms']:.0f} ms after `import torch`, and `apply` "
        f"takes {startup['apply']['median_ms']:.0f} ms on {startup['layers']} layers. In each forward the patch takes "
        f"{forward[0]:.0f} µs, or {forward[1]:.0f} µs with lengths, and in each layer {layer[0]:.0f} µs, or "
        f"{layer[1]:.0f} µs with lengths."
    )
    return "\n".join(wrapped(said))


def _result(part: str) -> Found:
    return about.read(figures.HERE / "results" / f"{part}.json")


def _reads(counts: Found) -> str:
    return "refused" if "refused" in counts else str(tables.total_reads(counts))
