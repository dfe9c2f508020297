"""The arguments of a ``forward``, converted to names and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from .._torch import compiling
from .._types import Args, Call, Function, Model
from ..documents.names import LENGTHS, MEDIA, PARENTS, TOKENS
from ..documents.tensors import check_cu_seqlens, check_position_ids
from ..errors import BadBatch, BadCuSeqlens, BadParents, PackingNotIsolated
from . import caches, inspecting


class Calls:
    """Converts the arguments of one ``forward`` to names and back."""

    def __init__(self, original: Function, method: bool = True) -> None:
        # `method` says whether the function's first argument is the module.
        parameters = inspecting.parameters(original)[int(method) :]
        self.original = original
        self.positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.names = {p.name for p in parameters}
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.takes_ids = self.takes("position_ids")
        self.refused = tuple(name for name in LENGTHS if not self.takes(name))  # collator lengths that are left out

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.names

    def named(self, args: Args, kwargs: Call) -> Call | None:
        # None: some arguments have no name. Of those that go to *args, only a single tensor has one: it is input_ids.
        if torch._C._get_tracing_state() is not None and not compiling():
            refuse_recording("torch.jit.trace (or torch.onnx.export, or TensorBoard's add_graph)")
        if not args:  # {**x}, here and below: dynamo traces fifty times the steps for dict(x), and {**x, **y}
            return {**kwargs}
        rest = args[len(self.positional) :]
        if rest and (self.positional or len(rest) > 1 or not isinstance(rest[0], torch.Tensor)):
            return None
        first = {"input_ids": rest[0]} if rest else {}
        return {**first, **dict(zip(self.positional, args)), **kwargs}

    def arranged(self, args: Args, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as the original takes them, without collator lengths that it does not accept."""
        # `args` are the positional arguments of the call. They show whether `input_ids` came through *args.
        call = {**call}
        for name in self.refused:
            call.pop(name, None)
        rest = (call.pop("input_ids"),) if len(args) > len(self.positional) else ()
        return rest, call

    def make(self, model: Model, args: Args, call: Call) -> Any:
        if not self.refused and len(args) <= len(self.positional):
            return self.original(model, **call)
        rest, call = self.arranged(args, call)
        return self.original(model, *rest, **call)


def refuse_recording(what: str) -> None:
    raise PackingNotIsolated(
        f"{what} is recording a patched model: what it records of this batch, its documents or that it has none, would "
        "be done with every later batch. Take the patch off first: fa2patch.revert(model). torch.compile looks at "
        "every batch."
    )


def passed(call: Call, names: Iterable[str]) -> Call:
    found = {}
    for name in names:  # a comprehension is another call, up to Python 3.11
        value = call.get(name)
        if value is not None:
            found[name] = value
    return found


def batch_shape(call: Call) -> tuple[tuple[int, int], torch.device]:
    given = call.get("input_ids")
    given = call.get("inputs_embeds") if given is None else given
    if given is None:
        raise PackingNotIsolated("forward was given neither input_ids nor inputs_embeds.")
    if not isinstance(given, torch.Tensor) or given.dim() < 2:
        name = next(iter(passed(call, TOKENS)))
        found = f"{list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
        raise BadBatch(f"{name}: expected a tensor [batch, length, ...], found {found}.")
    return (given.shape[0], given.shape[1]), given.device


class Batch(NamedTuple):
    """The arguments of a forward that may say where documents start."""

    shape: tuple[int, int]  # (batch, length)
    device: torch.device
    lengths: dict[str, Any]  # the collator's
    position_ids: torch.Tensor | None
    mask: torch.Tensor | None  # the part [batch, length] of a 2-D mask that describes this call's tokens
    cached: bool


