"""Verify a model under DDP, FSDP2 and tensor parallelism; test_verify.py runs this in two processes by torchrun."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from two_layers import tiny_llama

import fa2patch


def rows(documents):
    return {"input_ids": torch.arange(12)[None], "position_ids": torch.arange(12 // documents).repeat(documents)[None]}


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        batch = rows(2)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


dist.init_process_group("gloo")
parallel = torch.nn.parallel.DistributedDataParallel(tiny_llama())
fa2patch.apply(parallel)
assert fa2patch.verify(parallel).ok
train(parallel)
assert fa2patch.verify(parallel).ok

from torch.distributed.fsdp import fully_shard  # noqa: E402 (torch 2.6 on)

sharded = tiny_llama()
fa2patch.apply(sharded)
for layer in sharded.model.layers:
    fully_shard(layer)
fully_shard(sharded)
assert fa2patch.verify(sharded).ok
train(sharded)
assert fa2patch.verify(sharded).ok
try:
    fa2patch.verify(sharded, batch=rows(2 + dist.get_rank()))
except fa2patch.errors.BadBatch as error:
    assert "[2, 3] documents" in str(error), error
else:
    raise AssertionError("another number of documents on each rank would wait for ever")
tree = {**rows(2), "cu_seq_lens_q": torch.tensor([0, 6, 12]), "segment_parents": torch.tensor([-1, 0])}
tree["position_ids"] = torch.arange(12)[None]
assert fa2patch.verify(sharded, batch=tree).ok
try:
    fa2patch.verify(sharded, batch=tree if dist.get_rank() else rows(2))
except fa2patch.errors.BadBatch as error:
    assert "different segment_parents" in str(error), error
else:
    raise AssertionError("another tree on each rank may wait for ever")

split = tiny_llama()
plan = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
parallelize_module(split, init_device_mesh("cpu", (2,)), {**plan, "model.layers.*.self_attn.o_proj": RowwiseParallel()})
fa2patch.apply(split)
assert fa2patch.verify(split).ok
split.model.layers[1].mlp.register_forward_hook(lambda module, given, output: output + output.mean(1, keepdim=True))
found = fa2patch.verify(split, strict=False)  # the inputs of o_proj are DTensors
assert not found.ok and found.first_leak == "model.layers.1.mlp", found
dist.barrier()
os._exit(0)  # under load, shutting down gloo's threads sometimes aborts the process
