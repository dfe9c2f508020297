"""Split rows over two processes by context parallelism: ``split_rows.py ENGINE OUT``, run by torchrun.

ENGINE is torch, accelerate (``cp_size`` with FSDP2), Trainer (``cp_size``) or ring_flash_attn: see ``splitters.py``. A
patched model must refuse every batch on every rank before its first layer runs.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from context_parallel import Counted
from parts import Batch, Case, Cell, alone, cell, features, furthest, joined, judged, told
from ranks import finish
from splitters import ENGINES, Ring, Torch

import fa2patch
from compat_matrix import tiny_models

BOUND = 1e-5
# The definition of these families is their eager code. Context parallelism has none of it.
IN_EAGER_ONLY = ("gpt_oss", "gemma2")


def built(case: Case, attention: str = "sdpa") -> Any:
    implementation = "eager" if case.family in IN_EAGER_ONLY else attention
    model = tiny_models.build(case.family, implementation, **case.changes)
    if case.checkpointing:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def refused(engine: Torch, case: Case, first: bool, verify: bool = False) -> Cell:
    # ``first``: the model is patched before the engine prepares it.
    model, batch = built(case), case.batch()
    for step in (fa2patch.apply, engine.prepare) if first else (engine.prepare, fa2patch.apply):
        try:
            step(model)
        except ValueError as error:  # accelerate refuses windows
            return cell("upstream", told(error))
    counted = Counted(model)
    try:
        with engine.split(model, {**batch.call, "labels": batch.labels}, []) as call:
            if verify:
                fa2patch.verify(model, batch={name: value for name, value in call.items() if name != "shift_labels"})
            else:
                model(**call, use_cache=False)
    except fa2patch.errors.PackingNotIsolated as error:
        good = engine.word in error.message and not counted.times
        return cell("refused" if good else "wrong", error.message)
    except Exception as error:  # Trainer refuses attention other than sdpa
        by_trainer = isinstance(error, ValueError) and str(error).startswith("Context parallelism ")
        return cell("upstream" if by_trainer else "wrong", told(error))
    return cell("wrong", "it was computed")


def target(batch: Batch, model: Any) -> torch.Tensor:
    # The logits of documents alone at their places, [rows, length, vocabulary], and NaN at padding.
    with torch.no_grad():
        right = alone(model, batch)[0]
    found = torch.full((*batch.labels.shape, right[0].shape[-1]), float("nan"))
    for places, logits in zip(batch.places, right):
        found.view(-1, found.shape[-1])[places] = logits
    return found


@torch.no_grad()
def without(engine: Torch, case: Case) -> Cell:
    # If the unpatched model raises, ``off_by`` is what the prepared model does with the whole batch in one process.
    if isinstance(engine, Ring):
        return cell("error", engine.starts() or "ring_flash_attn needs a GPU")
    model, batch = built(case, engine.attention), case.batch()
    right = target(batch, model)
    try:
        engine.prepare(model)
    except ValueError as error:
        return cell("error", told(error))
    try:
        with engine.split(model, {**batch.call, "labels": batch.labels}, [right]) as call:
            call.pop("labels")
            found = model(**call, use_cache=False).logits
            off_by = float((found - right).abs().nan_to_num().max() / right.abs().nan_to_num().max())
        implementation = model.config._attn_implementation
        return judged(off_by, BOUND, f"{implementation} attention, of each process's part")
    except Exception as error:
        said = told(error)
    said += " off_by is of whole rows in one process, with the hooks that the engine attaches."
    return cell("error", said, whole(engine, case, case.batch()))


def without_verified(engine: Torch) -> Cell:
    # An unpatched model's documents can only be read from its part's ids.
    model, batch = built(Case(), engine.attention), Case().batch()
    engine.prepare(model)
    try:
        with engine.split(model, dict(batch.call), []) as call:
            given = {name: value for name, value in call.items() if name != "shift_labels"}
            found = fa2patch.verify(model, batch={**given, "use_cache": False}, strict=False)
    except Exception as error:
        return cell("error", told(error))
    return cell("leaks", f"verify says of a part of the row: {'isolated' if found.ok else found.reason}")


@torch.no_grad()
def whole(engine: Torch, case: Case, batch: Batch) -> float:
    # How far a prepared, unpatched model with whole rows in one process is from documents alone.
    prepared = built(case)
    engine.prepare(prepared)
    return furthest(prepared(**batch.call, use_cache=False).logits, batch, alone(built(case), batch)[0])


def outside(engine: Torch) -> tuple[Cell, Cell]:
    # Outside of the engine's context, such as in evaluation, the model gets whole rows.
    case = Case()
    batch, model = case.batch(), built(case)
    fa2patch.apply(model)
    engine.prepare(model)
    unpatched = whole(engine, case, batch)
    try:
        with torch.no_grad():
            found = furthest(model(**batch.call, use_cache=False).logits, batch, alone(built(case), batch)[0])
    except fa2patch.errors.PackingNotIsolated as error:
        return cell("refused", error.message), judged(unpatched, BOUND)
    return cell("right" if found < BOUND else "wrong", "", found), judged(unpatched, BOUND)


def main(name: str, out: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engine = ENGINES[name]()
    finding: dict[str, Any] = {"table": {}, "alone": {}, "starts_on_a_cpu": engine.starts() or True}
    for feature, case in features().items():
        both = [joined(refused(engine, case, first)) for first in (True, False)]
        finding["table"][feature] = next((one for one in both if one["found"] == "wrong"), both[0])
        finding["alone"][feature] = joined(without(engine, case))
    finding["table"]["verify"] = joined(refused(engine, Case(), first=True, verify=True))
    finding["alone"]["verify"] = joined(without_verified(engine))
    finding["table"]["outside of the context"], finding["alone"]["outside of the context"] = outside(engine)
    finding["ok"] = all(one["found"] in ("refused", "upstream", "right") for one in finding["table"].values())
    finish(out, finding)


if __name__ == "__main__":
    main(*sys.argv[1:])
