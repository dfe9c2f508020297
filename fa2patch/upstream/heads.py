"""Heads: what is computed of a row, a packed batch needs for each document.

The forward of a ``...ForSequenceClassification`` gets one row per document, which holds only the token that is pooled.
The packed batch is attached to these tokens. The base model takes it from there, computes it and returns the hidden
states of the pooled tokens. Heads that compute one result over a whole row are refused, or given padded rows.
"""

from __future__ import annotations

import inspect
import re
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from .._torch import uncompiled
from .._types import Call, Function, Model
from ..documents.boundaries import Boundaries
from ..documents.names import FEWER_LOGITS, LABELS, LENGTHS, LOSS_LABELS, TOKENS
from ..documents.tensors import to_device
from ..errors import BadBatch, Fa2PatchError, PackingNotIsolated, UnsupportedModel
from . import attached, inspecting, labels
from .calls import passed
from .facts import Facts
from .find_layers import ModelLayers
from .find_models import is_transformers_model
from .other_code import where_defined
from .packed_mask import PackedMask
from .splitting import Documents
from .step import MARK, Patched, Step, covers
from .transformers_names import ENCODED_MASK, POOLED_LOGITS

# arguments with a position in each row, or a label for each row
_ROW_ARGUMENTS = (
    "start_positions", "end_positions", "mc_token_ids", "mc_labels", "next_sentence_label", "sentence_order_label",
)  # fmt: skip

_READS_ALL = re.compile("SequenceClassification|CausalLM|LMHead|MaskedLM|TokenClassification")


def look(model: ModelLayers, facts: Facts) -> None:
    # Next sentence prediction and choices read the pooler's vector of a row's first token.
    head = inspecting.defining(type(model.model), "forward")  # a subclass may define no forward of its own
    pooler = getattr(model.decoder, "pooler", None)
    pooled = model.model is not model.decoder and isinstance(pooler, torch.nn.Module)
    if pooled and not _READS_ALL.search(head.__name__):
        facts.row_head = f"reads one vector per row, made of its first token by {type(pooler).__name__}"
    else:
        facts.row_head = one_result_per_row(model.model)
    if facts.row_head and not facts.padded:
        error = UnsupportedModel(
            f"{model} {facts.row_head}, and a packed row holds many documents. Nothing was patched. Train it padded: "
            "fa2patch.apply(model, padded_batches=True) computes its padded batches packed, unless the head reads "
            "padding, too (a softmax over the row, as for question answering). Or train it without that head."
        )
        error.takes_padded_batches = True
        raise error


def before(step: Step) -> None:
    mask, role = step.mask, step.role
    if mask is None:
        return
    if step.module._modules.get("pooler") is not None:
        mask.require_whole_rows("a pooler of each document's first token (add_pooling_layer=False leaves it out)")
    if role.innermost:
        return
    if step.patch.facts.row_head:
        raise PackingNotIsolated(
            f"{type(step.module).__name__} {step.patch.facts.row_head}, and was handed a packed batch of "
            f"{len(mask.boundaries)} documents. Hand it padded batches: they are computed packed inside."
        )
    if not role.pools:
        # labels.before has looked at the labels of a model that predicts the next token.
        refuse_arguments_of_rows(step.module, step.call, mask, LABELS if role.predicts_the_next else ())
    elif step.passes_mask:
        mask.require_whole_rows("a head that pools the last token of each document")
        _pool_documents(step, mask)


def after(step: Step, output: Any) -> Any:
    mask, role = step.mask, step.role
    if mask is None or step.mask_received:
        return output
    if role.innermost:
        # pooler_output becomes [documents, hidden] instead of [batch, hidden], and a run of padding counts as a
        # document. Without a module `pooler` it becomes None. Hidden states [batch, length, hidden] come first.
        pools = step.module._modules.get("pooler") is not None
        if isinstance(output, tuple) and pools:
            return (output[0], _pooler_output(step.module, output[0], mask.boundaries), *output[2:])
        if getattr(output, "pooler_output", None) is not None:
            output["pooler_output"] = _pooler_output(step.module, output[0], mask.boundaries) if pools else None
        return output
    if role.outermost and not role.pools:
        refuse_outputs_of_rows(step.module, output, step.call, mask, role.predicts_the_next)
    return output


