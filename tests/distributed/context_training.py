"""Fifty steps with rows that context parallelism splits equal one process: ``context_training.py WAY OUT``.

WAY is trainer (Trainer's ``cp_size``, and a run that is resumed), loop (accelerate's) or fsdp (FSDP2 over all
processes, which share rows two by two). accelerate refuses a CPU for ``cp_size``, so its configuration is set behind
its check; everything else is Trainer's, accelerate's and torch's own. The right losses and weights are those of an
unpatched model in one process that is given one document after another.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from ranks import finish, of_every_rank
from stage import furthest, weights
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, SequentialSampler

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.rows import documents

STEPS, EXAMPLES = 50, 4  # steps, and examples of a row
RATE, LARGEST = 1e-3, 1.0  # the learning rate, and the norm at which gradients are clipped
LOSS, WEIGHT = 1e-6, 1e-5  # the largest relative differences


def model_of() -> Any:
    return tiny_models.build("llama", "sdpa", torch.float64).train()


def data(rank: int = 0) -> list[dict[str, list[int]]]:
    drawn = torch.Generator().manual_seed(rank)
    lengths = torch.randint(2, 40, (STEPS * EXAMPLES,), generator=drawn).tolist()
    return [{"input_ids": doc.tolist()} for doc in documents(*lengths, seed=rank)]


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)


def right(ranks: int = 1, steps: int = STEPS) -> dict[str, Any]:
    """The losses of one process that computes the documents of all these ranks' rows one after another."""
    model, every, losses = model_of(), [data(rank) for rank in range(ranks)], []
    optimizer = optimizer_of(model)
    for step in range(steps):
        own = slice(step * EXAMPLES, (step + 1) * EXAMPLES)
        rows = [torch.tensor(example["input_ids"]) for examples in every for example in examples[own]]
        items = sum(len(row) - 1 for row in rows)
        loss = torch.zeros((), dtype=torch.float64)
        for row in rows:
            logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].float()
            loss = loss + torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum")
        (loss / items).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss) / items)
    return {"losses": losses, "weights": weights(model)}


def collator() -> fa2patch.DataCollatorWithFlattening:
    return fa2patch.DataCollatorWithFlattening(pad_to_multiple_of=2 * dist.get_world_size())


def split_by(accelerator: Any) -> None:
    from accelerate import ParallelismConfig

    config = ParallelismConfig(cp_size=dist.get_world_size())
    config.sp_backend = None  # accelerate 1.12 does nothing while its default is set, even if nothing uses it
    accelerator.state.parallelism_config = config
    accelerator.state.device_mesh = config.build_device_mesh("cpu")


