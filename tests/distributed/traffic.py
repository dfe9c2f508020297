"""Counts the bytes that a process sends and receives through torch.distributed.
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
        # bytes by function, without what a process keeps of its own
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()  # by function


@contextlib.contextmanager
def traffic() -> Iterator[Traffic]:
    counted, exchange, gather = Traffic(), dist.all_to_all_single, dist.all_gather

    def size(tensor: torch.Tensor, share: float) -> int:
        return round(tensor.numel() * tensor.element_size() * share)

    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        called = inspect.signature(exchange).bind(*args, **kwargs).arguments
        for way, tensor, sizes in (
            (counted.sent, "input", "input_split_sizes"),
            (counted.received, "output", "output_split_sizes"),
        ):
            way["all_to_all_single"] += size(called[tensor], 1 - stays(called.get("group"), called.get(sizes)))
        counted.calls["all_to_all_single"] += 1
        return exchange(*args, **kwargs)

    def stays(group: Any, sizes: list[int] | None) -> float:
        return sizes[dist.get_rank(group)] / max(1, sum(sizes)) if sizes else 1 / dist.get_world_size(group)

    def all_gather(*args: Any, **kwargs: Any) -> Any:
        called = inspect.signature(gather).bind(*args, **kwargs).arguments
        for way in (counted.sent, counted.received):
            way["all_gather"] += size(called["tensor"], len(called["tensor_list"]) - 1)
        counted.calls["all_gather"] += 1
        return gather(*args, **kwargs)

    with mock.patch.multiple(dist, all_to_all_single=all_to_all_single, all_gather=all_gather):
        yield counted


def heads_of(config: Any) -> dict[str, int]:
    # The heads are named as :func:`bytes_sent_by_a_layer` takes them.
    queries, dim = config.num_attention_heads, getattr(config, "head_dim", None)
    dim = dim or config.hidden_size // queries
    heads = {"heads": queries, "key_heads": config.num_key_value_heads, "head_dim": dim, "value_dim": dim}
    if hasattr(config, "v_head_dim"):  # latent attention has a key for every query head, and narrower values
        wide = config.qk_nope_head_dim + config.qk_rope_head_dim
        heads = {**heads, "key_heads": queries, "head_dim": wide, "value_dim": config.v_head_dim}
    return heads


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
