"""Check that every layer was given the boundaries. A layer without them would mix documents."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any, Callable

import torch

from .._torch import compiling
from .._types import Model
from ..errors import PackingNotIsolated
from . import inspecting
from .find_layers import Layer
from .find_models import models
from .packed_mask import PackedMask
from .step import Step


class _Running(threading.local):
    """What this thread is computing. ``ran`` holds the ``id`` of each module that has run, if that is recorded."""

    ran: set[int] | None = None


_running = _Running()


def runs(module: Any, args: Any) -> None:
    """Forward pre-hook: record that a module runs."""
    if _running.ran is not None:
        _running.ran.add(id(module))


def computed(compute: Callable[[Step], Any], step: Step, mask: PackedMask) -> Any:
    """Compute a packed batch, and require that every layer that runs is given its boundaries.

    Not every layer of a model runs in each forward (``layerdrop``). Hooks tell which blocks ran, and hooks everywhere
    would take time in every model. So they are used from the first forward on that has missed a layer, which is
    computed once more.

    Args:
        compute: calls the model.
        step: the forward that passes the packed mask on.
        mask: the packed mask.

    Raises:
        PackingNotIsolated: a layer has run and was not given the boundaries.
    """
    if compiling():
        output = compute(step)
        if _misses(step, mask, None):
            _refuse(step, mask, None)
        return output
    if not step.patch.skips:
        output = compute(step)
        if not _misses(step, mask, None):
            return output
        step.patch.skips = True
        mask.calls.clear()
        del output
    output, ran = _recorded(compute, step)
    if _misses(step, mask, ran):
        _refuse(step, mask, ran)
    return output


def _recorded(compute: Callable[[Step], Any], step: Step) -> tuple[Any, set[int]]:
    """Compute, and return the output and the ``id`` of each module that ran."""
    before = _running.ran
    with contextlib.ExitStack() as stack:
        for module in {module for layer in step.patch.attention for module in _inside_block(step, layer)}:
            stack.callback(module.register_forward_pre_hook(runs).remove)
        stack.callback(setattr, _running, "ran", before)
        ran: set[int] = set()
        _running.ran = ran
        return compute(step), ran


def _inside_block(step: Step, layer: Layer) -> list[torch.nn.Module]:
    """The modules inside the block that holds a layer. If one of them runs, the block does more than hand states on.

    Other code may compute a block's attention past its layer, so that it does not show whether the layer runs.
    """
    parts = layer.name.split(".")
    end = next((at for at, part in enumerate(parts, 1) if part.isdigit()), len(parts))
    block: torch.nn.Module = models(step.module)[-1].get_submodule(".".join(parts[:end]))
    return [module for module in list(block.modules())[1:] if not inspecting.is_scripted(module)]


def _misses(step: Step, mask: PackedMask, ran: set[int] | None) -> bool:
    """Whether a layer was not given this batch's boundaries.

    The number of layers is compared in every forward. Eagerly, the layers themselves are compared too, until a packed
    batch has reached them all.
    """
    patch, layers = step.patch, _needing(step, mask, ran)
    missed = len(mask.calls) < len(layers)
    if not compiling():
        known = None not in mask.calls  # 4.47's and 4.48's GPT-NeoX does not pass the layer to its function
        missed = missed or (known and not patch.vouched and bool(_not_given(layers, mask, step.module)))
        patch.vouched = not missed and ran is None and mask.shape[1] > 1
    return missed


def _needing(step: Step, mask: PackedMask, ran: set[int] | None) -> tuple[Layer, ...]:
    """The layers that need boundaries: all, or those whose blocks ran.

    Rows of one token need none in mixers, and LFM2 of 5.10 passes none.
    """
    layers = step.patch.attention
    if mask.shape[1] == 1:
        layers = tuple(layer for layer in layers if layer.seam != "mixer")
    if ran is None:
        return layers
    return tuple(layer for layer in layers if any(id(module) in ran for module in _inside_block(step, layer)))


def _refuse(step: Step, mask: PackedMask, ran: set[int] | None) -> None:
    layers = _needing(step, mask, ran)
    names = _not_given(layers, mask, step.module)
    why = "Their attention was replaced after fa2patch.apply: apply fa2patch last."
    if ran is None:
        why = (
            "Either their attention was replaced after fa2patch.apply: apply fa2patch last. Or the model has skipped "
            "them (layerdrop), which a compiled graph cannot tell: switch that off, or do not compile."
        )
    raise PackingNotIsolated(
        f"of {len(layers)} attention layers only {len(layers) - len(names)} were given the "
        f"boundaries of this packed batch; not {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}. {why} See "
        "fa2patch.status(model).layers."
    )


def _not_given(layers: Sequence[Layer], mask: PackedMask, model: Model) -> list[str]:
    """The names and classes of the layers that were not given the boundaries.

    They are looked up in the model that was called, because a ``DataParallel`` replica carries the original's patch.
    """
    given = {id(module) for module in mask.calls}
    decoder = models(model)[-1]
    modules = [(layer.name, decoder.get_submodule(layer.name)) for layer in layers]
    return [f"{name} ({type(module).__name__})" for name, module in modules if id(module) not in given]