def one_result_per_row(model: Model) -> str:
    # The result is a text for an error; empty for a head that pools a row's last token, which can pool each document.
    for cls, forward in inspecting.forwards(type(model)):
        taken = [name for name in _ROW_ARGUMENTS if inspecting.takes(forward, name)]
        if taken:
            return f"takes {taken[0]}, which says one thing of each row"
        if inspecting.has_variable(forward, "num_choices"):  # rows of one question, in all Transformers versions
            return f"pools one vector per row, to score choices in {cls.__name__}.forward"
        if inspecting.has_variable(forward, "logits_per_text"):  # CLIP and similar models
            return f"pools one vector per row, to compare texts with images or sounds in {cls.__name__}.forward"
        # by `problem_type`, a forward chooses the loss for one label per row; token classifiers do not read it
        pools = inspecting.has_variable(forward, POOLED_LOGITS) or inspecting.reads_name(forward, "problem_type")
        if pools and not pools_documents(model):
            return f"pools one vector per row, in another way than by its last token ({cls.__name__}.forward)"
    return ""


_OF_MEDIA = re.compile(
    r"pixel|image|video|audio|vision|grid|feature|patch|aspect|rope_deltas|second_per|logits_to_keep"
)
_OF_THE_BATCH = (ENCODED_MASK, "num_items_in_batch", "cache_position", *LENGTHS)


def refuse_arguments_of_rows(model: Model, call: Call, mask: PackedMask, looked_at: tuple[str, ...]) -> None:
    for name, value in call.items():
        if name in looked_at or not isinstance(value, torch.Tensor) or value.dim() not in (1, 2):
            continue
        if _OF_MEDIA.search(name) or name in _OF_THE_BATCH or value.dtype.is_floating_point:
            continue
        if value.shape[-1] != mask.shape[1] and value.shape[0] == mask.shape[0]:
            raise PackingNotIsolated(
                f"{type(model).__name__} was handed {name} {list(value.shape)} with a packed batch of "
                f"{_documents(mask)}: a value for each row says nothing of documents. Expected tensors with a value "
                "for each token. Train this model padded."
            )


def refuse_outputs_of_rows(model: Model, output: Any, call: Call, mask: PackedMask, predicts_the_next: bool) -> None:
    # Only shapes are compared. Outputs per token, per document or for the whole batch pass, and so does one per
    # predicted token, [batch, length - 1] (TRL's fused head). In a compiled graph that does not know the number of
    # documents, there may be more of them than rows.
    one_each = not mask.boundaries.uncounted and len(mask.boundaries) <= mask.shape[0]
    if one_each or passed(call, FEWER_LOGITS):
        return
    named = output.items() if hasattr(output, "items") else enumerate(output if isinstance(output, tuple) else [output])
    for name, value in named:
        if not isinstance(value, torch.Tensor) or value.dim() not in (1, 2) or value.shape[0] != mask.shape[0]:
            continue
        if not value.dtype.is_floating_point or "loss" in str(name):
            continue
        of_tokens = [mask.shape, (mask.shape[0], mask.shape[1] - 1)][: 1 + predicts_the_next]
        may_be_loss = value.dim() == 1 and name == 0  # the first entry of a tuple
        if tuple(value.shape) not in of_tokens and not may_be_loss:
            raise PackingNotIsolated(
                f"{type(model).__name__} returned {name} {list(value.shape)}, one for each row, for a packed batch of "
                f"{_documents(mask)}: its head pools whole rows. Train this model padded, or pool the last hidden "
                "states document by document."
            )


def _documents(mask: PackedMask) -> str:
    number = "an unknown number of" if mask.boundaries.uncounted else len(mask.boundaries)
    return f"{number} documents in {mask.shape[0]} rows"


# places of a row's tokens for which the mean, the least, the largest and the first are not the last
_TRIED = (0.0, 3.0, 1.0, 2.0)


