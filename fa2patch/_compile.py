"""Marks and queries for torch.compile that do not import its compiler, which takes a second."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Callable, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Run ``function`` eagerly also inside a compiled model.

    Values that the function reads on the host must not become constants of the graph. This sets the mark that
    ``torch.compiler.disable`` sets (torch/_dynamo/eval_frame.py).
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def constant(function: F) -> F:
    """Call ``function`` while a graph is captured; its return value becomes a constant of the graph.

    This sets the mark that ``torch._dynamo.assume_constant_result`` sets (torch/_dynamo/decorators.py).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_paused = False
_CAN_TELL = hasattr(torch.compiler, "is_compiling")


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Make :func:`compiling` return False inside the block.

    A function that is called during a capture, but not captured, uses this to run models eagerly:
    ``torch.compiler.is_compiling`` is True there although these models are not captured.
    """
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def compiling() -> bool:
    """Whether the calling code is being captured into a graph. Torch before 2.3 does not say so."""
    return _CAN_TELL and not _paused and bool(torch.compiler.is_compiling())


def unbacked_size(least: int) -> Any:
    """A size that depends on values, for the fake implementation of an operator.

    ``get_ctx().new_dynamic_size`` gives one only with ``fullgraph=True``, or if the user has set
    ``torch._dynamo.config.capture_dynamic_output_shape_ops``. Otherwise the graph would break at the operator, although
    the operator is ours and nothing behind it needs the number.

    Args:
        least: a lower bound that is known.
    """
    context = torch.library.get_ctx()
    allocate = getattr(getattr(torch._library, "fake_impl", None), "allocate_size", None)
    shapes = getattr(context, "_shape_env", None)
    if allocate is None or shapes is None:
        return context.new_dynamic_size(min=least)
    return allocate(shapes, least)
