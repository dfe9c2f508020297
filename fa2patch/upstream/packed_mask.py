"""What travels in the attention mask's place: the one argument that every layer of every version is handed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .._compile import compiling
from ..documents.boundaries import Boundaries, positions_of
from ..kernels import Picks, asked_by
from ..kernels.attention import packed_attention
from ..kernels.options import Options
from . import rope

MASK = "attention_mask"
"""The argument of a forward that every version hands to every layer."""

_NOT_A_TENSOR = (
    "torch's {function} was called on a PackedMask: an attention layer was not patched by fa2patch. "
    "Call fa2patch.revert(model), then fa2patch.apply(model) again; if it stays, please report it."
)

_COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(eq=False)
class PackedMask:
    """Boundaries of a packed batch on their way to the attention layers. Not a tensor, on purpose.

    Attributes:
        boundaries: the batch's documents.
        picks: which kernel computes which layer.
        shape: ``(batch, length)``, as a 2-D mask's; models ask for it, to reshape or to slice keys.
        position_ids: the batch's ids, for models that derive positions from the mask (OPT up to 4.45).
        positions: largest position id + 1, in tokens: what a table of rotary embeddings must hold.
        found: what the traits have found in the model.
        window: the sliding window that the model's mask has for these layers, in tokens, if any.
        layer: the attention layer that is computed now, on the seams of models that choose an attention class.
        calls: the attention layers that have been given it, in order (None for each inside a compiled graph).
    """

    boundaries: Boundaries
    picks: Picks
    shape: tuple[int, int]
    positions: int
    position_ids: torch.Tensor | None = field(default=None, repr=False)
    found: Mapping[str, Any] = field(default_factory=dict, repr=False)
    window: int | None = None
    layer: Any = field(default=None, repr=False)
    calls: list[Any] = field(default_factory=list, repr=False)

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> torch.Tensor:
        """``packed_attention`` in the dtype that the layer ``module`` computes in; ``[batch, length, heads, dim]``."""
        self.given(module)
        quirks = self.found.get("registry")
        if quirks is not None and quirks.adjust is not None:
            options = quirks.adjust(module, options)
        if quirks is not None and quirks.queries is not None:
            q = quirks.queries(module, q, positions_of(self.boundaries.cu_seqlens, self.shape))
        if self.window is not None:  # eager attention goes by the mask alone
            options = replace(options, window=self.window)
        dtype = compute_dtype(module, q, k, v)
        q, k, v = (x if x.dtype == dtype else x.to(dtype) for x in (q, k, v))
        kernel = self.picks(module, asked_by(q, k, v, options), q.device)
        return packed_attention(q, k, v, self.boundaries, options, kernel)

    @property
    def rope(self) -> rope.LengthScaled | None:
        """The model's rope scaling that depends on the length, if it has one."""
        known: rope.Found | None = self.found.get(rope.NAME)
        return known.scaling if known is not None else None

    def given(self, module: Any) -> None:
        """Note that a layer has the boundaries: the model counts them."""
        self.calls.append(None if compiling() else module)

    def to(self, *args: Any, **kwargs: Any) -> PackedMask:
        """As ``Tensor.to``, the device only: what moves or casts a layer's inputs moves the boundaries too."""
        device = self.boundaries.cu_seqlens[:0].to(*args, **kwargs).device
        if device == self.device:
            return self
        moved = self.boundaries.cu_seqlens.to(device)
        return replace(self, boundaries=replace(self.boundaries, cu_seqlens=moved))

    @property
    def device(self) -> torch.device:
        return self.boundaries.cu_seqlens.device

    dtype = property(lambda self: torch.get_default_dtype())
    """Asked for the number that stands for minus infinity in it."""

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    ndim = property(dim)

    def _as_it_is(self, *args: Any, **kwargs: Any) -> PackedMask:
        """What models do to a 2-D mask on the way to their layers (4-D, a dtype, 0 and -inf) changes nothing here."""
        return self

    view = unsqueeze = transpose = __rsub__ = __mul__ = __rmul__ = _as_it_is

    def __getattr__(self, name: str) -> Any:
        if name in ("bool", "long", "float"):
            return self._as_it_is
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> PackedMask:
        """Of torch's own functions those with which models fold a causal mask or a window into a mask.

        Whatever an attention layer would do with it (add it to logits, hand it on) is an error.
        """
        mask = find(args)
        if mask is not None and function in (torch.ones_like, torch.tril, torch.Tensor.mul, torch.Tensor.__rsub__):
            return mask
        if mask is not None and function is torch.where and not any(_is_logits(value) for value in args):
            return mask
        raise TypeError(_NOT_A_TENSOR.format(function=getattr(function, "__name__", function)))

    def __contains__(self, value: object) -> bool:
        """4.34 to 4.41 keep a flash model's 2-D mask only if ``0 in mask``."""
        return value == 0

    __iter__ = None

    rnn_state = property(lambda self: self)
    """In the place of xLSTM's state before the first token, of which each layer is handed its own ..."""

    def __bool__(self) -> bool:
        """... and which is no state to write to."""
        return False

    def __getitem__(self, index: Any) -> Any:
        """4.34's flash Mistral asks ``mask[:, -1]`` whether the padding is on the right: it is not."""
        if index == (slice(None), -1):
            return torch.ones(self.shape[0], dtype=torch.int64)
        return self


def find(values: Iterable[Any]) -> PackedMask | None:
    """The packed mask among some arguments."""
    for value in values:
        if isinstance(value, PackedMask):
            return value
    return None


def _is_logits(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 2 and value.dtype != torch.bool


def compute_dtype(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.dtype:
    """One dtype for q, k and v: in half-precision models, float32 norms, LoRA weights or rotary tables upcast some.

    The rule of Transformers' own flash path (integrations/flash_attention.py, get_target_dtype), with one more case
    in front: where some of the three are still in half precision, so will be all.
    """
    dtypes = {q.dtype, k.dtype, v.dtype}
    half = dtypes & {torch.float16, torch.bfloat16}
    if half:
        return v.dtype if v.dtype in half else half.pop()
    if q.dtype != torch.float32:
        return q.dtype
    device = q.device.type
    if _autocast_enabled(device):
        return _autocast_dtype(device)
    quantized: torch.dtype | None = getattr(getattr(module, "config", None), "_pre_quantization_dtype", None)
    if quantized is not None:
        return quantized
    weights: Iterable[torch.Tensor] = module.parameters() if module is not None else ()
    return next((weight.dtype for weight in weights if weight.dim() >= 2 and weight.dtype in _COMPUTED), q.dtype)


def _autocast_enabled(device: str) -> bool:
    try:
        return torch.is_autocast_enabled(device)
    except TypeError:  # torch before 2.4 knows only the GPU's
        return torch.is_autocast_cpu_enabled() if device == "cpu" else torch.is_autocast_enabled()


def _autocast_dtype(device: str) -> torch.dtype:
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(device)
    return torch.get_autocast_cpu_dtype() if device == "cpu" else torch.get_autocast_gpu_dtype()
