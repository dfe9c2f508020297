"""The budget of a row or a pass, and what becomes of an example that is longer: one answer for all that packs."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import PackingError
from .strategies import Ints

ROWS = ("error", "drop", "truncate", "split")
PASSES = ("error", "alone")  # of what is not cut: "alone" gives each longer example a pass of its own


def as_lengths(lengths: Any) -> Ints:
    try:
        found = np.asarray(lengths)
    except (TypeError, ValueError) as error:
        raise PackingError(f"lengths: expected one number per example, found {type(lengths).__name__}.") from error
    if found.ndim == 1 and not len(found):
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise PackingError(f"lengths: expected integers [examples], found {found.dtype} {list(found.shape)}.")
    if len(found) >= 2**31:
        raise PackingError(f"lengths: expected fewer than 2**31 examples, found {len(found)}. Plan them in parts.")
    if found.min() < 0 or int(found.max()) >= 2**31:
        wrong = int(np.flatnonzero((found < 0) | (found >= 2**31))[0])
        raise PackingError(
            f"lengths: expected from 0 to 2**31 - 1 tokens in every example, found {found[wrong]} in example {wrong}. "
            "Pass the number of tokens of each example."
        )
    return found.astype(np.int64, copy=False)


def token_count(example: Any) -> int:
    return len(example["input_ids"] if hasattr(example, "keys") else example)


def positive(name: str, value: Any, what: str = "number", below: int = 2**63) -> int:
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if not 1 <= number < below:
        raise PackingError(f"{name}: expected a positive {what}, found {value!r}.")
    return number


def check_budget(max_tokens: object) -> int:
    return positive("max_tokens", max_tokens, "number of tokens", 2**31)


def check_policy(too_long: str, policies: Sequence[str] = ROWS, advice: str = "") -> None:
    if too_long not in policies:
        raise PackingError(f"too_long: expected {' or '.join(map(repr, policies))}, found {too_long!r}.{advice}")


def longer(
    lengths: Ints, max_tokens: int, too_long: str, policies: Sequence[str] = ROWS, first: int = 0, what: str = "example"
) -> Ints:
    """Return the examples that are longer than the budget. ``first`` is the number of the first example in a stream."""
    check_policy(too_long, policies)
    found = np.flatnonzero(lengths > max_tokens)
    if len(found) and too_long == "error":
        choices = " or ".join(repr(each) for each in policies if each != "error")
        alone = ", which gives each a pass of its own" if "alone" in policies else ""
        raise PackingError(
            f"{len(found)} of {first + len(lengths)} {what}s are longer than max_tokens={max_tokens}: the first is "
            f"{what} {first + found[0]} of {lengths[found[0]]} tokens. Raise max_tokens, or choose "
            f"too_long={choices}{alone}."
        )
    return found


def capped(lengths: Ints, max_tokens: int, too_long: str, what: str = "example") -> Ints:
    """Return how much of a pass each example takes: one that is longer than the budget takes a pass of its own."""
    longer(lengths, max_tokens, too_long, PASSES, what=what)
    return np.minimum(lengths, max_tokens)


@dataclass(frozen=True)
class Pieces:
    lengths: Ints
    cuts: tuple[Ints, Ints, Ints] | None  # example, start and stop of each piece; None if all are whole
    dropped: Ints  # examples that are left out
    truncated: Ints  # examples that lose their end


def cut(lengths: Ints, max_tokens: int, too_long: str, first: int = 0) -> Pieces:
    over = longer(lengths, max_tokens, too_long, first=first)
    none = np.empty(0, np.int64)
    if not len(over) and lengths.all():
        return Pieces(lengths, None, none, none)
    if too_long != "split":
        dropped, truncated = (over, none) if too_long == "drop" else (none, over)
        kept = np.flatnonzero((lengths > 0) & ((lengths <= max_tokens) | (too_long == "truncate")))
        shorter = np.minimum(lengths[kept], max_tokens)
        return Pieces(shorter, (kept, np.zeros_like(kept), shorter), dropped, truncated)
    counts = -(-lengths // max_tokens)  # an example without tokens has no piece
    of = np.repeat(np.arange(len(lengths)), counts)
    start = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * max_tokens
    stop = np.minimum(start + max_tokens, lengths[of])
    return Pieces(stop - start, (of, start, stop), none, none)


def cut_out(example: Any, start: int, stop: int, length: int) -> Any:
    if not isinstance(example, Mapping):
        _require_length(example, length)
        return example[start:stop]
    if "input_ids" in example:
        _require_length(example["input_ids"], length)
    if (start, stop) == (0, length):
        return example
    return {key: value[start:stop] if _length(value) == length else value for key, value in example.items()}


def _require_length(tokens: object, length: int) -> None:
    if _length(tokens) != length:
        raise PackingError(
            f"an example was planned as {length} tokens, but has {_length(tokens)}. Plan again, with the "
            "lengths of this dataset's examples."
        )


def _length(value: object) -> int | None:
    single = isinstance(value, str) or getattr(value, "ndim", 1) == 0  # a tensor without dimensions has __len__ too
    return len(value) if isinstance(value, Sized) and not single else None
