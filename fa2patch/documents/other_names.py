"""Boundaries that other frameworks hand over under names of their own, which Transformers' ``**kwargs`` swallow.

A statement under a known name becomes one of Transformers' keywords. Anything else that looks like boundaries and that
nobody reads is an error in training, and a warning otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from .._torch import compiling
from .._types import Call
from ..errors import BadCuSeqlens, BoundaryConflict, NothingPacked
from . import device as devices
from .checks import described, is_integers
from .names import LABELS, LENGTHS, LOSS_LABELS, LOSS_WEIGHTS, MEDIA

_SAME = {
    **dict.fromkeys(("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cumulative_seqlens_q"), "cu_seq_lens_q"),
    **dict.fromkeys(("cu_seqlens_k", "cu_seqlens_kv", "cumulative_seqlens_k"), "cu_seq_lens_k"),
    **dict.fromkeys(("max_seqlen", "max_seqlen_q"), "max_length_q"),
    **dict.fromkeys(("max_seqlen_k", "max_seqlen_kv"), "max_length_k"),
    **dict.fromkeys(("document_ids", "doc_ids", "sequence_ids"), "seq_idx"),
}
"""Names of other frameworks (Megatron, NeMo, torchtitan, vLLM's kernels), and Transformers' keyword for the same."""

_LENGTHS = ("seq_lens", "seq_lengths", "seqlens", "packed_seq_lengths")
"""Names of the documents' lengths: prime-rl, NeMo RL, Unsloth."""

_OURS = {*LABELS, *LENGTHS, *MEDIA, LOSS_LABELS, LOSS_WEIGHTS}


def translated(call: Call, taken: Container[str], shape: tuple[int, int]) -> Call:
    """Return the arguments of a call with the statements of other frameworks under Transformers' names.

    A name that the model's forward takes keeps its meaning. Lengths of padded rows, one for each row, are left as they
    are, because the mask says the same.

    Args:
        call: the arguments by name, which are not changed.
        taken: the names of the forward's parameters.
        shape: ``(batch, length)``.
    """
    found: Call = {}
    read_from: set[str] = set()
    for name, given in call.items():
        if given is None or name in taken or name in LENGTHS:
            continue
        for inner, value in _statements(name, given):
            stated = _translated(inner, value, shape)
            if stated is None:
                continue
            key, value = stated
            if key in found or call.get(key) is not None:
                raise BoundaryConflict(f"{name} and another argument both state {key}. Pass only one of them.")
            found[key] = value
            read_from.add(name)
    return {**{name: value for name, value in call.items() if name not in read_from}, **found} if found else call


def _statements(name: str, given: object) -> Iterator[tuple[str, object]]:
    """The argument itself, or the fields of an object that holds boundaries, such as NeMo's ``flash_attn_kwargs``."""
    if name in _SAME or name in _LENGTHS:
        yield name, given
    elif not isinstance(given, (torch.Tensor, str, bool, int, float, list, tuple, torch.nn.Module)):
        fields = {key: value for key, value in _fields(given).items() if value is not None}
        if any(key in _SAME or key in LENGTHS for key in fields):
            yield from fields.items()


def _fields(given: object) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else getattr(given, "__dict__", {})


def _translated(name: str, value: Any, shape: tuple[int, int]) -> tuple[str, Any] | None:
    """What a statement says, under Transformers' keyword; None if it says nothing of documents."""
    if name in LENGTHS:
        return name, value
    if name not in _LENGTHS:
        return (_SAME[name], _as_tensor(value) if _SAME[name] == "seq_idx" else value) if name in _SAME else None
    lengths = _as_tensor(value)
    if not is_integers(lengths):
        raise BadCuSeqlens(f"{name}: expected the documents' lengths, integers, found {described(value)}.")
    if lengths.dim() == 1 and len(lengths) == shape[0]:  # each row's length, which its mask says too
        return None
    return "cu_seq_lens_q", torch.nn.functional.pad(lengths.flatten().cumsum(0, dtype=torch.int32), (1, 0))


def require_none(call: Call, taken: Container[str], shape: tuple[int, int], training: bool) -> None:
    """Notice boundaries in a dense batch that nobody has read.

    On a CPU the values of integers are looked at. On other devices, and in a compiled graph, an error in training is a
    device-side assertion, and nothing is read. Outside training it is a warning.
    """
    for name, given in call.items():
        if given is None or name in taken or name in _OURS:
            continue
        values = [given] if isinstance(given, (torch.Tensor, np.ndarray, list, tuple)) else [*_fields(given).values()]
        for value in values:
            _notice(name, _says_documents(_as_tensor(value), shape), training)
    longest = call.get("max_length_q")
    if isinstance(longest, int) and longest < shape[1] and call.get("cu_seq_lens_q") is None:
        _notice("max_length_q", torch.tensor(True), training)


def _notice(name: str, says: torch.Tensor | None, training: bool) -> None:
    if says is None:
        return
    message = (
        f"{name} looks like the boundaries of documents, and fa2patch does not know this name: the batch would be "
        "computed as one document in each row. Pass position_ids that restart, cu_seq_lens_q or seq_idx, or leave "
        f"{name} out."
    )
    if training:
        devices.require(~says, BoundaryConflict, message.replace("{", "{{").replace("}", "}}"))
    elif says.device.type == "cpu" and not compiling() and bool(devices.read(says)):
        warnings.warn(message, NothingPacked, stacklevel=4)


def _says_documents(value: Any, shape: tuple[int, int]) -> torch.Tensor | None:
    """Whether integers look like more documents than rows, a bool tensor without dimensions; None by their shape."""
    if not is_integers(value) or value.device.type == "meta":
        return None
    tokens = shape[0] * shape[1]
    if tuple(value.shape) == shape and shape[1] > 2:
        step = value.long().diff()
        counts = ((step == 0) | (step == 1)).all() & (value[:, 0] <= 1).all() & (value[:, 0] >= 0).all()
        found: torch.Tensor = counts & (step == 0).any() & (value.max() - value.min() > 1)  # two values are a mask
        return found
    if value.numel() <= shape[0] or value.numel() != value.shape[-1]:
        return None
    numbers = value.flatten().long()
    rises = (numbers[0] == 0) & (numbers[-1] == tokens) & (numbers.diff() >= 0).all()
    more = numbers.numel() > shape[0] + 1
    sums = (numbers.sum() == tokens) & (numbers > 0).all()
    either: torch.Tensor = (rises & more) | sums
    return either


def _as_tensor(value: Any) -> Any:
    """Lists and arrays of integers as a tensor; anything else as it is."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value) if value.dtype.kind in "iu" else value
    if isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
        return torch.tensor(value)
    return value
