"""Base models that compute each document by itself, because no kernel can say what their layers add to the scores.

MPNet adds a bias for each distance, DeBERTa scores of distances, BERT with ``relative_key`` distances, too. Their base
model is called for each document, so that nothing has the size of the row squared. Heads still run on the whole row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..._torch import uncompiled
from ..._types import Call
from ...errors import PackingNotIsolated
from ...kernels.picks import DOCUMENTS, Mixed
from .. import inspecting
from ..packed_mask import PackedMask
from ..splitting import Documents
from ..step import Step
from ..transformers_names import ENCODED, ENCODED_MASK


def computed(step: Step, mask: PackedMask) -> Any:
    mask.require_whole_rows("layers that add more to attention scores than a mask")
    for layer in step.patch.attention:
        mask.given(step.module.get_submodule(layer.name))
    if step.call.get("inputs_embeds") is None and "inputs_embeds" in step.calls.names:
        table = step.module.get_input_embeddings()
        scales = any("scale" in name for name in inspecting.names_read(step.calls.original))  # BioGPT, XGLM: themselves
        if isinstance(table, torch.nn.Embedding) and not scales:
            # a single lookup, so that hooks on the table see the whole row
            step.call["inputs_embeds"] = table(step.call.pop("input_ids"))
    return _of_each(step, mask)


@uncompiled
def _of_each(step: Step, mask: PackedMask) -> Any:
    for layer in step.patch.attention:
        mask.picks.took(step.module.get_submodule(layer.name), Mixed(DOCUMENTS))
    rest, call = step.calls.arranged(step.args, step.call)
    sources = _sources_of_each(call, mask)
    for name, value in call.items():
        # Every document would see all of an argument for other things than its tokens: entities, or an encoder's
        # states. A head_mask has two dimensions, of floating-point numbers.
        by_token = isinstance(value, torch.Tensor) and value.dim() > 1 + value.is_floating_point()
        if by_token and value.shape[1] != mask.shape[1]:
            raise PackingNotIsolated(
                f"{name} {list(value.shape)} came to {type(step.module).__name__} with a packed batch of "
                f"{mask.shape[1]} tokens: expected one entry for each token. Whose the others are is not known. Leave "
                "it out, or train this model padded."
            )
    documents = Documents(mask.boundaries, mask.shape)

    def each(*args: Any, **given: Any) -> Any:
        if given.get("inputs_embeds") is not None:
            given["inputs_embeds"] = given["inputs_embeds"] * 1  # DeBERTa (4.34) changes them in place
        if sources is not None:
            given[ENCODED] = next(sources)
        return step.calls.original(step.module, *args, **given)

    return _joined(documents, documents.of_each(each, rest, call))


def _sources_of_each(call: Call, mask: PackedMask) -> Iterator[torch.Tensor] | None:
    # The states of each target's source are taken out of the call, in which they stand end to end.
    given = call.get(ENCODED_MASK)
    of_cross = given if isinstance(given, PackedMask) else mask.cross
    sources = None if of_cross is None else of_cross.boundaries.sources
    if sources is None:
        return None
    states = call.pop(ENCODED).flatten(0, 1)[None, : sum(sources.lengths)]
    pieces = states.split_with_sizes(sources.lengths, 1)
    return iter([piece for piece, length in zip(pieces, mask.boundaries.lengths) if length])


def _joined(documents: Documents, outputs: Sequence[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        of_tokens = all(each.shape[:2] == (1, length) for each, length in zip(outputs, documents.lengths))
        # Outputs without a value for each token, such as ``pooler_output``, are joined along dim 0.
        return documents.join(outputs) if of_tokens else torch.cat(tuple(outputs))
    if hasattr(first, "items"):
        return type(first)(**{name: _joined(documents, [each[name] for each in outputs]) for name in first})
    if isinstance(first, (tuple, list)):
        return tuple(_joined(documents, column) for column in zip(*outputs))
    return first
