"""The model's ``forward``: where a packed batch is recognised.

Two functions of a model are replaced, on the classes that define them, and do nothing for an instance that carries no
mark of ours. The causal LM's accepts the collator's lengths on every version; the base model's (``model.model``, the
one that loops over the layers, which also PEFT, TRL and accelerate end up calling) turns a packed batch's mask into a
:class:`PackedMask`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Callable

import torch

from .._compile import compiling
from ..errors import NothingPacked, PackingNotIsolated
from . import embeddings, pooling
from .axes import without_text_axis
from .calls import LENGTHS, Calls, batch_shape
from .labels import LABELS, inside_documents, predicts_the_next
from .layers import models
from .packed_batch import has_pictures, lengths_of, packed_mask, refuse_uncounted_pictures, with_lengths, with_mask
from .packed_mask import PackedMask, find

MARK = "_fa2patch"
"""Name of the instance attribute that says: this model is patched. It holds the model's ``Patch``."""

SAY_AFTER = 16
"""After so many training batches in which nothing said where documents start, a warning."""


class _Reached(threading.local):
    """What this thread has come through: tripwires, nothing is carried by them.

    Attributes:
        times: how often a base model's patched forward.
        inside: patches of the models around this point that have looked at a batch and found it not packed, each with
            that batch's position_ids and mask.
    """

    times = 0

    def __init__(self) -> None:
        self.inside: list[Any] = []


_reached = _Reached()


def causal_lm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement for a causal LM's ``forward``: takes the collator's lengths, also where the original does not."""
    calls = Calls(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch = self.__dict__.get(MARK)
        if patch is None or _batches_continuously(kwargs):
            return original(self, *args, **kwargs)
        call = calls.named(args, kwargs)
        if pooling.ridden(call) is not None:  # through super(), from a class of which another model is patched
            return original(self, *args, **kwargs)
        lengths = lengths_of(call)
        if lengths and not (calls.takes_any and compiling()):
            shape, device = batch_shape(call)
            if call.get("position_ids") is None:
                refuse_uncounted_pictures(self, call)
            call["position_ids"] = with_lengths(call.get("position_ids"), lengths, shape, device, patch.first_position)
            if has_pictures(call):  # 5.10 to 5.16 hand them on to the vision tower, which has its own
                call = {name: value for name, value in call.items() if name not in LENGTHS}
        pools = pooling.pools_documents(self)
        # the **kwargs of Falcon's and Phi's token classifiers hand position_ids to nobody
        swallows = "position_ids" not in calls.names and not predicts_the_next(self)
        looks_itself = patch.makes_masks or patch.stops_ids or pools or swallows or not calls.takes("position_ids")
        labelled = [name for name in LABELS if call.get(name) is not None and predicts_the_next(self)]
        # with document numbers in the mask, and pictures, nobody has counted what get_rope_index must
        uncounted = call.get("position_ids") is None and call.get("attention_mask") is not None and has_pictures(call)
        looked = looks_itself or ((labelled or uncounted) and not compiling())
        mask = packed_mask(call, patch) if looked else None
        cu = mask.boundaries.cu_seqlens if mask is not None else call.get("cu_seq_lens_q") if compiling() else None
        if labelled and cu is not None:
            shape, _ = batch_shape(call)
            call.update({name: inside_documents(call[name], cu, name, shape) for name in labelled})
        if mask is not None and looks_itself:
            if pools:
                call, ride = pooling.by_document(self, call, mask)
                output = _packed(calls, self, args, call, mask)
                pooling.require_arrived(self, ride)
                return output
            return _packed(calls, self, args, call, mask)
        if mask is not None:
            call["position_ids"] = with_mask(call["position_ids"], mask)
        if compiling():
            return calls.make(self, args, call)
        before = _reached.times
        with _looked(patch if looked and mask is None else None, call):
            output = calls.make(self, args, call)
        if _reached.times == before and _runs_eagerly(self):
            raise PackingNotIsolated(
                "a batch did not come through the base model's patched forward: somebody has replaced it after "
                "fa2patch.apply. See fa2patch.status(model); apply fa2patch last."
            )
        return output

    if not calls.takes("position_ids"):  # OPT up to 4.45; Trainer drops columns that are not in the signature
        signature = inspect.signature(original)
        extra = inspect.Parameter("position_ids", inspect.Parameter.KEYWORD_ONLY, default=None)
        extended = signature.replace(parameters=[*signature.parameters.values(), extra])
        setattr(forward, "__signature__", extended)  # noqa: B010 (mypy does not know the attribute)
    return forward


def _batches_continuously(kwargs: dict[str, Any]) -> bool:
    """``generate_batch``: Transformers packs prompts itself, and decodes each with pages of a cache of its own."""
    return "PagedAttentionCache" in type(kwargs.get("cache")).__name__


def _runs_eagerly(model: Any) -> bool:
    """Whether the base model's forward runs as Python: compiled on its own it passes no count on."""
    own = ("forward", "_orig_mod", "_compiled_call_impl")
    inner = models(model)[1:]
    return not any(vars(base).get(name) or base._modules.get(name) for base in inner for name in own)


