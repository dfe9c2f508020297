"""Packed computation of padded batches, for trainers that make padded batches and expect padded outputs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from .._types import Args, Call, Model
from ..documents.names import LENGTHS, TOKENS
from ..errors import NotAModel
from ..patch.applying import status
from ..patch.unwrap import transformers_model
from ..upstream import luggage, rope
from ..upstream.calls import passed
from ..upstream.find_models import models
from ..upstream.parts.engines import row_part
from ..upstream.step import MARK, Patched
from ..upstream.traits import directions, positions
from .common_prefixes import Segments, shared_segments
from .padded_layouts import Layout, packed_row
from .padded_rows import read_rows

_LAYOUT = "layout"


class PaddedBatches:
    """Forward hooks that make a patched model compute padded batches packed.

    They stay until ``remove()`` is called or the ``with`` block ends.

    Args:
        base: The inner model that loops over the layers.
        share_prompts: Whether equal prefixes of rows are computed once.
    """

    def __init__(self, base: torch.nn.Module, share_prompts: bool = False) -> None:
        self.share_prompts = share_prompts
        self._under_way: dict[int, luggage.Piece | None] = {}  # keyed by thread: replicas of a model share hooks
        self._handles = [
            base.register_forward_pre_hook(self._before, with_kwargs=True),
            base.register_forward_hook(self._after, with_kwargs=True),
        ]

    def remove(self) -> None:
        """Remove the hooks, so that padded batches are computed padded again."""
        for handle in self._handles:
            handle.remove()

    def _before(self, base: torch.nn.Module, args: Args, kwargs: Call) -> tuple[Args, Call] | None:
        """Forward pre-hook: turn a padded batch into one packed row."""
        self._under_way[threading.get_ident()] = None
        packed = _packed(base, args, kwargs, self.share_prompts)
        if packed is None:
            return None
        call, layout = packed
        piece = luggage.Piece(_LAYOUT, layout)
        self._under_way[threading.get_ident()] = piece
        return (), {**call, "position_ids": luggage.attach(call["position_ids"], piece)}

    def _after(self, base: Any, args: Args, kwargs: Call, output: Any) -> Any:
        """Forward hook: turn the outputs of such a row into those of the padded batch."""
        layout = luggage.take(kwargs.get("position_ids"), _LAYOUT)
        luggage.require_delivered(self._under_way.pop(threading.get_ident(), None), base)
        return None if layout is None else _padded(layout, output)

    def __enter__(self) -> PaddedBatches:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def pack_padded_batches(model: Model, share_prompts: bool = False) -> PaddedBatches:
    """Make a patched model compute padded batches packed and return padded outputs.

    Padding is not computed between the embedding and the last hidden states. The head gets hidden states
    ``[batch, length, hidden]``, with zeros for padding. A padded batch has an ``attention_mask`` ``[batch, length]`` of
    zeros and ones and is padded left, right or on both sides. All other batches are unchanged: without padding, with
    gaps in the mask, with an empty row, with a cache (``generate``, ``use_cache=True``), with
    ``output_attentions=True``, with position ids on several axes, under ``torch.compile``, under sequence parallelism,
    or without such a mask, as packed batches are.

    With ``share_prompts``, the first tokens in which rows are equal are computed once, for example the prompt of
    several completions, and all rows get their hidden states. Batches without padding are packed too if rows share
    tokens. Rows are compared on the device, in ``input_ids`` and in the other arguments with one number for each token.
    A prefix is shared if this saves at least 16 tokens. Nothing is shared in models whose tokens see later tokens, in
    models that are given ``inputs_embeds``, or in batches with rows on both sides of a longrope's limit. With dropout,
    a shared token is dropped in all rows or in none.

    Each forward with such a mask reads from the device once, and a second time if rows share tokens.

    Args:
        model: A model that ``fa2patch.apply`` has patched, or a wrapper around one (PEFT, accelerate, DDP, FSDP).
        share_prompts: Whether equal prefixes of rows are computed once.

    Returns:
        The hooks, as a context manager with a ``remove()`` method.

    Raises:
        NotAModel: The model is not patched, or ``model`` holds no Transformers model.
    """
    inner = transformers_model(model)
    if status(inner) is None:
        raise NotAModel(
            f"expected a patched model, found this {type(inner).__name__}: call fa2patch.apply(model) first."
        )
    return PaddedBatches(models(inner)[-1], share_prompts)


def _packed(base: Any, args: Args, kwargs: Call, share: bool) -> tuple[Call, Layout] | None:
    """Return a padded batch's arguments as those of one packed row, with the layout; None for other batches."""
    patch: Patched | None = base.__dict__.get(MARK)
    call = {**({"input_ids": args[0]} if args else {}), **kwargs}
    if len(args) > 1 or patch is None or not _may_be_padded(call) or row_part(base, call) is not None:
        return None
    mask, tokens = call.pop("attention_mask"), next(iter(passed(call, TOKENS).values()))
    given = call.get("position_ids")
    if given is not None:
        call["position_ids"] = given = given.expand(mask.shape)
    compared = _compared(call, mask.shape) if share and may_share(patch.found) else []
    rows = read_rows(mask, given, compared)
    if rows is None:
        return None
    if rows.common is not None and may_share(patch.found, rows.lengths):
        segments = shared_segments(rows.common, rows.lengths)
    else:
        segments = Segments.alone(rows.lengths.tolist())
    if rows.full and not segments.shared:
        return None
    described, layout = packed_row(mask.shape, rows.starts, rows.lengths, segments, tokens.device)
    packed = {name: layout.packed(v) if _per_token(v, mask.shape) else v for name, v in call.items()}
    if given is None:
        packed["position_ids"] = described["position_ids"] + patch.found[positions.NAME].first
    return {**described, **packed}, layout


