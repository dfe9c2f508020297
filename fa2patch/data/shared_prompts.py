"""Preference pairs in a packed row that holds each prompt once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..documents.names import IGNORED_LABEL, PARENTS
from ..packing.prefixes import common
from .collators import DataCollatorWithFlattening
from .flattening import Columns, counted


def flatten_pairs(
    chosen: Sequence[Columns], rejected: Sequence[Columns], flatten: DataCollatorWithFlattening
) -> dict[str, Any]:
    """Concatenate the documents of pairs, what both begin with once, in front of the chosen one.

    Args:
        chosen, rejected: ``input_ids`` and ``labels`` (-100 in the prompt) of the documents of each pair.
        flatten: The collator of the segments, which returns their lengths.

    Returns:
        The collator's batch and ``segment_parents``.
    """
    segments: list[Columns] = []
    parents: list[int] = []

    def add(document: Columns, part: slice, parent: int) -> None:
        counts = counted([len(document["input_ids"])], flatten.position_ids_start)
        segments.append({name: values[part] for name, values in {**document, "position_ids": counts}.items()})
        parents.append(parent)

    prompts = []  # for each pair the number of tokens that are shared, and their segment
    for one, other in zip(chosen, rejected):
        shared, prompt = _in_common(one, other), -1
        if shared:
            prompt = len(segments)
            add(one, slice(shared), -1)
        add(one, slice(shared, None), prompt)
        prompts.append((shared, prompt))
    for document, (shared, prompt) in zip(rejected, prompts):
        add(document, slice(shared, None), prompt)
    batch = flatten(segments)
    paddings = len(batch["cu_seq_lens_q"]) - 1 - len(segments)
    return {**batch, PARENTS: torch.tensor(parents + [-1] * paddings, dtype=torch.int32)}


def _in_common(one: Columns, other: Columns) -> int:
    """Return how many tokens two documents share: those of the prompt that both begin with, less the last one."""
    return max(common(_prompt(one), _prompt(other)) - 1, 0)


def _prompt(document: Columns) -> Any:
    """Return the ids in front of a document's first label."""
    learned = document["labels"] != IGNORED_LABEL
    return document["input_ids"][: int(learned.argmax()) if learned.any() else len(learned)]
