"""One call of a mixer with a packed batch, and the ways in which the mixer may get its documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from ..._types import Args, Call, Function
from ...documents.boundaries import Boundaries
from ...kernels import grouping
from ...kernels.picks import BATCHES, DOCUMENTS, WHOLE_ROW, Portions
from ..splitting import Documents

NO_KERNELS = ("cpu", "meta")  # no package has a kernel that takes lengths for them

# Tokens of a batch, at most. More would not be faster, and a mixer in pure torch needs memory for all of them.
LARGEST = 16384

# Tokens of a document or a call from which on longer ones need no trial of their own. Mixers compute in chunks of up to
# 256 tokens, and some are wrong only beyond a chunk, where tokens see later ones (Mamba 2 in 4.45).
LONG_ENOUGH = 1024


class Way(NamedTuple):
    """What a mixer gets in its calls."""

    portions: Portions  # as ``Patch.layers`` shows it
    documents: Documents
    name: str = ""  # in the reason why the mixer does not get it
    more: Call = {}  # further keywords for the mixer
    # The lengths in tokens that a trial's verdict holds up to: of the longest call with several documents, and of the
    # longest document with padding.
    sizes: tuple[int, ...] = ()


@dataclass
class Mixing:
    original: Function
    module: torch.nn.Module
    args: Args
    kwargs: Call
    boundaries: Boundaries  # of the documents that this process holds
    shape: tuple[int, int]  # ``(batch, length)``
    hands_on: bool  # whether the second output is the next layer's state, which is left out
    place: Any = None  # the number or name of the hidden states among the arguments; None if not known
    hidden: torch.Tensor | None = None  # ``[batch, length, width]``; None if not known

    def __post_init__(self) -> None:
        for place, value in chain(enumerate(self.args), self.kwargs.items()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[:-1] == self.shape:
                self.place, self.hidden = place, value
                return

    def one_by_one(self) -> Way:
        return Way(DOCUMENTS, Documents(self.boundaries, self.shape))

    def ways(self, lengths: Sequence[str]) -> Iterator[Way]:
        # The best way comes first, and the documents one by one come last. They are made once in a forward. The device
        # is read only if the first way is not taken.
        known, cu = self.boundaries.made, self.boundaries.cu_seqlens
        several = len(self.boundaries) > 1 and self.boundaries.parents is None
        if lengths and several and cu.device.type not in NO_KERNELS:
            tokens = self.shape[0] * self.shape[1]
            if Way not in known:
                whole = Documents(Boundaries(torch.tensor([0, tokens]), tokens, None, (tokens,)), self.shape)
                known[Way] = whole, keywords(self.boundaries, tokens)
            whole, more = known[Way]
            more = {name: more[name] for name in lengths}
            yield Way(WHOLE_ROW, whole, "a whole row", more, (min(tokens, LONG_ENOUGH), 0))
        if (Way, self.shape) not in known:
            known[Way, self.shape] = [*self._in_batches(), self.one_by_one()]
        yield from known[Way, self.shape]

    def _in_batches(self) -> Iterator[Way]:
        each, device = Documents(self.boundaries, self.shape), self.boundaries.cu_seqlens.device
        lengths = tuple(each.lengths)
        padded, equal = (
            each.in_batches(grouping.batches(lengths, LARGEST, pads=pads), device) for pads in (True, False)
        )
        if padded.calls.size > sum(lengths):
            yield Way(BATCHES, padded, "documents in padded batches", {}, _sizes(padded))
        if len(equal.calls.shapes) < len(lengths):
            yield Way(BATCHES, equal, "documents of one length in batches", {}, _sizes(equal))

    def outputs(self, way: Way, states: torch.Tensor, filling: torch.Tensor | None = None) -> dict[int, torch.Tensor]:
        # The outputs with an entry for each token, ``[tokens, ...]``, by number. The hidden states are other ones, of
        # the documents end to end, ``[tokens, width]``. Batches are filled up with ``filling``, ``[size, width]``, or
        # with zeros.
        portions = iter(way.documents.calls.split(states, filling))

        def run(*args: Any, **kwargs: Any) -> Args:
            given: Any = kwargs if isinstance(self.place, str) else list(args)
            given[self.place] = next(portions)
            output = self.original(self.module, *(args if given is kwargs else given), **kwargs, **way.more)
            return output if isinstance(output, tuple) else (output,)

        columns = [*zip(*way.documents.of_each(run, self.args, self.kwargs))]
        found = enumerate(map(way.documents.tokens_of, columns[:1] if self.hands_on else columns))
        return {number: each for number, each in found if each is not None and each.is_floating_point()}


KEYWORDS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def keywords(boundaries: Boundaries, tokens: int) -> dict[str, Any]:
    # As kernels take them: ``seq_idx`` is int32 ``[1, tokens]``, ``cu_seq_lens_*`` int32 ``[documents + 1]``, and
    # ``max_length_*`` an int. Nothing is read from the device.
    cu, longest = boundaries.cu_seqlens, boundaries.max_seqlen
    number = torch.arange(len(cu) - 1, device=cu.device, dtype=torch.int32)
    seq_idx = number.repeat_interleave(cu.diff().long(), output_size=tokens)[None]
    return dict(zip(KEYWORDS, (seq_idx, cu, cu, longest, longest)))


def longest_padded(lengths: Sequence[int]) -> int:
    # ``lengths`` are those of a batch, the longest first.
    return next((length for length in lengths if length < lengths[0]), 0)


def _sizes(documents: Documents) -> tuple[int, ...]:
    batches = [[documents.lengths[at] for at in batch] for batch in documents.calls.batches]
    shared, padded = max(batch[0] for batch in batches if len(batch) > 1), max(map(longest_padded, batches))
    return min(shared, LONG_ENOUGH), min(padded, LONG_ENOUGH)
