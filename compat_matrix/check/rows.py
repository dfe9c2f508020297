"""Makes documents and packed rows, and runs documents alone."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .. import tiny_configs, tiny_models


def documents(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, tiny_configs.VOCABULARY, (length,), generator=generator) for length in lengths]


def pack(docs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.cat(docs)[None],
        "position_ids": torch.cat([_count(doc) for doc in docs], dim=1),
    }


def takes_cache(model: Any) -> bool:
    # A masked LM's **kwargs do not count, as it has no cache.
    parameters = inspect.signature(type(model).forward).parameters.values()
    encodes = "MaskedLM" in type(model).__name__
    return any(p.name == "use_cache" or (p.kind is p.VAR_KEYWORD and not encodes) for p in parameters)


def takes_positions(model: Any) -> bool:
    # The class is not patched: a patched forward always takes position_ids.
    return "position_ids" in inspect.signature(type(model).forward).parameters


def alone(model: Any, docs: list[torch.Tensor], counts_itself: bool = False, **call: Any) -> torch.Tensor:
    # Unless it counts_itself, a model that does not count from 0 is given position_ids. call: further arguments
    if not takes_cache(model):
        call.pop("use_cache", None)
    elif "use_cache" in inspect.signature(type(model).forward).parameters and not _shares_keys(model):
        call.setdefault("use_cache", False)  # 4.51's Llama 4 has a cache in bfloat16 only
    counts_otherwise = not counts_itself and getattr(model.config, "model_type", None) in tiny_models.NOT_FROM_ZERO
    positions: list[dict[str, Any]] = [{"position_ids": _count(doc)} if counts_otherwise else {} for doc in docs]
    if _has_mrope(getattr(model.config, "text_config", model.config)):  # 4.53's Qwen2-VL fails on a row without a mask
        for doc, more in zip(docs, positions):
            more["attention_mask"] = torch.ones(1, len(doc), dtype=torch.long)
    return torch.cat([model(input_ids=doc[None], **more, **call).logits[0] for doc, more in zip(docs, positions)])


def output_or_error(model: Any, **given: Any) -> Any:
    # Some unpatched models fail on some batches.
    try:
        return model(**given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def without_lengths(row: dict[str, Any]) -> dict[str, Any]:
    # Only its ids tell the row's documents then.
    return {name: value for name, value in row.items() if not name.startswith(("cu_seq", "max_length"))}


def _shares_keys(model: Any) -> bool:
    # Such layers take earlier layers' keys and values from the cache, and compute others without a cache.
    return bool(getattr(getattr(model.config, "text_config", model.config), "num_kv_shared_layers", 0))


def _has_mrope(config: Any) -> bool:
    return any("mrope_section" in (getattr(config, name, None) or ()) for name in ("rope_scaling", "rope_parameters"))


def _count(doc: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(doc))[None]


def loss_of(logits: torch.Tensor, docs: list[torch.Tensor]) -> torch.Tensor:
    # logits: [tokens, vocabulary]
    pieces = zip(logits.split([len(doc) for doc in docs]), docs)
    return sum(
        torch.nn.functional.cross_entropy(piece[:-1].float(), doc[1:], reduction="sum")
        for piece, doc in pieces
        if len(doc) > 1
    )


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found
