"""The points about dtypes of models with pictures or sound in their rows."""

from __future__ import annotations

import copy
from typing import Any

import torch

import fa2patch

from ... import tiny_media
from ..cell import AloneFails, Cell, assert_unmoved
from ..compare import assert_as_near, assert_finite
from ..rows import gradients
from .media import alone, documents, loss_of, of_each, packed, point


@point
def half_precision(cell: Cell) -> None:
    """A packed row in a bfloat16 model is about as close to float32 as documents alone, and is isolated."""
    model, reference = cell.model(torch.bfloat16), cell.reference(torch.bfloat16)
    _as_near_as_alone(cell, model, reference, documents(cell), torch.bfloat16)


@point
def autocast(cell: Cell) -> None:
    """The same holds for a float32 model under autocast to bfloat16."""
    docs = documents(cell)
    with torch.autocast("cpu", torch.bfloat16):
        _as_near_as_alone(cell, cell.model(), cell.reference(), docs, cell.dtype)


def _as_near_as_alone(
    cell: Cell, model: Any, reference: Any, docs: list[tiny_media.Document], dtype: torch.dtype
) -> None:
    given = [_cast(doc, dtype) for doc in docs]
    exact_model, unpatched = copy.deepcopy(reference).float(), copy.deepcopy(model)
    try:
        expected = torch.cat([alone(reference, doc) for doc in given])
    except Exception as error:
        raise AloneFails(f"the unpatched model fails on one document: {type(error).__name__}: {error}") from error
    with torch.autocast("cpu", enabled=False):
        exact = torch.cat([alone(exact_model, _cast(doc, torch.float32)) for doc in docs])
    row, labels = packed(model, given)
    ids = row["input_ids"].clone()
    ids[0, :2] = torch.tensor([11, 12])
    with fa2patch.apply(model):
        found = model(**row, use_cache=False).logits[0]
        start = len(of_each(row, found)[0])
        assert_unmoved(cell, model(**{**row, "input_ids": ids}, use_cache=False).logits[0, start:], found[start:])
        assert_as_near(found, exact, expected, lambda: torch.cat([alone(unpatched, doc) for doc in given]))
        sum(loss_of(*both) for both in zip(of_each(row, found), of_each(row, labels[0]))).backward()
    assert_finite(gradients(model))


def _cast(doc: tiny_media.Document, dtype: torch.dtype) -> tiny_media.Document:
    """A document with pictures or sound in a dtype, as a processor's output is cast by ``.to(dtype)``."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in doc.items()}
