"""PEFT adapters that work on a whole row: packed batches are refused.

Prompt learning puts virtual tokens in front of a row, where each document would need its own. It also drops
``position_ids``, so the model inside cannot see that the batch is packed. So ``forward`` of PEFT's classes is checked.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from .._torch import compiling
from .._types import Args, Call, Function
from ..binding import ABSENT, bind
from ..documents.find import find_boundaries
from ..documents.names import LENGTHS
from ..errors import PackingNotIsolated
from ..upstream import inspecting, other_code
from ..upstream.find_models import is_transformers_model
from ..upstream.step import MARK, Patched

MODULE = "peft.peft_model"


def check_calls(module: ModuleType, patch: Patched) -> None:
    base = getattr(module, "PeftModel", None)
    if base is None:
        return  # a stub of PEFT, or a failed import
    # An object may hold a `forward` from before the patch: PEFT leaves one there after disable_adapter, and mixed
    # precision wraps it. `__call__` checks calls of such objects.
    bind(base, "__call__", functools.partial(_called, base), patch)
    for cls in list(vars(module).values()):
        if isinstance(cls, type) and issubclass(cls, base) and cls.__module__ == MODULE:
            for name in {"forward", "generate"} & {*vars(cls)}:
                bind(cls, name, functools.partial(_looked_at, base), patch)


def _called(base: type[torch.nn.Module], original: Any) -> Function:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "forward" in self.__dict__:
            _refuse_packed(self, base, type(self).forward, args, kwargs)
        if original is ABSENT:
            return super(base, self).__call__(*args, **kwargs)
        return original(self, *args, **kwargs)

    return __call__


def _looked_at(base: type[torch.nn.Module], original: Function) -> Function:
    @functools.wraps(original)
    def looked_at(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_packed(self, base, original, args, kwargs)
        if compiling():
            return original(self, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        except TypeError as error:
            inner = self.get_base_model()
            if MARK in inner.__dict__:
                other_code.explain_rejected(inner, kwargs, error)
            raise

    return looked_at


def _refuse_packed(model: Any, base: type[torch.nn.Module], function: Function, args: Args, kwargs: Call) -> None:
    reads_rows = _reads_rows(model, base)
    if not reads_rows or not any(MARK in module.__dict__ for module in model.base_model.modules()):
        return
    found = _packed(_named(function, args, kwargs))
    if found:
        raise PackingNotIsolated(
            f"{type(model).__name__} was given a packed batch ({found}), but {reads_rows}. Train it on padded batches, "
            "with one document in each row, or use an adapter that computes every token by itself, such as LoRA."
        )


def _reads_rows(model: Any, base: type[torch.nn.Module]) -> str:
    # The active adapter does something with a whole row. The result is a text for an error, empty if it does not.
    config = model.peft_config.get(model.active_adapter)
    if getattr(config, "is_prompt_learning", False):
        disabled = model.__dict__.get("forward") == model.base_model.forward
        if disabled or type(model).forward is base.forward:  # PeftModel's own forward only calls the model inside
            return ""
        return (
            f"{config.peft_type.value} puts {config.num_virtual_tokens} virtual tokens in front of the row, not of "
            "each document, and drops position_ids: documents would attend to each other"
        )
    if getattr(model, "_adapters_disabled", False):
        return ""
    if getattr(config, "alora_invocation_tokens", None):
        return (
            "an activated LoRA (alora_invocation_tokens) begins at the last invocation in the row: documents before "
            "that one would be computed without it"
        )
    for name, child in model.base_model._modules.items():
        if name != "model" and any(is_transformers_model(module) for module in child.modules()):
            return (
                f"{config.peft_type.value} runs a model of its own over the row ({name}), which is not patched: "
                "documents would attend to each other there"
            )
    return ""


def _named(function: Function, args: Args, kwargs: Call) -> dict[str, Any]:
    parameters = inspecting.parameters(function)[1:]
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] or ["input_ids"]
    call = {**dict(zip(names, args)), **kwargs}
    return call if call.get("input_ids") is not None else {**call, "input_ids": call.get("inputs")}


def _packed(call: Call) -> str:
    stated = [name for name in LENGTHS if name != "seq_idx" and call.get(name) is not None]
    if stated:
        return f"{stated[0]} was given"
    tokens = call["input_ids"] if call["input_ids"] is not None else call.get("inputs_embeds")
    if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
        return ""
    shape = (tokens.shape[0], tokens.shape[1])
    ids, idx, mask = call.get("position_ids"), call.get("seq_idx"), call.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or tuple(mask.shape) != shape:
        mask = None
    if ids is None and idx is None and (mask is None or mask.dtype == torch.bool):
        return ""
    found = find_boundaries(shape, tokens.device, position_ids=ids, attention_mask=mask, seq_idx=idx)
    return f"{len(found)} documents in {shape[0]} row{'s' * (shape[0] > 1)}" if found is not None else ""
