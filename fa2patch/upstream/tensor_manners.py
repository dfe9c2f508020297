"""What the packed mask does to look like a tensor ``[batch, length]`` to Transformers' code.

Upstream's code treats the packed mask like a 2-D mask on its way from a model's forward to the attention layers. Each
comment names the versions whose models ask for a manner; other versions may ask for it too. Whatever is not here raises
an error, so that an attention layer that is not patched fails.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch

from .._types import Args, Function
from ..documents.boundaries import Boundaries

_NOT_A_TENSOR = (
    "torch's {function} was called on a PackedMask: an attention layer was not patched by fa2patch. "
    "Call fa2patch.revert(model), then fa2patch.apply(model) again; if it stays, please report it."
)

Mask = TypeVar("Mask", bound="TensorManners")


class TensorManners:
    """Base class of the packed mask, which is a dataclass.

    Attributes:
        boundaries: the batch's boundaries.
        shape: ``(batch, length)``. Models reshape the mask or slice keys by it: OPT (4.36 to 4.48), GPTBigCode (4.36 to
            4.52), Gemma 2, Gemma 3 and Cohere 2 (4.43 to 4.52), GPT-2 (4.52 on).
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    boundaries: Boundaries
    shape: tuple[int, int]

    # Where it is, and what it holds

    def to(self: Mask, *args: Any, **kwargs: Any) -> Mask:
        """Move the boundaries like ``Tensor.to``, but ignore a dtype.

        Models cast the mask: Falcon (4.34), GPT-2, GPT-J and GPT-NeoX (4.36 to 4.48), GPTBigCode (4.36 to 4.52),
        Gemma 3 and Qwen2-VL (4.52), and ``get_extended_attention_mask`` (every version). Accelerate moves the inputs of
        each layer.
        """
        device = self.boundaries.cu_seqlens[:0].to(*args, **kwargs).device
        if device == self.device:
            return self
        return replace(self, boundaries=self.boundaries.to(device))

    @property
    def device(self) -> torch.device:
        """The device of ``cu_seqlens``. The models that use :meth:`to` ask for it."""
        return self.boundaries.cu_seqlens.device

    @property
    def dtype(self) -> torch.dtype:
        """The default dtype. Gemma 2 and Gemma 3 (4.52) look up its smallest number, which hides a token."""
        return torch.get_default_dtype()

    # Its shape

    def size(self, dim: int | None = None) -> tuple[int, ...] | int:
        """Return the size like ``Tensor.size`` of a 2-D mask. No model of a release asks for it; remote code may."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return 2, as a 2-D mask does. Gemma 2 (4.48) and ``get_extended_attention_mask`` (every version) ask."""
        return len(self.shape)

    ndim = property(dim)  # GPT-2 (4.52 on)

    # What turns a 2-D mask into a 4-D one: reshape it, cast it, map it to 0 and -inf

    def _as_it_is(self: Mask, *args: Any, **kwargs: Any) -> Mask:
        """Return the packed mask itself."""
        return self

    view = _as_it_is  # GPT-J and GPT-NeoX (4.36 to 4.43), GPTBigCode (4.36 to 4.52), GPT-2 (4.36 on)
    unsqueeze = transpose = _as_it_is  # GPTBigCode (4.36 to 4.52)
    __rsub__ = __mul__ = _as_it_is  # GPT-2, GPT-J, GPT-NeoX (4.36 to 4.48), get_extended_attention_mask (every version)
    __rmul__ = _as_it_is  # the same product in another order: remote code

    def __getattr__(self, name: str) -> Any:
        """Let the mask be cast by ``bool()``, as GPTBigCode does (4.36 to 4.52), and by ``long()`` and ``float()``.

        There are no methods of these names, because they would hide the types ``bool`` and ``float`` in the class.
        """
        if name in ("bool", "long", "float"):
            return self._as_it_is
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(
        cls: type[Mask], function: Function, types: object, args: Args = (), kwargs: object = None
    ) -> Mask:
        """Allow the torch functions with which models add a causal mask or a window to a mask.

        Any other function, such as one that an unpatched attention layer calls on its mask, raises TypeError.
        """
        known = function in (
            torch.ones_like,  # Gemma 2, Gemma 3 and Cohere 2 (4.43 to 4.52) make a window
            torch.tril,  # the same
            torch.Tensor.mul,  # GPTBigCode (4.36 to 4.52) multiplies its causal mask by the mask
            torch.Tensor.__rsub__,  # remote code subtracts a tensor from the mask
        )
        # torch.where: the four models above; on logits it is called by an attention layer that was not patched
        if known or (function is torch.where and not any(_is_logits(value) for value in args)):
            for value in args:
                if isinstance(value, cls):
                    return value
        raise TypeError(_NOT_A_TENSOR.format(function=getattr(function, "__name__", function)))

    # Its values

    def __contains__(self, value: object) -> bool:
        """Return True for 0. Most flash models of 4.34 to 4.42, GPTBigCode to 4.52, keep a mask only if it has a 0."""
        return value == 0

    __iter__ = None  # else Python would iterate through __getitem__, without end

    def __bool__(self) -> bool:
        """Return False, so that xLSTM (4.55 on; ``if cache_params:``) writes no states back."""
        return False

    def __getitem__(self, index: object) -> Any:
        """Return ones for ``mask[:, -1]``, by which 4.34's flash Mistral tells the padding side; else the mask.

        These index the mask too: GPT-2, GPT-J and GPT-NeoX (4.36 to 4.48) and ``get_extended_attention_mask`` (every
        version) for a 4-D mask, Gemma 2, Gemma 3 and Cohere 2 (4.48 to 4.52) and GPT-Neo (4.46 on) for keys, and xLSTM
        (4.55 on) for a layer's state.
        """
        if index == (slice(None), -1):
            return torch.ones(self.shape[0], dtype=torch.int64)
        return self

    @property
    def rnn_state(self: Mask) -> Mask:
        """The mask itself, so that xLSTM (4.55 on) hands it to each layer as ``cache_params.rnn_state[layer]``."""
        return self


def _is_logits(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 2 and value.dtype != torch.bool
