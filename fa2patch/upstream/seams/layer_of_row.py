"""Stand-ins for a layer, and for its rotary module, in the computation of one packed row."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

import torch

from .. import inspecting, rope, splitting
from ..packed_mask import PackedMask

ROTARY = frozenset(rope.MODULES)  # in layers up to 4.47; they are given the length of the row
SWITCH = "_use_sdpa"  # by it, Falcon's eager class chooses between its formula and sdpa (4.36 on)


def says_who_sees(buffer: torch.Tensor | None) -> bool:
    # ``[1, 1, queries, keys]`` (GPT-NeoX from 4.36 to 4.46)
    return buffer is not None and buffer.dtype == torch.bool and buffer.dim() == 4


class LayerOfRow:
    """Stands in for a layer in one packed call, if it has a rotary module, a buffer or a method with the formula."""

    def __init__(self, module: Any, mask: PackedMask, helpers: Mapping[str, Any]) -> None:
        self.layer = module
        known = vars(self)
        # found without __getattr__, which is called for every other name
        known.update({**vars(module), **module._parameters, **module._modules})
        for name, value in module._buffers.items():
            known[name] = mask if says_who_sees(value) else value
        for name in rope.MODULES:
            if name in known:
                known[name] = RotaryOfRow(known[name], mask)
        if SWITCH in known:
            known[SWITCH] = True
        for name, helper in helpers.items():
            known[name] = types.MethodType(helper, self) if callable(helper) else helper

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.layer, name)
        # a helper must see this object as self too
        return types.MethodType(value.__func__, self) if inspect.ismethod(value) else value


class RotaryOfRow:
    """Stands in for a layer's rotary module during one packed call, and corrects the length that it is given."""

    def __init__(self, module: Any, mask: PackedMask) -> None:
        self._module, self._mask = module, mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mask = self._mask
        names = inspecting.parameter_names(self._module.forward)
        if names[:2] == ["query", "key"]:
            return self._of_old_falcon(x, *args, **kwargs)
        call = dict(zip(names[1:], args), **kwargs)
        scaled = mask.facts.rope
        if scaled is not None and scaled.kind == "longrope":
            position_ids = call.pop("position_ids")
            return splitting.rotary_of_each(self._module, x, position_ids, mask.boundaries, call)
        if call.get("seq_len") is not None:
            call["seq_len"] = mask.positions if scaled is not None else max(mask.positions, call["seq_len"])
        return self._module(x, **call)

    def _of_old_falcon(self, query: Any, key: Any, past_length: int, position_ids: Any) -> Any:
        # In 4.34 and 4.35, Falcon's module sizes and scales its table by the row's plus the cache's length.
        beyond = self._mask.positions - query.shape[1]
        return self._module(query, key, beyond if self._mask.facts.rope is not None else max(0, beyond), position_ids)
