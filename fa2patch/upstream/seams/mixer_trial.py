"""Try on this machine whether a module computes documents in one call as it computes them one by one.

The call has a whole row, or documents as a batch. The first packed row of each kind of call is tried, and each later
one with longer documents than were tried before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Callable

import numpy as np
import torch

from ..._torch import computed_in, is_no_verdict, outside_the_forward, without_gradients
from ..apart import Documents

Computes = Callable[[torch.Tensor, "torch.Tensor | None"], "list[torch.Tensor]"]
"""Computes the documents end to end ``[tokens, width]``, with what fills batches up, and returns the outputs that have
an entry for each token, ``[tokens, ...]``."""

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference by dtype, relative to the largest absolute value; 3e-2 in half precision. Leaks are exact."""

LOOKED_AT = 8
"""The documents whose gradients are compared, at most. A parameter's gradient is a sum over documents, and in half
precision a long sum is less exact than the comparison."""

LONG_ENOUGH = 1024
"""Tokens of a document or a call from which on longer ones need no trial of their own. Mixers compute in chunks of up
to 256 tokens, and some are wrong only beyond a chunk, where tokens see later ones (Mamba 2 in 4.45)."""


def sizes(documents: Documents) -> tuple[int, ...]:
    """The sizes that a verdict holds up to: of the longest call, and of the longest document with padding."""
    return tuple(min(size, LONG_ENOUGH) for size in documents.sizes)


def is_possible(module: torch.nn.Module) -> bool:
    """Whether a trial can be made. DeepSpeed's ZeRO-3 would take a trial's backward for the training's."""
    return not any(hasattr(parameter, "ds_id") for parameter in module.parameters())


@dataclass
class Trial:
    """What is tried of a module: hidden states, and two functions that compute them.

    Attributes:
        module: the module.
        together: computes several documents in one call.
        one_by_one: computes every document by itself.
        states: the hidden states of the documents end to end ``[tokens, width]``.
        lengths: the documents' lengths.
        batches: the numbers of the documents in each call of ``together``.
        size: the tokens of all calls of ``together``, with padding.
    """

    module: torch.nn.Module
    together: Computes
    one_by_one: Computes
    states: torch.Tensor
    lengths: Sequence[int]
    batches: Sequence[Sequence[int]]
    size: int

    def verdict(self) -> tuple[bool, str]:
        """Whether the module keeps documents apart that it gets in one call, and the reason if it does not.

        Outputs and gradients must agree within :data:`TOLERANCE`. A document must send no gradient into others of its
        call and into padding, and its output must not change by a bit when these change. If calls are padded, the same
        is asked of the first part of a document, too, and of the tokens behind it. Dropout is off during the trial.

        Raises:
            Exception: an error that says nothing about the module (:func:`~fa2patch._torch.is_no_verdict`).
        """
        kept = outside_the_forward(self.states.device), _without_dropout(self.module), _buffers_kept(self.module)
        try:
            with kept[0], kept[1], kept[2] as written:
                why = self._difference() or written()
        except Exception as error:  # unknown keywords or a kernel that does not build
            if is_no_verdict(error):
                raise
            why = f"fails: {type(error).__name__}: {error}".splitlines()[0]
        return not why, why

    def _difference(self) -> str:
        near = max(TOLERANCE.get(dtype, 3e-2) for dtype in (self.states.dtype, computed_in(self.states)))
        given = self.states.detach().clone().requires_grad_()
        filling = given.new_zeros(self.size, *given.shape[1:]).requires_grad_()
        found, expected = self.together(given, filling), self.one_by_one(given, None)
        if len(found) != len(expected) or not all(_close(*pair, near) for pair in zip(found, expected)):
            return "computes something else than on the documents one by one"
        looked_at = _looked_at(self.batches, self.lengths)
        documents = _tokens_of(looked_at, self.lengths, given.device)
        kept = [documents]
        if self.size > len(given):  # what stands behind a token must not matter where padding does
            kept.insert(0, _tokens_of(looked_at, self.lengths, given.device, parts=True))
        for inside in kept:
            why = _reached(found, inside, documents, given, filling) or self._changed(found, inside, given, filling)
            if why:
                return why
        wanted = (given, *_parameters(self.module))
        gradients, right = (_gradients(outputs, documents, wanted) for outputs in (found, expected))
        if not _all_close(gradients, right, near):
            return "has other gradients than on the documents one by one"
        return ""

    def _changed(
        self, found: Sequence[torch.Tensor], inside: torch.Tensor, given: torch.Tensor, filling: torch.Tensor
    ) -> str:
        """Compute again with other states outside of some tokens, and say whether these tokens' outputs changed."""
        with without_gradients():
            others = torch.where(inside[:, None], given, given.flip(0) * 2 + 1)
            among_others = self.together(others, torch.ones_like(filling))
        same = all(torch.equal(after[inside], before[inside]) for after, before in zip(among_others, found))
        return "" if same else "changes a document when the others change"


