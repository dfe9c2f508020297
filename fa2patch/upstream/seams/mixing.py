"""One call of a mixer with a packed batch, and the ways in which the mixer may be given several documents at once.

A mixer that looks at later tokens (ConvBERT) is refused for shared prompts: a prompt would see what continues it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from ..._torch import without_gradients
from ..._types import Args, Call, Function
from ...documents.boundaries import Boundaries
from ...errors import BadParents
from ...kernels.picks import BATCHES, WHOLE_ROW, Portions
from .. import apart, near_lengths
from . import mixer_trial, whole_row


class Way(NamedTuple):
    """A way in which a mixer gets several documents in one call.

    Attributes:
        name: what the mixer gets, for the reason why it does not.
        portions: the way as ``Patch.layers`` shows it.
        documents: the documents in their calls.
        more: further keywords for the mixer.
    """

    name: str
    portions: Portions
    documents: apart.Documents
    more: Call


@dataclass
class Mixing:
    """One call of a mixer with a packed batch.

    Attributes:
        run: the mixer's own forward.
        module: the mixer.
        args: its arguments.
        kwargs: its arguments by name.
        place: the place or name of the hidden states among the arguments; None if they are not known.
        hidden: the hidden states ``[batch, length, width]``; None if they are not known.
        boundaries: the boundaries of the documents that this process holds.
        shape: ``(batch, length)`` of the batch.
        hands_on: whether the second output is the next layer's state, which is left out.
    """

    run: Function
    module: torch.nn.Module
    args: Args
    kwargs: Call
    place: Any
    hidden: torch.Tensor | None
    boundaries: Boundaries
    shape: tuple[int, int]
    hands_on: bool

    def ways(self, device: torch.device, lengths: Sequence[str]) -> Iterator[Way]:
        """Yield the ways that save calls, the best first. The device is read only if the first one is not taken.

        Args:
            device: the device of the hidden states.
            lengths: the names of the collator's lengths that the mixer accepts.
        """
        if whole_row.may_be(lengths, device, self.boundaries):
            more = whole_row.keywords(lengths, self.boundaries, self.shape[0] * self.shape[1])
            yield Way("a whole row", WHOLE_ROW, apart.Documents.whole(self.shape), more)
        padded, equal = (near_lengths.documents(self.boundaries, self.shape, device, pads) for pads in (True, False))
        if padded.size > sum(padded.lengths):
            yield Way("documents in padded batches", BATCHES, padded, {})
        if len(equal.calls) < len(equal):
            yield Way("documents of one length in batches", BATCHES, equal, {})

    def one_by_one(self) -> apart.Documents:
        """The documents, each in a call of its own."""
        return apart.Documents(self.boundaries, self.shape)

    def computed(self, documents: apart.Documents, more: Call) -> Any:
        """Compute the documents in their calls, with further keywords, and join the outputs."""
        outputs = documents.of_each(functools.partial(self.run, self.module, **more), self.args, self.kwargs)
        _require_no_look_back(self.module, documents, self.hidden, outputs)
        return documents.join([output[0] for output in outputs] if self.hands_on else outputs)

    def trial(self, way: Way) -> tuple[bool, str]:
        """Try a way on the hidden states. Returns whether it is right, and the reason if it is not."""
        assert self.hidden is not None
        each = self.one_by_one()
        return mixer_trial.Trial(
            self.module,
            functools.partial(self._outputs, way.documents, way.more),
            functools.partial(self._outputs, each, {}),
            each.end_to_end(self.hidden),
            each.lengths,
            way.documents.batches if way.portions is BATCHES else [range(len(each))],
            way.documents.size,
        ).verdict()

    def _outputs(
        self, documents: apart.Documents, more: Call, states: torch.Tensor, filling: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """The outputs ``[tokens, ...]`` for each token, with these hidden states in the place of the call's."""
        portions = iter(documents.portions(states, filling))

        def run(*args: Any, **kwargs: Any) -> Args:
            given: Any = kwargs if isinstance(self.place, str) else list(args)
            given[self.place] = next(portions)
            output = self.run(self.module, *(args if given is kwargs else given), **kwargs, **more)
            return output if isinstance(output, tuple) else (output,)

        columns = [*zip(*documents.of_each(run, self.args, self.kwargs))]
        found = [documents.tokens_of(column) for column in (columns[:1] if self.hands_on else columns)]
        return [states for states in found if states is not None and states.is_floating_point()]


NEAR = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference by dtype, relative to the largest value; 3e-2 in half precision."""

_LOOK_BACK: WeakSet[torch.nn.Module] = WeakSet()
"""Mixers that have been checked."""


@without_gradients()
def _require_no_look_back(
    module: torch.nn.Module, documents: apart.Documents, hidden: torch.Tensor | None, outputs: Sequence[Any]
) -> None:
    """Raise :class:`BadParents` if a shared segment's outputs depend on what follows it.

    Args:
        module: the mixer.
        documents: the documents that it was run on.
        hidden: its hidden states ``[batch, length, width]``, or None if they are not known.
        outputs: its output for each call.
    """
    found = documents.shared()
    if found is None or module in _LOOK_BACK:
        return
    one, tokens, other = found
    if hidden is not None:
        paths = torch.split(documents.end_to_end(hidden), documents.lengths)
        behind, beside = (paths[at][tokens.stop :] for at in (one, other))
        if torch.equal(behind, beside):
            return  # two equal paths show nothing
    states = documents.tokens_of([output[0] if isinstance(output, tuple) else output for output in outputs])
    if states is None:
        return  # joining the outputs is an error
    paths = torch.split(states, documents.lengths)
    first, second = paths[one][tokens], paths[other][tokens]
    if (first - second).abs().max() > NEAR.get(first.dtype, 3e-2) * first.abs().max():
        raise BadParents(
            f"segment_parents: {type(module).__name__} looks at later tokens, so a prompt would be another one before "
            "each of its completions. Give this model every sequence as a document of its own."
        )
    if hidden is not None:
        _LOOK_BACK.add(module)
