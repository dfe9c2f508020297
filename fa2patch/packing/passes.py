"""Cutting of a batch into passes: what is learned in a step stays the mini-batch, and a budget says how it is computed.

A batch consists of units that are never cut: the documents of a packed row, the rows of a padded batch, or the examples
of a list. A pass is a batch of the same kind with some of the units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from ..documents.row_shape import RowShape
from ..errors import PackingError
from .budget import capped, check_budget
from .dealing import deal, example_costs
from .plans import plan
from .ranks import agreed, of_all_ranks, refusal_told
from .samplers import imbalance
from .strategies import Floats, Ints, divided, of_few
from .units import Units, as_units, without_labels


class Passes(Sequence[Any]):
    """The passes of a batch: batches of the same kind, which are made when they are read. See :func:`passes`.

    Attributes:
        units: The numbers of the documents, rows or examples of each pass, int64 ``[units of the pass]`` each, in
            ascending order.
        tokens: The tokens of each pass, int64 ``[passes]``.
        lengths: The tokens of each pass with the padding of ``pad_to_multiple_of``, int64 ``[passes]``.
        padded_tokens: The tokens of the batch with its padding; of a list of examples, those of the examples.
        shares: The part of the batch's learned tokens that each pass holds, float64 ``[passes]``, with the sum 1. The
            mean loss of the batch is the sum of the passes' mean losses times their shares.
    """

    def __init__(self, of: Units, rows: Sequence[Ints]) -> None:
        self._of, self.units, self.padded_tokens = of, list(rows), of.padded_tokens
        self.tokens = np.array([of.tokens[row].sum() for row in rows], np.int64)
        self.lengths = np.array([of.shapes.length(tokens) for tokens in self.tokens.tolist()], np.int64)

    @property
    def shares(self) -> Floats:
        learned = self._of.learned
        if learned is None:
            raise PackingError(
                "shares: expected labels with one number for each token in the batch, found none, so the learned "
                "tokens of a pass are not known. Weigh the losses of passes by what your loss is a mean of."
            )
        counts: Floats = np.array([learned[row].sum() for row in self.units], np.float64)
        return np.asarray(counts / max(counts.sum(), 1))

    def __len__(self) -> int:
        return len(self.units)

    @overload
    def __getitem__(self, number: int) -> Any: ...
    @overload
    def __getitem__(self, number: slice) -> Passes: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return Passes(self._of, self.units[number])
        chosen = self.units[number]
        if len(chosen):
            return self._of.take(chosen)
        # a rank with fewer units than passes computes its smallest one with the others, and learns nothing of it
        tokens = self._of.tokens
        smallest = np.argmin(np.where(tokens > 0, tokens, tokens.max()))
        return without_labels(self._of.take(np.array([smallest])))


class Counts:
    """What was computed in passes since the last log."""

    def __init__(self) -> None:
        # ``lengths`` are tokens of passes with the padding of stated shapes, and ``padded_tokens`` those that batches
        # came with.
        self.batches = self.passes = self.tokens = self.lengths = self.padded_tokens = 0
        self.costs: list[float] = []  # of each batch on this rank: tokens and attention

    def add(self, units: Ints, passes: int, lengths: int, padded_tokens: int) -> None:
        # ``units`` are the tokens of each unit of a batch.
        self.batches, self.passes, self.tokens = self.batches + 1, self.passes + passes, self.tokens + int(units.sum())
        self.lengths, self.padded_tokens = self.lengths + lengths, self.padded_tokens + padded_tokens
        self.costs.append(float(example_costs(units).sum()))

    def logs(self, seconds: float, still: bool) -> dict[str, float]:
        # All ranks must call this together. ``seconds`` are those since the last log, and ``still`` says whether passes
        # have the padding of stated shapes.
        found = {
            "passes_per_batch": round(self.passes / self.batches, 3),
            "tokens_per_second": round(self.tokens / seconds, 1),
            "padding_avoided": round(1 - self.tokens / max(self.padded_tokens, self.tokens), 4),
        }
        if still:
            found["padding_of_passes"] = round(1 - self.tokens / max(self.lengths, self.tokens), 4)
        of_ranks = of_all_ranks(self.costs)
        if len(of_ranks) > 1:
            batches = min(map(len, of_ranks))
            found["imbalance_over_ranks"] = round(imbalance(np.array([costs[:batches] for costs in of_ranks]).T), 4)
        return found


def passes(
    batch: Any,
    max_tokens: int,
    *,
    too_long: str = "error",
    every_rank: bool = False,
    pad_to_multiple_of: int | str | None = None,
    max_documents: int | None = None,
    longest_document: int | str | None = None,
) -> Passes:
    """Cut a batch into as few packed passes of at most ``max_tokens`` tokens as fit.

    The gradients of the passes add up to the gradient of the batch, if the loss of each pass counts as much as in the
    batch. A loss that is divided by the labels of the whole step needs no weights (Transformers 4.46 and newer)::

        items = (batch["labels"] != -100).sum()
        for row in fa2patch.packing.passes(batch, max_tokens=8192):
            model(**row, num_items_in_batch=items).loss.backward()

    A mean over the labels of a pass is weighed by its share of the labels::

        passes = fa2patch.packing.passes(batch, max_tokens=8192)
        for row, share in zip(passes, passes.shares):
            (model(**row).loss * share).backward()

    Losses that are no sum over tokens or documents differ from the batch's: the router losses of mixtures of experts,
    which multiply two means over all tokens, and losses that sort or compare the documents of a batch. For these,
    ``fa2patch.apply(model, max_tokens=...)`` computes passes inside the model, and the loss sees the whole batch.

    Args:
        batch: A packed batch of one row, as a collator returns it; a padded batch, whose tensors have one row for each
            example; or a list of examples, whose passes are lists that you collate yourself. Examples without tokens
            are in no pass.
        max_tokens: Maximum number of tokens in a pass. Padding of a padded batch does not count.
        too_long: What to do with a document that is longer than the budget: ``"error"``, or ``"alone"`` to give it a
            pass of its own.
        every_rank: Whether all ranks of ``torch.distributed`` make as many passes as the one that needs most, as FSDP
            and ZeRO-3 need it, where ranks compute each pass together. A rank with fewer documents than passes gets
            some that have no labels: divide by a number of the whole step, because a mean over them is no number.
        pad_to_multiple_of: Pad each pass of a packed row to a multiple of this many tokens, which divides
            ``max_tokens``, or to the next length by ``"power"`` or ``"eighth"``, as
            :class:`fa2patch.DataCollatorWithFlattening` does; with ``max_tokens`` all passes have one length. No pass
            is padded beyond the budget. ``real_tokens`` say what is padding.
        max_documents: The most documents of a pass. Passes of a packed row then have ``cu_seq_lens_*`` with as many
            entries each: the last end is repeated.
        longest_document: ``max_length_*`` of each pass of a packed row: a number that no document is longer than, or
            the longest one's length rounded up by ``"power"`` or ``"eighth"``.

    Returns:
        The passes, as a sequence. Packed rows keep the order of their documents, and ``cu_seq_lens_*``,
        ``max_length_*`` and ``seq_idx`` are made anew for each. Padded batches lose the columns that only hold padding.
        ``real_tokens`` and the padding that they mark are left out, and so are documents without tokens. If one of the
        last three options is given, a pass states lengths (``cu_seq_lens_*``, ``max_length_*``), and with all three,
        every pass of every batch may have the same shapes and numbers.

    Raises:
        PackingError: An option is invalid; a document is longer than the budget and ``too_long="error"``, or longer
            than ``longest_document``; the batch is none of the three, or holds something whose part of a pass is not
            known; or the shapes of passes are to stand still, and the batch is no packed row.
    """
    shapes = RowShape(pad_to_multiple_of, max_documents, longest_document, check_budget(max_tokens))
    with refusal_told(every_rank):
        units = as_units(batch, shapes)
    return cut_into_passes(units, max_tokens, too_long, every_rank)


def cut_into_passes(units: Units, max_tokens: int, too_long: str, every_rank: bool) -> Passes:
    with refusal_told(every_rank):
        tokens = capped(units.tokens, check_budget(max_tokens), too_long, units.what)
    found = _in_passes(units, tokens, max_tokens)
    number = agreed(len(found)) if every_rank else len(found)
    found = divided(found, tokens, number)
    found += [np.empty(0, np.int64)] * (number - len(found))
    return Passes(units, [np.sort(each) for each in found])


def _in_passes(units: Units, tokens: Ints, max_tokens: int) -> list[Ints]:
    if units.padded:
        return plan(tokens, max_tokens, "sorted", seed=None).rows
    (found,) = deal(tokens, 1, max_tokens).passes
    if units.most is None or max(map(len, found)) <= units.most:
        return found
    kept = np.flatnonzero(tokens)
    return [kept[row] for row in of_few(tokens[kept], max_tokens, units.most)]
