"""Forward hooks of a patched model, which work while a foreign forward stands in the place of ours.

The hooks are module-level functions, so that copies and pickles of a model keep them.
"""

from __future__ import annotations

from typing import Any

import torch

from .._types import Args, Call
from . import attached, caches, heads, other_code
from .forward import prepare, recognise
from .step import MARK, ROLE, Step


def add(module: torch.nn.Module) -> None:
    if before_other_code in module._forward_pre_hooks.values():
        return
    module.register_forward_pre_hook(before_other_code, with_kwargs=True)
    module.register_forward_hook(after_other_code, with_kwargs=True)


def remove(module: torch.nn.Module) -> None:
    for table, with_kwargs, hook in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, before_other_code),
        (module._forward_hooks, module._forward_hooks_with_kwargs, after_other_code),
    ):
        for number in [number for number, held in table.items() if held is hook]:
            del table[number]
            with_kwargs.pop(number, None)


def before_other_code(module: Any, args: Args, kwargs: Call) -> Any:
    # The stages act on the batch (for example, on labels that cross documents), and its boundaries are attached to
    # `position_ids`. A batch without these is left alone, and so is a forward that says nothing of its arguments: a
    # packed batch that they lead to is refused where it arrives.
    patch, own = module.__dict__.get(MARK), module.__dict__.get("forward")
    # other_code.on_top's own first question: every forward of every patched model asks it
    if patch is None or (other_code.of_class(type(module).forward) if own is None else other_code.on_top(module)):
        return None
    if caches.has_paged(kwargs):
        return None
    calls = other_code.calls_of(module)
    call = calls.named(args, kwargs)
    if call is None:
        return None
    tokens = call.get("input_ids")
    if hasattr(call.get("inputs_embeds") if tokens is None else tokens, attached.POOLED):
        return None
    step = Step(module, patch, module.__dict__[ROLE], calls, args, call, by_hook=True)
    recognise(step)
    if not (isinstance(step.call.get("position_ids"), torch.Tensor) and calls.takes_ids):
        return None
    prepare(step)
    step.attach("position_ids", attached.Piece(attached.MASK, step.mask))
    return calls.arranged(args, step.call)


def after_other_code(module: Any, args: Args, kwargs: Call, output: Any) -> None:
    piece = getattr(kwargs.get("position_ids"), attached.MASK, None)
    if piece is None or piece.content is None:
        return
    role = module.__dict__[ROLE]
    if (piece.delivered and not role.outermost) or other_code.on_top(module):
        return
    attached.require_delivered(piece, module)
    if role.outermost:
        heads.refuse_outputs_of_rows(module, output, kwargs, piece.content, role.predicts_the_next)
