"""One document of a packed batch by itself, to prove that its outputs do not depend on the length of the row.

Other documents' tokens show nothing of code that reads the length: noise that is scaled by it (NEFTune), a mean. Random
numbers are constants in these runs, so that noise of one size is one number and not another in every run.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._types import Call
from ..documents.media import MEDIA
from ..documents.names import LENGTHS
from ..upstream.calls import passed
from ..upstream.packed_mask import PackedMask

_VALUES = {
    "uniform_": (0.0, 1.0), "normal_": (0.0, 1.0), "bernoulli_": (1.0, 1.0), "rand": (0.0, 1.0),
    "rand_like": (0.0, 1.0), "randn": (0.0, 1.0), "randn_like": (0.0, 1.0),
}  # fmt: skip
"""What torch's operators draw from without arguments. A dropout (``bernoulli_``) then keeps everything."""


class ConstantDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, what draws from a range or a distribution gets one of its values, for every element the same."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in _VALUES:
            return output  # others that draw are known by two runs that differ
        given: list[float] = list(args[1:3]) if name in ("uniform_", "normal_") else []
        least, most = (*given, *_VALUES[name][len(given) :])
        return output.fill_(least + 0.75 * (most - least))


def document_of(call: Call, mask: PackedMask) -> tuple[Call, int, slice] | None:
    """A short document of a batch as a batch of its own, one that does not begin its row if there is one.

    The first document of a row has the same places in the row when it is alone.

    Returns:
        The arguments, the document's row and its tokens there; None for pictures, whose parts are not known, for trees,
        and if no document is real.
    """
    lengths, (rows, length) = mask.boundaries.lengths, mask.shape
    if passed(call, MEDIA) or mask.boundaries.tree is not None:
        return None
    starts = [0, *accumulate(lengths)]
    real = torch.ones(rows * length, dtype=torch.bool) if mask.real is None else mask.real.flatten().cpu() != 0
    candidates = [(n, start) for n, start in zip(lengths, starts) if n and bool(real[start : start + n].all())]
    if not candidates:
        return None
    size, start = min(candidates, key=lambda candidate: (candidate[1] % length == 0, *candidate))
    row, at = divmod(start, length)
    tokens = slice(at, at + size)

    def of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return value
        if tuple(value.shape[:2]) == mask.shape:
            return value[row : row + 1, tokens]
        if tuple(value.shape[-2:]) == mask.shape:  # position ids on several axes
            return value[..., row : row + 1, tokens]
        return value

    left_out = {*LENGTHS, "attention_mask"}
    labels = call.get("labels")
    if labels is not None and tuple(labels.shape[:2]) != mask.shape:  # one for each document
        left_out.add("labels")
    alone = {name: of(value) for name, value in call.items() if name not in left_out}
    ends = torch.tensor([0, size], dtype=torch.int32, device=mask.device)
    stated = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": size, "max_length_k": size}
    return {**alone, **stated}, row, tokens
