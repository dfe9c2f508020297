"""Three words to torch.compile, without importing its compiler (a second of import time)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Callable, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Run ``function`` eagerly also inside a compiled model: what it reads on the host must not become a constant.

    Sets the mark that ``torch.compiler.disable`` sets (torch/_dynamo/eval_frame.py).
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def constant(function: F) -> F:
    """Call ``function`` while a graph is being captured, not in it; what it returns for these arguments is a constant.

    Sets the mark that ``torch._dynamo.assume_constant_result`` sets (torch/_dynamo/decorators.py).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_paused = False


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """While a function that is called, and not captured, during a capture runs models for itself.

    ``torch.compiler.is_compiling`` says that there is a capture, which is not of what runs here.
    """
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def compiling() -> bool:
    """Whether this runs inside a graph being captured."""
    return not _paused and bool(torch.compiler.is_compiling()) if hasattr(torch.compiler, "is_compiling") else False