def read_batch(call: Call, has_mixers: bool) -> Batch | None:
    # The result is None for a call that is dense in any case.
    tokens: Any = call.get("input_ids")
    tokens = call.get("inputs_embeds") if tokens is None else tokens
    position_ids, lengths = call.get("position_ids"), passed(call, LENGTHS)
    if tokens is None or (getattr(tokens, "ndim", 0) < 2 and position_ids is None and not lengths):
        return None  # GPT-2 accepts one row of ids without a batch dimension
    shape, device = batch_shape(call)
    if lengths:
        _check_lengths(lengths, device)
    given, cached = call.get("attention_mask"), bool(caches.held(call))
    mask = given if isinstance(given, torch.Tensor) and given.dim() == 2 and given.shape[0] == shape[0] else None
    if mask is not None and mask.shape[1] != shape[1]:  # with a cache, the mask is [batch, cached + length]
        mask = mask[:, -shape[1] :] if cached and mask.shape[1] > shape[1] else None
    # a mask for every query, which generate() with a static cache also makes
    dense = given is not None and mask is None and (cached or (is_for_queries(given) and not (lengths or has_mixers)))
    if not dense:
        if position_ids is not None:
            check_position_ids(position_ids, shape)
        if mask is not None and "cu_seq_lens_q" in lengths and lengths["cu_seq_lens_q"].numel() == shape[0] + 1:
            del lengths["cu_seq_lens_q"]  # 4.54's generate(): one sequence in each padded row, as the mask says
        if lengths or shape[1] > 1:
            _refuse_capture(device, call if "cu_seq_lens_q" in lengths else {})
    return None if dense else Batch(shape, device, lengths, position_ids, mask, cached)


def _refuse_capture(device: torch.device, stated: Call) -> None:
    # The CUDA graph would replay this batch's documents.
    capturing = device.type == "cuda" and not compiling() and torch.cuda.is_current_stream_capturing()
    if capturing and not _replays(stated, device):
        raise PackingNotIsolated(
            "a CUDA graph is being captured: it would keep this batch's documents and compute others wrong. Pass "
            "cu_seq_lens_q on the model's device and max_length_q as an int, of the same size and number in every "
            "batch, as DataCollatorWithFlattening(max_documents=..., longest_document=...) makes them; or use "
            'torch.compile(model, mode="reduce-overhead"), which looks at every batch.'
        )


def _replays(stated: Call, device: torch.device) -> bool:
    # A captured CUDA graph then reads where documents are from its inputs, at every replay. It keeps the number of
    # documents, which is a shape, and `max_length_q`. An assertion in the graph fails if a document is longer.
    ends, longest = stated.get("cu_seq_lens_q"), stated.get("max_length_q")
    on_device = isinstance(ends, torch.Tensor) and ends.device == device
    return on_device and isinstance(longest, int) and stated.get(PARENTS) is None


def _check_lengths(lengths: dict[str, Any], device: torch.device) -> None:
    # Lengths of keys stand in for those of queries.
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if name in lengths:
            if not isinstance(lengths[name], torch.Tensor):
                check_cu_seqlens(lengths[name])  # which raises; from_cu_seqlens checks tensors
            if lengths[name].device.type == "meta" and lengths[name].device != device:
                raise BadCuSeqlens("cu_seq_lens: expected a tensor with values, found one on the meta device.")
            lengths[name] = lengths[name].to(device)
    if "cu_seq_lens_k" in lengths and "cu_seq_lens_q" not in lengths:
        lengths["cu_seq_lens_q"] = lengths["cu_seq_lens_k"]
        lengths["max_length_q"] = lengths.get("max_length_k")
    if PARENTS in lengths and "cu_seq_lens_q" not in lengths:
        raise BadParents(
            "segment_parents came without cu_seq_lens_q: position_ids alone do not say where segments start. Pass "
            "both, as fa2patch.packing.share gives them."
        )


def is_for_queries(mask: object) -> bool:
    # Such a mask tells the keys of each query: a tensor of 3 or more dims, a BlockMask, or a dict of such.
    if isinstance(mask, dict):
        return bool(mask) and all(value is None or is_for_queries(value) for value in mask.values())
    return getattr(mask, "ndim", 0) > 2 or type(mask).__name__ == "BlockMask"


def has_pictures(call: Call) -> bool:
    # pictures, films or sound
    found = False
    for name in call:  # any() of a generator is two calls more, and of both lists this is the shorter one
        if name in MEDIA:
            found = found or call[name] is not None
    return found
