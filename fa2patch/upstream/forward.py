"""The forward of a patched model, in stages: read the call, recognise, traits before, call, traits after.

The forwards of the models that a call goes through are replaced on the classes that define them. An instance without
our mark runs its original forward. The first model that a batch reaches finds the boundaries and hands the
:class:`PackedMask` to the models inside it (see ``luggage.py``). The base model, which loops over the layers, passes it
in place of the attention mask.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from .._torch import compiling, is_no_verdict
from .._types import Args, Call, Function
from ..documents import other_names
from ..documents.checks import described
from ..documents.names import LABELS, LENGTHS, PARENTS, REAL, TOKENS
from ..errors import BadBatch, PackingNotIsolated
from . import apart_models, caches, dense, foreign, inspecting, luggage, reached
from .batch import has_pictures, is_for_queries
from .calls import Calls, batch_shape, passed
from .find_models import models
from .packed_batch import packed_mask
from .packed_mask import MASK, PackedMask, find
from .parts.engines import row_part
from .parts.row_part import RowPart
from .step import MARK, PADDING, ROLE, Step
from .traits import pooling


def entered(original: Function) -> Function:
    """Return the replacement for a model's ``forward``. It also accepts collator lengths that the original rejects."""
    calls = Calls(original)

    def marked(self: Any, args: Args, kwargs: Call) -> Any:
        patch, role, call = self.__dict__[MARK], self.__dict__[ROLE], calls.named(args, kwargs)
        if pooling.is_riding(call) and not role.innermost:  # through super(), in a class patched for another model
            return original(self, *args, **kwargs)
        ride = pooling.ridden(call)
        if ride is not None:
            return ride.pooled(_computed(Step(self, patch, role, calls, args, {**call, **ride.whole})))
        return _computed(Step(self, patch, role, calls, args, call))

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch = self.__dict__.get(MARK)
        if patch is None or batches_continuously(kwargs):
            return original(self, *args, **kwargs)
        padding = self.__dict__.get(PADDING)
        if padding is None:
            return marked(self, args, kwargs)
        return padding.computed(marked, self, args, kwargs, calls.positional or ["input_ids"])

    foreign.ours(forward)
    if not calls.takes("position_ids"):  # OPT up to 4.45; Trainer drops columns that the signature lacks
        extra = inspect.Parameter("position_ids", inspect.Parameter.KEYWORD_ONLY, default=None)
        inspecting.show_parameters(forward, [*inspecting.parameters(original), extra])
    return forward


def batches_continuously(kwargs: Call) -> bool:
    """Whether the call comes from ``generate_batch``, which packs prompts itself and has its own paged cache."""
    return any(caches.is_paged(value) for value in kwargs.values())


def _computed(step: Step) -> Any:
    """Run the stages after the call has been read."""
    _recognise(step)
    for trait, found in step.patch.acting:
        trait.before(step, found)
    if step.mask is None:
        output = dense.computed(step)
    elif step.handed:
        output = _handed(step)
    elif step.places:
        output = _placed(step, step.mask)
    else:
        output = _sent_inside(step, step.mask)
    for trait, found in reversed(step.patch.acting):
        output = trait.after(step, found, output)
    return output


def _recognise(step: Step) -> None:
    """Find the boundaries of this batch: an outer model has handed them on, or this model looks for them."""
    role, call = step.role, step.call
    if role.innermost and not compiling():
        dense.reached.times += 1
    part = row_part(step.module, call) if role.outermost or role.innermost else None
    step.mask = _handed_by_a_model_around(step)
    step.handed = step.mask is not None
    if step.handed or (role.innermost and _was_found_dense(step)):
        return
    foreign_forward = _foreign_forward(step)
    step.mask = look(step, part)
    if step.mask is None:
        return
    if role.innermost and is_for_queries(call.get("attention_mask")):
        raise PackingNotIsolated(
            f"a model around this {type(step.module).__name__} made a mask for every query of a packed batch, and "
            "what it says beyond documents is not known. Please report the model; until then train it padded."
        )
    if foreign_forward is not None and (role.innermost or not passed(call, LABELS)):
        foreign.refuse_bypassed(step.patch.model, foreign_forward)
    step.places = role.innermost or role.pools or _carries_itself(step)


