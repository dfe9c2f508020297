"""Runs packed rows through Transformers alone, so that the matrix shows what the patch changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

import torch

import fa2patch

from .. import tiny_media, tiny_models, tiny_pairs
from .cell import AloneFails, Cell
from .rows import documents, pack

# They are tried in order. Some flash classes cannot compute float32, and neither can the real kernels.
DTYPES = (torch.float32, torch.bfloat16)

LENGTHS = (5, 9, 3, 7)

# Functions that make the forward arguments of five everyday packed batches.
ROWS: dict[str, Callable[[], dict[str, Any]]] = {
    "one row": lambda: _row(LENGTHS),
    "two rows": lambda: _two_rows(),
    "first document of one token": lambda: _row((1, *LENGTHS)),
    "mask of ones": lambda: _row(LENGTHS, attention_mask=torch.ones(1, sum(LENGTHS), dtype=torch.long)),
    "default cache": lambda: _row(LENGTHS, use_cache=None),
}


@contextmanager
def alone_computes(what: str = "") -> Iterator[None]:
    # what: such as " on one document"
    try:
        yield
    except Exception as error:
        raise AloneFails(f"the unpatched model fails{what}: {type(error).__name__}: {error}"[:300]) from error


def _row(lengths: tuple[int, ...], **more: Any) -> dict[str, Any]:
    call = {**pack(documents(*lengths)), "use_cache": False, **more}
    return {name: value for name, value in call.items() if value is not None}


def _two_rows() -> dict[str, Any]:
    rows = [documents(5, 9), documents(8, 6, seed=1)]
    batch = {name: torch.cat([pack(docs)[name] for docs in rows]) for name in pack(rows[0])}
    return {**batch, "use_cache": False}


def outcomes(cell: Cell) -> dict[str, str]:
    if tiny_models.has_media(cell.family):
        return _with_media(cell)
    if tiny_models.has_pairs(cell.family):
        return _of_pairs(cell)
    return {name: _outcome(cell, make()) for name, make in ROWS.items()}


def _with_media(cell: Cell) -> dict[str, str]:
    # fa2patch's collator packs the rows. Upstream's packs tokens only.
    docs = [tiny_media.document(cell.family, 3, "it", 2, seed=1), tiny_media.document(cell.family, 5, seed=2)]
    try:
        row = fa2patch.DataCollatorForMultimodalFlattening(cell.model())(docs)
    except fa2patch.errors.CollatorError as error:
        return {"one row": f"error: {type(error).__name__}: {error.message}"[:160]}
    # the row stays the object that the collator made, because it tells verify whose pictures are whose
    for name in [name for name in row if name == "labels" or name.startswith(("cu_seq", "max_length"))]:
        del row[name]
    found = {"default cache": _outcome(cell, row)}
    row["use_cache"] = False
    found["one row"] = _outcome(cell, row)
    row["attention_mask"] = torch.ones_like(row["input_ids"])
    return {"one row": found["one row"], "mask of ones": _outcome(cell, row), **found}


def _of_pairs(cell: Cell) -> dict[str, str]:
    # Rows of pairs, as fa2patch takes them. What a model computes for pairs alone may need more than the tiny pairs
    # have, where fa2patch refuses it.
    names = ("one row", "mask of ones", "default cache")
    try:
        pairs = tiny_pairs.pairs(cell.family, LENGTHS, LENGTHS[::-1])
        expected = torch.cat([cell.model()(**pairs.alone(at)).logits[0] for at in range(len(LENGTHS))])
    except Exception:
        return dict.fromkeys(names, "unknown")
    model, row = cell.model(), pairs.packed()
    said = [prefix for prefix in ("", "decoder_") if f"{prefix}position_ids" in row]
    ones = {f"{prefix}attention_mask": torch.ones_like(row[f"{prefix}position_ids"]) for prefix in said}
    rows = dict(zip(names, ({"use_cache": False}, {"use_cache": False, **ones}, {})))

    def outcome(more: dict[str, Any]) -> str:
        try:
            found = model(**row, **more).logits[0]
        except Exception as error:
            return f"error: {type(error).__name__}: {error}".splitlines()[0][:160]
        return "ok" if torch.allclose(found, expected, rtol=1e-3, atol=1e-3) else "leak"

    with torch.no_grad():
        return {name: outcome(more) for name, more in rows.items()}


def _outcome(cell: Cell, call: dict[str, Any]) -> str:
    failure = ""
    if tiny_models.is_encoder(cell.family):
        call = {name: value for name, value in call.items() if name != "use_cache"}
    for dtype in DTYPES:
        try:
            return "ok" if fa2patch.verify(cell.model(dtype), batch=call, strict=False, max_documents=2).ok else "leak"
        except Exception as error:
            failure = f"error: {type(error).__name__}: {error}".splitlines()[0][:160]
    return failure
