"""Transformers models that are not patched, around one that is.

``apply(model.model)`` patches a trunk without its head, and two heads may share a trunk of which one is patched.
Nothing of fa2patch runs in the other head, which shifts labels across documents or pools whole rows. It is seen from
inside, on the stack of the trunk's call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._types import Call
from ..documents.names import LABELS, LOSS_LABELS
from ..errors import PackingNotIsolated
from . import inspecting
from .calls import passed
from .find_models import is_transformers_model
from .step import MARK, Patched
from .traits import first_labels, row_heads


def require_patched(patch: Patched) -> None:
    """Raise :class:`PackingNotIsolated` if an unpatched model around this one may mix documents of a packed batch.

    A causal LM without labels does not: its head computes every token by itself.

    Args:
        patch: the patch of the model that has found a batch packed.
    """
    for model, given in _models_called(patch):
        labels = next(iter(passed(given, (*LABELS, LOSS_LABELS))), None)
        if labels is None and _looks_at_tokens_alone(model):
            continue
        harm = f"computes a loss from {labels}, in which documents predict each other" if labels else "has a head"
        raise PackingNotIsolated(
            f"this {type(patch.model).__name__} is patched and found a batch packed, but {type(model).__name__}, "
            f"around it, is not patched and {harm}. Patch the model that is called: fa2patch.apply(model) with that "
            f"{type(model).__name__}."
        )


def _looks_at_tokens_alone(model: Any) -> bool:
    return first_labels.predicts_the_next(model, False) and not row_heads.of_whole_rows(model)


def _models_called(patch: Patched) -> Iterator[tuple[Any, Call]]:
    """The models without this patch that are running, the innermost first, each with the arguments of its call."""
    for module, code, variables in inspecting.modules_called():
        if is_transformers_model(module):
            model = module._modules.get("_orig_mod", module)  # torch.compile(model) is of the model's class, too
            if vars(model).get(MARK) is not patch:
                yield model, inspecting.with_keywords(code, variables)
