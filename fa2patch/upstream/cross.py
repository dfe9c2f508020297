"""Cross attention: the tokens of each target see those of its source, which are documents of another row.

A decoder gets its sources as ``encoder_hidden_states``, and whose they are as ``encoder_attention_mask``: a packed mask
from the encoder-decoder around it, or a 2-D mask of document numbers. States ``[targets, length, hidden]``, a row for
each target, are laid end to end without their padding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from .._types import Call, Function
from ..documents.boundaries import Boundaries
from ..documents.find import find_boundaries
from ..documents.tensors import described, ends_of, to_device
from ..errors import BadBatch
from . import inspecting
from .calls import passed
from .facts import Facts, Site, of_forward
from .find_layers import ModelLayers
from .packed_mask import PackedMask, mask_among
from .step import Step
from .transformers_names import ENCODED, ENCODED_MASK


def before(step: Step) -> None:
    """Give cross attention a packed mask of its own: queries of the targets, keys of the sources."""
    states, mask = step.call.get(ENCODED), step.mask
    if mask is None or states is None or not step.role.innermost:
        return
    mask.require_whole_rows("cross attention to an encoder's states")
    targets, given = mask.boundaries, step.call.get(ENCODED_MASK)
    if isinstance(given, PackedMask):
        sources = given.boundaries
    elif states.shape[0] == len(targets):
        if mask.shape[0] > 1:
            raise BadBatch(
                f"{ENCODED} {list(states.shape)} are one row for each target: expected the targets in one row, found "
                f"{mask.shape[0]} rows."
            )
        step.call[ENCODED], sources = _end_to_end(states, given)
    else:
        sources = _numbered(states, given)
    require_pairs(sources, targets)
    own = Boundaries(targets.cu_seqlens, targets.max_seqlen, _lengths=targets._lengths, sources=sources)
    of_cross = replace(mask, boundaries=own, keys_of=step.call[ENCODED].shape[1], window=None, real=None)
    if ENCODED_MASK in step.calls.names:
        step.call[ENCODED_MASK] = of_cross
        return
    step.mask = replace(mask, cross=of_cross)
    if step.mask_received:
        step.call[step.patch.facts.carrier] = step.mask


def of_documents(step: Step, mask: PackedMask, documents: Sequence[int]) -> Call:
    """The arguments that give some targets of a packed batch the states of their sources."""
    states, given = step.call[ENCODED], step.call.get(ENCODED_MASK)
    if not isinstance(given, PackedMask) and states.shape[0] == len(mask.boundaries):
        rows = torch.tensor(documents, device=states.device)
        return {name: value.index_select(0, rows) for name, value in passed(step.call, (ENCODED, ENCODED_MASK)).items()}
    sources = given.boundaries if isinstance(given, PackedMask) else _numbered(states, given)
    require_pairs(sources, mask.boundaries)
    ends, lengths = np.cumsum(sources.lengths), [sources.lengths[document] for document in documents]
    tokens = np.concatenate([np.arange(ends[at] - sources.lengths[at], ends[at]) for at in documents])
    own = Boundaries(ends_of(lengths, states.device), max(lengths), _lengths=tuple(lengths))
    chosen = to_device(torch.from_numpy(tokens), states.device)
    of_pass = PackedMask(own, step.patch.picks, (1, len(tokens)), own.max_seqlen)
    return {ENCODED: states.flatten(0, 1).index_select(0, chosen)[None], ENCODED_MASK: of_pass}


def require_pairs(sources: Boundaries, targets: Boundaries) -> None:
    if len(sources) != len(targets):
        raise BadBatch(
            f"expected as many sources as targets, found {len(sources)} sources and {len(targets)} targets. Source i "
            "belongs to target i."
        )


def _numbered(states: torch.Tensor, given: Any) -> Boundaries:
    shape, found = (states.shape[0], states.shape[1]), None
    if isinstance(given, torch.Tensor) and tuple(given.shape) == shape:
        found = find_boundaries(shape, states.device, attention_mask=given, always=True)
    if found is None:
        raise BadBatch(
            f"a packed batch came with {ENCODED} {list(states.shape)}: expected {ENCODED_MASK} {list(shape)} with the "
            "number of the document of each source token (1, 1, 2, 2, ...), or one row of states for each target; "
            f"found {described(given)}."
        )
    return found


def _end_to_end(states: torch.Tensor, given: torch.Tensor | None) -> tuple[torch.Tensor, Boundaries]:
    # `given` is 0 in the padding, [targets, length]; None if there is none.
    count, length = states.shape[:2]
    if given is None:
        ends = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=states.device)
        return states.flatten(0, 1)[None], Boundaries(ends, length, _lengths=(length,) * count)
    real = given.to(states.device) != 0
    ends = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    return states[real][None], Boundaries(ends, length)


def look(model: ModelLayers, facts: Facts) -> list[Site]:
    # Whisper's decoder takes no such mask and hands its blocks None, because its sources have no padding. They find the
    # packed one on the targets' mask, also when a checkpoint computes them again.
    classes = {type(block) for block in model.text_modules.values()}
    forwards = {cls: inspecting.forward_of(cls) for cls in classes}
    takes = {cls for cls, each in forwards.items() if inspecting.takes(each, ENCODED)}
    takes = {cls for cls in takes if inspecting.takes(forwards[cls], ENCODED_MASK)}
    blocks = [
        block for name, block in model.text_modules.items() if type(block) in takes and _attends_twice(model, name)
    ]
    facts.crosses = bool(blocks)
    if inspecting.takes(inspecting.forward_of(type(model.decoder)), ENCODED_MASK):
        return []
    return [of_forward(block, with_cross_mask) for block in blocks]


def _attends_twice(model: ModelLayers, name: str) -> bool:
    # Blocks of GPT-2 and BERT always take an encoder's states, and have a second attention layer only if the config
    # asks for it. What holds the list of all blocks is no block.
    inside = [layer for layer in model.attention if layer.name.startswith(f"{name}.")]
    return len(inside) > 1 and any(map(str.isdigit, name.split(".")))


def with_cross_mask(original: Function) -> Function:
    names = inspecting.parameter_names(original)[1:]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = mask_among(chain(args, kwargs.values()))
        if mask is None or mask.cross is None:
            return original(self, *args, **kwargs)
        return original(self, **{**dict(zip(names, args)), **kwargs, ENCODED_MASK: mask.cross})

    return forward
