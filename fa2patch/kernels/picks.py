"""Which kernel computes a layer: ``packed_attention``, the kernels by name and in order, the choice and its reason."""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, Callable, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

from .. import entry_points
from .._torch import constant, number, numbered
from ..documents.boundaries import Boundaries
from ..errors import BadArgument, KernelUnavailable, KernelWrong, PackingNotIsolated, UnknownKernel
from .aten import Efficient, TorchVarlen
from .flex import Flex
from .options import FEATURES, Options, described_call, scaled
from .protocol import HALF, Asked, Kernel, asked_as, asked_by, capability
from .reference import Reference
from .trial import passes_trial
from .varlen import FlashAttn, FlashAttn3, FlashAttn4, Hub


def packed_attention(
    q: torch.Tensor,  # [batch, length, query heads, head dim]
    k: torch.Tensor,  # [batch, length, key heads, head dim]; key heads divide query heads
    v: torch.Tensor,  # [batch, length, key heads, value head dim]; q, k and v have one dtype
    boundaries: Boundaries,  # of the documents over the batch * length tokens
    options: Options,
    kernel: str | Kernel = "auto",
) -> torch.Tensor:
    """Compute attention in which no token sees, or sends a gradient to, another document.

    The result is contiguous, ``[batch, length, query heads, value head dim]``, and has q's dtype.
    """
    rows, key_heads = q.shape[:2], k.shape[2]
    if k.shape[:2] != v.shape[:2] or (boundaries.sources is None and k.shape[:2] != rows):
        raise PackingNotIsolated(
            f"packed attention needs queries and keys of the same tokens; found {list(q.shape[:2])} queries and "
            f"{list(k.shape[:2])} keys [batch, length]. If the call has a key/value cache, leave it out. If the layer "
            "makes keys of other tokens itself (compressed ones, an encoder's), train this model padded."
        )
    if q.shape[2] % key_heads or key_heads != v.shape[2]:
        raise PackingNotIsolated(
            f"found {q.shape[2]} query, {k.shape[2]} key and {v.shape[2]} value heads: expected as many key as value "
            "heads, and a multiple of them as query heads."
        )
    if options.by_head:
        options.require_heads(q.shape[2])
    if isinstance(options.scale, torch.Tensor):
        q, options = scaled(q, options)
    if isinstance(kernel, str):
        kinds = boundaries.parents is not None, boundaries.until is not None, boundaries.sources is not None
        asked = asked_by(q, k, v, options, *kinds)
        kernel = pick(kernel, asked, q.device).kernel
    if q.is_meta:
        return q.new_empty(*rows, q.shape[2], v.shape[3])
    output = kernel(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), boundaries, options)
    return output.view(*rows, q.shape[2], v.shape[3])


ORDER: tuple[Kernel, ...] = (
    FlashAttn3(), FlashAttn(), FlashAttn4(), TorchVarlen(), Efficient(), Flex(), Reference(),
)  # fmt: skip
"""The built-in kernels that ``auto`` tries, best first. Those made for the device come first. The last one supports
everything."""

BY_NAME_ONLY: tuple[Kernel, ...] = (Hub(),)
"""The built-in kernels that ``auto`` does not try."""

# The built-in kernels of devices that few have, which ``auto`` tries before torch's own. By the name of a kernel: its
# module, which is loaded when the kernel is asked for, its class, and whether such a device may be here.
ELSEWHERE: dict[str, tuple[str, str, Callable[[], bool]]] = {
    "ascend": (".ascend", "Ascend", lambda: hasattr(torch, "npu")),
    "aiter": (".varlen", "Aiter", lambda: torch.version.hip is not None),
}

# There is one kernel of each name, because results of trials are cached by kernel.
_BUILT_IN = {kernel.name: kernel for kernel in (*ORDER, *BY_NAME_ONLY)}
_elsewhere: dict[str, Kernel] = {}  # no functools.cache, past which dynamo goes, to an import that it cannot trace

NAMES = ("auto", *(kernel.name for kernel in ORDER), *ELSEWHERE, *(kernel.name for kernel in BY_NAME_ONLY))
"""The built-in values of ``apply(model, kernel=...)``."""

_registered: list[tuple[Kernel, str | None]] = []


def order(everywhere: bool = False) -> tuple[Kernel, ...]:
    """The kernels that ``auto`` tries on the current device, best first.

    They are :data:`ORDER`, with the kernels made for the device in front, and those registered with ``before``. With
    ``everywhere``, those of other devices are in their places, too.
    """
    here = capability()
    kernels = sorted(ORDER, key=lambda kernel: here is None or here[0] not in kernel.MADE_FOR)
    elsewhere = [name for name, (*_, may_be_here) in ELSEWHERE.items() if everywhere or may_be_here()]
    for kernel, before in (*((named(name), "torch_varlen") for name in elsewhere), *_registered):
        if before is not None:
            at = [i for i, other in enumerate(kernels) if other.name == before]
            kernels.insert(at[0] if at else len(kernels) - 1, kernel)  # `before` may have left auto since
    return tuple(kernels)


