"""Ulysses as users start it, against one process: ``ulysses_engine.py WAY STAGE OUT``, run by torchrun.

WAY is ``loop`` (a loop with accelerate, ``sp_size=2``) or ``trainer``, and STAGE is ``zero1`` to ``zero3``, or
``alone``, which trains without fa2patch. The right losses and weights are those of an unpatched model in one process
that is given one document after another.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"

import deepspeed
import torch
import torch.distributed as dist
import transformers
import ulysses_rows
from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig, PartialState
from accelerate.utils import DeepSpeedSequenceParallelConfig
from ranks import whole_weights
from stage import furthest, largest_relative_difference, losses_of, tiny_llama, weights

import fa2patch
from compat_matrix.check import rows

STEPS, LENGTH, RATE, EPSILON = 10, 64, 1e-3, 1e-4
LOSS, WEIGHT = 1e-6, 1e-5
# A larger relative difference of a loss is a leak.
LEAK = 1e-4

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "alone": 3}
# Whether DeepSpeed's loader works with gloo. 0.18 gathers numbers into lists of one, which only NCCL takes.
ADAPTER_GATHERS = tuple(map(int, deepspeed.__version__.split(".")[:2])) >= (0, 19)

# Lengths of the documents of each step's row. It is padded to ``LENGTH``, as gloo gathers equal rows only.
DOCUMENTS = [(10, 40, 14), (5, 27, 20), (31, 33), (64,), (1, 2, 50)] * 2


def examples() -> list[list[dict[str, Any]]]:
    made = []
    for step, lengths in enumerate(DOCUMENTS):
        made.append([{"input_ids": doc.tolist()} for doc in rows.documents(*lengths, seed=step)])
    return made


def loader() -> Any:
    collate = fa2patch.DataCollatorWithFlattening(pad_to_multiple_of=LENGTH, pad_token_id=1)
    return torch.utils.data.DataLoader(examples(), batch_size=1, collate_fn=lambda step: collate(step[0]))


def right(scale: int = 1) -> dict[str, Any]:
    model, losses = tiny_llama().train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON, weight_decay=0.01)
    for step in examples():
        docs = [torch.tensor(one["input_ids"]) for one in step]
        loss = rows.loss_of(rows.alone(model, docs), docs) / sum(len(doc) - 1 for doc in docs)
        (loss * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": weights(model)}


def settings(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip


def parallelism() -> ParallelismConfig:
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa", sp_seq_length_is_variable=True)
    processes = dist.get_world_size()
    return ParallelismConfig(sp_size=2, dp_shard_size=processes // 2, sp_backend="deepspeed", sp_handler=handler)


def looped(stage: int, model: Any) -> list[float]:
    # accelerate's guide to sequence parallelism has this loop.
    plugin = DeepSpeedPlugin(hf_ds_config=settings(stage))
    accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=parallelism())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON, weight_decay=0.01)
    rows_of = loader()
    if ADAPTER_GATHERS:
        model, optimizer, rows_of = accelerator.prepare(model, optimizer, rows_of)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    group, losses = ulysses_rows.group(), []
    for batch in rows_of if ADAPTER_GATHERS else map(ulysses_rows.part, rows_of):
        labels = batch.pop("shift_labels")
        logits = model(**batch, use_cache=False).logits
        count = (labels != -100).sum()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        total = sum(torch.distributed.nn.functional.all_gather(loss, group=group))
        dist.all_reduce(count, group=group)
        accelerator.backward(total / count)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / count).item())
    return losses


def trained(stage: int, model: Any) -> list[float]:
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=1, max_steps=STEPS, learning_rate=RATE,
        adam_epsilon=EPSILON, weight_decay=0.01, lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1,
        report_to="none", save_strategy="no", disable_tqdm=True, remove_unused_columns=False, use_cpu=True,
        deepspeed=settings(stage), parallelism_config=parallelism(), bf16=False,
    )  # fmt: skip

    class InOrder(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader())

        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, eps=EPSILON, weight_decay=0.01)
            return self.optimizer

    trainer = InOrder(model=model, args=arguments, train_dataset=examples())
    trainer.train()
    return losses_of(trainer)


def without(train: Callable[[int, Any], list[float]], stage: int, model: Any, expected: list[float]) -> dict[str, Any]:
    try:
        off = largest_relative_difference(train(stage, model), expected)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return {"ok": True, "alone": {"found": "error", "said": said, "off_by": None}}
    return {"ok": True, "alone": {"found": "leaks" if off > LEAK else "right", "said": "", "off_by": off}}


def main() -> dict[str, Any]:
    way, stage = sys.argv[1], STAGES[sys.argv[2]]
    # Both differentiate through an all_gather of the losses, which gives sp_size times the gradient. ZeRO-3 divides by
    # all processes; ZeRO-1 and 2 do not count those that share a row, so that gradients stay too large.
    scale = 2 if stage < 3 else 1
    expected = right(scale)
    PartialState(backend="gloo")  # without a backend it takes a CPU's process for the only one
    model = tiny_llama().train()
    train = {"loop": looped, "trainer": trained}[way]
    if sys.argv[2] == "alone":
        return without(train, stage, model, expected["losses"])
    fa2patch.apply(model)
    losses = train(stage, model)
    with whole_weights(model):
        off = furthest(weights(model), expected["weights"])
    with whole_weights(model):
        said = {"verify": str(fa2patch.verify(model.train(), strict=False)).splitlines()[0]}
    difference = largest_relative_difference(losses, expected["losses"])
    ok = len(losses) == STEPS and difference <= (LOSS if way == "loop" else 1e-4) and off <= WEIGHT
    verified = said["verify"].startswith("isolated")
    return {"ok": ok and verified, "loss": difference, "weight": off, "gradients_times": scale, **said}


if __name__ == "__main__":
    ulysses_rows.run(main, sys.argv[3])
