"""A trainer's steps in passes: each batch is cut into packed passes of a budget of tokens, inside ``training_step``.

A ``Trainer`` computes a batch's loss in ``compute_loss``, scales it, hands it to ``accelerator.backward`` and returns
its value. Both calls are the same from Transformers 4.36 to 5.24 and in TRL's trainers. So ``compute_loss`` returns the
loss of the first pass, and ``accelerator.backward`` computes the other passes before it returns.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Callable

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import BadArgument, Fa2PatchError
from ..packing import example_costs, imbalance
from ..packing.passes import Passes, of_all_ranks, of_units, units_of
from ..packing.plans import check_budget
from ..packing.still_shapes import PLAIN, StillShapes
from . import trainer_notes
from .loss_shares import Loss, LossShares, Share


class TokenBudget:
    """Computes the training steps of a trainer in passes of at most ``max_tokens`` tokens.

    Its methods are put around those of the trainer, which is all that installs it.

    Args:
        trainer: A Trainer with patched models. Those that are given padded batches compute them packed.
        max_tokens, too_long: As in :func:`fa2patch.packing.passes`.
        shapes: Shapes of the passes, which need packed rows as batches; None for those of their documents.

    Attributes:
        shares: What is known of the trainer's loss.
        batches, passes, tokens, padded_tokens, lengths: Numbers of batches, of their passes, of their tokens, of their
            tokens with padding, and of the tokens of their passes with the padding of still shapes, since the last log.
        costs: The cost of each of these batches on each rank, tokens and attention, a list of ``[ranks]``.
    """

    def __init__(
        self, trainer: Any, max_tokens: int, too_long: str = "error", shapes: StillShapes | None = None
    ) -> None:
        self.trainer, self.max_tokens, self.too_long = trainer, check_budget(max_tokens), too_long
        self.shapes = shapes or PLAIN
        self.shares = LossShares(trainer, self.shapes)
        self._rest: Iterator[torch.Tensor] | None = None  # of a step, once its first pass is computed
        self._first: torch.Tensor | None = None
        self._stepping = False
        self._forget()
        for around in (self.training_step, self.compute_loss, self.log):
            name = around.__name__
            own = getattr(trainer, name)
            # Trainer reads the parameters of its methods, to know whether it divides by the labels of a whole step
            setattr(trainer, name, functools.wraps(own)(functools.partial(around, own)))

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the trainer's own step, whose ``compute_loss`` and ``accelerator.backward`` come here."""
        accelerator = self.trainer.accelerator
        own, backward = vars(accelerator).get("backward"), accelerator.backward
        accelerator.backward = functools.partial(self._backward, backward)
        self._stepping, self._rest = True, None
        try:
            found = step(*args, **kwargs)
            self._require_backward()
            return found
        finally:
            self._stepping, self._rest, self._first = False, None, None
            del accelerator.backward
            if own is not None:
                accelerator.backward = own

    def compute_loss(self, compute: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of a training batch's first pass, and keep the other passes for the backward."""
        with_outputs = kwargs.get("return_outputs", args[0] if args else False)
        if not self._stepping or self._rest is not None or with_outputs or not isinstance(inputs, Mapping):
            return compute(model, inputs, *args, **kwargs)

        def loss(batch: Any) -> torch.Tensor:
            with self.trainer.compute_loss_context_manager():
                # a copy, because trainers take labels out of what they are given
                found: torch.Tensor = compute(model, copy.copy(batch), *args, **kwargs)
            return found

        passes = self._cut(loss, model, inputs)
        self._count(passes)
        self._rest = self._losses(loss, model, inputs, passes)
        self._first = next(self._rest)
        return self._first

    def log(self, log: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        """Add what the passes brought to the logs of training, and begin to count anew."""
        if "loss" in logs and self.batches:
            logs["passes_per_batch"] = round(self.passes / self.batches, 3)
            logs["tokens_per_second"] = round(self.tokens / (time.perf_counter() - self._since), 1)
            logs["padding_avoided"] = round(1 - self.tokens / max(self.padded_tokens, self.tokens), 4)
            if self.shapes:
                logs["padding_of_passes"] = round(1 - self.tokens / max(self.lengths, self.tokens), 4)
            if len(self.costs[0]) > 1:
                logs["imbalance_over_ranks"] = round(imbalance(np.array(self.costs)), 4)
            self._forget()
        return log(logs, *args, **kwargs)

    def _forget(self) -> None:
        self.batches = self.passes = self.tokens = self.padded_tokens = self.lengths = 0
        self.costs: list[list[float]] = []
        self._since = time.perf_counter()

    def _count(self, passes: Passes) -> None:
        self.batches, self.passes = self.batches + 1, self.passes + len(passes)
        self.tokens, self.lengths = self.tokens + int(passes.tokens.sum()), self.lengths + int(passes.lengths.sum())
        self.padded_tokens += passes.padded_tokens

    # --- cutting -----------------------------------------------------------------------------------------------------

    def _cut(self, loss: Loss, model: Any, inputs: Mapping[str, Any]) -> Passes:
        """The passes of a batch, as many on every rank, because ranks meet in each of them."""
        group = self.shares.group(inputs)
        units = units_of(inputs, group, self.shapes)
        exceeds = bool(self.shares.more * units.tokens.sum() > self.max_tokens)
        met = of_all_ranks((exceeds, float(example_costs(units.tokens).sum())))
        self.costs.append([cost for _, cost in met])
        if not self.shares.looked or any(each for each, _ in met):  # the first batch shows how much is computed
            _require_last_backwards(self.trainer.accelerator)
            self.shares.look(loss, model, inputs)
            if self.shares.group(inputs) != group:
                units = units_of(inputs, self.shares.group(inputs), self.shapes)
        budget = max(int(self.max_tokens / self.shares.more), 1)
        if self.shares.undecided and len(units.tokens) > 1:
            budget, units = max(budget, int(units.tokens.sum())), replace(units, most=None)
        return of_units(units, budget, self.too_long, every_rank=True)

    # --- computing ---------------------------------------------------------------------------------------------------

    def _losses(self, loss: Loss, model: Any, inputs: Mapping[str, Any], passes: Passes) -> Iterator[torch.Tensor]:
        """The weighed losses of passes. Each is computed where it is asked for, and its backward follows."""
        share = self.shares.share or Share(1, "sum")
        sizes = [len(units) for units in passes.units]
        total, before = share.divisor(inputs, sum(sizes)), trainer_notes.lists(self.trainer)
        for at, size in enumerate(sizes):
            batch = passes[at]
            # a pass without documents is there for the other ranks; its loss, as that without labels, may be no number
            weight = share.divisor(batch, size) / total if total and size else 0.0
            with self._accumulating(model) if at + 1 < len(sizes) else contextlib.nullcontext():
                found = loss(batch)
                yield found * weight if weight else torch.where(found.isfinite(), found, 0.0) * weight
        trainer_notes.merge(self.trainer, before, sizes)

    def _backward(self, backward: Callable[..., Any], loss: torch.Tensor, **options: Any) -> None:
        """Compute the passes' gradients. The trainer logs the value of ``loss``, so it becomes that of all passes."""
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

    def _require_backward(self) -> None:
        """Require that all passes of a step were computed."""
        if self._rest is not None and next(self._rest, None) is not None:
            name = type(self.trainer).__name__
            raise Fa2PatchError(
                "max_tokens: expected a trainer that hands the loss of compute_loss to accelerator.backward, found "
                f"that {name}.training_step has not called it, so that only the first pass has a gradient. Call "
                "self.accelerator.backward(loss), or leave max_tokens out."
            )

    @contextlib.contextmanager
    def _accumulating(self, model: Any) -> Iterator[None]:
        """Let gradients add up on this rank: DDP does not average them, and DeepSpeed makes no step."""
        state = self.trainer.accelerator.gradient_state
        synchronises = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
                yield
        finally:
            state._set_sync_gradients(synchronises)


def require_training_step(trainer: type[Any]) -> None:
    """Require that a class of trainers trains with ``Trainer.training_step``, in which batches are cut.

    Raises:
        BadArgument: It has a loop of its own, as TRL's first RLOOTrainer has.
    """
    for cls in trainer.__mro__:
        train = vars(cls).get("train")
        code = None if train is None else getattr(inspect.unwrap(train), "__code__", None)
        if train is not None and "training_step" in vars(cls):
            return
        if code is not None and "__class__" not in code.co_freevars:  # it calls no super().train()
            raise BadArgument(
                f"max_tokens: expected a trainer that trains with Trainer.training_step, found {cls.__name__}.train, "
                "which is a loop of its own. Leave max_tokens out, or cut batches with fa2patch.packing.passes."
            )


def _require_last_backwards(accelerator: Any) -> None:
    """Require that DeepSpeed can be told which backward is a step's last: older accelerate steps after each."""
    engine = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if engine is not None and "sync_gradients" not in inspect.signature(engine.backward).parameters:
        raise Fa2PatchError(
            "max_tokens: expected an accelerate that tells DeepSpeed which backward is the last of a step, found one "
            f"whose {type(engine).__name__}.backward takes no sync_gradients. Upgrade accelerate."
        )
