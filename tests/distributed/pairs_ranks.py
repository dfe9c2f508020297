"""Compare fifty steps of packed pairs under DDP and FSDP2 with padded ones: ``pairs_ranks.py FAMILY OUT``, by torchrun.

Each rank also trains the reference, an unpatched model that computes both ranks' pairs padded.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from pairs import Pairs, built, pairs
from ranks import finish, of_every_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fa2patch

STEPS = 50
NEAR = 1e-5  # relative, in float64


def drawn(step: int, rank: int) -> Pairs:
    # The ranks have different numbers of pairs and of tokens.
    seeded = torch.Generator().manual_seed(2 * step + rank)
    sources, targets = (torch.randint(1, 13, (3 + rank,), generator=seeded).tolist() for _ in range(2))
    return pairs(FAMILY, sources, targets, seed=2 * step + rank)


def wrapped(kind: str) -> tuple[Any, Any]:
    # The model is patched before DDP wraps it or after FSDP2 shards it. Returned with the module that trains it.
    model = built(FAMILY).double().train()
    if kind == "DDP":
        fa2patch.apply(model)
        return model, DistributedDataParallel(model, find_unused_parameters=True)
    mesh = init_device_mesh("cpu", (2,))
    for stack in (model.get_encoder(), model.get_decoder()):
        for layer in stack.block if FAMILY == "t5" else stack.layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fa2patch.apply(model, prove=False)  # one rank cannot prove a sharded model by itself
    return model, model


def trained(kind: str) -> dict[str, Any]:
    rank, reference = dist.get_rank(), built(FAMILY).double().train()
    model, parallel = wrapped(kind)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (model, reference)]
    off, first, last = 0.0, 0.0, 0.0
    for step in range(STEPS):
        loss = parallel(**drawn(step, rank).packed()).loss
        loss.backward()
        padding = reference.config.pad_token_id
        expected = torch.stack([reference(**drawn(step, each).padded(padding)).loss for each in range(2)])
        expected.mean().backward()
        off = max([off, *of_every_rank(float(abs(loss / expected[rank] - 1).nan_to_num(nan=torch.inf)))])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        last = float(loss)
        first = first or last
    return {"ok": off < NEAR, "loss_off_by": off, "first": first, "last": last, "steps": STEPS}


def main(family: str, out: str) -> None:
    global FAMILY
    FAMILY = family
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {kind: trained(kind) for kind in ("DDP", "FSDP2")}
    finish(out, {"ok": all(one["ok"] for one in found.values()), **found})


if __name__ == "__main__":
    main(*sys.argv[1:])
