"""The proof of a packed batch of pairs: other tokens in some sources and targets must change nothing in other pairs.

:func:`verified` measures the same for ``fa2patch.verify``: a document of its result is a target, with its source.
"""

from __future__ import annotations

from typing import Any

import torch

from .._types import Args, Call, Model
from ..comparison import distance, tensors
from ..documents.boundaries import Boundaries
from ..documents.names import LABELS, OF_TARGETS, TOKENS
from ..errors import BadBatch
from ..upstream.find_models import embedding_in_use, models, stacks_of
from ..upstream.packed_mask import MASK, PackedMask
from ..upstream.pairs import SAYS, masks_of
from ..upstream.step import MARK
from .batch_proof import BatchProof
from .inputs import evenly, random_text, slices_between
from .result import Document, Verification
from .runs import left_as_it_was, near, one_document, others
from .state import State


class PairProof(BatchProof):
    """Runs in which the input embeddings of some pairs are exchanged, of the source and of the target."""

    def __init__(self, model: Model, original: Model, call: Call, mask: PackedMask, state: State) -> None:
        super().__init__(model, original, call, mask, state)
        stacks: Any = stacks_of(model)
        self.encoder, self.inner = stacks[0], models(stacks[1])[-1]
        self.targets = mask.boundaries
        self.sources, _ = masks_of(original, call)  # None for sounds and pictures, one for each target

    def run(self, call: Call, exchanged: torch.Tensor | None = None) -> Any:
        self.state.put_back()
        self.leaves = []
        chosen = None if exchanged is None else self._pairs(exchanged)
        of_sources, waiting = None, [_Awaited(self.inner, self.shape, self.targets, exchanged)]
        if self.sources is not None:
            found = self.sources.boundaries
            if chosen is not None:
                of_sources = chosen.repeat_interleave(torch.tensor(found.lengths)).view(self.sources.shape)
                of_sources = of_sources.to(self.device)
            waiting.insert(0, _Awaited(self.encoder, self.sources.shape, found, of_sources))
        if call.get("encoder_outputs") is not None:  # sources that were encoded before
            call = {**call, "encoder_outputs": self._encoded(call["encoder_outputs"], of_sources)}
            del waiting[:-1]

        def hook(module: torch.nn.Module, args: Args, output: torch.Tensor) -> torch.Tensor:
            # in some releases both stacks have one table, of which the encoder's calls come first
            each = next((each for each in waiting if each.takes(module, output.shape)), None)
            return output if each is None else self._leaf(output, each.exchanged_of(output.shape[1]))

        def of_encoder(module: torch.nn.Module, args: Args, output: Any) -> Any:
            rows = None if chosen is None else chosen[:, None].expand(output[0].shape[:2])
            return self._encoded(output, rows)

        handles = [table.register_forward_hook(hook, prepend=True) for table in {each.table for each in waiting}]
        if self.sources is None:
            handles.append(self.encoder.register_forward_hook(of_encoder))
        try:
            return self.model(**call)
        finally:
            for handle in handles:
                handle.remove()

    def _encoded(self, output: Any, exchanged: torch.Tensor | None) -> Any:
        states = self._leaf(output[0], exchanged)
        if isinstance(output, tuple):
            return (states, *output[1:])
        return type(output)(**{**output, next(iter(output)): states})

    def _pairs(self, exchanged: torch.Tensor) -> torch.Tensor:
        # bool [pairs], of tokens of the targets
        flat, ends = exchanged.flatten().cpu(), torch.tensor([0, *self.targets.lengths]).cumsum(0)
        return flat[ends[:-1].clamp(max=len(flat) - 1)]

    def _leaf(self, states: torch.Tensor, exchanged: torch.Tensor | None) -> torch.Tensor:
        if exchanged is not None:
            states = others(states, exchanged)
        if not torch.is_grad_enabled():
            return states
        leaf = states.detach().requires_grad_()
        self.leaves.append((leaf, exchanged))
        return leaf * 1

    def alone(self, at: int, call: Call) -> Call:
        own = {name: value for name, value in call.items() if not name.endswith((MASK, *SAYS))}
        names = [name for name in (*LABELS, *(OF_TARGETS + name for name in TOKENS)) if own.get(name) is not None]
        own |= self._stated(self.slices[at], own, names, OF_TARGETS)
        if self.sources is not None:
            place = slices_between(self.sources.boundaries, self.sources.shape[1], None)[at]
            return own | self._stated(place, own, [name for name in TOKENS if own.get(name) is not None], "")
        pairs = len(self.slices)
        return {
            name: value[at : at + 1] if isinstance(value, torch.Tensor) and len(value) == pairs else value
            for name, value in own.items()
        }

    def _stated(self, place: Any, call: Call, names: list[str], prefix: str) -> Call:
        rows = {name: call[name][place.row : place.row + 1, place.start : place.stop] for name in names}
        lengths = one_document(place.length, self.device)
        return {**rows, **{prefix + name: value for name, value in lengths.items()}}

    def mask_of(self, call: Call) -> PackedMask:
        _, targets = masks_of(self.original, call)
        assert targets is not None, "its length was stated"
        return targets

    def _of_tokens(self, output: Any) -> list[torch.Tensor]:
        # Logits or hidden states of the targets come first; those of the sources may have as many tokens.
        found = (each for each in tensors(output) if each.is_floating_point() and each.shape[:2] == self.shape)
        return [each.reshape(*self.shape, -1) for each in [*found][:1]]

    def document(self, at: int, before: list[torch.Tensor], asked: bool) -> Document:
        """What happens to a target if all other pairs are exchanged, and how far it is from what its pair is alone."""
        place = self.slices[at]
        if not asked:
            return Document(place.row, place.start, place.length)
        own = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
        own[place.row, place.start : place.stop] = True
        after = self.outputs(~own)
        moved, gradient = distance(after, before, own), self.crossing(after, ~own)
        with torch.no_grad():
            call = self.alone(at, self.call)
            alone = type(self)(self.model, self.original, call, self.mask_of(call), self.state).outputs(None)
        inside = [place.of(values)[None] for values in before]
        return Document(place.row, place.start, place.length, moved, None, gradient, distance(alone, inside))

    def leak(self, exchanged: torch.Tensor, how: str) -> str:
        return (
            f"{self.suspect()}, so this packed batch was run with other tokens in some sources and targets, and other "
            f"pairs {how}. Nothing was computed. Take that code out, let it look at one token at a time, or train this "
            "model padded."
        )


