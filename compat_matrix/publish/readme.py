"""Makes README's small table of the evidence: families by bands of versions."""

from __future__ import annotations

import textwrap

from ..cells import Results, Score
from . import markdown
from .bands import bands

SEEDS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "falcon": "Falcon",
    "phi": "Phi 1, 2",
    "phi3": "Phi-3",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2MoE",
    "gemma": "Gemma",
    "stablelm": "StableLM",
    "starcoder2": "StarCoder2",
    "olmo": "OLMo",
    "dbrx": "DBRX",
    "granite": "Granite",
}
"""The families with their own row in README, and the name shown there."""

_LEFT = {"refused": "refused with the reason", "xfail": "known failures", "fail": "failing"}


def table(results: Results) -> str:
    """A table of families by bands of versions, with the totals."""
    columns = bands(results.counted)
    others = [name for name in results.architectures if name not in SEEDS]
    rows = [(label, [name]) for name, label in SEEDS.items() if name in results.architectures]
    if others:
        rows.append((f"{len(others)} more", others))
    lines = markdown.table(
        ["", *(band.label for band in columns)],
        ([label, *(_band(band.score(*names)) for band in columns)] for label, names in rows),
    )
    total = results.score(*results.counted)
    left = "".join(f", {total.states[state]:,} {word}" for state, word in _LEFT.items() if total.states[state])
    above = (
        "In how many minors a family is isolated **with fa2patch**, of those that have it; in brackets Transformers "
        f"alone, with one packed row, and with all {len(results.upstream_rows)} "
        "[kinds of packed row](compat_matrix/MATRIX.md):"
    )
    below = (
        f"Cells, architecture by version, {_devices(results)}: **{total.states['ok']:,} of {total.present:,} isolated**"
        f"{left}; Transformers alone {total.one_row['ok']:,} and {total.every_row:,} of {total.measured:,}. "
        "Every one of them: [as tables](compat_matrix/MATRIX.md), and [as a map](compat_matrix/matrix.html), "
        f"to be opened in a browser. {' '.join(markdown.missing(results))}"
    )
    return "\n".join([*_wrapped(above), "", *lines, "", *_wrapped(below)])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 145, break_long_words=False, break_on_hyphens=False)


def _band(found: Score) -> str:
    if not found.present:
        return ""
    ok = f"{found.states['ok']}/{found.present}"
    if found.states["ok"] == found.present:
        ok = f"**{ok}**"
    if not found.measured:
        return ok
    of = "" if found.measured == found.present else f" of {found.measured}"
    return f"{ok} ({found.one_row['ok']}, {found.every_row}{of})"


def _devices(results: Results) -> str:
    devices = sorted({environment.device for environment in results.counted})
    return "on a CPU" if devices == ["cpu"] else f"on {', '.join(devices)}"
