"""Huawei's fused attention for Ascend NPUs, ``torch_npu.npu_fusion_attention``.

Nobody has run fa2patch on an NPU: the trial decides. Facts are from the documentation (hiascend.com, Ascend Extension
for PyTorch 6.0, ``torch_npu.npu_fusion_attention``; CANN, ``aclnnFlashAttentionVarLenScore``).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from .._torch import uncompiled
from ..documents.boundaries import Boundaries
from ..documents.tensors import read
from .options import Options
from .protocol import HALF, HUAWEI, Kernel

MOST_DOCUMENTS = 2048  # in a call; the documentation allows up to 2K

# Values of ``sparse_mode``: a query sees the keys up to its own, counted from the end of both; or those from
# ``pre_tockens`` before to ``next_tockens`` behind it. Both need the mask of _hidden.
_FROM_THE_END, _BAND = 3, 4


class Ascend(Kernel):
    # The operator has autograd. Softcap and sinks are not in it. Its ALiBi is a bias for each score, and is left out.

    name = "ascend"
    what = "fused attention of Ascend NPUs"
    needs = "torch_npu"
    DEVICES = ("npu",)
    DTYPES = (*HALF, torch.float32)
    MAX_HEAD_DIM = 512
    MULTIPLE = 16
    RUNS_ON = (HUAWEI,)
    FEATURES = frozenset({"window", "dropout", "trees", "spans"})

    def available(self) -> tuple[bool, str]:
        if importlib.util.find_spec("torch_npu") is None:
            return False, "the package torch_npu is not installed"
        try:
            importlib.import_module("torch_npu")  # it adds torch.npu
        except Exception as error:  # a build for another torch, or without its drivers, fails in many ways
            return False, f"the package torch_npu does not import ({type(error).__name__}: {error})"
        return (True, "") if torch.npu.is_available() else (False, "torch_npu finds no NPU")  # type: ignore[attr-defined]

    @uncompiled
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options, scale: float
    ) -> torch.Tensor:
        operator = importlib.import_module("torch_npu").npu_fusion_attention
        more: dict[str, Any] = {"scale": scale, "keep_prob": 1.0 - options.dropout}
        if options.window is not None:
            reach = options.window - 1
            more.update(sparse_mode=_BAND, pre_tockens=reach, next_tockens=0 if options.causal else reach)
        elif options.causal:
            more["sparse_mode"] = _FROM_THE_END
        if "sparse_mode" in more:
            more["atten_mask"] = _hidden(q.device)
        # In the layout TND, q, k and v are ``[tokens, heads, head dim]``, and the ends are ints of the host.
        outputs = []
        for at, seen, ends, of_keys in _calls(boundaries, q.shape[0]):
            more.update(actual_seq_qlen=ends, actual_seq_kvlen=of_keys)
            outputs.append(operator(q[at], k[seen], v[seen], q.shape[1], "TND", **more)[0])
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


@lru_cache(maxsize=8)
def _hidden(device: torch.device) -> torch.Tensor:
    # The sparse modes need this mask, True above the diagonal, whatever the lengths are.
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


def _calls(boundaries: Boundaries, tokens: int) -> Iterator[tuple[slice, slice, list[int], list[int]]]:
    # For each call: its tokens, its keys, and the ends of documents and of keys, which count from the call's first.
    # Upstream's own call copies the ends to the host twice in each layer. Here they are read once a batch, and not at
    # all with the collator's lengths.
    if Ascend not in boundaries.made:
        keys, lengths = boundaries.keys(tokens).cu_seqlens, boundaries.lengths
        same = keys is boundaries.cu_seqlens
        boundaries.made[Ascend] = lengths, lengths if same else tuple(read(keys.diff()).tolist())
    lengths, of_keys = boundaries.made[Ascend]
    first, first_key = 0, 0
    for place in range(0, len(lengths), MOST_DOCUMENTS):
        part = slice(place, place + MOST_DOCUMENTS)
        ends, key_ends = [*accumulate(lengths[part])], [*accumulate(of_keys[part])]
        if ends[-1]:
            yield slice(first, first + ends[-1]), slice(first_key, first_key + key_ends[-1]), ends, key_ends
        first, first_key = first + ends[-1], first_key + key_ends[-1]