class _Awaited:
    """The embeddings of a row, which a stack makes at once, or of one document after another (Pegasus X up to 4.4x)."""

    def __init__(
        self, stack: Any, shape: tuple[int, ...], documents: Boundaries, exchanged: torch.Tensor | None
    ) -> None:
        self.table, self.shape, self._exchanged, self._at = embedding_in_use(stack), shape, exchanged, 0
        self._pieces = [*filter(None, documents.lengths)] if vars(stack)[MARK].facts.by_document else []

    def takes(self, table: torch.nn.Module, shape: torch.Size) -> bool:
        if table is not self.table or self._at == self.shape[1]:
            return False
        whole = not self._at and shape[:2] == self.shape
        return whole or (shape[0] == self.shape[0] == 1 and self._pieces[:1] == [shape[1]])

    def exchanged_of(self, length: int) -> torch.Tensor | None:
        self._pieces, self._at = self._pieces[1:], self._at + length
        return None if self._exchanged is None else self._exchanged[:, self._at - length : self._at]


# The lengths of the pairs that are verified without a batch
_SOURCES, _TARGETS = (9, 5, 12, 7), (6, 8, 3, 10)


def example_of_pairs(model: Any, device: torch.device) -> Call:
    stacks: Any = stacks_of(model)
    encoder, decoder = stacks
    if MARK not in vars(encoder):
        raise BadBatch(
            f"batch: expected one for this {type(model).__name__}, whose sources are no tokens: its sounds or "
            "pictures, packed labels and decoder_position_ids."
        )
    call = {}
    for name, stack, lengths in (("input_ids", encoder, _SOURCES), ("labels", decoder, _TARGETS)):
        call[name] = random_text(stack, sum(lengths), device)
    for prefix, lengths in (("", _SOURCES), (OF_TARGETS, _TARGETS)):
        call[f"{prefix}position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    return call


def verified(model: Any, batch: Call | None, most: int | None) -> Verification:
    # The model is patched, and is left as it was.
    device = next(model.parameters()).device
    given = example_of_pairs(model, device) if batch is None else batch
    call = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in given.items()}
    with left_as_it_was(model):
        _, targets = masks_of(model, call)
        if targets is None:
            raise BadBatch(
                "batch: expected packed pairs, position_ids and decoder_position_ids that restart, found none."
            )
        measured = PairProof(model, model, call, targets, State(model.modules()))
        before = [each.detach() for each in measured.outputs(None)]
        places = measured.slices
        chosen = evenly(len(places), most)
        documents = [measured.document(at, before, at in chosen) for at in range(len(places))]
        moved, far = measured.bound, near(measured.dtype)
        reason = ""
        for number, found in enumerate(documents, 1):
            if found.moved > moved or (found.gradient or 0.0) > moved:
                reason = f"other pairs reach target {number}: attention, positions or a bias see more than its own pair"
            elif (found.distance or 0.0) > far:
                reason = (
                    f"target {number} has other outputs than its pair alone: positions, a bias or shifted labels differ"
                )
            if reason:
                break
    return Verification(not reason, tuple(documents), None, None, reason, moved, far, True)
