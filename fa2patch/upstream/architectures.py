"""The registry: one row per architecture. A row says what cannot be found by looking at the modeling file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable
from weakref import WeakKeyDictionary

import torch

from .._compile import constant
from ..errors import BadArchitecture, UnknownArchitecture
from ..kernels.options import Options


@dataclass(frozen=True)
class Architecture:
    """A kind of model that ``apply`` takes.

    Attributes:
        model_type: ``config.model_type``.
        refuse: given a config, the reason why this model cannot be trained packed, or None.
        adjust: a quirk: given an attention layer and the options that it passes, the options that are right.
        queries: a quirk: given an attention layer, its queries ``[batch, length, heads, dim]`` and how far into its
            document every token is, ``[batch, length]``, the queries that are right.
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


def _alibi(config: Any) -> str | None:
    if not getattr(config, "alibi", False):
        return None
    return (
        "config.alibi is True, and Transformers has no flash attention for Falcon with alibi. "
        "Use a checkpoint with rotary embeddings, or train padded"
    )


def _prefix(config: Any) -> str:
    return "the tokens of its prefix see each other in both directions, which packed attention has no way to say"


def _phi_scale(module: Any, options: Options) -> Options:
    """4.36's flash class scales by 1.0 where eager attention, and every version since, takes the default."""
    return replace(options, scale=None) if options.scale == 1.0 else options


def _bigcode_scale(module: Any, options: Options) -> Options:
    """Up to 4.39 the flash class of a half-precision model also divides by the layer's number, as no other does."""
    if hasattr(module, "scaling"):  # 4.54 on: one scale for all, if a wrong one in 4.54
        return options
    return replace(options, scale=module.head_dim**-0.5 if module.scale_attn_weights else 1.0)


def _gemma2(module: Any, options: Options) -> Options:
    """Up to 4.47 the flash class caps only where it finds flash-attn 2.6 or newer, up to 4.43 it has no window."""
    softcap = options.softcap or getattr(module.config, "attn_logit_softcapping", None)
    return replace(options, softcap=softcap, window=options.window or module.sliding_window)


def _gpt_neo_window(module: Any, options: Options) -> Options:
    """Local layers see ``config.window_size`` tokens in eager code; the flash class of every version forgets it."""
    return replace(options, window=module.config.window_size) if _is_local(module) else options


def _is_local(module: Any) -> bool:
    kind = getattr(module, "attention_type", None)  # 5.x
    if kind is None and getattr(module, "layer_id", None) is not None:  # 4.48 on
        kind = module.config.attention_layers[module.layer_id]
    if kind is not None:
        return bool(kind == "local")
    if module not in _LOCAL:
        _LOCAL[module] = _hides_the_first_token(module.bias)
    return _LOCAL[module]


_LOCAL: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Up to 4.47 only the triangle that a layer keeps for eager code says whether it is local: read once, for a device."""


@constant
def _hides_the_first_token(triangle: torch.Tensor) -> bool:
    """Whether the last query of a mask ``[1, 1, queries, keys]`` does not see the first key."""
    return not triangle[0, 0, -1, 0]


def _temperature(module: Any, q: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Layers without rope scale queries by how far into the row they are, from ``floor_scale`` tokens on."""
    if module.use_rope or not module.attn_temperature_tuning or q.shape[1] < module.floor_scale:
        return q

    in_row = torch.arange(q.shape[1], device=q.device)
    right, wrong = (
        torch.log1p(torch.floor((tokens.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        for tokens in (into, in_row)
    )
    ratio: torch.Tensor = right / wrong
    return q * ratio[:, :, None, None].to(q.dtype)


_NOTHING_SPECIAL = (
    "dbrx", "gemma", "granite", "llama", "mistral", "mixtral", "olmo", "phi3", "qwen2", "qwen2_moe", "stablelm",
    "starcoder2",
)  # fmt: skip
"""Names for ``apply(model, architecture=...)``. A model type needs no row to be patched."""

_rows = {
    row.model_type: row
    for row in (
        *map(Architecture, _NOTHING_SPECIAL),
        Architecture("falcon", refuse=_alibi),
        Architecture("gpt_bigcode", adjust=_bigcode_scale),
        Architecture("gemma2", adjust=_gemma2),
        Architecture("gpt_neo", adjust=_gpt_neo_window),
        Architecture("llama4_text", queries=_temperature),
        Architecture("paligemma", refuse=_prefix),
        Architecture("phi", adjust=_phi_scale),
    )
}


def architectures() -> tuple[Architecture, ...]:
    """The registry's rows, by model type."""
    return tuple(_rows[name] for name in sorted(_rows))


def register(architecture: Architecture) -> None:
    """Add a row, for example for remote code, or replace the one of the same ``model_type``.

    The model's attention layers must offer one of the seams: they look their function up in a module-level
    ``ALL_ATTENTION_FUNCTIONS``, or the modeling file has a ``...FlashAttention2`` class beside the plain one.

    Raises:
        BadArchitecture: it is no :class:`Architecture`.
    """
    if not isinstance(architecture, Architecture):
        raise BadArchitecture(f"register: expected an Architecture, found {type(architecture).__name__}.")
    _rows[architecture.model_type] = architecture


def lookup(model_type: str) -> Architecture:
    """The row of a model type that somebody has named.

    Raises:
        UnknownArchitecture: there is none.
    """
    try:
        return _rows[model_type]
    except (KeyError, TypeError):  # TypeError: not even hashable
        raise UnknownArchitecture(
            f"no architecture {model_type!r} in the registry, which has {', '.join(sorted(_rows))}. Leave the argument "
            f"out to have the model looked at, or fa2patch.register(fa2patch.Architecture({model_type!r}, ...))."
        ) from None


def row_of(config: Any) -> Architecture:
    """The row for a model's config; one that says nothing special where its model type has none."""
    model_type = str(getattr(config, "model_type", ""))
    return _rows.get(model_type) or Architecture(model_type)


def is_registered(config: Any) -> bool:
    """Whether somebody vouches for a config's model type with a row."""
    return getattr(config, "model_type", None) in _rows
