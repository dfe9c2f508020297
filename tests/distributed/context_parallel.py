"""Training with context parallelism equals training in one process: ``context_parallel.py ENGINE [FEATURE ...] OUT``.

ENGINE is torch (its ``context_parallel``), plain (the same with parts that are not balanced), accelerate (its hooks
beside it), Trainer (what it does to a batch) or ring_flash_attn. Features are those of ``split_training.py``.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from engines import ENGINES, Engine, Torch
from key_traffic import counted
from ranks import finish, of_every_rank
from split_training import Case, batch_of, documents, table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check import rows
from fa2patch.documents.parts import Order, consecutive
from fa2patch.packing.parts import measured


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


@torch.no_grad()
def balance(engine: Torch) -> dict[str, Any]:
    """The parts of a packed row while a model is patched, and otherwise: their order, and what torch joins of them."""
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    # a long document behind short ones: the first process would have its end, and no other weighs as much
    lengths = (*(4,) * 16 * dist.get_world_size(), 64 * dist.get_world_size())
    packed = torch.cat([torch.arange(length) for length in lengths])[None]
    one = torch.arange(packed.shape[1])[None]

    def order(positions: torch.Tensor) -> list[int]:
        tokens = one.clone()
        with engine.split({"input_ids": tokens, "position_ids": positions}) as own:
            (whole,) = context_parallel_unshard(engine.mesh, [own["input_ids"].contiguous()], [1])
            assert torch.equal(whole, tokens), "torch puts them back"
            return [token for part in of_every_rank(own["input_ids"][0].tolist()) for token in part]

    plain = order(packed)
    with fa2patch.apply(tiny_models.build("llama", "sdpa")):
        patched, dense = order(packed), order(one)
    cost = [
        measured(lengths, Order(np.array(each), consecutive(len(each), dist.get_world_size()).sizes))
        for each in (plain, patched)
    ]
    before, after = (float(each.work.max() / each.work.mean()) for each in cost)
    ok = after < 1.15 < before and order(packed) == plain and dense == order(one)
    return {
        "found": "right" if ok else "WRONG",
        "said": f"the busiest process has {before:.2f} and {after:.2f} of the mean",
        "ok": ok,
    }


def main(name: str, *features: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engine = ENGINES[name]()
    weighed = balance(engine) if name in ("torch", "plain") else None  # before any model is patched
    found, outside = table(engine, [*features]), beside(engine)
    found["ok"] = outside.pop("ok") and found["ok"]
    found["table"]["outside of the context"] = outside
    if weighed is not None:
        found["ok"] = weighed.pop("ok") and found["ok"]
        found["table"]["balance"] = weighed
        found["exchanged"] = counted(engine)
        found["ok"] &= all(
            each["forward"] == each["backward"] == each["on paper"] for each in found["exchanged"].values()
        )
    return found


if __name__ == "__main__":
    finish(sys.argv[-1], main(*sys.argv[1:-1]))
