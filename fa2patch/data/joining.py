"""The values of a batch's examples end to end, so that one look at them is enough.

A call of NumPy costs about as much for a batch as for an example, so a batch whose examples are alike is converted and
checked as if it were one long example. Examples are alike if types and dtypes say that the numbers become the same as
they do example by example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable

import numpy as np
import torch

Values = dict[str, Any]
Lengths = dict[str, list[int]]


def joined(examples: Sequence[Mapping[str, Any]]) -> tuple[Values, Lengths] | None:
    """Join the values of each key.

    Returns:
        For each key a new array or tensor of all values, and the number of values of each example. None if the examples
        are not alike: they have different keys, or a key's values are not all lists, all arrays or all tensors, or have
        several dtypes, or cannot be concatenated.
    """
    values, lengths = {}, {}
    try:
        for key in examples[0]:
            of_key = [example[key] for example in examples]
            kind = type(of_key[0])
            if kind not in _JOIN or list(map(type, of_key)).count(kind) < len(of_key):
                return None
            values[key], lengths[key] = _JOIN[kind](of_key)
    except (KeyError, RuntimeError, TypeError, ValueError):
        return None  # a key that one example lacks, lists in lists, shapes or devices that differ
    return (values, lengths) if all(len(example) == len(values) for example in examples) else None


def _of_lists(values: list[Sequence[Any]]) -> tuple[Any, list[int]]:
    return _of_arrays([np.asarray(value) for value in values])


def _of_arrays(values: list[Any]) -> tuple[Any, list[int]]:
    if len({value.dtype for value in values}) > 1:
        raise TypeError("arrays of several dtypes")
    return np.concatenate(values), list(map(len, values))


def _of_tensors(values: list[torch.Tensor]) -> tuple[Any, list[int]]:
    if len({value.dtype for value in values}) > 1:
        raise TypeError("tensors of several dtypes")
    return torch.cat(values), [value.numel() for value in values]


_JOIN: dict[type, Callable[[Any], tuple[Any, list[int]]]] = {
    list: _of_lists, tuple: _of_lists, np.ndarray: _of_arrays, torch.Tensor: _of_tensors,
}  # fmt: skip
