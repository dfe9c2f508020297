"""The interface seam (4.48 on): ``modeling_x.ALL_ATTENTION_FUNCTIONS`` and ``modeling_x.eager_attention_forward``.

An attention layer looks its function up in one or the other, by ``config._attn_implementation``. Both are replaced in
the one modeling module only, and whichever function is found is used as it was for every mask but a packed one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Callable

import torch

from ...errors import PackingNotIsolated
from ...kernels.options import Options
from ..packed_mask import PackedMask

REGISTRY, EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"

_KNOWN_TENSORS = {
    "s_aux", "sinks", "position_ids", "cache_position", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k",
    "max_length_q", "max_length_k", "cumulative_seqlens_q", "cumulative_seqlens_k", "seq_idx", "labels",
    "num_items_in_batch",
}  # fmt: skip


def is_seam(modeling: ModuleType, forward: Callable[..., Any]) -> bool:
    """Whether this attention layer's ``forward`` looks its function up in the registry."""
    return REGISTRY in vars(modeling) and REGISTRY in forward.__code__.co_names


def routed(original: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function that keeps the documents of packed batches apart; all others go to ``original``."""

    @functools.wraps(original)
    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        mask = args[0] if args else kwargs.get("attention_mask")
        if not isinstance(mask, PackedMask):
            return original(module, query, key, value, *args, **kwargs)
        q, k, v = (states.transpose(1, 2) for states in (query, key, value))
        return mask.attend(module, q, k, v, _options(module, kwargs)), None

    return attention


class Overlay:
    """``ALL_ATTENTION_FUNCTIONS`` as one modeling module sees it; reads through to the real one, live."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self._routed: dict[Any, Callable[..., Any]] = {}

    def _route(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if function not in self._routed:
            self._routed[function] = routed(function)
        return self._routed[function]

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._route(self._registry[name])

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        self._registry[name] = function

    def __delitem__(self, name: str) -> None:
        del self._registry[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._registry else default

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return self._route(self._registry.get_interface(name, default))

    def __contains__(self, name: object) -> bool:
        return name in self._registry

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry)

    def __getattr__(self, name: str) -> Any:
        if name == "_registry":
            raise AttributeError(name)
        return getattr(self._registry, name)


def _options(module: Any, kwargs: dict[str, Any]) -> Options:
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and name not in _KNOWN_TENSORS:
            raise PackingNotIsolated(
                f"{type(module).__name__} hands its attention a tensor {name!r}, whose meaning for a packed batch is "
                "not known. Please report the model; until then train it padded."
            )
    said = kwargs.get("is_causal")  # GPT-2 of 4.48 on says False where there is a mask, which has the triangle in it
    return Options(
        scale=kwargs.get("scaling"),
        causal=bool(said) or getattr(module, "is_causal", said is None),
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        dropout=kwargs.get("dropout") or 0.0,
        sinks=kwargs.get("s_aux", kwargs.get("sinks")),  # upstream's name, and MiMo's
    )
