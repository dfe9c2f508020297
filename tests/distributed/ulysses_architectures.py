"""Every architecture under Ulysses, in two processes: ``ulysses_architectures.py [ARCHITECTURE ...] OUT``.

Two packed rows, whose documents cross the border between the processes, are compared with the documents alone in one
process. Architectures whose mixers carry a state run again with documents that lie whole in a process.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import ulysses_rows

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check import rows
from compat_matrix.check.cell import Cell, NotApplicable, assert_unmoved
from compat_matrix.check.compare import assert_close, assert_same_gradients

CROSSING = ((10, 40, 14), (5, 27, 20, 12))
# Document lengths of two rows of 64 tokens. Each of two processes has 32 tokens of every row.
WHOLE = ((12, 20, 32), (32, 5, 27))


def batch_of(lengths: tuple[tuple[int, ...], ...], docs: list[torch.Tensor]) -> dict[str, Any]:
    length = sum(lengths[0])
    ids = torch.cat([torch.arange(len(doc)) for doc in docs])
    return {"input_ids": torch.cat(docs).view(-1, length), "position_ids": ids.view(-1, length)}


def check(cell: Cell, lengths: tuple[tuple[int, ...], ...]) -> None:
    docs = rows.documents(*(length for row in lengths for length in row))
    dtype = ulysses_rows.precision(cell.reference, docs, cell.dtype)
    reference, model = cell.reference(dtype), cell.model(dtype)
    try:
        expected = rows.alone(reference, docs)
        rows.loss_of(expected, docs).backward()
    except Exception as error:
        raise NotApplicable(f"one process, without fa2patch: {type(error).__name__}: {error}") from error
    batch = batch_of(lengths, docs)
    with fa2patch.apply(model):
        logits = model(**ulysses_rows.part(batch)).logits
        assert_close(ulysses_rows.whole(logits).flatten(0, 1), expected, "logits")
        loss(logits, batch).backward()
        found = ulysses_rows.gradients(model)
        assert_same_gradients(found, rows.gradients(reference), **cell.of_gradients)
        changed = {**batch, "input_ids": batch["input_ids"].clone()}
        middle = slice(lengths[0][0], lengths[0][0] + lengths[0][1])
        changed["input_ids"][0, middle] = rows.documents(lengths[0][1], seed=9)[0]
        after = ulysses_rows.whole(model(**ulysses_rows.part(changed)).logits)
        before = ulysses_rows.whole(logits)
        assert not torch.equal(after[0, middle], before[0, middle]), "a changed document changes nothing"
        for one in (after, before):
            one[0, middle] = 0
        assert_unmoved(cell, after, before)


def loss(logits: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    # The sum of next-token losses of this process's tokens.
    labels = torch.where(batch["position_ids"] == batch["position_ids"].min(), -100, batch["input_ids"])
    shifted = ulysses_rows.part({"input_ids": labels, "labels": labels})["shift_labels"]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten(), reduction="sum")


def implementation(name: str) -> str:
    # DeepSpeed takes sdpa and FlexAttention. An architecture may have neither.
    for taken in ("sdpa", "flex_attention"):
        try:
            tiny_models.build(name, taken)
        except (ValueError, ImportError):
            continue
        return taken
    return "eager"


def tried(cell: Cell, lengths: tuple[tuple[int, ...], ...]) -> dict[str, str]:
    # Every process comes to the same result, or waits for the others in vain.
    try:
        check(cell, lengths)
    except fa2patch.Fa2PatchError as error:
        return {"found": "refused", "said": f"{type(error).__name__}: {error.message}"}
    except NotApplicable as error:
        return {"found": "upstream", "said": str(error)}
    except AssertionError as error:
        return {"found": "WRONG", "said": str(error)}
    return {"found": "right", "said": ""}


def main() -> dict[str, Any]:
    names = sys.argv[1:-1] or [name for name in tiny_models.architectures() if tiny_models.is_present(name)]
    ulysses_rows.register(tiny_models.build("llama", "sdpa"), dist.get_world_size(), 2)
    finding: dict[str, Any] = {"ok": True, "deepspeed": ulysses_rows.deepspeed is not None, "architectures": {}}
    for name in names:
        begun = time.perf_counter()
        cell = Cell(name, implementation(name))
        found = {"crossing": tried(cell, CROSSING)}
        if found["crossing"]["found"] == "refused":
            found["whole"] = tried(cell, WHOLE)
        finding["architectures"][name] = found
        if dist.get_rank() == 0:
            print(f"{name}: {found} {time.perf_counter() - begun:.1f} s", flush=True)
    finding["ok"] = not any(
        one["found"] == "WRONG" for found in finding["architectures"].values() for one in found.values()
    )
    return finding


if __name__ == "__main__":
    ulysses_rows.run(main, sys.argv[-1])
