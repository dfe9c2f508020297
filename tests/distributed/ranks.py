"""What the scripts that torchrun starts share: what every rank found, whole weights, and how a script ends."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def examples(step: int, rank: int) -> list[dict[str, list[int]]]:
    # The ranks swap the lengths in every step: equal totals would hide a wrong weight.
    drawn = torch.Generator().manual_seed(10 * step + rank)
    lengths = (5, 40, 1, 17, 23) if (step + rank) % 2 == 0 else (31, 2, 9, 60, 12)
    return [{"input_ids": torch.randint(2, 512, (length,), generator=drawn).tolist()} for length in lengths]


def of_every_rank(found: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return every


@contextlib.contextmanager
def whole_weights(model: Any) -> Iterator[None]:
    # Every rank gathers all weights of a ZeRO-3 model within the block.
    if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        yield


def finish(out: str, finding: dict[str, Any]) -> None:
    """Write the finding from the first process, and end the process."""
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(finding))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # under load, shutting down gloo's threads sometimes aborts the process
