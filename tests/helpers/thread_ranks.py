"""Ranks as threads of one process, whose collectives are real copies: a split is tried without a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch

from fa2patch.upstream import forward
from fa2patch.upstream.split import collectives
from fa2patch.upstream.split.row_part import RowPart

T = TypeVar("T")
LIMIT = 60  # seconds: a rank that waits for another one longer waits without end

_here = threading.local()


class Meeting:
    """What stands in the place of torch.distributed, between so many ranks."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=LIMIT)
        self.table: list[Any] = [None] * ranks
        self.sent = [0] * ranks  # bytes that each rank has sent to others

    def _of_all(self, given: Any) -> list[Any]:
        self.table[_here.rank] = given
        self.barrier.wait()
        found = [*self.table]
        self.barrier.wait()
        return found

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
        for output, found in zip(outputs, self._of_all(tensor)):
            output.copy_(found)  # as gloo, which ends the process where sizes differ

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, received: Sequence[int] | None = None,
        sent: Sequence[int] | None = None, group: Any = None,
    ) -> None:  # fmt: skip
        ranks = len(self.table)
        pieces = given.split([*sent] if sent is not None else [len(given) // ranks] * ranks)
        self.sent[_here.rank] += sum(p.numel() * p.element_size() for at, p in enumerate(pieces) if at != _here.rank)
        found = [each[_here.rank] for each in self._of_all(pieces)]
        assert received is None or [len(piece) for piece in found] == [*received], "a rank sends what none expects"
        output.copy_(torch.cat(found))


def of_ranks(
    ranks: int, work: Callable[[int], T], arranges: Any = None, sends_heads: bool = False
) -> tuple[list[T], Meeting]:
    """What each rank makes, with rows that are split as ``arranges`` says, and where they met."""
    meeting, found, errors = Meeting(ranks), [None] * ranks, []

    def part(model: Any, call: Any) -> RowPart:
        return RowPart(_here.rank, ranks, None, "threads", "an engine", arranges, sends_heads)

    def one(rank: int) -> None:
        _here.rank = rank
        try:
            found[rank] = work(rank)  # type: ignore[call-overload]
        except threading.BrokenBarrierError:
            errors.append(AssertionError(f"rank {rank} waited without end"))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    with (
        mock.patch.object(collectives, "dist", meeting),
        mock.patch.dict(collectives.groups, threads=None),
        mock.patch.object(forward, "row_part", part),
    ):
        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise next((error for error in errors if "without end" not in str(error)), errors[0])
    return found, meeting  # type: ignore[return-value]
