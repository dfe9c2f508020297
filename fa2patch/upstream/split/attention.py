"""Attention of rows that are split: processes exchange heads for tokens, or send the keys that cut documents lack.

Heads (DeepSpeed-Ulysses, arXiv 2309.14509): each process gets all tokens of its part of the heads. It takes every kind
of attention, but only numbers of heads that the processes divide. Keys: queries stay where they are, and a process asks
for the keys of its cut documents alone, which is nothing if documents lie whole in a process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ...documents.boundaries import Boundaries, Shape
from ...documents.needed_keys import Exchange, exchange_of
from ...documents.tensors import ends_of, to_device
from ...errors import PackingNotIsolated
from ...kernels import Options
from . import collectives
from .row_part import RowPart


class Asked(NamedTuple):
    """What a kernel is asked for. States are ``[batch, length, heads, dim]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    boundaries: Boundaries
    options: Options


class StateExchange(Protocol):
    def there(self, asked: Asked) -> Asked:
        """What this process's kernel is asked for, of what its layer asks for its part of every row."""
        ...

    def back(self, output: torch.Tensor) -> torch.Tensor:
        """The layer's output, of the kernel's."""
        ...


def exchanged(
    part: RowPart, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options
) -> tuple[StateExchange, Asked]:
    """What a kernel is asked for in the place of this, and what makes the layer's output of the kernel's."""
    asked = Asked(q, k, v, boundaries, options)
    chosen = _chosen(part, asked)
    return chosen, chosen.there(asked)


def _chosen(part: RowPart, asked: Asked) -> StateExchange:
    shape = asked.q.shape[0], asked.q.shape[1]
    heads, keys = part.why_no_heads(asked.q.shape[2], asked.k.shape[2]), _why_no_keys(asked)
    if heads and keys:
        raise PackingNotIsolated(
            f"{part.engine} splits rows over {part.of} processes, which can exchange heads or keys, and this layer "
            f"takes neither: {heads} and {keys}. Use another number of processes for a row, or train without it."
        )
    by_heads = keys or (part.sends_heads and not heads)
    return HeadExchange(part) if by_heads else KeyExchange(part, shape)


def _why_no_keys(asked: Asked) -> str:
    boundaries, options = asked.boundaries, asked.options
    kinds = {
        "segment_parents": boundaries.parents is not None,
        "tokens that see each other in both directions": boundaries.until is not None,
        "a window that looks both ways": options.window is not None and not options.causal,
        "a bias of positions": options.bias is not None,
        "keys of another row": boundaries.sources is not None,
    }
    found = [name for name, held in kinds.items() if held]
    return f"keys are sent for plain documents, found {' and '.join(found)}" if found else ""


@dataclass(frozen=True)
class HeadExchange:
    """Gives up heads for tokens, and takes them back."""

    part: RowPart

    def there(self, asked: Asked) -> Asked:
        # [batch, length of the part, heads, dim] becomes [batch, length of the row, heads / processes, dim], with at
        # least one head. Key heads fewer than processes are sent to several.
        of, (batch, length) = self.part.of, asked.q.shape[:2]
        widths, pieces = [], []
        for state in asked[:3]:
            heads, dim = state.shape[2:]
            if heads < of:
                state = state.repeat_interleave(of // heads, dim=2)
            widths.append((max(heads // of, 1), dim))
            pieces.append(state.reshape(batch, length, of, -1))
        sent = torch.cat(pieces, dim=-1).permute(2, 0, 1, 3)  # [processes, batch, length, width]
        received = collectives.exchange(sent, self.part.group).permute(1, 0, 2, 3).reshape(batch, of * length, -1)
        if self.part.order is not None:
            received = received.index_select(1, self.part.order.on(received.device, places=True))
        split = torch.split(received, [heads * dim for heads, dim in widths], dim=-1)
        q, k, v = (x.reshape(*x.shape[:2], *width) for x, width in zip(split, widths))
        return Asked(q, k, v, asked.boundaries, asked.options.with_heads(self._own_heads))

    def back(self, output: torch.Tensor) -> torch.Tensor:
        if self.part.order is not None:
            output = output.index_select(1, self.part.order.on(output.device))
        of, (batch, length, heads, dim) = self.part.of, output.shape
        pieces = output.reshape(batch, of, length // of, heads * dim).transpose(0, 1)
        received = collectives.exchange(pieces, self.part.group)  # [processes, batch, length of the part, width]
        return received.permute(1, 2, 0, 3).reshape(batch, length // of, of * heads, dim)

    def _own_heads(self, by_head: torch.Tensor) -> torch.Tensor:
        heads = by_head.shape[0] // self.part.of
        return by_head.narrow(0, self.part.number * heads, heads)


class Plan(NamedTuple):
    """An exchange of keys, on the device."""

    sizes: tuple[list[int], list[int]]
    sends: torch.Tensor
    keys: torch.Tensor
    pieces: Boundaries  # of the queries, with those of their keys as `sources`
    any_sent: bool


@dataclass(frozen=True)
class KeyExchange:
    """Asks for the keys that the documents lack which are cut."""

    part: RowPart
    shape: Shape  # of the part

    def there(self, asked: Asked) -> Asked:
        plan = self._plan(asked)
        q, k, v = asked[:3]
        states = torch.cat([k.flatten(0, 1).flatten(1), v.flatten(0, 1).flatten(1)], 1)
        if plan.any_sent:  # all processes know alike
            sent = states.index_select(0, plan.sends)
            states = torch.cat([states, collectives.send(sent, *plan.sizes, self.part.group)])
        states = states.index_select(0, plan.keys)
        of_keys, of_values = k.shape[2:], v.shape[2:]
        k, v = torch.split(states, [of_keys.numel(), of_values.numel()], 1)
        k, v = k.reshape(1, -1, *of_keys), v.reshape(1, -1, *of_values)
        return Asked(q, k, v, plan.pieces, asked.options)

    def back(self, output: torch.Tensor) -> torch.Tensor:
        return output

    def _plan(self, asked: Asked) -> Plan:
        # once for each batch and window: other layers and a recompute use it again
        boundaries, options = asked.boundaries, asked.options
        kind = KeyExchange, self.part, options.causal, options.window
        if kind not in boundaries.made:
            part, pieces = self.part, self.part.pieces(boundaries, self.shape)
            found = exchange_of(pieces, part.number, part.of, options.causal, options.window)
            boundaries.made[kind] = _on_the_device(found, asked.q.device)
        plan: Plan = boundaries.made[kind]
        return plan


def _on_the_device(found: Exchange, device: torch.device) -> Plan:
    of_keys = Boundaries(ends_of(found.key_lengths, device), max(found.key_lengths), None, found.key_lengths)
    queries = Boundaries(ends_of(found.lengths, device), max(found.lengths), None, found.lengths, sources=of_keys)
    sends, keys = (to_device(torch.from_numpy(tokens), device) for tokens in (found.sends, found.keys))
    return Plan(found.sizes, sends, keys, queries, found.any_sent)
