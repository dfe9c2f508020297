"""Pass a whole row to a mixer in one call if its kernels keep documents apart by ``seq_idx`` and ``cu_seq_lens_q``.

The kernels of causal-conv1d, mamba-ssm and flash-linear-attention can do so. It depends on the version whether the
keywords reach them, and many mixers accept the keywords and ignore them silently. Therefore each mixer is tried
(``mixer_trial.py``) before it gets a whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._types import Function
from ...documents.boundaries import Boundaries
from .. import inspecting

NEVER_ON = ("cpu", "meta")
"""Devices for which none of these packages has a kernel."""

_DOCUMENTS = ("seq_idx", "cu_seq_lens_q")
_KEYWORDS = (*_DOCUMENTS, "cu_seq_lens_k", "max_length_q", "max_length_k")


def accepted(forward: Function) -> tuple[str, ...]:
    """The collator lengths that a mixer's ``forward`` accepts; none if it accepts nothing that says the documents.

    The signature is read, which takes time, so this is asked once for each mixer that is patched.
    """
    taken = tuple(inspecting.accepted(forward, _KEYWORDS))
    return taken if any(name in taken for name in _DOCUMENTS) else ()


def may_be(names: Sequence[str], device: torch.device, boundaries: Boundaries) -> bool:
    """Whether a whole row may be tried: kernels may exist, the row has several documents, and lengths are accepted."""
    return bool(names) and device.type not in NEVER_ON and len(boundaries) > 1 and boundaries.parents is None


def keywords(names: Sequence[str], boundaries: Boundaries, tokens: int) -> dict[str, Any]:
    """Return the collator lengths of these names for a row. They are made once in a forward; nothing is read.

    ``seq_idx`` is int32 ``[1, tokens]``, ``cu_seq_lens_*`` int32 ``[documents + 1]``, ``max_length_*`` an int.
    """
    made = boundaries.made
    if keywords not in made:
        cu = boundaries.cu_seqlens
        number = torch.arange(len(cu) - 1, device=cu.device, dtype=torch.int32)
        made[keywords] = {
            "seq_idx": number.repeat_interleave(cu.diff().long(), output_size=tokens)[None],
            **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), cu),
            **dict.fromkeys(("max_length_q", "max_length_k"), boundaries.max_seqlen),
        }
    return {name: made[keywords][name] for name in names}
