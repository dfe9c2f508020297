"""The summary of the compatibility matrix that comes with the package, ``evidence.json`` and ``upstream.json``.

Both are made by ``python -m compat_matrix.publish``. Minors are texts such as ``5.23``.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Collection, Iterable
from importlib import resources
from typing import Any, TypeVar

T = TypeVar("T")

# Ranges of minors by state, and there by the seam (state "ok") or the reason (other states).
States = dict[str, dict[str, str]]


@functools.cache
def _read(file: str) -> dict[str, Any]:
    return dict(json.loads(resources.files("fa2patch").joinpath(file).read_text(encoding="utf-8")))


def evidence() -> dict[str, Any]:
    return _read("evidence.json")


def upstream() -> dict[str, Any]:
    # The file says what Transformers alone does with packed rows, by minor.
    return _read("upstream.json")


def by_architecture() -> dict[str, States]:
    found: dict[str, States] = evidence()["architectures"]  # the fourteen families first
    return found


def minors() -> list[str]:
    return list(evidence()["releases"])  # the oldest first


def minor_of(version: str) -> str:
    return ".".join(re.findall(r"\d+", version)[:2])


def key(minor: str) -> tuple[int, ...]:
    return tuple(int(number) for number in minor.split("."))


def within(minor: str, ranges: str) -> bool:
    # Ranges are a text such as 4.34-4.42, 5.0. One that ends with a hyphen has no last minor.
    parts = [part.split("-") for part in ranges.split(", ")]
    return any(key(part[0]) <= key(minor) <= key(part[-1] or minor) for part in parts)


def state_in(minor: str, states: States) -> tuple[str, str]:
    # The second text is the seam or the reason, as in States.
    for state, found in states.items():
        for what, ranges in found.items():
            if within(minor, ranges):
                return state, what
    return "absent", ""


def minors_with(states: States) -> list[str]:
    return [minor for minor in minors() if state_in(minor, states)[0] != "absent"]


def isolates(model_type: str, version: str) -> bool:
    # Every cell of the architecture in this minor must be isolated, and there must be one.
    cells = (states for name, states in by_architecture().items() if name.partition(":")[0] == model_type)
    return {state_in(minor_of(version), states)[0] for states in cells} - {"absent"} == {"ok"}


def stretches(names: Iterable[T], wanted: Collection[T]) -> list[tuple[T, T]]:
    # A stretch consists of neighbours among `names` that are all wanted. It is given as its first and its last one.
    grouped = (list(run) for is_wanted, run in itertools.groupby(names, wanted.__contains__) if is_wanted)
    return [(run[0], run[-1]) for run in grouped]


def ranges(names: Iterable[str], wanted: Collection[str]) -> str:
    # The result is a text such as 4.34-4.42, 5.0.
    return ", ".join("-".join(dict.fromkeys(run)) for run in stretches(names, wanted))


def ranges_of(wanted: Collection[str]) -> str:
    return ranges(minors(), wanted)
