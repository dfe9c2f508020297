"""Transformers alone on a packed batch: with the cache that a forward makes by default, and without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Union

from .._types import Call, Model
from ..errors import Fa2PatchError
from ..upstream import inspecting
from ..upstream.find_models import transformers_model
from .result import Verification
from .verify import verify

Found = Union[Verification, str]
"""A verification, or the error that kept it from being made, as text."""

_WHY = (
    "Loaded as {}, this model looks for documents in position_ids only if the forward makes no cache. It makes one "
    "unless it is called with use_cache=False, because config.use_cache is True."
)
"""Why a model isolates documents without a cache only, with its attention implementation."""


@dataclass(frozen=True)
class Alone:
    """What an unpatched model does with a packed batch.

    Attributes:
        by_default: The finding for the batch as it is. If it has no ``use_cache``, the config decides.
        without_cache: The finding with ``use_cache=False``; None if that is how the batch is computed anyway.
        why: Why the two differ; empty if they do not.
    """

    by_default: Found
    without_cache: Found | None
    why: str


def alone(model: Model, batch: Call, max_documents: int | None = None) -> Alone:
    """Verify an unpatched model on a packed batch, both with its default cache and without one.

    Args:
        model: An unpatched Transformers model, or a wrapper around one.
        batch: As for :func:`~fa2patch.verify`. With ``use_cache`` in it, only that way is taken.
        max_documents: As for :func:`~fa2patch.verify`.
    """
    inner = transformers_model(model)
    by_default = tried(model, batch, max_documents)
    if "use_cache" in batch or not _makes_a_cache(inner):
        return Alone(by_default, None, "")
    without = tried(model, {**batch, "use_cache": False}, max_documents)
    differ = is_isolated(without) and not is_isolated(by_default)
    implementation = getattr(inner.config, "_attn_implementation", None) or "it is"
    return Alone(by_default, without, _WHY.format(implementation) if differ else "")


def tried(model: Model, batch: Call, max_documents: int | None = None) -> Found:
    """The verification of a model on a batch, or the error that it raises, as text."""
    try:
        return verify(model, batch=batch, strict=False, max_documents=max_documents)
    except Fa2PatchError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def is_isolated(found: Found) -> bool:
    """Whether a finding is a verification that is ok."""
    return not isinstance(found, str) and found.ok


def _makes_a_cache(inner: Any) -> bool:
    config = inspecting.text_config(inner.config)
    return bool(getattr(config, "use_cache", False)) and inspecting.takes(type(inner).forward, "use_cache")
