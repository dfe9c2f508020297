"""Groups Transformers versions into bands within which the attention code kept its structure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..cells import Environment

STARTS = ((4, 34), (4, 43), (4, 48), (4, 53), (5, 0))
"""The first minor of each band.

In order: an attention class for each implementation; one flash function for all models; one attention interface for
all models; one module that makes masks; version 5.
"""


@dataclass(frozen=True)
class Band:
    """Consecutive versions, oldest first."""

    environments: tuple[Environment, ...]

    @property
    def label(self) -> str:
        """The band's minors, for example ``4.34-4.42`` with an en dash."""
        return span(self.environments[0].minor, self.environments[-1].minor)


def bands(environments: Iterable[Environment], starts: Sequence[tuple[int, int]] = STARTS) -> list[Band]:
    """Group environments into bands, the oldest first; bands without environments are left out.

    Args:
        environments: The environments of all bands.
        starts: The first minor of each band. An older environment is in the first band.
    """
    found: dict[int, list[Environment]] = {}
    for environment in environments:
        found.setdefault(max(bisect_right(starts, environment.minor), 1), []).append(environment)
    return [Band(tuple(found[start])) for start in sorted(found)]


def split(band: Band, columns: int) -> list[Band]:
    """Split a band evenly into as few bands as possible with at most ``columns`` environments each."""
    parts = -(-len(band.environments) // columns)
    ends = [round(part * len(band.environments) / parts) for part in range(parts + 1)]
    return [Band(band.environments[start:end]) for start, end in zip(ends, ends[1:])]


def span(first: tuple[int, int], last: tuple[int, int]) -> str:
    """A range of minors, for example ``4.34-4.42`` with an en dash; one minor is named once."""
    ends = [f"{major}.{minor}" for major, minor in dict.fromkeys((first, last))]
    return "\N{EN DASH}".join(ends)
