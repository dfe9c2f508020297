"""Document lengths: two lognormal distributions, what padding them costs, and the scores that attention computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Distribution:
    """Lognormal lengths of mean ``mean`` tokens, cut off at ``longest``.

    The two below are tuned so that mini-batches of four hold about as much padding as the published speed-ups from
    leaving it out need (2.0 for FLAN, 1.4 for OrcaMath): consistent with those numbers, no measurements of those data
    sets. The ratio turns on ``sigma`` alone, cutting off aside, so that ``scaled`` keeps it.
    """

    name: str
    mean: float
    sigma: float
    longest: int = 4096

    def draw(self, count: int, seed: int = 0) -> list[int]:
        centre = np.log(self.mean) - self.sigma**2 / 2
        drawn = np.random.default_rng(seed).lognormal(centre, self.sigma, count)
        return [int(length) for length in np.clip(np.rint(drawn), 1, self.longest)]

    def scaled(self, factor: float) -> Distribution:
        """Documents ``factor`` times as long: what a CPU can train on."""
        return Distribution(self.name, self.mean * factor, self.sigma, max(1, round(self.longest * factor)))


FLAN = Distribution("FLAN-like", mean=300, sigma=0.9)
ORCAMATH = Distribution("OrcaMath-like", mean=400, sigma=0.4)
DISTRIBUTIONS = {distribution.name: distribution for distribution in (FLAN, ORCAMATH)}


def expected_padding_ratio(lengths: Sequence[int], batch: int) -> float:
    """Padded tokens by real tokens, on average over all mini-batches of ``batch`` documents that can be drawn.

    The limit of what leaving padding out can gain where cost is linear in tokens.
    """
    ordered, count = np.sort(np.asarray(lengths)), len(lengths)
    shorter = np.arange(count, dtype=np.float64)
    chance = np.full(count, batch / count)  # that the k-th shortest is the longest of its mini-batch
    for drawn in range(batch - 1):
        chance *= (shorter - drawn).clip(0) / (count - 1 - drawn)
    return float((chance * ordered).sum() / ordered.mean())


def padding_ratio(batches: Sequence[Sequence[int]]) -> float:
    """Padded tokens by real tokens, of these very mini-batches."""
    return sum(len(batch) * max(batch) for batch in batches) / sum(map(sum, batches))


def scores(lengths: Sequence[int]) -> int:
    """Query-key pairs of attention that keeps to documents, causal or not: the sum of squared lengths."""
    return sum(length * length for length in lengths)


def filled(distribution: Distribution, tokens: int, seed: int = 0) -> list[int]:
    """Lengths that add up to ``tokens``, the last one cut to fit."""
    found: list[int] = []
    for length in distribution.draw(tokens, seed):
        found.append(min(length, tokens - sum(found)))
        if sum(found) == tokens:
            break
    return found
