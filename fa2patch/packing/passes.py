"""Cutting of a batch into passes: what is learned in a step stays the mini-batch, and a budget says how it is computed.

A batch consists of units that are never cut: the documents of a packed row, the rows of a padded batch, or the examples
of a list. A pass is a batch of the same kind with some of the units.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, overload

import numpy as np
import torch
import torch.distributed as dist

from ..documents.find import find_boundaries
from ..documents.given_boundaries import from_cu_seqlens
from ..documents.names import IGNORED_LABEL, LABELS, LENGTHS, LOSS_LABELS, PARENTS, REAL, TOKENS, MediaRow
from ..documents.row_shape import PLAIN, RowShape
from ..errors import PackingError
from .budget import as_lengths, capped, check_budget
from .dealing import deal, example_costs
from .plans import plan
from .samplers import imbalance
from .strategies import Floats, Ints, divided, of_few
from .streaming import token_count


@dataclass(frozen=True)
class Units:
    """A batch as units that are never cut."""

    tokens: Ints  # int64 [units]
    # int64 [units]: how many tokens the loss of a causal model counts. None if there is not a label for each token.
    learned: Ints | None
    take: Callable[[Ints], Any]  # makes a batch of the same kind from some units, in ascending order
    padded: bool = False  # a pass is as wide as its longest unit, so that units of near lengths share one
    shapes: RowShape = PLAIN  # of what ``take`` makes
    most: int | None = None  # the most units of a pass; None for any number
    padded_tokens: int = 0  # of the batch with its padding


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
        return self._of.take(chosen) if len(chosen) else _without_labels(self._of.take(self._smallest))

    @property
    def _smallest(self) -> Ints:
        tokens = self._of.tokens
        return np.array([np.argmin(np.where(tokens > 0, tokens, tokens.max()))])


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
    return cut_into_passes(as_units(batch, shapes), max_tokens, too_long, every_rank)


def cut_into_passes(units: Units, max_tokens: int, too_long: str = "error", every_rank: bool = False) -> Passes:
    try:
        tokens = capped(units.tokens, check_budget(max_tokens), too_long)
    except PackingError as error:
        if every_rank:  # the others wait to be told
            agreed(FAILED, error.message)
        raise
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


FAILED = -1  # the number of passes of a rank that refuses its batch


def agreed(number: int, why: str = "") -> int:
    """The number of passes that every rank makes: as many as the one that needs most."""
    # ``number`` is 0 if this rank cannot cut its batch, and FAILED if it refuses it. ``why`` says why.
    met = of_all_ranks((number, why))
    refused = next((why for each, why in met if each == FAILED), None)
    if refused is not None:
        raise PackingError(refused)
    most: int = max(each for each, _ in met)
    whole = next((why for each, why in met if not each), None)
    if most > 1 and whole is not None:
        raise PackingError(
            f"max_tokens: the model is sharded, so that all ranks make as many passes. A rank needs {most} of them, "
            f"and another cannot cut its batch: {whole}. Give every rank packed batches, or leave max_tokens out."
        )
    return most


def of_all_ranks(value: Any) -> list[Any]:
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _without_labels(batch: Any) -> Any:
    if not isinstance(batch, Mapping):
        return [{**one, "labels": [IGNORED_LABEL] * token_count(one)} if hasattr(one, "keys") else one for one in batch]
    labels = {name: batch[name] for name in (*LABELS, LOSS_LABELS) if isinstance(batch.get(name), torch.Tensor)}
    ignored = {name: torch.full_like(value, IGNORED_LABEL) for name, value in labels.items()}
    row = {**batch, **ignored}
    return MediaRow(row, batch.parts) if isinstance(batch, MediaRow) else row


# --- batches as units ------------------------------------------------------------------------------------------------


def as_units(batch: Any, shapes: RowShape = PLAIN) -> Units:
    if not isinstance(batch, Mapping):
        return _of_examples(batch, shapes)
    ids = next((batch[name] for name in TOKENS if isinstance(batch.get(name), torch.Tensor)), None)
    if ids is not None and len(ids) == 1 and ids.dim() > 1:
        lengths = _documents(batch, ids)
        if lengths is None and not isinstance(batch.get("attention_mask"), torch.Tensor):
            lengths = [ids.shape[1]]
        if lengths is not None:
            return _of_row(batch, ids, lengths, shapes)
    if shapes:
        raise PackingError(
            "batch: expected a packed row, because the shapes of padded rows depend on their documents, found a padded "
            "batch. Collate with fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True), or leave "
            "pad_to_multiple_of, max_documents and longest_document out."
        )
    return _of_rows(batch)


def _of_examples(batch: Any, shapes: RowShape) -> Units:
    if shapes.pad_to_multiple_of is not None or shapes.longest_document is not None:
        raise PackingError(
            "pad_to_multiple_of, longest_document: expected a packed row, found a list of examples, whose passes you "
            "collate yourself. Give these options to the collator: fa2patch.DataCollatorWithFlattening."
        )
    if not isinstance(batch, Iterable) or isinstance(batch, (str, torch.Tensor)):
        raise PackingError(f"batch: expected a mapping or a list of examples, found {type(batch).__name__}.")
    examples = list(batch)
    tokens = as_lengths([token_count(example) for example in examples])
    learned = [
        sum(label != IGNORED_LABEL for label in list(example["labels"])[1:])
        if hasattr(example, "keys") and example.get("labels") is not None
        else max(token_count(example) - 1, 0)
        for example in examples
    ]

    def take(chosen: Ints) -> Any:
        return [examples[unit] for unit in chosen.tolist()]

    return Units(tokens, np.array(learned, np.int64), take, most=shapes.max_documents, padded_tokens=int(tokens.sum()))


def _documents(batch: Mapping[str, Any], ids: torch.Tensor) -> list[int] | None:
    """The lengths of the documents of a packed row; None if it does not say that it is packed."""
    shape = (1, ids.shape[1])
    said: dict[str, Any] = {name: batch.get(name) for name in ("position_ids", "attention_mask")}
    if batch.get(PARENTS) is not None:
        raise PackingError(
            f"batch: found {PARENTS}, so its documents share tokens, and a pass cannot hold a part of a document. Cut "
            "the list of sequences into passes first, and share the prompts of each pass."
        )
    if batch.get("cu_seq_lens_q") is not None:
        return list(from_cu_seqlens(batch["cu_seq_lens_q"], None, shape, **said).lengths)
    found = find_boundaries(shape, ids.device, **said, seq_idx=batch.get("seq_idx"))
    return None if found is None else list(found.lengths)


def _of_row(batch: Mapping[str, Any], ids: torch.Tensor, lengths: list[int], shapes: RowShape) -> Units:
    sizes = np.array(lengths, np.int64)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    real = batch.get(REAL)
    kept = np.flatnonzero(sizes)
    if real is not None:
        # What ``pad_to_multiple_of`` of the collator has padded is left out.
        kept = kept[real.reshape(-1).cpu().numpy()[starts[kept]] != 0]
    learned = None
    labels = batch.get("labels")  # with weights, they count what the loss is a mean of
    if isinstance(labels, torch.Tensor) and labels.shape == ids.shape[:2]:
        counts = labels[0].cpu().numpy() != IGNORED_LABEL
        before = np.append(0, np.cumsum(counts))
        # a patched model does not count a document's first label
        learned = (before[ends] - before[starts])[kept] - counts[starts[kept]]

    parts = batch.parts if isinstance(batch, MediaRow) else {}
    places = {
        name: _place(name, value, ids.shape[1], len(lengths))
        for name, value in batch.items()
        if name not in (*LENGTHS, *parts, REAL)
    }
    if shapes.max_documents is not None and _OF_DOCUMENTS in places.values():
        raise PackingError(
            "max_documents: expected labels of tokens, found one label for each document, of which passes have as many "
            "as documents, whatever else stands still. Leave max_documents out."
        )
    shapes.longest([1, *sizes[kept].tolist()])  # raises before the first pass is computed

    def take(chosen: Ints) -> Any:
        return _row(batch, places, starts, ends, kept[chosen], shapes)

    return Units(sizes[kept], learned, take, shapes=shapes, most=shapes.max_documents, padded_tokens=ids.shape[1])


_OF_DOCUMENTS = -1  # stands for the dimension of a value with one entry for each document


def _place(name: str, value: Any, length: int, number: int) -> int | None:
    """The dimension along which a value of a packed row has its tokens; None if the value belongs to all of them."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return None
    if name in LABELS and value.shape[0] == number and (value.dim() < 2 or value.shape[1] != length):
        return _OF_DOCUMENTS  # one label, or several numbers, for each document
    for dim in (1, value.dim() - 1, 0):  # [1, length, ...]; position ids [axes, 1, length]; [length]
        if dim < value.dim() and value.shape[dim] == length:
            return dim
    raise PackingError(
        f"batch[{name!r}]: expected one number for each of {length} tokens, or one label for each of {number} "
        f"documents, found {list(value.shape)}, whose part of a pass is not known. Leave it out, or cut the list of "
        "examples into passes and collate each."
    )


