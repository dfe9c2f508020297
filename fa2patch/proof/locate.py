"""The first module of a model in which two runs differ, for the tokens of one document."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, Callable, NamedTuple

import torch

from .._types import Args, Call, Model
from ..comparison import projected, tensors
from ..upstream import inspecting
from ..upstream.find_layers import ModelLayers, mixers_among
from ..upstream.find_models import named_modules
from ..upstream.packed_mask import PackedMask
from ..upstream.positions import position_embeddings
from .inputs import RowSlice
from .split_rows import WholeRows


class Watched(NamedTuple):
    """A run of a model on a batch ``(batch, length)``, and the tokens that are watched in it."""

    run: Callable[[], Any]
    shape: tuple[int, ...]
    place: RowSlice
    split: WholeRows | None = None  # if rows are split over processes, modules see this process's part

    def prints(self, values: Any) -> list[torch.Tensor]:
        # Fingerprints of the watched tokens, with each vector's norm at the end, of the tensors with values per token.
        found = []
        for value in tensors(values):
            # a DTensor inside a tensor-parallel layer: this process has a part of it
            rows = self._rows((value.to_local() if hasattr(value, "to_local") else value).detach())
            if rows is not None:
                rows = rows if self.split is None else self.split.gathered(rows, 0)
                own = rows[self.place.start : self.place.stop]
                own = own.reshape(len(own), -1).to(torch.float64)
                found.append(torch.cat([projected(own), own.norm(dim=1, keepdim=True)], dim=1).cpu())
        return found

    def _rows(self, values: torch.Tensor) -> torch.Tensor | None:
        # The watched row, ``[length, ...]``; None if the tensor has no values per token.
        batch, length = self.shape
        length = length if self.split is None else -(-length // self.split.part.of)
        if values.dim() == 1 and batch == 1:
            values = values[None]
        if values.dim() < 2:
            return None
        if values.shape[0] == batch * length and values.shape[:2] != (batch, length):
            values = values.reshape(batch, length, -1)
        if values.shape[0] not in (1, batch):
            return None
        axis = next((axis for axis in range(1, values.dim()) if values.shape[axis] == length), None)
        if axis is None and length < values.shape[-1] <= length + 16 and values.dim() == 3:
            axis = 2  # a convolution pads its input by its kernel's size and cuts its output later
        return None if axis is None else values[self.place.row if len(values) == batch else 0].movedim(axis - 1, 0)


class _ModuleCall(NamedTuple):
    name: str
    into: list[torch.Tensor]  # fingerprints of the watched tokens in the inputs
    out: list[torch.Tensor]  # and in the outputs


def _calls(inner: Model, watched: Watched) -> list[_ModuleCall]:
    # In the order in which they ended, so an inner module comes before an outer one.
    ended: list[_ModuleCall] = []
    handles = []

    def watch(name: str, module: torch.nn.Module) -> None:
        begun: list[list[torch.Tensor]] = []

        def before(module: torch.nn.Module, args: Args, kwargs: Call) -> None:
            given = [value for value in args if not isinstance(value, PackedMask)]
            # cache_position counts along the row, so a document alone never has the same
            given += [value for key, value in kwargs.items() if "mask" not in key and key != "cache_position"]
            begun.append(watched.prints(given))

        def after(module: torch.nn.Module, args: Args, output: Any) -> None:
            ended.append(_ModuleCall(name, begun.pop(), watched.prints(output)))

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))

    try:
        for name, module in inner.named_modules():
            if not inspecting.is_scripted(module):  # the module around it is named
                watch(name, module)
        watched.run()
    finally:
        for handle in handles:
            handle.remove()
    return ended


def first_difference(
    inner: Model, one: Watched, other: Watched, bound: float, patched: bool, tree: bool
) -> tuple[str, str, str] | None:
    # The module's name, its class, and what it means, likely.
    # A module that is called more often in one run is passed over: inside a mixer it gets one document at a time.
    # ``bound`` is relative to a vector's norm. If every module that differs also has a different input, it is the first
    # one that differs.
    calls, others = (_calls(inner, watched) for watched in (one, other))
    times = [Counter(call.name for call in run) for run in (calls, others)]
    of_other: dict[str, list[_ModuleCall]] = defaultdict(list)
    for call in reversed(others):
        of_other[call.name].append(call)
    pairs = [(call, of_other[call.name].pop()) for call in calls if times[0][call.name] == times[1][call.name]]
    changed = [pair for pair in pairs if _differ(pair[0].out, pair[1].out, bound)]
    if not changed:
        return None
    own = (mine.name for mine, theirs in changed if not _differ(mine.into, theirs.into, bound))
    name = next(own, changed[0][0].name)
    return name, type(inner.get_submodule(name)).__name__, _likely_reason(inner, name, patched, tree)


def _differ(ones: list[torch.Tensor], others: list[torch.Tensor], bound: float) -> bool:
    return any(
        one.shape == other.shape and bool(((one - other).abs() > bound * one[:, -1:].abs()).any())
        for one, other in zip(ones, others)
    )


def _likely_reason(inner: Model, name: str, patched: bool, tree: bool) -> str:
    module: Any = inner.get_submodule(name)
    layers = ModelLayers(inner)
    cls, own = type(module).__name__, "path" if tree else "document"
    if any(module is layer.module for layer in layers.attention) or "attention" in cls.lower():
        if tree:
            return "its attention does not follow segment_parents; its kernel is wrong, or something has replaced it"
        after = "; it was patched, and something has replaced its attention since" if patched else ""
        return f"attention computed without boundaries{after}"
    carrying = mixers_among(named_modules(module), layers.attention) if name else {}
    if carrying:
        found = next(iter(carrying.values())).replace(" (by its name)", "")
        carried = "along the row, not along each path" if tree else "from document to document"
        return f"{found} carries state {carried}: this is a hybrid model"
    if "rotary" in cls.lower():
        return f"rotary positions scaled by the row's length, not the {own}'s"
    if any(module is embedding for embedding in position_embeddings(layers.text_modules)) or "position" in cls.lower():
        return f"positions counted from the mask, or along the row: they do not restart with a {own}"
    if tree:
        return "what it returns for a segment does not come from its path alone"
    return "what it returns for one document depends on another"
