"""The labels of a packed row: what one document's last token would predict of the next one's first."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import BadBatch

LABELS = ("labels", "shift_labels")
"""Arguments that hold the tokens to predict; in ``shift_labels`` each stands where it is predicted."""

IGNORED = -100


def inside_documents(labels: Any, cu_seqlens: torch.Tensor, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Labels ``[batch, length]`` without those that one document's last token would predict of the next one's first.

    In padded training no token predicts a row's first token either.
    """
    if not isinstance(labels, torch.Tensor) or (labels.dim() <= 2 and labels.numel() != shape[0] * shape[1]):
        found = f"{list(labels.shape)}" if isinstance(labels, torch.Tensor) else type(labels).__name__
        raise BadBatch(f"{name}: expected a tensor [{shape[0]}, {shape[1]}], one for each token, found {found}.")
    cu = cu_seqlens.flatten()
    at = cu[:-1] if name == "labels" else (cu[1:] - 1).clamp(min=0)
    if labels.dim() > 2:
        return labels
    padded = torch.nn.functional.pad(labels.flatten(), (0, 1))  # documents without tokens may start behind the last
    return padded.index_fill(0, at.to(labels.device, torch.int64), IGNORED)[:-1].view_as(labels)
