"""What was found for a layer's attention in one batch, kept for the calls of the same kind in later ones.

To look at options, weights, quirks and kernels takes forty calls of Python in every layer. The kind of a call is all
that the answer depends on and that may change from one call to the next. What is rare is no kind and is looked at in
each call: options that are tensors (sinks), spans, parts of rows, the registry's quirks, a dtype of quantization.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._torch import autocast_dtype
from ..documents.names import LABELS, LENGTHS
from ..kernels import Kernel, Options
from ..kernels.options import KEYWORDS
from ..kernels.picks import Computed

# The types of the options of a call that is kept. A tensor's values may change from call to call: sinks, a scale.
PLAIN = frozenset((type(None), bool, int, float))

# the keywords with tensors whose meaning for a packed batch is known
KNOWN_TENSORS = frozenset((
    "position_ids", "cache_position", "position_embeddings", "cumulative_seqlens_q",
    "cumulative_seqlens_k", "num_items_in_batch", *LABELS, *LENGTHS,
))  # fmt: skip

LOOKED_AT = KNOWN_TENSORS.union(KEYWORDS, ("attention_mask",))

_HALF = frozenset((torch.float16, torch.bfloat16))
_COMPUTED = (*_HALF, torch.float32, torch.float64)

# How many calls are kept. Where there are more kinds, one changes in every call, as a scale that is made from data.
MOST = 4096


class Prepared(NamedTuple):
    """What computes the calls of one kind."""

    of: Computed  # the layer, and the pick of its kernel
    kernel: Kernel
    options: Options
    dtype: torch.dtype  # to which q, k and v are cast
    # the names that lead from the layer to the weight whose dtype this is; empty if q, k and v decide it
    weight: tuple[str, ...]

    def holds_for(self, layer: Any) -> bool:
        if self.of.layer() is not layer:  # another one had its id
            return False
        if not self.weight:
            return True
        *modules, name = self.weight
        inside: Any = layer
        for part in modules:
            inside = inside._modules.get(part)
            if inside is None:
                return False
        weight = inside._parameters.get(name)
        return weight is not None and weight.dtype is self.dtype


def compute_dtype(
    layer: torch.nn.Module | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, casts: bool
) -> tuple[torch.dtype, tuple[str, ...] | None]:
    """One dtype for q, k and v, and the names that lead to the weight that decides it."""
    # There are no names if no weight decides, and None if the next call of the same kind may have another answer. In
    # half-precision models, float32 norms, LoRA weights or rotary tables upcast some of the three. If at least one is
    # still in half precision, all are cast to that dtype.
    half = {q.dtype, k.dtype, v.dtype} & _HALF
    if half:
        return v.dtype if v.dtype in half else half.pop(), ()
    if q.dtype != torch.float32:
        return q.dtype, ()
    by_autocast = autocast_dtype(q)
    if by_autocast is not None:
        return by_autocast, ()
    quantized: torch.dtype | None = getattr(getattr(layer, "config", None), "_pre_quantization_dtype", None)
    if quantized is not None:
        return quantized, None
    # Transformers' own flash path casts states by the rule below (integrations/flash_attention.py, get_target_dtype).
    # Elsewhere weights may be stored in another dtype than that of the activations.
    if not casts:
        return v.dtype, ()  # as eager code casts its weights
    for name, weight in layer.named_parameters() if layer is not None else ():
        if weight.dim() >= 2 and weight.dtype in _COMPUTED:
            return weight.dtype, tuple(name.split("."))
    return q.dtype, None
