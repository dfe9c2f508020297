"""Check that ranks and workers together read every example of a stream once: ``streams.py torch | trainer OUT``.

Run by torchrun. Every example has its own token id, so a row shows which examples it holds.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from ranks import finish, of_every_rank
from stage import tiny_llama
from torch.utils.data import DataLoader

import fa2patch
from fa2patch.packing import PackingError, stream

BUDGET = 64
EXAMPLES = [{"input_ids": [number + 2] * (number * 7 % 40 + 1)} for number in range(120)]
COLLATE = fa2patch.DataCollatorWithFlattening()


def ids(batches: Iterable[dict[str, Any]]) -> list[int]:
    return [one for batch in batches for one in batch["input_ids"].unique_consecutive().tolist()]


def once(own: list[int], repeated: int = 0) -> bool:
    found = Counter(one for rank in of_every_rank(own) for one in rank)
    return bool(own) and found.keys() == set(range(2, 122)) and found.total() <= len(EXAMPLES) + repeated


def refused(rows: Iterable[Any]) -> str:
    try:
        next(iter(rows))
    except PackingError as error:
        return error.message
    return ""


def with_torch() -> dict[str, bool]:
    # Workers are copies of the process, or are started anew.
    dist.init_process_group("gloo")
    found = {"an error without ranks": "ranks='split'" in refused(stream(EXAMPLES, BUDGET))}
    for workers in (0, 1, 2, 4):
        for way in ("fork", "spawn") if workers == 2 else ("fork",):
            context = {"multiprocessing_context": way} if workers else {}
            rows = stream(EXAMPLES, BUDGET, 10, ranks="split")
            loader = DataLoader(rows, batch_size=None, num_workers=workers, collate_fn=COLLATE, **context)
            found[f"{workers} workers, {way}"] = once(ids(loader))
    rows = stream(EXAMPLES, BUDGET, 10, ranks="split")
    whole = [*rows]
    for _ in zip(range(3), rows):
        state = rows.state_dict()
    rows.load_state_dict(state)
    found["goes on"] = [*rows] == whole[3:]
    rows.load_state_dict(of_every_rank(state)[1 - dist.get_rank()])
    found["the other rank's state is refused"] = "Save the state of each rank" in refused(rows)
    return found


def with_trainer() -> dict[str, bool]:
    # Trainer repeats some rows at the end, so that all ranks have as many.
    from transformers import Trainer, TrainingArguments

    seen: list[Any] = []

    class Seeing(Trainer):
        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any) -> torch.Tensor:
            seen.append(inputs)
            return super().training_step(model, inputs, *rest)

    found, model = {}, fa2patch.apply(tiny_llama()).model
    for workers in (0, 2):
        rows = stream(EXAMPLES, BUDGET, 10)
        alone = DataLoader(stream(EXAMPLES, BUDGET, 10, ranks="all"), None, num_workers=workers, collate_fn=list)
        steps = -(-len([*alone]) // 2)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, use_cpu=True, ddp_backend="gloo", report_to=[], max_steps=steps, save_strategy="no",
                disable_tqdm=True, per_device_train_batch_size=1, dataloader_num_workers=workers,
                accelerator_config={"dispatch_batches": False},
            )  # fmt: skip
            trainer = Seeing(model, arguments, train_dataset=rows, data_collator=COLLATE)
            seen.clear()
            trainer.train()
        found[f"{workers} workers"] = once(ids(seen), repeated=2 * BUDGET) and len(seen) == steps
        trainer.train_dataset = stream(EXAMPLES, BUDGET, ranks="split")
        found[f"{workers} workers: not split twice"] = "Leave ranks out" in refused(trainer.get_train_dataloader())
    return found


def main(mode: str, out: str) -> None:
    torch.set_num_threads(1)
    found = {"torch": with_torch, "trainer": with_trainer}[mode]()
    every = {name: all(rank[name] for rank in of_every_rank(found)) for name in found}
    finish(out, {"ok": all(every.values()), "processes": dist.get_world_size(), **every})


if __name__ == "__main__":
    main(*sys.argv[1:])