def _row(
    batch: Mapping[str, Any],
    places: Mapping[str, int | None],
    starts: Ints,
    ends: Ints,
    documents: Ints,
    shapes: RowShape,
) -> Any:
    tokens = torch.from_numpy(np.concatenate([np.arange(starts[one], ends[one]) for one in documents]))
    row = {}
    for name, place in places.items():
        value = batch[name]
        if place == _OF_DOCUMENTS:
            value = value.index_select(0, torch.from_numpy(documents).to(value.device))
        elif place is not None:
            value = shapes.padded(name, value.index_select(place, tokens.to(value.device)), place)
        row[name] = value
    device = next(batch[name] for name in TOKENS if isinstance(batch.get(name), torch.Tensor)).device
    row.update(_lengths(batch, (ends - starts)[documents].tolist(), shapes, device))
    return _with_media(batch, row, documents) if isinstance(batch, MediaRow) else row


def _with_media(batch: MediaRow, row: dict[str, Any], documents: Ints) -> MediaRow:
    parts = {}
    for name, (dim, sizes) in batch.parts.items():
        offsets = np.append(0, np.cumsum(sizes))
        own = [one for one in documents.tolist() if one < len(sizes)]
        entries = [at for one in own for at in range(offsets[one], offsets[one + 1])]
        if entries:
            row[name] = batch[name].index_select(dim, torch.tensor(entries, device=batch[name].device))
            parts[name] = (dim, [sizes[one] if one < len(sizes) else 0 for one in documents.tolist()])
    return MediaRow(row, parts)


