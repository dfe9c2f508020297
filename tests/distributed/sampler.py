"""Check which rows the ranks of a group get: ``sampler.py torch | accelerate SIZE | trainer SIZE OUT``.

SIZE is ``tp_size`` or ``cp_size``. Run by torchrun in two processes (one group of two) or four (two groups). No model
is run. Every example has its own token id, so a batch shows which examples it holds.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import finish, of_every_rank
from stage import tiny_llama
from torch.utils.data import DataLoader

import fa2patch
from fa2patch.packing import PackedBatchSampler, PackingError

GROUP = 2
BUDGET = 64
EPOCHS = 2
LENGTHS = np.random.default_rng(0).integers(2, 40, 61)
EXAMPLES = [{"input_ids": [index] * int(length)} for index, length in enumerate(LENGTHS)]

Rows = list[list[int]]


def loader(sampler: PackedBatchSampler, **options: Any) -> DataLoader:
    return DataLoader(EXAMPLES, batch_sampler=sampler, collate_fn=fa2patch.DataCollatorWithFlattening(**options))


def groups() -> int:
    return int(os.environ["WORLD_SIZE"]) // GROUP


def rows(batches: Iterable[dict[str, Any]]) -> Rows:
    return [(batch["input_ids"].unique_consecutive()).tolist() for batch in batches]


def expected(epoch: int) -> list[Rows]:
    # The rows are those of a sampler that is told the number of groups and this rank's group.
    found = []
    for rank in range(dist.get_world_size()):
        sampler = PackedBatchSampler(LENGTHS, BUDGET, groups(), rank // GROUP)
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


def judged(epochs: list[Rows]) -> dict[str, bool]:
    of_ranks = [of_every_rank(one) for one in epochs]
    examples = [[example for rank in one[::GROUP] for row in rank for example in row] for one in of_ranks]
    return {
        "the rows of the group": of_ranks == [expected(epoch) for epoch in range(len(epochs))],
        "ranks of a group agree": all(one[::GROUP] == one[1::GROUP] for one in of_ranks),
        "every example once": all(sorted(one) == list(range(len(EXAMPLES))) for one in examples),
        "epochs differ": len(epochs) == EPOCHS and of_ranks[0] != of_ranks[1],
    }


def refused(**options: Any) -> str:
    try:
        PackedBatchSampler(LENGTHS, BUDGET, **options)
    except PackingError as error:
        return error.message
    return ""


def with_torch() -> dict[str, bool]:
    # The sampler reads the ranks from torch.distributed. A state of rank 0 continues an epoch on all ranks.
    dist.init_process_group("gloo")
    sampler, epochs = PackedBatchSampler(LENGTHS, BUDGET, ranks_per_row=GROUP), []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        epochs.append(rows(loader(sampler)))
    state = [sampler.state_dict(steps=3)]
    dist.broadcast_object_list(state)
    resumed = PackedBatchSampler(LENGTHS, BUDGET, ranks_per_row=GROUP)
    resumed.load_state_dict(state[0])
    return {
        **judged(epochs),
        "goes on": rows(loader(resumed)) == epochs[1][3:],
        "a size that does not divide is refused": "groups of 3" in refused(ranks_per_row=3),
    }


def config(size: str) -> Any:
    # accelerate refuses these sizes on a CPU, so its check is told that there are devices.
    from accelerate import Accelerator, ParallelismConfig

    Accelerator.multi_device = True
    return ParallelismConfig(**{size: GROUP}, dp_shard_size=groups())


def with_accelerate(size: str) -> dict[str, bool]:
    from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches

    uneven = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, parallelism_config=config(size), dataloader_config=uneven)
    prepared = accelerator.prepare(loader(PackedBatchSampler(LENGTHS, BUDGET, rank="all")))
    epochs = [rows(prepared) for _ in range(EPOCHS)]
    prepared.iteration = 1
    own = PackedBatchSampler(LENGTHS, BUDGET)
    return {
        **judged(epochs),
        "goes on": rows(skip_first_batches(prepared, 3)) == epochs[1][3:],
        "without prepare": rows(loader(own)) == epochs[0],
        "another size is refused": "rank='all'" in refused(rank="all", ranks_per_row=1),
    }


def with_trainer(size: str) -> dict[str, bool]:
    from transformers import Trainer, TrainingArguments

    seen: list[Any] = []

    class PackedTrainer(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            for name in ("_prepare_tp", "_prepare_cp"):  # the model is whole in every process: see the module
                setattr(self.accelerator, name, lambda *args: args)
            self.accelerator.prepare_model = lambda model, **_: model

        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader(PackedBatchSampler(LENGTHS, BUDGET, rank="all")))

        def training_step(self, model: Any, inputs: dict[str, Any], *_: Any) -> torch.Tensor:
            seen.append(inputs)
            return torch.zeros(())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, ddp_backend="gloo", report_to=[], num_train_epochs=EPOCHS, save_strategy="no",
            logging_strategy="no", disable_tqdm=True, accelerator_config={"even_batches": False}, max_grad_norm=0.0,
            parallelism_config=config(size),
        )  # fmt: skip
        trainer = PackedTrainer(tiny_llama(), arguments, train_dataset=EXAMPLES)
        trainer.train()
    found, steps = rows(seen), len(seen) // EPOCHS
    right = judged([found[:steps], found[steps:]])
    return {**right, "as many steps as rows of a group": trainer.state.global_step == len(seen)}


def everywhere(found: dict[str, bool]) -> dict[str, Any]:
    every = {name: all(rank[name] for rank in of_every_rank(found)) for name in found}
    return {"ok": all(every.values()), "processes": dist.get_world_size(), **every}


def main(mode: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    modes = {"torch": with_torch, "accelerate": with_accelerate, "trainer": with_trainer}
    *options, out = arguments
    finish(out, everywhere(modes[mode](*options)))


if __name__ == "__main__":
    main(*sys.argv[1:])
