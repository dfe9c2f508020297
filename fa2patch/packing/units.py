"""A batch as units that are never cut: documents of a packed row, rows of a padded batch, or examples of a list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import numpy as np
import torch

from ..documents.find import find_boundaries
from ..documents.given_boundaries import from_cu_seqlens
from ..documents.names import IGNORED_LABEL, LABELS, LENGTHS, LOSS_LABELS, PARENTS, REAL, TOKENS, MediaRow, stated
from ..documents.row_shape import PLAIN, RowShape
from ..documents.tensors import to_device
from ..errors import PackingError
from .budget import as_lengths, token_count
from .strategies import Ints

_OF_DOCUMENTS = -1  # stands for the dimension of a value with one entry for each document


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
    what: str = "example"  # what a unit is, for an error


def as_units(batch: Any, shapes: RowShape) -> Units:
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


def without_labels(batch: Any) -> Any:
    if not isinstance(batch, Mapping):
        return [{**one, "labels": [IGNORED_LABEL] * token_count(one)} if hasattr(one, "keys") else one for one in batch]
    labels = {name: batch[name] for name in (*LABELS, LOSS_LABELS) if isinstance(batch.get(name), torch.Tensor)}
    ignored = {name: torch.full_like(value, IGNORED_LABEL) for name, value in labels.items()}
    row = {**batch, **ignored}
    return MediaRow(row, batch.parts) if isinstance(batch, MediaRow) else row


# --- lists of examples -----------------------------------------------------------------------------------------------


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
        else max(count - 1, 0)
        for example, count in zip(examples, tokens.tolist())
    ]

    def take(chosen: Ints) -> Any:
        return [examples[unit] for unit in chosen.tolist()]

    return Units(tokens, np.array(learned, np.int64), take, most=shapes.max_documents, padded_tokens=int(tokens.sum()))


# --- packed rows -----------------------------------------------------------------------------------------------------


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
        documents = kept[chosen]
        tokens = torch.from_numpy(np.concatenate([np.arange(starts[one], ends[one]) for one in documents]))
        row = {}
        for name, place in places.items():
            value = batch[name]
            if place == _OF_DOCUMENTS:
                value = value.index_select(0, to_device(torch.from_numpy(documents), value.device))
            elif place is not None:
                value = shapes.padded(name, value.index_select(place, to_device(tokens, value.device)), place)
            row[name] = value
        row.update(_lengths(batch, sizes[documents].tolist(), shapes, ids.device))
        return _with_media(batch, row, documents) if isinstance(batch, MediaRow) else row

    most, length = shapes.max_documents, ids.shape[1]
    return Units(sizes[kept], learned, take, shapes=shapes, most=most, padded_tokens=length, what="document")


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
    ends, longest = to_device(torch.from_numpy(shapes.ends(with_padding)), device), shapes.longest(with_padding)
    numbers = torch.arange(len(with_padding), dtype=torch.int32).repeat_interleave(torch.tensor(with_padding))
    found: dict[str, Any] = {
        "seq_idx": to_device(numbers[None], device),
        **stated(ends, longest),
        "cu_seq_lens_k": ends.clone(),
    }
    # A pass states lengths under the names that the batch uses, and for stated shapes under all names but one.
    found = {
        name: value for name, value in found.items() if batch.get(name) is not None or (shapes and name != "seq_idx")
    }
    if shapes.pad_to_multiple_of is not None:  # every pass has the same keys
        found[REAL] = (torch.arange(sum(with_padding), device=device) < sum(lengths)).long()[None]
    return found


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

    return Units(tokens, learned, take, padded=True, padded_tokens=padded_tokens, what="row")


def _rows(value: Any, rows: int, at: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor) and value.dim():
        return value[at.to(value.device)]
    if isinstance(value, (list, tuple)) and len(value) == rows:
        return type(value)([value[index] for index in at.tolist()])
    return value


class _Width(NamedTuple):
    """The integers ``[rows, length]`` of a batch that have one length. They belong together."""

    masks: list[torch.Tensor]  # those that hold only 0 and 1
    others: list[torch.Tensor]

    def hidden(self) -> torch.Tensor | None:
        """Where they hold padding, bool ``[rows, length]``; None if there is none."""
        # Padding is what no mask shows, if every other tensor holds one number there. Otherwise the masks do not mark
        # padding.
        if not self.masks:
            return None
        hidden = ~torch.stack([mask != 0 for mask in self.masks]).any(0)
        held = [value[hidden] for value in self.others]
        return None if any(len(each) and bool((each != each[0]).any()) for each in held) else hidden


def _widths(tensors: Mapping[str, torch.Tensor], rows: int) -> dict[int, _Width]:
    found: dict[int, _Width] = {}
    for value in tensors.values():
        if value.dim() == 2 and len(value) == rows and not value.is_floating_point():
            masks, others = found.setdefault(value.shape[1], _Width([], []))
            (masks if bool(((value == 0) | (value == 1)).all()) else others).append(value)
    return found


def _tokens(tensors: Mapping[str, torch.Tensor], rows: int) -> tuple[Ints, int]:
    # The tokens of each row without padding, int64 [rows], rather too many than too few, and of all with padding.
    found, padded_tokens = np.zeros(rows, np.int64), 0
    for length, width in _widths(tensors, rows).items():
        ids = [value for value in width.others if bool((value >= 0).all())]
        hidden, texts = width.hidden(), 1
        if hidden is None:
            found += length
        elif all(torch.equal(one, ids[0]) for one in ids):  # ids of one text: what any of the masks shows counts
            found += (~hidden).sum(1).cpu().numpy()
        else:  # of several texts, such as prompts and completions of one length, so that each mask counts
            found += sum((mask != 0).sum(1).cpu().numpy() for mask in width.masks)
            texts = len(width.masks)
        padded_tokens += rows * length * texts
    return np.maximum(found, 1), padded_tokens


def _without_padding(batch: dict[str, Any], rows: int) -> dict[str, Any]:
    # Only columns at the start and at the end go, in which all rows have padding.
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}
    for length, width in _widths(tensors, rows).items():
        hidden = width.hidden()
        if hidden is None or bool(hidden.all()):
            continue
        (seen,) = torch.nonzero(~hidden.all(0), as_tuple=True)
        for name, value in tensors.items():
            if value.dim() > 1 and value.shape[:2] == (rows, length):
                batch[name] = value[:, int(seen[0]) : int(seen[-1]) + 1]
    return batch
