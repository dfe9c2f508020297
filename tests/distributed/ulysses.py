"""Training under Ulysses equals training in one process: ``ulysses.py [FEATURE ...] OUT``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import ulysses_rows
from engines import Ulysses
from split_training import CROSSING, Case, batch_of, documents, table, with_lengths
from traffic import Traffic, heads_of, traffic

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.long_rows import bytes_sent_by_a_forward, bytes_sent_by_a_layer


def sent() -> dict[str, Any]:
    # The bytes of one step are compared with those of the paper, and with what is sent without fa2patch.
    found: dict[str, Any] = {"ok": True}
    for family in ("llama", "deepseek_v3"):
        model = tiny_models.build(family, "sdpa").train()
        layers = model.config.num_hidden_layers
        ulysses_rows.register(model, dist.get_world_size())
        alone = one_step(model, with_ids) if family == "llama" else None
        for name, change in {"ids": with_ids, "lengths": with_lengths}.items():
            with fa2patch.apply(model):
                one = counted(model, change, layers)
            found["ok"] = found["ok"] and all(value["counted"] == value["on paper"] for value in one.values())
            if alone is not None and name == "ids":
                for value, (step, what) in zip(one.values(), WAYS):
                    value["without fa2patch"] = alone[step].sent[what] / (1 if what == "all_gather" else layers)
            found[f"{family}, {name}"] = one
    return found


WAYS = (("forward", "all_to_all_single"), ("backward", "all_to_all_single"), ("forward", "all_gather"))


def with_ids(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def one_step(model: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Traffic]:
    batch = ulysses_rows.part(change(batch_of(Case(), documents(Case()))))
    labels = batch.pop("shift_labels")
    with traffic() as forward:
        logits = model(**batch, use_cache=False).logits
    with traffic() as backward:
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return {"forward": forward, "backward": backward}


def counted(model: Any, change: Callable[[dict[str, Any]], dict[str, Any]], layers: int) -> dict[str, dict[str, float]]:
    step, processes, tokens = one_step(model, change), dist.get_world_size(), sum(CROSSING[0])
    paper = bytes_sent_by_a_layer(tokens // processes, processes, itemsize=4, **heads_of(model.config))
    ids = 0 if change is with_lengths else bytes_sent_by_a_forward(tokens // processes, processes)
    return {
        "a layer's forward": {"counted": step["forward"].sent["all_to_all_single"] / layers, "on paper": paper},
        "a layer's backward": {"counted": step["backward"].sent["all_to_all_single"] / layers, "on paper": paper},
        "position_ids": {"counted": step["forward"].sent["all_gather"], "on paper": ids},
        "calls in a layer's forward": {"counted": step["forward"].calls["all_to_all_single"] / layers, "on paper": 2},
    }


def main() -> dict[str, Any]:
    found, bytes_sent = table(Ulysses(), sys.argv[1:-1]), sent()
    return {**found, "ok": bytes_sent.pop("ok") and found["ok"], "bytes": bytes_sent}


if __name__ == "__main__":
    ulysses_rows.run(main, sys.argv[-1])
