"""One call of a mixer with a packed batch: what the mixer may get of it at once, and a trial of that on this machine.

The first packed row of each kind of call is tried, and each later one with longer documents than were tried before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Callable, NamedTuple

import torch

from ..._torch import computed_in, is_no_verdict, outside_the_forward, without_gradients
from ..._types import Args, Call, Function
from ...comparison import distance, gradients
from ...documents.boundaries import Boundaries
from ...kernels import grouping
from ...kernels.picks import BATCHES, DOCUMENTS, WHOLE_ROW, Portions
from ..splitting import Documents

NO_KERNELS = ("cpu", "meta")
"""Devices for which no package has a kernel that takes lengths."""

LARGEST = 16384
"""Tokens of a batch, at most. More would not be faster, and a mixer in pure torch needs memory for all of them."""

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference by dtype, relative to the largest absolute value; 3e-2 in half precision. Leaks are exact."""

LOOKED_AT = 8
"""The documents whose gradients are compared, at most. A parameter's gradient is a sum over documents, and in half
precision a long sum is less exact than the comparison."""

LONG_ENOUGH = 1024
"""Tokens of a document or a call from which on longer ones need no trial of their own. Mixers compute in chunks of up
to 256 tokens, and some are wrong only beyond a chunk, where tokens see later ones (Mamba 2 in 4.45)."""


class Way(NamedTuple):
    """What a mixer gets in its calls.

    Attributes:
        portions: what it is, as ``Patch.layers`` shows it.
        documents: the documents in their calls.
        name: what it is, in the reason why the mixer does not get it.
        more: further keywords for the mixer.
        sizes: the lengths in tokens that a trial's verdict holds up to: of the longest call with several documents, and
            of the longest document with padding.
    """

    portions: Portions
    documents: Documents
    name: str = ""
    more: Call = {}
    sizes: tuple[int, ...] = ()


