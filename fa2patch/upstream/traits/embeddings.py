"""What a model does before its first layer and after its last, and means for one document."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any, Callable

import torch

from ..._compile import uncompiled
from ...documents.boundaries import Boundaries
from .. import luggage
from ..packed_mask import PackedMask, find

_POSITIONS = re.compile(r"(^|_)(position|positions|pos|wpe|rotary|rope)(_|$)")
_READS_ALL = re.compile("SequenceClassification|CausalLM|LMHead|MaskedLM|TokenClassification")


def first_position(decoder: Any) -> int:
    """The position of a document's first token where none is given: not 0 in RoBERTa and its kin, but 2."""
    for module in decoder.modules():
        table = module._modules.get("position_embeddings")
        if isinstance(table, torch.nn.Embedding) and table.padding_idx is not None:
            return table.padding_idx + 1
    return 0


def unreachable_positions(decoder: Any) -> str:
    """What embeds positions in a model whose forward takes none, and which so counts along the row; or nothing."""
    if _may_read_ids(decoder):
        return ""
    names = [name for name, _ in (*decoder.named_modules(), *decoder.named_parameters())]
    return next((name for name in names if _POSITIONS.search(name.rsplit(".", 1)[-1])), "")


def _may_read_ids(decoder: Any) -> bool:
    """Whether ids reach a model's code: by name, or out of its ``**kwargs``, or behind somebody's wrapper.

    A ``**kwargs`` alone (Bart's in 5.x) hands them on, past the embeddings, to attention layers that ignore them.
    """
    inherited = [vars(cls)["forward"] for cls in type(decoder).__mro__ if "forward" in vars(cls)]
    for forward in (decoder.forward, *inherited):
        parameters = inspect.signature(forward).parameters.values()
        kinds = {p.kind for p in parameters}
        code = getattr(inspect.unwrap(forward), "__code__", None)
        if code is None or any(p.name == "position_ids" for p in parameters):
            return True
        if inspect.Parameter.VAR_KEYWORD in kinds:
            if "position_ids" in code.co_consts or inspect.Parameter.VAR_POSITIONAL in kinds:
                return True
            if "forward" in code.co_names:
                continue  # of the class that it inherits from
        return False
    return False


def scaled_by_row(decoder: Any) -> list[Any]:
    """Embeddings that are scaled by how many of a row's tokens are masked out (ESM)."""
    return [module for module in decoder.modules() if "token_dropout" in vars(module)]


def by_document(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement for the ``forward`` of such embeddings: each document is scaled by its own masked tokens.

    Some versions hand them no mask; the documents ride on their ``position_ids``.
    """
    names = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(names, args)), **kwargs}
        mask = find(call.values())
        riding = luggage.take(call.get("position_ids"), luggage.DOCUMENTS)
        documents = mask.boundaries if mask is not None else riding
        if documents is None:
            return original(self, *args, **kwargs)
        if "attention_mask" in names:  # up to 4.53 it must be there
            call["attention_mask"] = torch.ones_like(call["position_ids"])
        if call.get("inputs_embeds") is None:  # looked up once, so that what hooks the table sees the whole row
            call["inputs_embeds"] = self.word_embeddings(call["input_ids"])
        return _each(functools.partial(original, self), call, documents)

    return forward


@uncompiled
def _each(embed: Callable[..., torch.Tensor], call: dict[str, Any], documents: Boundaries) -> torch.Tensor:
    """``[batch, length, hidden]``, embedded document by document."""
    shape = call["position_ids"].shape
    lengths = [length for length in documents.lengths if length]
    columns = {
        name: torch.split(value.flatten(0, 1), lengths)
        for name, value in call.items()
        if isinstance(value, torch.Tensor) and value.shape[:2] == shape
    }
    rest = {name: value for name, value in call.items() if name not in columns}
    pieces = [embed(**rest, **{name: column[i][None] for name, column in columns.items()}) for i in range(len(lengths))]
    embedded = torch.cat(pieces, dim=1)
    return embedded.view(*shape, embedded.shape[-1])


def pools_rows(model: Any, decoder: Any) -> bool:
    """Whether a head reads the one vector that its base model makes of a row's first token (next sentence, choices)."""
    head = next(cls for cls in type(model).__mro__ if "forward" in vars(cls))  # of a subclass without its own
    reads_it = model is not decoder and _READS_ALL.search(head.__name__) is None
    return reads_it and isinstance(getattr(decoder, "pooler", None), torch.nn.Module)


def pool_documents(model: Any, output: Any, mask: PackedMask) -> Any:
    """A base model's output, ``pooler_output`` being ``[documents, hidden]`` instead of ``[batch, hidden]``.

    Padding is a document, too. None where the model has no module that makes it of hidden states.
    """
    pooler = getattr(model, "pooler", None)
    in_tuple = isinstance(output, tuple)
    if not isinstance(pooler, torch.nn.Module):
        if not in_tuple and getattr(output, "pooler_output", None) is not None:
            output["pooler_output"] = None
    elif in_tuple:
        return (output[0], _pooled(pooler, output[0], mask.boundaries), *output[2:])
    elif getattr(output, "pooler_output", None) is not None:
        output["pooler_output"] = _pooled(pooler, output[0], mask.boundaries)
    return output


@uncompiled
def _pooled(pooler: Callable[..., torch.Tensor], hidden: torch.Tensor, documents: Boundaries) -> torch.Tensor:
    pieces = torch.split(hidden.flatten(0, 1), [length for length in documents.lengths if length])
    return torch.cat([pooler(piece[None]) for piece in pieces])
