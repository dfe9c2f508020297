"""The kernels by name, the order in which ``kernel="auto"`` tries them, and the table of all of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..errors import BadArgument, KernelUnavailable, UnknownKernel
from .efficient import Efficient
from .flash_attn import FlashAttn, FlashAttn3, FlashAttn4
from .flex import Flex
from .hub import Hub
from .protocol import FEATURES, Kernel, capability
from .reference import Reference
from .torch_varlen import TorchVarlen

ORDER: tuple[Kernel, ...] = (
    FlashAttn3(), FlashAttn(), FlashAttn4(), TorchVarlen(), Efficient(), Flex(), Reference(),
)  # fmt: skip
"""The built-in kernels that ``auto`` tries, best first. Those made for the device come first. The last one supports
everything."""

BY_NAME_ONLY: tuple[Kernel, ...] = (Hub(),)
"""The built-in kernels that ``auto`` does not try."""

NAMES = ("auto", *(kernel.name for kernel in (*ORDER, *BY_NAME_ONLY)))
"""The built-in values of ``apply(model, kernel=...)``."""

_registered: list[tuple[Kernel, str | None]] = []


def order() -> tuple[Kernel, ...]:
    """The kernels that ``auto`` tries on the current device, best first.

    They are :data:`ORDER`, with the kernels made for the device in front, and those registered with ``before``.
    """
    here = capability()
    kernels = sorted(ORDER, key=lambda kernel: here is None or here[0] not in kernel.MADE_FOR)
    for kernel, before in _registered:
        if before is not None:
            at = [i for i, other in enumerate(kernels) if other.name == before]
            kernels.insert(at[0] if at else len(kernels) - 1, kernel)  # `before` may have left auto since
    return tuple(kernels)


def every_kernel() -> tuple[Kernel, ...]:
    """All kernels: the ones that ``auto`` tries, then the ones that are used by name only."""
    return (*order(), *BY_NAME_ONLY, *(kernel for kernel, before in _registered if before is None))


def register_kernel(kernel: Kernel, *, before: str | None = None) -> None:
    """Add a kernel, so that ``apply(model, kernel=kernel.name)`` finds it.

    Like every kernel, it is compared with the reference before its first use and is not used if it is wrong. It
    replaces a registered kernel of the same name.

    Args:
        kernel: an instance of a subclass of :class:`~fa2patch.kernels.Kernel`.
        before: ``kernel="auto"`` tries the new kernel before the kernel of this name. None leaves it out of ``auto``.

    Raises:
        BadArgument: ``kernel`` is not a :class:`Kernel` with a name, or its name is one of fa2patch's own.
        UnknownKernel: ``auto`` does not try a kernel called ``before``.
    """
    if not isinstance(kernel, Kernel) or not isinstance(getattr(kernel, "name", None), str):
        raise BadArgument(f"register_kernel: expected an instance of a Kernel with a name, found {kernel!r}.")
    if kernel.name in NAMES or kernel.name.startswith("hub:"):
        raise BadArgument(f"register_kernel: fa2patch has a kernel {kernel.name!r}. Choose another name.")
    others = [(other, place) for other, place in _registered if other.name != kernel.name]
    tried = [*(other.name for other in ORDER), *(other.name for other, place in others if place is not None)]
    if before is not None and before not in tried:
        raise UnknownKernel(f"before={before!r}: expected one that auto tries, {', '.join(map(repr, tried))}, or None.")
    _registered[:] = [*others, (kernel, before)]


def named(name: str | Kernel) -> Kernel:
    """Return the kernel of this name, which may be ``"hub:..."`` but not ``"auto"``. A kernel is returned as it is.

    Raises:
        UnknownKernel: no kernel has this name.
    """
    if isinstance(name, Kernel):
        return name
    if isinstance(name, str) and name.startswith("hub:") and name != "hub:":
        return _of_hub(name[len("hub:") :])
    kernels = every_kernel()
    for kernel in kernels:
        if kernel.name == name:
            return kernel
    names = ", ".join(repr(kernel.name) for kernel in kernels)
    raise UnknownKernel(f"kernel={name!r}: expected one of 'auto', {names}, or 'hub:org/name'.")


@lru_cache(maxsize=8)
def _of_hub(source: str) -> Kernel:
    """Return the same kernel object for a source each time, because results of trials are cached by kernel."""
    return Hub(source)


def check_name(name: str | Kernel) -> None:
    """Check that a kernel exists and can run on this machine.

    Args:
        name: ``"auto"``, the name of a kernel, or a kernel.

    Raises:
        UnknownKernel: no kernel has this name.
        KernelUnavailable: the kernel cannot run on this machine.
    """
    if name == "auto":
        return
    kernel = named(name)
    able, reason = kernel.available()
    if not able:
        raise KernelUnavailable(f"kernel={kernel.name!r} cannot run here: {reason}. Use kernel='auto'.")


def rows() -> list[dict[str, Any]]:
    """Describe every kernel as a dict of JSON values, in the order in which ``auto`` tries them.

    Kernels that are used by name only come last.

    Returns:
        For each kernel ``name``, ``what``, ``needs``, ``usable`` (whether ``auto`` can use it on this machine),
        ``reason`` (why not), ``devices``, ``dtypes``, ``head_dim`` (the largest, or None), ``features`` (of the best
        build) and ``here`` (features of the installed build).
    """
    return [_row(kernel) for kernel in every_kernel()]


def _row(kernel: Kernel) -> dict[str, Any]:
    able, reason = (False, "asked for by name only") if kernel not in order() else kernel.available()
    return {
        "name": kernel.name,
        "what": kernel.what,
        "needs": kernel.needs,
        "usable": able,
        "reason": reason,
        "devices": list(kernel.DEVICES) if kernel.DEVICES is not None else None,
        "dtypes": [str(x).replace("torch.", "") for x in kernel.DTYPES] if kernel.DTYPES is not None else None,
        "head_dim": kernel.MAX_HEAD_DIM,
        "features": [name for name in FEATURES if name in kernel.FEATURES],
        "here": [name for name in FEATURES if able and name in kernel.features()],
    }
