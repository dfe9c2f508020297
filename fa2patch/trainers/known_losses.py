"""Losses whose passes add up to the loss of the batch, so that each pass is computed once, with its own backward.

They are those of ``Trainer.compute_loss`` as Transformers wrote it, around a model of known code, if torch's graph is
one factor (1 / ``num_items_in_batch``) times a sum of ``nll_loss``. Each label belongs to a token of one pass, so the
passes' sums, and their gradients, add up to those of the batch.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch

# Digests of the source of Trainer.compute_loss, each with the first release of Transformers that has it. Before 4.46, a
# loss is divided by a number of the batch.
COMPUTE_LOSS = {
    "11c60f2eae90442f": "4.46",
    "f2417bd908cdc6d9": "4.49",
    "bdedc854d5ea367f": "4.53",
    "a8e01b2818b53b24": "4.54",
    "8e001418195322ae": "4.56",
    "a632e3220093cdfe": "4.57",
    "0ae6aa61c231fa7a": "5.0",
    "c3e7765e0a2ac18a": "5.2",
    "65f96c374f8a85e3": "5.3",
    "d69530b75a519003": "5.10",
    "784a390428b9dabb": "5.15",
    "160dea726d2f28bd": "5.17",
}

_SUM = 2  # reduction="sum" in torch's graphs (at::Reduction)

# Behind these nodes of a graph stands the same number. DDP's node has all outputs of a model, in their order.
_SAME_VALUE = ("ToCopyBackward0", "ViewBackward0", "AliasBackward0", "_DDPSinkBackward")


def digest(function: Any) -> str:
    # A changed comment makes another digest, too.
    return _digest_of(getattr(inspect.unwrap(function), "__code__", None))


@functools.lru_cache(maxsize=16)
def _digest_of(code: CodeType | None) -> str:
    try:
        source = "" if code is None else inspect.getsource(code)
    except OSError:  # made by exec
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def why_unknown(trainer: Any, compute: Any, held: str, given: dict[str, Any]) -> str:
    # The result is empty if the graph of the loss may show that it is a sum over tokens. `held` is what the model holds
    # that fa2patch does not know.
    name = type(trainer).__name__
    if digest(compute) not in COMPUTE_LOSS:
        return f"{name}.compute_loss is not one that is known to be a sum (Trainer's own from Transformers 4.46 on is)"
    if _file(type(trainer).training_step) != _file(compute):
        return f"{name} has a training_step of its own"
    engine = getattr(trainer.accelerator, "deepspeed_engine_wrapped", None)
    if engine is not None and "sync_gradients" not in inspect.signature(engine.backward).parameters:
        return "this accelerate cannot tell DeepSpeed which backward is the last of a step"
    if given.get("num_items_in_batch") is None:
        return "its loss is divided by a number of the batch, and not by one of the step"
    if getattr(trainer, "compute_loss_func", None) is not None or getattr(trainer, "label_smoother", None) is not None:
        return f"{name} has a compute_loss_func or smooths labels"
    return f"its model holds {held}" if held else ""


def _file(function: Any) -> str:
    return str(inspect.unwrap(function).__code__.co_filename)


def factor_of_sum(loss: torch.Tensor) -> float | None:
    # This is f for a loss that is f times a sum of nll_loss, as torch's graph says.
    factor = 1.0
    for node in _chain(loss):
        name = node.name()
        if name == "NllLossBackward0":
            return factor if node._saved_reduction == _SUM else None
        if name in ("MulBackward0", "DivBackward0"):
            by = node._saved_other
            if by is None or by.numel() != 1:
                return None
            factor *= float(by) if name == "MulBackward0" else 1 / float(by)
        elif name not in _SAME_VALUE:
            return None
    return None


def is_compiled(loss: torch.Tensor) -> bool:
    # A compiled graph says nothing of what is in it.
    return any(node.name().startswith("CompiledFunction") for node in _chain(loss))


def _chain(loss: torch.Tensor) -> Iterator[Any]:
    # The nodes come from the end of the loss's graph, as long as each depends on one other node, or hands several on.
    node: Any = loss.grad_fn
    number = loss.output_nr
    while node is not None:
        yield node
        behind = [each for each in node.next_functions if each[0] is not None]
        if len(behind) != 1 and node.name() not in _SAME_VALUE:
            return
        node, number = behind[number if len(behind) > 1 else 0] if behind else (None, 0)
