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

    Raises:
        PackingError: An option is invalid, or options contradict each other or accelerate.
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
    config = _parallelism_config()
    known = 1
    if config is not None and not _has_ulysses(config):
        known = config.tp_size * config.cp_size
    if given is None:
        return known
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise PackingError(f"ranks_per_row: expected a positive number of processes, found {given!r}.")
    if given > 1 and (num_replicas is not None or rank not in (None, ALL_RANKS)):
        raise PackingError(
            f"ranks_per_row={given} with num_replicas={num_replicas} and rank={rank!r}: expected one or the other. "
            "num_replicas and rank count groups of processes. Pass the number of groups and this process's group, or "
            "ranks_per_row alone."
        )
    if given > 1 and config is not None and _has_ulysses(config):
        raise PackingError(
            f"ranks_per_row={given} with accelerate's sp_size={config.sp_size}: DeepSpeed's "
            "UlyssesSPDataLoaderAdapter expects a row of its own from each rank, and would compute a row several "
            "times. Leave ranks_per_row out."
        )
    if given != known and rank == ALL_RANKS and _accelerate() is not None:
        raise PackingError(
            f"ranks_per_row={given} with rank='all': accelerate distributes the rows, and its Accelerator gives the "
            f"same row to {known} process{'es' * (known > 1)}. Leave ranks_per_row out, and pass "
            "Accelerator(parallelism_config=ParallelismConfig(tp_size=..., cp_size=...))."
        )
    return given


def _processes() -> tuple[int, int]:
    """Return the number of processes and this one's rank."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def _accelerate() -> Any:
    """Return the state of the Accelerator that this process has made, or None."""
    module: Any = sys.modules.get("accelerate.state")  # not imported here: without an Accelerator nothing is to be read
    return module.AcceleratorState() if module is not None and module.is_initialized() else None


def _parallelism_config() -> Any:
    """Return the ParallelismConfig (accelerate 1.10 and later) of the Accelerator, or None."""
    return getattr(_accelerate(), "parallelism_config", None)


def _has_ulysses(config: Any) -> bool:
    return getattr(config, "sp_size", 1) > 1  # since accelerate 1.12