@dataclass
class Mixing:
    """One call of a mixer with a packed batch.

    Attributes:
        original: the mixer's own forward.
        module: the mixer.
        args: its arguments.
        kwargs: its arguments by name.
        boundaries: the boundaries of the documents that this process holds.
        shape: ``(batch, length)`` of the batch.
        hands_on: whether the second output is the next layer's state, which is left out.
        place: the place or name of the hidden states among the arguments; None if they are not known.
        hidden: the hidden states ``[batch, length, width]``; None if they are not known.
    """

    original: Function
    module: torch.nn.Module
    args: Args
    kwargs: Call
    boundaries: Boundaries
    shape: tuple[int, int]
    hands_on: bool
    place: Any = None
    hidden: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for place, value in chain(enumerate(self.args), self.kwargs.items()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[:-1] == self.shape:
                self.place, self.hidden = place, value
                return

    def one_by_one(self) -> Way:
        """Each document in a call of its own."""
        return Way(DOCUMENTS, Documents(self.boundaries, self.shape))

    def ways(self, lengths: Sequence[str]) -> Iterator[Way]:
        """Yield the ways, the best first, the documents one by one last. They are made once in a forward.

        The mixer accepts the collator's ``lengths`` of these names. The device is read only if the first way is not
        taken.
        """
        known, cu = self.boundaries.made, self.boundaries.cu_seqlens
        several = len(self.boundaries) > 1 and self.boundaries.parents is None
        if lengths and several and cu.device.type not in NO_KERNELS:
            tokens = self.shape[0] * self.shape[1]
            if Way not in known:
                whole = Documents(Boundaries(torch.tensor([0, tokens]), tokens, None, (tokens,)), self.shape)
                known[Way] = whole, _keywords(self.boundaries, tokens)
            whole, more = known[Way]
            more = {name: more[name] for name in lengths}
            yield Way(WHOLE_ROW, whole, "a whole row", more, (min(tokens, LONG_ENOUGH), 0))
        if (Way, self.shape) not in known:
            known[Way, self.shape] = [*self._in_batches(), self.one_by_one()]
        yield from known[Way, self.shape]

    def _in_batches(self) -> Iterator[Way]:
        each = Documents(self.boundaries, self.shape)
        lengths, device = tuple(each.lengths), self.boundaries.cu_seqlens.device
        padded, equal = (
            each.in_batches(grouping.batches(lengths, LARGEST, pads=pads), device) for pads in (True, False)
        )
        if padded.calls.size > sum(lengths):
            yield Way(BATCHES, padded, "documents in padded batches", {}, _sizes(padded))
        if len(equal.calls.shapes) < len(lengths):
            yield Way(BATCHES, equal, "documents of one length in batches", {}, _sizes(equal))

    def outputs(self, way: Way, states: torch.Tensor, filling: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The outputs that have an entry for each token ``[tokens, ...]``, computed from other hidden states.

        These are of the documents end to end, ``[tokens, width]``. Batches are filled up with ``filling``, ``[size,
        width]``, or with zeros.
        """
        portions = iter(way.documents.calls.split(states, filling))

        def run(*args: Any, **kwargs: Any) -> Args:
            given: Any = kwargs if isinstance(self.place, str) else list(args)
            given[self.place] = next(portions)
            output = self.original(self.module, *(args if given is kwargs else given), **kwargs, **way.more)
            return output if isinstance(output, tuple) else (output,)

        columns = [*zip(*way.documents.of_each(run, self.args, self.kwargs))]
        found = [way.documents.tokens_of(column) for column in (columns[:1] if self.hands_on else columns)]
        return [states for states in found if states is not None and states.is_floating_point()]


KEYWORDS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def _keywords(boundaries: Boundaries, tokens: int) -> dict[str, Any]:
    """The collator's lengths for a row, as the kernels take them. Nothing is read.

    ``seq_idx`` is int32 ``[1, tokens]``, ``cu_seq_lens_*`` int32 ``[documents + 1]``, ``max_length_*`` an int.
    """
    cu, longest = boundaries.cu_seqlens, boundaries.max_seqlen
    number = torch.arange(len(cu) - 1, device=cu.device, dtype=torch.int32)
    seq_idx = number.repeat_interleave(cu.diff().long(), output_size=tokens)[None]
    return dict(zip(KEYWORDS, (seq_idx, cu, cu, longest, longest)))


def _sizes(documents: Documents) -> tuple[int, ...]:
    """The lengths that a verdict about batches holds up to (:class:`Way`)."""
    lengths, batches = documents.lengths, documents.calls.batches
    shared = (lengths[batch[0]] for batch in batches if len(batch) > 1)
    padded = (lengths[at] for batch in batches for at in batch if lengths[at] < lengths[batch[0]])
    return min(max(shared, default=0), LONG_ENOUGH), min(max(padded, default=0), LONG_ENOUGH)


def verdict(mixing: Mixing, way: Way) -> tuple[bool, str]:
    """Whether a mixer keeps documents apart that it gets in one call, and the reason if it does not.

    Outputs and gradients must agree within :data:`TOLERANCE`. A document must send no gradient into others of its call
    and into padding, and its output must not change by a bit when these change. If calls are padded, the same is asked
    of the first part of a document, too, and of the tokens behind it. Dropout is off during the trial.

    Raises:
        Exception: an error that is no verdict (:func:`~fa2patch._torch.is_no_verdict`).
    """
    assert mixing.hidden is not None
    try:
        with outside_the_forward(mixing.hidden.device), _without_traces(mixing.module) as written:
            why = _difference(mixing, way, mixing.hidden) or written()
    except Exception as error:  # unknown keywords or a kernel that does not build
        if is_no_verdict(error):
            raise
        why = f"fails: {type(error).__name__}: {error}".splitlines()[0]
    return not why, why


def _difference(mixing: Mixing, way: Way, hidden: torch.Tensor) -> str:
    one_by_one = mixing.one_by_one()
    states = one_by_one.documents.end_to_end(hidden).detach().clone().requires_grad_()
    filling = states.new_zeros(way.documents.calls.size, *states.shape[1:]).requires_grad_()
    found, expected = mixing.outputs(way, states, filling), mixing.outputs(one_by_one, states)
    near = max(TOLERANCE.get(dtype, 3e-2) for dtype in (states.dtype, computed_in(states)))
    if not distance(found, expected) <= near:
        return "computes something else than on the documents one by one"
    lengths = one_by_one.documents.lengths
    looked_at = _looked_at(way, lengths)
    documents = _tokens_of(looked_at, lengths).to(states.device)
    kept = [documents]
    if len(filling) > len(states):  # what stands behind a token must not matter where padding does
        kept.insert(0, _tokens_of(looked_at, lengths, parts=True).to(states.device))
    for inside in kept:
        to_states, to_filling = gradients(found, (states, filling), inside, again=True)
        if to_states[~documents].any():
            return "sends gradients from one document into another"
        if to_states[~inside].any():
            return "looks at later tokens of a document"
        if to_filling.any():
            return "sends gradients into what fills a batch up"
        with without_gradients():
            others = torch.where(inside[:, None], states, states.flip(0) * 2 + 1)
            among_others = mixing.outputs(way, others, torch.ones_like(filling))
        if not all(torch.equal(after[inside], before[inside]) for after, before in zip(among_others, found)):
            return "changes a document when the others change"
    return _other_gradients(mixing.module, found, expected, states, documents, near)


def _other_gradients(
    module: torch.nn.Module,
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    states: torch.Tensor,
    documents: torch.Tensor,
    near: float,
) -> str:
    # tensors in the place of parameters (DTensor) may communicate when they are compared, and hooks reach others
    own = (parameter for parameter in module.parameters() if type(parameter) is torch.nn.Parameter)
    wanted = (states, *(each for each in own if each.requires_grad and not each._backward_hooks))
    reached, right = (gradients(outputs, wanted, documents) for outputs in (found, expected))
    # a gradient that is tiny beside the others is rounding, and is not compared with itself
    largest = max(float(gradient.abs().max()) for gradient in right if gradient.numel())
    if not distance(reached, right, least=near * largest) <= near:
        return "has other gradients than on the documents one by one"
    return ""


def _looked_at(way: Way, lengths: Sequence[int]) -> list[int]:
    """The documents whose gradients are compared: of every second one of a call, the longest and the most padded."""
    batches = way.documents.calls.batches if way.portions is BATCHES else [range(len(lengths))]
    padding = {at: lengths[batch[0]] - lengths[at] for batch in batches for at in batch[1::2]}
    longest, most_padded = (sorted(padding, key=lambda at: -of[at]) for of in (lengths, padding))
    return [*dict.fromkeys([*longest[: LOOKED_AT // 2], *most_padded])][:LOOKED_AT]


def _tokens_of(chosen: Sequence[int], lengths: Sequence[int], parts: bool = False) -> torch.Tensor:
    """Which tokens belong to the chosen documents, bool ``[tokens]``.

    If ``parts``, only a first part of each of them counts. The parts end at different places of a mixer's chunks.
    """
    flags, starts = torch.zeros(sum(lengths), dtype=torch.bool), [0, *accumulate(lengths)]
    for at in chosen:
        behind = 1 + 5 * at % max(1, lengths[at] // 2) if parts and lengths[at] > 1 else 0
        flags[starts[at] : starts[at + 1] - behind] = True
    return flags


@contextlib.contextmanager
def _without_traces(module: torch.nn.Module) -> Iterator[Callable[[], str]]:
    """Let a module compute without dropout and with copies of its buffers.

    Dropout draws for each value, so it says nothing about documents. Statistics that a module keeps depend on how many
    documents it gets in a call: what is yielded says whether the module has written to its buffers.
    """
    kind = torch.nn.modules.dropout._DropoutNd
    dropouts = [inner for inner in module.modules() if isinstance(inner, kind) and inner.training]
    tables = [(inner._buffers, dict(inner._buffers)) for inner in module.modules()]
    for own, before in tables:
        own.update({name: buffer.detach().clone() for name, buffer in before.items() if buffer is not None})
    copies = [(own, dict(own)) for own, _ in tables]

    def written() -> str:
        pairs = ((own.get(name), buffer) for own, copied in copies for name, buffer in copied.items())
        same = all(now is buffer and (buffer is None or not buffer._version) for now, buffer in pairs)
        return "" if same else "writes to its buffers, which would depend on the documents of a call"

    try:
        for inner in dropouts:
            inner.training = False
        yield written
    finally:
        for inner in dropouts:
            inner.training = True
        for own, before in tables:
            own.clear()
            own.update(before)
