"""Train the installed TRL's trainers for fifty steps in passes: ``trl_passes.py TRAINER[:LOSS] ...``.

Each trainer is run padded without fa2patch, and as a ``packed_trainer`` with budgets of twice, once and half the tokens
of its largest batch; the last one and the padded run in bfloat16, too. Completions are drawn instead of sampled. Prints
a JSON object: for each trainer and budget, how far losses and weights are from those of the padded run, as parts of the
largest loss and weight, and the passes of all batches; and how far the weights of bfloat16 are from the padded ones of
float32, in passes and padded.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers
import trl
import trl_all
from trl_groups import drawn
from trl_noting import Noting

STEPS = 50
SMOOTHED = ("exo_pair", "robust")  # losses that need a label smoothing
# These losses divide differences of log-probabilities by 0.05, so that they show rounding. They are in float64.
SHARP = ("discopop",)
# This trainer's loss is a mean of advantages of about 1, which cancel each other: it is 0 but for rounding.
OF_ADVANTAGES = "RLOO"
SHARES = {"twice": 2.0, "once": 1.0, "half": 0.5}


def trained(noting: Noting, cls: type, way: str, options: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    def make(generated: list[Any]) -> Any:
        trainer = trl_all.make(cls, way, generated, max_steps=STEPS, learning_rate=3e-2, **options)
        if options.get("loss_type") in SHARP and not options.get("bf16"):
            for model in (trainer.model, trainer.ref_model):
                model.double()
        for model in (trainer.model, getattr(trainer.model, "policy", None)):
            if hasattr(model, "generate"):
                model.generate = drawn(model, trl_all.words().eos_token_id)
        return trainer

    run = noting.train(make)
    return run, trl_all.weights(trl_all.TRAINED[way]).float()


def compared(noting: Noting, cls: type, options: dict[str, Any]) -> dict[str, Any]:
    plain, right = trained(noting, cls, "plain", options)
    largest = max(call[1] for call in plain["calls"])
    size = 1.0 if cls.__name__.startswith(OF_ADVANTAGES) else max(map(abs, plain["losses"]))
    found: dict[str, Any] = {"steps": len(plain["losses"]), "moved": _far(right, trl_all.BEFORE[0])}
    for name, share in SHARES.items():
        way = f"budget{round(share * largest)}"
        ours, end = trained(noting, cls, way, options)
        assert len(ours["losses"]) == len(plain["losses"])
        found[name] = {
            "tokens": round(share * largest),
            "losses": max(abs(one - other) for one, other in zip(ours["losses"], plain["losses"])) / size,
            "weights": _far(end, right),
            "passes": sum(entry.get("passes_per_batch", 0) for entry in ours["logs"]),
            "padded": sum(call[-1] > call[1] for call in ours["calls"]),
        }
    in_half = {**options, "bf16": True}
    found["bf16"] = [float((trained(noting, cls, each, in_half)[1] - right).norm()) for each in (way, "plain")]
    return found


def _far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def main(chosen: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    noting, found, known = Noting(), {}, trl_all.trainers()
    for one in chosen:
        name, _, loss = one.partition(":")
        options = {"loss_type": loss, "label_smoothing": 0.1 if loss in SMOOTHED else 0.0} if loss else {}
        found[one] = compared(noting, known[name], options)
        print(one, json.dumps(found[one]), file=sys.stderr, flush=True)
    print(json.dumps({"trl": trl.__version__, "trainers": found}))


if __name__ == "__main__":
    main(sys.argv[1:])