def _handed_by_a_model_around(step: Step) -> PackedMask | None:
    """The packed mask among this call's arguments, where an outer model put it."""
    given = step.call.get("attention_mask")
    masks = given.values() if isinstance(given, dict) else [given]
    return find([*masks, step.call.get(step.patch.route.carrier)])


def _was_found_dense(step: Step) -> bool:
    """Whether an outer model has found the batch dense, or made a mask for every query or for each kind of layer."""
    ids, mask = step.call.get("position_ids"), step.call.get("attention_mask")
    around = dense.found_around(step)
    if any(its_ids is ids and its_mask is mask for its_ids, its_mask in around):
        return True
    made = is_for_queries(mask) or isinstance(mask, dict)  # flash attention's are [batch, length]: Gemma 3
    return (bool(around) and made) or (compiling() and is_for_queries(mask))


def _foreign_forward(step: Step) -> Function | None:
    """The foreign forward that handed this batch to the model without running the pre-hook, or None."""
    role = step.role
    if role.outermost == role.innermost or luggage.find(step.call.get("position_ids"), luggage.MASK) is not None:
        return None
    return foreign.on_top_of_ours(step.module if role.outermost else step.patch.model)


def look(step: Step, part: RowPart | None = None) -> PackedMask | None:
    """Return the packed mask of this batch, or None for a dense batch.

    Boundaries that an outer model has attached to ``position_ids`` are taken from there. Otherwise they are derived
    from the arguments. If this process holds only a part of every row, they are those of the whole rows.
    """
    patch, around, shape = step.patch, step.role.outermost, _shape(step.call)
    if around:
        step.call = other_names.read(step.call, step.calls.names, shape)
        _with_a_batch_dimension(step.call, shape)
    call = step.call
    real = real_tokens(call, shape)
    piece = luggage.find(call.get("position_ids"), luggage.MASK)
    if piece is not None and (piece.content is None or piece.content.shape == batch_shape(call)[0]):
        piece.delivered = True
        found: PackedMask | None = piece.content
        return found
    given = call.get("attention_mask")
    made_inside = step.role.innermost and any(ids is None and mask is given for ids, mask in dense.found_around(step))
    training = step.module.training and torch.is_grad_enabled()
    one_per_token = step.role.predicts_the_next or step.role.innermost
    always = _would_be_an_error(step)
    as_given = dict(call)  # for a proof, which runs it again: position ids that are made below may seem to restart
    found = packed_mask(call, patch, made_inside, training, part, may_be_packed=one_per_token, always=always)
    if found is None and around and not caches.held(call):
        other_names.require_none(call, step.calls.names, shape, training)
    if found is not None and has_pictures(call):  # 5.10 to 5.16 pass lengths on to the vision tower, which has its own
        for name in LENGTHS:
            call.pop(name, None)
    if found is not None:
        if real is not None:
            given = call.get(MASK)  # zeros and ones, as packed_mask leaves it
            found.real = real = real if given is None else given * real.to(given)
        patch.examine(step.module, as_given if real is None else {**as_given, REAL: real}, found)
        call.pop(PARENTS, None)  # it means nothing to upstream's **kwargs
        if real is not None and step.calls.takes(MASK):
            call[MASK] = real
    return found


def real_tokens(call: Call, shape: tuple[int, int]) -> torch.Tensor | None:
    """Take what a collator says of its padding out of a call: ``[batch, length]``, 0 in the padding; or None.

    Boundaries are not derived from it: the padding is a document already. It becomes the mask that router losses weigh
    tokens by.

    Raises:
        BadBatch: there is not one number for each token.
    """
    real = call.pop(REAL, None)
    if real is None:
        return None
    if not isinstance(real, torch.Tensor) or tuple(real.shape) != shape:
        raise BadBatch(
            f"{REAL}: expected a tensor {list(shape)}, 0 in the padding and 1 elsewhere, found {described(real)}. Pass "
            "it as the collator made it, or leave it out if the row has no padding."
        )
    return real


def _shape(call: Call) -> tuple[int, int]:
    """``(batch, length)`` of a forward's tokens; no tokens if there are none, or in one dimension (GPT-2)."""
    tokens: Any = next(iter(passed(call, TOKENS).values()), None)
    return (tokens.shape[0], tokens.shape[1]) if getattr(tokens, "ndim", 0) > 1 else (0, 0)


