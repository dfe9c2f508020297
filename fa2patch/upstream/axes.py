"""Position ids on several axes (mRoPE): packed pictures are counted in each document by the model's ``get_rope_index``.

Padded training hands a model no position ids, and its forward counts time, height and width in each row. So a packed
batch whose ids have one axis, because its collator knows of no others, is laid out in rows and counted by the same
function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from .._torch import uncompiled
from .._types import Call, Model
from ..documents.boundaries import Boundaries
from ..documents.tensors import largest
from ..errors import PackingNotIsolated
from . import inspecting
from .calls import has_pictures
from .find_models import models
from .transformers_names import COUNTS_AXES

# what `get_rope_index` raises if pictures and placeholders do not match
FAILURES = (IndexError, RuntimeError, StopIteration, TypeError, ValueError)

# arguments of Qwen2.5-Omni: which frames of a sound are not filled in, and whether sound belongs to its film
HEARD, _FROM_FILM = "feature_attention_mask", "use_audio_in_video"


def takes_text_axis(decoder: Model) -> bool:
    # Most decoders take [4, batch, length] from 4.54 on, with the text axis first. The forward of such a decoder
    # compares the number of axes with 4. There is no other sign: the other decoders use the first three of four axes
    # and raise no error.
    return inspecting.has_constant(type(decoder).forward, 4)


def rope_index(model: Any, tokens: torch.Tensor, mask: torch.Tensor, given: Call) -> torch.Tensor:
    # The ids are time, height and width, [3, batch, length]. `given` are the other arguments of the batch.
    respelt = {"video_second_per_grid": "second_per_grids"}  # which it takes under another name than the forward
    named: dict[str, Any] = {respelt.get(name, name): value for name, value in given.items()}
    if HEARD in given:
        named["audio_seqlens"] = given[HEARD].long().sum(-1)
    if _FROM_FILM in given:
        named[_FROM_FILM] = bool(given[_FROM_FILM])
    count: Any = getattr(model, COUNTS_AXES)
    taken = inspecting.parameter_names(count)
    call = {name: named[name] for name in taken if named.get(name) is not None}
    ids: torch.Tensor = count(**{**call, "input_ids": tokens, "attention_mask": mask})[0]
    return ids[-3:]


@uncompiled
def of_pictures(model: Model, call: Call, found: Boundaries, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Position ids on several axes for a packed batch with pictures whose ids, if it has any, only count its tokens."""
    inner = models(model)
    counting = next((each for each in inner if hasattr(each, COUNTS_AXES)), None)
    ids, tokens = call.get("position_ids"), call.get("input_ids")
    if counting is None or not has_pictures(call) or (ids is not None and ids.dim() == 3 and len(ids) > 1):
        return None
    if ids is not None and not any(map(_counts_in_forward, inner)):
        return None  # neither does padded training
    if tokens is None or found.parents is not None:
        raise PackingNotIsolated(
            "a packed batch came with pictures and without position_ids on three axes, which this model counts in each "
            "document of input_ids, and there are "
            f"{'none' if tokens is None else 'shared prompts (segment_parents)'}. Pass position_ids on three axes, as "
            "fa2patch.DataCollatorForMultimodalFlattening gives them."
        )
    counted = found.positions_of(tokens.shape).to(tokens.device)
    if ids is not None:
        differs = ids.reshape(-1, tokens.shape[1]) != counted
        if largest(differs if mask is None else differs & (mask != 0)):
            raise PackingNotIsolated(
                "a packed batch came with pictures and with position_ids on one axis that do not count the tokens of "
                "each document from 0, and this model counts on three axes. Pass them on three axes, as "
                "fa2patch.DataCollatorForMultimodalFlattening gives them."
            )
    three = _in_rows(counting, call, [length for length in found.lengths if length])
    return torch.cat([counted[None], three]) if takes_text_axis(inner[-1]) else three


def _in_rows(model: Model, call: Call, lengths: list[int]) -> torch.Tensor:
    # Documents are counted as rows of a padded batch.
    tokens = call["input_ids"]

    def rows(value: torch.Tensor) -> torch.Tensor:
        return pad_sequence([*torch.split(value.flatten(), lengths)], batch_first=True)

    mask = rows(torch.ones_like(tokens))
    tensors = [(name, value) for name, value in call.items() if isinstance(value, torch.Tensor)]
    whole = [(name, value) for name, value in tensors if not value.is_floating_point()]
    of_tokens = {name: rows(value) for name, value in whole if value.shape == tokens.shape}
    try:
        ids = rope_index(model, rows(tokens), mask, {**call, **of_tokens})
    except FAILURES as error:
        raise PackingNotIsolated(
            f"a packed batch came with pictures and without position_ids on three axes, and {type(model).__name__}."
            f"{COUNTS_AXES} does not count them in each document ({type(error).__name__}: {error}). Expected the "
            "pictures in the order of their placeholders, no document that ends inside of one, and all that the "
            "processor returned (mm_token_type_ids)."
        ) from error
    return ids[:, mask != 0].view(len(ids), *tokens.shape)


def _counts_in_forward(model: Model) -> bool:
    # From 5.3 on, another method of the model calls `get_rope_index`.
    cls = type(model)
    called = inspecting.names_read(inspecting.forward_of(cls))
    return COUNTS_AXES in called or any(inspecting.reads_name(getattr(cls, name, None), COUNTS_AXES) for name in called)
