"""FSDP2 without padding: parameters are sharded over processes, and every process has its own packed rows.

    torchrun --nproc-per-node 2 fsdp.py --model NAME --data FILE.jsonl

It uses NCCL on GPUs and gloo without. The loss is the mean over all processes' tokens, so several processes that share
a step's documents take the same steps as one process with all of them.
"""

from __future__ import annotations

import os

import small
import torch
import torch.distributed as dist

import fa2patch

try:
    from torch.distributed.fsdp import fully_shard
except ImportError as error:
    raise SystemExit(f"{error}. This example needs torch 2.6 or later: pip install -U torch") from None

DOCUMENTS = 8
"""Documents of a step, over all processes."""


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the loss of every step."""
    options = small.options(__doc__, argv)
    if "RANK" not in os.environ:
        raise SystemExit("This example runs in several processes. Start it with: torchrun --nproc-per-node 2 fsdp.py")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    texts = small.texts(options)
    model, tokenizer = small.load(options, texts)
    model.to(device).train()

    fa2patch.apply(model)  # before sharding, or after it
    for layer in model.base_model.layers:
        fully_shard(layer)
    fully_shard(model)

    collate = fa2patch.DataCollatorWithFlattening()
    documents = small.tokenized(texts, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5 if options.model else 2e-3)
    losses = []
    for step in range(options.steps):
        together = [documents[(step * DOCUMENTS + index) % len(documents)] for index in range(DOCUMENTS)]
        batch = {key: value.to(device) for key, value in collate(together[rank::world]).items()}
        mine = (batch["labels"][:, 1:] != -100).sum()
        everyones = mine.clone()
        dist.all_reduce(everyones)

        share = model(**batch, use_cache=False).loss * mine / everyones  # its part of the overall mean
        (share * world).backward()  # FSDP averages gradients over processes: undo it
        optimizer.step()
        optimizer.zero_grad()

        loss = share.detach()
        dist.all_reduce(loss)
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step + 1}: loss {losses[-1]:.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
