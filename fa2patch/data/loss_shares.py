"""How the loss of a batch follows from the losses of its parts, which a trainer's own loss function shows.

A loss may be a sum that is divided by a number of the whole step, a mean over documents, or a mean over tokens that
some column selects. What it is stands in no attribute that all trainers have, so it is tried: the loss of three units
together and of each alone tell the means apart, and a loss that is no such sum is refused. Where the losses are equal,
as those of DPO are while the model is its reference, their derivatives tell.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np
import torch

from ..documents.names import IGNORED_LABEL, LABELS, TOKENS
from ..errors import Fa2PatchError, PackingError, StaysPadded
from ..packing.passes import Units, is_mask, of_all_ranks, units_of
from ..packing.still_shapes import PLAIN, StillShapes
from ..upstream.find_models import outermost_models
from . import trainer_notes

GROUPS = (1, 2)
"""Rows that may belong together: each alone, or one of the first half with one of the second (chosen and rejected)."""

TRIED = 3
"""Units whose loss is compared, if there are so many: with two, sorted losses and others agree in every second case."""

_ATTEMPTS = 3
"""How often other units of a batch are tried."""

_OFTEN = 8
"""The number of first batches that are all looked at. Of later ones, batches 16, 32, 64, ... are."""

_UNDECIDED = (
    "max_tokens: this batch is computed in one pass, because its documents do not tell what its loss is a mean of: "
    "{}. Later batches are looked at again."
)

Loss = Callable[[Any], torch.Tensor]
"""A loss function of a batch."""

Measure = Callable[[Any], float]
"""What is compared: a batch's loss, or a derivative of it."""


class Share(NamedTuple):
    """What a loss is a mean of.

    Attributes:
        group: The number of rows of a padded batch that make a unit.
        of: What is counted: ``"sum"`` for a loss that is none, ``"units"``, or the name of a column.
        shifted: Whether the first column does not count, as in a loss of next tokens.
    """

    group: int
    of: str
    shifted: bool = False

    def divisor(self, batch: Any, units: int) -> float:
        """Return the number by which the loss of a batch with so many units is divided; 1 for a sum."""
        if self.of in ("sum", "units"):
            return 1 if self.of == "sum" else units
        value = batch[self.of]
        counted = value != (IGNORED_LABEL if self.of in LABELS or (value < 0).any() else 0)
        return float((counted[:, 1:] if self.shifted else counted).sum())


