"""The trial of a way to give a mixer several documents in one call: does the mixer keep them apart?

A trial costs about as much as three forwards and backwards of its batch. The documents of its calls are first tokens of
one document, so one forward and backward of this document alone says what is right for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import accumulate, cycle
from typing import Callable, NamedTuple

import torch

from ..._torch import computed_in, is_no_verdict, outside_the_forward, without_gradients
from ...comparison import distance, gradients
from ...documents.boundaries import Boundaries
from ...kernels.picks import DOCUMENTS, WHOLE_ROW
from .mixer_calls import LONG_ENOUGH, Mixing, Way, keywords, longest_padded

# The largest difference, relative to the largest absolute value; 3e-2 in half precision. Leaks are compared exactly.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}


class Excerpt(NamedTuple):
    """A document of a trial: the first tokens of the longest one."""

    length: int
    kept: int  # how many must not depend on other tokens of the call; 0 if the document only stands beside


class Trial(NamedTuple):
    """One call that a way is tried with."""

    way: Way
    alone: Way  # the longest excerpt in a call of its own
    short: Way | None  # the shortest excerpt in a call of its own; None if all have one length
    at_short: slice  # which tokens of the call must be computed as in ``short``
    places: torch.Tensor  # the place of each token of the call in the longest excerpt, int64 ``[tokens]``
    whole: torch.Tensor  # which tokens belong to excerpts that are kept, bool ``[tokens]``
    kept: torch.Tensor  # which tokens are kept, bool ``[tokens]``
    # Which tokens must be computed as in ``alone``, or in ``short``, bool ``[tokens]``. In a whole row, a mixer may
    # look at later tokens, and other excerpts have other ones.
    compared: torch.Tensor


def verdict(mixing: Mixing, way: Way) -> tuple[bool, str]:
    # Outputs and gradients must agree with those of a document alone, within TOLERANCE. A document must send no
    # gradient into others of its call and into padding, and its output must not change by a bit when these change. If a
    # call is padded, the same is asked of the first part of a document and of the tokens behind it.
    assert mixing.hidden is not None
    try:
        with outside_the_forward(mixing.hidden.device), _without_traces(mixing.module) as written:
            found = (_difference(mixing, trial, mixing.hidden) for trial in _trials(mixing, way))
            why = next(filter(None, found), "") or written()
    except Exception as error:  # unknown keywords or a kernel that does not build
        if is_no_verdict(error):
            raise
        why = f"fails: {type(error).__name__}: {error}".splitlines()[0]
    return not why, why


def _trials(mixing: Mixing, way: Way) -> Iterator[Trial]:
    lengths = mixing.one_by_one().documents.lengths
    if way.portions is WHOLE_ROW:
        yield _trial(mixing, way, lengths.index(max(lengths)), _excerpts_of_row(mixing.boundaries.lengths))
        return
    # Below are the longest call and the longest padded document, up to which the verdict holds (Way.sizes).
    calls = {batch[0]: [lengths[at] for at in batch] for batch in way.documents.calls.batches if len(batch) > 1}
    longest = max(calls, key=lambda at: lengths[at])
    most = max(calls, key=lambda at: longest_padded(calls[at]))
    for at in dict.fromkeys([longest, most] if longest_padded(calls[most]) else [longest]):
        yield _trial(mixing, way, at, _excerpts_of_batch(calls[at]))


def _excerpts_of_batch(lengths: Sequence[int]) -> list[Excerpt]:
    # The one that stands beside is between two that are kept, so that nothing may come from the one before or behind.
    longest, second, shortest = lengths[0], longest_padded(lengths), lengths[-1]
    if not second:
        longest = min(longest, LONG_ENOUGH)
        return [Excerpt(longest, longest), Excerpt(longest, 0), Excerpt(longest, longest)]
    beyond = max(0, second - LONG_ENOUGH)  # cut off, and as much of all of them, which keeps the padding
    longest, second, shortest = longest - beyond, second - beyond, max(1, shortest - beyond)
    # Two first parts of the longest one are kept. Mixers compute in chunks of a power of two: one part ends inside a
    # chunk, and the other where one ends.
    odd, power = (longest - 2) // 2 * 2 + 1, 1 << (longest - 1).bit_length() - 1
    return [Excerpt(longest, odd), Excerpt(shortest, 0), Excerpt(second, second), Excerpt(longest, power)]


def _excerpts_of_row(lengths: Sequence[int]) -> list[Excerpt]:
    # Two others are between those that are kept, because a convolution may reach over a short one. The first is not
    # kept: it is right even if the mixer ignores where documents start.
    *others, longest = sorted(min(length, LONG_ENOUGH) for length in lengths if length)
    beside, excerpts = cycle([*others[1::-1], *others[2:]] or [longest]), list[Excerpt]()
    while len(excerpts) < 4 or sum(length for length, _ in excerpts) < min(sum(lengths), LONG_ENOUGH):
        excerpts.append(Excerpt(longest, longest) if len(excerpts) % 3 == 2 else Excerpt(next(beside), 0))
    return [*excerpts[:1], Excerpt(0, 0), *excerpts[1:]] if 0 in lengths else excerpts


def _trial(mixing: Mixing, way: Way, number: int, excerpts: Sequence[Excerpt]) -> Trial:
    each, lengths = mixing.one_by_one().documents, [length for length, _ in excerpts]
    longest, shortest, ends = max(lengths), min(filter(None, lengths)), [0, *accumulate(lengths)]
    device = mixing.boundaries.cu_seqlens.device
    tokens = sum(each.lengths[:number]) + torch.arange(longest, device=device)
    counts = torch.tensor(lengths)
    length, kept = (torch.tensor(column).repeat_interleave(counts).to(device) for column in zip(*excerpts))
    places = torch.cat([torch.arange(count) for count in lengths]).to(device)
    at = max(range(len(excerpts)), key=lambda at: (excerpts[at] == (shortest, 0), at))
    compared = (kept > 0) | (length == longest)
    compared[ends[at] : ends[at + 1]] = True
    if way.portions is WHOLE_ROW:
        row = Boundaries(torch.tensor(ends, dtype=torch.int32, device=device), longest)
        more, whole = keywords(row, ends[-1]), each.made_of(tokens[places], [ends[-1]])
        tried = way._replace(documents=whole, more={name: more[name] for name in way.more})
    else:
        tried = way._replace(documents=each.made_of(tokens[places], lengths, [range(len(lengths))]))
    return Trial(
        way=tried,
        alone=Way(DOCUMENTS, each.made_of(tokens, [longest])),
        short=Way(DOCUMENTS, each.made_of(tokens[:shortest], [shortest])) if shortest < longest else None,
        at_short=slice(ends[at], ends[at + 1]),
        places=places,
        whole=kept > 0,
        kept=places < kept,
        compared=compared,
    )


def _difference(mixing: Mixing, trial: Trial, hidden: torch.Tensor) -> str:
    """What a mixer does in a call that it must not; empty if nothing."""
    document = trial.alone.documents.end_to_end(hidden).detach().clone().requires_grad_()
    states = document.index_select(0, trial.places)
    filling = states.new_zeros(trial.way.documents.calls.size, *states.shape[1:]).requires_grad_()
    found, alone = mixing.outputs(trial.way, states, filling), mixing.outputs(trial.alone, document)
    outputs, expected = [*found.values()], [each.index_select(0, trial.places) for each in alone.values()]
    right = _with_short(mixing, trial, document, dict(zip(alone, expected)))
    near = max(TOLERANCE.get(dtype, 3e-2) for dtype in (states.dtype, computed_in(states)))
    if found.keys() != alone.keys() or not distance(outputs, right, trial.compared) <= near:
        return "computes something else than on the documents one by one"
    # Tensors in the place of parameters (DTensor) may communicate when they are compared, and hooks reach others.
    own = (parameter for parameter in mixing.module.parameters() if type(parameter) is torch.nn.Parameter)
    parameters = [each for each in own if each.requires_grad and not each._backward_hooks]
    to_states, to_filling, *reached = gradients(outputs, (states, filling, document, *parameters), trial.kept)
    if to_states[~trial.whole].any():
        return "sends gradients from one document into another"
    if to_states[~trial.kept].any():
        return "looks at later tokens of a document"
    if to_filling.any():
        return "sends gradients into what fills a batch up"
    if _changes(mixing, trial, states, outputs):
        return "changes a document when the others change"
    wanted = gradients(expected, (document, *parameters), trial.kept)
    # A gradient that is tiny beside the others is rounding, and is not compared with itself.
    largest = max(float(gradient.abs().max()) for gradient in wanted if gradient.numel())
    if not distance(reached, wanted, least=near * largest) <= near:
        return "has other gradients than on the documents one by one"
    return ""


@without_gradients()
def _with_short(
    mixing: Mixing, trial: Trial, document: torch.Tensor, expected: dict[int, torch.Tensor]
) -> list[torch.Tensor]:
    # What a mixer makes of a call's length, whatever fills it up, is seen best where most is filled up. So the outputs
    # of the shortest excerpt are expected as in a call of its own.
    if trial.short is None:
        return [*expected.values()]
    # where it is one token, outputs that are not for each token seem to be, so the others' numbers count
    short = mixing.outputs(trial.short, document[: trial.short.documents.calls.size])
    right = {number: each.clone() for number, each in expected.items()}
    for number, each in right.items():
        each[trial.at_short] = short.get(number, torch.nan)
    return [*right.values()]


@without_gradients()
def _changes(mixing: Mixing, trial: Trial, states: torch.Tensor, found: Sequence[torch.Tensor]) -> bool:
    others = torch.where(trial.kept[:, None], states, states.flip(0) * 2 + 1)
    filling = states.new_ones(trial.way.documents.calls.size, *states.shape[1:])
    after = mixing.outputs(trial.way, others, filling).values()
    return not all(torch.equal(one[trial.kept], other[trial.kept]) for one, other in zip(after, found))


@contextlib.contextmanager
def _without_traces(module: torch.nn.Module) -> Iterator[Callable[[], str]]:
    # Dropout draws for each value, so it says nothing about documents, and is off. Statistics that a module keeps
    # depend on how many documents it gets in a call. What is yielded says whether the module has written to its
    # buffers, which are copies.
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
