"""Labels and losses of a packed batch: labels across boundaries, weighted losses, router losses.

A trainer knows only ``labels``, and Trainer divides the loss by how many of them there are in a step, over accumulated
batches and processes. In a batch with weights, ``labels`` therefore hold one entry for each document or each token in
the loss. The tokens to predict are in ``loss_labels``, and their weights, which add up to 1 in each document or are
the user's, in ``loss_weights``.
"""

from __future__ import annotations

import inspect
import math
from types import FunctionType
from typing import TYPE_CHECKING, Any, Union

import torch

from .._torch import compiling
from .._types import Call, Model
from ..documents.boundaries import Boundaries, document_of
from ..documents.given_boundaries import require_no_first_labels
from ..documents.names import (
    COUNTED_LABEL,
    FEWER_LOGITS,
    IGNORE_INDEX,
    IGNORED_LABEL,
    LABELS,
    LOSS_LABELS,
    LOSS_WEIGHTS,
    TOKENS,
)
from ..documents.tensors import described, require
from ..errors import BadBatch, PackingNotIsolated
from . import inspecting
from .calls import passed
from .find_layers import ModelLayers
from .packed_mask import MASK, PackedMask
from .step import Step, Trait, Weighted
from .transformers_names import LOSSES, loaded

if TYPE_CHECKING:
    from .split.row_part import RowPart

Kept = Union[slice, torch.Tensor]  # an index of the tokens in a row whose logits are asked for


def before(step: Step) -> None:
    if step.call.get(LOSS_LABELS) is not None:
        _take_weighted(step)
    if step.mask is None or step.role.innermost:
        return
    unused = step.call.get(LOSS_WEIGHTS) is not None and step.call.get(LOSS_LABELS) is None
    if unused and LOSS_WEIGHTS not in step.calls.names:
        raise BadBatch(
            "loss_weights came without loss_labels: expected the batch of a collator with "
            'DataCollator...(loss_weights="token"), which takes this column of the examples, because beside ordinary '
            "labels weights change nothing. Set that option, or leave the column out."
        )
    if step.role.predicts_the_next and not step.role.pools:
        given = passed(step.call, LABELS)
        if given:
            _ignore_first(step, step.mask, given)


def after(step: Step, weighted: Weighted, output: Any) -> Any:
    logits = output[0] if isinstance(output, tuple) else output.get("logits")
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != weighted.labels.shape:
        raise BadBatch(
            f"{_MEANT}, need logits {[*weighted.labels.shape, 'vocabulary']}, but {type(step.module).__name__} "
            f"returned {described(logits)}. {_INSTEAD}"
        )
    logits = (logits if logits.dtype == torch.float64 else logits.float())[:, :-1]
    labels, weights = weighted.labels[:, 1:].to(logits.device), weighted.weights[:, 1:].to(logits)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    # without labels: NaN, as in padded training
    loss = (losses * weights.flatten()).sum() / torch.as_tensor(weighted.items, device=logits.device)
    return (loss, *output) if isinstance(output, tuple) else type(output)(**{**output, "loss": loss})


def _ignore_first(step: Step, mask: PackedMask, given: Call) -> None:
    # Without this, a document's last token would predict the next one's first. A label of a document's first token is
    # no error: padded training ignores it too, num_items_in_batch included. Only models that shift labels need it.
    shape, kept = mask.shape, kept_logits(step.call)
    if mask.part is not None:
        _require_shifted(step.module, given, kept, mask.part)
    # A graph cannot look at functions, so -100 is taken there.
    loss = None if compiling() else _loss_function(step.module)
    of_loss = IGNORED_LABEL if loss is None else int(inspecting.default_of(loss, IGNORE_INDEX, IGNORED_LABEL))
    # Some models do not hand ignore_index on to their loss, which then ignores another label.
    asked = step.call.pop(IGNORE_INDEX, None) if step.calls.takes(IGNORE_INDEX) else None
    ids = step.call.get(TOKENS[0])
    for name, labels in given.items():
        labels = _replaced(labels, of_loss if asked is None else asked, IGNORED_LABEL)
        inside = inside_documents(labels, mask.boundaries, name, shape, kept, mask.part, ids)
        step.call[name] = _replaced(inside, IGNORED_LABEL, of_loss)


def _replaced(labels: Any, one: int, by: int) -> Any:
    if one == by or not isinstance(labels, torch.Tensor):
        return labels
    return labels.masked_fill(labels == one, by)