class LossShares:
    """What is known of the loss of one trainer, from the batches that were cut.

    Attributes:
        looked: The number of batches for which :meth:`look` was called.
        share: What the loss is a mean of; None if that is not known yet.
        undecided: Whether a batch was looked at, and what its loss is a mean of is still not known.
        more: The largest number of tokens that the model computed for a token that the tensors of a batch show. It is
            above 1 if a loss computes tokens twice, as older DPO computes prompts.
    """

    def __init__(self, trainer: Any, shapes: StillShapes = PLAIN) -> None:
        self.share: Share | None = None
        self.undecided, self.more = False, 1.0
        self._trainer, self._fitting, self.looked = trainer, list[Share](), 0
        self._shapes = shapes  # also of what is tried, so that a compiled model makes no more graphs

    def group(self, batch: Mapping[str, Any]) -> int:
        """Return the number of rows that make a unit of a batch, as far as it is known or its shapes say."""
        if self.share is not None:
            return self.share.group
        for group in GROUPS[:-1]:
            with contextlib.suppress(Fa2PatchError):
                units_of(batch, group)
                return group
        return GROUPS[-1]

    def look(self, loss: Loss, model: Any, batch: Mapping[str, Any]) -> None:
        """Find what the loss is a mean of, or whether it still is, with some of the batches for which this is called.

        The first batch alone does not tell: the loss of KTO, for example, is a mean while the model is its reference.

        Raises:
            PackingError: It is no mean.
        """
        self.looked += 1
        if self.looked > _OFTEN and self.looked & (self.looked - 1):
            return
        known = self._fitting
        with trainer_notes.untouched(self._trainer, model), _computed(model) as computed:
            groups = (known[0].group,) if known else GROUPS
            found = {group: self._of_group(loss, model, batch, group, computed) for group in groups}
        # pairs are units of many losses that documents are units of, so they only count where documents do not fit
        telling = next((each for each in found.values() if each.fitting != []), None)
        if telling is not None and telling.fitting is not None and (telling.decided or known):
            self._fitting = [share for share in known or telling.fitting if share in telling.fitting]
            self.more = max(self.more, telling.more)
        if all(each.fitting == [] for each in found.values()) or (known and not self._fitting):
            self._refuse(found)
        self.share = self._fitting[0] if self._fitting else None
        if self.share is None and not self.undecided:
            warnings.warn(_UNDECIDED.format("; ".join(each.said for each in found.values())), StaysPadded, stacklevel=2)
        self.undecided = self.share is None

    def _of_group(self, loss: Loss, model: Any, batch: Any, group: int, computed: list[int]) -> Sums:
        """The first attempt that tells, or the last one. All ranks make the same attempts."""
        of_model = self._dtype(model), computed
        for attempt in range(_ATTEMPTS):
            found = _of_all_ranks(tried(_value(loss), batch, group, *of_model, attempt, self._shapes))
            if self._fitting or found.decided or not found.fitting:
                break
            slopes = _of_all_ranks(tried(_slope(loss, model), batch, group, *of_model, attempt, self._shapes))
            both = [share for share in found.fitting if share in (slopes.fitting or ())]
            if both and slopes.decided:  # else the derivative is none, or nothing of it was seen
                return found._replace(fitting=both, decided=True)
        return found

    def _dtype(self, model: torch.nn.Module) -> torch.dtype:
        """The dtype in which the model computes."""
        mixed = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self._trainer.accelerator.mixed_precision)
        return mixed or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def _refuse(self, found: Mapping[int, Sums]) -> None:
        said = [f"{'pairs of rows' if group > 1 else 'documents'}: {each.said}" for group, each in found.items()]
        raise PackingError(
            "max_tokens: expected a loss that is a sum, or a mean over documents or tokens, so that passes add up to "
            f"the batch's loss; found in batch {self.looked} of {type(self._trainer).__name__}: {'; '.join(said)}. "
            "Losses that compare or sort the documents of a batch are no such sums, and neither are router losses "
            "(output_router_logits=False turns them off). Leave max_tokens out, or choose another loss."
        )


class Sums(NamedTuple):
    """What a try of a loss showed.

    Attributes:
        fitting: What the loss may be a mean of, the likeliest first; None if the batch has too few units, or too few
            labels, to tell.
        decided: Whether all that fit weigh the units alike.
        more: The number of tokens that the model computed of these units together for each token that they show.
        said: What was found, in words.
    """

    fitting: list[Share] | None
    decided: bool
    more: float
    said: str


def _value(loss: Loss) -> Measure:
    return lambda batch: float(loss(batch))


def _slope(loss: Loss, model: torch.nn.Module) -> Measure:
    """The derivative of a batch's loss by a factor of all that the model returns.

    The model itself computes without gradients, so that engines which follow its parameters notice nothing. A model
    that a trainer calls without gradients, as a reference, keeps what it returns.
    """

    def measure(batch: Any) -> float:
        factor, wanted = torch.ones((), requires_grad=True), list[bool]()

        def before(*unused: Any) -> None:
            wanted.append(torch.is_grad_enabled())
            torch.set_grad_enabled(False)

        def after(module: Any, args: Any, output: Any) -> Any:
            torch.set_grad_enabled(wanted.pop())
            return _times(output, factor) if torch.is_grad_enabled() else output

        hooks = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
        try:
            with torch.enable_grad():
                return float(torch.autograd.grad(loss(batch), factor)[0])
        finally:
            for hook in hooks:
                hook.remove()

    return measure


def _times(output: Any, factor: torch.Tensor) -> Any:
    """What a model returns, with all of its floating-point tensors times a factor."""
    if isinstance(output, torch.Tensor):
        return (
            output.to(torch.promote_types(output.dtype, factor.dtype)) * factor
            if output.is_floating_point()
            else output
        )
    if isinstance(output, Mapping):  # ModelOutput takes its fields by name
        return type(output)(**{name: _times(value, factor) for name, value in output.items()})
    if type(output) in (tuple, list):
        return type(output)([_times(value, factor) for value in output])
    return output


