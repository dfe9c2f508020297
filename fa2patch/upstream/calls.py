"""The arguments of a ``forward``, converted to names and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._torch import compiling
from .._types import Args, Call, Function, Model
from ..documents.names import LENGTHS, TOKENS
from ..errors import BadBatch, PackingNotIsolated
from . import inspecting


class Calls:
    """Converts the arguments of one ``forward`` to names and back.

    Args:
        original: the function.
        method: whether its first argument is the module.

    Attributes:
        positional: the names of the parameters that can be passed by position.
        names: the names of all parameters.
        takes_any: whether the function takes ``**kwargs``.
    """

    def __init__(self, original: Function, method: bool = True) -> None:
        parameters = inspecting.parameters(original)[int(method) :]
        self.original = original
        self.positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.names = {p.name for p in parameters}
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def takes(self, name: str) -> bool:
        """Whether the function accepts a keyword of this name."""
        return self.takes_any or name in self.names

    def named(self, args: Args, kwargs: Call) -> Call:
        """Return the arguments by name. If the function takes only ``*args``, one positional argument is ``input_ids``.

        Raises:
            PackingNotIsolated: positional arguments have no known names, or a tracer such as ``torch.jit.trace`` runs.
        """
        if not compiling() and torch._C._get_tracing_state() is not None:
            refuse_recording("torch.jit.trace (or torch.onnx.export, or TensorBoard's add_graph)")
        rest = args[len(self.positional) :]
        if len(rest) > 1 or (rest and self.positional):
            raise PackingNotIsolated(
                f"{len(args)} arguments without names came to a forward that was replaced by one with *args: which "
                "of them are position_ids is not known. Call the model with keywords."
            )
        first = {"input_ids": rest[0]} if rest else {}
        return {**first, **dict(zip(self.positional, args)), **kwargs}

    def arranged(self, args: Args, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as the original takes them, without collator lengths that it does not accept.

        Args:
            args: the positional arguments of the call. They show whether ``input_ids`` came through ``*args``.
            call: the arguments by name.
        """
        call = {name: value for name, value in call.items() if name not in LENGTHS or self.takes(name)}
        rest = (call.pop("input_ids"),) if len(args) > len(self.positional) else ()
        return rest, call

    def make(self, model: Model, args: Args, call: Call) -> Any:
        """Call the original."""
        rest, call = self.arranged(args, call)
        return self.original(model, *rest, **call)


def refuse_recording(what: str) -> None:
    """Raise :class:`PackingNotIsolated` because a forward is being recorded.

    Args:
        what: what records it, as the beginning of a sentence.
    """
    raise PackingNotIsolated(
        f"{what} is recording a patched model: what it records of this batch, its documents or that it has none, would "
        "be done with every later batch. Take the patch off first: fa2patch.revert(model). torch.compile looks at "
        "every batch."
    )


def passed(call: Call, names: Iterable[str]) -> Call:
    """Return the arguments of these names that a forward was given, without those that are None."""
    return {name: call[name] for name in names if call.get(name) is not None}


def batch_shape(call: Call) -> tuple[tuple[int, int], torch.device]:
    """Return ``(batch, length)`` and the device of a forward's inputs.

    Raises:
        BadBatch: the tokens are not a tensor ``[batch, length, ...]``.
        PackingNotIsolated: there are neither ``input_ids`` nor ``inputs_embeds``.
    """
    for name, given in passed(call, TOKENS).items():
        if not isinstance(given, torch.Tensor) or given.dim() < 2:
            found = f"{list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
            raise BadBatch(f"{name}: expected a tensor [batch, length, ...], found {found}.")
        return (given.shape[0], given.shape[1]), given.device
    raise PackingNotIsolated("forward was given neither input_ids nor inputs_embeds.")
