"""Token types that a model takes from a table with one place for each position (BERT and its kin up to 4.57, ConvBERT).

Without ``token_type_ids``, such a model cuts its table of zeros to the length of the row, which may be longer than the
table.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import inspecting
from ..calls import batch_shape
from ..looked import Looked
from ..step import Step
from .trait import Trait

_TYPES = "token_type_ids"


class TokenTypes(Trait):
    """Give the zeros of such a table, ``[batch, length]``, with a packed batch that has no token types."""

    name = "token types"

    def finds(self, model: Looked) -> bool | None:
        tables = any(_TYPES in module._buffers for module in model.decoder.modules())
        takes = _TYPES in inspecting.upstream_parameters(type(model.decoder).forward)
        return True if tables and takes else None

    def before(self, step: Step, found: Any) -> None:
        if step.mask is not None and step.role.innermost and step.call.get(_TYPES) is None:
            shape, device = batch_shape(step.call)
            step.call[_TYPES] = torch.zeros(shape, dtype=torch.long, device=device)