def _lengths(batch: Mapping[str, Any], lengths: list[int], shapes: RowShape, device: torch.device) -> dict[str, Any]:
    with_padding = shapes.documents(lengths)
    ends, sizes = torch.from_numpy(shapes.ends(with_padding)), torch.tensor(with_padding)
    numbers = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), sizes)[None]
    found: dict[str, Any] = {"seq_idx": numbers, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends.clone()}
    # A pass states lengths under the names that the batch uses, and for stated shapes under all names.
    stated = [name for name in LENGTHS if batch.get(name) is not None or (shapes and name in _STATED)]
    found = {name: value.to(device) for name, value in found.items() if name in stated}
    found |= {name: shapes.longest(with_padding) for name in ("max_length_q", "max_length_k") if name in stated}
    if shapes.pad_to_multiple_of is not None:  # every pass has the same keys
        found[REAL] = (torch.arange(sum(with_padding), device=device) < sum(lengths)).long()[None]
    return found


_STATED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


# --- padded batches --------------------------------------------------------------------------------------------------


def _of_rows(batch: Mapping[str, Any]) -> Units:
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}
    if not tensors:
        raise PackingError(
            f"batch: expected tensors with one row for each example, found {', '.join(map(str, batch))}."
        )
    rows = max(len(value) for value in tensors.values())
    wrong = {name: list(value.shape) for name, value in tensors.items() if len(value) != rows}
    if wrong:
        raise PackingError(
            f"batch: expected tensors with {rows} rows, one for each example, found {wrong}, whose part of a pass is "
            "not known. Leave them out, or cut the list of examples into passes and collate each."
        )
    tokens, padded_tokens = _tokens(tensors, rows)
    labels = tensors.get("labels")
    learned = None
    if labels is not None and labels.dim() == 2 and labels.shape == tensors.get("input_ids", labels).shape:
        learned = (labels[:, 1:] != IGNORED_LABEL).sum(1).cpu().numpy()

    def take(chosen: Ints) -> dict[str, Any]:
        at = torch.from_numpy(chosen)
        return _without_padding({name: _rows(value, rows, at) for name, value in batch.items()}, len(at))

    return Units(tokens, learned, take, padded=True, padded_tokens=padded_tokens)


