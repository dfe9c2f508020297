"""Split rows over two processes by torch's context parallelism: ``context_parallel.py OUT``, run by torchrun.

Each process gets a piece of the row's head and one of its tail, which together look like a row: ids such as 0, 1, 6, 7.
A patched model refuses these parts, and computes whole rows before and afterwards. No unpatched model is compared,
because on a CPU torch gathers the parts for no kind of attention.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from ranks import finish
from stage import tiny_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel

import fa2patch

LENGTHS = {"one document": (32,), "cut between documents": (8, 16, 8), "cut inside of documents": (5, 20, 7)}


class Counted:
    def __init__(self, model: Any) -> None:
        self.times = 0
        getattr(model, "model", model).layers[0].register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.times += 1


def row(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    tokens = torch.randint(2, 512, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}


def tried(model: Any, batch: dict[str, Any], **more: Any) -> Any:
    # Returns the logits, or the error and how often the first layer had run before it.
    counted = Counted(model)
    try:
        return model(**batch, **more, use_cache=False)[0]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "layers_run": counted.times}


def refused(found: Any, what: str) -> bool:
    said = found["error"] if isinstance(found, dict) else ""
    return said.startswith("PackingNotIsolated: ") and what in said and not found["layers_run"]


@torch.no_grad()
def checked(lengths: tuple[int, ...], mesh: Any) -> dict[str, Any]:
    patched, plain = tiny_llama().eval(), tiny_llama().eval()
    alone = [plain(input_ids=document).logits for document in row(lengths)["input_ids"].split(lengths, dim=1)]
    right = torch.cat(alone, dim=1)
    fa2patch.apply(patched)

    def whole() -> bool:
        return torch.allclose(tried(patched, row(lengths)), right, atol=1e-5)

    before = whole()
    batch = row(lengths)
    with context_parallel(mesh, buffers=[*batch.values()], buffer_seq_dims=[1, 1]):
        looks = batch["position_ids"].tolist()
        with_ids, without = tried(patched, batch), tried(patched, {"input_ids": batch["input_ids"]})
        labelled = tried(patched, batch, labels=batch["input_ids"])
        base = tried(patched.model, batch)
    sharded = {name: distribute_tensor(value, mesh, [Shard(1)]) for name, value in row(lengths).items()}
    found = {
        "with ids": refused(with_ids, "cp_size"),
        "without ids": refused(without, "cp_size"),
        "with labels": refused(labelled, "cp_size"),
        "the base model": refused(base, "cp_size"),
        "whole rows before": before,
        "whole rows afterwards": whole(),
        "DTensors": refused(tried(patched, sharded), "DTensor"),
    }
    said = with_ids["error"] if isinstance(with_ids, dict) else "nothing: it computed"
    return {**found, "ids": looks, "said": said}


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    finding: dict[str, Any] = {name: checked(lengths, mesh) for name, lengths in LENGTHS.items()}
    finding["ok"] = all(all(found.values()) for found in finding.values())
    finish(out, finding)


if __name__ == "__main__":
    main(*sys.argv[1:])
