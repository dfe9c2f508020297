"""The first module of a model in which two runs differ, for the tokens of one document."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable

import torch

from .._types import Args, Call, Model
from ..upstream import inspecting
from ..upstream.find_layers import attention_layers
from ..upstream.find_mixers import mixers
from ..upstream.find_models import models
from ..upstream.positions import position_embeddings
from .whole_rows import WholeRows

PROJECTIONS = 4
"""The number of random projections that are kept of each token's vector. A change of any component changes them."""


@dataclass
class _Seen:
    """One call of a module: fingerprints of the watched tokens in its inputs and outputs."""

    name: str
    into: list[torch.Tensor] = field(default_factory=list)
    out: list[torch.Tensor] = field(default_factory=list)


class Watch:
    """Records fingerprints of the inputs and outputs of a model's modules, for some tokens of a row.

    Args:
        inner: a Transformers model. Modules are named as in it.
        shape: ``(batch, length)`` of the call that is watched.
        row: the row of the watched tokens.
        start: the first watched token in the row.
        stop: the index behind the last watched token.
        split: gives whole rows, if rows are split over processes. Modules then see this process's part of them.
    """

    def __init__(
        self,
        inner: Model,
        shape: tuple[int, int],
        row: int,
        start: int,
        stop: int,
        split: WholeRows | None = None,
    ) -> None:
        self.inner, self.row, self.tokens, self.split = inner, row, slice(start, stop), split
        self.shape = shape if split is None else (shape[0], -(-shape[1] // split.part.of))
        self.calls: list[_Seen] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        """Record the calls of all modules inside this context."""
        handles = []
        for name, module in self.inner.named_modules():
            if inspecting.is_scripted(module):  # the module around it is named
                continue
            opened: list[_Seen] = []
            handles.append(module.register_forward_pre_hook(self._into(name, opened), with_kwargs=True))
            handles.append(module.register_forward_hook(self._out(opened)))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _into(self, name: str, opened: list[_Seen]) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Args, kwargs: Call) -> None:
            # cache_position counts along the row, so a document alone never has the same
            given = [value for key, value in kwargs.items() if "mask" not in key and key != "cache_position"]
            opened.append(_Seen(name, self._prints([args, given])))

        return hook

    def _out(self, opened: list[_Seen]) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Args, output: Any) -> None:
            call = opened.pop()
            call.out = self._prints(output)
            self.calls.append(call)

        return hook

    def _prints(self, values: Any) -> list[torch.Tensor]:
        if isinstance(values, torch.Tensor):
            if hasattr(values, "to_local"):  # a DTensor inside a tensor-parallel layer: this process has a part of it
                values = values.to_local()
            own = self._of_tokens(values)
            return [] if own is None else [_fingerprint(own)]
        if isinstance(values, dict):
            values = list(values.values())
        if isinstance(values, (list, tuple)):
            return [found for value in values for found in self._prints(value)]
        return []

    def _of_tokens(self, values: torch.Tensor) -> torch.Tensor | None:
        """The watched tokens' part of a tensor, ``[tokens, features]``; None if the tensor has no values per token."""
        batch, length = self.shape
        if values.dim() == 1 and batch == 1:
            values = values[None]
        if values.dim() < 2:
            return None
        if values.shape[0] == batch * length and values.shape[:2] != self.shape:
            values = values.reshape(batch, length, -1)
        if values.shape[0] not in (1, batch):
            return None
        axis = next((axis for axis in range(1, values.dim()) if values.shape[axis] == length), None)
        if axis is None and length < values.shape[-1] <= length + 16 and values.dim() == 3:
            axis = 2  # a convolution pads its input by its kernel's size and cuts its output later
        if axis is None:
            return None
        own = values.detach()[self.row if values.shape[0] == batch else 0].movedim(axis - 1, 0)
        own = (own if self.split is None else self.split.gathered(own, 0))[self.tokens]
        return own.reshape(own.shape[0], -1)


def _fingerprint(values: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(values.shape[1])
    directions = torch.randn(values.shape[1], PROJECTIONS, generator=generator, dtype=torch.float64)
    exact = values.to(torch.float64)
    return torch.cat([exact @ directions.to(values.device), exact.norm(dim=1, keepdim=True)], dim=1).cpu()


def first_difference(one: Watch, other: Watch, bound: float) -> str | None:
    """The name of the first module whose output differs between two runs although its input is the same.

    Modules are compared in the order in which their calls ended, so an inner module comes before an outer one. A module
    that is called more often in one run is passed over: inside a mixer it gets one document at a time.

    Args:
        one: the fingerprints of one run.
        other: those of the other run.
        bound: the largest difference that counts as the same, relative to a vector's norm.

    Returns:
        The name. If every module that differs also has a different input, the first module that differs. None if no
        module differs.
    """
    times = [Counter(call.name for call in watch.calls) for watch in (one, other)]
    calls: dict[tuple[str, int], list[_Seen]] = {}
    for watch in (one, other):
        seen: Counter[str] = Counter()
        for call in watch.calls:
            seen[call.name] += 1
            calls.setdefault((call.name, seen[call.name]), []).append(call)
    pairs = [pair for (name, _), pair in calls.items() if times[0][name] == times[1][name]]
    changed = [pair for pair in pairs if _differ(pair[0].out, pair[1].out, bound)]
    for mine, theirs in changed:
        if not _differ(mine.into, theirs.into, bound):
            return mine.name
    return changed[0][0].name if changed else None


def _differ(ones: list[torch.Tensor], others: list[torch.Tensor], bound: float) -> bool:
    return any(
        one.shape == other.shape and bool(((one - other).abs() > bound * one[:, -1:].abs()).any())
        for one, other in zip(ones, others)
    )


def meaning(inner: Model, name: str, patched: bool, tree: bool = False) -> str:
    """The likely reason why a module lets documents see each other, as a text for an error.

    Args:
        inner: the Transformers model.
        name: the module's name in it.
        patched: whether the model is patched.
        tree: whether the batch has segments with parents.
    """
    module: Any = inner.get_submodule(name)
    decoder = models(inner)[-1]
    cls, own = type(module).__name__, "path" if tree else "document"
    if any(module is layer.module for layer in attention_layers(decoder)) or "attention" in cls.lower():
        if tree:
            return "its attention does not follow segment_parents; its kernel is wrong, or something has replaced it"
        after = "; it was patched, and something has replaced its attention since" if patched else ""
        return f"attention computed without boundaries{after}"
    carrying = mixers(module) if name else {}
    if carrying:
        found = next(iter(carrying.values())).replace(" (by its name)", "")
        carried = "along the row, not along each path" if tree else "from document to document"
        return f"{found} carries state {carried}: this is a hybrid model"
    if "rotary" in cls.lower():
        return f"rotary positions scaled by the row's length, not the {own}'s"
    if any(module is embedding for embedding in position_embeddings(decoder)) or "position" in cls.lower():
        return f"positions counted from the mask, or along the row: they do not restart with a {own}"
    if tree:
        return "what it returns for a segment does not come from its path alone"
    return "what it returns for one document depends on another"