@dataclass(eq=False)
class Pooled:
    """A packed batch that is attached to the pooled tokens, for the base model."""

    whole: dict[str, torch.Tensor]  # the packed batch's input_ids or inputs_embeds, under that name
    tokens: torch.Tensor  # int64 [documents], the index of each pooled token in the rows laid end to end
    shape: tuple[int, int]  # (batch, length) of the packed batch

    def pooled(self, output: Any) -> Any:
        # The hidden states of the pooled tokens are [documents, 1, hidden].
        hidden = output[0]
        if tuple(hidden.shape[:2]) != self.shape:
            raise PackingNotIsolated(
                f"expected hidden states {list(self.shape)} + [hidden] of the base model, found {list(hidden.shape)}: "
                "which of them are documents' last tokens is not known. Train this model padded."
            )
        chosen = hidden.flatten(0, 1)[self.tokens.to(hidden.device)][:, None]
        if isinstance(output, tuple):
            return (chosen, *output[1:])
        output[next(iter(output.keys()))] = chosen
        return output


def pools_documents(model: Model) -> bool:
    # Up to 4.48 a forward pools the token before the first padding token (in BLOOM, Falcon and MPT of 4.34 the number
    # of other tokens decides), later the last one that is no padding. These differ if the padding token stands inside
    # of documents. So the forward itself is run, around a base model that returns the tokens' places.
    forward = _pooling_forward(model)
    if forward is None:
        return False
    ids = torch.full((1, len(_TRIED)), (_padding(model) or 0) + 1)
    try:
        found = _pooled(forward, model, ids, torch.tensor([_TRIED]))
    except Exception:  # code that does more than pool; what it then raises can be anything
        return False
    return found.tolist() == [_TRIED[-1]]


def _pooling_forward(model: Model) -> Function | None:
    forwards = inspecting.forwards_that_run(type(model))
    pooling = (inspect.unwrap(forward) for forward in forwards if inspecting.has_variable(forward, POOLED_LOGITS))
    return next(pooling, None)


def _padding(model: Model) -> Any:
    return inspecting.text_config(model.config).pad_token_id


