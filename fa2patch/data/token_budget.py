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
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..documents.names import TOKENS
from ..errors import Fa2PatchError, PackingError
from ..packing.passes import Passes, of_units, units_of
from ..packing.plans import check_budget
from ..upstream.find_models import outermost_models
from . import loss_shares
from .loss_shares import Loss, Share

_ATTEMPTS = 3
"""How often other units of a batch are tried before it is computed in one pass."""


class TokenBudget:
    """Computes the training steps of a trainer in passes of at most ``max_tokens`` tokens.

    Args:
        trainer: A Trainer with patched models. Those that are given padded batches compute them packed.
        max_tokens, too_long: As in :func:`fa2patch.packing.passes`.

    Attributes:
        share: What the loss is a mean of; None before the first batch that is cut.
        steps, passes, tokens, padded_tokens: Numbers of batches, of their passes, of their tokens, and of their tokens
            with padding, since the last log.
    """

    def __init__(self, trainer: Any, max_tokens: int, too_long: str = "error") -> None:
        self.trainer, self.max_tokens, self.too_long = trainer, check_budget(max_tokens), too_long
        self.share: Share | None = None
        self._more = 1.0  # tokens that the model computes for each token that a batch's tensors show
        self._rest: Iterator[tuple[torch.Tensor, bool]] | None = None  # of a step, once its first pass is computed
        self._first: torch.Tensor | None = None
        self._model: Any = None
        self._stepping = False
        self._forget()

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the trainer's own step, whose ``compute_loss`` and ``accelerator.backward`` come here."""
        accelerator = self.trainer.accelerator
        own, backward = vars(accelerator).get("backward"), accelerator.backward
        accelerator.backward = functools.partial(self._backward, backward)
        self._stepping, self._rest = True, None
        try:
            return step(*args, **kwargs)
        finally:
            self._stepping, self._rest, self._first = False, None, None
            del accelerator.backward
            if own is not None:
                accelerator.backward = own

    def compute_loss(self, compute: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of a training batch's first pass, and keep the other passes for the backward."""
        if not self._stepping or self._rest is not None or not isinstance(inputs, Mapping):
            return compute(model, inputs, *args, **kwargs)

        def loss(batch: Any) -> torch.Tensor:
            with self.trainer.compute_loss_context_manager():
                # a copy, because trainers take labels out of what they are given
                found: torch.Tensor = compute(model, copy.copy(batch), *args, **kwargs)
            return found

        passes, number = self._cut(loss, model, inputs)
        self._count(inputs, passes)
        self._model = model
        self._rest = self._losses(loss, inputs, passes, number)
        self._first, _ = next(self._rest)
        return self._first

    def log(self, logs: dict[str, float]) -> None:
        """Add what the passes brought to the logs of training, and begin to count anew."""
        if "loss" in logs and self.steps:
            logs["passes_per_batch"] = round(self.passes / self.steps, 3)
            logs["tokens_per_second"] = round(self.tokens / (time.perf_counter() - self._since), 1)
            logs["padding_avoided"] = round(1 - self.tokens / max(self.padded_tokens, self.tokens), 4)
            self._forget()

    def _forget(self) -> None:
        self.steps = self.passes = self.tokens = self.padded_tokens = 0
        self._since = time.perf_counter()

    def _count(self, inputs: Mapping[str, Any], passes: Passes) -> None:
        ids = [value for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim() == 2]
        self.steps, self.passes = self.steps + 1, self.passes + len(passes)
        self.tokens += int(passes.tokens.sum())
        self.padded_tokens += max((value.numel() for value in ids), default=0)

    # --- cutting -----------------------------------------------------------------------------------------------------

    def _cut(self, loss: Loss, model: Any, inputs: Mapping[str, Any]) -> tuple[Passes, int]:
        """The passes of a batch, and the number of passes on every rank, because ranks meet in each of them."""
        if self.share is None and self._most(int(_tokens(inputs) > self.max_tokens)):
            self.share = self._look(loss, model, inputs)
        budget = max(int(self.max_tokens / self._more), 1)
        if self.share is None:  # all fits, or nothing is known: then one pass is right at least
            units = units_of(inputs, _group(inputs))
            return of_units(units, max(budget, int(units.tokens.sum()))), 1
        units = units_of(inputs, self.share.group)
        passes = of_units(units, budget, self.too_long)
        number = self._most(len(passes))
        if len(passes) < number:
            passes = of_units(units, budget, self.too_long, at_least=number)
        return passes, number

    def _most(self, number: int) -> int:
        """The largest number of any rank."""
        if not (dist.is_available() and dist.is_initialized()):
            return number
        found = torch.tensor([number], device=self.trainer.accelerator.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def _look(self, loss: Loss, model: Any, inputs: Mapping[str, Any]) -> Share | None:
        """Find what the loss is a mean of, with the first batch that is to be cut."""
        _require_boundaries(self.trainer.accelerator)
        said: list[str] = []
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        mixed = self.trainer.accelerator.mixed_precision in ("fp16", "bf16")
        with loss_shares.untouched(self.trainer, model), _computed(model) as computed:
            for attempt in range(_ATTEMPTS):
                tried = loss_shares.find(loss, inputs, torch.bfloat16 if mixed else dtype, computed, attempt)
                share = self._agreed(tried.share)
                if share is not None:
                    self._more = max(1.0, tried.more)
                    return share
                said = tried.said
        if tried.undecided:
            return None
        raise PackingError(
            "max_tokens: expected a loss that is a sum, or a mean over documents or tokens, so that passes add up to "
            f"the batch's loss; found in the first batch of {type(self.trainer).__name__}: {'; '.join(said)}. Router "
            "losses, and losses that sort or compare the documents of a batch, are no such sums: leave max_tokens out, "
            "or turn them off (output_router_logits=False)."
        )

    def _agreed(self, share: Share | None) -> Share | None:
        """What any rank has found. Ranks with too few documents find nothing."""
        if not (dist.is_available() and dist.is_initialized()):
            return share
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, share)
        return next((each for each in shares if each is not None), None)

    # --- computing ---------------------------------------------------------------------------------------------------

    def _losses(
        self, loss: Loss, inputs: Mapping[str, Any], passes: Passes, number: int
    ) -> Iterator[tuple[torch.Tensor, bool]]:
        """The weighed losses of passes, each computed where it is asked for, and whether another one follows."""
        share = self.share or Share(1, "sum")
        total = share.divisor(inputs, sum(map(len, passes.units)))
        for at in range(number):
            batch = passes[min(at, len(passes) - 1)]
            weight = share.divisor(batch, len(passes.units[min(at, len(passes) - 1)])) / total if total else 0.0
            weight *= at < len(passes)  # a rank with fewer documents than passes computes one again, without weight
            with self._accumulating() if at + 1 < number else contextlib.nullcontext():
                yield loss(batch) * weight, at + 1 < number

    def _backward(self, backward: Callable[..., Any], loss: torch.Tensor, **options: Any) -> None:
        """Compute the passes' gradients. The trainer logs the value of ``loss``, so it becomes that of all passes."""
        if self._rest is None or self._first is None:
            backward(loss, **options)
            return
        scale = torch.autograd.grad(loss, self._first, retain_graph=True)[0] if loss is not self._first else 1.0
        value = loss.detach().clone()
        backward(loss, **options)
        for each, _ in self._rest:
            backward(each * scale, **options)
            value += each.detach() * scale
        loss.data.copy_(value)

    @contextlib.contextmanager
    def _accumulating(self) -> Iterator[None]:
        """Let gradients add up on this rank: DDP does not average them, and DeepSpeed makes no step."""
        state = self.trainer.accelerator.gradient_state
        synchronises = state.sync_gradients
        state._set_sync_gradients(False)
        model = self._model
        try:
            with model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
                yield
        finally:
            state._set_sync_gradients(synchronises)


def _group(inputs: Mapping[str, Any]) -> int:
    """The least number of rows that make a unit of this batch, as far as its shapes say."""
    for group in loss_shares.GROUPS[:-1]:
        with contextlib.suppress(PackingError):
            units_of(inputs, group)
            return group
    return loss_shares.GROUPS[-1]


def _tokens(inputs: Mapping[str, Any]) -> int:
    return int(units_of(inputs, _group(inputs)).tokens.sum())


def _require_boundaries(accelerator: Any) -> None:
    """Require that DeepSpeed can be told which pass is a step's last: older accelerate steps after each backward."""
    engine = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if engine is not None and "sync_gradients" not in inspect.signature(engine.backward).parameters:
        raise Fa2PatchError(
            "max_tokens: expected an accelerate that tells DeepSpeed which backward is the last of a step, found one "
            f"whose {type(engine).__name__}.backward takes no sync_gradients. Upgrade accelerate."
        )


@contextlib.contextmanager
def _computed(model: torch.nn.Module) -> Iterator[list[int]]:
    """Collect how many tokens each forward of a model computes, without padding."""
    computed: list[int] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        tokens = [value for value in (*map(kwargs.get, TOKENS), *args) if isinstance(value, torch.Tensor)]
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            computed.append(int(torch.count_nonzero(mask)))
        elif tokens:
            computed.append(tokens[0].shape[:2].numel())

    hooks = [inner.register_forward_pre_hook(note, with_kwargs=True) for inner in outermost_models(model).values()]
    try:
        yield computed
    finally:
        for hook in hooks:
            hook.remove()