def _may_be_padded(call: Call) -> bool:
    """Whether the arguments may be those of a padded batch. No value is looked at."""
    mask, given = call.get("attention_mask"), call.get("position_ids")
    tokens = next(iter(passed(call, TOKENS).values()), None)
    cached = call.get("past_key_values") is not None or call.get("use_cache") or call.get("cache_position") is not None
    if tokens is None or cached or call.get("output_attentions") or torch.compiler.is_compiling():
        return False
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or tokens.shape[:2] != mask.shape or passed(call, LENGTHS):
        return False
    piece = luggage.find(given, luggage.MASK)
    return (given is None or given.dim() == 2) and (piece is None or piece.content is None)


def may_share(found: Mapping[str, Any], lengths: NDArray[Any] | None = None) -> bool:
    """Whether a model's rows may share the tokens in which they begin.

    Args:
        found: What the traits have found, by name.
        lengths: The rows' numbers of tokens; None if they are not known yet.
    """
    scaled = found.get(rope.NAME)
    if found[directions.NAME].both:  # a shared token would have to see several rows' later tokens
        return False
    if lengths is None or scaled is None or scaled.scaling.kind != "longrope":
        return True
    return len(set((lengths > scaled.scaling.limit).tolist())) == 1  # a prompt is rotated by each row's length


def _compared(call: Call, shape: torch.Size) -> list[torch.Tensor]:
    """The arguments ``[batch, length]`` in which rows that share a token must be equal; none if rows cannot share."""
    found = [value for value in call.values() if _per_token(value, shape)]
    numbers = all(value.dim() == 2 and not value.is_floating_point() for value in found)
    return found if numbers and call.get("input_ids") is not None and shape[0] > 1 else []


def _per_token(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape[:2] == shape


def _padded(layout: Layout, output: Any) -> Any:
    if isinstance(output, tuple):
        return layout.padded(output)
    for name, value in list(output.items()):
        output[name] = layout.padded(value)
    return output