def base_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement for a base model's ``forward``: a packed batch gets a :class:`PackedMask`; others go as they came."""
    calls = Calls(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch = self.__dict__.get(MARK)
        if patch is None or _batches_continuously(kwargs):
            return original(self, *args, **kwargs)
        if not compiling():
            _reached.times += 1
        call = calls.named(args, kwargs)
        ride = pooling.ridden(call)
        if ride is not None:
            return ride.pooled(forward(self, **{**call, **ride.whole}))
        if not compiling():
            _refuse_split_rows(self)
        given = call.get("attention_mask")
        around = [] if compiling() else [(ids, mask) for looked, ids, mask in _reached.inside if looked is patch]
        made_by_a_model = _is_dense(given) and (compiling() or around)
        if any(ids is call.get("position_ids") and mask is given for ids, mask in around):
            return calls.make(self, args, _rotated_by(self, calls, call))
        found_before = find([*(given.values() if isinstance(given, dict) else [given]), call.get(patch.carrier)])
        if found_before is not None:
            if call.get("position_ids") is None and "position_ids" in calls.names:
                call["position_ids"] = found_before.position_ids
            if "use_cache" in calls.names and not patch.needs_cache:
                call["use_cache"] = False  # a model around this one may have no such argument (Qwen3.5 in 5.10)
            return calls.make(self, args, _rotated_by(self, calls, call))
        if made_by_a_model:
            return original(self, *args, **kwargs)
        made_inside = any(ids is None and mask is given for ids, mask in around)
        mask = packed_mask(call, patch, made_inside=made_inside)
        if mask is not None:
            return embeddings.pool_documents(self, _packed(calls, self, args, call, mask), mask)
        call = _rotated_by(self, calls, call)
        if not compiling():
            _count_unpacked(patch, self, call)
        with _looked(patch, call):
            return calls.make(self, args, call)

    return forward


def _rotated_by(model: Any, calls: Calls, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with ids of as many axes as the model rotates by, where it would not see to that itself."""
    if call.get("position_ids") is None:
        return call
    return {**call, "position_ids": without_text_axis(model, calls.original, call["position_ids"])}


def _count_unpacked(patch: Any, model: Any, call: dict[str, Any]) -> None:
    """Says once that training goes on without a packed batch: rows that some collator joined in silence look so."""
    if patch.unpacked is None or not (model.training and torch.is_grad_enabled()):
        return
    if any(call.get(name) is not None for name in ("position_ids", *LENGTHS)):
        return
    patch.unpacked += 1
    if patch.unpacked == SAY_AFTER:
        patch.unpacked = None
        warnings.warn(
            f"fa2patch.apply(model) is on, but {SAY_AFTER} training batches have come and none said where documents "
            "start (position_ids, cu_seq_lens_*, seq_idx). If examples were joined in these rows (TRL up to 0.19 does "
            "so: packing=True, and padding_free=True without flash attention), they attend to each other. Collate with "
            "fa2patch.DataCollatorWithFlattening; fa2patch.verify(model, batch=batch) says what a batch holds.",
            NothingPacked,
            stacklevel=2,
        )


@contextlib.contextmanager
def _looked(patch: Any, call: dict[str, Any]) -> Iterator[None]:
    """While a model computes a batch that is not packed: the masks that models inside it get are its own."""
    if compiling():
        yield
        return
    _reached.inside.append((patch, call.get("position_ids"), call.get("attention_mask")))
    try:
        yield
    finally:
        _reached.inside.pop()


def _is_dense(mask: Any) -> bool:
    """A mask for every query, or a dictionary of such for the kinds of layers."""
    return isinstance(mask, dict) or (isinstance(mask, torch.Tensor) and mask.dim() > 2)


def _packed(calls: Calls, model: Any, args: tuple[Any, ...], call: dict[str, Any], mask: PackedMask) -> Any:
    """The result of a packed batch, if every attention layer was given its boundaries."""
    patch = vars(model)[MARK]
    patch.unpacked = None
    call[patch.carrier] = mask
    call = _rotated_by(model, calls, call)
    if not calls.takes("position_ids"):
        del call["position_ids"]
    if "use_cache" in {*calls.names, *call} and not patch.needs_cache:
        call["use_cache"] = False
    try:
        output = calls.make(model, args, call)
    except TypeError as error:
        if PackedMask.__name__ not in str(error):
            raise
        raise PackingNotIsolated(
            f"{type(model).__name__} used the mask of a packed batch in a way that fa2patch does not know, or a "
            f"layer of it is not patched any more ({error}). See fa2patch.status(model).layers; please report it."
        ) from error
    if compiling():
        missed = len(mask.calls) < len(patch.attention)
    else:
        known = None not in mask.calls  # 4.47's and 4.48's GPT-NeoX hands its function everything but the layer
        missed = len(mask.calls) < len(patch.attention)
        missed = missed or (known and not patch.vouched and bool(_not_given(patch, mask, model)))
        patch.vouched = not missed
    if missed:
        names = _not_given(patch, mask, model)
        raise PackingNotIsolated(
            f"of {len(patch.attention)} attention layers only {len(patch.attention) - len(names)} were given the "
            f"boundaries of this packed batch; not {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}. Their "
            "attention was replaced after fa2patch.apply: apply fa2patch last. See fa2patch.status(model).layers."
        )
    return output


def _not_given(patch: Any, mask: PackedMask, model: Any) -> list[str]:
    """The attention layers, by name and class, that have not seen a packed batch's boundaries.

    Of the model that was called: a replica (``DataParallel``) carries the patch of the one that it was made of.
    """
    given = {id(module) for module in mask.calls}
    decoder = models(model)[-1]
    modules = [(layer.name, decoder.get_submodule(layer.name)) for layer in patch.attention]
    return [f"{name} ({type(module).__name__})" for name, module in modules if id(module) not in given]


def _refuse_split_rows(model: Any) -> None:
    """DeepSpeed's Ulysses stands in an attention function's place: each process has a part of every row."""
    from transformers import modeling_utils

    table = getattr(modeling_utils, "ALL_ATTENTION_FUNCTIONS", {})
    name = getattr(model.config, "_attn_implementation", None)
    function = table[name] if isinstance(name, str) and name in table else None
    if getattr(function, "__module__", "").startswith("deepspeed.runtime.sequence_parallel"):
        raise PackingNotIsolated(
            "DeepSpeed's sequence parallelism (sp_size) is on: this process holds only a part of every row, so "
            "documents that are cut would be computed wrong. Train without it, or revert the patch and train padded."
        )
