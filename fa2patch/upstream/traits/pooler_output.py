"""``pooler_output``: one vector for each document instead of one for each row."""

from __future__ import annotations

from typing import Any, Callable

import torch

from ..._torch import uncompiled
from ..._types import Model
from ...documents.boundaries import Boundaries
from .. import apart
from ..packed_mask import PackedMask
from ..step import Step
from .trait import Trait


class PoolerOutput(Trait):
    """Run the base model's pooler on each document."""

    name = "pooler output"

    def before(self, step: Step, found: Any) -> None:
        if step.mask is not None and isinstance(getattr(step.module, "pooler", None), torch.nn.Module):
            step.mask.require_whole_rows(
                "a pooler of each document's first token (add_pooling_layer=False leaves it out)"
            )

    def after(self, step: Step, found: Any, output: Any) -> Any:
        if step.mask is None or step.handed or not step.role.innermost:
            return output
        return pool_documents(step.module, output, step.mask)


def pool_documents(model: Model, output: Any, mask: PackedMask) -> Any:
    """The output of a base model, with a ``pooler_output`` for each document of a packed batch.

    Args:
        model: the base model. If it has no ``pooler`` module, ``pooler_output`` becomes None.
        output: the model's output or a tuple, with hidden states ``[batch, length, hidden]`` first.
        mask: the packed mask.

    Returns:
        The output with ``pooler_output`` ``[documents, hidden]`` instead of ``[batch, hidden]``. A run of padding
        counts as a document.
    """
    pooler = getattr(model, "pooler", None)
    in_tuple = isinstance(output, tuple)
    if not isinstance(pooler, torch.nn.Module):
        if not in_tuple and getattr(output, "pooler_output", None) is not None:
            output["pooler_output"] = None
    elif in_tuple:
        return (output[0], _pooled(_pooling(model), output[0], mask.boundaries), *output[2:])
    elif getattr(output, "pooler_output", None) is not None:
        output["pooler_output"] = _pooled(_pooling(model), output[0], mask.boundaries)
    return output


def _pooling(model: Model) -> Callable[..., torch.Tensor]:
    """The function of a document ``[1, length, hidden]`` that gives its vector. ALBERT's pooler is a linear layer."""
    pooler: Callable[..., torch.Tensor] = getattr(model, "pooler")  # noqa: B009 (mypy does not know the attribute)
    if not isinstance(pooler, torch.nn.Linear):
        return pooler
    activation = getattr(model, "pooler_activation", torch.nn.Identity())
    return lambda piece: activation(pooler(piece[:, 0]))


@uncompiled
def _pooled(pooling: Callable[..., torch.Tensor], hidden: torch.Tensor, documents: Boundaries) -> torch.Tensor:
    pieces = apart.Documents(documents, hidden.shape).split(hidden)
    return torch.cat([pooling(piece) for piece in pieces])
