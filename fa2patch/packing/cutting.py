"""Validation of lengths and options, and cutting of examples that are longer than the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import PackingError
from .strategies import Ints

POLICIES = ("error", "drop", "truncate", "split")


@dataclass(frozen=True)
class Pieces:
    """The pieces of examples that are packed. A piece is the tokens ``[start:stop]`` of its example.

    Attributes:
        lengths: Tokens of each piece, ``[pieces]``.
        cuts: The example, the start and the stop of each piece, ``[pieces]`` each. None if nothing is cut or dropped.
        dropped: Indices of the examples that are left out.
        truncated: Indices of the examples whose end is left out.
    """

    lengths: Ints
    cuts: tuple[Ints, Ints, Ints] | None
    dropped: Ints
    truncated: Ints


def as_lengths(lengths: Any) -> Ints:
    """Return lengths as an int64 array ``[examples]``, without a copy if they are one already.

    Raises:
        PackingError: The lengths are not one integer from 1 to 2**31 - 1 per example, or there are 2**31 or more.
    """
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
    if found.min() < 1 or int(found.max()) >= 2**31:
        wrong = int(np.flatnonzero((found < 1) | (found >= 2**31))[0])
        raise PackingError(
            f"lengths: expected from 1 to 2**31 - 1 tokens in every example, found {found[wrong]} in example {wrong}. "
            "Remove empty examples from the dataset."
        )
    return found.astype(np.int64, copy=False)


def check_budget(max_tokens: object) -> int:
    """Return the option as an int, or raise :class:`PackingError` unless it is from 1 to 2**31 - 1."""
    if isinstance(max_tokens, (int, np.integer)) and not isinstance(max_tokens, bool) and 1 <= max_tokens < 2**31:
        return int(max_tokens)
    raise PackingError(f"max_tokens: expected a positive number of tokens, found {max_tokens!r}.")


def check_policy(too_long: str) -> None:
    """Raise :class:`PackingError` unless this is one of :data:`POLICIES`."""
    if too_long not in POLICIES:
        raise PackingError(f"too_long: expected one of {', '.join(POLICIES)}, found {too_long!r}.")


def cut(lengths: Ints, max_tokens: int, too_long: str) -> Pieces:
    """Apply the policy to all examples longer than ``max_tokens``.

    Raises:
        PackingError: The policy is unknown, or it is ``"error"`` and an example is longer than ``max_tokens``.
    """
    check_policy(too_long)
    longer = np.flatnonzero(lengths > max_tokens)
    none = np.empty(0, np.int64)
    if not len(longer):
        return Pieces(lengths, None, none, none)
    if too_long == "error":
        raise PackingError(
            f"{len(longer)} of {len(lengths)} examples are longer than max_tokens={max_tokens}: the first is example "
            f"{longer[0]} of {lengths[longer[0]]} tokens. Raise max_tokens, or choose too_long='split', 'truncate' or "
            "'drop'."
        )
    if too_long == "drop":
        kept = np.flatnonzero(lengths <= max_tokens)
        return Pieces(lengths[kept], (kept, np.zeros_like(kept), lengths[kept]), longer, none)
    if too_long == "truncate":
        shorter = np.minimum(lengths, max_tokens)
        return Pieces(shorter, (np.arange(len(lengths)), np.zeros_like(lengths), shorter), none, longer)
    counts = -(-lengths // max_tokens)
    of = np.repeat(np.arange(len(lengths)), counts)
    start = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * max_tokens
    stop = np.minimum(start + max_tokens, lengths[of])
    return Pieces(stop - start, (of, start, stop), none, none)


def part(example: Any, start: int, stop: int, length: int) -> Any:
    """Return the tokens ``[start:stop]`` of an example with ``length`` tokens.

    In a mapping, every value with ``length`` items is cut, and other values are kept whole.

    Raises:
        PackingError: The example, or its ``input_ids``, does not have ``length`` tokens.
    """
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
