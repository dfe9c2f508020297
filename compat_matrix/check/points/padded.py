"""The point about padded batches that are computed as one packed row."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import fa2patch
from fa2patch.upstream import find_models

from ..cell import Cell, NotApplicable, point, unless_alone_raises
from ..compare import assert_close
from ..rows import alone, documents, takes_cache, takes_positions

WIDTH = 10
"""The length of a padded row."""


@point
def padded_batches(cell: Cell) -> None:
    """Padded batches that are computed packed have the logits of documents alone, padded right and left."""
    docs = documents(5, 9, 3)
    reference, model = cell.reference(), cell.model()
    with unless_alone_raises(lambda: alone(reference, docs, use_cache=False)):
        expected = alone(reference, docs, use_cache=False)
    batches = {side: padded(docs, side, model) for side in ("right", "left")}
    with fa2patch.apply(model, padded_batches=True) as patch, warnings.catch_warnings():
        warnings.simplefilter("error", fa2patch.errors.StaysPadded)
        for side, batch in batches.items():
            mask = batch["attention_mask"]
            arrived = _arrives(mask, find_models.models(model)[-1])
            try:
                found = model(**batch).logits
            except fa2patch.errors.StaysPadded as why:
                raise NotApplicable(str(why)) from None
            if not any(arrived):
                raise NotApplicable("no mask reaches its base model, so its padded batches look like any others")
            assert_close(found[mask.bool()], expected, f"logits of rows padded {side}")
        if patch.unpacked is not None:
            raise AssertionError("the batches stayed padded without a warning")


def padded(docs: list[torch.Tensor], side: str, model: Any) -> dict[str, Any]:
    """Return a batch ``[documents, WIDTH]`` with the arguments that an unpatched model takes."""
    rows = []
    for doc in docs:
        missing = WIDTH - len(doc)
        around = (0, missing) if side == "right" else (missing, 0)
        values = doc, torch.ones_like(doc), torch.arange(len(doc))
        rows.append([torch.nn.functional.pad(value, around) for value in values])
    ids, mask, positions = map(torch.stack, zip(*rows))
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if takes_positions(model):
        batch["position_ids"] = positions
    if takes_cache(model):
        batch["use_cache"] = False
    return batch


def _arrives(mask: torch.Tensor, base: Any) -> list[bool]:
    """A list to which each call of a base model adds whether its arguments hold the mask."""
    found: list[bool] = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        found.append(any(torch.equal(value, mask) for value in tensors))

    base.register_forward_pre_hook(look, with_kwargs=True)
    return found
