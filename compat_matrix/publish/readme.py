"""Makes the few lines about the evidence that README has."""

from __future__ import annotations

import textwrap

from ..cells import Results
from . import links, sentences

_LEFT = {
    "refused": "it refuses {:,} with a reason",
    "xfail": "{:,} are known failures of Transformers",
    "fail": "{:,} fail",
}


def summary(results: Results) -> str:
    """Two lines: what was checked and found, and where everything can be read."""
    total = results.score(*results.counted)
    releases = {environment.transformers for environment in results.counted}
    said = [
        f"fa2patch isolates {total.states['ok']:,} of {total.present:,} checked combinations of model type and "
        f"Transformers release ({len(releases)} releases, {_devices(results)})",
        *(_LEFT[state].format(total.states[state]) for state in _LEFT if total.states[state]),
    ]
    alone = (
        f"Transformers alone is right in {total.one_row['ok']:,} of them for one packed row, and in "
        f"{total.every_row:,} for every kind of packed row."
    )
    link = f"[Look up yours]({links.PAGE}) or read [the tables]({links.FOLDER}/MATRIX.md)."
    return "\n".join([*wrapped(f"{'; '.join(said)}. {alone} {sentences.code(results)}"), link])


def wrapped(text: str) -> list[str]:
    """Break a paragraph into lines as long as README's."""
    return textwrap.wrap(text, 145, break_long_words=False, break_on_hyphens=False)


def _devices(results: Results) -> str:
    devices = sorted({environment.device for environment in results.counted})
    return "on a CPU" if devices == ["cpu"] else f"on {', '.join(devices)}"
