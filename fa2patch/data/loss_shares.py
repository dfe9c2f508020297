"""How the loss of a batch follows from the losses of its parts, which a trainer's own loss function shows.

A loss may be a sum that is divided by a number of the whole step, a mean over documents, or a mean over tokens that
some column selects. What it is stands in no attribute that all trainers have, so it is tried: the loss of three units
together and of each alone tell the means apart, and a loss that is no such sum is refused.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Callable, NamedTuple

import numpy as np
import torch

from ..documents.names import IGNORED_LABEL, LABELS
from ..errors import BadBatch, PackingError
from ..packing.passes import Units, units_of

GROUPS = (1, 2)
"""Rows that may belong together: each alone, or one of the first half with one of the second (chosen and rejected)."""

TRIED = 3
"""Units whose loss is compared: with two, sorted losses and unsorted ones are equal in every second case."""

Loss = Callable[[Any], torch.Tensor]
"""A loss function of a batch."""


class Share(NamedTuple):
    """What a loss is a mean of.

    Attributes:
        group: The number of rows of a padded batch that make a unit.
        of: What is counted: ``"sum"`` for a loss that is none, ``"units"``, or the name of a column.
        shifted: Whether the first column does not count, as in a loss of next tokens.
    """

    group: int
    of: str
    shifted: bool = False

    def divisor(self, batch: Any, units: int) -> float:
        """Return the number by which the loss of a batch with so many units is divided; 1 for a sum."""
        if self.of in ("sum", "units"):
            return 1 if self.of == "sum" else units
        value = batch[self.of]
        counted = value != (IGNORED_LABEL if (value < 0).any() or self.of in LABELS else 0)
        return float((counted[:, 1:] if self.shifted else counted).sum())


def shares_of(batch: Any, group: int) -> list[Share]:
    """Return what the loss of a batch may be a mean of, the likeliest first."""
    columns = [
        name
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()
        if name in LABELS or bool((value == 0).logical_or(value == 1).all()) or bool((value == IGNORED_LABEL).any())
    ]
    columns.sort(key=lambda name: name not in LABELS)
    of_columns = [Share(group, name, shifted) for name in columns for shifted in (True, False)]
    return [Share(group, "sum"), Share(group, "units"), *of_columns]


class Tried(NamedTuple):
    """What a try of a loss showed.

    Attributes:
        share: What the loss is a mean of; None if the units do not show it.
        more: The number of tokens that the model computed of these units together for each token that they show.
        undecided: Whether the losses are such sums, and do not tell of what.
        said: What was found, for each of :data:`GROUPS`.
    """

    share: Share | None
    more: float
    undecided: bool
    said: list[str]


def find(loss: Loss, batch: Mapping[str, Any], dtype: torch.dtype, computed: list[int], attempt: int = 0) -> Tried:
    """Try the loss of some of a batch's units, together and alone.

    Args:
        loss: The loss of a batch, without gradients. Ranks that compute together make the same calls of it.
        batch: A packed or padded batch.
        dtype: The dtype that the model computes in, whose rounding the losses have.
        computed: A list to which each forward of the model adds the number of its tokens, without padding.
        attempt: The number of attempts before. Each tries other units.
    """
    found = [_tried(loss, batch, group, dtype, computed, attempt) for group in GROUPS]
    said = [
        f"{'pairs of rows' if group > 1 else 'documents'}: {', '.join(each.said)}" for group, each in zip(GROUPS, found)
    ]
    best = next((each for each in found if each.share), found[0])
    return Tried(best.share, best.more, any(each.undecided for each in found), said)


def _tried(loss: Loss, batch: Any, group: int, dtype: torch.dtype, computed: list[int], attempt: int) -> Tried:
    try:
        units = units_of(batch, group)
    except (PackingError, BadBatch) as error:
        return Tried(None, 1.0, False, [error.message])
    chosen = _chosen(units, attempt)
    union = np.unique(chosen)
    parts = [units.take(np.array([unit])) for unit in chosen]
    try:
        alone = [float(loss(part)) for part in parts]
        computed.clear()
        together = float(loss(units.take(union)))
    except Exception as error:  # whatever a loss raises that needs rows which are not there
        return Tried(None, 1.0, False, [f"the loss of one raises {type(error).__name__}: {error}"])
    more = max(computed, default=0) / max(int(units.tokens[union].sum()), 1)
    if len(union) < TRIED:
        return Tried(None, more, True, [f"{len(units.tokens)} in the batch, of which {TRIED} are tried"])
    return _fitting(shares_of(units.take(union), group), parts, alone, together, dtype)._replace(more=more)


def _chosen(units: Units, attempt: int) -> np.ndarray[Any, Any]:
    """The numbers of three units, the smallest and larger ones of other lengths if there are any, int64 ``[3]``."""
    by_size = np.argsort(units.tokens, kind="stable")
    _, firsts = np.unique(units.tokens[by_size], return_index=True)
    different = by_size[firsts]
    rest = by_size[~np.isin(by_size, different)]
    ordered = np.concatenate([different, rest])
    start = (attempt * TRIED) % max(len(ordered) - TRIED + 1, 1)
    return np.resize(ordered[start : start + TRIED], TRIED)


def _fitting(shares: list[Share], parts: list[Any], alone: list[float], together: float, dtype: torch.dtype) -> Tried:
    """The share by which the losses of parts give the loss of all, if it is the only one."""
    rounding = max(map(abs, (*alone, together))) * (1e-5 if torch.finfo(dtype).bits > 16 else 5e-3)
    fitting: dict[tuple[float, ...], Share] = {}
    for share in shares:
        counts = np.array([share.divisor(part, 1) for part in parts])
        weights = counts / (1 if share.of == "sum" else max(counts.sum(), 1))
        if abs(together - float(weights @ np.array(alone))) <= rounding:
            fitting.setdefault(tuple(weights.round(6)), share)
    if len(fitting) == 1:
        return Tried(next(iter(fitting.values())), 1.0, False, ["found"])
    said = f"losses {', '.join(f'{each:.6g}' for each in alone)} alone and {together:.6g} together"
    return Tried(None, 1.0, bool(fitting), [said])


@contextlib.contextmanager
def untouched(trainer: Any, model: torch.nn.Module) -> Iterator[None]:
    """Let a trainer compute losses in evaluation and without gradients, and put back what it notes of them."""
    noted = {name: copy.deepcopy(value) for name, value in vars(trainer).items() if _is_plain(value)}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
        vars(trainer).update(noted)


def _is_plain(value: Any) -> bool:
    """Whether a value is a collection of numbers and texts, in which trainers note metrics."""
    if isinstance(value, Mapping):
        return all(_is_plain(each) for each in value.values())
    if isinstance(value, (list, tuple, deque, set)):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))
