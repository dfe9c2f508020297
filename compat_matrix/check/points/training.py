"""Points about training: gradient checkpointing, interleaved batches, dtypes and adapters."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from typing import Any, Callable

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

import fa2patch
from fa2patch.upstream.find_layers import ModelLayers

from ... import tiny_models
from ..cell import Cell, NotApplicable, assert_unmoved, point, unless_alone_raises
from ..compare import assert_as_near, assert_close, assert_finite, assert_same_gradients
from ..rows import alone, documents, gradients, loss_of, pack
from ..upstream import alone_computes


@point
def checkpointing(cell: Cell) -> None:
    """Gradients with checkpointing, reentrant or not, equal those of documents alone."""
    first, second = documents(5, 9, 1), documents(3, 4, 8, seed=1)
    reference = cell.reference()
    if not reference.supports_gradient_checkpointing:
        raise NotApplicable("this version of the architecture has no gradient checkpointing")
    for docs in (first, second):
        loss_of(alone(reference, docs, use_cache=False), docs).backward()
    expected = gradients(reference)
    every = [(reentrant, backwards) for reentrant in (True, False) for backwards in (1, -1)]
    for reentrant, backwards in every if cell.family in tiny_models.SEEDS else every[::3]:
        model = cell.model()
        checkpoint(model, reentrant)
        unpatched = functools.partial(checkpointed_alone, cell, reentrant, first)
        with fa2patch.apply(model), unless_alone_raises(unpatched):
            # A second packed forward with other boundaries runs before the first backward, in both orders of backward.
            losses = [loss_of(model(**pack(docs)).logits[0], docs) for docs in (first, second)]
            for loss in losses[::backwards]:
                loss.backward()
        found = gradients(model)
        try:
            assert_same_gradients(found, expected, **cell.of_gradients)
        except AssertionError:  # Gemma 3n and 4 lose gradients through keys that layers share, also unpatched
            assert_same_gradients(found, checkpointed_alone(cell, reentrant, first + second), **cell.of_gradients)


def checkpointed_alone(cell: Cell, reentrant: bool, docs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model = cell.reference()
    checkpoint(model, reentrant)
    loss_of(alone(model, docs, use_cache=False), docs).backward()
    return gradients(model)


def checkpoint(model: Any, reentrant: bool) -> None:
    model.train()
    model.enable_input_require_grads()
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    except TypeError:  # 4.34: the modeling file calls torch.utils.checkpoint.checkpoint itself
        model.gradient_checkpointing_enable()
        modeling = importlib.import_module(type(model).__module__)
        torch.utils.checkpoint.checkpoint = _with_default(torch.utils.checkpoint.checkpoint, reentrant)
        assert modeling.torch.utils.checkpoint is torch.utils.checkpoint


def _with_default(checkpoint: Any, reentrant: bool) -> Any:
    original = getattr(checkpoint, "original", checkpoint)

    def with_default(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{"use_reentrant": reentrant, **kwargs})

    with_default.original = original
    return with_default


@point
def half_precision(cell: Cell) -> None:
    """A packed row in a bfloat16 model is about as close to float32 as documents alone, and is isolated."""
    _as_near_as_alone(cell, cell.model(torch.bfloat16), cell.reference(torch.bfloat16))


@point
def autocast(cell: Cell) -> None:
    """The same holds for a float32 model under autocast to bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        _as_near_as_alone(cell, cell.model(), cell.reference())


