"""Which kernel computes which layer of a patched model, and why."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any, Callable, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from .._compile import compiling, constant
from ..errors import BadArgument, KernelUnavailable, KernelWrong, UnknownKernel
from .efficient import Efficient
from .flash_attn import FlashAttn
from .flash_attn_3 import FlashAttn3
from .flash_attn_4 import FlashAttn4
from .flex import Flex
from .hub import Hub
from .protocol import Asked, Kernel
from .reference import Reference
from .torch_varlen import TorchVarlen
from .trial import passes

ORDER: tuple[Kernel, ...] = (
    FlashAttn3(), FlashAttn(), FlashAttn4(), TorchVarlen(), Efficient(), Flex(), Reference(),
)  # fmt: skip
"""What ``auto`` tries, best first. The last one takes everything."""

BY_NAME_ONLY: tuple[Kernel, ...] = (Hub(),)

NAMES = ("auto", *(kernel.name for kernel in (*ORDER, *BY_NAME_ONLY)))


_registered: list[tuple[Kernel, str | None]] = []


def order() -> tuple[Kernel, ...]:
    """What ``auto`` tries, best first: :data:`ORDER`, with registered kernels where they were put."""
    kernels = list(ORDER)
    for kernel, before in _registered:
        if before is not None:
            at = [i for i, other in enumerate(kernels) if other.name == before]
            kernels.insert(at[0] if at else len(kernels) - 1, kernel)  # it may have been registered anew, elsewhere
    return tuple(kernels)


def every_kernel() -> tuple[Kernel, ...]:
    """Every kernel that has a name: those that ``auto`` tries, then those that are used by name only."""
    return (*order(), *BY_NAME_ONLY, *(kernel for kernel, before in _registered if before is None))


def register_kernel(kernel: Kernel, *, before: str | None = None) -> None:
    """Add a kernel, so that ``apply(model, kernel=kernel.name)`` finds it.

    Like every kernel, it is tried against the reference before its first use and is not used where it is wrong. A
    kernel of the same name that was registered before is replaced.

    Args:
        kernel: an instance of a subclass of :class:`~fa2patch.kernels.Kernel`.
        before: the name of the kernel in front of which ``kernel="auto"`` tries this one. None leaves it out of
            ``auto``.

    Raises:
        BadArgument: it is no kernel, or fa2patch has a kernel of that name.
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


class Pick(NamedTuple):
    """A kernel, and why those before it in :data:`ORDER` were passed over (empty where it is the first, or named)."""

    kernel: Kernel
    why: str


class Portions(NamedTuple):
    """In what portions a mixer is given a packed row; the kernels that compute it are its own."""

    name: str


WHOLE_ROW, DOCUMENTS = Portions("its own, the whole row"), Portions("its own, document by document")


class Mixed(NamedTuple):
    """How a mixer was computed, as :class:`Pick` tells it of attention."""

    kernel: Portions
    why: str


def named(name: str) -> Kernel:
    """The kernel of this name, ``"hub:..."`` included.

    Raises:
        UnknownKernel: there is none.
    """
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
    """One kernel for each source: what a trial found is remembered by the kernel."""
    return Hub(source)


def check_name(name: str | Kernel) -> None:
    """Raise :class:`UnknownKernel` for a name that no kernel has, :class:`KernelUnavailable` if it cannot run here."""
    if isinstance(name, str) and name == "auto":
        return
    kernel = name if isinstance(name, Kernel) else named(name)
    able, reason = kernel.available()
    if not able:
        raise KernelUnavailable(f"kernel={kernel.name!r} cannot run here: {reason}. Use kernel='auto'.")


