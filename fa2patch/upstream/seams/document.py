"""Base models that compute each document by itself, because no kernel can say what their layers add to the scores.

MPNet adds a bias for each distance, DeBERTa scores of distances, BERT with ``relative_key`` distances, too. Stacks of
encoder-decoders have local, sparse, merged or n-gram attention. Their base model is called for each document, so that
nothing has the size of the row squared, and a decoder with the states of its source. Heads still run on the whole row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..._torch import uncompiled
from ...errors import PackingNotIsolated
from ...kernels.picks import DOCUMENTS, Mixed
from .. import inspecting
from ..find_models import embedding_of, is_sharded
from ..packed_mask import PackedMask
from ..splitting import Documents
from ..step import Step
from ..transformers_names import ENCODED, ENCODED_MASK


def computed(step: Step, mask: PackedMask) -> Any:
    mask.require_whole_rows("layers that add more to attention scores than a mask")
    if is_sharded(step.patch.model):
        raise PackingNotIsolated(
            f"{type(step.module).__name__} computes each document by itself, and its parameters are sharded: ranks "
            "compute each call together, and those with fewer documents would let the others wait forever. Train this "
            "model padded, or replicated (DDP)."
        )
    layers = [step.module.get_submodule(layer.name) for layer in step.patch.attention]
    _require_a_direction(step.module, layers)
    for layer in layers:
        mask.given(layer)
    if step.call.get("inputs_embeds") is None and "inputs_embeds" in step.calls.names:
        table = embedding_of(step.module)
        scales = any("scale" in name for name in inspecting.names_read(step.calls.original))  # BioGPT, XGLM: themselves
        if isinstance(table, torch.nn.Embedding) and not scales:
            # a single lookup, so that hooks on the table see the whole row
            step.call["inputs_embeds"] = table(step.call.pop("input_ids"))
    return _of_each(step, mask)


def _require_a_direction(model: Any, layers: Sequence[Any]) -> None:
    # Attention other than eager goes by is_causal where a document alone needs no mask (UMT5 5.15 to 5.17, Pegasus X).
    implementation = getattr(model.config, "_attn_implementation", None) or "eager"
    said = [getattr(layer, "is_causal", None) is False and getattr(layer, "is_decoder", False) for layer in layers]
    if implementation != "eager" and said and all(said):
        raise PackingNotIsolated(
            f"{type(model).__name__} is a decoder whose layers say is_causal=False: with {implementation}, its tokens "
            "see later ones, also without fa2patch, and only eager attention goes by its mask. Load it with "
            "attn_implementation='eager'."
        )


@uncompiled
def _of_each(step: Step, mask: PackedMask) -> Any:
    for layer in step.patch.attention:
        mask.picks.took(step.module.get_submodule(layer.name), Mixed(DOCUMENTS))
    states = _of_sources(step, mask)
    rest, call = step.calls.arranged(step.args, step.call)
    for name, value in call.items():
        # Every document would see all of an argument for other things than its tokens: entities, or an encoder's
        # states. A head_mask has two dimensions, of floating-point numbers.
        by_token = isinstance(value, torch.Tensor) and value.dim() > 1 + value.is_floating_point()
        if by_token and value.shape[1] != mask.shape[1]:
            raise PackingNotIsolated(
                f"{name} {list(value.shape)} came to {type(step.module).__name__} with a packed batch of "
                f"{mask.shape[1]} tokens: expected one entry for each token. Whose the others are is not known. Leave "
                "it out, or train this model padded."
            )
    documents, settings = Documents(mask.boundaries, mask.shape), _settings(step.module)

    def each(*args: Any, **given: Any) -> Any:
        if states is not None:
            given[ENCODED] = next(states)
        if given.get("inputs_embeds") is not None:
            given["inputs_embeds"] = given["inputs_embeds"] * 1  # DeBERTa (4.34) changes them in place
        output = step.calls.original(step.module, *args, **given)
        _require_unchanged(step.module, settings)
        return output

    return _joined(documents, documents.of_each(each, rest, call))


def _of_sources(step: Step, mask: PackedMask) -> Iterator[torch.Tensor] | None:
    # the encoder's states of each target's source, which cross.py has laid end to end; empty targets are left out
    of_cross = step.call.get(ENCODED_MASK) if mask.cross is None else mask.cross
    if not isinstance(of_cross, PackedMask) or of_cross.boundaries.sources is None:
        return None
    lengths = list(of_cross.boundaries.sources.lengths)
    states = step.call.pop(ENCODED).flatten(0, 1)[None, : sum(lengths)]  # without padding behind them
    pieces = states.split_with_sizes(lengths, 1)
    return iter([piece for piece, length in zip(pieces, mask.boundaries.lengths) if length])


def _settings(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, (str, bool, int))}


def _require_unchanged(module: Any, before: dict[str, Any]) -> None:
    # BigBirdPegasus goes over to full attention, for good, at the first sequence that is short.
    now = _settings(module)
    if now != before:
        name = next(name for name in {**before, **now} if now.get(name) != before.get(name))
        raise PackingNotIsolated(
            f"{type(module).__name__} changed its own {name} from {before.get(name)!r} to {now.get(name)!r} when it "
            "computed a document, and documents after it would be computed otherwise than those before. Set it in the "
            "config before training, leave such documents out, or train this model padded."
        )


def _require_one_for_each_token(outputs: Sequence[torch.Tensor], lengths: Sequence[int]) -> None:
    # ProphetNet's decoder returns several streams, and which number of a longer dimension is whose is not known.
    several = {each.shape[1] / length if each.dim() == 3 else 0 for each, length in zip(outputs, lengths)}
    if len(several) == 1 and max(several) > 1:
        raise PackingNotIsolated(
            f"a stack returned {max(several):g} states for each token of a document: expected one. How they would be "
            "those of a row is not known. Train this model padded."
        )


def _joined(documents: Documents, outputs: Sequence[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        of_tokens = all(each.shape[:2] == (1, length) for each, length in zip(outputs, documents.lengths))
        _require_one_for_each_token(outputs, documents.lengths)
        # Outputs without a value for each token, such as ``pooler_output``, are joined along dim 0.
        return documents.join(outputs) if of_tokens else torch.cat(tuple(outputs))
    if hasattr(first, "items"):
        return type(first)(**{name: _joined(documents, [each[name] for each in outputs]) for name in first})
    if isinstance(first, (tuple, list)):
        return tuple(_joined(documents, column) for column in zip(*outputs))
    return first
