"""Compare Trainer packed in two processes with Trainer padded in one.

``trainer.py ENGINE [budget [any]] [weights] OUT [REFERENCE]``: ENGINE is ddp, zero2 or zero3. ``budget``: batches are
cut into passes, of which the processes need different numbers; ``any``: the loss is in code that is not known.
``weights``: tokens weigh differently in the loss, and a fifth of them is not in it. Run by torchrun with REFERENCE, or
without it in one process, which trains an unpatched model, accumulates twice as many batches, and writes the reference.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import finish, of_every_rank, whole_weights
from stage import IGNORED, Stage, furthest, largest_relative_difference, packed, padded, tiny_llama, tokens, weights
from transformers import Trainer, TrainerCallback

import fa2patch

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
STEPS = 6
BOUND = 1e-3
SAME = 1e-4
ACCUMULATED = 2
BUDGET = 200


def main(engine: str, *told: str) -> None:
    budget, known, weighed = "budget" in told, "any" not in told, "weights" in told
    out, reference = (*told[budget + (not known) + weighed :], "")[:2]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    stage = Stage(trl=False)
    if not reference:
        given = {"gradient_accumulation_steps": 2 * ACCUMULATED, "kind": Weighted if weighed else Trainer}
        run = stage.run(tiny_llama(), padded, patched=False, steps=STEPS, **given)
        torch.save({"losses": run["losses"], "weights": weights(run["model"])}, out)
        return
    between = Between(packed(stage.examples(stage.train[:8])))
    given = {"gradient_accumulation_steps": ACCUMULATED, "callbacks": [between], **options(engine)}
    if budget:
        given["kind"] = fa2patch.packed_trainer(Trainer if known else OfAnyLoss, max_tokens=BUDGET)
    costs: list[float] = []

    def collate(features: Any) -> Any:
        lengths = np.array([len(one["input_ids"]) for one in features])
        costs.append(float(fa2patch.packing.example_costs(lengths).sum()))
        return packed_with_weights(features) if weighed else packed(features)

    run = stage.run(tiny_llama(), collate, patched=True, steps=STEPS, **given)
    trainer = run["trainer"]
    expected = torch.load(reference)
    with whole_weights(run["model"]):
        off = furthest(weights(run["model"]), expected["weights"])
    difference = largest_relative_difference(run["losses"], expected["losses"])
    finding = {
        "ok": difference < BOUND and off < SAME and between.isolated() and torch.distributed.get_world_size() == 2,
        "steps": STEPS,
        "gradient_accumulation_steps": ACCUMULATED,
        "wrapped_in": type(trainer.model_wrapped).__name__,
        "processes": torch.distributed.get_world_size(),
        "largest_relative_difference": difference,
        "weights_off_by": off,
        "verify": between.said,
    }
    if budget:
        passes = [entry["passes_per_batch"] for entry in trainer.state.log_history if "loss" in entry]
        finding["passes_per_batch"] = passes
        apart = [entry["imbalance_over_ranks"] for entry in trainer.state.log_history if "loss" in entry]
        finding["imbalance_over_ranks"] = apart
        finding["why_exact"] = trainer.token_budget.why_exact
        once = known and not weighed and engine != "zero3"  # whose functions around a model a graph shows, too
        finding["ok"] = finding["ok"] and max(passes) > 2 and apart == imbalances(costs)
        finding["ok"] = finding["ok"] and (trainer.token_budget.why_exact == "") == once
    if engine != "ddp":
        finding["zero_stage"] = trainer.model_wrapped.zero_optimization_stage()
        finding["ok"] = finding["ok"] and f"zero{finding['zero_stage']}" == engine
    finish(out, finding)


def weights_of(ids: torch.Tensor) -> torch.Tensor:
    return (ids % 5).float() / 2


def packed_with_weights(features: Any) -> dict[str, Any]:
    # The weights are a column of the examples.
    given = [{**one, "loss_weights": weights_of(torch.tensor(one["input_ids"])).tolist()} for one in tokens(features)]
    return fa2patch.DataCollatorWithFlattening(loss_weights="token")(given)


class OfAnyLoss(Trainer):
    # Trainer's own loss, in code that is not known.

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class Weighted(Trainer):
    # The loss of padded batches, weighed, and divided by the tokens of the whole step that have a weight.

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        # What has no weight is taken out before the step's labels are counted.
        batches, _ = super().get_batch_samples(*args, **kwargs)
        for batch in batches:
            batch["labels"][weights_of(batch["labels"]) == 0] = IGNORED
        return batches, sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        labels = inputs["labels"][:, 1:]
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none")
        return (losses * weights_of(labels)).sum() / num_items_in_batch


def imbalances(costs: list[float]) -> list[float]:
    # What the log of each step should say of the costs of all ranks' batches.
    batches = np.array(of_every_rank(costs[: STEPS * ACCUMULATED])).T  # a loader reads ahead
    steps = np.split(batches, STEPS)
    return [round(fa2patch.packing.imbalance(each), 4) for each in steps]


def options(engine: str) -> dict[str, Any]:
    if engine == "ddp":
        return {"ddp_backend": "gloo"}
    config = json.loads((CONFIGS / f"deepspeed_{engine}.json").read_text(encoding="utf-8"))
    config["zero_optimization"]["overlap_comm"] = False  # overlapping needs an accelerator's streams
    return {"ddp_backend": "gloo", "deepspeed": config}


class Between(TrainerCallback):
    # ``verify`` runs after the second step, on the engine's wrapper and on the model inside it.

    def __init__(self, batch: dict[str, Any]) -> None:
        self.batch = batch
        self.said: dict[str, str] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != 2:
            return
        for name, model in (("wrapped", self.trainer.model_wrapped), ("inside", self.trainer.model)):
            try:
                verified = fa2patch.verify(model, batch=self.batch, max_documents=2)
                self.said[name] = f"{len(verified.documents)} documents isolated"
            except Exception as error:
                self.said[name] = f"{type(error).__name__}: {error}"

    def isolated(self) -> bool:
        return len(self.said) == 2 and all(said.endswith("isolated") for said in self.said.values())


if __name__ == "__main__":
    main(*sys.argv[1:])
