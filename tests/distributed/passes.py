"""A loss that compares a batch's documents, in passes under DDP, FSDP and FSDP2, is one process's: ``passes.py OUT``.

Ranks need different numbers of passes. Under engines that shard a model they make as many all the same, because they
meet in each of them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import finish, of_every_rank
from stage import tiny_llama
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

import fa2patch

BUDGET = 40
# The documents' lengths in each step, of each rank.
LENGTHS = ([[3, 30, 7, 19, 25, 11], [4, 9, 12]], [[5, 6], [33, 2, 28, 17]], [[40], [8, 31, 36, 29]])


def batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(10 * step + rank)
    rows = [torch.randint(3, 500, (length,), generator=drawn) for length in LENGTHS[step][rank]]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}


def loss_of(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    # Each document's last token is told from those of the others.
    mask = given["attention_mask"]
    last = model(**given, use_cache=False).logits[torch.arange(len(mask)), mask.sum(1) - 1].float()
    scores = torch.nn.functional.normalize(last, dim=-1) @ torch.nn.functional.normalize(last, dim=-1).T
    return torch.nn.functional.cross_entropy(scores * 10, torch.arange(len(last)).roll(1)) + last.square().mean()


def trained(model: Any, of_rank: Callable[[int], list[int]]) -> tuple[list[float], Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for step in range(len(LENGTHS)):
        ranks = of_rank(step)
        found = [loss_of(model, batch(step, rank)) / len(ranks) for rank in ranks]
        sum(found).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(each.detach() for each in found)))
    return losses, model


def checkpointed(model: Any, on: bool) -> Any:
    if on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def fsdp2(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def fsdp1(model: Any) -> Any:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)


ENGINES = {"DDP": DistributedDataParallel, "FSDP2": fsdp2, "FSDP1": fsdp1}


def main() -> dict[str, Any]:
    rank = dist.get_rank()
    expected, alone = trained(tiny_llama().train(), lambda step: [0, 1])
    right = {name: value.detach() for name, value in alone.named_parameters()}
    found: dict[str, Any] = {}
    for name, engine in ENGINES.items():
        for on in (False, True):
            inner = tiny_llama()
            fa2patch.apply(inner, padded_batches=True, max_tokens=BUDGET, prove=False)
            losses, model = trained(engine(checkpointed(inner, on)), lambda step: [rank])
            total = torch.tensor(losses)
            dist.all_reduce(total)
            far = max(abs(float(one) / 2 - other) for one, other in zip(total, expected))
            if name == "FSDP1":
                with FullyShardedDataParallel.summon_full_params(model):
                    off = _furthest(inner, right)
            else:
                off = _furthest(inner, right)
            found[f"{name}{', checkpointed' * on}"] = {"losses": far, "weights": off}
    every = of_every_rank(found)
    return {"ok": all(max(way.values()) < 1e-5 for each in every for way in each.values()), "ranks": every}


def _furthest(model: Any, right: dict[str, torch.Tensor]) -> float:
    def whole(value: Any) -> torch.Tensor:
        return value.full_tensor() if hasattr(value, "full_tensor") else value.detach()

    named = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in model.named_parameters()}
    return max(float((whole(value.detach()) - right[name]).abs().max()) for name, value in named.items())


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    finish(sys.argv[-1], main())
