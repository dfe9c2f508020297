"""The model's ``forward``: where a packed batch is recognised.

The forwards of the models that a call goes through are replaced, on the classes that define them, and do nothing for an
instance that carries no mark of ours. The first one that a batch comes to looks where documents start. Those around
the base model hand the :class:`PackedMask` on (see ``luggage.py``). The base model (``model.model``, the one that loops
over the layers) puts it in the attention mask's place.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import torch

from .._compile import compiling
from ..errors import NothingPacked, PackingNotIsolated
from ..trying import says_nothing
from . import foreign, luggage
from .calls import LENGTHS, Calls, batch_shape
from .layers import models
from .packed_batch import has_pictures, is_for_queries, packed_mask
from .packed_mask import PackedMask, find
from .split_rows import refuse_split_rows
from .traits import embeddings, heads, pooling
from .traits.axes import without_text_axis
from .traits.labels import LABELS, inside_documents

MARK = "_fa2patch"
"""Name of the instance attribute that says: this model is patched. It holds the model's ``Patch``."""

ROLE = "_fa2patch_role"
"""Name of the instance attribute beside it: the model's :class:`Role`."""

SAY_AFTER = 16
"""After so many training batches in which nothing said where documents start, a warning."""


class Role(NamedTuple):
    """What one of the models is that a call goes through.

    Attributes:
        outermost: whether no other one is around it.
        innermost: whether it is the one that loops over the layers.
        predicts_the_next: whether its labels are what the token before predicts.
        pools: whether its head pools the last token of each row, which is done for each document.
    """

    outermost: bool
    innermost: bool
    predicts_the_next: bool = False
    pools: bool = False


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


