"""Helpers for trying something out inside a running forward: isolation from it, and errors that are no result."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import torch

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "_STATUS_ALLOC_FAILED")
"""Messages of CUDA, ROCm, MPS and XPU, of torch's CPU allocator, and of cuBLAS and related libraries. Triton's "out of
resource: shared memory" is not among them: it depends on the kernel's size, so another try would fail as well."""

_OUT_OF_MEMORY = tuple(
    kind for kind in (getattr(home, "OutOfMemoryError", None) for home in (torch, torch.cuda)) if isinstance(kind, type)
)


def says_nothing(error: BaseException) -> bool:
    """Whether an error is no verdict about what was tried: memory ran out, or the run was interrupted.

    The caller must raise such an error again and must not remember it as a result, because another try may succeed.
    An error whose ``__cause__`` is such an error is treated the same way.
    """
    if not isinstance(error, Exception) or isinstance(error, (MemoryError, InterruptedError, *_OUT_OF_MEMORY)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
        return True
    return error.__cause__ is not None and says_nothing(error.__cause__)


@contextlib.contextmanager
def out_of_reach(device: torch.device) -> Iterator[None]:
    """Enable gradients and isolate the code inside from the forward that is running.

    The forward's inference mode and its checkpoint's saved-tensor hooks do not apply inside. Its random number
    generators (CPU, and CUDA if ``device`` is one) are restored afterwards.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        yield


@contextlib.contextmanager
def autocast_uncached() -> Iterator[None]:
    """Let a forward inside the caller's, which may run under autocast, cast weights for itself alone.

    Autocast keeps the casts of weights for all forwards in its context. One that was made here would have no gradient,
    and the caller's forward would use it.
    """
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)


@contextlib.contextmanager
def without_gradients() -> Iterator[None]:
    """``torch.no_grad`` with :func:`autocast_uncached`."""
    with autocast_uncached(), torch.no_grad():
        yield


def computed_in(states: torch.Tensor) -> torch.dtype:
    """The dtype of products with these states, which autocast may change. An empty product shows it."""
    return torch.nn.functional.linear(states.new_empty(0, 1), states.new_empty(1, 1)).dtype
