"""Trains one of the trainers that the tests have, padded or with a budget of tokens, and writes what it took.

The part *budget* starts ``python -m compat_matrix.bench.budget KIND WAY STEPS OUT [ALONG]`` in the environment of a
stack, with ``tests/helpers`` and ``tests/integrations/scripts`` on ``PYTHONPATH``. OUT gets what was found.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

import fa2patch
from compat_matrix import tiny_models

CPU = ProfilerActivity.CPU

PADDED = "padded"

# The operations of so many first batches are counted. Counting takes memory, so the others' peaks are taken.
COUNTED = 5


def main(kind: str, way: str, steps: str, out: str, along: str = "") -> None:
    # along: the "out" of another training. This one is then in bf16, and begins each batch with that one's weights, so
    # that gradients of the same weights are compared: in bf16, two trainings are soon far apart whatever rounds them.
    torch.set_num_threads(1)
    trainer = made(kind, way, int(steps), bool(along))
    given = torch.load(along)["before"] if along else []
    losses: list[float] = []
    peaks: list[int] = []
    operations: list[int] = []
    tokens: list[int] = []
    before: list[dict[str, torch.Tensor]] = []
    gradients: list[dict[str, torch.Tensor]] = []
    step = trainer.training_step

    @functools.wraps(step)
    def noted(*args: Any, **kwargs: Any) -> Any:
        held = dict(trainer.model.named_parameters())
        with torch.no_grad():
            for name, value in given[len(before)].items() if along else ():
                held[name].copy_(value)
        before.append({name: each.detach().clone() for name, each in held.items()})
        if len(before) <= min(COUNTED, int(steps) // 2):
            with FlopCounterMode(display=False) as counter:
                loss = step(*args, **kwargs)
            operations.append(counter.get_total_flops())
        else:
            with torch.profiler.profile(activities=[CPU], profile_memory=True) as profile:
                loss = step(*args, **kwargs)
            peaks.append(peak(profile))
        losses.append(float(loss))
        gradients.append({name: each.grad.clone() for name, each in held.items() if each.grad is not None})
        return loss

    trainer.training_step = noted
    if way == PADDED:  # on a patched model, a hook is code that fa2patch does not know and tries, which takes memory
        trainer.model.register_forward_pre_hook(functools.partial(count, tokens), with_kwargs=True)
    trainer.train()
    logs = [entry.get("passes_per_batch", 1.0) for entry in trainer.state.log_history if "loss" in entry]
    found = {
        "losses": losses, "weights": trainer.model.state_dict(), "steps": trainer.state.global_step,
        "passes": sum(logs) / len(logs), "peaks": peaks, "tokens": sum(tokens) / len(losses), "before": before,
        "gradients": gradients, "operations": sum(operations),
    }  # fmt: skip
    torch.save(found, out)


# Kinds of Transformers' Trainer: its own loss, the same in code that is not known, and with a router loss.
OWN = ("trainer", "any", "router")


def made(kind: str, way: str, steps: int, bf16: bool = False) -> Any:
    # GRPO's completions are drawn in advance.
    if kind not in OWN:
        script = importlib.import_module("trl_groups" if kind == "grpo" else "trl_pairs")
        script.config = functools.partial(script.config, bf16=bf16)  # type: ignore[attr-defined]
        trainer = script.make(kind, "function" if kind == "grpo" else "full", steps, way, [])
        if kind == "grpo":  # on the object, it is code that fa2patch does not know and tries, which takes memory
            type(trainer.model).generate = staticmethod(vars(trainer.model).pop("generate"))
        return trainer
    stage = importlib.import_module("stage")
    trainer = importlib.import_module("transformers").Trainer
    if kind != "trainer":  # code that is not known, so that its loss sees the whole batch

        class trainer(trainer):  # type: ignore[no-redef]
            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                return super().compute_loss(*args, **kwargs)

    if way != PADDED:
        trainer = fa2patch.packed_trainer(trainer, max_tokens=int(way[len("budget") :]))
    options = {"kind": trainer, "max_steps": steps, "learning_rate": 1e-4, "adam_epsilon": 1e-5, "bf16": bf16}
    model = stage.tiny_llama()
    if kind == "router":
        model = tiny_models.build(
            "mixtral", "sdpa", output_router_logits=True, router_aux_loss_coef=0.1, vocab_size=512
        )
    return stage.Stage(trl=False).trainer(model, stage.padded, **options)


def count(tokens: list[int], model: Any, args: Any, kwargs: Any) -> None:
    # Only calls with gradients count, and only real tokens.
    if torch.is_grad_enabled() and model.training:
        mask = kwargs.get("attention_mask")
        tokens.append(int(mask.sum()) if mask is not None else kwargs["input_ids"].numel())


def peak(profile: Any) -> int:
    # The allocator's own records add up to the peak, so it is the same in every run. The peak of a process is not: what
    # a C library keeps of freed memory is as much as a small model needs.
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events), default=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
