"""Counts the bytes that a process sends through torch.distributed."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


class Traffic:
    """The collective calls of a process while it is counted.

    Attributes:
        sent: the bytes that this process sends to others, by function.
        calls: the number of calls, by function.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()


@contextlib.contextmanager
def traffic() -> Iterator[Traffic]:
    """Count the calls of ``all_to_all_single`` and ``all_gather`` inside the context."""
    counted, exchange, gather = Traffic(), dist.all_to_all_single, dist.all_gather

    def note(name: str, tensor: torch.Tensor, share: float) -> None:
        counted.calls[name] += 1
        counted.sent[name] += round(tensor.numel() * tensor.element_size() * share)

    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        called = inspect.signature(exchange).bind(*args, **kwargs).arguments
        processes = dist.get_world_size(called.get("group"))
        note("all_to_all_single", called["input"], (processes - 1) / processes)  # one piece stays
        return exchange(*args, **kwargs)

    def all_gather(*args: Any, **kwargs: Any) -> Any:
        called = inspect.signature(gather).bind(*args, **kwargs).arguments
        note("all_gather", called["tensor"], len(called["tensor_list"]) - 1)
        return gather(*args, **kwargs)

    with mock.patch.multiple(dist, all_to_all_single=all_to_all_single, all_gather=all_gather):
        yield counted
