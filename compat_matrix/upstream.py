"""The same packed rows through Transformers alone, so that the table shows what the patch changes."""

from __future__ import annotations

from typing import Any, Callable

import torch

from .points import Cell, alone, documents, pack

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of the largest logit; bfloat16 where a flash class cannot compute float32, which the real kernels cannot either."""

LENGTHS = (5, 9, 3, 7)

Row = tuple[list[torch.Tensor], dict[str, Any]]
ROWS: dict[str, Callable[[], Row]] = {
    "one row": lambda: _row(LENGTHS),
    "two rows": lambda: _two_rows(),
    "first document of one token": lambda: _row((1, *LENGTHS)),
    "mask of ones": lambda: _row(LENGTHS, attention_mask=torch.ones(1, sum(LENGTHS), dtype=torch.long)),
    "default cache": lambda: _row(LENGTHS, use_cache=None),
}
"""Five everyday packed batches: their documents, in order, and what the model is called with."""


def _row(lengths: tuple[int, ...], **more: Any) -> Row:
    docs = documents(*lengths)
    call = {**pack(docs), "use_cache": False, **more}
    return docs, {name: value for name, value in call.items() if value is not None}


def _two_rows() -> Row:
    rows = [documents(5, 9), documents(8, 6, seed=1)]
    batch = {name: torch.cat([pack(docs)[name] for docs in rows]) for name in pack(rows[0])}
    return rows[0] + rows[1], {**batch, "use_cache": False}


def outcomes(cell: Cell) -> dict[str, str]:
    """``ok``, ``leak`` or ``error: ...`` for each of :data:`ROWS`, computed by an unpatched model."""
    return {name: _outcome(cell, *make()) for name, make in ROWS.items()}


@torch.no_grad()
def _outcome(cell: Cell, docs: list[torch.Tensor], call: dict[str, Any]) -> str:
    failure = ""
    for dtype, tolerance in TOLERANCES.items():
        try:
            model = cell.model(dtype)
            packed, expected = model(**call).logits.flatten(0, 1), alone(model, docs)
        except Exception as error:
            failure = f"error: {type(error).__name__}: {error}".splitlines()[0][:160]
            continue
        same = packed.shape == expected.shape and (packed - expected).abs().max() <= tolerance * expected.abs().max()
        return "ok" if same else "leak"
    return failure
