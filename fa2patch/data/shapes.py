"""Checks of a collator's options for :mod:`fa2patch.packing.still_shapes`."""

from __future__ import annotations

from ..errors import CollatorError
from ..packing.still_shapes import STEPS
from .columns import integer


def check_rounding(name: str, value: int | str | None) -> None:
    if value is None or (isinstance(value, str) and value in STEPS):
        return
    if isinstance(value, str) or integer(name, value) < 1:
        raise CollatorError(f"{name}: expected a positive number, 'power', 'eighth' or None, found {value!r}.")


def require_few(documents: int, most: int | None) -> None:
    if most is not None and documents > most:
        raise CollatorError(
            f"max_documents={most}, but a row has {documents} documents. Raise max_documents to the most that a row "
            "may hold (of a packing.plan: max(map(len, plan))), or put fewer into a row."
        )


def require_short(longest: int, stated: int) -> None:
    if longest > stated:
        raise CollatorError(
            f"longest_document={stated}, but a document of the row, or its padding, has {longest} tokens. Raise "
            "longest_document; the length of a whole row is always enough."
        )
