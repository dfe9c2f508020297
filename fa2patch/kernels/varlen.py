"""``flash_attn_varlen_func``, the entry point of FlashAttention 2, 3, 4, of AMD's aiter, and of the hub's builds.

Its signature shows which features a build has. Meanings of the arguments: flash_attn/flash_attn_interface.py (2.8),
hopper/flash_attn_interface.py (3), flash_attn/cute/interface.py (4).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import warnings
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch

from .._torch import is_no_verdict
from ..documents.boundaries import Boundaries
from ..errors import NothingProven
from .options import Options
from .protocol import AMD, IN_32_BITS, INTEL, NVIDIA, Kernel, capability

# The names that the parameter for a feature has in different builds.
PARAMETERS = {
    "window": ("window_size",),
    "softcap": ("softcap", "logits_soft_cap"),
    "sinks": ("learnable_sink", "s_aux"),
    "alibi": ("alibi_slopes",),
    "dropout": ("dropout_p",),
    "deterministic": ("deterministic",),
}


class EntryPoint(NamedTuple):
    function: Callable[..., Any] | None
    parameters: frozenset[str] = frozenset()  # the names of the function's parameters
    reason: str = ""  # why there is no function

    @classmethod
    def of(cls, module: Any) -> EntryPoint:
        # An AttributeError says that the module has no entry point.
        function = module.flash_attn_varlen_func
        return cls(function, frozenset(inspect.signature(function).parameters))

    def name_of(self, feature: str) -> str | None:
        return next((name for name in PARAMETERS[feature] if name in self.parameters), None)


# By the source of a build. torch.compile reads a dictionary, but would trace into ``cache``.
entry_points: dict[str, EntryPoint] = {}


class VarlenFunc(Kernel):
    """Base class of kernels that call ``flash_attn_varlen_func``. ``cu_seqlens`` are neither read nor copied."""

    source: str  # the module that holds the entry point
    LARGEST = IN_32_BITS

    def find(self) -> EntryPoint:
        try:
            if importlib.util.find_spec(self.source) is None:
                return EntryPoint(None, reason=f"the package {self.source} is not installed")
            return EntryPoint.of(importlib.import_module(self.source))
        except Exception as error:  # a broken build raises whatever its loader raises
            if is_no_verdict(error):
                raise
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is not None and f"{self.source}.".startswith(f"{missing}."):
                return EntryPoint(None, reason=f"the package {self.source} is not installed")
            return EntryPoint(
                None, reason=f"the package {self.source} does not import ({type(error).__name__}: {error})"
            )

    def found(self) -> EntryPoint:
        # Exceptions are not kept, so the next call tries again.
        if self.source not in entry_points:
            entry_points[self.source] = self.find()
        return entry_points[self.source]

    def available(self) -> tuple[bool, str]:
        found = self.found()
        return found.function is not None, found.reason

    def features(self) -> frozenset[str]:
        # These three are always there, because the entry point takes keys of other lengths.
        return frozenset(
            {"trees", "spans", "pairs", *(feature for feature in PARAMETERS if self.found().name_of(feature))}
        )

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options, scale: float
    ) -> torch.Tensor:
        found = self.found()
        assert found.function is not None, "available() was asked"
        extras: dict[str, Any] = {}
        if options.window is not None:
            reach = options.window - 1
            extras["window_size"] = (reach, 0 if options.causal else reach)
        if options.softcap is not None:
            extras[found.name_of("softcap") or ""] = options.softcap
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
            q, k, v, cu_seqlens_q=boundaries.cu_seqlens, cu_seqlens_k=keys.cu_seqlens,
            max_seqlen_q=boundaries.max_seqlen, max_seqlen_k=keys.max_seqlen, softmax_scale=scale,
            causal=options.causal, **extras,
        )  # fmt: skip
        attended: torch.Tensor = output[0] if isinstance(output, tuple) else output  # some also return the log-sum-exp
        return attended


class FlashAttn(VarlenFunc):
    # The signature shows what older versions lack: windows before 2.3, softcap before 2.6.

    name = "flash_attn"
    what = "FlashAttention 2"
    needs = "pip install flash-attn (2.1 to 2.8)"
    source = "flash_attn"
    CAPABILITY = (8, float("inf"))
    RUNS_ON = (NVIDIA, AMD)
    FEATURES = frozenset({"window", "softcap", "alibi", "dropout", "deterministic", "trees", "spans", "pairs"})


class Aiter(VarlenFunc):
    # AMD's own attention. Nobody has run fa2patch on ROCm: the trial decides. There, torch's operators (kernels of CK
    # or AOTriton) and builds of flash-attn for ROCm come under the names ``torch_varlen``, ``efficient`` and
    # ``flash_attn``. The signature is that of FlashAttention 2, but for ``logits_soft_cap`` (aiter/ops/mha.py, August
    # 2026). Attention sinks are left out: there they are a pointer, and a third number of the window.

    name = "aiter"
    what = "AMD's aiter"
    needs = "torch for ROCm, and aiter"
    source = "aiter"
    RUNS_ON = (AMD,)
    FEATURES = frozenset({"window", "softcap", "alibi", "dropout", "deterministic", "trees", "spans", "pairs"})

    def available(self) -> tuple[bool, str]:
        return super().available() if torch.version.hip is not None else (False, "this torch is not built for ROCm")


class FlashAttn3(VarlenFunc):
    # It is for Hopper, built from flash-attention's ``hopper`` folder. It has no dropout and no ALiBi.

    name = "flash_attn_3"
    what = "FlashAttention 3"
    needs = "flash_attn_interface, built from source"
    source = "flash_attn_interface"
    CAPABILITY = (8, 9)
    MADE_FOR = (9,)
    FEATURES = frozenset({"window", "softcap", "deterministic", "trees", "spans", "pairs"})

    def takes(self, head_dim: int, value_dim: int) -> bool:
        # As in hopper/flash_api.cpp: MLA's dimensions, and small ones of q with v's up to those of the backward.
        return (128 < head_dim <= 192 and 96 < value_dim <= 128) or (head_dim <= 64 and value_dim <= 256)


class FlashAttn4(VarlenFunc):
    # It is for Hopper and Blackwell, written in CuTe's Python and compiled at first use. It has no dropout and no
    # ALiBi. As long as it is a pre-release, FlashAttention 3 and 2 come before it on Hopper.

    name = "flash_attn_4"
    what = "FlashAttention 4"
    needs = "pip install --pre flash-attn-4"
    source = "flash_attn.cute"
    CAPABILITY = (9, 12)
    MADE_FOR = (10, 11, 12)
    MULTIPLE = 32  # of others the backward was wrong (flash-attention#2896 on Hopper, #2698 on Blackwell)
    FEATURES = frozenset({"window", "softcap", "sinks", "deterministic", "trees", "spans", "pairs"})

    def padded(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        # MLA's dimensions, or one for all: gradients of other values were wrong on Blackwell (flash-attention#2552).
        dims = self.rounded(head_dim), self.rounded(value_dim)
        if dims == (192, 128) and (head_dim, value_dim) not in self.alike:
            return dims
        largest = max(dims)
        # Blackwell has no other between 128 and 256 (``_validate_head_dims`` in its interface.py).
        here = capability() if 128 < largest < 256 else None
        return (256, 256) if here is not None and here[0] in (10, 11) else (largest, largest)


_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*(@.+)?")


class Hub(VarlenFunc):
    # ``auto`` does not use it, because it downloads and runs code. Its names are ``hub``, ``hub:org/name``,
    # ``hub:org/name@revision``, ``hub:/a/local/folder`` and ``hub:./a/local/folder``.

    name = "hub"
    what = "a build of the Hugging Face kernels hub"
    needs = "pip install kernels; kernel='hub:org/name' downloads it"
    source = "kernels-community/flash-attn2"  # or ``org/name@revision``, or a folder
    DEVICES = None  # the device types depend on the build
    RUNS_ON = (INTEL,)
    FEATURES = frozenset({"window", "softcap", "sinks", "alibi", "dropout", "deterministic", "trees", "spans", "pairs"})

    def __init__(self, source: str = "") -> None:
        if source:
            self.source, self.name = source, f"hub:{source}"

    def found(self) -> EntryPoint:
        # The first call downloads the build. A failure to do so is not kept.
        try:
            return super().found()
        except Exception as error:  # no network, no such repository, no build for this torch, a broken one
            if is_no_verdict(error):
                raise
            reason = f"{self.source} does not load ({type(error).__name__}: {error})"
            if type(error) is FileNotFoundError:  # kernels/utils.py; errors of the network are subclasses
                reason = (
                    f"{self.source} has no build for torch {torch.__version__} on this machine "
                    f"({str(error).splitlines()[0]}). Name a revision that has one, as in "
                    f"kernel='hub:{self.source.partition('@')[0]}@revision'; builds for torch's stable ABI fit several "
                    "versions"
                )
            return EntryPoint(None, reason=reason)

    def find(self) -> EntryPoint:
        if importlib.util.find_spec("kernels") is None:
            return EntryPoint(None, reason="the package kernels is not installed")
        # Only what begins like a path is one: a folder ``org/name`` in the working directory must not take the place of
        # the repository.
        if Path(self.source).is_absolute() or self.source.startswith("./"):
            folder, load = Path(self.source), importlib.import_module("kernels").get_local_kernel
            # Code that the folder wants from the hub is not declared as trusted.
            if "package_name" in inspect.signature(load).parameters:  # by the version of kernels
                return _for_this_card(load(folder, package_name=folder.name.replace("-", "_")))
            return _for_this_card(load(folder))
        if not _REPOSITORY.fullmatch(self.source):
            expected = "expected org/name, org/name@revision, or a folder that begins with / or ./"
            return EntryPoint(None, reason=f"{expected}, found {self.source!r}")
        repository, _, revision = self.source.partition("@")
        loaded = importlib.import_module("kernels").get_kernel(repository, revision=revision or "main")
        if not revision:
            warnings.warn(
                f"kernel='hub:{repository}' names no revision: what its branch main holds today was loaded. It may be "
                "another build tomorrow, and nobody has tried it with fa2patch. Expected a revision: "
                f"kernel='hub:{repository}@revision', with a commit of the repository.",
                NothingProven,
                stacklevel=1,
            )
        return _for_this_card(loaded)


def _for_this_card(module: Any) -> EntryPoint:
    # Without code for this card, a build may end the process at its first call, and no trial could tell
    # (huggingface/kernels#707). A build that does not say what it has code for is tried from compute capability 8.0 on,
    # which all flash attention needs.
    found, here = EntryPoint.of(module), capability()
    if here is None:
        return found
    codes = _codes(module)
    if any(_runs_on(code, here) for code in codes) or (not codes and here >= (8, 0)):
        return found
    said = f"its code is for {', '.join(codes)}" if codes else "it does not say what its code is for"
    return EntryPoint(None, reason=f"this card has compute capability {here[0]}.{here[1]}, and {said}")


def _codes(module: Any) -> list[str]:
    # A build says it in its ``metadata.json``, under ``backend.archs``, such as ``9.0a`` or ``12.0+PTX``.
    places = Path(getattr(module, "__file__", None) or "/nowhere").parents
    for file in (place / "metadata.json" for place in places[:2]):
        if file.exists():
            said = json.loads(file.read_text(encoding="utf-8")).get("backend")
            return list(said.get("archs") or ()) if isinstance(said, dict) else []
    return []


def _runs_on(code: str, here: tuple[int, int]) -> bool:
    # Code runs on later cards of its major number; with ``a`` at its end on none but its own; as PTX on all later ones
    # (CUDA C++ Programming Guide, "Compute Capability").
    said = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", code)
    if said is None:
        return True  # what it means is not known here, and the trial decides
    wanted = int(said[1]), int(said[2])
    if said[3] == "a":
        return wanted == here
    return wanted <= here and (wanted[0] == here[0] or said[4] is not None)
