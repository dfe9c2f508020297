"""Stand-ins for the tensors of an attention formula: its scores, and the mask that is added to them.

``Scores`` is as small as the queries and the keys, notes what the layer does with it, and computes packed attention
when it is multiplied by the values. ``FormulaMask`` answers layers that call ``scaled_dot_product_attention`` with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..._torch import SDPA, compiling
from ..._types import Args, Call, Function
from ...errors import PackingNotIsolated
from ...kernels import Options
from ...kernels.options import one_number, times
from ..packed_mask import PackedMask

_SOFTMAX = (functional.softmax, torch.softmax, torch.Tensor.softmax)
_MATMUL = (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm)
_SUMS = (torch.add, torch.Tensor.add, torch.Tensor.__add__)
_PRODUCTS = (torch.mul, torch.multiply, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__)
# Qwen2-VL (4.45 to 4.52) looks for infinite scores in float16. A kernel makes none.
_AS_THEY_ARE = (torch.isinf, torch.zeros_like)

# Scores below this number are hidden ones. GPT-2 and others write the smallest number, some -1e4 or -1e9.
HIDDEN = -1e3

_ABOVE = (torch.max, torch.maximum)  # OPT (up to 4.51) keeps scores above the smallest number


@dataclass(eq=False)
class FormulaMask(PackedMask):
    """The packed mask of a layer whose own formula is computed."""

    causal: bool = True
    bias: torch.Tensor | None = None  # [1, heads, longest, longest], which was added to it
    casts: bool = False  # as for PackedMask.attend

    @classmethod
    def of(
        cls, mask: PackedMask, layer: torch.nn.Module | None, causal: bool, window: int | None, casts: bool = False
    ) -> FormulaMask:
        # A window of the mask's own goes before the layer's.
        known = {**vars(mask), "layer": layer, "causal": causal, "casts": casts}
        return cls(**{**known, "window": mask.window_of(layer, window)})

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        # q, k and v are ``[batch, heads, length, dim]``, and the output is a view in that layout.
        said = Options(causal=self.causal, bias=self.bias, **options)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return self.attend(self.layer, q, k, v, said, casts=self.casts).transpose(1, 2)

    def size(self, dim: int | None = None) -> tuple[int, ...] | int:
        # Up to 4.39, eager code compares it with the size of a 4-D mask.
        size = (self.shape[0], 1, self.shape[1], self.keys_of or self.shape[1])
        return size if dim is None else size[dim]

    expand_as = PackedMask._as_it_is  # DistilBERT (4.34 to 4.56) compares its mask with 0 and expands it to its scores

    def __eq__(self, other: object) -> Any:
        # A comparison of a tensor with a number gives a mask.
        return self if isinstance(other, (int, float)) else self is other

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Function, types: object, args: Args = (), kwargs: Any = None) -> Any:
        if function is SDPA:
            given = {**dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args)), **(kwargs or {})}
            q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
            if mask.part is not None:  # torch's context_parallel has made DTensors of them
                q, k, v = (getattr(states, "to_local", lambda states=states: states)() for states in (q, k, v))
            return mask.attended(q, k, v, scale=given.get("scale"), dropout=given.get("dropout_p", 0.0))
        if function in _SUMS and isinstance(args[0], torch.Tensor) and isinstance(args[1], cls):
            return replace(args[1], bias=args[0])
        if any(isinstance(value, Scores) for value in args):
            return Scores.__torch_function__(function, types, args, kwargs)
        return super().__torch_function__(function, types, args, kwargs)


@dataclass(eq=False, repr=False)
class Scores:
    """The scores of an attention layer, or its weights, which are never computed."""

    # ``[batch, heads, length, dim]``; ``[batch * heads, length, dim]``; or ``[batch, length * heads, dim]`` where all
    # heads share their keys (GPTBigCode)
    q: torch.Tensor
    k: torch.Tensor  # as ``q`` or with fewer heads
    shape: tuple[int, ...]  # that the layer sees
    scale: float = 1.0
    softcap: float | None = None  # 0 if it will be the next factor
    mask: FormulaMask | None = None  # that was added
    weights: bool = False  # whether the softmax was taken
    dropout: float = 0.0

    device = torch.device("cpu")  # numbers that a layer makes for its scores stay on the host

    def _with(self, **changes: Any) -> Scores:
        scores = object.__new__(Scores)
        vars(scores).update(vars(self), **changes)
        return scores

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def view(self, *shape: Any) -> Scores:
        # A layer takes heads out of the batch, or puts them there.
        return self._with(shape=tuple(shape[0]) if len(shape) == 1 else shape)

    reshape = view

    def __mul__(self, factor: Any) -> Scores:
        if isinstance(factor, torch.Tensor) and not self.weights:
            if self.softcap is None:
                return self._times(factor)
            factor = one_number("softcap", factor)
        if not isinstance(factor, (int, float)) or self.weights:
            raise _unsaid("multiplied by something other than a number")
        softcap = None if self.softcap is None else (self.softcap or 1) * factor
        return self._with(softcap=softcap, scale=self.scale * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Scores:
        if isinstance(divisor, torch.Tensor) and self.softcap is None and not self.weights:
            return self._times(divisor, torch.true_divide)  # GPT-2 and GPT-J; to make it a number would be a read
        return self * (1 / divisor if isinstance(divisor, (int, float, torch.Tensor)) else divisor)

    def _times(self, factor: torch.Tensor, by: Function = torch.mul) -> Scores:
        # For the factor, the queries get the shape that the scores have for the layer.
        queries = self.q.reshape(*self.shape[:-1], self.q.shape[-1])
        return self._with(q=times(queries, factor, by).reshape(self.q.shape))

    def __add__(self, mask: object) -> Scores:
        if not isinstance(mask, FormulaMask) or self.weights:
            raise _unsaid("added to something other than the mask")
        return self._with(mask=mask)

    def masked_fill(self, mask: object, value: object) -> Scores:
        if not _hides(value):
            raise _unsaid(f"filled with {value}")
        return self + mask

    def as_it_is(self, *args: object) -> Scores:
        # A tensor would be cast.
        return self

    to = type = type_as = float = as_it_is

    def softmax(self, dim: int | None = -1, *args: object, **kwargs: object) -> Scores:
        if dim not in (-1, len(self.shape) - 1) or self.weights:
            raise _unsaid("given a softmax along something other than the keys")
        return self._with(weights=True)

    def __matmul__(self, values: torch.Tensor) -> torch.Tensor:
        # The values have as many dimensions as the output.
        if self.mask is None or not self.weights or self.softcap == 0:
            raise _unsaid("multiplied by values before they had a mask and a softmax")
        given = {"scale": self.scale, "softcap": self.softcap, "dropout": self.dropout}
        if self.q.dim() == 4 and values.dim() == 4:
            return self.mask.attended(self.q, self.k, values, **given)
        batch, length = self.mask.shape
        shared = self.q.dim() == 3 and self.q.shape[1] != length
        q = self.q.view(batch, length, -1, self.q.shape[-1]).transpose(1, 2) if shared else _by_head(self.q, batch)
        output = self.mask.attended(q, _by_head(self.k, batch), _by_head(values, batch), **given)
        if values.dim() == 4:
            return output
        return output.transpose(1, 2).flatten(1, 2) if shared else output.flatten(0, 1)

    @classmethod
    def __torch_function__(cls, function: Function, types: object, args: Args = (), kwargs: Call | None = None) -> Any:
        kwargs = kwargs or {}
        scores = args[0] if isinstance(args[0], Scores) else next((x for x in args if isinstance(x, Scores)), None)
        if scores is None:  # in a list: LUKE's scores of words and entities side by side
            raise _unsaid(f"handed to torch's {getattr(function, '__name__', function)} in a list")
        if function in _SOFTMAX:
            return scores.softmax(*args[1:], **kwargs)
        if function is functional.dropout and scores.weights:
            given = {**dict(zip(("p", "training"), args[1:])), **kwargs}
            return scores._with(dropout=given["p"] if given.get("training", True) else 0.0)
        if function in _PRODUCTS:  # of a tensor and scores
            return scores * (args[1] if args[0] is scores else args[0])
        if function in _MATMUL and args[0] is scores:
            return scores @ args[1]
        if function is torch.tanh and scores.softcap is None and scores.mask is None:
            return scores._with(softcap=0)
        if function in _AS_THEY_ARE:
            return scores
        if scores.weights:
            raise _unsaid(f"handed to torch's {getattr(function, '__name__', function)} after the softmax")
        if function is torch.where and args[1] is scores and _hides(args[2]):
            return scores + args[0]
        if function is torch.masked_fill and args[0] is scores and _hides(args[2]):
            return scores + args[1]
        if function in _ABOVE and args[0] is scores and _hides(args[1]):
            return scores
        raise _unsaid(f"handed to torch's {getattr(function, '__name__', function)}")

    def __getattr__(self, name: str) -> Any:
        raise _unsaid(f"asked for {name!r}")


def _hides(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # a graph knows no value, and reading it from a device would be a wait
        unread = compiling() or value.device.type != "cpu"
        return value.dim() == 0 and (unread or bool(value < HIDDEN))
    return isinstance(value, (int, float)) and value < HIDDEN


def _by_head(states: torch.Tensor, batch: int) -> torch.Tensor:
    # ``[batch, heads, length, dim]`` of states whose heads may be in the batch
    return states if states.dim() == 4 else states.view(batch, -1, *states.shape[1:])


def _unsaid(what: str) -> PackingNotIsolated:
    return PackingNotIsolated(
        f"an attention layer computes its scores by itself, and they were {what}: packed attention has no way to say "
        "that. If the call has a head_mask, leave it out. Otherwise, please report the model, and train it padded."
    )


def product(first: Any, second: Any) -> Any:
    if isinstance(first, Scores):
        return first.__matmul__(second)  # of the operator, dynamo swaps the operands of __torch_function__
    return Scores(first, second.transpose(-1, -2), (*first.shape[:-1], second.shape[-1]))


class Products(TorchFunctionMode):
    """Makes scores of the first product that a formula writes as ``queries @ keys``, which reads no global (Falcon)."""

    made = False

    def __torch_function__(self, function: Function, types: object, args: Args = (), kwargs: Call | None = None) -> Any:
        # a product with a weight has two dimensions; a later product is one of the kernel's
        if self.made or function not in _MATMUL or args[1].dim() < 3:
            return function(*args, **(kwargs or {}))
        self.made = True
        return product(*args)
