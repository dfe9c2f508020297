"""The exchange of Ulysses: tokens of one part and all heads, for all tokens and a part of the heads, and back.

The method is that of DeepSpeed-Ulysses (arXiv 2309.14509): one all-to-all before attention and one behind it. Queries,
keys and values share the first one.
"""

from __future__ import annotations

import torch

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
