"""What ``share`` is given: sequences of token ids and options, checked."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import PackingError
from .strategies import Ints


def token_ids(sequences: Any) -> list[Ints]:
    """Return the token ids of each sequence, int64 ``[length]``.

    Raises:
        PackingError: There are no sequences, or one is empty or is not integers ``[length]``.
    """
    try:
        given = None if isinstance(sequences, (str, bytes)) else list(sequences)
    except TypeError:
        given = None
    if not given:
        found = "none" if given == [] else repr(sequences)
        raise PackingError(f"share: expected at least one sequence of token ids, found {found}.")
    return [_ids(index, sequence) for index, sequence in enumerate(given)]


def _ids(index: int, sequence: Any) -> Ints:
    try:
        found = np.asarray(sequence.detach().cpu() if isinstance(sequence, torch.Tensor) else sequence)
        shape, dtype = list(found.shape), found.dtype
    except (TypeError, ValueError, RuntimeError) as error:
        raise PackingError(f"sequence {index}: expected token ids [length], found {error}.") from error
    if shape == [0]:
        raise PackingError(f"sequence {index}: no tokens. Leave it out.")
    if len(shape) != 1 or dtype.kind not in "iu":
        raise PackingError(
            f"sequence {index}: expected token ids, integers [length] without padding, found "
            f"{type(sequence).__name__} of {dtype} {shape}."
        )
    return found.astype(np.int64)


def limits_of(prompts: Any, lengths: Sequence[int]) -> list[int]:
    """Return the option ``prompts``: the number of tokens of each sequence that may be shared.

    Raises:
        PackingError: There is not one integer from 0 to its length for each sequence.
    """
    try:
        limits = [operator.index(each) for each in prompts]
    except TypeError as error:
        raise PackingError(f"prompts: expected one integer for each sequence, found {prompts!r}.") from error
    if len(limits) != len(lengths):
        raise PackingError(
            f"prompts: expected one number for each of {len(lengths)} sequences, found {len(limits)}. Repeat a "
            "prompt's length for each of its completions."
        )
    for index, (limit, length) in enumerate(zip(limits, lengths)):
        if not 0 <= limit <= length:
            raise PackingError(
                f"prompts: sequence {index} has {length} tokens, so its prompt has 0 to {length}, found {limit}."
            )
    return limits


def checked_least(least: Any) -> int:
    """Return the option ``least``.

    Raises:
        PackingError: It is not an integer of 1 or more.
    """
    try:
        number = operator.index(least)
    except TypeError as error:
        raise PackingError(f"least: expected a number of tokens, 1 or more, found {least!r}.") from error
    if number < 1:
        raise PackingError(f"least: expected a number of tokens, 1 or more, found {number}. 1 shares every prefix.")
    return number