def _pooled(forward: Function, model: Model, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    # float32 [rows], from ids and places [rows, length]
    pooled: torch.Tensor = forward(_StandIn(model, places[..., None]), input_ids=ids)[0]
    return pooled[:, 0]


class _StandIn:
    """Stands in for a model in the forward of its head: the base model returns each token's place in the row."""

    def __init__(self, model: Model, places: torch.Tensor) -> None:
        # The head's other modules hand on what they are given. Everything else is the model's own.
        self._model, self._places = model, places

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._model, name)
        return self._called if isinstance(own, torch.nn.Module) else own

    def _called(self, given: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_hidden = isinstance(given, torch.Tensor) and given.is_floating_point()
        return given if is_hidden else _Output((self._places,))


class _Output(tuple[torch.Tensor]):
    # The output may be read as a tuple or by attributes.

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def _pool_documents(step: Step, mask: PackedMask) -> None:
    # The new tokens are [documents, 1], or [documents, 1, hidden] for embeddings.
    model, call, pad = step.module, step.call, _padding(step.module)
    name, whole = next(iter(passed(call, TOKENS).items()))
    tokens = _pooled_tokens(model, mask, whole, pad if name == "input_ids" else None)
    given = call.get("attention_mask")
    if isinstance(given, torch.Tensor) and given.dim() == 2:  # without documents that it marks as padding
        tree, lengths = mask.boundaries.tree, mask.boundaries.lengths
        # the segment in which each document ends, without empty documents, and its first token
        ends = [number for number, length in enumerate(lengths) if length] if tree is None else tree.leaves
        first = to_device(torch.tensor([0, *lengths])[:-1].cumsum(0)[ends], given.device)
        tokens = tokens[given.flatten()[first].to(tokens.device) != 0]
    if pad is None and len(tokens) > 1:
        raise BadBatch(
            f"{type(model).__name__} has no pad_token_id in its config, and pools no more than one vector without. "
            "Set model.config.pad_token_id to an id that no document ends in."
        )
    piece = attached.Piece(attached.POOLED, Pooled({name: whole}, tokens, mask.shape))
    step.pieces.append(piece)
    step.call = {**call, name: attached.attach(whole.flatten(0, 1)[tokens][:, None], piece)}
    if call.get("labels") is not None:
        step.call["labels"] = _one_per_document(call["labels"], len(tokens))


def refuse_failed_hooks(head: Model, base: Any, error: Exception) -> None:
    # A hook that gives each document a padded row of its own expects the hidden states of a whole row. ms-swift has one
    # for rerankers with --padding_free.
    ran = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    for hook in base._forward_hooks.values():
        if getattr(hook, "__code__", None) in ran and not isinstance(error, Fa2PatchError):
            raise PackingNotIsolated(
                f"{type(head).__name__} pools the last token of each document of a packed batch, so "
                f"{where_defined(hook)}, a forward hook on its {type(base).__name__}, was given the hidden states of "
                f"these tokens, [documents, 1, hidden], and failed ({error}). Give padded batches, which are computed "
                "packed, and leave out the option that makes packed rows; or take that hook out."
            ) from error


@uncompiled
def _pooled_tokens(model: Model, mask: PackedMask, whole: torch.Tensor, pad: int | None) -> torch.Tensor:
    # The result is int64 [documents], an index into the rows laid end to end. The head's forward sees the documents
    # padded. Where it pools padding (some do for a document that begins with that token), and where there are no ids to
    # look for padding in, the document's last token is taken.
    documents, device = Documents(mask.boundaries, mask.shape), whole.device
    counted = torch.tensor(documents.lengths)
    lengths, ends = to_device(counted, device), to_device(counted.cumsum(0), device)
    last = lengths - 1
    forward = _pooling_forward(model)
    if pad is not None and forward is not None:
        places = torch.arange(max(documents.lengths), device=device).expand(len(documents), -1)
        inside = places < lengths[:, None]
        rows = whole.new_full(inside.shape, pad).masked_scatter(inside, documents.end_to_end(whole))
        last = torch.minimum(_pooled(forward, model, rows, places.float()).long(), last)
    tokens = torch.arange(whole.shape[0] * whole.shape[1], device=device).view(mask.shape)
    return documents.end_to_end(tokens)[ends - lengths + last]


def _one_per_document(labels: object, documents: int) -> torch.Tensor:
    found = f"{list(labels.shape)}" if isinstance(labels, torch.Tensor) else type(labels).__name__
    if isinstance(labels, torch.Tensor):
        flat = labels[0] if labels.dim() > 1 and labels.shape[0] == 1 and documents != 1 else labels
        if flat.dim() and len(flat) == documents:
            return flat
    raise BadBatch(
        f"labels: expected one for each of the batch's {documents} documents, [{documents}] or [1, {documents}], or "
        f"[{documents}, num_labels]; found {found}. DataCollatorWithFlattening(document_labels=True) makes them."
    )


@uncompiled
def _pooler_output(model: Any, hidden: torch.Tensor, documents: Boundaries) -> torch.Tensor:
    pieces, pooler = Documents(documents, hidden.shape).split(hidden), model.pooler
    if not isinstance(pooler, torch.nn.Linear):
        return torch.cat([pooler(piece) for piece in pieces])
    activation = getattr(model, "pooler_activation", torch.nn.Identity())  # ALBERT
    return torch.cat([activation(pooler(piece[:, 0])) for piece in pieces])


def require_patched(patch: Patched) -> None:
    # apply(model.model) patches a trunk without its head, and two heads may share a trunk of which one is patched. The
    # other head shifts labels across documents or pools whole rows, and only the stack of the trunk's call shows it. A
    # causal LM without labels computes every token by itself.
    for module, code, variables in inspecting.modules_called():
        own = getattr(module, "__dict__", {}).get(MARK)
        if own is patch or covers(own, patch) or not is_transformers_model(module):
            continue
        model = module._modules.get("_orig_mod", module)  # torch.compile(model) is of the model's class, too
        if covers(vars(model).get(MARK), patch):
            continue
        label = next(iter(passed(inspecting.with_keywords(code, variables), (*LABELS, LOSS_LABELS))), None)
        if label is None and labels.predicts_the_next(model, False) and not one_result_per_row(model):
            continue
        harm = f"computes a loss from {label}, in which documents predict each other" if label else "has a head"
        raise PackingNotIsolated(
            f"this {type(patch.model).__name__} is patched and found a batch packed, but {type(model).__name__}, "
            f"around it, is not patched and {harm}. Patch the model that is called: fa2patch.apply(model) with that "
            f"{type(model).__name__}."
        )
