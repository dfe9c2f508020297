"""The derivative by which equal losses are told apart is one process's, under DDP and FSDP2: ``slopes.py OUT``.

The engines must not notice that it was taken: training goes on as if nothing had been asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import finish, of_every_rank
from stage import tiny_llama
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fa2patch.data.loss_shares import _slope

IDS = torch.arange(3, 27).view(4, 6)


def preferences(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A loss of pairs, as DPO's."""

    def loss(ids: torch.Tensor) -> torch.Tensor:
        taken = model(input_ids=ids).logits.float()[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        chosen, rejected = taken.sum(1).chunk(2)
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()

    return loss


def sharded() -> Any:
    model = tiny_llama()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def trained(model: Any, ids: torch.Tensor, asked: bool) -> tuple[list[float], list[float]]:
    """The losses of three steps, and the derivatives that were asked for before each of them."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, slopes = [], []
    for _ in range(3):
        if asked:
            with torch.no_grad():  # as all tries
                slopes.append(_slope(preferences(model), model)(ids))
        loss = preferences(model)(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, slopes


def main() -> dict[str, Any]:
    ids = IDS + dist.get_rank()
    alone = tiny_llama()
    expected = _slope(preferences(alone), alone)(ids)
    undisturbed, _ = trained(DistributedDataParallel(tiny_llama()), ids, asked=False)
    found = {}
    for name, model in (("DDP", DistributedDataParallel(tiny_llama())), ("FSDP2", sharded())):
        losses, slopes = trained(model, ids, asked=True)
        near = torch.allclose(torch.tensor(losses), torch.tensor(undisturbed), rtol=1e-5)
        found[name] = near and abs(slopes[0] - expected) < 1e-5 and len({*slopes}) == 3
    every = of_every_rank(found)
    return {"ok": all(all(each.values()) for each in every), "ranks": every}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    finish(sys.argv[-1], main())
