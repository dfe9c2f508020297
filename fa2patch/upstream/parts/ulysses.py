"""DeepSpeed's Ulysses (``UlyssesSPAttentionHF``): find it, and the part of the rows that this process holds.

``register_with_transformers`` puts a function into ``ALL_ATTENTION_FUNCTIONS`` that holds the ``UlyssesSPAttentionHF``
in its closure. DeepSpeed's data loader, process groups, optimizer and losses stay in use. Packed attention makes the
exchange by itself, because that module hands no boundaries on, shares out no sinks, and gathers ids in every layer.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..._types import Function
from .. import inspecting
from . import collectives
from .row_part import RowPart

PACKAGE = "deepspeed.runtime.sequence_parallel"
_CLASS = "UlyssesSPAttentionHF"


def attention_of(function: Function | None) -> Any:
    """The ``UlyssesSPAttentionHF`` behind an attention function, or None."""
    held = inspecting.enclosed(function)
    return next((value for value in held if any(cls.__name__ == _CLASS for cls in type(value).__mro__)), None)


def part_of(attention: Any, training: bool) -> RowPart | None:
    """The part that this process holds; None if rows are whole.

    Args:
        attention: the ``UlyssesSPAttentionHF``.
        training: whether the model is in training mode. With ``disable_in_eval``, which accelerate sets, rows are
            whole in evaluation.
    """
    group = attention.process_group
    processes = dist.get_world_size(group)
    if processes == 1 or (getattr(attention, "disable_in_eval", False) and not training):
        return None
    return RowPart(dist.get_rank(group), processes, collectives.named(group))
