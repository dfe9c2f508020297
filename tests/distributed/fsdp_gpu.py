"""Compare packed training under FSDP with padded training: ``fsdp_gpu.py fsdp1 | trainer fsdp1 | trainer fsdp2``,
run by torchrun on GPUs, in float32.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from ranks import examples, finish
from stage import Stage, largest_relative_difference, packed, padded, tiny_llama

import fa2patch

STEPS = 4
BOUND = 1e-3


def fsdp1() -> list[float]:
    # The reference is an unsharded, unpatched model that trains on every rank's examples.
    from torch.distributed.fsdp import FullyShardedDataParallel

    rank, world = dist.get_rank(), dist.get_world_size()
    model = tiny_llama().cuda().train()
    fa2patch.apply(model)
    sharded = FullyShardedDataParallel(model, device_id=torch.cuda.current_device(), use_orig_params=True)
    reference = tiny_llama().cuda().train()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (sharded, reference)]
    fa2patch.verify(sharded, batch=packed(examples(0, 0)), max_documents=2)
    off = []
    for step in range(STEPS):
        loss = sharded(**_on_gpu(packed(examples(step, rank)))).loss
        loss.backward()
        expected = torch.stack([reference(**_on_gpu(padded(examples(step, other)))).loss for other in range(world)])
        expected.mean().backward()
        off.append(float((loss - expected[rank]).detach().abs() / expected[rank].detach()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    fa2patch.verify(sharded, batch=packed(examples(0, 0)), max_documents=2)
    return off


def trainer(version: int) -> list[float]:
    # The reference is padded training of the same ranks under DDP.
    stage = Stage(trl=False)
    options: dict[str, Any] = {"use_cpu": False, "steps": STEPS}
    sharding = {"fsdp_version": version, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}
    reference = stage.run(tiny_llama(), padded, patched=False, **options)
    run = stage.run(tiny_llama(), packed, patched=True, fsdp=True, fsdp_config=sharding, **options)
    wrapped = {type(module).__name__ for module in run["trainer"].model_wrapped.modules()}
    if not any("FSDP" in name or "FullySharded" in name for name in wrapped):
        raise RuntimeError(f"looked for FSDP around the model, found {sorted(wrapped)}")
    return [largest_relative_difference(run["losses"], reference["losses"])]


def _on_gpu(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if torch.is_tensor(value) else value for name, value in batch.items()}


def main(engine: str, *options: str) -> None:
    *version, out = options
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl")
    off = fsdp1() if engine == "fsdp1" else trainer(int(version[0][-1]))
    finish(out, {"ok": max(off) < BOUND, "bound": BOUND, "losses_off_by": off, "processes": dist.get_world_size()})


if __name__ == "__main__":
    main(*sys.argv[1:])
