"""The mixer seam: a mixer (Mamba, gated delta net, short convolution, ...) runs on each document separately.

Its state and its convolution then start anew at every boundary, in forward and backward. It gets several documents at
once only if a trial on this machine has shown that this is right (:mod:`.mixer_trial`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch

from ..._torch import computed_in, uncompiled, without_gradients
from ..._types import Args, Call, Function
from ...documents.names import LENGTHS
from ...errors import BadParents, PackedWithCache, PackingNotIsolated
from ...kernels.picks import DOCUMENTS, Mixed
from .. import caches, inspecting
from ..packed_mask import PackedMask, mask_among
from ..splitting import Documents
from . import mixer_calls, mixer_trial
from .mixer_calls import Mixing, Way


def by_document(original: Function) -> Function:
    names, lengths = inspecting.parameter_names(original)[1:], inspecting.accepted(original, mixer_calls.KEYWORDS)
    if not {"seq_idx", "cu_seq_lens_q"}.intersection(lengths):  # the others do not say where documents are
        lengths = []

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = mask_among(chain(args, kwargs.values()))
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
    original: Function, lengths: Sequence[str], module: torch.nn.Module, args: Args, kwargs: Call, mask: PackedMask,
    hands_on: bool,
) -> Any:  # fmt: skip
    # If the mixer hands a state on to the next layer as its second output, the mask is returned in its place.
    kwargs = {name: value for name, value in kwargs.items() if name not in LENGTHS}
    documents = mask.boundaries
    if mask.part is not None:
        own = mask.part.documents(mask.boundaries, mask.shape)
        if own is None:
            raise PackingNotIsolated(
                f"{mask.part.engine} splits rows over {mask.part.of} processes, and "
                f"{type(module).__name__} carries a state along each document: expected documents that lie whole in "
                f"one process, {mask.shape[1]} tokens of a row, without segment_parents; found one that goes on in "
                "another. Pack rows so that a document starts wherever they are cut, or train this model without it."
            )
        documents = own
    mixing = Mixing(original, module, args, kwargs, documents, mask.shape, hands_on)
    way = _chosen(mixing, mask, lengths)
    outputs = way.documents.of_each(functools.partial(original, module, **way.more), args, kwargs)
    _require_no_look_back(mixing, way.documents, outputs)
    # Of a tree, each path is computed by itself, and what paths share is taken from the first of them.
    output = way.documents.join([output[0] for output in outputs] if hands_on else outputs)
    return (output, mask) if hands_on else output


def _chosen(mixing: Mixing, mask: PackedMask, lengths: Sequence[str]) -> Way:
    # The kernels of causal-conv1d, mamba-ssm and flash-linear-attention keep documents apart by lengths. It depends on
    # the version whether the keywords reach them, and many mixers accept the keywords and ignore them.
    module, hidden, failed, kind = mixing.module, mixing.hidden, list[str](), None
    # What selects a mixer's kernels. Inference mode counts, too: tensors that were made in it cannot be saved for a
    # trial's backward. DeepSpeed's ZeRO-3 would take a trial's backward for the training's, so there can be no trial.
    if hidden is not None and not any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        kind = hidden.device, hidden.dtype, computed_in(hidden), module.training, torch.is_inference_mode_enabled()

    def is_right(way: Way) -> bool:
        if kind is None or way.portions is DOCUMENTS:
            return way.portions is DOCUMENTS
        trial = functools.partial(mixer_trial.verdict, mixing, way)
        tried = mask.picks.tried(module, (way.name, *kind), way.sizes, trial)
        if not tried.able:
            failed.append(f"tried on this machine with {way.name}, it {tried.why}")
        return tried.able

    way = next(filter(is_right, mixing.ways(lengths)))
    mask.picks.took(module, Mixed(way.portions, "; ".join(failed)))
    return way


_LOOK_BACK: WeakSet[torch.nn.Module] = WeakSet()  # mixers that have been checked


@without_gradients()
def _require_no_look_back(mixing: Mixing, documents: Documents, outputs: Sequence[Any]) -> None:
    # If a shared segment's outputs depend on what follows it (ConvBERT), the same prompt gives other outputs before
    # each of its completions. A mixer has no attribute that says so.
    found, module, hidden = documents.shared(), mixing.module, mixing.hidden
    if found is None or module in _LOOK_BACK:
        return
    one, tokens, other = found
    if hidden is not None:
        paths = torch.split(documents.end_to_end(hidden), documents.lengths)
        if torch.equal(*(paths[at][tokens.stop :] for at in (one, other))):
            return  # two equal paths show nothing
    states = documents.tokens_of([output[0] if isinstance(output, tuple) else output for output in outputs])
    if states is None:
        return  # joining the outputs is an error
    first, second = (torch.split(states, documents.lengths)[at][tokens] for at in (one, other))
    near = {torch.float64: 1e-6, torch.float32: 1e-3}.get(first.dtype, 3e-2)
    if (first - second).abs().max() > near * first.abs().max():
        raise BadParents(
            f"segment_parents: {type(module).__name__} looks at later tokens, so a prompt would be another one before "
            "each of its completions. Give this model every sequence as a document of its own."
        )
    if hidden is not None:
        _LOOK_BACK.add(module)
