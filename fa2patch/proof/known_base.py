"""A base model that is known, whose outputs take its place while a proof runs what is around it.

Such a base model keeps documents apart by construction. If only a forward or a head around it is unknown, such as a
fused loss, it is computed once, and its outputs are exchanged in the place of input embeddings.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any, Callable

import torch

from .._types import Model
from ..upstream.find_layers import ModelLayers
from ..upstream.find_models import models, stacks_of
from ..upstream.forward import recognise
from ..upstream.other_code import calls_of
from ..upstream.packed_mask import PackedMask
from ..upstream.step import MARK, ROLE, Step
from .inputs import RowSlice
from .runs import others
from .unknown import unknown

Change = Callable[[torch.Tensor], torch.Tensor]  # of values [batch, length, numbers]


class Elsewhere(Exception):
    """The base model is not called once with the tokens and documents of the batch, so the whole model is proven."""


def has_known_base(model: Model) -> bool:
    if stacks_of(model) is not None or vars(model)[ROLE].pools:  # a base model is given the tokens that are pooled
        return False
    base = models(model)[-1]
    return base is not model and not unknown(ModelLayers(base))


class KnownBase:
    """The outputs of a base model for one batch."""

    def __init__(self, base: Any, ids: Any, mask: PackedMask, output: Any = None) -> None:
        # ``ids``: int64 ``[batch, length]``. Without ``output``, the first run computes the base model.
        self.base, self.ids, self.mask, self.output = base, ids, mask, output
        self.leaves: list[torch.Tensor] = []  # [batch, length, numbers], what was given in the place of the last run
        self._calls, self._forward = calls_of(base), base.forward

    @contextlib.contextmanager
    def in_its_place(self, exchanged: torch.Tensor | None) -> Iterator[None]:
        # ``exchanged``: tokens that get other outputs, bool ``[batch, length]``.
        held, times = vars(self.base), 0
        before, self.leaves = held.get("forward"), []

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal times
            times += 1
            self._require_the_batch(args, kwargs)
            if self.output is None:
                self.output = self._changed(self._forward(*args, **kwargs), torch.Tensor.detach)
            return self._changed(self.output, lambda values: self._leaf(values, exchanged))

        held["forward"] = forward
        try:
            yield
        finally:
            if before is None:
                del held["forward"]
            else:
                held["forward"] = before
        if times != 1 or not self.leaves:
            raise Elsewhere

    def _require_the_batch(self, args: Any, kwargs: Any) -> None:
        # As a patched forward would, this takes what an outer model has attached.
        call = self._calls.named(args, {**kwargs}) or {}
        given: Any = call.get("input_ids")
        if not isinstance(given, torch.Tensor) or call.get("inputs_embeds") is not None:
            raise Elsewhere
        step = Step(self.base, vars(self.base)[MARK], vars(self.base)[ROLE], self._calls, args, call)
        recognise(step)
        if step.mask is None or not torch.equal(given, self.ids):
            raise Elsewhere
        if _documents(step.mask) != _documents(self.mask):
            raise Elsewhere

    def _leaf(self, values: torch.Tensor, exchanged: torch.Tensor | None) -> torch.Tensor:
        if exchanged is not None:
            values = others(values, exchanged)
        self.leaves.append(values.detach().requires_grad_(torch.is_grad_enabled()))
        return self.leaves[-1] * 1  # a head may change hidden states in place

    def _changed(self, output: Any, change: Change) -> Any:
        shape, made = tuple(self.ids.shape), dict[int, torch.Tensor]()

        def changed(value: Any) -> Any:
            if type(value) in (tuple, list):
                return type(value)(map(changed, value))
            if isinstance(value, dict):
                return type(value)(**{name: changed(each) for name, each in value.items()})
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            if id(value) not in made:  # the last of the hidden states stands there twice
                if value.dim() > 2 and value.shape[:2] == shape:
                    made[id(value)] = change(value)
                elif value.dim() == 2 and len(value) == math.prod(shape):  # what a router says of tokens
                    made[id(value)] = change(value.view(*shape, -1)).flatten(0, 1)
            return made.get(id(value), value)

        return changed(output)

    def alone(self, path: Iterable[RowSlice], ids: Any, mask: PackedMask) -> KnownBase:
        """The same of one document, which is given by the parts of rows that it consists of."""
        places = [*path]
        output = self._changed(self.output, lambda values: torch.cat([place.of(values) for place in places])[None])
        return KnownBase(self.base, ids, mask, output)


def _documents(mask: PackedMask) -> tuple[Any, ...]:
    found = mask.boundaries
    return [*found.lengths], None if found.tree is None else [*found.tree.parents]
