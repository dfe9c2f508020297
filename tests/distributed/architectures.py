"""Every architecture with rows that an engine splits over processes: ``architectures.py ENGINE [NAME ...] OUT``.

ENGINE is one of ``engines.py``. Two packed rows, whose documents cross the borders between the processes, are compared
with the documents alone in one process. Architectures whose mixers carry a state run again with documents that lie
whole in a process.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import ulysses_rows
from engines import ENGINES, Engine
from ranks import of_every_rank

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check import rows
from compat_matrix.check.cell import Cell, NotApplicable, assert_unmoved
from compat_matrix.check.compare import assert_close, assert_same_gradients

CROSSING = ((10, 40, 14), (5, 27, 20, 12))
# Document lengths of two rows of 64 tokens that lie whole in every eighth, and so in each of two or four processes.
WHOLE = ((8, 5, 3, 8, 8, 2, 6, 8, 8, 7, 1), (3, 5, 8, 8, 6, 2, 8, 8, 1, 7, 8))


def batch_of(lengths: tuple[tuple[int, ...], ...], docs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    length = sum(lengths[0])
    ids = torch.cat([torch.arange(len(doc)) for doc in docs]).view(-1, length)
    tokens = torch.cat(docs).view(-1, length)
    places = torch.arange(length).expand(len(lengths), -1)
    return {
        "input_ids": tokens,
        "position_ids": ids,
        "labels": torch.where(ids == 0, -100, tokens),
        "places": places,
    }


def check(engine: Engine, cell: Cell, lengths: tuple[tuple[int, ...], ...]) -> None:
    docs = rows.documents(*(length for row in lengths for length in row))
    dtype = ulysses_rows.precision(cell.reference, docs, cell.dtype)
    reference, model = cell.reference(dtype), cell.model(dtype)
    try:
        expected = rows.alone(reference, docs)
        rows.loss_of(expected, docs).backward()
    except Exception as error:
        raise NotApplicable(f"one process, without fa2patch: {type(error).__name__}: {error}") from error
    batch = batch_of(lengths, docs)
    changed, middle = dict(batch), slice(lengths[0][0], lengths[0][0] + lengths[0][1])
    changed["input_ids"] = batch["input_ids"].clone()
    changed["input_ids"][0, middle] = rows.documents(lengths[0][1], seed=9)[0]
    with fa2patch.apply(model):
        before = logits(engine, model, batch, backward=True)
        assert_close(before.flatten(0, 1), expected, "logits")
        assert_same_gradients(engine.gradients(model), rows.gradients(reference), **cell.of_gradients)
        after = logits(engine, model, changed)
        assert not torch.equal(after[0, middle], before[0, middle]), "a changed document changes nothing"
        for one in (after, before):
            one[0, middle] = 0
        assert_unmoved(cell, after, before)


def logits(engine: Engine, model: Any, batch: dict[str, torch.Tensor], backward: bool = False) -> torch.Tensor:
    # those of the whole rows. The loss is the sum of this process's tokens'.
    with engine.split(batch) as own:
        labels, places = own.pop("shift_labels"), own.pop("places")
        found = model(**own).logits
        if backward:
            flat = found.flatten(0, 1).float()
            torch.nn.functional.cross_entropy(flat, labels.flatten(), reduction="sum").backward()
    parts = of_every_rank((found.detach(), places[0]))
    order = torch.cat([places for _, places in parts]).argsort()
    return torch.cat([part for part, _ in parts], dim=1)[:, order]


def implementation(name: str) -> str:
    # The engines take sdpa, and DeepSpeed FlexAttention. An architecture may have neither.
    for taken in ("sdpa", "flex_attention"):
        try:
            tiny_models.build(name, taken)
        except (ValueError, ImportError):
            continue
        return taken
    return "eager"


def tried(engine: Engine, cell: Cell, lengths: tuple[tuple[int, ...], ...]) -> dict[str, str]:
    # Every process comes to the same result, or waits for the others in vain.
    try:
        check(engine, cell, lengths)
    except fa2patch.Fa2PatchError as error:
        return {"found": "refused", "said": f"{type(error).__name__}: {error.message}"}
    except NotApplicable as error:
        return {"found": "upstream", "said": str(error)}
    except AssertionError as error:
        return {"found": "WRONG", "said": str(error)}
    return {"found": "right", "said": ""}


def main() -> dict[str, Any]:
    engine = ENGINES[sys.argv[1]]()
    names = sys.argv[2:-1] or [name for name in tiny_models.architectures() if not tiny_models.has_pairs(name)]
    engine.prepare(tiny_models.build("llama", "sdpa"), rows=2)
    finding: dict[str, Any] = {"ok": True, "deepspeed": ulysses_rows.deepspeed is not None, "architectures": {}}
    for name in names:
        begun = time.perf_counter()
        cell = Cell(name, implementation(name))
        found = {"crossing": tried(engine, cell, CROSSING)}
        if found["crossing"]["found"] == "refused":
            found["whole"] = tried(engine, cell, WHOLE)
        finding["architectures"][name] = found
        if dist.get_rank() == 0:
            print(f"{name}: {found} {time.perf_counter() - begun:.1f} s", flush=True)
    finding["ok"] = not any(
        one["found"] == "WRONG" for found in finding["architectures"].values() for one in found.values()
    )
    return finding


if __name__ == "__main__":
    ulysses_rows.run(main, sys.argv[-1])