def _with_a_batch_dimension(call: Call, shape: tuple[int, int]) -> None:
    """Turn ``position_ids`` ``[length]`` into ``[1, length]``, as models make them: many index ids by the row."""
    ids = call.get("position_ids")
    if isinstance(ids, torch.Tensor) and ids.dim() == 1 and len(ids) == shape[1]:
        call["position_ids"] = ids[None]


def _would_be_an_error(step: Step) -> bool:
    """Whether upstream raises for this batch if it is dense, because its forward takes no ``position_ids``.

    DistilBERT's takes none up to 4.57. A call with a cache cannot be packed, so upstream raises its own error for it.
    """
    call = step.call
    has_ids = call.get("position_ids") is not None
    return has_ids and not (step.calls.takes("position_ids") or caches.held(call))


def _carries_itself(step: Step) -> bool:
    """Whether an outer model must pass the mask itself, because ``position_ids`` do not reach the base model."""
    # Gemma 3: the causal LM makes masks for its inner model, which is handed the packed mask instead;
    # the **kwargs of Falcon's and Phi's token classifiers pass position_ids to no other module
    role, route, calls = step.role, step.patch.route, step.calls
    swallows = "position_ids" not in calls.names and not role.predicts_the_next
    return not role.outermost or route.makes_masks or route.stops_ids or swallows or not calls.takes("position_ids")


def _handed(step: Step) -> Any:
    """Call a model that was given the mask by an outer model."""
    if step.call.get("position_ids") is None and "position_ids" in step.calls.names and step.mask is not None:
        step.call["position_ids"] = step.mask.position_ids
    return _made(step)


def _made(step: Step) -> Any:
    """Call a model that has the mask as an argument.

    Lengths end at the base model: its layers read the mask, and Cohere's in 4.47 raise where lengths are handed on.
    """
    if step.mask is not None and step.role.innermost:
        step.call = {name: value for name, value in step.call.items() if name not in LENGTHS}
        if step.patch.route.apart:
            return apart_models.computed(step, step.mask)
    return step.calls.make(step.module, step.args, step.call)


def _sent_inside(step: Step, mask: PackedMask) -> Any:
    """Call a model with the mask attached to its ``position_ids``, for the model inside it.

    A subclass's ``**kwargs`` may hand collator lengths to a ``super().forward`` that does not accept them.
    """
    step.attach("position_ids", luggage.Piece(luggage.MASK, mask))
    accepted = step.role.lengths
    step.call = {name: value for name, value in step.call.items() if name not in LENGTHS or name in accepted}
    output = step.calls.make(step.module, step.args, step.call)
    _require_delivered(step)
    return output


def _placed(step: Step, mask: PackedMask) -> Any:
    """Call a model with the mask as an argument, and require that every layer is given the boundaries."""
    step.patch.unpacked = None
    step.call[step.patch.route.carrier] = mask
    if not step.calls.takes("position_ids"):
        del step.call["position_ids"]
    return reached.computed(_with_mask, step, mask)


def _with_mask(step: Step) -> Any:
    try:
        output = _made(step)
    except TypeError as error:
        if PackedMask.__name__ not in str(error):
            raise
        raise PackingNotIsolated(
            f"{type(step.module).__name__} used the mask of a packed batch in a way that fa2patch does not know, or a "
            f"layer of it is not patched any more ({error}). See fa2patch.status(model).layers; please report it."
        ) from error
    except Exception as error:
        if step.role.pools and not is_no_verdict(error):  # upstream may fail on input ids that lost the packed row
            _require_delivered(step)
        raise
    _require_delivered(step)
    return output


def _require_delivered(step: Step) -> None:
    for piece in step.pieces:
        if piece.delivered:
            continue
        gone = next((inner for inner in models(step.module) if MARK not in vars(inner)), None)
        if gone is not None:
            raise PackingNotIsolated(
                f"{type(step.module).__name__} is patched, but the {type(gone).__name__} inside it is not any more: it "
                "was reverted through a model that shares it, such as copy.copy(model). Call fa2patch.apply(model) "
                "again."
            )
        luggage.require_delivered(piece, step.module)