class InOrder(transformers.Trainer):
    """Trainer with the examples as they come, and the loss of each step."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.losses: list[float] = []
        split_by(self.accelerator)

    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def log(self, logs: dict[str, float], *args: Any) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []
        super().log(logs, *args)


def trainer(folder: str, steps: int, model: Any) -> InOrder:
    arguments = transformers.TrainingArguments(
        folder, use_cpu=True, report_to="none", disable_tqdm=True, max_steps=steps, logging_steps=1,
        save_steps=STEPS // 2, per_device_train_batch_size=EXAMPLES, per_device_eval_batch_size=EXAMPLES,
        learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=LARGEST, optim="adamw_torch",
        remove_unused_columns=False,
    )  # fmt: skip
    return InOrder(model, arguments, train_dataset=data(), data_collator=collator())


def trained() -> dict[str, Any]:
    """Fifty steps, and a run that is resumed after half of them and evaluates then."""
    found = [tempfile.mkdtemp()]
    dist.broadcast_object_list(found)
    expected, model = right(), model_of()
    with fa2patch.apply(model):
        whole = trainer(found[0], STEPS, model)
        whole.train()
    again = model_of()
    with fa2patch.apply(again):
        resumed = trainer(found[0], STEPS, again)
        resumed.train(resume_from_checkpoint=f"{found[0]}/checkpoint-{STEPS // 2}")
        # As many rows as processes: of fewer, Trainer 5.24 keeps the first process's loss, also without fa2patch.
        evaluated = resumed.evaluate(data()[: 2 * EXAMPLES])["eval_loss"]
    expected_of = [loss_of(again, data()[at * EXAMPLES : (at + 1) * EXAMPLES]) for at in range(2)]
    return {
        "whole": compared(whole.losses, weights(model), expected),
        "resumed": compared(resumed.losses, weights(again), {**expected, "losses": expected["losses"][STEPS // 2 :]}),
        "evaluation": abs(evaluated / (sum(expected_of) / 2) - 1),
    }


@torch.no_grad()
def loss_of(model: Any, examples: list[dict[str, list[int]]]) -> float:
    rows = [torch.tensor(example["input_ids"]) for example in examples]
    losses = [
        torch.nn.functional.cross_entropy(model(input_ids=row[None]).logits[0, :-1].float(), row[1:], reduction="sum")
        for row in rows
    ]
    return float(sum(losses)) / sum(len(row) - 1 for row in rows)


def batches(rank: int) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
    # of the whole rows, with shift_labels, and how many tokens are learned
    for batch in DataLoader(data(rank), batch_size=EXAMPLES, collate_fn=collator()):  # type: ignore[arg-type]
        labels = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:].contiguous()
        yield {**batch, "shift_labels": labels}, int((labels != -100).sum())


def step(model: Any, batch: dict[str, torch.Tensor], items: int) -> torch.Tensor:
    labels = batch["shift_labels"]
    logits = model(**{name: batch[name] for name in ("input_ids", "position_ids")}, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return loss / items


def looped() -> dict[str, Any]:
    from accelerate import Accelerator

    expected, model = right(), model_of()
    accelerator = Accelerator(cpu=True)
    split_by(accelerator)
    fa2patch.apply(model)
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    losses = []
    for batch, items in batches(0):
        buffers = [value for value in batch.values() if value.dim() == 2]
        with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), {*buffers}):
            loss = step(prepared, batch, items)
            accelerator.backward(loss * dist.get_world_size())  # DDP takes the mean of gradients
        accelerator.clip_grad_norm_(prepared.parameters(), LARGEST)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(of_every_rank(float(loss))))
    return {"whole": compared(losses, weights(model), expected)}


def sharded() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "cp"))
    rows, rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    expected, model = right(rows), model_of()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    fa2patch.apply(model)
    every = mesh[("dp", "cp")]._flatten("dp_cp")
    for layer in model.model.layers:
        fully_shard(layer, mesh=every)
    fully_shard(model, mesh=every)
    optimizer, losses = optimizer_of(model), []
    for batch, items in batches(rank):
        of_all = sum(of_every_rank(items)) / 2
        buffers = [value for value in batch.values() if value.dim() == 2]
        split = functools.partial(context_parallel, mesh["cp"], buffer_seq_dims=[1] * len(buffers))
        with split(buffers=buffers, no_restore_buffers={*buffers}):
            loss = step(model, batch, of_all)
            (loss * dist.get_world_size()).backward()  # FSDP takes the mean of gradients
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(of_every_rank(float(loss))))
    return {"whole": compared(losses, whole_weights(model), expected)}


def whole_weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}


def compared(losses: list[float], found: dict[str, torch.Tensor], expected: dict[str, Any]) -> dict[str, Any]:
    assert len(losses) == len(expected["losses"]), f"{len(losses)} losses, expected {len(expected['losses'])}"
    return {
        "loss": max(abs(a / b - 1) for a, b in zip(losses, expected["losses"])),
        "weight": furthest(found, expected["weights"]),
    }


def main(way: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"trainer": trained, "loop": looped, "fsdp": sharded}[way]()
    numbers = [value for value in found.values() if isinstance(value, dict)]
    good = all(one["loss"] <= LOSS and one["weight"] <= WEIGHT for one in numbers)
    ok = all(of_every_rank(good and found.get("evaluation", 0.0) <= LOSS))
    return {"ok": ok, "processes": dist.get_world_size(), "steps": STEPS, **found}


if __name__ == "__main__":
    finish(sys.argv[2], main(sys.argv[1]))
