"""``flash_attn_varlen_func``, the entry point of FlashAttention 2, 3, 4 and of the hub's builds of them.

Its signature shows which features a build has. Meanings of the arguments: flash_attn/flash_attn_interface.py (2.8),
hopper/flash_attn_interface.py (3), flash_attn/cute/interface.py (4).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import torch

from .._torch import is_no_verdict
from .protocol import Kernel

if TYPE_CHECKING:
    from ..documents.boundaries import Boundaries
    from .options import Options

PARAMETERS = {
    "window": ("window_size",),
    "softcap": ("softcap",),
    "sinks": ("learnable_sink", "s_aux"),
    "alibi": ("alibi_slopes",),
    "dropout": ("dropout_p",),
    "deterministic": ("deterministic",),
}
"""Maps each feature to the names that its parameter has in different builds."""


class Found(NamedTuple):
    """The entry point of a build.

    Attributes:
        function: ``flash_attn_varlen_func``, or None if there is none.
        parameters: the names of its parameters.
        reason: why there is none; empty if there is one.
    """

    function: Callable[..., Any] | None
    parameters: frozenset[str] = frozenset()
    reason: str = ""

    def name_of(self, feature: str) -> str | None:
        """The parameter for a feature in :data:`PARAMETERS`; None if this build has none."""
        return next((name for name in PARAMETERS[feature] if name in self.parameters), None)


found_once: dict[tuple[Callable[[str], Found], str], Found] = {}
"""What a function has found at a source. torch.compile reads a dictionary, but would trace into ``cache``."""


def once(find: Callable[[str], Found], source: str) -> Found:
    """Return what ``find(source)`` returned the first time. Exceptions are not kept, so the next call tries again."""
    if (find, source) not in found_once:
        found_once[find, source] = find(source)
    return found_once[find, source]


def in_package(module: str) -> Found:
    """Import a module and find its entry point."""
    try:
        if importlib.util.find_spec(module) is None:
            return Found(None, reason=f"the package {module} is not installed")
        return entry(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            return Found(None, reason=f"the package {module} is not installed")
        return Found(None, reason=f"the package {module} does not import ({type(error).__name__}: {error})")
    except Exception as error:  # a broken build raises whatever its loader raises
        if is_no_verdict(error):
            raise
        return Found(None, reason=f"the package {module} does not import ({type(error).__name__}: {error})")


def entry(module: Any) -> Found:
    """Find the entry point of an imported module.

    Raises:
        AttributeError: the module has none.
    """
    function = module.flash_attn_varlen_func
    return Found(function, frozenset(inspect.signature(function).parameters))


class VarlenFunc(Kernel):
    """Base class of kernels that call ``flash_attn_varlen_func``. ``cu_seqlens`` are neither read nor copied.

    Attributes:
        module: the module that holds the entry point.
    """

    module: str

    def found(self) -> Found:
        """The entry point of the installed build."""
        return once(in_package, self.module)

    def available(self) -> tuple[bool, str]:
        """Whether the build has an entry point, and the reason if not."""
        found = self.found()
        return found.function is not None, found.reason

    def features(self) -> frozenset[str]:
        """The features that the entry point has a parameter for; trees and spans, as it takes keys of other lengths."""
        return frozenset({"trees", "spans", *(feature for feature in PARAMETERS if self.found().name_of(feature))})

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        boundaries: Boundaries,
        options: Options,
        scale: float,
    ) -> torch.Tensor:
        """Call the entry point."""
        found = self.found()
        assert found.function is not None, "available() was asked"
        extras: dict[str, Any] = {}
        if options.window is not None:
            reach = options.window - 1
            extras["window_size"] = (reach, 0 if options.causal else reach)
        if options.softcap is not None:
            extras["softcap"] = options.softcap
        if options.sinks is not None:
            extras[found.name_of("sinks") or ""] = options.sinks
        if options.alibi_slopes is not None:
            extras["alibi_slopes"] = options.alibi_slopes.float()
        if options.dropout:
            extras["dropout_p"] = options.dropout
        if found.name_of("deterministic"):
            extras["deterministic"] = torch.are_deterministic_algorithms_enabled()
        keys = boundaries.keys(q.shape[0])
        output = found.function(
            q,
            k,
            v,
            cu_seqlens_q=boundaries.cu_seqlens,
            cu_seqlens_k=keys.cu_seqlens,
            max_seqlen_q=boundaries.max_seqlen,
            max_seqlen_k=keys.max_seqlen,
            softmax_scale=scale,
            causal=options.causal,
            **extras,
        )
        attended: torch.Tensor = output[0] if isinstance(output, tuple) else output  # some also return the log-sum-exp
        return attended
