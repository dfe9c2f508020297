"""The part of every row that this process holds, and what it takes to compute attention with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...documents.parts import Part
from ...errors import PackingNotIsolated
from ...kernels import Options
from . import collectives


def to_heads(states: tuple[torch.Tensor, ...], processes: int, group: str) -> tuple[torch.Tensor, ...]:
    """Give up heads for tokens.

    Args:
        states: queries, keys and values ``[batch, length of the part, heads, dim]``, with a multiple of ``processes``
            heads, or a divisor of it. The latter are sent to several processes.
        processes: the number of processes.
        group: the name of their process group.

    Returns:
        The same ``[batch, length of the row, heads / processes, dim]``, with at least one head.
    """
    batch, length = states[0].shape[:2]
    widths, pieces = [], []
    for state in states:
        heads, dim = state.shape[2:]
        if heads < processes:
            state = state.repeat_interleave(processes // heads, dim=2)
        widths.append((max(heads // processes, 1), dim))
        pieces.append(state.reshape(batch, length, processes, -1))
    sent = torch.cat(pieces, dim=-1).permute(2, 0, 1, 3)  # [processes, batch, length, width]
    received = collectives.exchange(sent, group).permute(1, 0, 2, 3).reshape(batch, processes * length, -1)
    split = torch.split(received, [heads * dim for heads, dim in widths], dim=-1)
    return tuple(x.reshape(*x.shape[:2], *width) for x, width in zip(split, widths))


def to_tokens(states: torch.Tensor, processes: int, group: str) -> torch.Tensor:
    """Give the heads back: ``[batch, length of the row, heads / processes, dim]`` becomes what attention returns,
    ``[batch, length of the part, heads, dim]``.
    """
    batch, length, heads, dim = states.shape
    pieces = states.reshape(batch, processes, length // processes, heads * dim).transpose(0, 1)
    received = collectives.exchange(pieces, group)  # [processes, batch, length of the part, width]
    return received.permute(1, 2, 0, 3).reshape(batch, length // processes, processes * heads, dim)


@dataclass(frozen=True)
class RowPart(Part):
    """The part of every row that this process holds under sequence parallelism (Ulysses).

    Attributes:
        group: the name of the process group that shares the rows.
    """

    group: str = ""

    def gathered(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The whole rows' values of integers ``[batch, length]`` that every process of the group has a part of.

        They are gathered once, in int64.
        """
        own = torch.stack([value.to(torch.int64) for value in values])
        return list(collectives.whole_rows(own, self.group, self.of).unbind())

    def all_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Options]:
        """Queries, keys, values and options of all tokens and this process's heads, from those of its tokens.

        Raises:
            PackingNotIsolated: the heads cannot be shared out.
        """
        heads, keys = q.shape[2], k.shape[2]
        if heads % self.of or (keys % self.of and self.of % keys):
            raise PackingNotIsolated(
                f"sequence parallelism over {self.of} processes shares out heads: expected query heads that "
                f"{self.of} divides, and key heads that {self.of} divides or that divide {self.of}; found {heads} and "
                f"{keys}. Use fewer processes for a row."
            )
        sinks, slopes = (x if x is None else self.own(x, 0) for x in (options.sinks, options.alibi_slopes))
        q, k, v = to_heads((q, k, v), self.of, self.group)
        return q, k, v, replace(options, sinks=sinks, alibi_slopes=slopes)

    def own_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """The attention output of this process's tokens and all heads, from that of all tokens and its heads."""
        return to_tokens(output, self.of, self.group)
