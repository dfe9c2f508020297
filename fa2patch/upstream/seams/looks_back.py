"""A mixer that looks at later tokens (ConvBERT) cannot compute a tree: a prompt would see what continues it.

What paths share is computed on each path and taken from one of them. It must be the same on all. This is checked on the
first tree that a mixer computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch

from ...errors import BadParents
from ...trying import without_gradients
from .. import apart

NEAR = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference by dtype, relative to the largest value; 3e-2 in half precision."""

_LOOK_BACK: WeakSet[torch.nn.Module] = WeakSet()
"""Mixers that have been checked."""


@without_gradients()
def require(
    module: torch.nn.Module, documents: apart.Documents, hidden: torch.Tensor | None, outputs: Sequence[Any]
) -> None:
    """Raise :class:`BadParents` if a shared segment's outputs depend on what follows it.

    Args:
        module: the mixer.
        documents: the documents that it was run on.
        hidden: its hidden states ``[batch, length, width]``, or None if they are not known.
        outputs: its output for each call.
    """
    found = documents.shared()
    if found is None or module in _LOOK_BACK:
        return
    one, tokens, other = found
    if hidden is not None:
        paths = torch.split(documents.end_to_end(hidden), documents.lengths)
        behind, beside = (paths[at][tokens.stop :] for at in (one, other))
        if torch.equal(behind, beside):
            return  # two equal paths show nothing
    states = documents.tokens_of([output[0] if isinstance(output, tuple) else output for output in outputs])
    if states is None:
        return  # joining the outputs is an error
    paths = torch.split(states, documents.lengths)
    first, second = paths[one][tokens], paths[other][tokens]
    if (first - second).abs().max() > NEAR.get(first.dtype, 3e-2) * first.abs().max():
        raise BadParents(
            f"segment_parents: {type(module).__name__} looks at later tokens, so a prompt would be another one before "
            "each of its completions. Give this model every sequence as a document of its own."
        )
    if hidden is not None:
        _LOOK_BACK.add(module)
