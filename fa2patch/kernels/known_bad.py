"""Builds that are known to be bad, by what was found in public: they are asked for here before any of them is tried.

A trial cannot find what never returns, what writes outside its memory, or what is wrong only for rows of another size.
Such builds are known by their distribution's version. A version is the tag of the release that has the mend.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Callable, NamedTuple

from torch.torch_version import TorchVersion

from .protocol import Asked, Kernel, capability
from .varlen import FlashAttn4


class Bad(NamedTuple):
    """Some calls of some builds."""

    kernel: type[Kernel]
    distribution: str
    since: str  # the first version that is bad
    before: str  # the first version that is not
    calls: Callable[[Asked, tuple[int, int]], bool]  # whether it is about a call, on a device of this capability
    what: str
    source: str  # where it was found, in public


_FLASH_4 = (FlashAttn4, "flash-attn-4")


def _is_256(asked: Asked) -> bool:
    return FlashAttn4().padded(asked.head_dim, asked.value_dim) == (256, 256)


# A row leaves when no supported Transformers can meet the build any more.
TABLE = (
    Bad(
        *_FLASH_4, "4.0.0b11", "4.0.0b20", lambda asked, here: here[0] in (10, 11) and _is_256(asked),
        "its kernels for a head dimension of 256 read q, k and v as if they were contiguous",
        "TransformerEngine#3216; flash-attention#2541 and #2665, mended by #2545 and #2670",
    ),
    Bad(
        *_FLASH_4, "4.0.0b9", "4.0.0b13", lambda asked, here: asked.gradients and "softcap" in asked.features,
        "its backward with softcap is wrong for variable lengths, or never returns",
        "flash-attention#2466; refused since #2544",
    ),
    Bad(
        *_FLASH_4, "4.0.0b0", "4.0.0b5", lambda asked, here: asked.gradients and here[0] == 9 and asked.head_dim <= 64,
        "its backward writes outside its memory if a row has many documents",
        "flash-attention#2337",
    ),
    Bad(
        *_FLASH_4, "4.0.0b0", "4.0.0b18", lambda asked, here: here[0] in (10, 11),
        "its tile scheduler counts in 32 bits, which long rows overflow",
        "flash-attention#2662",
    ),
    Bad(
        *_FLASH_4, "4.0.0b0", "4.0.0b28", lambda asked, here: here[0] in (8, 12),
        "its forward for variable lengths reads outside its memory, and the device is lost",
        "flash-attention#2763, merged after the release 4.0.0b27",
    ),
    Bad(
        FlashAttn4, "nvidia-cutlass-dsl", "4.6.0", "4.6.2", lambda asked, here: asked.gradients and here[0] == 10,
        "with this compiler its backward never returns",
        "flash-attention#2797",
    ),
)  # fmt: skip


def known_bad(kernel: Kernel, asked: Asked) -> str:
    here = capability()
    if here is None:
        return ""
    for row in TABLE:
        if not isinstance(kernel, row.kernel) or not row.calls(asked, here):
            continue
        installed = version(row.distribution)
        if installed is not None and row.since <= TorchVersion(installed) < row.before:
            found = f"{row.distribution} {installed} is known to be bad: {row.what} ({row.source})"
            return f"{found}. Use {row.before} or later"
    return ""


@cache
def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
