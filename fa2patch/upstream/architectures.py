"""The registry: one row per architecture. A row holds what the modeling file does not show.

What can be seen in a model is not written down here. Packed rows equal the model's definition, which is its eager code,
where a version's flash code differs from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable
from weakref import WeakKeyDictionary

import torch

from .._torch import constant
from .._types import Config
from ..errors import BadArchitecture, UnknownArchitecture
from ..kernels import Options
from . import inspecting


@dataclass(frozen=True)
class Architecture:
    """A kind of model that ``apply`` takes.

    Attributes:
        model_type: ``config.model_type``.
        refuse: a function ``(config) -> str | None``. It returns the reason why this model cannot be trained packed.
        adjust: a function ``(layer, options) -> options`` that corrects the options of an attention layer.
        queries: a function ``(layer, q, positions) -> q`` that corrects the queries of an attention layer. ``q`` is
            ``[batch, length, heads, dim]``; ``positions`` counts tokens within each document, ``[batch, length]``.
    """

    model_type: str
    refuse: Callable[[Any], str | None] | None = None
    adjust: Callable[[Any, Options], Options] | None = None
    queries: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model_type, str):
            raise BadArchitecture(f"model_type: expected a config's model_type, a str, found {self.model_type!r}.")
        for name in ("refuse", "adjust", "queries"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise BadArchitecture(f"{name}: expected a function or None, found {getattr(self, name)!r}.")


def _alibi(config: Config) -> str | None:
    if not getattr(config, "alibi", False):
        return None
    return (
        "config.alibi is True, and Transformers has no flash attention for Falcon with alibi. "
        "Use a checkpoint with rotary embeddings, or train padded"
    )


# What encoder-decoders do that no code of fa2patch follows yet, by model type
_PADDED_ONLY = {
    "moonshine_streaming": "its decoder adds positions to what the encoder made of a sound, counted over all of it, "
    "and sounds that are laid end to end would count on",
    "nllb-moe": "its routers read the padding in the attention mask, in whose place a packed batch has another object",
}


def _padded_only(config: Config) -> str | None:
    reason = _PADDED_ONLY.get(config.model_type)
    return None if reason is None else f"{reason}. Train padded"


def _streams(config: Config) -> str:
    return (
        f"its decoder computes {config.ngram} streams of states, one for each of the next tokens, side by side in one "
        "row, and nothing shows which of a packed row's states would be whose. Train this model padded"
    )


def _gpt_neo_window(module: Any, options: Options) -> Options:
    # Eager code applies the window of local layers, and the flash class of every version ignores it.
    kind = getattr(module, "attention_type", None)  # 5.x
    if kind is None and getattr(module, "layer_id", None) is not None:  # 4.48 on
        kind = module.config.attention_layers[module.layer_id]
    if kind is None and module not in _LOCAL:
        _LOCAL[module] = _hides_the_first_token(module.bias)
    local = _LOCAL[module] if kind is None else kind == "local"
    return replace(options, window=module.config.window_size) if local else options


# Up to 4.47 only a layer's causal mask `bias` shows whether the layer is local. This saves reads from the device.
_LOCAL: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


@constant
def _hides_the_first_token(triangle: torch.Tensor) -> bool:
    # The triangle is [1, 1, queries, keys].
    return not triangle[0, 0, -1, 0]


def _llama4_temperature(module: Any, q: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    # Layers without rope scale queries by the position in the row.
    if module.use_rope or not module.attn_temperature_tuning:
        return q
    return _scaled(
        q, into, lambda at: torch.log1p(torch.floor((at.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    )


def _ministral3_temperature(module: Any, q: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    # Layers of 5.0 to 5.3 scale queries by the position in the row. Later layers take `position_ids` in the place of
    # `cache_position`.
    if not _takes_cache_position(type(module)):
        return q
    rope = module.config.rope_parameters
    beta, limit = rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]
    return _scaled(q, into, lambda at: 1 + beta * torch.log1p(torch.floor(at / limit)))


def _scaled(q: torch.Tensor, into: torch.Tensor, scale: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    # The scale of the position in the row is taken out, and that of the position in the document put in its place.
    ratio = scale(into) / scale(torch.arange(q.shape[1], device=q.device))
    return q * ratio[:, :, None, None].to(q.dtype)


@constant
def _takes_cache_position(cls: type) -> bool:
    # `cache_position` counts tokens along the row.
    return inspecting.takes(inspecting.forward_of(cls), "cache_position")


# names for apply(model, architecture=...); a model type needs no row to be patched
_NOTHING_SPECIAL = (
    "dbrx", "gemma", "gemma2", "gpt_bigcode", "granite", "llama", "mistral", "mixtral", "olmo", "phi", "phi3", "qwen2",
    "qwen2_moe", "seamless_m4t", "seamless_m4t_v2", "speech_to_text", "stablelm", "starcoder2",
)  # fmt: skip

_rows = {
    row.model_type: row
    for row in (
        *map(Architecture, _NOTHING_SPECIAL),
        Architecture("falcon", refuse=_alibi),
        Architecture("gpt_neo", adjust=_gpt_neo_window),
        *(Architecture(model_type, refuse=_padded_only) for model_type in _PADDED_ONLY),
        Architecture("llama4_text", queries=_llama4_temperature),
        Architecture("ministral3", queries=_ministral3_temperature),
        Architecture("prophetnet", refuse=_streams),
        Architecture("xlm-prophetnet", refuse=_streams),
    )
}


def architectures() -> tuple[Architecture, ...]:
    """Return the rows of the registry, sorted by model type."""
    return tuple(_rows[name] for name in sorted(_rows))


def register(architecture: Architecture) -> None:
    """Add a row, for example for remote code. It replaces a row of the same ``model_type``.

    The model's attention layers must offer one of the seams: they look their function up in a module-level
    ``ALL_ATTENTION_FUNCTIONS`` or ``..._ATTENTION_FUNCTION``, or their eager code writes attention
    out with functions of torch.

    Args:
        architecture: The row.

    Raises:
        BadArchitecture: the argument is not an :class:`Architecture`.
    """
    if not isinstance(architecture, Architecture):
        raise BadArchitecture(f"register: expected an Architecture, found {type(architecture).__name__}.")
    _rows[architecture.model_type] = architecture


def lookup(model_type: str) -> Architecture:
    try:
        return _rows[model_type]
    except (KeyError, TypeError):  # TypeError: not hashable
        raise UnknownArchitecture(
            f"no architecture {model_type!r} in the registry, which has {', '.join(sorted(_rows))}. Leave the argument "
            f"out to have the model looked at, or fa2patch.register(fa2patch.Architecture({model_type!r}, ...))."
        ) from None


def row_of(config: Config) -> Architecture:
    # A model type without a row gets an empty one.
    model_type = str(getattr(config, "model_type", ""))
    return _rows.get(model_type) or Architecture(model_type)


def is_registered(config: Config) -> bool:
    return getattr(config, "model_type", None) in _rows
