"""Boundaries that the caller states, under Transformers' names or another framework's, without a read from the device.

Lengths say more than ``position_ids``: a document may start where ids go on, and must start where they restart.
``**kwargs`` of Transformers swallow what other frameworks hand over under names of their own, so known names are
translated. What else looks like boundaries and is read by nobody is an error in training, and a warning otherwise.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from .._torch import compiling, transforming
from .._types import Call
from ..errors import BadBatch, BadCuSeqlens, BadParents, BoundaryConflict, NothingPacked
from . import tensors
from .boundaries import Boundaries
from .find import added_to_logits, axes_of, counts_anew, goes_on, restarts
from .names import IGNORED_LABEL, LABELS, LENGTHS, LOSS_LABELS, LOSS_WEIGHTS, MEDIA
from .tensors import (
    Check,
    check_cu_seqlens,
    check_mask,
    check_max_seqlen,
    check_position_ids,
    described,
    fitting,
    is_integers,
    largest,
    require,
    require_all,
    require_here,
)


def from_cu_seqlens(
    cu_seqlens: torch.Tensor,  # integers [documents + 1] or [1, documents + 1]: 0, ..., batch * length
    max_seqlen: int | torch.Tensor | None,  # an upper bound will do; computed from ``cu_seqlens`` if None
    shape: tuple[int, int],  # (batch, length)
    *,
    cu_seqlens_k: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,  # may restart only where a document starts
    attention_mask: torch.Tensor | None = None,  # zeros only at the end of a document, or over a whole document
    parents: torch.Tensor | None = None,  # for each segment an earlier one of the same row that it continues, or -1
) -> Boundaries:
    """Check boundaries that the caller passes, without a read from the device if ``max_seqlen`` is an int."""
    # On a CPU a mismatch of values raises at once. On other devices, and in a compiled graph on every device, it
    # becomes a device-side assertion, which needs no synchronisation.
    check_cu_seqlens(cu_seqlens)
    if cu_seqlens_k is cu_seqlens:
        cu_seqlens_k = None
    if cu_seqlens_k is not None:
        check_cu_seqlens(cu_seqlens_k)
    if attention_mask is not None:
        check_mask(attention_mask, shape)
    cu = cu_seqlens.flatten().to(torch.int32)
    check_max_seqlen(max_seqlen)
    longest = largest(max_seqlen) if isinstance(max_seqlen, torch.Tensor) else max_seqlen
    lengths = None
    if cu.device.type == "cpu" and not compiling():
        lengths = _lengths_of(cu_seqlens.flatten(), shape[0] * shape[1])
        if longest is not None and max(lengths) > longest:
            raise BadCuSeqlens(_LONGEST.format(longest))
    keys = None if cu_seqlens_k is None else cu_seqlens_k.flatten()
    if keys is not None and keys.shape != cu.shape:
        raise BoundaryConflict(_KEYS)
    if not (cu.is_cuda and attention_mask is None and _checked_by_triton(cu, keys, shape, position_ids, longest)):
        checks = [] if lengths is not None else _ends(cu, shape[0] * shape[1], longest)
        if keys is not None:
            checks.append(Check((cu == keys).all(), BoundaryConflict, _KEYS))
        checks += _agreement(cu, shape, position_ids, attention_mask, lengths is not None)
        (require_all if lengths is None else require_here)(checks)
    if parents is not None:
        parents = _require_tree(cu, parents, shape, position_ids, attention_mask)
    stated = Boundaries(cu, 0 if longest is None else longest, None, lengths, parents)
    if longest is None:
        stated.max_seqlen = max(stated.lengths)
    return stated


_RISE = "cu_seq_lens must rise from 0 to the batch's {} tokens."
_LONGEST = "max_length is {}, but cu_seq_lens hold a longer document. Pass the longest length, or none."
_KEYS = (
    "cu_seq_lens_q and cu_seq_lens_k differ: in training every query's document is its keys' document. Pass the same "
    "lengths for both."
)
_ROWS = (
    "a document of cu_seq_lens runs on into the next row. At the first token of every row, of {} tokens, a document "
    "must start."
)
_IDS = (
    "position_ids restart inside what cu_seq_lens call one document. Let both describe the same documents, or pass "
    "only one of them."
)


def _checked_by_triton(
    cu: torch.Tensor, keys: torch.Tensor | None, shape: tuple[int, int], ids: torch.Tensor | None, longest: int | None
) -> bool:
    """Assert everything by one kernel, if there is one for this device and these arguments, and return whether."""
    # _ends and _agreement look at the same by fifteen operators.
    if compiling() or transforming() or type(cu) is not torch.Tensor:
        return False
    if cu.device.index != torch.cuda.current_device():  # where Triton launches
        return False
    if ids is not None:
        check_position_ids(ids, shape)
        ids = ids.to(cu.device)
        if ids.dim() == 3 or type(ids) is not torch.Tensor:
            return False
    kernel = _kernel()
    if kernel is None or not kernel.believed(cu.device.index):
        return False
    ids = None if ids is None else ids.view(-1, shape[1])
    held = kernel.looked_at(cu.contiguous(), None if keys is None else keys.to(cu), shape, ids, longest)
    said = [_RISE.format(shape[0] * shape[1])]
    said += [_LONGEST.format(longest)] if longest is not None else []
    said += [_KEYS] if keys is not None else []
    said += [_ROWS.format(shape[1])]
    said += [_IDS] if ids is not None else []
    tensors.assert_async(held, fitting(said))
    return True


@functools.cache
def _kernel() -> Any:
    try:
        from . import triton_check
    except ImportError:
        return None
    return triton_check


def _lengths_of(cu: torch.Tensor, tokens: int) -> tuple[int, ...]:
    # The error shows the numbers that were found, which those of _ends cannot.
    ends = tensors.read(cu).astype(np.int64)  # unsigned ones have no lengths below 0
    lengths, found = ends[1:] - ends[:-1], ends.tolist()
    if found[0] != 0 or found[-1] != tokens or (lengths < 0).any():
        shown = ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
        raise BadCuSeqlens(
            f"cu_seq_lens must rise from 0 to the number of tokens, {tokens} (batch x length, padding included); "
            f"found [{shown}] ending in {found[-1]}. Make them from this very batch, after truncation and padding."
        )
    return tuple(lengths.tolist())


def _ends(cu: torch.Tensor, tokens: int, max_seqlen: int | None) -> list[Check]:
    shortest, longest = torch.aminmax(cu.diff())
    checks = [Check(each, BadCuSeqlens, _RISE, (tokens,)) for each in (cu[0] == 0, cu[-1] == tokens, shortest >= 0)]
    if max_seqlen is not None:
        checks.append(Check(longest <= max_seqlen, BadCuSeqlens, _LONGEST, (max_seqlen,)))
    return checks


def _agreement(
    cu: torch.Tensor,
    shape: tuple[int, int],
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    on_host: bool,
) -> list[Check]:
    # NumPy compares where it can: a dozen operators of torch would take five times as long.
    tokens, by_numpy = shape[0] * shape[1], on_host and attention_mask is None
    starts: Any
    if by_numpy:
        starts = np.zeros(tokens + 1, dtype=bool)
        starts[tensors.read(cu)] = True
    else:
        starts = torch.zeros(tokens + 1, dtype=torch.bool, device=cu.device)
        starts = starts.index_fill(0, cu.long().clamp(0, tokens), True)  # a wrong end is told by _ends
    starts = starts[:-1].reshape(shape)
    checks = [Check(starts[:, 0].all(), BadCuSeqlens, _ROWS, (shape[1],))]
    numbers = None if attention_mask is None else attention_mask.to(cu.device)
    if numbers is not None:
        checks += _mask_agrees(starts, numbers)
    if position_ids is not None:
        check_position_ids(position_ids, shape)
        axes: Any = axes_of(position_ids).to(cu.device, torch.int64)  # [axes, batch or 1, length] or [1, length]
        axes = tensors.read(axes) if by_numpy else axes
        own, left = axes[..., 1:], axes[..., :-1]
        falls = own[0] <= left[0]  # ids may jump upwards inside a document
        if axes.shape[0] == 3:
            falls = restarts(own, left) | ((own <= left).any(0) & ~goes_on(own, left))
        if numbers is not None:
            falls = falls & (numbers[:, 1:] != 0)  # ids of masked tokens are ignored
        # a <= b of bools: a implies b, in one operator
        checks.append(Check((falls <= starts[:, 1:]).all(), BoundaryConflict, _IDS))
    return checks


def _mask_agrees(starts: torch.Tensor, numbers: torch.Tensor) -> list[Check]:
    whole, real, numbers = numbers >= 0, numbers != 0, numbers.to(torch.int64)
    changed = (numbers[:, 1:] != numbers[:, :-1]) & real[:, 1:] & real[:, :-1]
    return [
        Check(whole.all(), BoundaryConflict, added_to_logits("negative numbers")),
        Check(
            (changed <= starts[:, 1:]).all(),
            BoundaryConflict,
            "the attention_mask's document numbers change inside what cu_seq_lens call one document. Let both describe "
            "the same documents, or pass only one of them.",
        ),
        Check(
            ((real[:, 1:] > real[:, :-1]) <= starts[:, 1:]).all(),
            BoundaryConflict,
            "the attention_mask hides tokens before real ones of the same document of cu_seq_lens. Padding may only "
            "end a document, or be one.",
        ),
    ]


def _require_tree(
    cu: torch.Tensor,
    parents: torch.Tensor,
    shape: tuple[int, int],
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
) -> torch.Tensor:
    # Parents need lengths, because ids that go on from a parent look like any other ids.
    segments = cu.shape[0] - 1
    if not is_integers(parents) or parents.dim() == 0 or parents.numel() != segments:
        raise BadParents(
            f"segment_parents: expected one integer for each of the {segments} segments of cu_seq_lens, found "
            f"{described(parents)}."
        )
    given = parents.flatten().to(cu.device, torch.int64)
    require(
        ((given >= -1) & (given < torch.arange(segments, device=cu.device))).all(),
        BadParents,
        "segment_parents: expected for each segment the number of an earlier one, or -1. Put a prompt in front of what "
        "continues it.",
    )
    starts, ends = cu[:-1].long(), cu[1:].long()
    has, parent = given >= 0, given.clamp(min=0)
    require(
        (~has | ((starts // shape[1] == starts[parent] // shape[1]) & (ends > starts) & (ends > starts)[parent])).all(),
        BadParents,
        "segment_parents: a segment and its parent must have tokens and be in one row. Leave out empty segments.",
    )
    if attention_mask is not None:
        require(
            (attention_mask == 1).all(),
            BadParents,
            "segment_parents came with an attention_mask that is not all ones: whether a parent's hidden tokens are "
            "seen is not known. Leave the mask out, and make padding a segment of its own.",
        )
    if position_ids is not None:
        check_position_ids(position_ids, shape)
        axes = axes_of(position_ids).to(cu.device, torch.int64)
        ids = axes.expand(len(axes), *shape).flatten(1)  # [axes, tokens]
        # A segment without tokens may begin behind the last one.
        first, before = ids[:, starts.clamp(max=ids.shape[1] - 1)], ids[:, (ends[parent] - 1).clamp(min=0)]
        continues = ~counts_anew(first[0], before[0])
        if len(ids) == 3:
            one, other = first[:, None], before[:, None]
            continues |= (goes_on(one, other) & ~restarts(one, other))[0]
        require(
            (~has | continues).all(),
            BadParents,
            "segment_parents: the position_ids of a segment do not go on from its parent's last one. Count them along "
            "the path from the root, as fa2patch.packing.share does.",
        )
    return given.to(torch.int32)


def require_no_first_labels(rows: torch.Tensor, at: torch.Tensor, parents: torch.Tensor) -> None:
    # The rows are labels [tokens + 1, ...], whose last entry is of a segment without tokens behind the row. ``at`` is
    # the first token of each segment.
    ignored = (rows.flatten(1) == IGNORED_LABEL).all(1)[at] | (parents.to(at.device) < 0)
    require(
        ignored.all(),
        BadBatch,
        "labels: the first token of a segment with a parent has a label, but no token of the row predicts it. Let "
        "each branch start with the last token that it shares, and give that token the label -100, as "
        "fa2patch.packing.share does.",
    )


# Names of other frameworks (Megatron, NeMo, torchtitan, vLLM's kernels), and Transformers' keyword for the same.
_SAME = {
    **dict.fromkeys(("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cumulative_seqlens_q"), "cu_seq_lens_q"),
    **dict.fromkeys(("cu_seqlens_k", "cu_seqlens_kv", "cumulative_seqlens_k"), "cu_seq_lens_k"),
    **dict.fromkeys(("max_seqlen", "max_seqlen_q"), "max_length_q"),
    **dict.fromkeys(("max_seqlen_k", "max_seqlen_kv"), "max_length_k"),
    **dict.fromkeys(("document_ids", "doc_ids", "sequence_ids"), "seq_idx"),
}

# Names of the documents' lengths in prime-rl, NeMo RL and Unsloth.
_LENGTHS = ("seq_lens", "seq_lengths", "seqlens", "packed_seq_lengths")

_OURS = {*LABELS, *LENGTHS, *MEDIA, LOSS_LABELS, LOSS_WEIGHTS}


def translated(call: Call, taken: Container[str], shape: tuple[int, int]) -> Call:
    """The arguments of a call, with the statements of other frameworks under Transformers' names."""
    found: Call = {}
    read_from: set[str] = set()
    for name, given in call.items():
        # A name that the model's forward takes keeps its meaning.
        if given is None or name in taken or name in LENGTHS:
            continue
        for key, value in _statements(name, given, shape):
            if key in found or call.get(key) is not None:
                raise BoundaryConflict(f"{name} and another argument both state {key}. Pass only one of them.")
            found[key] = value
            read_from.add(name)
    return {**{name: value for name, value in call.items() if name not in read_from}, **found} if found else call


