"""Runs of one packed batch with other input embeddings in some documents, and of documents in rows of their own.

A change in documents whose embeddings are the same is a leak. A document alone shows code that reads the length of the
row.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from typing import Any, TypeVar

import numpy
import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch import computed_in
from .._types import Call, Model
from ..comparison import distance, projected, tensors
from ..documents.names import MEDIA
from ..errors import PackingNotIsolated
from ..upstream.calls import passed
from ..upstream.find_documents import packed_mask_of
from ..upstream.find_layers import ModelLayers
from ..upstream.find_models import models
from ..upstream.packed_mask import PackedMask
from ..upstream.step import MARK, ROLE
from .inputs import exchanges, slices_between
from .known_base import Elsewhere, KnownBase
from .runs import Rounded, Runs, eps, largest_part, picks, rounding, roundings, with_leaf
from .split_rows import WholeRows
from .state import State
from .unknown import unknown


class Unseen(Exception):
    """Other embeddings changed nothing, not even where they were exchanged, so that nothing is proven."""


T = TypeVar("T")

# Up to so many documents, each one is run alone. Of more, these are the first, the last, the shortest of two tokens or
# more, and the longest.
SHORT = 8


class BatchProof(Runs):
    """Runs of one packed batch in which the input embeddings of some tokens are exchanged."""

    def __init__(self, model: Model, original: Model, call: Call, mask: PackedMask, state: State) -> None:
        # ``model`` is the one that is run: a replica, or ``original`` itself. Each run begins with ``state``.
        slices = slices_between(mask.boundaries, mask.shape[1], None)
        self.split = model if isinstance(model, WholeRows) else None
        self.within = model if self.split is None else self.split.model
        super().__init__(model, models(self.within)[-1], call, slices, mask.shape)
        self.original, self.state, self.mask, self.device = original, state, mask, mask.device
        # what was given in the last run, embeddings or the base model's outputs, and which tokens of it were exchanged
        self.leaves: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.base: KnownBase | None = None  # its outputs are exchanged in the place of embeddings
        self.real = torch.tensor(True) if mask.real is None else mask.real.to(self.device) != 0
        # Whether an output has a prediction of the next token, for each token but the last; None before the first run.
        # A document alone has as many tokens as it has, which may be one more than the classes of a head.
        self.predicts: bool | None = False if self.word == "segment" else None
        # bool [batch, length]: whether the next token is of the same document
        numbers = torch.arange(len(mask.boundaries)).repeat_interleave(torch.tensor([*mask.boundaries.lengths]))
        self.goes_on = pad(numbers.view(mask.shape).diff() == 0, (0, 1))
        # The numbers of the segments in which the documents end that a head pools: those with real tokens.
        real = self.real.cpu().expand(self.shape)
        self.pooled = torch.tensor([leaf for leaf in self.tree.leaves if slices[leaf].of(real)[0]], dtype=torch.int64)
        self.pools = vars(original)[ROLE].pools
        self.dtype = computed_in(next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0)))

    @functools.cached_property
    def bound(self) -> float:
        # It is 0, or rounding in what is quantized and where tokens pick experts. It takes two runs to know, so it is
        # asked for only where something changed.
        sets = None, torch.ones(self.shape, dtype=torch.bool)
        runs = (functools.partial(self.run, self.call, exchanged) for exchanged in sets)
        rounds = hasattr(self.model, "hf_quantizer") or picks(runs, math.prod(self.shape))
        return rounding(self.dtype) if rounds else 0.0

    def require_apart(self, gradients: bool, repeat: int | None) -> None:
        before, lengths = self.outputs(None), torch.tensor(self.tree.lengths)
        seen = repeat is not None  # the first proof has seen them
        for chosen in _in_turn(exchanges(self.tree), repeat):
            exchanged = torch.tensor(chosen).repeat_interleave(lengths).view(self.shape).to(self.device)
            after = self.outputs(exchanged)
            moved = distance(after, before, ~exchanged)
            crossing = self.crossing(after, exchanged) if gradients else 0.0
            if moved > 0:
                noise = 2 * distance(self.outputs(None), before)  # of a nondeterministic kernel
                if moved > noise and moved > noise + self.bound:
                    raise PackingNotIsolated(self.leak(exchanged, "changed"))
            if crossing > 0 and crossing > self.bound:
                raise PackingNotIsolated(self.leak(exchanged, "sent them a gradient"))
            # A padding's embedding may be zero, and no head pools padding. A trainer may call padding a document.
            shown = exchanged & self.real
            seen = seen or not shown.any() or distance(after, before, shown) > 0
        if not seen:
            raise Unseen(
                f"{type(self.original).__name__} must be proven to keep documents apart, and other embeddings changed "
                "nothing, not even in their own documents: it takes its embeddings from where they cannot be seen. "
                "Call fa2patch.verify(model, batch=batch), then fa2patch.apply(model, prove=False)."
            )

    def require_as_alone(self, repeat: int | None) -> None:
        # Other documents' tokens show nothing of code that reads the length of the row: a mean, or noise that is scaled
        # by it (NEFTune). Nothing is known of pictures, whose parts are not known, and if something draws random
        # numbers that cannot be made constant, as a kernel with dropout does.
        leaves = [] if passed(self.call, MEDIA) else _in_turn(self._telling_leaves()[::-1], repeat)
        if not leaves:
            return
        here, again = (self.outputs(None, seed, constant_draws=True) for seed in (0, 1))
        if distance(again, here) > 0:
            return
        rows = here, self.outputs(None, constant_draws=True, rounded=True)
        far = max(self._from_alone(leaf, rows) for leaf in leaves)
        if far > 0:
            raise PackingNotIsolated(
                f"{self.suspect()}, and a document of this packed batch has other outputs than in a row of its own, by "
                f"{far:.1e} of the largest, also with the same random numbers: something reads the length of the row, "
                "as noise does that is scaled by it. Nothing was computed. Take it out, or train this model padded."
            )

    def _from_alone(self, leaf: int, rows: tuple[list[torch.Tensor], list[torch.Tensor]]) -> float:
        # Relative to the largest output. It is 0 if unknown, or if rounding moves the row as far, because kernels round
        # by the length of a row. ``rows`` are the outputs of the batch, and those with other rounding.
        call, labels = dict(self.call), self.call.get("labels")
        if labels is not None and tuple(labels.shape[:2]) != self.shape:  # one for each document
            del call["labels"]
        try:
            own = self.alone(leaf, call)
            alone = type(self)(self.model, self.original, own, self.mask_of(own), self.state)
            alone.predicts = self.predicts
            if self.base is not None:
                alone.base = self.base.alone(self.path(leaf), own["input_ids"], alone.mask)
            expected = alone.outputs(None, constant_draws=True)
        except Elsewhere:
            raise
        except Exception:  # code that cannot compute this document, or not without its labels
            return 0.0
        path = self.path(leaf)
        inside, off = ([torch.cat([place.of(values) for place in path])[None] for values in each] for each in rows)
        # at least one rounding of a number itself: a head, or few tokens, may show none
        far, rounding = _apart(expected, inside), roundings(self.dtype) * _apart(off, inside).clamp(min=eps(self.dtype))
        # the mean, because a token that gets another expert by rounding is as far as can be, and few do
        return float(far.max()) if far.mean() > rounding.mean() or far.max() > 2 * rounding.max() else 0.0

    def mask_of(self, call: Call) -> PackedMask:
        mask = packed_mask_of(call, vars(self.original)[MARK])
        assert mask is not None, "its length was stated"
        return mask

    def _telling_leaves(self) -> list[int]:
        real = self.real.cpu().expand(self.shape)
        whole = [leaf for leaf in self.tree.leaves if all(place.of(real).all() for place in self.path(leaf))]
        if len(whole) <= SHORT:
            return whole
        lengths = {leaf: sum(place.length for place in self.path(leaf)) for leaf in whole}
        by_length = sorted(whole, key=lambda leaf: lengths[leaf])
        shortest = next((leaf for leaf in by_length if lengths[leaf] > 1), by_length[0])
        return list(dict.fromkeys((whole[0], whole[-1], shortest, by_length[-1])))

    def outputs(
        self, exchanged: torch.Tensor | None, seed: int = 0, constant_draws: bool = False, rounded: bool = False
    ) -> list[torch.Tensor]:
        # Per token, ``[batch, length, numbers]``: the base model's outputs, and projections of the model's. Runs with
        # one seed draw the same random numbers, or constants, as far as they can be.
        found: list[torch.Tensor] = []
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        handle = self.inner.register_forward_hook(lambda *given: found.extend(self._of_tokens(self._whole(given[-1]))))
        try:
            with contextlib.ExitStack() as modes:
                for mode in [_ConstantDraws] * constant_draws + [Rounded] * rounded:
                    modes.enter_context(mode())
                output = self.run(self.call, exchanged)
        finally:
            handle.remove()
        found += [] if self.within is self.inner else map(projected, self._of_tokens(output))
        self.predicts = bool(self.predicts)
        return found

    def run(self, call: Call, exchanged: torch.Tensor | None = None) -> Any:
        self.state.put_back()
        if isinstance(call.get("position_ids"), torch.Tensor):
            call = {**call, "position_ids": call["position_ids"].clone()}  # ERNIE-M adds to them in place
        around = contextlib.nullcontext() if self.base is None else self.base.in_its_place(exchanged)
        with around:  # before hooks, which may mix tokens
            output, leaf = with_leaf(self.model, self.inner, call, exchanged, self.shape, before_hooks=True)
        given = self.base.leaves if self.base is not None else [] if leaf is None else [leaf]
        self.leaves = [(each, exchanged) for each in given]
        return output if self.split is None else vars(output)

    def _whole(self, output: Any) -> Any:
        # If an engine splits rows, a module inside returns those of this process's part.
        if self.split is None:
            return output
        found = filter(torch.Tensor.is_floating_point, tensors(output))
        return [self.split.whole(value) for value in found if self.split.has_tokens(value)]

    def _of_tokens(self, output: Any) -> list[torch.Tensor]:
        # What the output holds for each token, for each but the last (predictions of the next one), or for its
        # document, ``[batch, length, numbers]``.
        found = []
        for value in filter(torch.Tensor.is_floating_point, tensors(output)):
            if value.shape[:2] == self.shape and not (self.pools and value.dim() == 2):
                found.append(value.reshape(*self.shape, -1))
            elif value.shape[:2] == (self.shape[0], self.shape[1] - 1) and self.predicts is not False:
                self.predicts = True
                each = pad(value.reshape(*value.shape[:2], -1), (0, 0, 0, 1))
                found.append(torch.where(self.goes_on[..., None].to(value.device), each, 0.0))
            elif value.dim() and len(value) == len(self.pooled):
                lengths = torch.tensor(self.tree.lengths, device=value.device)
                flat = value.flatten(1)
                each = flat.new_zeros(len(lengths), flat.shape[1]).index_copy(0, self.pooled.to(value.device), flat)
                found.append(each.repeat_interleave(lengths, 0).reshape(*self.shape, -1))
        return found

    def crossing(self, outputs: list[torch.Tensor], exchanged: torch.Tensor) -> float:
        # The largest gradient from the outputs of other tokens to what was exchanged, relative to the largest of all.
        # Without leaves, the caller finds that nothing was exchanged either.
        found = self.gradients_to(outputs, [leaf for leaf, _ in self.leaves], ~exchanged) if self.leaves else []
        parts = [(each, hidden) for each, (_, hidden) in zip(found, self.leaves) if hidden is not None]
        return max((largest_part(each[:, : hidden.shape[1]], hidden) for each, hidden in parts), default=0.0)

    def suspect(self) -> str:
        known = unknown(ModelLayers(self.original)) or "nothing by its class"
        return f"{type(self.original).__name__} holds what fa2patch does not know, {known}"

    def leak(self, exchanged: torch.Tensor, how: str) -> str:
        self.base, where = None, "in which module could not be seen"
        unchanged = [at for at, place in enumerate(self.slices) if not exchanged[place.row, place.start]]
        for at in unchanged[:9]:
            found = self.first_leak(at, self.call, exchanged, self.bound, patched=True)
            if found is not None:
                name, cls, meaning = found
                where = f"first in {name or 'the base model itself'} ({cls}): {meaning}"
                break
        batch, some, others = "batch", "documents", "other documents"
        if self.word == "segment":
            batch, some, others = "batch of such segments", "segments and what continues them", "other segments"
        return (
            f"{self.suspect()}, so this packed {batch} was run with other tokens in some {some}, and {others} {how}; "
            f"{where}. Nothing was computed. Take that module out, let it look at one token at a time, or train this "
            "model padded."
        )


class _ConstantDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, what draws from a range or a distribution gets one of its values, for every element the same."""

    # These draw from 0 to 1, or with these as mean and deviation, if they are not told otherwise.
    DRAW = ("uniform_", "normal_", "rand", "rand_like", "randn", "randn_like")

    # So noise of one size is one number, and not another in every run.
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name == "bernoulli_":
            return output.fill_(1.0)  # a dropout keeps everything
        if name not in self.DRAW:
            return output  # others that draw are known by two runs that differ
        given: list[float] = list(args[1:3]) if name in ("uniform_", "normal_") else []
        least, most = (*given, *(0.0, 1.0)[len(given) :])
        return output.fill_(least + 0.75 * (most - least))


def _in_turn(all_of_them: list[T], repeat: int | None) -> list[T]:
    # all in a first proof, and one of them in each repeat, another each time
    return all_of_them if repeat is None or not all_of_them else [all_of_them[repeat % len(all_of_them)]]


def _apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> torch.Tensor:
    # Of each token, relative to the outputs of all; infinite where only one of both is finite.
    far = [torch.zeros(1)]
    for one, other in zip(found, expected):
        if one.shape == other.shape:
            same = (one == other) | (one.isnan() & other.isnan())
            size = torch.where(other.isfinite(), other.float(), 0.0).square().mean().sqrt().clamp(min=1e-30)
            off = torch.where(same, 0.0, one.float() - other.float()).square().mean(-1).sqrt() / size
            far.append(off.flatten().nan_to_num(float("inf")).detach().cpu())
    return torch.stack(torch.broadcast_tensors(*far)).amax(0)  # type: ignore[no-untyped-call]
