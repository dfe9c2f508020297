"""The number of replicas of a training run, and the one that this process belongs to.

A replica gets a row of its own in every step. It is one process or, under tensor and context parallelism, the group of
processes that compute the row together.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from ..errors import PackingError

ALL_RANKS = "all"


def place(num_replicas: int | None, rank: int | str | None, ranks_per_row: int | None) -> tuple[int, int | str]:
    """Return the number of replicas and this process's replica, or ``"all"``.

    Args:
        num_replicas, rank: As the user passed them. None means from torch.distributed or torchrun's environment.
        ranks_per_row: Number of processes in a replica. None means from accelerate's ParallelismConfig, else 1.
    """
    size = _size(ranks_per_row, num_replicas, rank)
    if num_replicas is None or rank is None:
        processes, process = _processes()
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


def _size(given: int | None, num_replicas: int | None, rank: int | str | None) -> int:
    """Return the number of processes in a replica."""
    known, sp_size = _of_accelerate()
    if given is None:
        return known or 1
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise PackingError(f"ranks_per_row: expected a positive number of processes, found {given!r}.")
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


def _processes() -> tuple[int, int]:
    """Return the number of processes and this one's rank."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def _of_accelerate() -> tuple[int | None, int]:
    """Return to how many processes accelerate gives the same row, and its ``sp_size``.

    The first is None if this process has no Accelerator. Both are read where accelerate's loader reads them: from
    DeepSpeed's ``autotp_size``, else from the ParallelismConfig (accelerate 1.10 and later).
    """
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
