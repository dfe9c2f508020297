"""Check which rows DeepSpeed's Ulysses computes: ``sampler_ulysses.py OUT``, run by torchrun in two or four processes.

accelerate wraps the loader into DeepSpeed's adapter (``sp_size=2``). The parts that the ranks get are put together
again, and must be the sampler's rows, each example once.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, ParallelismConfig, PartialState
from accelerate.utils import DeepSpeedSequenceParallelConfig
from ranks import finish, of_every_rank
from sampler import BUDGET, EPOCHS, EXAMPLES, GROUP, LENGTHS, everywhere, groups, loader, refused, rows
from stage import tiny_llama

from fa2patch.packing import PackedBatchSampler

PADDING = len(EXAMPLES)  # a token id that no example has


def with_adapter() -> dict[str, bool]:
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")  # without a backend it takes a CPU's process for the only one
    deepspeed.comm.all_gather = _gathered_like_nccl
    settings = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    attention = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa", sp_seq_length_is_variable=True)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings),
        parallelism_config=ParallelismConfig(sp_size=GROUP, dp_shard_size=groups(), sp_handler=attention),
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )  # fmt: skip
    model = tiny_llama()
    sampler = PackedBatchSampler(LENGTHS, BUDGET, rank="all")
    made = loader(sampler, pad_to_multiple_of=GROUP, pad_token_id=PADDING, return_seq_idx=True)
    _, _, adapter = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), made)
    epochs = [list(adapter) for _ in range(EPOCHS)]
    found: dict[str, bool] = {
        "lengths are an error, as docs/packing.md says": False,
        "in the adapter": type(adapter).__name__ == "UlyssesSPDataLoaderAdapter",
        "as many batches as it says": all(len(one) == len(adapter) for one in epochs),
        "another size is refused": "sp_size=2" in refused(ranks_per_row=GROUP),
    }
    for epoch, batches in enumerate(epochs):
        sampler.set_epoch(epoch)
        found[f"rows of epoch {epoch}"] = _whole(batches) == [_shifted(row) for row in made]
    with_lengths = loader(sampler, pad_to_multiple_of=GROUP, return_flash_attn_kwargs=True)
    again = type(adapter)(with_lengths, adapter.sp_rank, adapter.sp_group, GROUP, adapter.device)
    try:
        next(again)
    except IndexError:
        found["lengths are an error, as docs/packing.md says"] = True
    taken = sorted(example for row in rows(made) for example in row if example != PADDING)
    return {**found, "every example once": taken == list(range(len(EXAMPLES)))}


def _gathered_like_nccl(into: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
    # Gathers tensors of different sizes too, as NCCL does and gloo does not.
    if all(one.shape == tensor.shape for one in into):
        dist.all_gather(into, tensor, group=group)
        return
    found: list[Any] = [None] * len(into)
    dist.all_gather_object(found, tensor, group=group)
    for one, of_rank in zip(into, found):
        one.copy_(of_rank.reshape(one.shape))


def _whole(batches: list[dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
    # The rows of all groups come in the sampler's order of steps and ranks.
    found = []
    of_ranks = of_every_rank(batches)
    for step in range(0, len(batches), GROUP):
        for first in range(0, len(of_ranks), GROUP):
            for turn in range(step, step + GROUP):
                parts = [of_ranks[rank][turn] for rank in range(first, first + GROUP)]
                found.append({name: torch.cat([part[name] for part in parts], dim=1).tolist() for name in parts[0]})
    return found


def _shifted(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    # The adapter shifts the labels in this way.
    labels = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)
    return {**{name: value.tolist() for name, value in batch.items()}, "shift_labels": labels[:, 1:].tolist()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    finish(sys.argv[1], everywhere(with_adapter()))
