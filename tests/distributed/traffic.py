"""Counts the bytes that a process sends through torch.distributed.
As a script, run by torchrun, it counts those of the exchange of heads: ``traffic.py OUT``.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks import finish

from fa2patch.documents.boundaries import Boundaries
from fa2patch.kernels import Options
from fa2patch.upstream.split import collectives
from fa2patch.upstream.split.attention import Asked, HeadExchange
from fa2patch.upstream.split.row_part import RowPart


class Traffic:
    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()  # the bytes that this process sends to others, by function
        self.calls: Counter[str] = Counter()  # by function


@contextlib.contextmanager
def traffic() -> Iterator[Traffic]:
    counted, exchange, gather = Traffic(), dist.all_to_all_single, dist.all_gather

    def note(name: str, tensor: torch.Tensor, share: float) -> None:
        counted.calls[name] += 1
        counted.sent[name] += round(tensor.numel() * tensor.element_size() * share)

    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        called = inspect.signature(exchange).bind(*args, **kwargs).arguments
        group, sizes = called.get("group"), called.get("input_split_sizes")
        processes = dist.get_world_size(group)
        stays = 1 / processes if not sizes else sizes[dist.get_rank(group)] / max(1, sum(sizes))  # one piece stays
        note("all_to_all_single", called["input"], 1 - stays)
        return exchange(*args, **kwargs)

    def all_gather(*args: Any, **kwargs: Any) -> Any:
        called = inspect.signature(gather).bind(*args, **kwargs).arguments
        note("all_gather", called["tensor"], len(called["tensor_list"]) - 1)
        return gather(*args, **kwargs)

    with mock.patch.multiple(dist, all_to_all_single=all_to_all_single, all_gather=all_gather):
        yield counted


# Query heads, key heads, and widths of key and value heads.
HEADS = {"all": (8, 8, 16, 16), "grouped": (8, 2, 16, 16), "one key head": (4, 1, 8, 8), "latent": (4, 4, 24, 16)}


def exchanged(part: RowPart, heads: int, keys: int, width: int, value_width: int) -> list[int]:
    # The bytes of one layer's exchange of heads, forward and backward.
    processes = dist.get_world_size()
    shapes = (heads, width), (keys, width), (keys, value_width)
    q, k, v = (torch.randn(2, 6, n, d, requires_grad=True, dtype=torch.bfloat16) for n, d in shapes)
    with traffic() as forward:
        way = HeadExchange(part)
        to = way.there(Asked(q, k, v, Boundaries(torch.zeros(2, dtype=torch.int32), 0), Options()))
        assert to[0].shape == (2, 6 * processes, heads // processes, width)
        output = to[0][..., :value_width] + to[2].repeat_interleave(to[0].shape[2] // to[2].shape[2], 2) + to[1].sum()
        back = way.back(output)
    with traffic() as backward:
        back.sum().backward()
    return [sum(one.sent.values()) for one in (forward, backward)]


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    collectives.groups[group.group_name] = group
    part = RowPart(dist.get_rank(), dist.get_world_size(), None, group.group_name)
    found = {case: [heads, exchanged(part, *heads)] for case, heads in HEADS.items()}
    with traffic() as ids:
        part.gathered([torch.arange(6), torch.arange(6)])
    finish(out, {"cases": found, "ids": sum(ids.sent.values())})


if __name__ == "__main__":
    main(*sys.argv[1:])