def entered(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement for a model's ``forward``; it takes the collator's lengths, also where the original does not."""
    calls = Calls(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch = self.__dict__.get(MARK)
        if patch is None or batches_continuously(kwargs):
            return original(self, *args, **kwargs)
        role: Role = self.__dict__[ROLE]
        call = calls.named(args, kwargs)
        if pooling.is_riding(call) and not role.innermost:  # through super(): another model of that class is patched
            return original(self, *args, **kwargs)
        ride = pooling.ridden(call)
        if ride is not None:
            return ride.pooled(forward(self, **{**call, **ride.whole}))
        return (_innermost if role.innermost else _around)(self, patch, role, calls, args, call)

    foreign.ours(forward)
    if not calls.takes("position_ids"):  # OPT up to 4.45; Trainer drops columns that are not in the signature
        signature = inspect.signature(original)
        extra = inspect.Parameter("position_ids", inspect.Parameter.KEYWORD_ONLY, default=None)
        extended = signature.replace(parameters=[*signature.parameters.values(), extra])
        setattr(forward, "__signature__", extended)  # noqa: B010 (mypy does not know the attribute)
    return forward


def _around(self: Any, patch: Any, role: Role, calls: Calls, args: tuple[Any, ...], call: dict[str, Any]) -> Any:
    """The forward of a model that has the base model inside it."""
    passed_by = None
    if role.outermost:
        refuse_split_rows(self, call)
        looked_at = luggage.find(call.get("position_ids"), luggage.MASK) is not None
        passed_by = None if looked_at else foreign.on_top_of_ours(self)
    handed = _handed_on(patch, call)
    mask = handed if handed is not None else look(self, patch, call)
    if mask is None:
        return _not_packed(self, patch, calls, args, call)
    if passed_by is not None and not any(call.get(name) is not None for name in LABELS):
        foreign.refuse_bypassed(self, passed_by)
    call = fitted_to_head(self, role, call, mask)
    if handed is not None:
        return calls.make(self, args, _in_its_place(patch, calls, call, handed))
    if role.pools:
        return _pooled(self, calls, args, call, mask)
    if carries_itself(self, patch, role, calls):
        output = _packed(calls, self, args, call, mask)
    else:
        piece = luggage.Piece(luggage.MASK, mask)
        call["position_ids"] = luggage.attach(call["position_ids"], piece)
        output = calls.make(self, args, call)
        luggage.require_delivered(piece, self)
    if role.outermost:
        heads.refuse_outputs_of_rows(self, output, call, mask)
    return output


def _pooled(self: Any, calls: Calls, args: tuple[Any, ...], call: dict[str, Any], mask: PackedMask) -> Any:
    """The output of a head that pools the last token of each row, which is done for each document."""
    call, ride = pooling.by_document(self, call, mask)
    try:
        output = _packed(calls, self, args, call, mask)
    except Exception as error:  # upstream's own, on the few tokens that came without what rides on them
        if not says_nothing(error):
            luggage.require_delivered(ride, self)
        raise
    luggage.require_delivered(ride, self)
    return output


def _innermost(self: Any, patch: Any, role: Role, calls: Calls, args: tuple[Any, ...], call: dict[str, Any]) -> Any:
    """The base model's forward: a packed batch gets a :class:`PackedMask`; others go as they came."""
    if not compiling():
        _reached.times += 1
    refuse_split_rows(self, call)
    handed = _handed_on(patch, call)
    if handed is not None:
        return calls.make(self, args, _rotated_by(self, calls, _in_its_place(patch, calls, call, handed)))
    around = [] if compiling() else [(ids, mask) for looked, ids, mask in _reached.inside if looked is patch]
    given = call.get("attention_mask")
    if any(ids is call.get("position_ids") and mask is given for ids, mask in around):
        return calls.make(self, args, _rotated_by(self, calls, call))
    if is_for_queries(given) and (compiling() or around):  # made by a model around this one
        return calls.make(self, args, call)
    looked_at = role.outermost or luggage.find(call.get("position_ids"), luggage.MASK) is not None
    passed_by = None if looked_at else foreign.on_top_of_ours(patch.model)
    mask = look(self, patch, call, made_inside=any(ids is None and mask is given for ids, mask in around))
    if mask is None:
        call = _rotated_by(self, calls, call)
        if not around:
            _count_unpacked(patch, self, call)
        with _looked(patch, call):
            return calls.make(self, args, call)
    if is_for_queries(given):
        raise PackingNotIsolated(
            f"a model around this {type(self).__name__} made a mask for every query of a packed batch, and what it "
            "says beyond documents is not known. Please report the model; until then train it padded."
        )
    if passed_by is not None:
        foreign.refuse_bypassed(patch.model, passed_by)
    return embeddings.pool_documents(self, _packed(calls, self, args, call, mask), mask)


def look(self: Any, patch: Any, call: dict[str, Any], made_inside: bool = False) -> PackedMask | None:
    """Where documents start, once for all the models of a call; None is a dense batch."""
    piece = luggage.find(call.get("position_ids"), luggage.MASK)
    if piece is not None and (piece.content is None or piece.content.shape == batch_shape(call)[0]):
        piece.delivered = True
        found: PackedMask | None = piece.content
        return found
    found = packed_mask(call, patch, made_inside, training=self.training and torch.is_grad_enabled())
    if found is not None and has_pictures(call):  # 5.10 to 5.16 hand lengths on to the vision tower, which has its own
        for name in LENGTHS:
            call.pop(name, None)
    if found is not None:
        patch.examine(self, call, found)
    return found


def fitted_to_head(self: Any, role: Role, call: dict[str, Any], mask: PackedMask) -> dict[str, Any]:
    """A packed batch's arguments without labels that cross; an error for what a head would take for a row's."""
    if role.pools or role.innermost:
        return call
    labels = {name: call[name] for name in LABELS if role.predicts_the_next and call.get(name) is not None}
    shape, _ = batch_shape(call)
    cu = mask.boundaries.cu_seqlens
    call = {**call, **{name: inside_documents(value, cu, name, shape) for name, value in labels.items()}}
    heads.refuse_arguments_of_rows(self, call, mask)
    return call


def carries_itself(self: Any, patch: Any, role: Role, calls: Calls) -> bool:
    """Whether a model around the base model must put the mask in its place: ids from here on would not arrive."""
    # a model inside another one makes masks for its own layers (Gemma 3), and is handed ours in their place;
    # the **kwargs of Falcon's and Phi's token classifiers hand position_ids to nobody
    swallows = "position_ids" not in calls.names and not role.predicts_the_next
    return bool(
        not role.outermost or patch.makes_masks or patch.stops_ids or swallows or not calls.takes("position_ids")
    )


def _handed_on(patch: Any, call: dict[str, Any]) -> PackedMask | None:
    """The mask that a model around this one has put in its place."""
    given = call.get("attention_mask")
    return find([*(given.values() if isinstance(given, dict) else [given]), call.get(patch.carrier)])


def _in_its_place(patch: Any, calls: Calls, call: dict[str, Any], mask: PackedMask) -> dict[str, Any]:
    call = dict(call)
    if call.get("position_ids") is None and "position_ids" in calls.names:
        call["position_ids"] = mask.position_ids
    if "use_cache" in calls.names and not patch.needs_cache:
        call["use_cache"] = False  # a model around this one may have no such argument (Qwen3.5 in 5.10)
    return call


def _not_packed(self: Any, patch: Any, calls: Calls, args: tuple[Any, ...], call: dict[str, Any]) -> Any:
    """A dense batch, as without fa2patch; the models inside are told that somebody has looked."""
    if compiling():
        if isinstance(call.get("position_ids"), torch.Tensor):
            call["position_ids"] = luggage.attach(call["position_ids"], luggage.Piece(luggage.MASK, None))
        return calls.make(self, args, call)
    before = _reached.times
    if not any(looked is patch for looked, *_ in _reached.inside):
        _count_unpacked(patch, self, call)
    with _looked(patch, call):
        output = calls.make(self, args, call)
    if _reached.times == before and _runs_eagerly(self):
        raise PackingNotIsolated(
            "a batch did not come through the base model's patched forward: somebody has replaced it after "
            "fa2patch.apply. See fa2patch.status(model); apply fa2patch last."
        )
    return output


def batches_continuously(kwargs: dict[str, Any]) -> bool:
    """``generate_batch``: Transformers packs prompts itself, and decodes each with pages of a cache of its own."""
    return "PagedAttentionCache" in type(kwargs.get("cache")).__name__


def _runs_eagerly(model: Any) -> bool:
    """Whether the base model's forward runs as Python: compiled on its own it passes no count on."""
    own = ("forward", "_orig_mod", "_compiled_call_impl")
    inner = models(model)[1:]
    return not any(vars(base).get(name) or base._modules.get(name) for base in inner for name in own)


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


def _packed(calls: Calls, model: Any, args: tuple[Any, ...], call: dict[str, Any], mask: PackedMask) -> Any:
    """The result of a packed batch, if every attention layer was given its boundaries."""
    patch = vars(model)[MARK]
    patch.unpacked = None
    call[patch.carrier] = mask
    call = _rotated_by(model, calls, call)
    piece = None
    if not calls.takes("position_ids"):
        del call["position_ids"]
    elif patch.documents_ride:
        piece = luggage.Piece(luggage.DOCUMENTS, mask.boundaries)
        call["position_ids"] = luggage.attach(call["position_ids"], piece)
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
    luggage.require_delivered(piece, model)
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
