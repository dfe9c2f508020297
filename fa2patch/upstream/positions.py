"""Positions restart with each document: position ids, their axes, embeddings of positions, and rope."""

from __future__ import annotations

import functools
import re
import warnings
from itertools import chain
from typing import Any

import torch

from .._types import Function, Model
from ..documents.names import TOKENS
from ..errors import OtherPositions, UnsupportedModel
from . import attached, inspecting
from .calls import batch_shape, passed
from .facts import Facts, Site, of_forward
from .find_layers import ModelLayers
from .packed_mask import MASK, PackedMask
from .rope import MODULES, length_scaled
from .splitting import rotary_of_each
from .step import Step, Trait

# words in the last part of the names of modules and parameters that embed positions
_POSITIONS = re.compile(r"(^|[._])(position|positions|pos|wpe|rotary|rope)(_[^.]*)?$")


def look(model: ModelLayers, facts: Facts) -> list[Site]:
    decoder, modules = model.decoder, model.text_modules
    counting, along = position_embeddings(modules), along_the_row(decoder, modules)
    reads = model.by_document or counting or along
    facts.first_position = first_position(modules)
    # BERT and GPT-2 have a table of positions, and rotary positions have none.
    tables = (name for name, module in modules.items() if isinstance(module, torch.nn.Embedding))
    facts.by_column = not (reads or facts.first_position) and any(map(_POSITIONS.search, tables))
    facts.row_positions = bool(along) and not model.by_document
    # A decoder whose forward reads no position ids counts positions along the row, by what embeds them.
    names = chain(modules, (name for name, _ in decoder.named_parameters()))
    found = [] if reads or _may_read_ids(decoder) else [*filter(_POSITIONS.search, names)]
    # Children of the decoder that count by themselves (BART's kin) are called for each document.
    children = dict.fromkeys(name.split(".")[0] for name in found)
    facts.counting = tuple(name for name in children if name in decoder._modules and _POSITIONS.search(name))
    unreachable = next((name for name in found if name.split(".")[0] not in facts.counting), "")
    if unreachable:
        raise UnsupportedModel(
            f"{type(decoder).__name__}.forward reads no position_ids in this version of Transformers, and positions "
            f"are embedded in {unreachable}: they would count on from one document into the next. Nothing was patched. "
            "Upgrade Transformers, or train this model padded."
        )
    sites = [of_forward(module, counted_by_position_ids) for module in counting]
    return sites + [of_forward(module, with_position_ids) for module in along if facts.row_positions]


def look_at_rope(model: ModelLayers, facts: Facts) -> list[Site]:
    # Rope must see the document's length, not the row's. Dynamic NTK keeps the scaling of the longest sequence so far,
    # so a document longer than `max_position_embeddings` is refused when it comes. Longrope chooses its factors by the
    # length, so each document is computed by itself. Up to 4.47, some rotary modules get the row's length as `seq_len`.
    facts.rope = length_scaled(model.decoder.config)
    rotary = [module for name, module in model.decoder.named_children() if name in MODULES]
    facts.rope_by_document = facts.rope is not None and facts.rope.kind == "longrope" and bool(rotary)
    if not facts.rope_by_document:
        return []
    for module in rotary:
        if not inspecting.takes(inspecting.forward_of(type(module)), "position_ids"):  # PhiMoE from 4.46 to 4.57
            raise UnsupportedModel(
                f"{type(model.decoder).__name__}: expected that {type(module).__name__} takes position_ids, found "
                "that it takes the row's length only. Rope scaling 'longrope' chooses factors by the length, so "
                "all documents of a row would get the row's. Use Transformers 5.0 or later, or train padded."
            )
    return [of_forward(module, rotated_by_document) for module in rotary]


def before(step: Step) -> None:
    ids, facts, mask = step.call.get("position_ids"), step.patch.facts, step.mask
    four = isinstance(ids, torch.Tensor) and ids.dim() == 3 and len(ids) == 4  # with the text axis first
    if four and not step.by_hook and _takes_three_axes(step.module, step.calls.original):
        step.call["position_ids"] = step.call["position_ids"][1:]
    if mask is None:
        return
    if facts.row_positions and step.role.innermost:  # neither the model nor its embeddings take position ids
        for name in passed(step.call, TOKENS):
            step.attach(name, attached.Piece(attached.POSITIONS, mask.position_ids))
    if facts.rope_by_document and mask.part is None:  # in a part, no document is longer than the limit
        step.send_documents()


def first_position(modules: dict[str, Any]) -> int:
    # It is 0, but 2 in RoBERTa and its kin.
    for module in modules.values():
        if "position_embeddings" not in module._modules:
            continue
        padding = getattr(module.position_embeddings, "padding_idx", None)  # I-BERT's table is no torch.nn.Embedding
        counts = inspecting.reads_name(inspecting.forward_of(type(module)), "padding_idx")  # ERNIE-M's do not
        if padding is not None and counts:
            return int(padding) + 1
    return 0


