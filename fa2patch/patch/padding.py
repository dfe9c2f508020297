"""Whether a patched model computes padded batches packed: asked for, or implied by an object that makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._types import Model
from ..errors import NotAModel, UnsupportedModel
from ..upstream.find_models import makes_its_batches, models, stacks_of, transformers_model
from ..upstream.step import MARK, PADDING

if TYPE_CHECKING:
    from ..padded.batches import PaddedBatches
    from ..padded.pairs import PaddedPairs


def pack_padded_batches(model: Model, share_prompts: bool = False) -> PaddedBatches | PaddedPairs:
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

    Each stack of an encoder-decoder computes its own padded rows packed, inside a call of the whole model. Targets end
    as ``decoder_attention_mask`` says or, without one, with their last label; without both, they are computed with all
    columns. What would have to be proven (``fa2patch.apply``'s ``prove``) is proven with the batch's pairs laid end to
    end, or stays padded if its labels are not those of targets.

    Each forward with such a mask reads from the device once, and a second time if rows share tokens; an encoder-decoder
    four times.

    Args:
        model: A model that ``fa2patch.apply`` has patched, or a wrapper around one (PEFT, accelerate, DDP, FSDP).
        share_prompts: Whether equal prefixes of rows are computed once.

    Returns:
        What packs them, as a context manager with a ``remove()`` method. ``Patch.revert()`` removes it, too. If the
        model has one already, that is returned, with this ``share_prompts``.

    Raises:
        NotAModel: The model is not patched, or ``model`` holds no Transformers model.
    """
    inner = transformers_model(model)
    if MARK not in inner.__dict__:
        raise NotAModel(
            f"expected a patched model, found this {type(inner).__name__}: call fa2patch.apply(model) first."
        )
    padding = of_model(inner) or _packing(inner)
    padding.share_prompts = share_prompts
    return padding


def _packing(inner: Any) -> PaddedBatches | PaddedPairs:
    if stacks_of(inner) is not None:
        from ..padded.pairs import PaddedPairs  # these are a room of their own, which few models need

        return PaddedPairs(inner)
    from ..padded.batches import PaddedBatches

    return PaddedBatches(models(inner)[-1])


def of_model(inner: Any) -> PaddedBatches | PaddedPairs | None:
    # A copy of a model has a copy of what makes it compute padded batches packed.
    holder = inner if stacks_of(inner) is not None else models(inner)[-1]
    found: PaddedBatches | PaddedPairs | None = holder.__dict__.get(PADDING)
    return found


def wanted(model: object, inner: Model, asked: bool | None) -> bool:  # model: what apply was called with
    if asked is None:
        asked = of_model(inner) is not None or makes_its_batches(model)
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
    padding = of_model(inner)
    if on and padding is None:
        _packing(inner)
    elif not on and padding is not None:
        padding.remove()
