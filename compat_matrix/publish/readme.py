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
    left = ", ".join(f"{total.states[state]:,} {word}" for state, word in _LEFT.items() if total.states[state])
    above = (
        "Each cell shows in how many of the minor versions that have the family it is isolated **with fa2patch**. The "
        "numbers in brackets are for Transformers alone: first with one packed row, then with all "
        f"{len(results.upstream_rows)} [kinds of packed row](compat_matrix/MATRIX.md)."
    )
    below = (
        f"Over all architectures and versions, checked {_devices(results)}, fa2patch isolates **{total.states['ok']:,} "
        f"of {total.present:,} cells**{left and f' ({left})'}. Transformers alone isolates {total.one_row['ok']:,} "
        f"with one packed row and {total.every_row:,} with all kinds, of {total.measured:,}. All cells are shown "
        "[as tables](compat_matrix/MATRIX.md) and [as a map](compat_matrix/matrix.html), which opens in a browser. "
        f"{' '.join(markdown.missing(results))}"
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
