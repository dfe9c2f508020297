"""Trying something out in the middle of somebody's forward: out of its reach, and which errors say nothing of it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import torch

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "_STATUS_ALLOC_FAILED")
"""In the words of CUDA, ROCm, MPS and XPU, of torch's allocator on a CPU, and of cuBLAS and its relatives. (Triton's
"out of resource: shared memory" is about a kernel's own size: that one stays so.)"""

_OUT_OF_MEMORY = tuple(
    kind for kind in (getattr(home, "OutOfMemoryError", None) for home in (torch, torch.cuda)) if isinstance(kind, type)
)


def says_nothing(error: BaseException) -> bool:
    """Whether an error is no verdict about what was tried: there was no memory just then, or it was interrupted.

    Such an error is for the caller, who can free some memory and try again; nothing may be remembered of it. One that
    was raised because of such an error counts as it does.
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
    """With gradients, and out of reach of the forward that is under way.

    Its inference mode, its checkpoint's saved tensors and its random numbers see nothing of what is tried.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        yield
