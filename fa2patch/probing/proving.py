"""The proof, on a model's first packed batch, that unknown modules keep its documents apart.

``apply`` knows the modules of torch and Transformers. It cannot see whether other modules (remote code, subclasses,
wrappers around a layer, a forward set on an object) mix tokens along the row. The proof runs the batch again with other
input embeddings in every second document. A change in the documents between them is a leak. Without a change this takes
three forwards without gradients.

In a tree of segments this is done at each depth (:mod:`.exchanges`), so that a leak between siblings is seen too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .._types import Call, Model
from ..documents.trees import Tree
from ..errors import PackingNotIsolated
from ..trying import computed_in, without_gradients
from ..upstream.find_layers import attention_layers
from ..upstream.find_models import models
from ..upstream.packed_batch import packed_mask
from ..upstream.packed_mask import PackedMask
from ..upstream.step import Patched
from . import locate
from .batches import example, is_sharded
from .exchanges import exchanges
from .probe import ROUNDING, is_mixture, left_as_it_was

__all__ = ["example_of", "is_sharded", "prove", "structure", "unknown"]

KNOWN = ("torch", "transformers", "fa2patch")
"""Packages whose modules need no proof, because ``apply`` has checked what they do with a row."""


def structure(model: Model) -> int:
    """A number that changes when a module is added or removed, changes its class, or gets a forward of its own.

    It is computed for every packed batch, so it must be cheap.
    """
    seen = [model]
    replaced = []
    for module in seen:  # the list grows during the loop
        held = module.__dict__
        if "forward" in held:
            replaced.append((id(module), id(held["forward"])))
        if held["_modules"]:
            seen.extend(child for child in held["_modules"].values() if child is not None)
    return hash((tuple(map(id, seen)), tuple(map(id, map(type, seen))), tuple(replaced)))


def unknown(model: Model) -> str:
    """Name and class of the first module that is unknown; empty if there is none.

    A module is unknown if it, or its own forward, is not in :data:`KNOWN`. So is an attention layer that computes
    attention by itself: such models do not claim flash attention, and nothing says that only attention mixes tokens.
    """
    for name, module in model.named_modules():
        held = module.__dict__.get("forward")
        for made in (type(module), getattr(held, "__func__", held)):
            home = getattr(made, "__module__", None) or ""
            if made is not None and home.partition(".")[0] not in KNOWN:
                return f"{name or 'the model itself'} ({home}.{getattr(made, '__qualname__', type(made).__name__)})"
    own = (layer for layer in attention_layers(models(model)[-1]) if layer.seam == "formula")
    return next(
        (f"{layer.name} ({type(layer.module).__name__}, which computes attention by itself)" for layer in own), ""
    )


def prove(model: Model, call: Call, mask: PackedMask) -> None:
    """Prove that the documents of a packed batch do not see each other. The model is left as it was.

    Args:
        model: the model that was called.
        call: its arguments by name, with labels, because a forward of other code may require them.
        mask: the packed mask.

    Raises:
        PackingNotIsolated: a document changes if other documents do. The error names the module.
    """
    run = _Run(model, call, mask)
    with left_as_it_was(model), without_gradients():
        before = run.outputs(None)
        for exchanged in run.exchanges():
            after = run.outputs(exchanged)
            moved = _moved(before, after, ~exchanged)
            if moved > run.bound:
                again = run.outputs(None)  # measures the noise of a nondeterministic kernel
                if moved > 2 * _moved(before, again, torch.ones_like(exchanged)) + run.bound:
                    raise PackingNotIsolated(run.finding(exchanged))


def example_of(model: Model, patch: Patched, tree: bool) -> tuple[Call, PackedMask]:
    """The arguments and the packed mask of an example batch, for use while a graph is captured.

    Args:
        model: the Transformers model.
        patch: its patch.
        tree: whether two segments of the batch continue the same one. Another one continues none in any case.
    """
    call = example(model.get_input_embeddings().weight.device, model, tree)
    mask = packed_mask(call, patch)
    assert mask is not None, "the example holds several documents"
    return call, mask


class _Run:
    """Runs of one packed batch in which the input embeddings of some tokens are exchanged."""

    def __init__(self, model: Model, call: Call, mask: PackedMask) -> None:
        self.model, self.call, self.shape, self.device = model, call, mask.shape, mask.device
        self.decoder = models(model)[-1]
        self.is_tree = mask.boundaries.tree is not None
        self.tree = mask.boundaries.tree or Tree(mask.boundaries.lengths, [-1] * len(mask.boundaries), mask.device)
        rounds = is_mixture(model) or hasattr(model, "hf_quantizer")
        weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
        dtype = computed_in(weight)
        self.bound = ROUNDING.get(dtype, 1e-2) if rounds else 0.0

    def exchanges(self) -> Iterator[torch.Tensor]:
        """The sets of tokens to exchange, bool ``[batch, length]``: see :mod:`.exchanges`."""
        lengths = torch.tensor(self.tree.lengths)
        for chosen in exchanges(self.tree):
            yield torch.tensor(chosen).repeat_interleave(lengths).view(self.shape).to(self.device)

    def outputs(self, exchanged: torch.Tensor | None) -> list[torch.Tensor]:
        """The outputs per token of the base model, and projections of the model's, each ``[batch, length, numbers]``.

        Args:
            exchanged: bool ``[batch, length]``, the tokens whose embeddings are exchanged; None for no token.
        """
        found: list[torch.Tensor] = []
        handle = self.decoder.register_forward_hook(lambda *given: found.extend(self._of_tokens(given[-1])))
        try:
            with self._exchanging(exchanged) as call:
                output = self.model(**call)
        finally:
            handle.remove()
        return found if self.model is self.decoder else [*found, *map(_projected, self._of_tokens(output))]

    @contextlib.contextmanager
    def _exchanging(self, exchanged: torch.Tensor | None) -> Iterator[Call]:
        """The call with other embeddings for some tokens: each vector is rolled by one and scaled by 1.25."""

        def other(embedded: torch.Tensor) -> torch.Tensor:
            if exchanged is None or embedded.shape[:2] != self.shape:
                return embedded
            return torch.where(exchanged[..., None].to(embedded.device), embedded.roll(1, -1) * 1.25, embedded)

        call = dict(self.call)
        if isinstance(call.get("position_ids"), torch.Tensor):
            call["position_ids"] = call["position_ids"].clone()  # ERNIE-M adds to them in place
        if call.get("inputs_embeds") is not None:
            call["inputs_embeds"] = other(call["inputs_embeds"])
        handle = self.decoder.get_input_embeddings().register_forward_hook(lambda *given: other(given[-1]))
        try:
            yield call
        finally:
            handle.remove()

    def _of_tokens(self, output: Any) -> list[torch.Tensor]:
        values = output.values() if hasattr(output, "values") else output if isinstance(output, tuple) else [output]
        return [
            value
            for value in values
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[:2] == self.shape
        ]

    def finding(self, exchanged: torch.Tensor) -> str:
        """The message of the error: what leaks, and in which module first."""
        name = self._first(exchanged)
        found = unknown(self.model)
        where = "in which module could not be seen"
        if name is not None:
            module = self.decoder.get_submodule(name)
            meaning = locate.meaning(self.decoder, name, patched=True, tree=self.is_tree)
            where = f"first in {name or 'the base model itself'} ({type(module).__name__}): {meaning}"
        batch, every_second, others = "batch", "document", "the documents between them"
        if self.is_tree:
            batch, every_second, others = "batch of such segments", "segment and what continues it", "other segments"
        return (
            f"{type(self.model).__name__} holds a module that fa2patch does not know, {found or 'none by its class'}, "
            f"so its first packed {batch} was run with other tokens in every second {every_second}, and {others} "
            f"changed; {where}. Nothing was computed. Take that module out, let it look at one token at a time, "
            "or train this model padded."
        )

    def _first(self, exchanged: torch.Tensor) -> str | None:
        """The name of the first module whose output changes for an unexchanged document although its input does not."""
        for number, length in enumerate(self.tree.lengths):
            row, start = divmod(self.tree.span(number)[0], self.shape[1])
            if not length or bool(exchanged[row, start]):
                continue
            one, other = (locate.Watch(self.decoder, self.shape, row, start, start + length) for _ in range(2))
            for watch, tokens in ((one, None), (other, exchanged)):
                with watch.watching(), self._exchanging(tokens) as call:
                    self.model(**call)
            name = locate.first_difference(one, other, self.bound)
            if name is not None or number > 8:
                return name
        return None


def _projected(values: torch.Tensor) -> torch.Tensor:
    """Four random projections of each token's vector, so that logits over the vocabulary need not be kept."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(values.shape[-1], 4, generator=generator).to(values)
    return values @ directions


def _moved(ones: list[torch.Tensor], others: list[torch.Tensor], tokens: torch.Tensor) -> float:
    """The largest change at some tokens, relative to the largest value."""
    moved = 0.0
    for one, other in zip(ones, others):
        scale = one.nan_to_num().abs().max().clamp(min=1e-30)
        same = (one == other) | (one.isnan() & other.isnan()) | ~tokens[..., None].to(one.device)
        change = torch.where(same, 0.0, (one - other).abs()).max() / scale
        moved = max(moved, float(change) if torch.isfinite(change) else float("inf"))
    return moved