def _require_shifted(model: Model, given: Call, kept: object, part: RowPart) -> None:
    # The last token of a part predicts the first token of the next part, whose label is in another process. Trainer
    # passes the shifted labels as `labels` too, because models compute no loss without `labels`.
    if given and ("shift_labels" not in given or kept is not None):
        raise BadBatch(
            f"{part.engine} splits rows over processes: expected shift_labels, which are shifted "
            f"before rows are split, and all logits; found {', '.join(given)}"
            f"{'' if kept is None else ' with logits_to_keep'}. DeepSpeed's UlyssesSPDataLoaderAdapter, accelerate and "
            "Trainer give shift_labels."
        )
    if "labels" in given and _loss_function(model) is None:
        raise PackingNotIsolated(
            f"{part.engine} splits rows over processes, and {type(model).__name__} shifts labels by "
            "itself, so that it would not use shift_labels. Leave labels out, and compute the loss from the logits."
        )


def up_to_the_last_label(labels: torch.Tensor) -> torch.Tensor:
    # bool [batch, length]: where this token or a later one of its row is learned
    learned: torch.Tensor = (labels != IGNORED_LABEL).flip(1).cumsum(1).flip(1) > 0
    return learned


def predicts_the_next(model: Model, sees_both_ways: bool) -> bool:
    # A loss function of Transformers, if the forward uses one, shows whether labels are shifted. A token classifier or
    # a masked LM does not shift them.
    loss = _loss_function(model)
    if getattr(loss, "__module__", None) in LOSSES:
        return bool(loss is loaded(LOSSES).ForCausalLMLoss)
    if sees_both_ways:
        return False
    try:
        head, rows = model.get_output_embeddings(), model.get_input_embeddings().weight.shape[0]
    except (AttributeError, NotImplementedError):
        head, rows = None, -1
    own = (getattr(child, "weight", None) for child in model.children())
    return head is not None or any(isinstance(weight, torch.Tensor) and weight.shape[0] == rows for weight in own)


def shifts_in_its_loss(model: Model) -> bool:
    # Without a type of loss, Transformers takes that of causal LMs. Moonshine and Canary of 5.24 hand it labels that it
    # takes for shifted.
    forwards = [*inspecting.forwards_that_run(type(model))]
    asks = loaded(LOSSES) is not None and any(inspecting.reads_name(forward, "loss_function") for forward in forwards)
    as_shifted = any(inspecting.hands_on(forward, "shift_labels") for forward in forwards)
    return asks and not as_shifted and getattr(model, "loss_function", None) is loaded(LOSSES).ForCausalLMLoss


def _loss_function(model: Model) -> Any:
    # The model's forward uses `loss_function` from 4.46 on.
    asks = any(inspecting.reads_name(forward, "loss_function") for forward in inspecting.forwards_that_run(type(model)))
    known = getattr(model, "loss_type", None) is not None or hasattr(model, "_loss_function")
    return model.loss_function if asks and known and hasattr(type(model), "loss_function") else None


def kept_logits(call: Call) -> Kept | None:
    # None stands for all tokens.
    kept = None
    for name in FEWER_LOGITS:
        kept = call.get(name) if kept is None else kept
    if isinstance(kept, int):
        return slice(-kept, None) if kept else None
    return kept if isinstance(kept, torch.Tensor) else None


def inside_documents(
    # int64 [batch, length] or [batch, length, codebooks]; with `kept` also [batch, kept], one for each logit
    labels: object,
    documents: Boundaries,  # with `part`, those of the whole rows
    name: str,  # "labels", or "shift_labels", in which each label stands at the token that predicts it
    shape: tuple[int, int],
    kept: Kept | None,
    part: RowPart | None = None,
    ids: torch.Tensor | None = None,  # they tell what labels behind a gap of `kept` mean
) -> torch.Tensor:
    """Labels in which every document's first token has the label -100."""
    # In a tree, no token of the row predicts the first token of a segment with a parent, so its label must be -100.
    # Each branch starts with the last token that it shares, which its own loss does not count.
    tokens = shape[0] * shape[1]
    if kept is not None and isinstance(labels, torch.Tensor) and labels.dim() == 2 and tuple(labels.shape) != shape:
        return _inside_of_fewer(labels, documents, name, shape, kept, ids)
    if not isinstance(labels, torch.Tensor) or not _one_for_each(labels, shape):
        raise BadBatch(
            f"{name}: expected a tensor [{shape[0]}, {shape[1]}], one for each token (or integers of more dimensions "
            f"behind these), found {described(labels)}."
        )
    at = _crossing(documents, name, tokens if part is None else math.prod(part.rows(shape))).to(labels.device)
    if part is not None:
        at = part.here(at, shape)
    rows = labels.reshape(tokens, -1)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, 1))  # an empty document may start behind the last token
    if documents.parents is not None and name == "labels":
        require_no_first_labels(padded, at, documents.parents)
    return padded.index_fill(0, at, IGNORED_LABEL)[:-1].view_as(labels)