def every_kernel() -> tuple[Kernel, ...]:
    entry_points.load()
    tried = order()
    others = [kernel for kernel in map(named, ELSEWHERE) if kernel not in tried]
    return (*tried, *others, *BY_NAME_ONLY, *(kernel for kernel, before in _registered if before is None))


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
    with entry_points.LOCK:
        others = [(other, place) for other, place in _registered if other.name != kernel.name]
        tried = [*(other.name for other in ORDER), *(other.name for other, place in others if place is not None)]
        if before is not None and before not in tried:
            raise UnknownKernel(
                f"before={before!r}: expected one that auto tries, {', '.join(map(repr, tried))}, or None."
            )
        _registered[:] = [*others, (kernel, before)]
        entry_points.note("kernel", kernel.name)


def named(name: str | Kernel) -> Kernel:
    """Return the kernel of this name, which may be ``"hub:..."`` but not ``"auto"``. A kernel is returned as it is.

    Raises:
        UnknownKernel: no kernel has this name.
    """
    if isinstance(name, Kernel):
        return name
    if isinstance(name, str):
        if name in _BUILT_IN:
            return _BUILT_IN[name]
        if name in ELSEWHERE:
            if name not in _elsewhere:
                module, kind, _ = ELSEWHERE[name]
                _elsewhere[name] = getattr(importlib.import_module(module, __package__), kind)()
            return _elsewhere[name]
        if name.startswith("hub:") and name != "hub:":
            return _of_hub(name[len("hub:") :])
    found = [kernel for kernel, _ in _registered if kernel.name == name]
    # every_kernel imports those of other devices, which a graph that is captured cannot do
    found = found or [kernel for kernel in every_kernel() if kernel.name == name]
    if found:
        return found[0]
    names = ", ".join(repr(kernel.name) for kernel in every_kernel())
    raise UnknownKernel(f"kernel={name!r}: expected one of 'auto', {names}, or 'hub:org/name'.")


_of_hub = lru_cache(maxsize=8)(Hub)  # one kernel object for each source, because results of trials are cached by kernel


def check_name(name: str | Kernel) -> None:
    """Raise :class:`UnknownKernel` or :class:`KernelUnavailable` for a kernel that cannot run on this machine."""
    if name == "auto":
        return
    kernel = named(name)
    able, reason = kernel.available()
    if not able:
        raise KernelUnavailable(f"kernel={kernel.name!r} cannot run here: {reason}. Use kernel='auto'.")


def kernel_rows() -> list[dict[str, Any]]:
    """Describe every kernel as a dict of JSON values, in the order in which ``auto`` tries them.

    Those of other devices, and those that are used by name only, come last.
    """
    made, tried = [], (*order(), *map(named, ELSEWHERE))
    for kernel in every_kernel():
        able, reason = kernel.available() if kernel in tried else (False, "asked for by name only")
        made.append(
            {
                "name": kernel.name,
                "what": kernel.what,
                "needs": kernel.needs,
                "usable": able,  # by auto, on this machine
                "reason": reason,  # why not
                "devices": None if kernel.DEVICES is None else list(kernel.DEVICES),
                "dtypes": None if kernel.DTYPES is None else [str(x).replace("torch.", "") for x in kernel.DTYPES],
                "head_dim": kernel.MAX_HEAD_DIM,
                # of the best build, and of the installed one
                "features": [name for name in FEATURES if name in kernel.FEATURES],
                "here": [name for name in FEATURES if able and name in kernel.features()],
            }
        )
    return made


class Pick(NamedTuple):
    """The kernel of a layer."""

    kernel: Kernel
    # Why ``auto`` did not choose the kernels before it in ``order``; empty if there are none, or if the kernel was
    # asked for by name.
    why: str


class Portions:
    """What a mixer, which uses kernels of its own, gets of a packed row in one call."""

    def __init__(self, name: str) -> None:
        self.name = name


WHOLE_ROW = Portions("its own, the whole row")
BATCHES = Portions("its own, documents in batches")
DOCUMENTS = Portions("its own, document by document")


class Mixed(NamedTuple):
    """How a mixer was computed; the counterpart of :class:`Pick`."""

    kernel: Portions
    why: str = ""  # why the trials of the ways before it failed; empty if they did not take place


def pick(name: str | Kernel, asked: Asked, device: torch.device, try_it: bool = True) -> Pick:
    """Choose the kernel for one kind of call: for ``"auto"`` the first that is available, supports it and is right.

    A kernel that is asked for must be all three, or it is an error. Without ``try_it`` there is no trial.
    """
    passed: list[str] = []
    for kernel in order() if name == "auto" else (named(name),):
        kind = KernelUnavailable
        able, reason = kernel.available()
        if able:
            able, reason = kernel.supports(asked)
        if able and try_it:
            kind = KernelWrong
            able, reason = passes_trial(kernel, asked, device)
        if able:
            return Pick(kernel, "; ".join(passed))
        passed.append(f"{kernel.name}: {reason}")
    shown = name if isinstance(name, str) else name.name
    raise kind(f"kernel={shown!r} cannot compute this layer: {reason}. Use kernel='auto'.")


