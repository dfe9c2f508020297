"""Training with context parallelism equals training in one process: ``context_parallel.py ENGINE [FEATURE ...] OUT``.

ENGINE is torch (its ``context_parallel``), plain (the same with parts that are not balanced), accelerate (its hooks
beside it), Trainer (what it does to a batch) or ring_flash_attn. Features are those of ``split_training.py``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from engines import ENGINES, Engine
from ranks import finish
from split_training import Case, batch_of, documents, table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check import rows


@torch.no_grad()
def beside(engine: Engine) -> dict[str, Any]:
    """Whole rows before and after a batch that is split, and rows that torch shards by itself."""
    docs, case = documents(Case()), Case()
    model = tiny_models.build("llama", "sdpa")
    right, batch = rows.alone(model, docs), batch_of(case, docs)
    batch.pop("labels")
    try:
        engine.prepare(model)
    except ValueError as error:
        return {"found": "upstream", "said": str(error), "ok": True}
    fa2patch.apply(model)

    def whole() -> bool:
        return torch.allclose(model(**batch, use_cache=False).logits.flatten(0, 1), right, atol=1e-5)

    before = whole()
    with engine.split(dict(batch)) as own:
        model(**own, use_cache=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = {name: distribute_tensor(value, mesh, [Shard(1)]) for name, value in batch.items()}
    try:
        model(**sharded, use_cache=False)
    except fa2patch.errors.PackingNotIsolated as error:
        said = error.message
    ok = before and whole() and "DTensor" in said
    return {"found": "right" if ok else "WRONG", "said": said, "ok": ok}


def main(name: str, *features: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engine = ENGINES[name]()
    found, outside = table(engine, [*features]), beside(engine)
    found["ok"] = outside.pop("ok") and found["ok"]
    found["table"]["outside of the context"] = outside
    return found


if __name__ == "__main__":
    finish(sys.argv[-1], main(*sys.argv[1:-1]))
