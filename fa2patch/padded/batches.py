"""Packed computation of padded batches, for trainers that make padded batches and expect padded outputs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import torch
from numpy.typing import NDArray

from .._compile import compiling
from .._types import Args, Call
from ..documents.names import LENGTHS, TOKENS
from ..errors import StaysPadded
from ..upstream import caches, luggage, rope
from ..upstream.calls import passed
from ..upstream.parts.engines import row_part
from ..upstream.step import MARK, PADDING, Patched
from ..upstream.traits import directions, positions
from .common_prefixes import Segments, shared_segments
from .layouts import Layout, packed_row
from .rows import read_rows


class PaddedBatches:
    """Makes a patched model compute padded batches packed, until ``remove()`` is called or the ``with`` block ends.

    The model's replaced forward calls :meth:`computed`. Forward hooks would not do: sentence-transformers calls
    ``model.forward(...)``, which runs none.

    Args:
        base: The inner model that loops over the layers.
        share_prompts: Whether equal prefixes of rows are computed once.
    """

    def __init__(self, base: torch.nn.Module, share_prompts: bool = False) -> None:
        self.base, self.share_prompts, self._said = base, share_prompts, False
        base.__dict__[PADDING] = self

    def remove(self) -> None:
        """Let padded batches be computed padded again."""
        if of_model(self.base) is self:
            del self.base.__dict__[PADDING]

    def computed(
        self, forward: Callable[[Any, Args, Call], Any], module: Any, args: Args, kwargs: Call, names: Sequence[str]
    ) -> Any:
        """Compute a batch: a padded one as one packed row, whose outputs are padded, and any other one as it is.

        Args:
            forward: The patched forward, as a function of the model and its arguments.
            module: The base model or, in data parallelism, a replica of it.
            args, kwargs: The arguments of the call.
            names: The names of positional arguments.
        """
        readable = len(args) <= len(names) and not compiling()
        packed = _packed(module, {**dict(zip(names, args)), **kwargs}, self.share_prompts) if readable else ""
        if isinstance(packed, str):
            self._say(packed)
            return forward(module, args, kwargs)
        call, layout = packed
        return _padded(layout, forward(module, (), call))

    def _say(self, why: str) -> None:
        """Warn the first time that there is a reason."""
        if why and not self._said:
            self._said = True
            warnings.warn(
                f"a batch of {type(self.base).__name__} is computed as it came, with its padding if it has any, and so "
                f"are others like it: {why}. The results are those without fa2patch.",
                StaysPadded,
                stacklevel=3,
            )

    def __enter__(self) -> PaddedBatches:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def of_model(base: torch.nn.Module) -> PaddedBatches | None:
    """What makes a base model compute padded batches packed, or None. A copy of a model has a copy of it."""
    found: PaddedBatches | None = base.__dict__.get(PADDING)
    return found


def _packed(base: Any, call: Call, share: bool) -> tuple[Call, Layout] | str:
    """Return a padded batch's arguments as those of one packed row, with the layout.

    For other batches, return why they are computed padded, or an empty string if they have no padding.
    """
    patch: Patched | None = base.__dict__.get(MARK)
    if patch is None or not _masked(call):
        return ""
    why = _why_padded(call) or ("a row is shared by several processes" if row_part(base, call) is not None else "")
    if why:
        return why
    mask, tokens = call.pop("attention_mask"), next(iter(passed(call, TOKENS).values()))
    given = call.get("position_ids")
    if given is not None:
        call["position_ids"] = given = given.expand(mask.shape)
    compared = _compared(call, mask.shape) if share and may_share(patch.found) else []
    rows = read_rows(mask, given, compared)
    if rows is None:
        return "each row of its mask must be zeros around one run of ones, on which its position ids count up"
    if rows.lengths.max() == 1:  # then outputs with one entry per row look like those per token
        return ""
    if given is None and rows.starts.any() and patch.found[positions.NAME].by_column:
        return "it is padded on the left without position_ids, and its model counts padding then"
    if rows.common is not None and may_share(patch.found, rows.lengths):
        segments = shared_segments(rows.common, rows.lengths)
    else:
        segments = Segments.alone(rows.lengths.tolist())
    if rows.full and not segments.shared:
        return ""
    described, layout = packed_row(mask.shape, rows.starts, rows.lengths, segments, tokens.device)
    packed = {name: layout.packed(v) if _per_token(v, mask.shape) else v for name, v in call.items()}
    if given is None:
        packed["position_ids"] = described["position_ids"] + patch.found[positions.NAME].first
    call = {**described, **packed}
    call["position_ids"] = luggage.attach(call["position_ids"], luggage.Piece(luggage.PADDING, True))
    return call, layout


def _masked(call: Call) -> bool:
    """Whether a call has a mask, no cache and no boundaries of its own. No value is looked at."""
    piece = luggage.find(call.get("position_ids"), luggage.MASK)
    packed = passed(call, LENGTHS) or (piece is not None and piece.content is not None)
    decodes = call.get("cache_position") is not None and call.get("use_cache") is not False
    cached = caches.held(call) or call.get("use_cache") or decodes
    return not packed and not cached and call.get("attention_mask") is not None and bool(passed(call, TOKENS))


def _why_padded(call: Call) -> str:
    """Why a call with a mask is not packed; empty if it can be. No value is looked at."""
    mask, given = call["attention_mask"], call.get("position_ids")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        found = f"has {mask.dim()} dimensions" if isinstance(mask, torch.Tensor) else f"is a {type(mask).__name__}"
        return f"its attention_mask {found}, and [batch, length] was expected"
    if next(iter(passed(call, TOKENS).values())).shape[:2] != mask.shape:
        return "its attention_mask has another shape than its tokens"
    if given is not None and given.dim() != 2:
        return f"its position_ids have {given.dim()} dimensions, and [batch, length] was expected"
    if call.get("cache_position") is not None:
        return "a model around it made a cache_position, which counts places in padded rows"
    return "it was called with output_attentions=True" if call.get("output_attentions") else ""


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