def _statements(name: str, given: Any, shape: tuple[int, int]) -> Iterator[tuple[str, Any]]:
    if name in _SAME:
        yield _SAME[name], _as_tensor(given) if _SAME[name] == "seq_idx" else given
    elif name in _LENGTHS:
        lengths = _as_tensor(given)
        if not is_integers(lengths):
            raise BadCuSeqlens(f"{name}: expected the documents' lengths, integers, found {described(given)}.")
        if lengths.dim() != 1 or len(lengths) != shape[0]:  # else each row's length, which its mask says too
            yield "cu_seq_lens_q", torch.nn.functional.pad(lengths.flatten().cumsum(0, dtype=torch.int32), (1, 0))
    elif not isinstance(given, (torch.Tensor, str, bool, int, float, list, tuple, torch.nn.Module)):
        # An object with fields, such as NeMo's ``flash_attn_kwargs``, may state several.
        fields = {key: value for key, value in _fields(given).items() if value is not None}
        if any(key in _SAME or key in LENGTHS for key in fields):
            for key, value in fields.items():
                if key in LENGTHS:
                    yield key, value
                elif key in _SAME or key in _LENGTHS:
                    yield from _statements(key, value, shape)


def _fields(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else getattr(given, "__dict__", {})


def refuse_unread(call: Call, taken: Container[str], shape: tuple[int, int], training: bool) -> None:
    """Notice boundaries in a dense batch that nobody has read."""
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
    # On other devices than a CPU, and in a compiled graph, nothing is read: an error is an assertion on the device.
    if training:
        tensors.require(~says, BoundaryConflict, message.replace("{", "{{").replace("}", "}}"))
    elif says.device.type == "cpu" and not compiling() and bool(tensors.read(says)):
        warnings.warn(message, NothingPacked, stacklevel=4)


def _says_documents(value: Any, shape: tuple[int, int]) -> torch.Tensor | None:
    """Whether integers look like more documents than rows; None if their type or shape says that they do not."""
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
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value) if value.dtype.kind in "iu" else value
    if isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
        return torch.tensor(value)
    return value
