"""FlashAttention 2 (the ``flash_attn`` package), versions 2.1 to 2.8: ``flash_attn_varlen_func``.

Argument meanings: the package's flash_attn/flash_attn_interface.py. What a version lacks is seen in its signature.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Callable

import torch

from ..errors import KernelUnavailable

if TYPE_CHECKING:
    from ..attention import Options
    from ..boundaries import Boundaries

_NEEDS = {"window": "window_size", "softcap": "softcap", "alibi_slopes": "alibi_slopes"}


class FlashAttn:
    """Takes ``cu_seqlens`` as they are: no read from the device, no copy."""

    name = "flash_attn"

    def available(self) -> tuple[bool, str]:
        function, _, reason = _varlen()
        return function is not None, reason

    def supports(self, q: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[bool, str]:
        _, parameters, _ = _varlen()
        missing = [
            asked
            for asked, parameter in _NEEDS.items()
            if getattr(options, asked) is not None and parameter not in parameters
        ]
        if missing:
            return False, f"this flash_attn has no {', '.join(missing)}"
        if options.sinks is not None:
            return False, "flash_attn 2 has no attention sinks"
        if q.device.type != "cuda":
            return False, f"flash_attn needs a CUDA device, found {q.device.type}"
        if q.dtype not in (torch.float16, torch.bfloat16):
            return False, f"flash_attn needs float16 or bfloat16, found {q.dtype}"
        if q.shape[-1] > 256 or q.shape[-1] % 8 or v.shape[-1] != q.shape[-1]:
            return False, (
                "flash_attn needs one head dimension for q, k and v, a multiple of 8 up to 256; "
                f"found {q.shape[-1]} and {v.shape[-1]}"
            )
        return True, ""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options
    ) -> torch.Tensor:
        function, parameters, reason = _varlen()
        if function is None:
            raise KernelUnavailable(f"kernel='flash_attn' cannot run here: {reason}.")
        extras: dict[str, Any] = {}
        if options.window is not None:
            reach = options.window - 1
            extras["window_size"] = (reach, 0 if options.causal else reach)
        if options.softcap is not None:
            extras["softcap"] = options.softcap
        if options.alibi_slopes is not None:
            extras["alibi_slopes"] = options.alibi_slopes.float()
        if "deterministic" in parameters:
            extras["deterministic"] = torch.are_deterministic_algorithms_enabled()
        output: torch.Tensor = function(
            q,
            k,
            v,
            cu_seqlens_q=boundaries.cu_seqlens,
            cu_seqlens_k=boundaries.cu_seqlens,
            max_seqlen_q=boundaries.max_seqlen,
            max_seqlen_k=boundaries.max_seqlen,
            dropout_p=options.dropout,
            softmax_scale=options.scale,
            causal=options.causal,
            **extras,
        )
        return output


@lru_cache(maxsize=1)
def _varlen() -> tuple[Callable[..., torch.Tensor] | None, frozenset[str], str]:
    """The package's function, its parameters' names, and where there is none the reason."""
    try:
        if importlib.util.find_spec("flash_attn") is None:
            return None, frozenset(), "the package flash_attn is not installed"
        function = importlib.import_module("flash_attn").flash_attn_varlen_func
    except Exception as error:  # a broken build raises whatever its loader raises
        return None, frozenset(), f"the package flash_attn does not import ({type(error).__name__}: {error})"
    return function, frozenset(inspect.signature(function).parameters), ""