def _crossing(documents: Boundaries, name: str, tokens: int) -> torch.Tensor:
    # The result is int64 [segments], with `tokens` for a segment without such a token. The last token of a
    # parent may have a label that is already shifted: it predicts what every branch starts with.
    cu = documents.cu_seqlens.long()
    if name == "labels":
        return cu[:-1]
    ends = (cu[1:] - 1).clamp(min=0)
    if documents.parents is None:
        return ends
    number = torch.arange(len(ends), device=ends.device)
    continued = (documents.parents[None] == number[:, None]).any(1)
    return torch.where(continued, tokens, ends)


def _inside_of_fewer(
    labels: torch.Tensor, documents: Boundaries, name: str, shape: tuple[int, int], kept: Kept, ids: torch.Tensor | None
) -> torch.Tensor:
    # The model shifts labels by one: the logit of one kept token predicts the label behind it in the cut labels. That
    # label is ignored if the token is its document's last.
    if documents.parents is not None:
        raise BadBatch(
            f"{name}: expected one for each of {shape[1]} tokens with segment_parents, found {described(labels)}."
        )
    tokens = shape[0] * shape[1]
    ends = _crossing(documents, "shift_labels", tokens).to(labels.device)
    last = torch.zeros(tokens, dtype=torch.bool, device=labels.device).index_fill(0, ends, True).view(shape)[:, kept]
    if last.shape != labels.shape:
        raise BadBatch(
            f"{name}: expected a tensor {list(last.shape)}, one for each logit that the call asks for, or "
            f"{list(shape)}, one for each token; found {described(labels)}."
        )
    if name == "labels":
        last = torch.nn.functional.pad(last[:, :-1], (1, 0), value=True)
    labels = labels.masked_fill(last, IGNORED_LABEL)
    if name != "labels" or isinstance(kept, slice):
        return labels

    # With gaps, there are two ways to cut labels. If they are the kept tokens' own labels, the label behind a gap is
    # another document's. ms-swift gives each kept token but the last one the label of the token behind it in the row,
    # which belongs to the same document. The ids tell which of the two it is.
    at = torch.arange(shape[1], device=labels.device)[kept.to(labels.device)]
    document = document_of(documents.cu_seqlens.to(labels.device), tokens).view(shape)[:, at]
    behind = (document[:, 1:] != document[:, :-1]) & (labels[:, 1:] != IGNORED_LABEL)
    own = other = torch.zeros_like(behind)
    if ids is not None:
        ids = ids.to(labels.device)
        own, other = labels[:, 1:] == ids[:, (at[:-1] + 1).clamp(max=shape[1] - 1)], labels[:, 1:] == ids[:, at[1:]]
    require(
        (~behind | own | other).all(),
        BadBatch,
        "labels: logits_to_keep leaves out the end of a document, and the next label is neither the token behind the "
        "last kept one nor the next kept token, so it is not known whether it crosses documents. Keep every document's "
        "last token, or set the label of each document's first kept token to -100.",
    )
    return labels.masked_fill(torch.nn.functional.pad(behind & ~own, (1, 0)), IGNORED_LABEL)


def _one_for_each(labels: torch.Tensor, shape: tuple[int, int]) -> bool:
    if labels.dim() <= 2:
        return labels.numel() == shape[0] * shape[1]
    return tuple(labels.shape[:2]) == shape and not labels.is_floating_point()


_ITEMS = "num_items_in_batch"
_MEANT = "loss_labels, which DataCollator...(loss_weights=...) makes"


