"""Makes fa2patch/cli/evidence.json, a summary for ``fa2patch architectures`` and ``fa2patch matrix``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fa2patch.cli.evidence import ranges

from ..cells import Environment, Results
from ..tiny_models import OUT_OF_SCOPE
from .bands import span
from .need import SEEDS


def summary(results: Results) -> str:
    """The JSON text with the minors that were checked and, for each architecture, in which of them it is what.

    ``ok`` has the minors by the seams, ``refused`` and ``known failure`` have them by the reason. Ranges of minors are
    texts such as ``4.34-4.42``. The fourteen families come first.
    """
    environments = results.counted
    minors = [_minor(environment) for environment in environments]
    names = [*(name for name in SEEDS if name in results.architectures)]
    names += [name for name in results.architectures if name not in SEEDS]
    rows = [f"  {json.dumps(name)}: {json.dumps(_states(environments, minors, name))}" for name in names]
    head = {
        "releases": {minor: environment.transformers for minor, environment in zip(minors, environments)},
        "families": [name for name in SEEDS if name in results.architectures],
        "out of scope": OUT_OF_SCOPE,
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    return "\n".join(["{", *lines, ' "architectures": {', ",\n".join(rows), " }", "}", ""])


def _states(environments: Sequence[Environment], minors: Sequence[str], name: str) -> dict[str, Any]:
    found: dict[str, dict[str, list[str]]] = {}
    for environment, minor in zip(environments, minors):
        cell = environment.cell(name)
        if cell.state == "absent":
            continue
        state = {"xfail": "known failure", "fail": "failing"}.get(cell.state, cell.state)
        key = " and ".join(cell.seam) if cell.state == "ok" else _short(cell.reason)
        found.setdefault(state, {}).setdefault(key, []).append(minor)
    return {state: {key: ranges(minors, within) for key, within in keys.items()} for state, keys in found.items()}


def _short(reason: str) -> str:
    """The first sentence of a reason, without the name of the error's class."""
    sentence = " ".join(reason.split()).partition(". ")[0].rstrip(".")
    kind, colon, rest = sentence.partition(": ")
    return rest if colon and kind.isidentifier() else sentence


def _minor(environment: Environment) -> str:
    return span(environment.minor, environment.minor)
