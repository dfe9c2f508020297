"""A packed batch of more tokens than a budget, computed by its base model in passes of whole documents.

Each pass is a checkpoint: only its inputs and outputs are kept until its backward, which computes it once more. What is
around the base model, a head and a loss, gets the hidden states of all documents at once, so that nothing has to be
known of the loss.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from .._torch import autocast_uncached
from .._types import Call
from ..documents.boundaries import Boundaries
from ..documents.names import LENGTHS, MEDIA, PARENTS, stated
from ..documents.row_shape import PLAIN, RowShape
from ..documents.tensors import to_device
from ..errors import OverBudget
from ..packing.budget import PASSES, check_budget, check_policy
from ..packing.passes import Counts, cut_into_passes
from ..packing.ranks import agreed
from ..packing.units import Units
from . import attached, caches
from .find_models import is_sharded
from .forward import prepare, thread
from .packed_mask import PackedMask
from .step import Step
from .transformers_names import ENCODED, ENCODED_MASK

set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame  # torch 2.1 to 2.4 has no module of this name to import


@dataclass
class Budget:
    """How many tokens a base model computes at once, and what that led to."""

    max_tokens: int  # of a pass
    too_long: str = "error"  # or "alone": a document of more tokens is a pass of its own
    shapes: RowShape = PLAIN  # of passes, if they are not those of their documents
    counts: Counts | None = None  # what was computed with gradients; None if nobody asks
    warned: set[str] = field(default_factory=set)  # why batches were computed at once all the same
    _whole: str = ""

    def __post_init__(self) -> None:
        check_budget(self.max_tokens)
        check_policy(self.too_long, PASSES)

    def _warn(self, why: str) -> None:
        if why not in self.warned:
            self.warned.add(why)
            warnings.warn(
                f"max_tokens={self.max_tokens}: a batch is computed at once, however many tokens it has, and so are "
                f"others like it: {why}. The results are right, and need the memory of the whole batch.",
                OverBudget,
                stacklevel=2,
            )

    def computed(self, step: Step) -> Any:
        # `step` has found its boundaries and has not begun to prepare its call.
        if not step.role.innermost or thread.proves:
            return _compute(step)
        if step.captured:
            rows = step.mask.shape[0] * step.mask.shape[1] if step.mask is not None else 0
            return outside_graphs(self._computed, step) if rows > self.max_tokens else _compute(step)
        return self._computed(step)

    def _computed(self, step: Step) -> Any:
        passes = self._passes(step)
        if len(passes) < 2 and not (passes and self.shapes):
            return _compute(step)
        assert step.mask is not None
        try:
            return _in_passes(step, step.mask, passes)
        except _NotForTokens as error:
            self._whole = str(error)
            self._warn(self._whole)
            return _compute(step)

    def _passes(self, step: Step) -> list[Pass]:
        # The result is empty for a batch that cannot be cut, or need not be.
        mask = step.mask
        together = not caches.held(step.call) and is_sharded(step.patch.model)  # ranks meet in each pass
        tokens = 0 if mask is None else mask.shape[0] * mask.shape[1]
        over, found = mask is not None and (tokens > self.max_tokens or bool(self.shapes)), list[Pass]()
        if over or together:
            why = "it says nothing of documents" if mask is None else self._whole or _why_whole(step, mask, self.shapes)
            if mask is not None and not why:
                found = _cut(mask.boundaries, self, together)
            elif together:
                agreed(0, why)
            if why and over:
                self._warn(why)
        if mask is not None and torch.is_grad_enabled() and self.counts is not None:
            lengths = sum(len(each.tokens) for each in found) or tokens
            came = getattr(step.call.get("position_ids"), attached.PADDING, None)
            padded_tokens = tokens if came is None else came.content
            self.counts.add(np.array(mask.boundaries.lengths), max(len(found), 1), lengths, padded_tokens)
        return found


def _compute(step: Step) -> Any:
    return prepare(step)(step, step.mask)


class Pass(NamedTuple):
    """Some documents of a batch."""

    # int64 [tokens], where its tokens are in the batch's rows laid end to end, on the host. Padding of a shape that
    # stands still comes last, and repeats the first of them.
    tokens: np.ndarray[Any, Any]
    boundaries: Boundaries
    documents: list[int]  # their numbers in the batch; empty if its documents share segments


class _Unit(NamedTuple):
    """What is never cut: a document, or segments that continue each other."""

    spans: list[tuple[int, int]]  # the first token of each span in the batch, and the one behind its last
    lengths: list[int]  # of the segments that the spans are computed as
    parents: list[int]  # for each of these segments the one of this unit that it continues, or -1
    document: int = -1  # its number in the batch, if it is one document


class _NotForTokens(Exception):
    # An output of the base model does not have one entry for each token. The text names it.
    pass


# --- cutting ---------------------------------------------------------------------------------------------------------


def _why_whole(step: Step, mask: PackedMask, shapes: RowShape) -> str:
    if mask.part is not None:
        return "several processes hold one row"
    if mask.boundaries.until is not None and _graphs.compiler is not None:
        return "its tokens see later ones, which a compiled pass cannot be told"
    states = step.call.get(ENCODED)
    if states is not None and _graphs.compiler is not None:
        return "a compiled pass cannot be told which of an encoder's states are its own"
    if states is not None and (mask.boundaries.tree is not None or shapes):
        return "its targets share tokens, or have padding of stated shapes, which has no source"
    for name, value in step.call.items():
        if name in (*_LEFT_OUT, *_OF_SOURCES) or _is_mask(value):
            continue
        held = [*value.values()] if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else []
        several = isinstance(value, torch.Tensor) and value.numel() > 1 and _tokens_at(name, value, mask.shape) is None
        if name in MEDIA and value is not None:
            return f"which {name} belong to which of its documents is not known"
        if several or any(isinstance(each, (torch.Tensor, list, tuple, Mapping)) for each in held):
            return f"{name} is not for each token, so that which part of it belongs to which document is not known"
    return ""


def _cut(boundaries: Boundaries, budget: Budget, together: bool) -> list[Pass]:
    units = _units(boundaries, budget)
    sizes = np.array([sum(unit.lengths) for unit in units], np.int64)
    shapes = budget.shapes
    of = Units(sizes, None, lambda chosen: None, shapes=shapes, most=shapes.max_documents, what="document")
    rows = cut_into_passes(of, budget.max_tokens, budget.too_long, every_rank=together).units
    smallest = [int(sizes.argmin())]  # for a pass that is there for other ranks: nothing reads what it computes
    return [_pass([units[at] for at in (row.tolist() or smallest)], boundaries, shapes) for row in rows]


def _units(boundaries: Boundaries, budget: Budget) -> list[_Unit]:
    # Documents that share segments are one unit if a pass can hold it, else each is alone.
    tree = boundaries.tree
    if tree is None:
        of_each, ends = boundaries.lengths, np.cumsum(boundaries.lengths).tolist()
        spans = [(end - length, end) for end, length in zip(ends, of_each)]
        return [_Unit([span], [of_each[at]], [-1], at) for at, span in enumerate(spans) if of_each[at]]
    found = []
    for root in [number for number, parent in enumerate(tree.parents) if parent < 0 and tree.lengths[number]]:
        own = [number for number in range(len(tree.lengths)) if tree.path(number)[0] == root]
        lengths = [tree.lengths[number] for number in own]
        if sum(lengths) <= budget.max_tokens and not budget.shapes:
            parents = [own.index(tree.parents[number]) if number != root else -1 for number in own]
            found.append(_Unit([tree.span(number) for number in own], lengths, parents))
            continue
        for leaf in tree.leaves:
            if tree.path(leaf)[0] == root:
                length = tree.offsets[leaf] + tree.lengths[leaf]
                found.append(_Unit([tree.span(number) for number in tree.path(leaf)], [length], [-1]))
    return found


def _pass(units: Sequence[_Unit], whole: Boundaries, shapes: RowShape) -> Pass:
    lengths = [length for unit in units for length in unit.lengths]
    tokens = np.concatenate([np.arange(*span) for unit in units for span in unit.spans])
    parents: list[int] = []
    for unit in units:
        parents += [parent if parent < 0 else parent + len(parents) for parent in unit.parents]
    device, with_padding = whole.cu_seqlens.device, shapes.documents(lengths)
    tokens = np.append(tokens, np.full(sum(with_padding) - len(tokens), tokens[0]))
    ends, longest = shapes.ends(with_padding), shapes.longest(with_padding)
    tree = to_device(torch.tensor(parents, dtype=torch.int32), device) if max(parents) >= 0 else None
    cu, own_lengths = to_device(torch.from_numpy(ends), device), tuple(np.diff(ends).tolist())
    own = Boundaries(cu, longest, whole.positions, own_lengths, tree)
    return Pass(tokens, own, [] if tree is not None else [unit.document for unit in units])


def _in_passes(step: Step, mask: PackedMask, passes: Sequence[Pass]) -> Any:
    of_devices = {parameter.device: parameter for parameter in step.module.parameters()}.values()
    again, compiler, outputs = len(passes) > 1 and torch.is_grad_enabled(), _graphs.compiler, []
    calls: list[list[Any]] = []
    for each in passes:
        tokens = to_device(torch.from_numpy(each.tokens), mask.device)

        def run(*unused: Any, part: Pass = each, tokens: torch.Tensor = tokens) -> Any:
            own = _part_of(step, mask, part, tokens)
            assert own.mask is not None
            if compiler is not None:
                calls.append(mask.calls)
                return _compiled(own, part, compiler)
            with autocast_uncached():  # else the gradients of several passes would be added up in half precision
                output = _compute(own)
            step.kept = own.kept
            calls.append(own.mask.calls)
            return output

        # a checkpoint keeps the random numbers of the devices that its arguments are on
        outputs.append(checkpoint(run, *of_devices, use_reentrant=False) if again else run())
    fewest = min(calls, key=len)
    mask.calls[:] = fewest  # a model around this one counts the layers
    return _joined(outputs, passes, mask.shape, "output")


class _Graphs(threading.local):
    compiler: Any = None  # what compiles the frames of this thread, while outside_graphs has put it aside


_graphs = _Graphs()


@torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call,untyped-decorator]
def outside_graphs(function: Callable[..., Any], *args: Any) -> Any:
    # The graph breaks here. Passes inside are compiled again.
    before, compiler = _graphs.compiler, set_eval_frame(None)
    _graphs.compiler = compiler
    try:
        return function(*args)
    finally:
        _graphs.compiler = before
        set_eval_frame(compiler)


def _compiled(own: Step, part: Pass, compiler: Any) -> Any:
    # The model's forward is compiled as for any packed row with lengths.
    of, patch = part.boundaries, own.patch
    parents = {} if of.parents is None else {PARENTS: of.parents}
    call = {name: value for name, value in own.call.items() if not _is_mask(value)}
    if own.calls.takes_ids and call.get("position_ids") is None and own.mask is not None:
        call["position_ids"] = own.mask.position_ids
    budget, patch.budget = patch.budget, None
    before = set_eval_frame(compiler)
    try:
        return own.module.forward(**call, **stated(of.cu_seqlens, of.max_seqlen), **parents)
    finally:
        set_eval_frame(before)
        patch.budget = budget


# --- one pass --------------------------------------------------------------------------------------------------------

# arguments about the whole row: a pass's mask has its lengths, and a pass counts its own places
_LEFT_OUT = (*LENGTHS, "cache_position")
_OF_SOURCES = (ENCODED, ENCODED_MASK)  # a pass gets those of its targets


def _is_mask(value: Any) -> bool:
    return isinstance(value, PackedMask) or (isinstance(value, dict) and any(map(_is_mask, value.values())))


def _tokens_at(name: str, value: torch.Tensor, shape: tuple[int, int]) -> int | None:
    # `value` may be [..., batch or 1, length, ...]. The result is None if it is not for each token.
    axes = name == "position_ids" and value.dim() == 3  # [axes, batch, length]
    for dim in (1, 0) if axes else (0, 1):
        if value.dim() > dim + 1 and tuple(value.shape[dim : dim + 2]) in (shape, (1, shape[1])):
            return dim
    return None


def _part_of(step: Step, mask: PackedMask, part: Pass, tokens: torch.Tensor) -> Step:
    shape, length = mask.shape, len(part.tokens)

    def own(name: str, value: torch.Tensor) -> torch.Tensor:
        dim = _tokens_at(name, value, shape)
        if dim is None:
            return value
        rows = value.expand(*value.shape[:dim], *shape, *value.shape[dim + 2 :]).flatten(dim, dim + 1)
        return rows.index_select(dim, tokens.to(value.device)).unsqueeze(dim)

    ids = None if mask.position_ids is None else own("position_ids", mask.position_ids)
    calls: list[Any] = []

    def its(given: PackedMask) -> PackedMask:
        of = _with_spans(part.boundaries, given.boundaries.until, tokens)
        return replace(given, boundaries=of, shape=(1, length), position_ids=ids, real=None, layer=None, calls=calls)

    new = its(mask)
    riding = {
        attached.MASK: new,
        attached.DOCUMENTS: part.boundaries,
        attached.EMBEDDED: (part.boundaries, new.shape),
        attached.POSITIONS: ids,
    }
    call: Call = {}
    for name, value in step.call.items():
        if name in _OF_SOURCES:
            continue
        if isinstance(value, PackedMask):  # Mamba's mask comes as its cache_position
            value = new if value is mask else its(value)
        elif _is_mask(value):
            value = {kind: new if each is mask else its(each) for kind, each in value.items()}
        elif name in _LEFT_OUT:
            continue
        elif isinstance(value, torch.Tensor):
            value = attached.attach_again(value, own(name, value), riding)
        call[name] = value
    if step.call.get(ENCODED) is not None:
        from . import cross  # which only decoders behind an encoder need

        call.update(cross.of_documents(step, mask, part.documents))
    return replace(step, args=(), call=call, mask=new, pieces=[], kept=None)


def _with_spans(of: Boundaries, until: torch.Tensor | None, tokens: torch.Tensor) -> Boundaries:
    # What a token sees is in its document, and so in its pass. Padding sees itself.
    if until is None:
        return of
    here = torch.arange(len(tokens), device=tokens.device, dtype=until.dtype)
    first = torch.ones_like(here, dtype=torch.bool)  # padding repeats the first token, behind all documents
    first[1:] = tokens[1:] != tokens[0]
    place = torch.zeros_like(until).index_copy(0, tokens[first], here[first])
    return replace(of, until=torch.where(first, place[until[tokens].long()], here), made={})


# --- what passes return ----------------------------------------------------------------------------------------------


def _joined(outputs: Sequence[Any], passes: Sequence[Pass], shape: tuple[int, int], name: str) -> Any:
    # A token that several passes hold is taken from the first of them.
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return _joined_tokens(outputs, passes, shape, name)
    if isinstance(first, Mapping):
        joined = {key: _joined([each[key] for each in outputs], passes, shape, key) for key in first}
        return type(first)(**joined)
    if isinstance(first, (tuple, list)):
        return type(first)(_joined(each, passes, shape, f"{name}[{at}]") for at, each in enumerate(zip(*outputs)))
    if isinstance(first, PackedMask):  # RWKV hands it on as its state
        return None
    if first is None or isinstance(first, (bool, int, float, str)):
        return first
    raise _NotForTokens(f"its base model returns {name}, a {type(first).__name__}, whose parts cannot be joined")


def _joined_tokens(
    outputs: Sequence[torch.Tensor], passes: Sequence[Pass], shape: tuple[int, int], name: str
) -> torch.Tensor:
    lengths = [len(each.tokens) for each in passes]
    if all(each.shape[:2] == (1, length) for each, length in zip(outputs, lengths)):
        outputs, rows = [each[0] for each in outputs], True
    elif all(each.shape[:1] == (length,) for each, length in zip(outputs, lengths)):
        rows = False
    elif name in ("pooler_output", "output[1]") and all(len(each) == 1 for each in outputs):
        return outputs[0]  # of the row's first token: what is done after the forward pools each document
    else:
        raise _NotForTokens(f"its base model returns {name} {list(outputs[0].shape)}, which is not for each token")
    held = np.concatenate([each.tokens for each in passes])
    back = np.zeros(shape[0] * shape[1], np.int64)
    back[held[::-1]] = np.arange(len(held))[::-1]  # of several places, NumPy writes the last one given
    whole = torch.cat([*outputs]).index_select(0, to_device(torch.from_numpy(back), outputs[0].device))
    return whole.view(*shape, *whole.shape[1:]) if rows else whole
