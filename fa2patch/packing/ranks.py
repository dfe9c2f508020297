"""Which ranks there are, which of them get the same row, and on how many passes they agree."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ..errors import PackingError
from .budget import positive

ALL_RANKS = "all"


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def replicas_and_rank(
    num_replicas: int | None, rank: int | str | None, ranks_per_row: int | None
) -> tuple[int, int | str]:
    # A replica gets a row of its own in every step. It is one process or, under tensor and context parallelism, the
    # group of processes that compute the row together.
    size = _group_size(ranks_per_row, num_replicas, rank)
    if num_replicas is None or rank is None:
        if is_distributed():
            processes, process = dist.get_world_size(), dist.get_rank()
        else:
            processes, process = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        if processes % size:
            raise PackingError(
                f"ranks_per_row: {processes} processes cannot be divided into groups of {size}. Start a multiple of "
                f"{size} processes, or pass a size that divides {processes}."
            )
        num_replicas = processes // size if num_replicas is None else num_replicas
        rank = process // size if rank is None else rank
    if num_replicas < 1 or (rank != ALL_RANKS and not (isinstance(rank, int) and 0 <= rank < num_replicas)):
        raise PackingError(
            f"rank: expected one from 0 to num_replicas - 1, or 'all', found rank {rank!r} of {num_replicas}."
        )
    return num_replicas, rank


def _group_size(given: int | None, num_replicas: int | None, rank: int | str | None) -> int:
    known, sp_size = _of_accelerate()
    if given is None:
        return known or 1
    given = positive("ranks_per_row", given, "number of processes")
    if given > 1 and (num_replicas is not None or rank not in (None, ALL_RANKS)):
        raise PackingError(
            f"ranks_per_row={given} with num_replicas={num_replicas} and rank={rank!r}: expected one or the other. "
            "num_replicas and rank count groups of processes. Pass the number of groups and this process's group, or "
            "ranks_per_row alone."
        )
    if known not in (None, given) and sp_size > 1:
        raise PackingError(
            f"ranks_per_row={given} with accelerate's sp_size={sp_size}: DeepSpeed's UlyssesSPDataLoaderAdapter "
            "expects a row of its own from each rank, and would compute a row several times. Leave ranks_per_row out."
        )
    if known not in (None, given) and rank == ALL_RANKS:
        raise PackingError(
            f"ranks_per_row={given} with rank='all': accelerate distributes the rows, and its Accelerator gives the "
            f"same row to {known} process{'es' if known != 1 else ''}. Leave ranks_per_row out, and pass "
            "Accelerator(parallelism_config=ParallelismConfig(tp_size=..., cp_size=...))."
        )
    return given


def _of_accelerate() -> tuple[int | None, int]:
    """To how many processes accelerate gives the same row, and its ``sp_size``. None: there is no Accelerator."""
    # Both are read where accelerate's loader reads them: from DeepSpeed's ``autotp_size``, else from the
    # ParallelismConfig (accelerate 1.10 and later).
    module: Any = sys.modules.get("accelerate.state")  # not imported: without an Accelerator there is nothing to read
    if module is None or not module.is_initialized():
        return None, 1
    state = module.AcceleratorState()
    config, plugin = getattr(state, "parallelism_config", None), getattr(state, "deepspeed_plugin", None)
    sp_size = getattr(config, "sp_size", 1)
    settings = plugin.deepspeed_config.get("tensor_parallel", {}) if plugin is not None else {}
    size = settings.get("autotp_size", 1)
    if size <= 1 and sp_size <= 1 and config is not None:
        size = config.tp_size * config.cp_size
    return max(size, 1), sp_size


FAILED = -1  # the number of passes of a rank that refuses its batch


def agreed(number: int, why: str = "") -> int:
    """The number of passes that every rank makes: as many as the one that needs most."""
    # ``number`` is 0 if this rank cannot cut its batch, and FAILED if it refuses it. ``why`` says why.
    met = of_all_ranks((number, why))
    refused = next((why for each, why in met if each == FAILED), None)
    if refused is not None:
        raise PackingError(refused)
    most: int = max(each for each, _ in met)
    whole = next((why for each, why in met if not each), None)
    if most > 1 and whole is not None:
        raise PackingError(
            f"max_tokens: the model is sharded, so that all ranks make as many passes. A rank needs {most} of them, "
            f"and another cannot cut its batch: {whole}. Give every rank packed batches, or leave max_tokens out."
        )
    return most


@contextlib.contextmanager
def refusal_told(every_rank: bool) -> Iterator[None]:
    """Tell a refusal of this rank's batch to the other ranks, which wait for its number of passes."""
    try:
        yield
    except PackingError as error:
        if every_rank:
            agreed(FAILED, error.message)
        raise


def of_all_ranks(value: Any) -> list[Any]:
    if not is_distributed():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
