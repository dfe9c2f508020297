"""The mixer seam: a mixer (Mamba, gated delta net, short convolution, ...) runs on each document separately.

Its state and its convolution then start anew at every boundary, in forward and backward, with any kernel. Modules that
treat each token alone (norms, projections around the mixer, experts) still run on the whole row. So does a mixer that
is found to keep documents apart by itself (``whole_row.py``).
"""

from __future__ import annotations

import functools
from itertools import chain
from typing import Any

import torch

from ..._compile import uncompiled
from ..._types import Args, Call, Function
from ...documents.boundaries import Boundaries
from ...documents.names import CACHES, LENGTHS
from ...errors import PackedWithCache, PackingNotIsolated
from .. import apart, inspecting
from ..calls import passed
from ..packed_mask import PackedMask, find
from . import looks_back, whole_row

MASKS = ("attention_mask", "mask", "conv_mask")
"""Names of the mask argument through which a mixer is given the boundaries."""

OTHER_WAYS = ("cache_position", "cache_params", "state")
"""Arguments for the boundaries if no layer takes a mask (RWKV, Mamba up to 4.44), in order of preference."""


def is_handed(names: tuple[str, ...], forward: Function) -> bool:
    """Whether a ``forward`` takes an argument of one of these names, or ``*args``, which may hold one."""
    return inspecting.takes_any_position(forward) or any(inspecting.takes(forward, name) for name in names)


def by_document(original: Function) -> Function:
    """Return the replacement for a mixer class's ``forward``, which computes packed batches document by document.

    The replacement passes the whole row instead if a trial has shown that the mixer keeps documents apart. It raises
    :class:`PackedWithCache` if a cache or state comes with a packed batch, and :class:`PackingNotIsolated` if the
    mixer's output does not have one entry for each token.
    """
    names = inspecting.parameter_names(original)[1:]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = find(chain(args, kwargs.values()))
        if mask is None:
            return original(self, *args, **kwargs)
        named = {**dict(zip(names, args)), **kwargs}
        held = [name for name, value in passed(named, CACHES).items() if value is not mask]
        if held:
            raise PackedWithCache(
                f"{type(self).__name__} was handed {held[0]} with a packed batch. What a cache holds belongs to no one "
                "document of the row. Leave it out (use_cache=False)."
            )
        mask.given(self)
        return _computed(original, self, args, kwargs, mask, hands_on=named.get("state") is mask)

    return forward


@uncompiled
def _computed(
    original: Function,
    module: torch.nn.Module,
    args: Args,
    kwargs: Call,
    mask: PackedMask,
    hands_on: bool,
) -> Any:
    """Compute the whole row at once if a trial has shown that this is right, else document by document.

    Args:
        hands_on: whether the second output is the next layer's state, so that the mask is returned in its place.
    """
    boundaries = _own_documents(module, mask)
    each, whole = apart.Documents(boundaries, mask.shape), apart.Documents.whole(mask.shape)
    kwargs = {name: value for name, value in kwargs.items() if name not in LENGTHS}
    place, row = _hidden(args, kwargs, mask.shape)

    def among(documents: apart.Documents, more: dict[str, Any], hidden: torch.Tensor | None = None) -> Any:
        given, named = list(args), dict(kwargs)
        if hidden is not None:
            (named if isinstance(place, str) else given)[place] = hidden
        outputs = documents.of_each(functools.partial(original, module, **more), given, named)
        looks_back.require(module, documents, hidden if hidden is not None else row, outputs)
        if hands_on:
            return documents.join([output[0] for output in outputs]), mask
        return documents.join(outputs)

    shares = mask.boundaries.parents is not None
    if row is None or shares or not whole_row.may_be(original, module, row, each.lengths):
        mask.picks.takes_documents(module)
        return among(each, {})
    more = whole_row.keywords(original, boundaries, sum(each.lengths))
    at_once = mask.picks.takes_whole_rows(
        module,
        _kind_of_call(module, row),
        lambda: whole_row.keeps_apart(
            lambda hidden: among(whole, more, hidden), lambda hidden: among(each, {}, hidden), row, each.lengths
        ),
    )
    return among(whole, more) if at_once else among(each, {})


def _own_documents(module: torch.nn.Module, mask: PackedMask) -> Boundaries:
    """The boundaries of the documents that this process holds.

    Raises:
        PackingNotIsolated: rows are split over processes inside a document, or hold a tree.
    """
    if mask.part is None:
        return mask.boundaries
    own = mask.part.documents(mask.boundaries, mask.shape)
    if own is None:
        raise PackingNotIsolated(
            f"sequence parallelism (sp_size) splits rows over {mask.part.of} processes, and {type(module).__name__} "
            "carries a state along each document: expected documents that lie whole in one process, "
            f"{mask.shape[1]} tokens of a row, without segment_parents; found one that goes on in the next. Pack rows "
            "so that a document starts wherever they are cut, or train this model without sequence parallelism."
        )
    return own


def _kind_of_call(module: torch.nn.Module, hidden: torch.Tensor) -> tuple[Any, ...]:
    """What selects a mixer's kernels: device, dtypes, training. An empty product shows the dtype under autocast."""
    computed_in = torch.nn.functional.linear(hidden.new_empty(0, 1), hidden.new_empty(1, 1)).dtype
    return hidden.device, hidden.dtype, computed_in, module.training


def _hidden(args: Args, kwargs: Call, shape: tuple[int, int]) -> tuple[Any, torch.Tensor | None]:
    """The place or name of the hidden states ``[batch, length, width]`` among a mixer's arguments, and the states."""
    for place, value in chain(enumerate(args), kwargs.items()):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[:-1] == shape:
            return place, value
    return None, None
