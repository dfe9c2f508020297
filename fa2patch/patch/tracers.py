"""``torch.fx.symbolic_trace`` of a patched model is refused: it would fail at our forwards with an error of its own."""

from __future__ import annotations

import functools
from typing import Any

import torch.fx

from .._types import Function
from ..binding import bind
from ..upstream.calls import refuse_recording
from ..upstream.step import MARK, Patched


def watch(patch: Patched) -> None:
    """Look at what torch.fx traces, until the patch is released."""
    bind(torch.fx.Tracer, "trace", _looked_at, patch)


def _looked_at(original: Function) -> Function:
    @functools.wraps(original)
    def trace(self: Any, root: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(root, torch.nn.Module) and any(MARK in vars(module) for module in root.modules()):
            refuse_recording("torch.fx")
        return original(self, root, *args, **kwargs)

    return trace
