"""Under Ulysses a part's router loss counts the part's real tokens, not the padding: ``router_parts.py OUT``."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import ulysses_rows

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.rows import documents

# A row of 39 tokens and padding: the first part has no padding, the second one has more padding than tokens.
LENGTH = 64


def main() -> dict[str, Any]:
    model = tiny_models.build("mixtral", "sdpa")
    fa2patch.apply(model)
    collate = fa2patch.DataCollatorWithFlattening(pad_to_multiple_of=LENGTH)
    row = collate([{"input_ids": doc.tolist()} for doc in documents(10, 15, 14)])
    asked = {"output_router_logits": True, "use_cache": False}
    with torch.no_grad():
        routed = model(**row, **asked).router_logits
        ulysses_rows.register(model, dist.get_world_size())
        found = model(**ulysses_rows.part(row), **asked).aux_loss
        row.pop("real_tokens")
        counted = model(**ulysses_rows.part(row), **asked).aux_loss
    expected = of_part(model, [layer.view(1, LENGTH, -1) for layer in routed])
    losses = torch.stack([found, expected, counted])
    every = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
    dist.all_gather(every, losses)
    errors = [abs(float(found / expected) - 1) for found, expected, _ in every]
    seen = [abs(float(counted / expected) - 1) for _, expected, counted in every]
    return {"ok": max(errors) < 1e-5 and seen[-1] > 1e-3, "errors": errors, "with padding": seen}


def of_part(model: Any, routed: list[torch.Tensor]) -> torch.Tensor:
    # The loss of this process's real tokens, from the router logits [1, length, experts] of the whole row.
    real = ulysses_rows.own(torch.arange(LENGTH)[None] < 39)[0]
    own = tuple(ulysses_rows.own(layer.transpose(1, 2)).transpose(1, 2)[0][real] for layer in routed)
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    return torch.as_tensor(function(own, model.num_experts, model.num_experts_per_tok))


if __name__ == "__main__":
    ulysses_rows.run(main, sys.argv[-1])