def _rows(value: Any, rows: int, at: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor) and value.dim():
        return value[at.to(value.device)]
    if isinstance(value, (list, tuple)) and len(value) == rows:
        return type(value)([value[index] for index in at.tolist()])
    return value


def is_mask(value: torch.Tensor) -> bool:
    integer = not (value.is_floating_point() or value.is_complex())
    return value.dim() == 2 and integer and bool(((value == 0) | (value == 1)).all())


def _widths(tensors: Mapping[str, torch.Tensor], rows: int) -> dict[int, list[torch.Tensor]]:
    """The integers ``[rows, length]`` of a batch, by their length."""
    found: dict[int, list[torch.Tensor]] = {}
    for value in tensors.values():
        if value.dim() == 2 and len(value) == rows and not value.is_floating_point():
            found.setdefault(value.shape[1], []).append(value)
    return found


def _hidden(values: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Where integers of one length hold padding, bool ``[rows, length]``; None if there is none."""
    # Padding is what no mask shows, if every other tensor holds one number there. Otherwise the masks do not mark
    # padding.
    masks = [value != 0 for value in values if is_mask(value)]
    if not masks:
        return None
    hidden = ~torch.stack(masks).any(0)
    held = [value[hidden] for value in values if not is_mask(value)]
    return None if any(len(each) and bool((each != each[0]).any()) for each in held) else hidden


def _tokens(tensors: Mapping[str, torch.Tensor], rows: int) -> tuple[Ints, int]:
    # The tokens of each row without padding, int64 [rows], rather too many than too few, and of all with padding.
    found, padded_tokens = np.zeros(rows, np.int64), 0
    for width, values in _widths(tensors, rows).items():
        ids = [value for value in values if not is_mask(value) and bool((value >= 0).all())]
        hidden, texts = _hidden(values), 1
        if hidden is None:
            found += width
        # Tensors of one width belong together. If they hold ids of one text, what any of their masks shows counts.
        elif all(torch.equal(one, ids[0]) for one in ids):
            found += (~hidden).sum(1).cpu().numpy()
        else:
            # They hold ids of several texts, such as prompts and completions of one width, so that each mask counts.
            masks = [value for value in values if is_mask(value)]
            found += sum((value != 0).sum(1).cpu().numpy() for value in masks)
            texts = len(masks)
        padded_tokens += rows * width * texts
    return np.maximum(found, 1), padded_tokens


def _without_padding(batch: dict[str, Any], rows: int) -> dict[str, Any]:
    # Only columns at the start and at the end go, in which all rows have padding.
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}
    for width, values in _widths(tensors, rows).items():
        hidden = _hidden(values)
        if hidden is None or bool(hidden.all()):
            continue
        (seen,) = torch.nonzero(~hidden.all(0), as_tuple=True)
        for name, value in tensors.items():
            if value.dim() > 1 and value.shape[:2] == (rows, width):
                batch[name] = value[:, int(seen[0]) : int(seen[-1]) + 1]
    return batch
