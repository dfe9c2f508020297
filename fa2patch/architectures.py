"""The registry: one row per architecture. A row says what cannot be found by looking at the modeling file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable

from .attention import Options
from .errors import UnknownArchitecture


@dataclass(frozen=True)
class Architecture:
    """A kind of model that ``apply`` takes.

    Attributes:
        model_type: ``config.model_type``.
        refuse: given a config, the reason why this model cannot be trained packed, or None.
        adjust: a quirk: given an attention layer and the options that it passes, the options that are right.
    """

    model_type: str
    refuse: Callable[[Any], str | None] | None = None
    adjust: Callable[[Any, Options], Options] | None = None


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


def _softcap(module: Any, options: Options) -> Options:
    """Up to 4.47 the flash class caps only where it finds flash-attn 2.6 or newer installed."""
    return replace(options, softcap=options.softcap or getattr(module.config, "attn_logit_softcapping", None))


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
        Architecture("gemma2", adjust=_softcap),
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
    """
    if not isinstance(architecture, Architecture):
        raise TypeError(f"register: expected an Architecture, found {type(architecture).__name__}.")
    _rows[architecture.model_type] = architecture


def lookup(model_type: str) -> Architecture:
    """The row of a model type that somebody has named.

    Raises:
        UnknownArchitecture: there is none.
    """
    try:
        return _rows[model_type]
    except KeyError:
        raise UnknownArchitecture(
            f"no architecture {model_type!r} in the registry, which has {', '.join(sorted(_rows))}. Leave the argument "
            f"out to have the model looked at, or fa2patch.register(fa2patch.Architecture({model_type!r}, ...))."
        ) from None


def row_of(config: Any) -> Architecture:
    """The row for a model's config; one that says nothing special where its model type has none."""
    model_type = str(getattr(config, "model_type", ""))
    return _rows.get(model_type) or Architecture(model_type)
