"""Compare packed training under DDP and FSDP2 with padded training in one process, gradient by gradient.

Run by torchrun: ``raw.py [--quick] OUT``. Each rank also computes the reference, an unpatched model that trains
padded on both ranks' examples.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from ranks import examples, finish
from stage import packed, padded, tiny_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fa2patch

STEPS = 3
NEAR = 1e-5
"""Relative to the largest value of the same gradient or weight. Sums are taken in another order."""

CHECKPOINTING = {"plain": None, "not reentrant": False, "reentrant": True}


def wrapped(kind: str, reentrant: bool | None) -> tuple[Any, Any]:
    """Return a model, patched before DDP wraps it or after FSDP2 shards it, and the module that trains it."""
    model = tiny_llama().train()
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if kind == "DDP":
        fa2patch.apply(model)
        return model, torch.nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fa2patch.apply(model)
    return model, model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(kind: str, reentrant: bool | None) -> dict[str, Any]:
    """Return the largest errors over all steps. The result is ok if ``verify`` passes before and after, too."""
    rank = dist.get_rank()
    model, parallel = wrapped(kind, reentrant)
    reference = tiny_llama().train()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, reference)]
    verified = [fa2patch.verify(parallel, batch=packed(examples(0, 0)), max_documents=2).ok]
    off = {"loss": 0.0, "gradient": 0.0, "weight": 0.0}
    for step in range(STEPS):
        loss = parallel(**packed(examples(step, rank))).loss
        loss.backward()
        expected = torch.stack([reference(**padded(examples(step, other))).loss for other in range(2)])
        expected.mean().backward()
        off["loss"] = max(off["loss"], float((loss - expected[rank]).detach().abs() / expected[rank].detach()))
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
        yield float((values - expected).abs().max() / expected.abs().max())


def main(*arguments: str) -> None:
    *quick, out = arguments
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    both = [(kind, name) for kind in ("DDP", "FSDP2") for name in CHECKPOINTING]
    wanted = [("DDP", "plain"), ("FSDP2", "reentrant")] if quick else both
    found: dict[str, Any] = {f"{kind}, {name}": trained(kind, CHECKPOINTING[name]) for kind, name in wanted}
    finish(out, {"ok": all(one["ok"] for one in found.values()), "steps": STEPS, "bound": NEAR, **found})


if __name__ == "__main__":
    main(*sys.argv[1:])
