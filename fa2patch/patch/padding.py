"""Whether a patched model computes padded batches packed: asked for, or implied by an object that makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._types import Model
from ..errors import NotAModel, UnsupportedModel
from ..upstream.find_models import makes_its_batches, models, transformers_model
from ..upstream.step import MARK, PADDING

if TYPE_CHECKING:
    from ..padded.batches import PaddedBatches


def pack_padded_batches(model: Model, share_prompts: bool = False) -> PaddedBatches:
    """Make a patched model compute padded batches packed and return padded outputs.

    Padding is not computed between the embedding and the last hidden states. The head gets hidden states
    ``[batch, length, hidden]``, with zeros for padding. A padded batch has an ``attention_mask`` ``[batch, length]`` of
    zeros and ones and is padded left, right or on both sides. All other batches are unchanged: without padding, with
    gaps in the mask, with an empty row, with one token in each row, with a cache (``generate``, ``use_cache=True``),
    with ``output_attentions=True``, with position ids on several axes, under ``torch.compile``, under sequence
    parallelism, or without such a mask, as packed batches are. So is a batch that is padded left and has no position
    ids, in a model with a table of positions (BERT, GPT-2), because such a model counts padding there. So is one of
    which something reads padding: the head around the base model (a softmax over the row, labels that padding
    predicts), a pooler of a row's first token where that is padding, or a count of position ids. A model that computes
    a batch with a mask and without a cache in this way warns once for each reason, with ``StaysPadded``.

    Whether a head reads padding is tried: with the first batch of a kind and with batches 2, 4, 8, ... of it, its
    model is run twice more without gradients, with other hidden states of padding. Whatever is around the model is not
    tried, but a gradient that comes to padding from there is an error in the backward.

    With ``share_prompts``, the first tokens in which rows are equal are computed once, for example the prompt of
    several completions, and all rows get their hidden states. Batches without padding are packed too if rows share
    tokens. Rows are compared on the device, in ``input_ids`` and in the other arguments with one number for each token.
    A prefix is shared if this saves at least 16 tokens. Nothing is shared in models whose tokens see later tokens, in
    models that are given ``inputs_embeds``, or in batches with rows on both sides of a longrope's limit. With dropout,
    a shared token is dropped in all rows or in none.

    With a budget (``fa2patch.apply(model, max_tokens=...)``), batches without padding are packed too, so that they are
    computed in passes, and under ``torch.compile`` those over the budget.

    Each forward with such a mask reads from the device once, and a second time if rows share tokens.

    Args:
        model: A model that ``fa2patch.apply`` has patched, or a wrapper around one (PEFT, accelerate, DDP, FSDP).
        share_prompts: Whether equal prefixes of rows are computed once.

    Returns:
        What packs them, as a context manager with a ``remove()`` method. ``Patch.revert()`` removes it, too. If the
        model has one already, that is returned, with this ``share_prompts``.

    Raises:
        NotAModel: The model is not patched, or ``model`` holds no Transformers model.
        UnsupportedModel: The model is an encoder-decoder.
    """
    inner = transformers_model(model)
    if MARK not in inner.__dict__:
        raise NotAModel(
            f"expected a patched model, found this {type(inner).__name__}: call fa2patch.apply(model) first."
        )
    if inner.__dict__[MARK].facts.pairs:
        raise UnsupportedModel(
            f"{type(inner).__name__} is an encoder-decoder: padded batches are computed packed in models that read one "
            "sequence. Give it packed pairs: sources in one row, targets in another."
        )
    base = models(inner)[-1]
    padding = of_model(base)
    if padding is None:
        return _packing(base, share_prompts)
    padding.share_prompts = share_prompts
    return padding


def _packing(base: Any, share_prompts: bool = False) -> PaddedBatches:
    from ..padded.batches import PaddedBatches  # a room of its own, which few models need

    return PaddedBatches(base, share_prompts)


def of_model(base: torch.nn.Module) -> PaddedBatches | None:
    # A copy of a model has a copy of what makes it compute padded batches packed.
    found = base.__dict__.get(PADDING)
    if found is None:
        return None
    from ..padded.batches import PaddedBatches  # what is found is of this room, which is imported already

    return found if isinstance(found, PaddedBatches) else None


def wanted(model: object, inner: Model, asked: bool | None) -> bool:  # model: what apply was called with
    if asked is None:
        asked = of_model(models(inner)[-1]) is not None or makes_its_batches(model)
    if not (asked and isinstance(model, torch.nn.Module)):
        return asked
    within = set(inner.modules())
    for name, module in model.named_modules():  # also those around the Transformers model
        reads, expansion = "", getattr(module, "query_expansion", None)  # of sentence-transformers' late interaction
        if expansion and not expansion.get("attend"):
            reads = f"a query_expansion without 'attend' in {name} ({type(module).__name__}), which scores padding"
        elif isinstance(module, torch.nn.modules.conv._ConvNd) and module not in within:
            reads = f"{name} ({type(module).__name__}), which mixes each token with its neighbours"
        if reads:
            raise UnsupportedModel(
                f"{type(model).__name__} holds {reads}. With padded batches computed packed, the hidden states of "
                "padding are zeros. Nothing was patched. Use the model unpatched."
            )
    return True


def switch(inner: Model, on: bool) -> None:
    base = models(inner)[-1]
    padding = of_model(base)
    if on and padding is None:
        _packing(base)
    elif not on and padding is not None:
        padding.remove()