def tried(
    measure: Measure,
    batch: Any,
    group: int,
    dtype: torch.dtype,
    computed: list[int],
    attempt: int = 0,
    shapes: StillShapes = PLAIN,
) -> Sums:
    """Try the loss of some of a batch's units, together and alone.

    Args:
        measure: The loss of a batch, or its derivative. Ranks that compute together make the same calls of it.
        batch: A packed or padded batch.
        group: As in :class:`Share`.
        dtype: The dtype that the model computes in, whose rounding the losses have.
        computed: A list to which each forward of the model adds the number of its tokens, without padding.
        attempt: The number of attempts before. Each tries other units.
        shapes: The shapes of what is tried.
    """
    try:
        units = units_of(batch, group, shapes)
    except Fa2PatchError as error:
        return Sums([], False, 1.0, error.message)
    chosen = _chosen(units, attempt)
    union, once = np.unique(chosen, return_index=True)
    parts = [units.take(np.array([unit])) for unit in chosen]
    try:
        # a unit is chosen several times if there are few: ranks that compute together make the same number of calls
        alone = np.array([measure(part) for part in parts])[once]
        computed.clear()
        together = measure(units.take(union))
    except Exception as error:  # whatever a loss raises that needs rows which are not there
        return Sums([], False, 1.0, f"one of them raises {type(error).__name__}: {error}")
    more = max(computed, default=0) / max(shapes.length(int(units.tokens[union].sum())), 1)
    if len(union) < 2:
        return Sums(None, False, more, "the batch has only one that tells")
    if units.learned is not None and not units.learned[union].any():
        return Sums(None, False, more, "none of them has labels")
    rounding = max(np.nanmax(np.abs([*alone, together])), 0.0) * (1e-5 if torch.finfo(dtype).bits > 16 else 5e-3)
    weights = {share: _weights(share, [parts[at] for at in once]) for share in _shares(units.take(union), group)}
    fitting = [share for share, each in weights.items() if abs(together - _weighed(each, alone)) <= rounding]
    decided = bool(fitting) and all(np.allclose(weights[share], weights[fitting[0]]) for share in fitting)
    losses = ", ".join(f"{each:.6g}" for each in alone)
    return Sums(fitting, decided, more, f"losses of {losses} alone and {together:.6g} together")


def _of_all_ranks(own: Sums) -> Sums:
    """What the tries of all ranks show together."""
    found = of_all_ranks(own)
    telling = [each for each in found if each.fitting is not None] or found
    first = telling[0]
    fitting = first.fitting and [share for share in first.fitting if all(share in each.fitting for each in telling)]
    return Sums(fitting, any(each.decided for each in found), max(each.more for each in found), first.said)


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


def _shares(batch: Any, group: int) -> list[Share]:
    """What the loss of a batch may be a mean of, the likeliest first."""
    columns = [
        name
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()
        if name in LABELS or is_mask(value) or bool((value == IGNORED_LABEL).any())
    ]
    columns.sort(key=lambda name: name not in LABELS)
    of_columns = [Share(group, name, shifted) for name in columns for shifted in (True, False)]
    return [Share(group, "sum"), Share(group, "units"), *of_columns]


def _weights(share: Share, parts: Sequence[Any]) -> np.ndarray[Any, Any]:
    counts = np.array([share.divisor(part, 1) for part in parts], np.float64)
    return counts if share.of == "sum" else counts / max(counts.sum(), 1)


def _weighed(weights: np.ndarray[Any, Any], losses: np.ndarray[Any, Any]) -> float:
    """The weighed sum of losses. The mean of a unit without labels is no number, and has no weight."""
    counted = weights != 0
    return float(weights[counted] @ losses[counted])


def _chosen(units: Units, attempt: int) -> np.ndarray[Any, Any]:
    """The numbers of three units, small ones of different lengths if there are any, int64 ``[3]``.

    Units with labels come first, because the others tell nothing.
    """
    by_size = np.argsort(units.tokens, kind="stable")
    if units.learned is not None and (units.learned[by_size] > 0).any():
        by_size = by_size[units.learned[by_size] > 0]
    _, firsts = np.unique(units.tokens[by_size], return_index=True)
    different = by_size[firsts]
    ordered = np.concatenate([different, by_size[~np.isin(by_size, different)]])
    start = (attempt * TRIED) % max(len(ordered) - TRIED + 1, 1)
    return np.resize(ordered[start : start + TRIED], TRIED)
