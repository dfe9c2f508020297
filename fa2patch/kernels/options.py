"""The options of attention besides q, k and v: one table, and the class that holds a layer's values.

A new option is a row of :data:`TABLE`, a field of :class:`Options`, a line in :func:`from_keywords` and one, in the
order of the table, in :func:`described_call`, and what the reference computes with it, eagerly and in its operator.
Another kernel has it if its ``FEATURES`` say so.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Callable

import torch

from .._types import Call
from ..errors import PackingNotIsolated


class Option:
    def __init__(
        self,
        name: str,  # of the field of Options
        feature: str,  # which a kernel must have for it
        keywords: tuple[str, ...] = (),  # by which a layer hands it to its attention function, from 4.48 on
        by_head: bool = False,  # whether it is a tensor [query heads, ...], and not a number
        learned: bool = False,  # whether that tensor may need a gradient
        # its value in the trial of a kernel, of the number of query heads and the longest document; None leaves it out
        trial: Callable[[int, int, torch.Generator], Any] | None = None,
    ) -> None:
        self.name, self.feature, self.keywords = name, feature, keywords
        self.by_head, self.learned, self.trial = by_head, learned, trial


def _sinks(heads: int, longest: int, drawn: torch.Generator) -> torch.Tensor:
    sinks = 2 * torch.randn(heads, generator=drawn)
    sinks[0] += 5  # so that it has a weight beside many keys
    return sinks


def _slopes(heads: int, longest: int, drawn: torch.Generator) -> torch.Tensor:
    # small, so that the keys at a window's edge still have a weight
    return 0.3 * torch.rand(heads, generator=drawn)


def _bias(heads: int, longest: int, drawn: torch.Generator) -> torch.Tensor:
    # no two queries and no two keys have the same, though few numbers are drawn
    drawn_of = torch.randn(2, heads, longest, generator=drawn)
    return drawn_of[0, :, :, None] * drawn_of[1, :, None]


TABLE = (
    Option("window", "window", ("sliding_window",), trial=lambda *_: 9),
    Option("softcap", "softcap", ("softcap",), trial=lambda *_: 2.0),
    # "s_aux" is upstream's name, "sinks" MiMo's
    Option("sinks", "sinks", ("s_aux", "sinks"), by_head=True, learned=True, trial=_sinks),
    Option("alibi_slopes", "alibi", by_head=True, trial=_slopes),
    Option("dropout", "dropout", ("dropout",)),
    Option("bias", "bias", ("position_bias",), by_head=True, learned=True, trial=_bias),
)

FEATURES = (*[row.feature for row in TABLE], "deterministic", "trees", "spans", "pairs")
"""Features beyond plain attention. ``deterministic`` means a deterministic backward and is torch's global switch;
``trees`` means segments that share a parent, such as completions of one prompt; ``spans`` means tokens that see each
other in both directions in a document that is causal otherwise, such as those of a picture; ``pairs`` means queries and
keys of different rows, such as those of a translation and of its source."""

KEYWORDS = ("scaling", "is_causal", *[keyword for row in TABLE for keyword in row.keywords])
"""All keywords by which a layer of Transformers says what it asks of attention."""


@dataclass(frozen=True)
class Options:
    """The options of an attention layer besides q, k and v.

    Attributes:
        scale: factor of the logits, a number; None means ``head_dim ** -0.5``. A tensor (a learned temperature, one
            value for each head) is multiplied by ``[batch, heads, queries, keys]``, and has one value for all keys.
        causal: whether a query sees no later key.
        window: sliding window W in tokens: a query at i sees only keys j with ``|i - j| < W``. None is no window. (As
            in eager attention and in Transformers' flash path since 4.56; up to 4.55 that path saw one token more.)
        softcap: logits become ``softcap * tanh(logits / softcap)``; None leaves them unchanged.
        dropout: probability with which attention weights are dropped.
        sinks: ``[query heads]`` logits of a virtual key without a value (GPT-OSS), or None.
        alibi_slopes: float ``[query heads]``; ``-slope * |i - j|`` is added to the logits. None adds nothing.
        bias: ``[query heads, longest, longest]``, added to the logits of query i and key j of each document, or None.

    In the place of a number, a tensor of one value that needs no gradient is read.

    Raises:
        PackingNotIsolated: ``window`` is less than 1, or an option is no such number.
    """

    scale: Any = None  # what kernels get is a number, which a checker of types could not know
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    by_head: bool = field(default=False, init=False, repr=False)  # whether it has a tensor [query heads, ...]

    def __post_init__(self) -> None:
        # in the usual case no loop: dynamo traces each step, in every layer
        is_one = isinstance(self.window, torch.Tensor) or isinstance(self.softcap, torch.Tensor)
        if is_one or isinstance(self.dropout, torch.Tensor):
            for name in ("window", "softcap", "dropout"):
                object.__setattr__(self, name, one_number(name, getattr(self, name)))
        if self.sinks is not None or self.alibi_slopes is not None:
            object.__setattr__(self, "by_head", True)
            for name in ("sinks", "alibi_slopes"):
                by_head = getattr(self, name)
                if by_head is not None and by_head.dim() != 1:
                    object.__setattr__(self, name, by_head.flatten())  # eager code reshapes them to [1, heads, 1, 1]
        if self.bias is not None and self.bias.dim() == 4:  # [1, heads, longest, longest], as layers make it
            one = self.bias.shape[-2:] == (1, 1)  # the same for all keys, which changes no weight
            object.__setattr__(self, "bias", None if one else self.bias.squeeze(0))
        if self.bias is not None:
            object.__setattr__(self, "by_head", True)
        if self.window is not None and self.window < 1:
            raise PackingNotIsolated(
                f"a sliding window of {self.window} tokens shows a query nothing; None is no window."
            )

    def features(self) -> set[str]:
        values = [(row, getattr(self, row.name)) for row in TABLE]
        return {
            row.feature
            for row, value in values
            if value is not None and (row.by_head or isinstance(value, torch.Tensor) or value)
        }

    def with_heads(self, change: Callable[[torch.Tensor], torch.Tensor], learned: bool = False) -> Options:
        # with what `change` makes of each tensor [query heads, ...]; with `learned`, of those alone that may have a
        # gradient
        held = {row.name: getattr(self, row.name) for row in TABLE if row.by_head and (row.learned or not learned)}
        changed: dict[str, Any] = {name: change(value) for name, value in held.items() if value is not None}
        return replace(self, **changed)

    def require_heads(self, heads: int) -> None:
        """Raise :class:`PackingNotIsolated` if there are not as many sinks, slopes or biases as query heads."""
        for row in TABLE if self.by_head else ():
            by_head = getattr(self, row.name) if row.by_head else None
            if by_head is not None and by_head.shape[0] != heads:
                raise PackingNotIsolated(
                    f"an attention layer's {row.name}: expected one for each of {heads} query heads, found "
                    f"{by_head.shape[0]}. Make them as many, or train padded."
                )


def one_number(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    learned = value.requires_grad and torch.is_grad_enabled()
    if learned or value.numel() != 1:
        found = "that needs a gradient" if learned else "of several values"
        raise PackingNotIsolated(
            f"an attention layer's {name}: expected a number, found a tensor {list(value.shape)} {found}. No kernel "
            "has it. Make it a number, or train padded."
        )
    return value.item()


def times(states: torch.Tensor, factor: torch.Tensor, by: Callable[..., torch.Tensor] = torch.mul) -> torch.Tensor:
    # The factor is meant for logits ``[..., keys]``, and is applied to queries ``[..., head dim]`` in their place. The
    # product is rounded once, to the dtype of the queries.
    if factor.dim() == 0 and factor.device == states.device:  # one of the host is no copy, nor a wait
        factor = factor[None]  # a dimension, so that the product has the better dtype of both
    if factor.dim() == 0 or (factor.shape[-1] == 1 and factor.dim() <= states.dim()):
        product = by(states, factor).to(states.dtype)
        if product.shape == states.shape:
            return product
    raise PackingNotIsolated(
        f"an attention layer's scale: expected a number, or a tensor with one value for each head or query, found "
        f"{list(factor.shape)} for queries {list(states.shape)}. No kernel scales keys apart. Train padded."
    )


def scaled(q: torch.Tensor, options: Options) -> tuple[torch.Tensor, Options]:
    # A scale that is a tensor is multiplied into the queries ``[batch, length, heads, head dim]``, so that its gradient
    # flows.
    return times(q.transpose(1, 2), options.scale).transpose(1, 2), replace(options, scale=1.0)


def from_keywords(said: Call, causal: bool) -> Options:
    # ``said`` are the keywords of a layer's call. They are written out, because a loop would be traced in every layer.
    dropout = said.get("dropout")
    return Options(
        scale=said.get("scaling"),
        causal=causal,
        window=said.get("sliding_window"),
        softcap=said.get("softcap"),
        dropout=0.0 if dropout is None else dropout,
        sinks=said.get("s_aux", said.get("sinks")),
        bias=said.get("position_bias"),
    )


def described_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, trees: bool, spans: bool, pairs: bool = False
) -> tuple[Any, ...]:
    # The fields of Asked, with a bool for each of FEATURES in the place of the names.
    needed = (
        options.window is not None,
        options.softcap is not None,
        options.sinks is not None,
        options.alibi_slopes is not None,
        options.dropout > 0,
        options.bias is not None,
        False,  # ``deterministic``: no tensor says it, and a graph is captured again when it changes
        trees,
        spans,
        pairs,
    )
    gradients = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    heads, dims = (q.shape[-2], k.shape[-2]), (q.shape[-1], v.shape[-1])
    return (q.device.type, q.dtype, *heads, *dims, options.causal, needed, gradients)
