"""The batch that is proven, the user's or an example, its documents, and which of them are exchanged at once."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from .._types import Call, Model
from ..documents.boundaries import Boundaries
from ..documents.find import find_boundaries
from ..documents.given_boundaries import from_cu_seqlens
from ..documents.names import LABELS, LENGTHS, LOSS_LABELS, LOSS_WEIGHTS, MEDIA, PARENTS, REAL, MediaRow
from ..documents.tensors import described, is_integers
from ..documents.trees import Tree
from ..errors import BadBatch
from ..upstream.find_models import is_sharded, models

EXAMPLE = (7, 12, 1, 5)  # lengths of the documents in the example batch, in tokens

EXAMPLE_PARENTS = (-1, 0, 0, -1)  # what each segment continues, where the example is a tree

PER_TOKEN = (
    "input_ids", "position_ids", "attention_mask", "labels", "seq_idx", "token_type_ids", "mm_token_type_ids",
    "shift_labels",
)  # fmt: skip

_NOT_TEXT = re.compile(r"(image|video|audio|vision|boi|eoi|pad).*(token_id|token_index)$")


@dataclass(frozen=True)
class RowSlice:
    """A document, a segment or a run of padding in a batch: tokens ``start`` to ``stop`` (exclusive) of a row."""

    row: int
    start: int
    stop: int
    real: bool  # False for padding
    parent: int = -1  # the index, among the batch's slices, of the one that it continues; -1 for none

    @property
    def length(self) -> int:
        return self.stop - self.start

    def of(self, values: torch.Tensor) -> torch.Tensor:
        # ``[stop - start, ...]`` of values ``[batch, length, ...]``
        return values[self.row, self.start : self.stop]


def text_tokens(inner: Model) -> torch.Tensor:
    # int64 ``[tokens]``, without the ids that a config names for padding, images, video and audio.
    config = getattr(models(inner)[-1], "config", inner.config)
    size = getattr(config, "vocab_size", None) or inner.get_input_embeddings().weight.shape[0]
    parts = (getattr(inner.config, f"{part}_config", None) for part in ("vision", "audio"))
    named = [pair for one in (config, inner.config, *parts) for pair in getattr(one, "__dict__", {}).items()]
    special = {value for name, value in named if _NOT_TEXT.search(name) and isinstance(value, int)}
    return torch.tensor([token for token in range(min(size, 50_000)) if token not in special])


def random_text(inner: Model, length: int, device: torch.device) -> torch.Tensor:
    # int64 ``[1, length]``, the same in each call
    vocabulary = text_tokens(inner)
    drawn = torch.randint(len(vocabulary), (1, length), generator=torch.Generator().manual_seed(0))
    return vocabulary[drawn].to(device)


def example(device: torch.device, inner: Model, tree: bool = False) -> Call:
    # One row of random text tokens, the same in each call. The documents of a tree are segments.
    of_segments = Tree(EXAMPLE, EXAMPLE_PARENTS if tree else [-1] * len(EXAMPLE), device)
    call = {"input_ids": random_text(inner, sum(EXAMPLE), device), "position_ids": of_segments.positions[None]}
    if tree:
        call["cu_seq_lens_q"] = torch.tensor([0, *EXAMPLE]).cumsum(0).to(device, torch.int32)
        call[PARENTS] = torch.tensor(EXAMPLE_PARENTS).to(device, torch.int32)
    return call


def checked(batch: Any, device: torch.device) -> Call:
    try:
        given = dict(batch)
    except (TypeError, ValueError):
        raise BadBatch(f"batch: expected what a collator returns, a dict; found {type(batch).__name__}.") from None
    if given.get(LOSS_LABELS) is not None:  # labels count documents or tokens
        given["labels"] = given.pop(LOSS_LABELS)
        given.pop(LOSS_WEIGHTS, None)
    given.pop(REAL, None)  # the padding is looked at like any other document
    ids = given.get("input_ids")
    integers = (torch.int64, torch.int32)
    if not isinstance(ids, torch.Tensor) or ids.dtype not in integers or ids.dim() != 2 or not len(ids):
        raise BadBatch(f"batch['input_ids']: expected integers [batch, length], found {described(ids)}.")
    parents, parts = given.get(PARENTS), batch.parts if isinstance(batch, MediaRow) else {}
    if parents is not None and not is_integers(parents):
        raise BadBatch(
            f"batch[{PARENTS!r}]: expected an integer tensor [segments], the number of each segment's parent or -1; "
            f"found {described(parents)}."
        )
    if parents is not None and given.get("cu_seq_lens_q") is None:
        raise BadBatch(
            f"batch[{PARENTS!r}]: expected cu_seq_lens_q beside it, which says where segments start; found "
            f"{', '.join(sorted(map(str, given)))}. Pass what fa2patch.packing.share returns."
        )
    for name, value in given.items():
        if not isinstance(name, str):
            raise BadBatch(f"batch: expected the names of a forward's arguments as keys, found {name!r}.")
        if name in LABELS and value is not None and (not isinstance(value, torch.Tensor) or value.shape != ids.shape):
            found = f"{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise BadBatch(f"batch[{name!r}]: expected a tensor {list(ids.shape)}, found {found}.")
        if not isinstance(value, torch.Tensor):
            continue
        if value.device.type == "meta" or value.layout != torch.strided:
            raise BadBatch(
                f"batch[{name!r}]: expected a dense tensor with values, found one of layout {value.layout} on "
                f"{value.device.type}."
            )
        if name not in (*PER_TOKEN, *LENGTHS, *parts):
            what = "It knows which pictures and sound are whose, and a copy of it as a plain dict does not."
            raise BadBatch(
                f"batch[{name!r}]: a document's part of it is not known. Verify token batches: {', '.join(PER_TOKEN)} "
                "and the collator's lengths; or pass the very object that fa2patch.DataCollatorForMultimodalFlattening "
                f"returned. {what if name in MEDIA else ''}".rstrip()
            )
        if name in PER_TOKEN and (not value.dim() or value.shape[-1] != ids.shape[1]):
            raise BadBatch(
                f"batch[{name!r}]: expected one for each of {ids.shape[1]} tokens, found {list(value.shape)}."
            )
        given[name] = value.to(device)
    return MediaRow(given, parts) if parts else given


def slices_of(batch: Call) -> list[RowSlice]:
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    shape = (ids.shape[0], ids.shape[1])
    mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    said: dict[str, Any] = {"position_ids": batch.get("position_ids"), "attention_mask": mask}
    if batch.get("cu_seq_lens_q") is None:
        found = find_boundaries(shape, ids.device, **said, seq_idx=batch.get("seq_idx"))
    else:
        found = from_cu_seqlens(batch["cu_seq_lens_q"], None, shape, **said, parents=batch.get(PARENTS))
    if found is None or sum(length > 0 for length in found.lengths) <= 1:
        raise BadBatch(
            f"nothing in this batch says that a row holds several documents; found {', '.join(sorted(batch))}. "
            "Expected position_ids that restart (they get lost where a Trainer drops columns: "
            "remove_unused_columns=False), cu_seq_lens_q, seq_idx or a mask of document numbers. Pack with "
            "fa2patch.DataCollatorWithFlattening."
        )
    return slices_between(found, shape[1], mask)


def slices_between(boundaries: Boundaries, length: int, mask: torch.Tensor | None) -> list[RowSlice]:
    # ``mask`` is 0 for padding, ``[batch, length]``.
    slices: list[RowSlice] = []
    parents = [-1] * len(boundaries) if boundaries.tree is None else boundaries.tree.parents
    real = None if mask is None else (mask != 0).cpu()
    numbers, at = [], 0
    for size, parent in zip(boundaries.lengths, parents):
        row, start = divmod(at, length)
        at += size
        numbers.append(len(slices))
        if size:  # a document of given lengths may end in padding
            tokens = size if real is None else int(real[row, start : start + size].sum())
            continued = numbers[parent] if parent >= 0 else -1
            slices.append(RowSlice(row, start, start + (tokens or size), tokens > 0, continued))
    return slices


def evenly(count: int, most: int | None) -> list[int]:
    # Up to ``most`` of ``count`` things, by their index, the first and the last among them.
    if most is None or count <= most:
        return list(range(count))
    return [round(at * (count - 1) / max(most - 1, 1)) for at in range(most)]


def exchanges(tree: Tree) -> list[list[bool]]:
    # Of the segments that continue the same one, those whose number has a bit set are exchanged in one run with all
    # that continues them, and the others in another run. So of any two, each is exchanged without the other in some
    # run, also siblings, and what is not exchanged sees nothing that is. The first root is exchanged alone, too.
    segments = [segment for segment, length in enumerate(tree.lengths) if length]
    places = dict.fromkeys(range(len(tree.lengths)), 0)
    born: Counter[int] = Counter()
    for segment in segments:
        places[segment] = born[tree.parents[segment]]
        born[tree.parents[segment]] += 1
    paths = [tree.path(segment) for segment in places]
    bits = max(1, (max(born.values()) - 1).bit_length())
    found = [
        [len(path) > depth and places[path[depth]] >> bit & 1 == value for path in paths]
        for bit in range(bits)
        for depth in range(max(len(paths[segment]) for segment in segments))
        for value in (0, 1)
    ]
    found.append([path[0] == segments[0] for path in paths])
    kinds = [tuple(chosen[segment] for segment in segments) for chosen in found]
    return [chosen for at, chosen in enumerate(found) if len({*kinds[at]}) == 2 and kinds[at] not in kinds[:at]]


def require_same_on_every_rank(inner: Model, slices: list[RowSlice]) -> None:
    # Ranks with other numbers of slices, or other trees of them, would wait for each other forever.
    if not is_sharded(inner):
        return
    tree = tuple((place.length, place.parent) for place in slices) if any(place.parent >= 0 for place in slices) else ()
    given: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(given, (len(slices), tree))
    if len(set(given)) > 1:
        counts = [count for count, _ in given]
        found = f"{counts} documents" if len(set(counts)) > 1 else "different segment_parents or lengths"
        raise BadBatch(
            f"the model is sharded, so that its ranks compute together, but they were given {found}. Call verify with "
            "the same batch on every rank."
        )
