"""Kernels compute variable-length attention: one small class in one file each; here, their protocol and the choice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from ..errors import KernelUnavailable, UnknownKernel
from .flash_attn import FlashAttn
from .reference import Reference

if TYPE_CHECKING:
    from ..attention import Options
    from ..boundaries import Boundaries


class Kernel(Protocol):
    """Variable-length attention over documents laid end to end."""

    name: str

    def available(self) -> tuple[bool, str]:
        """Whether it can run on this machine, and the reason where not."""

    def supports(self, q: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[bool, str]:
        """Whether it can compute this, and the reason where not."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options
    ) -> torch.Tensor:
        """q ``[tokens, query heads, head dim]``, k and v with theirs -> ``[tokens, query heads, value head dim]``."""


ORDER: tuple[Kernel, ...] = (FlashAttn(), Reference())
"""What ``auto`` tries, best first. The last one takes everything."""

NAMES = ("auto", *(kernel.name for kernel in ORDER))


def check_name(name: str) -> None:
    """Raise :class:`UnknownKernel` for a name that is none, :class:`KernelUnavailable` for one that can't run here."""
    if name not in NAMES:
        raise UnknownKernel(f"kernel={name!r}: expected one of {', '.join(map(repr, NAMES))}.")
    for kernel in ORDER:
        if kernel.name == name:
            able, reason = kernel.available()
            if not able:
                raise KernelUnavailable(f"kernel={name!r} cannot run here: {reason}. Use kernel='auto'.")


def choose(name: str, q: torch.Tensor, v: torch.Tensor, options: Options) -> Kernel:
    """The kernel called ``name``, or for ``"auto"`` the first that is available and supports this call.

    Raises:
        UnknownKernel: no kernel is called so.
        KernelUnavailable: the named kernel does not support this call.
    """
    for kernel in ORDER:
        if name == kernel.name:
            able, reason = kernel.supports(q, v, options)
            if not able:
                raise KernelUnavailable(f"kernel={name!r} cannot compute this layer: {reason}. Use kernel='auto'.")
            return kernel
        if name == "auto" and kernel.available()[0] and kernel.supports(q, v, options)[0]:
            return kernel
    raise UnknownKernel(f"kernel={name!r}: expected one of {', '.join(map(repr, NAMES))}.")
