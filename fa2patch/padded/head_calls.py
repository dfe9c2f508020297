"""Whether the head around a base model reads hidden states of padding, which nobody computes in a packed row.

Its model is run with zeros in the place of these hidden states and with random numbers. If a loss or an output of real
tokens differs, padding is read. What a batch asks for (its arguments, labels on padding, padding on the left) decides
whether padding is read, so each kind of batch is tried.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable

import torch

from .._torch import compiling, outside_the_forward, without_gradients
from .._types import Args, Call, Model
from ..comparison import distance, tensors
from ..documents.names import IGNORED_LABEL, LABELS
from ..proof.replica import replica
from ..proof.runs import left_as_it_was
from ..upstream.calls import passed
from ..upstream.find_models import is_sharded
from ..upstream.forward import thread
from ..upstream.labels import kept_logits
from ..upstream.step import MARK, ROLE, covers


@dataclass(eq=False)
class HeadCall:
    """A call of the outermost model, while it is computed."""

    module: Model
    args: Args
    kwargs: Call
    names: list[str]  # of positional arguments
    in_trial: bool = False  # whether this is one of the runs that find out what the head reads
    # what computes a base model packed: whose hidden states of padding are random numbers in this run, and for each
    # one that has computed its tokens packed in it, bool [batch, length]
    noise_of: object = None
    real: dict[object, torch.Tensor] = field(default_factory=dict)
    first: list[Any] = field(default_factory=list)  # what the first base model returned, in this run or one before it
    computed: int = 0  # how many base models this run has computed

    def of_base(self, compute: Callable[[], Any]) -> Any:
        """What a base model returns. Runs of a trial differ behind their first one only, which is computed once."""
        self.computed += 1
        if not self.in_trial or self.computed > 1:
            return compute()
        if self.first:
            thread.times += 1  # a model around it asks whether its batch came through
        else:
            self.first.append(compute())
        torch.manual_seed(0)  # what is behind it draws the same numbers in each run
        return copy.copy(self.first[0])

    @property
    def call(self) -> Call:
        return {**dict(zip(self.names, self.args)), **self.kwargs}

    @property
    def pairs(self) -> bool:
        """Whether an encoder-decoder was called."""
        return bool(vars(self.module)[MARK].facts.stacks)


class _Calls(threading.local):  # calls of outermost models, which carry no boundaries
    def __init__(self) -> None:
        self.calls: list[HeadCall] = []


_running = _Calls()


class Around:
    # It tells the base model that a padded batch came through the outermost model. It has no state to copy.

    def computed(
        self, forward: Callable[[Any, Args, Call], Any], module: Any, args: Args, kwargs: Call, names: list[str]
    ) -> Any:
        within = None if compiling() else _running.calls
        if within is None or (within and within[-1].module is module):  # super().forward, or a run of a trial
            return forward(module, args, kwargs)
        with _computing(HeadCall(module, args, kwargs, names)):
            return forward(module, args, kwargs)


@contextlib.contextmanager
def _computing(call: HeadCall) -> Iterator[None]:
    _running.calls.append(call)
    try:
        yield
    finally:
        _running.calls.pop()


def head_of(base: torch.nn.Module) -> HeadCall | None:
    found = _running.calls[-1] if _running.calls else None
    around = None if found is None else vars(found.module).get(MARK)
    return found if covers(around, base.__dict__.get(MARK)) else None


def padding_predicts(head: HeadCall, real: torch.Tensor) -> torch.Tensor:
    # The result is a bool tensor without dimensions, so nothing is read from the device.
    found = real.new_zeros(())
    for name, labels in passed(head.call, LABELS).items():
        if not isinstance(labels, torch.Tensor) or labels.shape[:2] != real.shape:
            continue
        counted = (labels.to(real.device) != IGNORED_LABEL).reshape(*real.shape, -1).any(-1)
        if name == "labels" and vars(head.module)[ROLE].predicts_the_next:
            found = found | (counted[:, 1:] & ~real[:, :-1]).any()
        else:
            found = found | (counted & ~real).any()
    return found


def reads_padding(head: HeadCall, packs: object, device: torch.device, predicts: bool) -> bool:
    # Where no trial is possible, labels that padding predicts decide: ranks of a sharded model would have to run it
    # again together.
    if vars(head.module)[MARK].examination.prove is False or is_sharded(head.module):
        return predicts
    # A copy of the modules runs without gradients, so the call that is under way is left as it is. The model itself
    # runs if a forward of other code calls that, and not the copy.
    with outside_the_forward(device), without_gradients():
        found = _moves(replica(head.module), head, packs)
        if found is None:
            with left_as_it_was(head.module, evaluates=False), torch.no_grad():
                found = _moves(head.module, head, packs)
    return found is not False


def _moves(model: Model, head: HeadCall, packs: object) -> bool | None:
    # The result is None if hidden states of padding do not come through the model. NaN instead of random numbers would
    # not do: a mask that is multiplied makes NaN of it, and 0 of a number.
    first: list[Any] = []
    zeros, noise = _run(model, head, packs, first), _run(model, head, packs, first, noise=True)
    if zeros is None or noise is None:
        return None
    moved = distance(noise, zeros)
    if not moved:
        return False
    again = _run(model, head, packs, [])  # measures the noise of a nondeterministic kernel
    return again is None or moved > 2 * distance(again, zeros)


def _run(
    model: Model, head: HeadCall, packs: object, first: list[Any], noise: bool = False
) -> list[torch.Tensor] | None:
    # This returns the loss and the outputs of real tokens, or None if the base model did not compute the batch packed.
    torch.manual_seed(0)
    kwargs = dict(head.kwargs)
    if isinstance(kwargs.get("position_ids"), torch.Tensor):
        kwargs["position_ids"] = kwargs["position_ids"].clone()  # ERNIE-M adds to them in place
    noise_of = packs if noise else None
    run = HeadCall(model, head.args, kwargs, head.names, in_trial=True, noise_of=noise_of, first=first)
    with _computing(run):
        output = model.forward(*head.args, **kwargs)
    if packs not in run.real:
        return None
    kept, masks = kept_logits(head.call), dict[torch.Size, torch.Tensor]()
    for real in run.real.values():
        for mask in (real, real if kept is None else real[:, kept], real.flatten()):
            masks[mask.shape] = mask & masks.get(mask.shape, mask)  # sources and targets may have one shape
    found = []
    for value in tensors(output):
        own = next((mask for shape, mask in masks.items() if value.shape[: len(shape)] == shape), None)
        found.append(value if own is None else value[own.to(value.device)])  # None: it has no entry for each token
    return found