def _reached(
    found: Sequence[torch.Tensor],
    inside: torch.Tensor,
    documents: torch.Tensor,
    given: torch.Tensor,
    filling: torch.Tensor,
) -> str:
    """Say what else the outputs of some tokens send gradients to.

    Args:
        found: the outputs for each token.
        inside: the tokens, bool ``[tokens]``.
        documents: the tokens of their documents, bool ``[tokens]``.
        given, filling: the hidden states, and what filled batches up.
    """
    to_states, to_filling = _gradients(found, inside, (given, filling), again=True)
    if to_states[~documents].any():
        return "sends gradients from one document into another"
    if to_states[~inside].any():
        return "looks at later tokens of a document"
    return "sends gradients into what fills a batch up" if to_filling.any() else ""


def _looked_at(batches: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[int]:
    """The documents whose gradients are compared: of every second one of a call, the longest and the most padded."""
    padding = {at: lengths[batch[0]] - lengths[at] for batch in batches for at in batch[1::2]}
    longest, most_padded = (sorted(padding, key=lambda at: -of[at]) for of in (lengths, padding))
    return [*dict.fromkeys([*longest[: LOOKED_AT // 2], *most_padded])][:LOOKED_AT]


def _tokens_of(
    chosen: Sequence[int], lengths: Sequence[int], device: torch.device, parts: bool = False
) -> torch.Tensor:
    """Which tokens belong to some of the documents, bool ``[tokens]``.

    Args:
        chosen: the numbers of the documents.
        lengths: the lengths of all documents.
        device: the device of the result.
        parts: whether only a first part of each document counts. The parts end at different places of a mixer's chunks.
    """
    flags, starts = np.zeros(sum(lengths), bool), [0, *accumulate(lengths)]
    for at in chosen:
        behind = 1 + 5 * at % max(1, lengths[at] // 2) if parts and lengths[at] > 1 else 0
        flags[starts[at] : starts[at + 1] - behind] = True
    return torch.from_numpy(flags).to(device)


def _parameters(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters that are trained, without those that a trial's gradient could reach others through.

    Tensors in the place of parameters (DTensor) may communicate with other processes when they are compared.
    """
    for parameter in module.parameters():
        if type(parameter) is torch.nn.Parameter and parameter.requires_grad and not parameter._backward_hooks:
            yield parameter


def _gradients(
    outputs: Sequence[torch.Tensor], inside: torch.Tensor, wanted: Sequence[torch.Tensor], again: bool = False
) -> list[torch.Tensor]:
    """The gradients of the squared outputs of some tokens, of which others may be taken ``again``. None gives zeros."""
    loss = torch.stack([output[inside].float().square().sum() for output in outputs]).sum()
    found = torch.autograd.grad(loss, tuple(wanted), allow_unused=True, retain_graph=again)
    return [torch.zeros_like(one) if gradient is None else gradient for one, gradient in zip(wanted, found)]


def _all_close(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor], near: float) -> bool:
    """Whether gradients agree. One that is almost zero among the others, as rounding leaves it, may be anything."""
    largest = max((float(gradient.abs().max()) for gradient in right if gradient.numel()), default=0.0)
    return all(_close(*pair, near, near * largest) for pair in zip(found, right))


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float, least: float = 0.0) -> bool:
    """Whether tensors agree, relative to the largest expected value or to ``least``, if that is larger."""
    if found.shape != expected.shape:
        return False
    if not found.numel():
        return True
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=least))


@contextlib.contextmanager
def _without_dropout(module: torch.nn.Module) -> Iterator[None]:
    """Switch torch's dropout off inside a module. It draws for each value, so it says nothing about documents."""
    off = [inner for inner in module.modules() if isinstance(inner, torch.nn.modules.dropout._DropoutNd)]
    before = [inner.training for inner in off]
    try:
        for inner in off:
            inner.training = False
        yield
    finally:
        for inner, training in zip(off, before):
            inner.training = training


@contextlib.contextmanager
def _buffers_kept(module: torch.nn.Module) -> Iterator[Callable[[], str]]:
    """Yield a function that says if a module has written to its buffers, and write the values before back.

    Statistics that a module keeps depend on how many documents it gets in a call.
    """
    before = [(buffer, buffer._version, buffer.detach().clone()) for buffer in module.buffers()]

    def written() -> str:
        is_same = [buffer is kept for buffer, (kept, _, _) in zip(module.buffers(), before)]
        same = len(is_same) == len(before) and all(is_same)
        changed = not same or any(buffer._version != version for buffer, version, _ in before)
        return "writes to its buffers, which would depend on the documents of a call" if changed else ""

    try:
        yield written
    finally:
        with torch.no_grad():
            for buffer, version, value in before:
                if buffer._version != version:
                    buffer.copy_(value)
