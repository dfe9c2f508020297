"""How one ``forward`` is called: its arguments by name, and back again."""

from __future__ import annotations

import inspect
from typing import Any, Callable

import torch

from .._compile import compiling
from ..documents.names import CACHES, LENGTHS, TOKENS
from ..errors import BadBatch, PackingNotIsolated


class Calls:
    """The arguments of one ``forward``, as its signature names them.

    Args:
        original: the function.
        method: whether its first argument is the module.
    """

    def __init__(self, original: Callable[..., Any], method: bool = True) -> None:
        parameters = list(inspect.signature(original).parameters.values())[int(method) :]
        self.original = original
        self.positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.names = {p.name for p in parameters}
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.names

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name. Behind somebody's ``*args`` the first is ``input_ids``; more than that is refused."""
        if not compiling() and torch._C._get_tracing_state() is not None:
            raise PackingNotIsolated(
                "torch.jit.trace (or torch.onnx.export, or TensorBoard's add_graph) is recording a patched model: what "
                "it records of this batch, its documents or that it has none, would be done with every later batch. "
                "Take the patch off first: fa2patch.revert(model). torch.compile looks at every batch."
            )
        rest = args[len(self.positional) :]
        if len(rest) > 1 or (rest and self.positional):
            raise PackingNotIsolated(
                f"{len(args)} arguments without names came to a forward that was replaced by one with *args: which "
                "of them are position_ids is not known. Call the model with keywords."
            )
        first = {"input_ids": rest[0]} if rest else {}
        return {**first, **dict(zip(self.positional, args)), **kwargs}

    def arranged(self, args: tuple[Any, ...], call: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the original takes them, without those of the collator's lengths that have no place there.

        Args:
            args: what came without names: whether ``input_ids`` stood behind somebody's ``*args``.
        """
        call = {name: value for name, value in call.items() if name not in LENGTHS or self.takes(name)}
        rest = (call.pop("input_ids"),) if len(args) > len(self.positional) else ()
        return rest, call

    def make(self, model: Any, args: tuple[Any, ...], call: dict[str, Any]) -> Any:
        """The original's result."""
        rest, call = self.arranged(args, call)
        return self.original(model, *rest, **call)


def cache_of(call: dict[str, Any]) -> Any:
    """The cache or state among a forward's arguments, or None."""
    return next((call[name] for name in CACHES if call.get(name) is not None), None)


def batch_shape(call: dict[str, Any]) -> tuple[tuple[int, int], torch.device]:
    """``(batch, length)`` and the device of a forward's inputs."""
    for name in TOKENS:
        given = call.get(name)
        if given is not None:
            if not isinstance(given, torch.Tensor) or given.dim() < 2:
                found = f"{list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
                raise BadBatch(f"{name}: expected a tensor [batch, length, ...], found {found}.")
            return (given.shape[0], given.shape[1]), given.device
    raise PackingNotIsolated("forward was given neither input_ids nor inputs_embeds.")
