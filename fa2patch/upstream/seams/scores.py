"""Stand-ins for the tensors of an attention formula: its scores, and the mask that is added to them.

An attention layer without a seam of its own writes the formula out: ``matmul(q, k.T)``, a factor, ``+ mask``,
``softmax``, dropout and ``matmul(weights, v)``. :class:`Scores` stands for the scores and the weights. It is as small
as ``q`` and ``k``, notes what the layer does with it, and computes packed attention when it is multiplied by the
values. A layer that calls ``scaled_dot_product_attention`` hands its mask to it, and :class:`FormulaMask` answers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.nn import functional

from ..._types import Args, Call, Function
from ...errors import PackingNotIsolated
from ...kernels import Options
from ..packed_mask import PackedMask

_SOFTMAX = (functional.softmax, torch.softmax, torch.Tensor.softmax)
_MATMUL = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class FormulaMask(PackedMask):
    """The packed mask of a layer that computes attention by itself. ``layer`` is set."""

    @classmethod
    def of(cls, mask: PackedMask, layer: torch.nn.Module) -> FormulaMask:
        """The packed mask, for this layer."""
        given = {each.name: getattr(mask, each.name) for each in fields(PackedMask)}
        return cls(**{**given, "layer": layer})

    def attended(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, dropout: float
    ) -> torch.Tensor:
        """Compute packed attention for ``[batch, heads, length, dim]`` in the same layout."""
        options = Options(scale=scale, causal=is_causal(self.layer), dropout=dropout)
        q, k, v = (states.transpose(1, 2) for states in (q, k, v))
        return self.attend(self.layer, q, k, v, options).transpose(1, 2)

    def expand_as(self, other: object) -> FormulaMask:
        """Return the mask itself. DistilBERT (4.34 to 4.56) compares its mask with 0 and expands it to its scores."""
        return self

    def __eq__(self, other: object) -> Any:
        """Return the mask itself for a number, as a comparison of a tensor with it gives a mask."""
        return self if isinstance(other, (int, float)) else self is other

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Function, types: object, args: Args = (), kwargs: Any = None) -> Any:
        """Answer ``scaled_dot_product_attention``; the rest is as for every packed mask."""
        if function is not functional.scaled_dot_product_attention:
            return super().__torch_function__(function, types, args, kwargs)
        given = {**dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args)), **(kwargs or {})}
        q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
        return mask.attended(q, k, v, given.get("scale"), given.get("dropout_p", 0.0))


def is_causal(layer: Any) -> bool:
    """Whether the queries of such a layer see no later keys. A layer that does not say so is an encoder's.

    BioGPT's says only that it is a decoder's (up to 4.47): its ``is_causal`` is False, and nothing reads it.
    """
    return bool(getattr(layer, "is_causal", False) or getattr(layer, "is_decoder", False))


def matmul(first: Any, second: Any) -> Any:
    """``torch.matmul`` for an attention layer: the product of queries and keys is not computed."""
    if isinstance(first, Scores):
        return first.times(second)
    return Scores(first, second.transpose(-1, -2))


@dataclass(eq=False)
class Scores:
    """The scores of an attention layer, or its weights, ``[batch, heads, length, length]``, which are never computed.

    Attributes:
        q: the queries ``[batch, heads, length, dim]``.
        k: the keys ``[batch, heads, length, dim]``.
        scale: the factor that the scores were multiplied by.
        mask: the packed mask that was added, or None.
        weights: whether the softmax was taken.
        dropout: the probability with which weights are dropped.
    """

    q: torch.Tensor
    k: torch.Tensor
    scale: float = 1.0
    mask: FormulaMask | None = None
    weights: bool = False
    dropout: float = 0.0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the queries."""
        return self.q.dtype

    def __mul__(self, factor: object) -> Scores:
        if not isinstance(factor, (int, float)) or self.weights:
            raise _unsaid("multiplied by something other than a number")
        return replace(self, scale=self.scale * factor)

    def __truediv__(self, divisor: object) -> Scores:
        return self * (1 / divisor if isinstance(divisor, (int, float)) else divisor)

    def __add__(self, mask: object) -> Scores:
        if not isinstance(mask, FormulaMask) or self.weights:
            raise _unsaid("added to something other than the mask")
        return replace(self, mask=mask)

    def masked_fill(self, mask: object, value: object) -> Scores:
        """Note the mask."""
        return self + mask

    def as_it_is(self, *args: object) -> Scores:
        """Return the scores themselves, where a tensor would be cast."""
        return self

    to = type_as = float = as_it_is

    def times(self, values: torch.Tensor) -> torch.Tensor:
        """Compute attention: the weights times the values ``[batch, heads, length, dim]``."""
        if self.mask is None or not self.weights:
            raise _unsaid("multiplied by values before they had a mask and a softmax")
        return self.mask.attended(self.q, self.k, values, self.scale, self.dropout)

    @classmethod
    def __torch_function__(cls, function: Function, types: object, args: Args = (), kwargs: Call | None = None) -> Any:
        """Note a softmax or a dropout; multiply the weights by the values."""
        scores, rest, kwargs = args[0], args[1:], kwargs or {}
        if function in _SOFTMAX and not scores.weights:
            return replace(scores, weights=True)
        if function is functional.dropout and scores.weights:
            given = {**dict(zip(("p", "training"), rest)), **kwargs}
            return replace(scores, dropout=given["p"] if given.get("training", True) else 0.0)
        if function in _MATMUL and isinstance(scores, Scores):
            return scores.times(*rest)
        raise _unsaid(f"handed to torch's {getattr(function, '__name__', function)}")

    def __getattr__(self, name: str) -> Any:
        raise _unsaid(f"asked for {name!r}")


def _unsaid(what: str) -> PackingNotIsolated:
    return PackingNotIsolated(
        f"an attention layer computes its scores by itself, and they were {what}: packed attention has no way to say "
        "that. If the call has a head_mask, leave it out. Otherwise, please report the model, and train it padded."
    )
