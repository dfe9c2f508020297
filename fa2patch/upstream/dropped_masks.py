"""Hooks that drop each layer's mask, which a packed one must pass.

accelerate puts such hooks on every attention layer of a model under context parallelism, because torch's ring takes no
mask. They stay as they are for dense batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from .._types import Args, Call
from .packed_mask import mask_among


def keep(layers: Iterable[torch.nn.Module]) -> bool:
    # Whether there were any: each hook is wrapped once, also one that came later.
    found = False
    for module in layers:
        for number in module._forward_pre_hooks_with_kwargs:
            hook = module._forward_pre_hooks[number]
            if not isinstance(hook, MaskKept):
                module._forward_pre_hooks[number] = MaskKept(hook)
                found = True
    return found


def remove(module: torch.nn.Module) -> None:
    for number, hook in module._forward_pre_hooks.items():
        if isinstance(hook, MaskKept):
            module._forward_pre_hooks[number] = hook.hook


class MaskKept:
    """A hook that is not heard where it drops a packed mask."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, module: torch.nn.Module, args: Args, kwargs: Call) -> Any:
        mask = mask_among(chain(args, kwargs.values()))
        if mask is None:
            return self.hook(module, args, kwargs)
        given = dict(kwargs)
        found = self.hook(module, args, given)
        new_args, new = (args, given) if found is None else found
        return (new_args, new) if mask_among(chain(new_args, new.values())) is mask else None
