"""Modules whose ``forward`` has no readable code. They are refused."""

from __future__ import annotations

from ...errors import LayerNotPatchable
from .. import inspecting
from ..looked import Looked
from .trait import Trait


class Unreadable(Trait):
    """Refuse a class whose ``forward`` is not a function (a ``partialmethod``, a callable object)."""

    name = "unreadable"

    def finds(self, model: Looked) -> str | None:
        for cls in dict.fromkeys(type(module) for module in model.entered[0].modules()):
            forward = inspecting.forward_of(cls)
            if not inspecting.is_of_torch(cls) and inspecting.code_of(forward) is None:
                return f"{cls.__module__}.{cls.__qualname__}.forward is a {type(forward).__name__}"
        return None

    def refuses(self, model: Looked, found: str) -> None:
        raise LayerNotPatchable(
            f"looked at every module's forward for what it takes and does: expected functions, found that {found}. "
            "Nothing was patched. Write it as a method (def forward(self, ...): ...), or train this model padded."
        )