@constant
def _picked(picks: str, index: int | None, call: tuple[Any, ...]) -> str:
    # While a graph is captured, the kernel's name becomes a constant of it. The arguments must be constants, too:
    # ``picks`` is the number of a Picks, ``index`` that of a device, and ``call`` is from described_call.
    asked, asking = asked_as(call), numbered(picks)
    device = torch.device(asked.device if index is None else f"{asked.device}:{index}")
    return pick(asking.given or asking.name, asked, device).kernel.name


class Computed(NamedTuple):
    layer: ref[torch.nn.Module]
    by: Pick | Mixed


class Tried:
    """The verdict of a trial of a mixer: whether it keeps documents apart, and the reason if not."""

    def __init__(self, sizes: tuple[int, ...], able: bool, why: str) -> None:
        self.sizes, self.able, self.why = sizes, able, why  # the sizes are the largest that it was tried with


class Picks:
    """The kernels of a patched model, chosen once for every kind of call. ``Patch.layers`` shows them.

    Attributes:
        name: the ``kernel`` argument of ``apply``, or the name of the kernel object passed there.
        given: the kernel object passed to ``apply``, else None.
        last: what computed each layer's last packed batch, by the layer's ``id``; :meth:`of` asks.
        prepared: what the seams keep for the next call of a kind.
    """

    def __init__(self, kernel: str | Kernel) -> None:
        self.given = kernel if isinstance(kernel, Kernel) else None
        self.name = kernel.name if isinstance(kernel, Kernel) else kernel
        self._number = number(self)
        self._made: dict[tuple[Asked, torch.device], Pick] = {}
        self._tried: WeakKeyDictionary[torch.nn.Module, dict[Hashable, Tried]] = WeakKeyDictionary()
        self.last: dict[int, Computed] = {}
        self.prepared: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[type[Picks], tuple[str | Kernel]]:
        return Picks, (self.given or self.name,)

    def of(self, module: torch.nn.Module) -> Pick | Mixed | None:
        """What computed the layer's last packed batch; None if it has computed none, or only in a compiled graph."""
        last = self.last.get(id(module))
        return last.by if last is not None and last.layer() is module else None

    def took(self, module: torch.nn.Module, by: Pick | Mixed) -> None:
        """Record what computes the layer's packed batch, for :meth:`of`."""
        last, number = self.last, id(module)
        self.last[number] = Computed(ref(module, lambda _: last.pop(number, None)), by)

    def tried(
        self, module: torch.nn.Module, kind: Hashable, sizes: tuple[int, ...], trial: Callable[[], tuple[bool, str]]
    ) -> Tried:
        """Whether a mixer keeps documents apart in calls of this kind and of these sizes, and the reason if not.

        Each kind of call is tried for each mixer, because two mixers of one class may have different parameters and so
        call different kernels. It is tried again for larger sizes. If the trial raises, nothing is remembered.
        """
        known = self._tried.setdefault(module, {})
        before = known.get(kind)
        largest = sizes if before is None else tuple(map(max, sizes, before.sizes))
        if before is None or (before.able and largest != before.sizes):  # what fails once is not tried again
            known[kind] = Tried(largest, *trial())
        return known[kind]

    def __call__(self, module: torch.nn.Module | None, asked: Asked, device: torch.device) -> Kernel:
        """Choose the kernel for a call of a layer, if it is known, and warn if ``auto`` can only use a slow one."""
        kind = (asked, device)
        if kind not in self._made:
            self._made[kind] = pick(self.given or self.name, asked, device)
            self._warn_if_slow(self._made[kind], asked)
        made = self._made[kind]
        if module is not None and self.of(module) is not made:
            self.took(module, made)
        return made.kernel

    def captured(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, kinds: tuple[bool, bool, bool]
    ) -> Kernel:
        """Choose the kernel for a call that is captured into a graph. Everything that is traced here costs time."""
        picked = _picked(self._number, q.device.index, described_call(q, k, v, options, *kinds))
        return named(picked) if self.given is None else self.given

    def _warn_if_slow(self, made: Pick, asked: Asked) -> None:
        if self.name != "auto" or asked.device in ("cpu", "meta"):
            return
        in_half: list[str] = []  # the kernels that would be faster then
        if asked.dtype not in HALF:
            before = itertools.takewhile(lambda other: other is not made.kernel, order())
            then = asked._replace(dtype=torch.bfloat16)
            in_half = [other.name for other in before if other.available()[0] and other.supports(then)[0]]
        if isinstance(made.kernel, Reference) or (isinstance(made.kernel, Flex) and in_half):
            advice = (
                f" Load the model in bfloat16, or use torch.autocast, for {' or '.join(in_half)}." if in_half else ""
            )
            warnings.warn(
                f"fa2patch computes a layer with the kernel {made.kernel.name!r}, which is right and slow on a GPU "
                f"({made.why}).{advice} See fa2patch.status(model).layers.",
                stacklevel=3,
            )
