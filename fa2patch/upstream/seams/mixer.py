"""The mixer seam: a mixer (Mamba, gated delta net, short convolution, ...) runs on each document separately.

Its state and its convolution then start anew at every boundary, in forward and backward, with any kernel. Documents of
near length share a call as a batch (``near_lengths.py``), if a trial on this machine has shown that the mixer computes
them so as one by one (``mixer_trial.py``). Modules that treat each token alone (norms, projections around the mixer,
experts) still run on the whole row. So does a mixer that is found to keep documents apart by itself (``whole_row.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from ..._torch import computed_in, uncompiled
from ..._types import Args, Call, Function
from ...documents.boundaries import Boundaries
from ...documents.names import LENGTHS
from ...errors import PackedWithCache, PackingNotIsolated
from ...kernels.picks import DOCUMENTS
from .. import apart, caches, inspecting
from ..packed_mask import PackedMask, find
from . import mixer_trial, whole_row
from .mixing import Mixing

MASKS = ("attention_mask", "mask", "conv_mask")
"""Names of the mask argument through which a mixer is given the boundaries."""


def takes_mask(forward: Function) -> bool:
    """Whether a ``forward`` takes a mask, or ``*args``, which may hold one."""
    return inspecting.takes_any_position(forward) or any(inspecting.takes(forward, name) for name in MASKS)


def takes_positions(forward: Function) -> bool:
    """Whether a ``forward`` takes what Mamba up to 4.44 hands to its layers instead of a mask, or ``*args``."""
    return inspecting.takes_any_position(forward) or inspecting.takes(forward, "cache_position")


def takes_cache(forward: Function) -> bool:
    """Whether a ``forward`` takes a cache or a state, which RWKV and xLSTM hand to their layers, or ``*args``."""
    return inspecting.takes_any_position(forward) or caches.takes_one(forward)


def by_document(original: Function) -> Function:
    """Return the replacement for a mixer class's ``forward``, which computes packed batches document by document.

    The replacement passes the whole row, or several documents as a batch, if a trial has shown that this is right. It
    raises
    :class:`PackedWithCache` if a cache or state comes with a packed batch, and :class:`PackingNotIsolated` if the
    mixer's output does not have one entry for each token.
    """
    names, lengths = inspecting.parameter_names(original)[1:], whole_row.accepted(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = find(chain(args, kwargs.values()))
        if mask is None:
            return original(self, *args, **kwargs)
        named = {**dict(zip(names, args)), **kwargs}
        held = [name for name, value in caches.held(named).items() if value is not mask]
        if held:
            raise PackedWithCache(
                f"{type(self).__name__} was handed {held[0]} with a packed batch. What a cache holds belongs to no one "
                "document of the row. Leave it out (use_cache=False)."
            )
        mask.given(self)
        return _computed(original, lengths, self, args, kwargs, mask, hands_on=named.get("state") is mask)

    return forward


@uncompiled
def _computed(
    original: Function,
    lengths: Sequence[str],
    module: torch.nn.Module,
    args: Args,
    kwargs: Call,
    mask: PackedMask,
    hands_on: bool,
) -> Any:
    """Compute a packed batch in the first way that a trial has shown to be right, else document by document.

    Args:
        lengths: the names of the collator's lengths that the mixer accepts.
        hands_on: whether the second output is the next layer's state, so that the mask is returned in its place.
    """
    kwargs = {name: value for name, value in kwargs.items() if name not in LENGTHS}
    place, hidden = _hidden(args, kwargs, mask.shape)
    boundaries = _own_documents(module, mask)
    mixing = Mixing(original, module, args, kwargs, place, hidden, boundaries, mask.shape, hands_on)
    documents, more = _chosen(mixing, mask, lengths)
    output = mixing.computed(documents, more)
    return (output, mask) if hands_on else output


def _chosen(mixing: Mixing, mask: PackedMask, lengths: Sequence[str]) -> tuple[apart.Documents, Call]:
    """The documents in the calls of the first way that is right, and further keywords. The choice is recorded."""
    module, hidden = mixing.module, mixing.hidden
    failed: list[str] = []
    if hidden is not None and mixer_trial.is_possible(module):
        kind = _kind_of_call(module, hidden)
        for way in mixing.ways(hidden.device, lengths):
            sizes = mixer_trial.sizes(way.documents)
            verdict = mask.picks.tried(module, (way.name, kind), sizes, functools.partial(mixing.trial, way))
            if verdict.able:
                mask.picks.took(module, way.portions, failed)
                return way.documents, way.more
            failed.append(f"tried on this machine with {way.name}, it {verdict.why}")
    mask.picks.took(module, DOCUMENTS, failed)
    return mixing.one_by_one(), {}


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
    """What selects a mixer's kernels: device, dtypes, training.

    Inference mode counts, too: tensors that were made in it cannot be saved for a trial's backward.
    """
    return hidden.device, hidden.dtype, computed_in(hidden), module.training, torch.is_inference_mode_enabled()


def _hidden(args: Args, kwargs: Call, shape: tuple[int, int]) -> tuple[Any, torch.Tensor | None]:
    """The place or name of the hidden states ``[batch, length, width]`` among a mixer's arguments, and the states."""
    for place, value in chain(enumerate(args), kwargs.items()):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[:-1] == shape:
            return place, value
    return None, None
