"""The choice of a kernel for each layer of a patched model, and its reason."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Hashable, Sequence
from typing import Any, Callable, NamedTuple
from weakref import WeakKeyDictionary

import torch

from .._torch import compiling, constant, number, numbered
from ..errors import KernelUnavailable, KernelWrong
from .flex import Flex
from .protocol import HALF, Asked, Kernel
from .reference import Reference
from .registry import named, order
from .trial import passes


class Pick(NamedTuple):
    """The kernel of a layer.

    Attributes:
        kernel: the kernel.
        why: why ``auto`` did not choose the kernels before it in :func:`order`; empty if there are none, or if the
            kernel was asked for by name.
    """

    kernel: Kernel
    why: str


class Portions(NamedTuple):
    """What a mixer, which uses kernels of its own, gets of a packed row in one call."""

    name: str


WHOLE_ROW = Portions("its own, the whole row")
BATCHES = Portions("its own, documents in batches")
DOCUMENTS = Portions("its own, document by document")


class Mixed(NamedTuple):
    """How a mixer was computed; the counterpart of :class:`Pick`.

    Attributes:
        kernel: :data:`WHOLE_ROW`, :data:`BATCHES` or :data:`DOCUMENTS`.
        why: why the trials of the ways before it failed; empty if they did not take place.
    """

    kernel: Portions
    why: str


def pick(name: str | Kernel, asked: Asked, device: torch.device, try_it: bool = True) -> Pick:
    """Choose the kernel for one kind of call.

    ``"auto"`` chooses the first kernel that is available, supports the call and passes its trial.

    Args:
        name: ``"auto"``, the name of a kernel, or a kernel.
        asked: what the call needs.
        device: the device of q, k and v.
        try_it: whether the kernel must pass its trial.

    Raises:
        UnknownKernel: no kernel has this name.
        KernelUnavailable: the named kernel is not available, or does not support the call.
        KernelWrong: the named kernel fails its trial.
    """
    passed: list[str] = []
    for kernel in order() if name == "auto" else (named(name),):
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


@constant
def _picked(name: str, given: str, device: str, index: int | None, *asked: Any) -> str:
    """Choose a kernel during a graph capture; the kernel's name becomes a constant of the graph.

    Args:
        name: the kernel's name.
        given: the number of the kernel object that was passed to ``apply``; empty if it was a name.
        device: the kind of device.
        index: its number, or None.
        asked: the fields of what the call needs.
    """
    kernel = numbered(given) if given else name
    return pick(kernel, Asked(*asked), torch.device(device if index is None else f"{device}:{index}")).kernel.name


class Tried(NamedTuple):
    """The verdict of a trial of a mixer.

    Attributes:
        sizes: the largest sizes that it was tried with.
        able: whether the mixer keeps documents apart.
        why: the reason if it does not.
    """

    sizes: tuple[int, ...]
    able: bool
    why: str

    def holds_for(self, sizes: Sequence[int]) -> bool:
        """Whether the verdict holds for calls of these sizes. What fails once is not tried again."""
        return not self.able or all(size <= known for size, known in zip(sizes, self.sizes))


class Picks:
    """The kernels of a patched model, chosen once for every kind of call. ``Patch.layers`` shows them.

    Attributes:
        name: the ``kernel`` argument of ``apply``, or the name of the kernel object passed there.
        given: the kernel object passed to ``apply``, else None.
    """

    def __init__(self, kernel: str | Kernel) -> None:
        self.given = kernel if isinstance(kernel, Kernel) else None
        self.name = kernel.name if isinstance(kernel, Kernel) else kernel
        self._number = "" if self.given is None else number(self.given)
        self._made: dict[tuple[Asked, torch.device], Pick] = {}
        self._tried: WeakKeyDictionary[torch.nn.Module, dict[Hashable, Tried]] = WeakKeyDictionary()
        self._of: WeakKeyDictionary[torch.nn.Module, Pick | Mixed] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[Picks], tuple[str | Kernel]]:
        return Picks, (self.given or self.name,)

    def of(self, module: torch.nn.Module) -> Pick | Mixed | None:
        """What computed the layer's last packed batch; None if it has computed none, or only in a compiled graph."""
        return self._of.get(module)

    def took(self, module: torch.nn.Module, portions: Portions, passed: Sequence[str] = ()) -> None:
        """Record what a mixer got of its last packed batch in one call, and why other ways were passed over."""
        self._of[module] = Mixed(portions, "; ".join(passed))

    def tried(
        self,
        module: torch.nn.Module,
        kind: Hashable,
        sizes: tuple[int, ...],
        trial: Callable[[], tuple[bool, str]],
    ) -> Tried:
        """Whether a mixer keeps documents apart in calls of this kind and of these sizes, and the reason if not.

        Each kind of call is tried for each mixer, because two mixers of one class may have different parameters and so
        call different kernels. It is tried again for larger sizes. If the trial raises, nothing is remembered.

        Args:
            module: the mixer.
            kind: a description of the call.
            sizes: how large the call is. A smaller one needs no trial of its own.
            trial: returns whether the mixer keeps documents apart, and the reason if not.
        """
        known = self._tried.setdefault(module, {})
        before = known.get(kind)
        if before is None or not before.holds_for(sizes):
            largest = sizes if before is None else tuple(map(max, sizes, before.sizes))
            known[kind] = Tried(largest, *trial())
        return known[kind]

    def __call__(self, module: torch.nn.Module | None, asked: Asked, device: torch.device) -> Kernel:
        """Choose the kernel for a call, and warn if ``auto`` can only use a slow one.

        Args:
            module: the layer, for :meth:`of`; None if it is not known.
            asked: what the call needs.
            device: the device of q, k and v.
        """
        if compiling():
            picked = _picked(self.name, self._number, device.type, device.index, *asked)
            return named(picked) if self.given is None else self.given
        kind = (asked, device)
        if kind not in self._made:
            self._made[kind] = pick(self.given or self.name, asked, device)
            self._warn_if_slow(self._made[kind], asked)
        made = self._made[kind]
        if module is not None and self._of.get(module) is not made:
            self._of[module] = made
        return made.kernel

    def _warn_if_slow(self, made: Pick, asked: Asked) -> None:
        """Warn of the reference on an accelerator, and of FlexAttention where a faster kernel lacks only the dtype."""
        if self.name != "auto" or asked.device in ("cpu", "meta"):
            return
        in_half = _faster_in_half(made.kernel, asked)
        if isinstance(made.kernel, Reference) or (isinstance(made.kernel, Flex) and in_half):
            advice = (
                f" Load the model in bfloat16, or use torch.autocast, for {' or '.join(in_half)}." if in_half else ""
            )
            warnings.warn(
                f"fa2patch computes a layer with the kernel {made.kernel.name!r}, which is right and slow on a GPU "
                f"({made.why}).{advice} See fa2patch.status(model).layers.",
                stacklevel=3,
            )


def _faster_in_half(kernel: Kernel, asked: Asked) -> list[str]:
    """The kernels before this one that need nothing but half precision to be used, best first."""
    if asked.dtype in HALF:
        return []
    before = itertools.takewhile(lambda other: other is not kernel, order())
    in_half = asked._replace(dtype=torch.bfloat16)
    return [other.name for other in before if other.available()[0] and other.supports(in_half)[0]]
