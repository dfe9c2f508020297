"""The Transformers model inside the objects that training puts around it."""

from __future__ import annotations

from typing import Any

import torch

from .._types import Model
from ..errors import NotAModel
from ..upstream.find_models import is_transformers_model, outermost_models

_NAMES = ("_orig_mod", "module", "pretrained_model", "model")
"""Attributes in which wrappers hold the model inside."""


def transformers_model(model: object) -> Model:
    """Find the Transformers model inside the objects that training puts around it.

    Args:
        model: a Transformers model, a wrapper of PEFT, accelerate, DDP, FSDP, DeepSpeed or ``torch.compile`` around
            one, or an object that holds one, such as a model of sentence-transformers.

    Raises:
        NotAModel: there is no Transformers model in ``model``, or there are several next to each other.
    """
    found: Model = _path(model)[-1]
    return found


def makes_its_batches(model: object) -> bool:
    """Whether an object around a Transformers model turns text into batches itself, which are padded.

    Such an object holds the tokenizer: the models of sentence-transformers, pipelines.
    """
    return any(getattr(around, "tokenizer", None) is not None for around in _path(model)[:-1])


def _path(model: object) -> list[Any]:
    """The objects from ``model`` to the Transformers model inside."""
    path: list[Any] = [model]
    while not is_transformers_model(path[-1]):
        inside = _inside(path[-1])
        if inside is None or len(path) > 16:
            raise NotAModel(
                f"expected a Transformers model, or a wrapper (PEFT, accelerate, DDP, FSDP, torch.compile) around one; "
                f"found {type(model).__name__}{_not_of_torch(path[-1])}. Hand over the model object itself."
            )
        path.append(inside)
    return path


def _inside(seen: Any) -> torch.nn.Module | None:
    """The module that an object wraps, or the only Transformers model that it holds; None if there is neither."""
    wrapped = [getattr(seen, name, None) for name in _NAMES]
    if hasattr(seen, "get_base_model"):  # PEFT
        wrapped.insert(0, seen.get_base_model())
    found = next((inner for inner in wrapped if isinstance(inner, torch.nn.Module)), None)
    if found is not None or not isinstance(seen, torch.nn.Module):
        return found
    held = outermost_models(seen)
    if len(held) > 1:
        names = ", ".join(f"{name} ({type(inner).__name__})" for name, inner in held.items())
        raise NotAModel(
            f"expected one Transformers model, found {len(held)} in this {type(seen).__name__}: {names}. Call "
            "fa2patch.apply for each of them, with padded_batches=True if their batches are padded."
        )
    return next(iter(held.values()), None)


def _not_of_torch(seen: object) -> str:
    """A model of another runtime (ONNX, OpenVINO) that an object holds, as a text for an error; empty if none."""
    holders = list(seen.modules()) if isinstance(seen, torch.nn.Module) else [seen]
    for value in (value for holder in holders for value in getattr(holder, "__dict__", {}).values()):
        if callable(value) and hasattr(value, "config") and not isinstance(value, (torch.nn.Module, type)):
            return f" around a {type(value).__name__}, which torch does not compute (choose the backend 'torch')"
    return ""