@point
def lora(cell: Cell) -> None:
    """The same holds for PEFT LoRA on a bfloat16 model with float32 norms: q, k and v are cast back."""
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise NotApplicable(f"peft does not import: {error}") from error
    linear = {
        name.rsplit(".", 1)[-1] for name, module in cell.model().named_modules() if isinstance(module, torch.nn.Linear)
    }
    wanted = sorted(linear & {"q_proj", "v_proj", "query_key_value", "qkv_proj", "Wqkv"}) or _projections(cell.model())

    def adapted(model: Any) -> Any:
        for name, module in model.named_modules():
            if "norm" in name.lower() and not list(module.children()):
                module.float()
        torch.manual_seed(0)
        task = None if tiny_models.is_encoder(cell.family) else "CAUSAL_LM"
        config = peft.LoraConfig(r=2, target_modules=wanted, init_lora_weights=False, task_type=task)
        return peft.get_peft_model(model, config).eval()

    model = adapted(cell.model(torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        _as_near_as_alone(cell, model, adapted(cell.reference(torch.bfloat16)))


def _projections(model: Any) -> list[str]:
    layers = ModelLayers(model)
    return sorted(
        {
            name.rsplit(".", 1)[-1]
            for layer in layers.attention or layers.mixers
            for name, inner in layer.module.named_modules()
            # PEFT does not adapt Mamba's out_proj
            if type(inner).__name__ in ("Linear", "Conv1D") and not name.endswith("out_proj")
        }
    )


def _as_near_as_alone(cell: Cell, model: Any, reference: Any) -> None:
    lengths = cell.lengths(5, 9, 2)
    docs = documents(*lengths)
    changed = [documents(lengths[0], seed=7)[0], *docs[1:]]
    rows = pack(docs), pack(changed)
    as_near_as_alone(
        cell, model, reference, *rows, lengths[0], lambda model: alone(model, docs), lambda x: loss_of(x, docs)
    )


def as_near_as_alone(
    cell: Cell,
    model: Any,
    reference: Any,
    row: dict[str, Any],
    changed: dict[str, Any],  # the row with another first document
    first: int,  # tokens of the first document
    # a model's logits of the documents alone
    computed_alone: Callable[[Any], torch.Tensor],
    loss: Callable[[torch.Tensor], torch.Tensor],  # of the row's logits
    prove: bool | None = None,
) -> None:
    """Raise unless a packed row is about as close to float32 as documents alone, isolated, and fit to learn from."""
    # copied before use, as RecurrentGemma keeps its last states
    exact_model, unpatched = copy.deepcopy(reference).float(), copy.deepcopy(model)
    with alone_computes(" on one document"):
        expected = computed_alone(reference)
    with torch.autocast("cpu", enabled=False):
        exact = computed_alone(exact_model)
    with fa2patch.apply(model, prove=prove):
        found = model(**row).logits[0]
        assert_unmoved(cell, model(**changed).logits[0, first:], found[first:])
        assert_as_near(found, exact, expected, lambda: computed_alone(unpatched))
        loss(found).backward()
    assert_finite(gradients(model))


@point
def router_loss(cell: Cell) -> None:
    """The loss that balances experts, and the loss with it, are those of the padded batch."""
    reference, model = cell.reference(), cell.model()
    if "output_router_logits" not in inspect.signature(type(model).forward).parameters:
        raise NotApplicable("the forward returns no router logits")
    asked = {"output_router_logits": True, "use_cache": False}

    def padded(docs: list[torch.Tensor], columns: int = 0) -> Any:
        # columns: padding beyond what the documents need
        ids = pad_sequence([pad(doc, (0, columns)) for doc in docs], batch_first=True)
        mask = pad_sequence([pad(torch.ones_like(doc), (0, columns)) for doc in docs], True)
        with alone_computes():
            labels = ids.masked_fill(mask == 0, -100)
            return reference(input_ids=ids, attention_mask=mask, labels=labels, **asked)

    docs = documents(5, 9, 3)
    expected = padded(docs)
    if getattr(expected, "aux_loss", None) is None:
        raise NotApplicable("this version computes no loss of its routers")
    # A version whose padded batch counts its padding as tokens is compared on documents of one length, which need none.
    if not torch.allclose(padded(docs, columns=7).aux_loss, expected.aux_loss):
        docs = documents(6, 6, 6)
        expected = padded(docs)
    row = fa2patch.DataCollatorWithFlattening()([{"input_ids": doc.tolist()} for doc in docs])
    with fa2patch.apply(model):
        found = model(**row, **asked)
    assert_close(found.aux_loss.detach(), expected.aux_loss.detach(), "router loss")
    assert_close(found.loss.detach(), expected.loss.detach(), "loss")
