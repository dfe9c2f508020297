"""Dense batches of a patched model: compute them as without fa2patch, and notice packed batches among them."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from .._torch import compiling
from .._types import Model
from ..documents.names import LENGTHS
from ..errors import NothingPacked, PackingNotIsolated
from . import luggage
from .calls import passed
from .find_models import models
from .step import Patched, Step

SAY_AFTER = 16
"""The number of training batches without document information after which a warning is given."""


class _Reached(threading.local):
    """What this thread has done. It is used for comparisons only and carries no boundaries.

    Attributes:
        times: how often a base model's patched forward was entered.
        inside: ``(patch, position_ids, attention_mask)`` of each dense batch being computed, the outermost first.
    """

    times = 0

    def __init__(self) -> None:
        self.inside: list[Any] = []


reached = _Reached()


def found_around(step: Step) -> list[tuple[Any, Any]]:
    """Return ``(position_ids, attention_mask)`` of each dense batch that an outer model of this patch is computing."""
    if compiling():
        return []
    return [(ids, mask) for patch, ids, mask in reached.inside if patch is step.patch]


def computed(step: Step) -> Any:
    """Compute a dense batch, and let inner models know that it was found dense.

    Raises:
        PackingNotIsolated: the batch did not pass through the base model's patched forward.
    """
    if compiling():
        if _says_nothing(step):
            step.patch.capture_unpacked()
        if isinstance(step.call.get("position_ids"), torch.Tensor) and not step.role.innermost:
            step.call["position_ids"] = luggage.attach(step.call["position_ids"], luggage.Piece(luggage.MASK, None))
        return step.calls.make(step.module, step.args, step.call)
    before = reached.times
    if not found_around(step):
        _count_unpacked(step)
    with _looked(step):
        output = step.calls.make(step.module, step.args, step.call)
    if not step.role.innermost and reached.times == before and _runs_eagerly(step.module):
        raise PackingNotIsolated(
            "a batch did not come through the base model's patched forward: somebody has replaced it after "
            "fa2patch.apply. See fa2patch.status(model); apply fa2patch last."
        )
    return output


def _runs_eagerly(model: Model) -> bool:
    """Whether the base model's forward is known to run as Python. One that is compiled by itself counts no entries."""
    own = ("forward", "_orig_mod", "_compiled_call_impl")
    inner = models(model)[1:]
    return not any(vars(base).get(name) or base._modules.get(name) for base in inner for name in own)


def _count_unpacked(step: Step) -> None:
    """Count training batches without document information and warn once, because joined rows look the same."""
    patch = step.patch
    if patch.unpacked is None or not _says_nothing(step):
        return
    patch.unpacked += 1
    if patch.unpacked == SAY_AFTER:
        warn_unpacked(patch, f"{SAY_AFTER} training batches have come and none said")


def _says_nothing(step: Step) -> bool:
    """Whether this is a training batch without document information."""
    if not (step.module.training and torch.is_grad_enabled()):
        return False
    return not passed(step.call, ("position_ids", *LENGTHS))


def warn_unpacked(patch: Patched, seen: str) -> None:
    """Warn that training batches come without document information, and stop the count.

    Args:
        patch: the model's patch.
        seen: the batches that were seen, as the beginning of a sentence that ends in where documents start.
    """
    patch.unpacked = None
    warnings.warn(
        f"fa2patch.apply(model) is on, but {seen} where documents "
        "start (position_ids, cu_seq_lens_*, seq_idx). If examples were joined in these rows (TRL up to 0.19 does "
        "so: packing=True, and padding_free=True without flash attention), they attend to each other. Collate with "
        "fa2patch.DataCollatorWithFlattening; fa2patch.verify(model, batch=batch) says what a batch holds.",
        NothingPacked,
        stacklevel=2,
    )


@contextlib.contextmanager
def _looked(step: Step) -> Iterator[None]:
    """Record that a dense batch is being computed, so that inner models do not take it for a packed batch."""
    reached.inside.append((step.patch, step.call.get("position_ids"), step.call.get("attention_mask")))
    try:
        yield
    finally:
        reached.inside.pop()
