"""What must hold of stated boundaries, looked at by one kernel of Triton. Import it only where Triton can run.

Each operator of torch is a launch on a device, and :mod:`.given_boundaries` needs fifteen of them to look at a row.
They stay for devices and arguments that this kernel is not for. Like a kernel of attention, this one is tried before it
is used, on rows that are right and rows that are wrong in each way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .._torch import is_no_verdict, outside_the_forward

_BLOCK = 1024


# numbers that change with the batch: Triton would compile the kernel again for 1 and for multiples of 16
@triton.jit(do_not_specialize=["documents", "tokens", "length", "longest", "row_stride", "stride", "steps"])  # type: ignore[untyped-decorator]
def _look(  # type: ignore[no-untyped-def]  # Triton reads annotations
    held, ends, ends_of_keys, ids, documents, tokens, length, longest, row_stride, stride, steps,
    HAS_KEYS: tl.constexpr, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Each program looks at one block of documents and of tokens, and stores 0 in ``held`` if something is wrong there.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one = at < documents
    start, end = tl.load(ends + at, mask=one, other=0), tl.load(ends + at + 1, mask=one, other=0)
    bad = one & ((end < start) | (end - start > longest))
    bad |= one & ((at == 0) & (start != 0) | (at == documents - 1) & (end != tokens))
    if HAS_KEYS:
        known = at <= documents
        bad |= known & (tl.load(ends + at, mask=known, other=0) != tl.load(ends_of_keys + at, mask=known, other=0))
    column = at % length
    starts = (at < tokens) & (column == 0)
    if HAS_IDS:
        inside = (at < tokens) & (column > 0)
        places = ids + (at // length).to(tl.int64) * row_stride + column.to(tl.int64) * stride
        own, before = tl.load(places, mask=inside, other=0), tl.load(places - stride, mask=inside, other=0)
        starts |= inside & (own <= before)
    low, high = at * 0, at * 0 + documents  # the first end that is not below the token
    for _ in range(steps):
        middle = (low + high) // 2
        below = (low < high) & (tl.load(ends + middle, mask=starts, other=0) < at)
        low, high = tl.where(below, middle + 1, low), tl.where(below, high, middle)
    bad |= starts & (tl.load(ends + low, mask=starts, other=0) != at)
    tl.store(held, 0, mask=tl.max(bad.to(tl.int32), 0) > 0)


def looked_at(
    ends: torch.Tensor,  # integers [documents + 1]
    ends_of_keys: torch.Tensor | None,  # must be equal to ``ends``
    shape: tuple[int, int],  # (batch, length): a document must start at the first token of every row
    ids: torch.Tensor | None,  # [batch or 1, length]: may restart only where a document starts
    longest: int | None,  # no document may be longer
) -> torch.Tensor:
    """Whether boundaries rise from 0 to the number of tokens, and agree with the ids: 0 on the device if not."""
    held, documents, tokens = ends.new_ones((), dtype=torch.int32), ends.shape[0] - 1, shape[0] * shape[1]
    row_stride, stride = (0, 0) if ids is None else (ids.stride(0) if ids.shape[0] > 1 else 0, ids.stride(1))
    _look[(triton.cdiv(max(tokens, documents + 1), _BLOCK),)](
        held, ends, ends if ends_of_keys is None else ends_of_keys, ends if ids is None else ids, documents, tokens,
        shape[1], tokens if longest is None else longest, row_stride, stride, (documents + 1).bit_length(),
        HAS_KEYS=ends_of_keys is not None, HAS_IDS=ids is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    return held


class Case(NamedTuple):
    """Arguments of :func:`looked_at`, and what it must find."""

    holds: bool  # whether all is right
    ends: list[int]
    shape: tuple[int, int]
    starts: list[int] | None  # where ids begin again from 0; None for no ids
    longest: int | None = None
    ends_of_keys: list[int] | None = None
    step: int = 1  # by how much ids rise from token to token


_LONG = 3 * _BLOCK + 5


def cases() -> Iterator[Case]:
    """Rows that are right, and some that are wrong in each way, at the ends of blocks and inside them."""
    for last, cut in ((10, 4), (_LONG, _BLOCK), (_LONG, 2 * _BLOCK - 1), (_LONG, _LONG - 1)):
        one, ends, longest = (1, last), [0, cut, last], max(cut, last - cut)
        yield Case(True, ends, one, [0, cut], longest, ends)
        yield Case(True, [*ends, last, last], one, [0, cut])
        yield Case(True, [0, cut - 1, *ends[1:]], one, [0, cut])  # lengths may say more than ids
        yield Case(False, ends, one, [0, cut - 1])
        yield Case(True, ends, one, [0, cut], step=2)  # ids may jump upwards inside a document
        yield Case(False, ends, one, [0, cut], step=0)
        yield Case(False, [0, last], one, [0, cut])
        yield Case(False, ends, one, [0, cut], longest - 1)
        yield Case(False, ends, one, [0, cut], longest, [0, cut, last - 1])
        yield Case(True, ends, one, None, longest)
        yield Case(False, ends, one, None, longest - 1)
        yield Case(False, [1, cut, last], one, [0, cut])
        yield Case(False, [0, cut, last - 1], one, [0, cut])
        yield Case(False, [0, cut, last + 1], one, [0, cut])
        yield Case(False, [0, cut, cut - 1, last], one, [0, cut])
        yield Case(True, [0, cut, last, last + cut, 2 * last], (2, last), [0, cut])
        yield Case(False, [0, cut, last + 1, 2 * last], (2, last), [0, cut])
    many = 2 * _BLOCK + 3
    yield Case(True, [*range(many + 1)], (1, many), [*range(many)], 1)
    yield Case(False, [*range(many), many - 2, many], (1, many), [*range(many)])


def _tensors(case: Case, device: torch.device) -> tuple[Any, ...]:
    given = (case.ends, case.ends_of_keys)
    ends, keys = (None if x is None else torch.tensor(x, dtype=torch.int32, device=device) for x in given)
    if case.starts is None:
        return ends, keys, case.shape, None, case.longest
    counted, starts = torch.arange(case.shape[1]), torch.tensor(case.starts)
    ids = counted - starts[torch.bucketize(counted, starts, right=True) - 1]
    return ends, keys, case.shape, case.step * ids[None].to(device), case.longest


def tells(device: torch.device) -> bool:
    """Whether the kernel tells right rows from wrong ones on a device."""
    tried = [*cases()]
    # All verdicts are read from the device at once.
    found = torch.stack([looked_at(*_tensors(case, device)) for case in tried]).bool().tolist()
    return found == [case.holds for case in tried]


_verdicts: dict[int, bool] = {}


def believed(index: int) -> bool:
    """Whether the kernel is used on a CUDA device, on which it is tried once."""
    if index not in _verdicts:
        if torch.cuda.is_current_stream_capturing():
            return False
        device = torch.device("cuda", index)
        try:
            with outside_the_forward(device):
                _verdicts[index] = tells(device)
        except Exception as error:  # Triton's compiler and the driver raise errors of many types
            # Such an error is not remembered.
            if is_no_verdict(error):
                raise
            _verdicts[index] = False
    return _verdicts[index]