def _take_weighted(step: Step) -> None:
    # The model then computes no loss itself.
    role, call, model = step.role, step.call, type(step.module).__name__
    learns = role.predicts_the_next and not role.innermost
    if not learns or (step.by_hook and not step.calls.takes(LOSS_LABELS)):
        raise BadBatch(f"{_MEANT}, came to {model}, which does not compute a causal LM's loss from them. {_INSTEAD}")
    if call.get("fused_lm_head"):
        raise BadBatch(f"{_MEANT}, came to {model} with fused_lm_head=True. {_INSTEAD}")
    if step.by_hook:  # another package's forward: the forward that it calls in the end is ours, or raises
        return
    labels, weights = call[LOSS_LABELS], call.get(LOSS_WEIGHTS)
    if call.get("labels") is None:
        raise BadBatch(
            f"{_MEANT}, came without labels. label_smoothing_factor and compute_loss_func take them out, and "
            "compute another loss. Leave these two out."
        )
    if not isinstance(weights, torch.Tensor) or not (weights.shape == labels.shape == call["labels"].shape):
        raise BadBatch(
            f"loss_weights: expected one for each of loss_labels {list(labels.shape)}, {described(weights)}."
        )
    require(
        ((call["labels"] == IGNORED_LABEL) | (call["labels"] == COUNTED_LABEL)).all(),
        BadBatch,
        f"{_MEANT}, came with labels of tokens: expected labels that count what the weighted losses are divided by. "
        'Let a collator make all three columns: loss_weights="token" takes weights of your own for each token.',
    )
    other = _other_loss(step)
    if other:
        raise BadBatch(f"{_MEANT}, {other}")
    items = call.get(_ITEMS)
    counted = (call["labels"] != IGNORED_LABEL).sum() if items is None else items
    step.weighted = Weighted(labels, weights, counted)
    taken = (*LABELS, LOSS_LABELS, LOSS_WEIGHTS, _ITEMS)
    step.call = {name: value for name, value in call.items() if name not in taken}


_INSTEAD = (
    "Losses that another package computes without logits (cut-cross-entropy, TRL's fused head, Liger's applied after "
    "fa2patch) know no weights: leave loss_weights out, or leave that loss out and call fa2patch.apply(model) last."
)


def _other_loss(step: Step) -> str:
    # The result is the end of an error's text. It is empty if nothing makes the loss another one than the weighted.
    call, fewer = step.call, passed(step.call, FEWER_LOGITS)
    if any(not (isinstance(kept, int) and kept == 0) for kept in fewer.values()):
        return f"need all logits, but {', '.join(fewer)} was passed. Leave it out."
    if call.get("shift_labels") is not None or (step.mask is not None and step.mask.part is not None):
        return "need whole rows, but this process has a part of each. Leave loss_weights out."
    if call.get(IGNORE_INDEX) not in (None, IGNORED_LABEL):
        return (
            f"came with ignore_index={call[IGNORE_INDEX]}: the collator made weights where labels are not "
            f"{IGNORED_LABEL}. Leave ignore_index out, and give the collator labels of {IGNORED_LABEL} instead."
        )
    asked = call.get("output_router_logits")
    config = inspecting.text_config(step.module.config)
    if getattr(config, "output_router_logits", False) if asked is None else asked:
        return (
            f"came to {type(step.module).__name__} with output_router_logits=True, which adds the router's own loss. "
            "Set model.config.output_router_logits = False."
        )
    return ""


LOGITS = "router_logits"  # the field of the base model's output that every causal LM with a router loss reads


class RouterLoss(Trait):
    # Mixtral's loss in 4.37 would count padding, so it gets the router logits of real tokens only. From 4.38 on, a
    # model hands its mask on to the function that computes the loss. In 4.36 the loss is a constant.

    name = "router loss"

    def finds(self, model: ModelLayers) -> bool | None:
        around = [forward for each in model.entered[:-1] for forward in inspecting.forwards_that_run(type(each))]
        reads = [inspect.unwrap(forward) for forward in around if inspecting.reads_name(forward, LOGITS)]
        called = [each.__globals__.get(name) for each in reads for name in inspecting.names_read(each)]
        weighs = any(isinstance(each, FunctionType) and inspecting.takes(each, MASK) for each in called)
        return True if reads and not weighs else None

    def after(self, step: Step, found: Any, output: Any) -> Any:
        if step.mask is None or step.mask.real is None or not step.role.innermost:
            return output
        real = step.mask.real.flatten() != 0
        if isinstance(output, tuple):  # return_dict=False
            return tuple(_of_real(value, real) for value in output)
        for name, value in list(output.items()):
            output[name] = _of_real(value, real)
        return output


def _of_real(value: Any, real: torch.Tensor) -> Any:
    # `value` may be a tuple of each layer's router logits [tokens, experts].
    of_tokens = isinstance(value, tuple) and all(
        isinstance(layer, torch.Tensor) and layer.dim() == 2 and len(layer) == len(real) for layer in value
    )
    return tuple(layer[real.to(layer.device)] for layer in value) if of_tokens else value
