"""Document lengths from two lognormal distributions, the cost of padding, and the scores that attention computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Distribution:
    """A lognormal distribution of document lengths.

    The two below are tuned so that mini-batches of four hold about as much padding as the published speed-ups of
    padding-free training require (2.0 for FLAN, 1.4 for OrcaMath). They are consistent with those numbers but are not
    measurements of those data sets. Apart from the cut-off, the padding ratio depends on ``sigma`` alone, so ``scaled``
    keeps it.

    Attributes:
        mean: mean length in tokens, before the cut-off.
        longest: lengths are clipped to this many tokens.
    """

    name: str
    mean: float
    sigma: float
    longest: int = 4096

    def draw(self, count: int, seed: int = 0) -> list[int]:
        """Draw ``count`` lengths of at least one token."""
        centre = np.log(self.mean) - self.sigma**2 / 2
        drawn = np.random.default_rng(seed).lognormal(centre, self.sigma, count)
        return [int(length) for length in np.clip(np.rint(drawn), 1, self.longest)]

    def scaled(self, factor: float) -> Distribution:
        """Return the distribution of documents ``factor`` times as long, for training on a CPU."""
        return Distribution(self.name, self.mean * factor, self.sigma, max(1, round(self.longest * factor)))


FLAN = Distribution("FLAN-like", mean=300, sigma=0.9)
ORCAMATH = Distribution("OrcaMath-like", mean=400, sigma=0.4)
DISTRIBUTIONS = {distribution.name: distribution for distribution in (FLAN, ORCAMATH)}


def expected_padding_ratio(lengths: Sequence[int], batch: int) -> float:
    """Return padded tokens per real token, averaged over all mini-batches of ``batch`` documents that can be drawn.

    It limits what padding-free training can gain where cost is linear in tokens.
    """
    ordered, count = np.sort(np.asarray(lengths)), len(lengths)
    shorter = np.arange(count, dtype=np.float64)
    chance = np.full(count, batch / count)  # probability that the k-th shortest is the longest of its mini-batch
    for drawn in range(batch - 1):
        chance *= (shorter - drawn).clip(0) / (count - 1 - drawn)
    return float((chance * ordered).sum() / ordered.mean())


def padding_ratio(batches: Sequence[Sequence[int]]) -> float:
    """Return padded tokens per real token of these mini-batches."""
    return sum(len(batch) * max(batch) for batch in batches) / sum(map(sum, batches))


def scores(lengths: Sequence[int]) -> int:
    """Return the query-key pairs within documents without a causal mask: the sum of squared lengths."""
    return sum(length * length for length in lengths)


def filled(distribution: Distribution, tokens: int, seed: int = 0) -> list[int]:
    """Return drawn lengths that add up to ``tokens``; the last one is cut to fit."""
    return cut(distribution.draw(tokens, seed), tokens)


def cut(lengths: Sequence[int], tokens: int) -> list[int]:
    """Return the first lengths, which add up to ``tokens``; the last one is cut to fit."""
    found: list[int] = []
    for length in lengths:
        found.append(min(length, tokens - sum(found)))
        if sum(found) == tokens:
            break
    return found
