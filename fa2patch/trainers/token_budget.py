"""A trainer's steps in passes of a budget of tokens, in one of two ways that give the steps of the whole batch.

For any loss, passes are checkpoints, the forward is computed twice, and the loss sees the outputs of the whole batch
(:mod:`fa2patch.upstream.passes`). A loss that is known to be a sum over tokens (:mod:`.known_losses`) is computed once,
pass by pass: ``compute_loss`` returns the loss of the first pass, and ``accelerator.backward`` computes the others.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, Callable

import torch
from torch.nn.parallel import DistributedDataParallel

from .._torch import eagerly
from ..documents.row_shape import PLAIN, RowShape
from ..errors import Fa2PatchError
from ..packing.passes import Counts, Passes, cut_into_passes
from ..packing.ranks import refusal_told
from ..packing.units import as_units
from ..patch.applying import budget_of, status
from ..patch.model_plan import ModelPlan
from ..patch.state import Patch
from ..proof.unknown import unknown
from ..upstream.find_layers import ModelLayers
from ..upstream.find_models import outermost_models
from . import known_losses

logger = logging.getLogger("fa2patch")

Loss = Callable[[Any], torch.Tensor]  # a trainer's loss of a batch


class TokenBudget:
    """Computes the training steps of a trainer in passes of at most ``max_tokens`` tokens."""

    def __init__(self, max_tokens: int, too_long: str = "error", shapes: RowShape | None = None) -> None:
        self.max_tokens, self.too_long, self.shapes = max_tokens, too_long, shapes or PLAIN
        self.counts, self._since = Counts(), time.perf_counter()
        # why the loss sees the whole batch; empty if passes are computed once, None before the first batch
        self.why_exact: str | None = None
        self._rest: Iterator[torch.Tensor] | None = None  # of a step, once its first pass is computed
        self._first: torch.Tensor | None = None
        self._stepping = False
        self._looked_at: ModelPlan | None = None
        self._held = ""

    def install(self, trainer: Any) -> None:
        self.trainer = trainer
        # Trainer calls compute_loss and accelerator.backward in the same way from Transformers 4.36 to 5.24.
        for around in (self.training_step, self.compute_loss, self.log):
            name = around.__name__
            own = getattr(trainer, name)
            # Trainer reads the parameters of its methods, to know whether it divides by the labels of a whole step
            setattr(trainer, name, functools.wraps(own)(functools.partial(around, own)))

    def __repr__(self) -> str:
        way = "no batch yet" if self.why_exact is None else self.why_exact or "each pass is computed once"
        return f"<TokenBudget: passes of at most {self.max_tokens} tokens; {way}>"

    def give(self, model: Any) -> None:
        patch = status(model)
        if patch is not None:
            patch.limit(budget_of(self.max_tokens, self.too_long, self.shapes))

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The trainer's own step calls compute_loss and accelerator.backward, which come here.
        accelerator = self.trainer.accelerator
        own, backward = vars(accelerator).get("backward"), accelerator.backward
        accelerator.backward = functools.partial(self._backward, backward)
        self._stepping, self._rest = True, None
        try:
            found = step(*args, **kwargs)
            if self._rest is not None and next(self._rest, None) is not None:
                raise Fa2PatchError(
                    "max_tokens: expected a trainer that hands the loss of compute_loss to accelerator.backward, found "
                    f"that {type(self.trainer).__name__}.training_step has not called it, so that only the first pass "
                    "has a gradient. Call self.accelerator.backward(loss), or leave max_tokens out."
                )
            return found
        finally:
            self._stepping, self._rest, self._first = False, None, None
            del accelerator.backward
            if own is not None:
                accelerator.backward = own

    def compute_loss(self, compute: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # The result is the loss of the first pass if the batch's loss is known to be a sum.
        with_outputs = kwargs.get("return_outputs", args[0] if args else False)
        if not self._stepping or self._rest is not None or with_outputs or not isinstance(inputs, Mapping):
            return compute(model, inputs, *args, **kwargs)
        if not self.why_exact:
            why = known_losses.why_unknown(self.trainer, compute, self._unknown(), kwargs)
            if not why and self._begins(lambda batch: compute(model, batch, *args, **kwargs), model, inputs):
                self._say("")
                return self._first
            self._say(why or "torch's graph of its loss shows more than a sum over tokens")
        budget: Any = getattr(self._patch, "budget", None)
        if budget is None:
            return compute(model, inputs, *args, **kwargs)
        before, budget.counts = budget.counts, self.counts
        try:
            return compute(model, inputs, *args, **kwargs)
        finally:
            budget.counts = before

    def log(self, log: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if "loss" in logs and self.counts.batches:
            logs.update(self.counts.logs(time.perf_counter() - self._since, bool(self.shapes)))
            self.counts, self._since = Counts(), time.perf_counter()
        return log(logs, *args, **kwargs)

    @property
    def _patch(self) -> Patch | None:
        held = [*outermost_models(self.trainer.model).values()]
        return status(held[0]) if len(held) == 1 else None

    def _unknown(self) -> str:
        # The model that is trained is looked at once for each of its plans.
        patch = self._patch
        if patch is None:
            return "what is not patched"
        if patch.facts.stacks:
            return "two stacks, whose tokens are those of two rows"
        if self._looked_at is not patch.plan:
            self._looked_at, self._held = patch.plan, unknown(ModelLayers(patch.model))
        return self._held

    def _say(self, why: str) -> None:
        if why == self.why_exact:
            return
        self.why_exact = why
        way = f"twice, and its loss sees the whole batch: {why}" if why else "once: its loss is a sum over tokens"
        logger.warning(
            "fa2patch: %s computes its batches in passes of at most %d tokens, each of them %s.",
            type(self.trainer).__name__, self.max_tokens, way,
        )  # fmt: skip

    # --- a loss that is a sum, pass by pass ---------------------------------------------------------------------------

    def _begins(self, compute: Loss, model: Any, inputs: Mapping[str, Any]) -> bool:
        # The other passes wait for the backward. The result is False if the loss is no sum.

        def loss(batch: Any) -> torch.Tensor:
            patch: Any = self._patch
            budget, patch.budget = patch.budget, None  # the model is given a pass already, and computes it at once
            try:
                with self.trainer.compute_loss_context_manager():
                    return compute(copy.copy(batch))  # a copy, because trainers take labels out of what they are given
            finally:
                patch.budget = budget

        with refusal_told(every_rank=True):
            units = as_units(inputs, self.shapes)
        passes = cut_into_passes(units, self.max_tokens, self.too_long, every_rank=True)
        if self.why_exact is None:
            with eagerly(), self._accumulating(model):  # a compiled graph says nothing of what is in it
                if known_losses.factor_of_sum(loss(passes[0])) is None:
                    return False
        self.counts.add(units.tokens, len(passes), int(passes.lengths.sum()), passes.padded_tokens)
        self._rest = self._losses(loss, model, passes)
        self._first = next(self._rest)
        return True

    def _losses(self, loss: Loss, model: Any, passes: Passes) -> Iterator[torch.Tensor]:
        # Each pass is computed when its loss is asked for, and its backward follows.
        factors: set[float | None] = set()
        for at, batch in enumerate(passes):
            with self._accumulating(model) if at + 1 < len(passes) else contextlib.nullcontext():
                found = loss(batch)
                if not known_losses.is_compiled(found):  # some may be: torch compiles a frame a few times only
                    factors.add(known_losses.factor_of_sum(found))
                if len(factors) > 1 or None in factors:
                    raise Fa2PatchError(
                        f"max_tokens: expected that the loss of {type(self.trainer).__name__} stays a sum over tokens, "
                        f"divided by one number, as it was in its first batch; found another in pass {at + 1} of "
                        f"{len(passes)}. Please report it."
                    )
                yield found

    def _backward(self, backward: Callable[..., Any], loss: torch.Tensor, **options: Any) -> None:
        # The trainer logs the value of `loss`, so it becomes that of all passes.
        if self._rest is None or self._first is None:
            backward(loss, **options)
            return
        # the trainer's own factor, such as one over the steps that it accumulates
        scale = torch.autograd.grad(loss, self._first, retain_graph=True)[0] if loss is not self._first else 1.0
        value = loss.detach().clone()
        backward(loss, **options)
        for each in self._rest:
            backward(each * scale, **options)
            value += each.detach() * scale
        loss.data.copy_(value)

    @contextlib.contextmanager
    def _accumulating(self, model: Any) -> Iterator[None]:
        # Gradients add up on this rank: DDP does not average them, and DeepSpeed makes no step.
        state = self.trainer.accelerator.gradient_state
        synchronises = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
                yield
        finally:
            state._set_sync_gradients(synchronises)
