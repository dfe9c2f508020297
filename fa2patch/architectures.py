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
        adjust: a quirk: given an attention layer (None on the function seam) and the options that it passes, the
            options that are right.
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


def _phi_scale(module: Any, options: Options) -> Options:
    """4.36's flash class scales by 1.0 where eager attention, and every version since, takes the default."""
    return replace(options, scale=None) if options.scale == 1.0 else options


_rows = {
    row.model_type: row
    for row in (
        Architecture("dbrx"),
        Architecture("falcon", refuse=_alibi),
        Architecture("gemma"),
        Architecture("granite"),
        Architecture("llama"),
        Architecture("mistral"),
        Architecture("mixtral"),
        Architecture("olmo"),
        Architecture("phi", adjust=_phi_scale),
        Architecture("phi3"),
        Architecture("qwen2"),
        Architecture("qwen2_moe"),
        Architecture("stablelm"),
        Architecture("starcoder2"),
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


def lookup(model_type: str | None) -> Architecture:
    """The row of a model type.

    Raises:
        UnknownArchitecture: there is none.
    """
    try:
        return _rows[model_type or ""]
    except KeyError:
        raise UnknownArchitecture(
            f"no architecture {model_type!r} in the registry, which has {', '.join(sorted(_rows))}. For remote code of "
            f"the same make: fa2patch.register(fa2patch.Architecture({model_type!r})); for a model of a known make: "
            "apply(model, architecture=...)."
        ) from None
