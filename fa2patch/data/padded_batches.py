"""Packed computation of padded batches, for trainers that make padded batches and expect padded outputs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from .._types import Args, Call, Model
from ..documents.names import TOKENS
from ..errors import NotAModel
from ..patch.applying import status
from ..patch.unwrap import transformers_model
from ..upstream import luggage
from ..upstream.find_models import models
from ..upstream.step import MARK

_LAYOUT = "layout"


@dataclass(frozen=True)
class _Layout:
    """Places of a packed row's tokens in the padded batch.

    Attributes:
        shape: ``(batch, length)`` of the padded batch.
        at: int64 ``[tokens]``, indices of the tokens into the flattened ``[batch * length]``.
    """

    shape: torch.Size
    at: torch.Tensor

    def packed(self, value: torch.Tensor) -> torch.Tensor:
        """Turn ``[batch, length, ...]`` into ``[1, tokens, ...]``."""
        return value.flatten(0, 1)[self.at.to(value.device)][None]

    def padded(self, value: Any) -> Any:
        """Turn tensors with one entry per token into padded ones, with zeros for padding; return others unchanged."""
        if isinstance(value, (tuple, list)):
            return type(value)(self.padded(one) for one in value)
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return value
        tokens, at = len(self.at), self.at.to(value.device)
        if tuple(value.shape[:2]) == (1, tokens):
            empty = value.new_zeros(self.shape[0] * self.shape[1], *value.shape[2:])
            return empty.index_copy(0, at, value[0]).view(*self.shape, *value.shape[2:])
        if value.shape[0] == tokens:  # router logits [tokens, experts]
            return value.new_zeros(self.shape[0] * self.shape[1], *value.shape[1:]).index_copy(0, at, value)
        return value


class PaddedBatches:
    """Forward hooks that make a patched model compute padded batches packed.

    They stay until ``remove()`` is called or the ``with`` block ends.

    Args:
        base: The inner model that loops over the layers.
    """

    def __init__(self, base: torch.nn.Module) -> None:
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
        packed = _packed(base, args, kwargs)
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


def pack_padded_batches(model: Model) -> PaddedBatches:
    """Make a patched model compute padded batches packed and return padded outputs.

    Padding is not computed between the embedding and the last hidden states. The head gets hidden states
    ``[batch, length, hidden]``, with zeros for padding. A padded batch has an ``attention_mask`` ``[batch, length]`` of
    zeros and ones and is padded left or right; the mask is read from the device once per forward. All other batches
    are unchanged: without padding, with gaps in the mask, with an empty row, with a cache (``generate``,
    ``use_cache=True``), with ``output_attentions=True``, with position ids on several axes, under ``torch.compile``,
    or without such a mask, as packed batches are.

    Args:
        model: A model that ``fa2patch.apply`` has patched, or a wrapper around one (PEFT, accelerate, DDP, FSDP).

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
    return PaddedBatches(models(inner)[-1])


def _packed(base: torch.nn.Module, args: Args, kwargs: Call) -> tuple[Call, _Layout] | None:
    """Return a padded batch's arguments as those of one packed row, with the layout; None for other batches."""
    if len(args) > 1 or base.__dict__.get(MARK) is None:
        return None
    call = {**({"input_ids": args[0]} if args else {}), **kwargs}
    tokens = next((call[name] for name in TOKENS if call.get(name) is not None), None)
    mask = call.get("attention_mask")
    cached = call.get("past_key_values") is not None or call.get("use_cache") or call.get("cache_position") is not None
    if tokens is None or cached or call.get("output_attentions") or not isinstance(mask, torch.Tensor):
        return None
    shape = mask.shape
    if mask.dim() != 2 or tokens.shape[:2] != shape or torch.compiler.is_compiling():
        return None
    host = mask.detach().cpu()
    real = host != 0
    lengths = real.sum(1)
    spans = real.int().diff(dim=1).ne(0).sum(1) + real[:, 0].int() + real[:, -1].int()  # 2 if there are no gaps
    if bool(real.all()) or bool((spans != 2).any()) or bool((host[real] != 1).any()):
        return None
    layout = _Layout(shape, real.flatten().nonzero()[:, 0])
    call.pop("attention_mask")
    packed = {name: layout.packed(v) if _per_token(v, shape) else v for name, v in call.items()}
    given = call.get("position_ids")
    if given is None:
        given = real.cumsum(1) - 1
    elif given.dim() == 2:
        given = given.expand(shape)
    else:
        return None
    position_ids = layout.packed(given.to(tokens.device))
    cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(tokens.device, torch.int32)
    longest = int(lengths.max())
    packed.update(position_ids=position_ids, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    packed.update(max_length_q=longest, max_length_k=longest)
    return packed, layout


def _per_token(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape[:2] == shape


def _padded(layout: _Layout, output: Any) -> Any:
    if isinstance(output, tuple):
        return layout.padded(output)
    for name, value in list(output.items()):
        output[name] = layout.padded(value)
    return output
