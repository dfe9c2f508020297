"""Compare packed training under DDP, FSDP2 and accelerate with padded training: ``raw.py [--quick] OUT``, by torchrun.

It trains in one pass for each batch, and in passes of a budget of tokens, of which the ranks need different numbers;
with accelerate, by the loop of docs/packing.md. Each rank also computes the reference, an unpatched model that trains
padded on both ranks' examples.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from ranks import examples, finish
from stage import packed, padded, tiny_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fa2patch
from fa2patch.packing import passes

STEPS = 3
BUDGET = 64
# Relative to the largest value of the same gradient or weight. Sums are taken in another order.
NEAR = 1e-5

ACCELERATOR = Accelerator(cpu=True)
CHECKPOINTING = {"plain": None, "not reentrant": False, "reentrant": True}


def wrapped(kind: str, reentrant: bool | None) -> tuple[Any, Any]:
    # The model is patched before DDP wraps it or after FSDP2 shards it. Returned with the module that trains it.
    model = tiny_llama().train()
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if kind != "FSDP2":
        fa2patch.apply(model)
        return model, ACCELERATOR.prepare(model) if kind == "accelerate" else DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fa2patch.apply(model)
    return model, model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def documents(step: int, rank: int, budget: int | None) -> list[dict[str, list[int]]]:
    # With a budget, the first rank has one document, and so fewer documents than the other has passes.
    return examples(step, rank)[: 1 if budget and rank == 0 else None]


def loss_of(parallel: Any, batch: dict[str, Any], budget: int | None) -> torch.Tensor:
    # The gradients are computed too; with a budget, in passes.
    losses = []
    if budget is None:
        losses.append(parallel(**batch).loss)
        losses[0].backward()
        return losses[0].detach()
    items = (batch["labels"] != -100).sum()
    for part in passes(batch, budget, every_rank=True):
        losses.append(parallel(**part, num_items_in_batch=items).loss)
        losses[-1].backward()
    return torch.stack(losses).detach().sum()


def loss_with_accelerate(model: Any, batch: dict[str, Any], budget: int | None) -> torch.Tensor:
    # The loop of docs/packing.md: the mean loss of both ranks' tokens.
    loss, cut = torch.zeros(()), passes(batch, budget or 0, every_rank=True)
    items = ACCELERATOR.reduce((batch["labels"] != -100).sum().float(), "mean")
    for number, part in enumerate(cut, 1):
        with contextlib.nullcontext() if number == len(cut) else ACCELERATOR.no_sync(model):
            each = model(**part, num_items_in_batch=items).loss
            ACCELERATOR.backward(each)
            loss += each.detach()
    return ACCELERATOR.reduce(loss, "mean")


def expected_losses(reference: Any, kind: str, both: list[list[dict[str, list[int]]]]) -> torch.Tensor:
    # The loss is of each rank's own documents or, with accelerate, of both ranks'.
    if kind == "accelerate":
        return reference(**padded([*both[0], *both[1]])).loss.expand(2)
    return torch.stack([reference(**padded(each)).loss for each in both])


def trained(kind: str, reentrant: bool | None, budget: int | None = None) -> dict[str, Any]:
    # The result is ok if ``verify`` passes before and after training, too.
    rank = dist.get_rank()
    model, parallel = wrapped(kind, reentrant)
    reference = tiny_llama().train()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, reference)]
    verified = [fa2patch.verify(parallel, batch=packed(examples(0, 0)), max_documents=2).ok]
    off = {"loss": 0.0, "gradient": 0.0, "weight": 0.0}
    for step in range(STEPS):
        computed = loss_with_accelerate if kind == "accelerate" else loss_of
        loss = computed(parallel, packed(documents(step, rank, budget)), budget)
        expected = expected_losses(reference, kind, [documents(step, other, budget) for other in range(2)])
        expected.mean().backward()
        distance = (loss - expected[rank].detach()).abs() / expected[rank].detach()
        off["loss"] = max(off["loss"], float(distance.nan_to_num(nan=torch.inf)))
        off["gradient"] = max(off["gradient"], *apart(model, reference, "grad"))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    off["weight"] = max(apart(model, reference, "data"))
    verified.append(fa2patch.verify(parallel, batch=packed(examples(0, 0)), max_documents=2).ok)
    return {"ok": max(off.values()) < NEAR and all(verified), **{f"{name}_off_by": far for name, far in off.items()}}


def apart(model: Any, reference: Any, what: str) -> Iterator[float]:
    for (name, one), (same, other) in zip(model.named_parameters(), reference.named_parameters()):
        assert name == same
        values, expected = full(getattr(one, what)), getattr(other, what)
        yield float(((values - expected).abs().max() / expected.abs().max()).nan_to_num(nan=torch.inf))


def main(*arguments: str) -> None:
    *quick, out = arguments
    torch.set_num_threads(1)
    both = [(kind, name) for kind in ("DDP", "FSDP2") for name in CHECKPOINTING]
    wanted = [("DDP", "plain"), ("FSDP2", "reentrant")] if quick else both
    found: dict[str, Any] = {f"{kind}, {name}": trained(kind, CHECKPOINTING[name]) for kind, name in wanted}
    found.update({f"{kind}, in passes": trained(kind, None, BUDGET) for kind in ("DDP", "FSDP2", "accelerate")})
    finish(out, {"ok": all(one["ok"] for one in found.values()), "steps": STEPS, "bound": NEAR, **found})


if __name__ == "__main__":
    main(*sys.argv[1:])