def pick(name: str | Kernel, asked: Asked, device: torch.device, try_it: bool = True) -> Pick:
    """The kernel called ``name``, or for ``"auto"`` the first that is available, supports this and passes its trial.

    Args:
        name: ``"auto"``, the name of a kernel, or a kernel.
        asked: what a layer asks for.
        device: where it will be computed.
        try_it: whether the kernel must pass its trial.

    Raises:
        UnknownKernel: no kernel has this name.
        KernelUnavailable: the named kernel does not support this.
        KernelWrong: it fails its trial.
    """
    passed: list[str] = []
    for kernel in order() if isinstance(name, str) and name == "auto" else (_one(name),):
        kind = KernelUnavailable
        able, reason = kernel.available()
        if able:
            able, reason = kernel.supports(asked)
        if able and try_it:
            kind = KernelWrong
            able, reason = passes(kernel, asked, device)
        if able:
            return Pick(kernel, "; ".join(passed))
        passed.append(f"{kernel.name}: {reason}")
    shown = name if isinstance(name, str) else name.name
    raise kind(f"kernel={shown!r} cannot compute this layer: {reason}. Use kernel='auto'.")


def _one(name: str | Kernel) -> Kernel:
    return name if isinstance(name, Kernel) else named(name)


_given: WeakValueDictionary[int, Kernel] = WeakValueDictionary()
"""Kernels that were handed to ``apply``, by a number that a compiled graph can hold."""


@constant
def _picked(name: str | int, device: str, index: int | None, *asked: Any) -> str:
    """For a graph that is being captured: the choice is made outside of it, once, and is a constant inside."""
    kernel = _given[name] if isinstance(name, int) else name
    return pick(kernel, Asked(*asked), torch.device(device if index is None else f"{device}:{index}")).kernel.name


class Picks:
    """A patched model's choices, made once for every kind of call; what ``Patch.layers`` tells of them.

    Attributes:
        name: the name of the kernel asked for.
        given: the kernel itself, where ``apply`` was given one.
    """

    def __init__(self, kernel: str | Kernel) -> None:
        self.given = kernel if isinstance(kernel, Kernel) else None
        self.name = kernel.name if isinstance(kernel, Kernel) else kernel
        if self.given is not None:
            _given[id(self.given)] = self.given
        self._made: dict[tuple[Asked, torch.device], Pick] = {}
        self._whole_rows: WeakKeyDictionary[Any, dict[Any, Mixed]] = WeakKeyDictionary()
        self._of: WeakKeyDictionary[Any, Pick | Mixed] = WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return Picks, (self.given or self.name,)

    def of(self, module: Any) -> Pick | Mixed | None:
        """What the layer's last packed batch was computed with; None where it has seen none (or was compiled)."""
        return self._of.get(module)

    def takes_documents(self, module: Any) -> None:
        """Note a mixer that cannot be tried with a whole row: it takes no boundaries, or has no kernels that could."""
        self._of[module] = Mixed(DOCUMENTS, "")

    def takes_whole_rows(self, module: Any, kind: Any, trial: Callable[[], tuple[bool, str]]) -> bool:
        """Whether a mixer keeps a row's documents apart by itself, in calls of this kind; tried once.

        Each mixer is tried on its own: two of one class may have other parameters, and so call other kernels.
        An error in the trial is raised, and nothing is remembered.
        """
        known = self._whole_rows.setdefault(module, {})
        if kind not in known:
            able, why = trial()
            known[kind] = Mixed(WHOLE_ROW if able else DOCUMENTS, why)
        self._of[module] = known[kind]
        return known[kind].kernel is WHOLE_ROW

    def __call__(self, module: Any, asked: Asked, device: torch.device) -> Kernel:
        """The kernel for a layer (None where it is not known)."""
        if compiling():
            if self.given is not None:
                _picked(id(self.given), device.type, device.index, *asked)
                return self.given
            return named(_picked(self.name, device.type, device.index, *asked))
        kind = (asked, device)
        if kind not in self._made:
            self._made[kind] = pick(self.given or self.name, asked, device)
            self._warn_if_slow(self._made[kind], device)
        made = self._made[kind]
        if module is not None and self._of.get(module) is not made:
            self._of[module] = made
        return made.kernel

    def _warn_if_slow(self, made: Pick, device: torch.device) -> None:
        if self.name == "auto" and device.type == "cuda" and isinstance(made.kernel, Reference):
            warnings.warn(
                f"fa2patch computes a layer with the reference kernel, which is right and slow on a GPU ({made.why}). "
                "See fa2patch.status(model).layers.",
                stacklevel=2,
            )