def warn_of_ids_from_zero(model: Model, first: int, ids: Any, mask: PackedMask) -> None:
    # `ids` are the caller's, [batch, length]. This reads them, and is asked for a model's first packed batch only.
    if not first or mask.part is not None or not isinstance(ids, torch.Tensor) or ids.shape != mask.shape:
        return
    starts = mask.boundaries.cu_seqlens[:-1].to(ids.device, torch.int64).clamp(max=ids.numel() - 1)
    if bool((ids.flatten()[starts] == 0).all()):
        warnings.warn(
            f"the position_ids of every document begin at 0, and {type(model).__name__} counts from {first} where it "
            "makes them itself, as in padded training. They are used as they are, so that its tokens have other "
            f"positions than in its checkpoints. Collate with position_ids_start={first}, or pass lengths without ids.",
            OtherPositions,
            stacklevel=2,
        )


def _may_read_ids(decoder: Model) -> bool:
    # It may read them by name, out of **kwargs, or behind an unreadable wrapper. **kwargs alone are not enough: Bart in
    # 5.x passes them to attention layers, which ignore the ids, and not to its embeddings.
    inherited = (forward for _, forward in inspecting.forwards(type(decoder)))
    for forward in (decoder.forward, *inherited):
        # of upstream's forward: ours, of another patched model of the class, shows them in any case
        if inspecting.code_of(forward) is None or "position_ids" in inspecting.upstream_parameters(forward):
            return True
        if inspecting.takes_any_keyword(forward):
            if inspecting.has_constant(forward, "position_ids") or inspecting.takes_any_position(forward):
                return True
            if inspecting.reads_name(forward, "forward"):
                continue  # it calls super().forward: the parent class decides
        return False
    return False


def position_embeddings(modules: dict[str, Any]) -> list[torch.nn.Embedding]:
    # OPT's and BioGPT's take the mask and count its ones.
    found = []
    for embedding in (module for module in modules.values() if isinstance(module, torch.nn.Embedding)):
        first = inspecting.parameters(embedding.forward)[0]
        behind_args = first.kind is first.VAR_POSITIONAL and hasattr(embedding, "offset")  # a wrapper of other code
        if first.name == MASK or behind_args:
            found.append(embedding)
    return found


def counted_by_position_ids(original: Function) -> Function:
    @functools.wraps(original)
    def forward(self: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(attention_mask, PackedMask):
            return original(self, attention_mask, *args, **kwargs)
        return torch.nn.Embedding.forward(self, attention_mask.position_ids + self.offset)

    return forward


_TABLE = "position_ids"


def along_the_row(decoder: Model, modules: dict[str, Any]) -> list[Any]:
    """The modules in a decoder with a buffer ``position_ids``, which their forward reads and does not take."""
    if _TABLE in inspecting.upstream_parameters(type(decoder).forward):
        return []
    return [
        module
        for module in modules.values()
        if module is not decoder
        and _TABLE in module._buffers
        and inspecting.reads_name(inspecting.forward_of(type(module)), _TABLE)
        and not inspecting.takes(inspecting.forward_of(type(module)), _TABLE)
    ]


class _WithIds:
    """Stands in for the embeddings during one packed call. Its table holds the batch's ids, ``[batch, length]``."""

    def __init__(self, module: torch.nn.Module, position_ids: torch.Tensor) -> None:
        self._module, self.position_ids = module, position_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def with_position_ids(original: Function) -> Function:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        riding = [attached.take(value, attached.POSITIONS) for value in chain(args, kwargs.values())]
        ids = next((each for each in riding if each is not None), None)
        return original(self if ids is None else _WithIds(self, ids), *args, **kwargs)

    return forward


def rotated_by_document(original: Function) -> Function:
    @functools.wraps(original)
    def forward(self: Any, x: torch.Tensor, position_ids: Any = None, **kwargs: Any) -> Any:
        documents = attached.take(position_ids, attached.DOCUMENTS)
        if documents is None:
            return original(self, x, position_ids, **kwargs)
        return rotary_of_each(functools.partial(original, self), x, position_ids, documents, kwargs)

    return forward


def _takes_three_axes(model: Model, forward: Function) -> bool:
    settings = [getattr(model.config, name, None) for name in ("rope_scaling", "rope_parameters")]
    three = any(len(found["mrope_section"]) == 3 for found in settings if found and "mrope_section" in found)
    loops = isinstance(model._modules.get("layers"), torch.nn.ModuleList)
    return three and loops and not inspecting.has_constant(forward, 4)


class RowLength(Trait):
    # Position ids of a part may be larger than its length, so the decoder is told the places of its tokens in the row,
    # from which it computes the size that rope needs.

    name = "row length"

    def finds(self, model: ModelLayers) -> bool | None:
        rotary = (module for name, module in model.decoder.named_children() if name in MODULES)
        return True if any(inspecting.takes(module.forward, "seq_len") for module in rotary) else None

    def before(self, step: Step, found: Any) -> None:
        part = None if step.mask is None else step.mask.part
        if part is None or not step.role.innermost or not step.calls.takes("cache_position"):
            return
        (_, length), device = batch_shape(step.call)
        step.call["cache_position"] = part.own(torch.arange(part.rows((1, length))[1], device=device))
