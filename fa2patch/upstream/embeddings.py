"""Embeddings that depend on a row: noise (NEFTune), a scale by the number of mask tokens (ESM), token types."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .._torch import compiling, uncompiled
from .._types import Call, Function, Model
from ..comparison import version
from ..documents.boundaries import Boundaries
from . import attached, inspecting
from .calls import batch_shape
from .facts import Site, of_forward
from .find_layers import ModelLayers
from .find_models import embedding_of
from .packed_mask import mask_among
from .splitting import Documents
from .step import Step, Trait


class NoisyEmbeddings(Trait):
    """Hand the documents to noise on the embeddings (NEFTune), which is scaled by a row's length."""

    # Such code is a forward hook of the embedding, or its forward if that is not torch's. It is known by drawing random
    # numbers, and is called for documents of one length at a time. The documents are attached to `input_ids`.

    name = "noisy embeddings"

    def finds(self, model: ModelLayers) -> bool | None:
        return True if list(_noise(embedding_of(model.model))) else None

    def before(self, step: Step, found: Any) -> None:
        ids = step.call.get("input_ids")
        if step.mask is None or step.role.pools or ids is None:
            return
        step.mask.require_whole_rows("noise on its embeddings that is scaled by the length of a document")
        for noise in self._of(step):
            noise.added = False
        piece = getattr(ids, attached.EMBEDDED, None)
        if piece is None:
            piece = attached.Piece(attached.EMBEDDED, (step.mask.boundaries, step.mask.shape))
            step.call["input_ids"] = attached.attach(ids, piece)
        step.kept = {**(step.kept or {}), self.name: piece}

    def after(self, step: Step, found: Any, output: Any) -> Any:
        piece = (step.kept or {}).get(self.name)  # GPT-2 makes other ids, which is right as long as no noise is added
        if piece is not None and (compiling() or any(noise.added for noise in self._of(step))):
            attached.require_delivered(piece, step.module)
        return output

    def _of(self, step: Step) -> list[ByDocument]:
        embedding = embedding_of(step.module)
        if embedding is None:
            return []
        functions = [*embedding._forward_hooks.values(), vars(embedding).get("forward")]
        return [each for each in functions if isinstance(each, ByDocument)]  # dynamo cannot trace what _noise asks


class ByDocument:
    """Adds noise to the embeddings of a packed row document by document, by a hook or a forward for whole rows."""

    # Other hooks of an embedding are called once, with the whole row: some take its gradient, and would take it twice.

    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.added = False  # whether it has added noise to a whole row since this was set to False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        riding = (attached.take(tensor, attached.EMBEDDED) for tensor in _tensors([*args, *kwargs.values()]))
        documents = next((each for each in riding if each is not None), None)
        if documents is not None:
            return self._of_each(documents, args, kwargs)
        if compiling():
            return self.function(*args, **kwargs)
        last = args[-1] if args else None
        before = version(last)
        output = self.function(*args, **kwargs)
        self.added = (output is not None and output is not last) or version(last) != before
        return output

    @uncompiled
    def _of_each(self, riding: Any, args: Any, kwargs: Any) -> Any:
        documents = Documents(*riding)  # in a graph, lengths have no values
        of_length: dict[int, list[int]] = {}
        for number, length in enumerate(documents.lengths):
            of_length.setdefault(length, []).append(number)
        device = next(_tensors([*args, *kwargs.values()])).device
        documents = documents.in_batches(list(of_length.values()), device)
        outputs = []
        for given in documents.split(list(args)):
            *others, last = given
            last = last.clone()  # a part of the row, which cannot be changed in place
            output = self.function(*others, last, **kwargs)
            outputs.append(last if output is None else output)
        return documents.join(outputs)


def take_apart(model: Model) -> None:
    """Let noise on a model's embeddings see one document at a time."""
    for table, key, function in list(_noise(embedding_of(model))):
        if not isinstance(function, ByDocument):
            table[key] = ByDocument(function)


def put_back(module: torch.nn.Module) -> None:
    hooks, own = module._forward_hooks, vars(module)
    held: list[tuple[Any, Any, Any]] = [(hooks, key, hook) for key, hook in hooks.items()]
    for table, key, function in [*held, (own, "forward", own.get("forward"))]:
        if isinstance(function, ByDocument):
            table[key] = function.function
            if getattr(function.function, "__func__", None) is type(module).forward:
                del table[key]


def _noise(embedding: torch.nn.Module | None) -> Iterator[tuple[Any, Any, Any]]:
    # the table and the key that hold what adds noise, and the function
    if embedding is None:
        return
    for key, hook in embedding._forward_hooks.items():
        if inspecting.draws(hook):
            yield embedding._forward_hooks, key, hook
    if inspecting.draws(embedding.forward):
        yield vars(embedding), "forward", embedding.forward


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


class ScaledEmbeddings(Trait):
    # Token dropout (ESM) scales embeddings. The documents are attached to `position_ids`.

    name = "scaled embeddings"

    def finds(self, model: ModelLayers) -> bool | None:
        return True if _scaled(model) and not model.by_document else None

    def replaces(self, model: ModelLayers, found: Any) -> Iterable[Site]:
        return [of_forward(module, scaled_by_document) for module in _scaled(model)]

    def before(self, step: Step, found: Any) -> None:
        if step.mask is not None:
            step.mask.require_whole_rows("embeddings that are scaled by the mask tokens of a document")
        step.send_documents()


def _scaled(model: ModelLayers) -> list[torch.nn.Module]:
    return [module for module in model.text_modules.values() if "token_dropout" in vars(module)]


def scaled_by_document(original: Function) -> Function:
    # Each document is scaled by its own mask tokens. Some versions pass no mask to these embeddings. There the
    # documents come on `position_ids`.
    names = inspecting.parameter_names(original)[1:]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(names, args)), **kwargs}
        mask = mask_among(call.values())
        riding = attached.take(call.get("position_ids"), attached.DOCUMENTS)
        documents = mask.boundaries if mask is not None else riding
        if documents is None:
            return original(self, *args, **kwargs)
        if "attention_mask" in names:  # versions up to 4.53 require it
            call["attention_mask"] = torch.ones_like(call["position_ids"])
        if call.get("inputs_embeds") is None:  # a single lookup, so that hooks on the table see the whole row
            call["inputs_embeds"] = self.word_embeddings(call["input_ids"])
        return _each_scaled(functools.partial(original, self), call, documents)

    return forward


@uncompiled
def _each_scaled(embed: Function, call: Call, documents: Boundaries) -> Any:
    each = Documents(documents, call["position_ids"].shape)
    return each.join(each.of_each(embed, (), call))


_TYPES = "token_type_ids"


class TokenTypes(Trait):
    # BERT and its kin up to 4.57 and ConvBERT have a table of zeros, with one for each position, and cut it to the
    # length of the row, which may be longer than the table.

    name = "token types"

    def finds(self, model: ModelLayers) -> bool | None:
        takes = _TYPES in inspecting.upstream_parameters(type(model.decoder).forward)
        return True if takes and any(_TYPES in module._buffers for module in model.text_modules.values()) else None

    def before(self, step: Step, found: Any) -> None:
        if step.mask is not None and step.role.innermost and step.call.get(_TYPES) is None:
            shape, device = batch_shape(step.call)
            step.call[_TYPES] = torch.zeros(shape, dtype=torch.long, device=device)
