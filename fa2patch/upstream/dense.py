"""Dense batches of a patched model: computed as ever, and noted, so that a packed batch cannot pass as one."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from .._compile import compiling
from ..documents.names import LENGTHS
from ..errors import NothingPacked, PackingNotIsolated
from . import luggage
from .find_models import models
from .step import Step

SAY_AFTER = 16
"""The number of training batches without document information after which a warning is given."""


class _Reached(threading.local):
    """What this thread has come through. It is only compared with; nothing is carried by it.

    Attributes:
        times: how often a base model's patched forward was entered.
        inside: for each model around this point that has found a batch to be dense, its patch, and the batch's
            position_ids and mask.
    """

    times = 0

    def __init__(self) -> None:
        self.inside: list[Any] = []


reached = _Reached()


def found_around(step: Step) -> list[tuple[Any, Any]]:
    """``(position_ids, attention_mask)`` of each dense batch that a model around this step's is computing."""
    if compiling():
        return []
    return [(ids, mask) for patch, ids, mask in reached.inside if patch is step.patch]


def computed(step: Step) -> Any:
    """The output of a dense batch. Models inside are told that the batch has been looked at."""
    if compiling():
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


def _runs_eagerly(model: Any) -> bool:
    """Whether the base model's forward runs as Python. A base model that was compiled by itself counts nothing."""
    own = ("forward", "_orig_mod", "_compiled_call_impl")
    inner = models(model)[1:]
    return not any(vars(base).get(name) or base._modules.get(name) for base in inner for name in own)


def _count_unpacked(step: Step) -> None:
    """Count training batches without document information, and warn once: rows that were joined look like these."""
    patch = step.patch
    if patch.unpacked is None or not (step.module.training and torch.is_grad_enabled()):
        return
    if any(step.call.get(name) is not None for name in ("position_ids", *LENGTHS)):
        return
    patch.unpacked += 1
    if patch.unpacked == SAY_AFTER:
        patch.unpacked = None
        warnings.warn(
            f"fa2patch.apply(model) is on, but {SAY_AFTER} training batches have come and none said where documents "
            "start (position_ids, cu_seq_lens_*, seq_idx). If examples were joined in these rows (TRL up to 0.19 does "
            "so: packing=True, and padding_free=True without flash attention), they attend to each other. Collate with "
            "fa2patch.DataCollatorWithFlattening; fa2patch.verify(model, batch=batch) says what a batch holds.",
            NothingPacked,
            stacklevel=2,
        )


@contextlib.contextmanager
def _looked(step: Step) -> Iterator[None]:
    """While a model computes a dense batch, the masks that models inside it get are the model's own."""
    reached.inside.append((step.patch, step.call.get("position_ids"), step.call.get("attention_mask")))
    try:
        yield
    finally:
        reached.inside.pop()
