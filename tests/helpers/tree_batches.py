"""Packed batches of segments with parents, as a patched model is called with them."""

from __future__ import annotations

from typing import Any

import torch


def tree_batch(*rows: list[tuple[int, int]], ids: torch.Tensor | None = None) -> dict[str, Any]:
    """Make a batch of rows of segments, with random tokens.

    Args:
        rows: for each row its segments in order: ``(length, the number of its parent in this row, or -1)``.
        ids: the tokens, int64 ``[rows, length]``.
    """
    lengths: list[int] = []
    parents: list[int] = []
    positions = []
    for row in rows:
        base, offsets = len(lengths), [0] * len(row)
        for at, (length, parent) in enumerate(row):
            offsets[at] = offsets[parent] + row[parent][0] if parent >= 0 else 0
            lengths.append(length)
            parents.append(base + parent if parent >= 0 else -1)
        counted = zip(offsets, (length for length, _ in row))
        positions.append(torch.cat([torch.arange(offset, offset + length) for offset, length in counted]))
    position_ids = torch.stack(positions)
    if ids is None:
        ids = torch.randint(3, 90, position_ids.shape, generator=torch.Generator().manual_seed(1))
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    said = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": max(lengths), "max_length_k": max(lengths)}
    return {
        "input_ids": ids, "position_ids": position_ids, **said,
        "segment_parents": torch.tensor(parents, dtype=torch.int32),
    }  # fmt: skip
