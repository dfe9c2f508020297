"""Finds where documents start in a batch, with torch and numpy only, and knows the grammar of position ids.

A document starts at the first token of every row and wherever ``p[i] != p[i-1] + 1`` (rule 2 of CONTRIBUTING.md).
``cu_seq_lens_*`` (:mod:`.given_boundaries`), then ``seq_idx``, then a 2-D mask of document numbers take precedence over
``position_ids``, which contradict them only where they fall or stand still inside a document.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from .._torch import operator_later, unbacked_size, uncompiled
from ..errors import BadPositionIds, BoundaryConflict
from . import tensors
from .boundaries import Boundaries
from .tensors import check_mask, check_position_ids, check_readable, check_seq_idx

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]
    Flags = NDArray[np.bool_]
    # Documents are looked for in arrays on the host, and stated ones are checked in tensors. Both are [batch, length],
    # or with axes (mRoPE) [axes, batch, length].
    Array = TypeVar("Array", NDArray[Any], torch.Tensor)


def boundaries(position_ids: torch.Tensor) -> Boundaries:
    """Find the boundaries of the documents that ``position_ids`` describe.

    A document starts at the first token of every row and wherever an id is not its left neighbour's plus one. With four
    axes, the first axis (text) is used. With three axes (time, height, width), image tokens do not count up: in a row
    that has such tokens, a document starts where time goes back to 0 or all three axes are 0.

    Args:
        position_ids: integers ``[length]``, ``[batch, length]`` or ``[axes, batch, length]`` (mRoPE).

    Returns:
        :class:`Boundaries` over the ``batch * length`` tokens, row after row.

    Raises:
        BadPositionIds: the ids are not an integer tensor of such a shape, or are empty; or ids on three axes neither
            restart nor continue as a model counts them.
    """
    check_position_ids(position_ids)
    batch, length = (1, *position_ids.shape)[-2:]
    found = find_boundaries((batch, length), position_ids.device, position_ids=position_ids, always=True)
    assert found is not None, "it is asked for always"
    return found


@uncompiled
def find_boundaries(
    shape: tuple[int, int],  # (batch, length)
    device: torch.device,  # where ``cu_seqlens`` will be
    *,
    position_ids: torch.Tensor | None = None,  # [length], [batch or 1, length] or [axes, batch or 1, length]
    attention_mask: torch.Tensor | None = None,  # [batch, length]: 0 is padding; 1, 1, 2, 2, ... are document numbers
    seq_idx: torch.Tensor | None = None,  # [length] or [batch or 1, length]: the number changes with the document
    only_certain: bool = False,  # with three axes, ambiguous tokens continue a document and are no error
    first_position: int = 0,  # the id of a document's first token in models that do not count from 0
    training: bool = False,  # a jump behind padding to another id than 0 or ``first_position`` is an error
    always: bool = False,  # boundaries are also wanted if no row holds more than one document
) -> Boundaries | None:
    """Find the boundaries of a packed batch, with one read from the device. None if a batch is dense."""
    if position_ids is not None:
        check_position_ids(position_ids, shape)
        if position_ids.is_meta:
            check_readable("position_ids", position_ids, BadPositionIds)
    if seq_idx is not None:
        check_seq_idx(seq_idx, shape)
    if attention_mask is not None:
        check_mask(attention_mask, shape)
        check_readable("attention_mask", attention_mask, BoundaryConflict)
        attention_mask = None if _is_of_ones(attention_mask) else attention_mask
    if position_ids is not None and device.type != "meta" and is_plain(position_ids, attention_mask, seq_idx):
        ids = position_ids.reshape(-1, shape[1]).expand(shape)
        found = from_positions(ids, device, always, first_position)
    else:
        sources = position_ids, attention_mask, seq_idx
        found = _from_sources(shape, device, *sources, only_certain, first_position, training, always)
    return found


def _from_sources(
    shape: tuple[int, int],
    device: torch.device,
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    only_certain: bool,
    first_position: int,
    training: bool,
    always: bool,
) -> Boundaries | None:
    numbers = {"mask": None if attention_mask is None else whole_numbers(attention_mask), "seq_idx": seq_idx}
    present = {name: ids.expand(shape) for name, ids in numbers.items() if ids is not None}
    axes = [] if position_ids is None else [axis.expand(shape) for axis in axes_of(position_ids)]
    if not present and not axes:
        return None
    if device.type == "meta":
        raise BadPositionIds("position_ids: expected those of a batch with values, found one on the meta device.")
    # Everything is stacked, so that there is one read from the device.
    read = tensors.read(torch.stack([ids.detach().to(device, torch.int64) for ids in (*present.values(), *axes)]))
    given = _Given(read[len(present) :], **dict(zip(present, read)))

    if _added_to_logits(given, only_certain):
        return None
    starts = _starts(given, only_certain, first_position, training)
    packed = _several(starts)
    if not (always or packed):
        return None
    positions = int(given.axes.max()) + 1 if len(given.axes) else None
    found = _from_starts(_with_padding(starts, given.real), device, positions)
    if packed and position_ids is not None and positions is not None:
        _require_no_wrap(position_ids.dtype, positions - 1, found.max_seqlen + first_position)
    return found


def _is_of_ones(mask: torch.Tensor) -> bool:
    # Only a mask on a CPU is looked at: on other devices that would be another read.
    return mask.device.type == "cpu" and bool(tensors.read(mask == 1).all())


@dataclass(eq=False)
class _Given:
    """What a batch says of its documents, on the host: int64 arrays ``[batch, length]``, or None."""

    axes: Ids  # position ids [axes, batch, length]; no axes if there are none
    mask: Ids | None = None
    seq_idx: Ids | None = None
    real: Flags = field(init=False)  # tokens that the mask does not hide; the ids of others are ignored
    # The row and the index of the first token of each run of real tokens, and the index of the nearest real token to
    # its left in the row, or -1. For other real tokens that is the left neighbour, so that a batch costs little more
    # than its ids alone.
    runs: tuple[Ids, Ids, Ids] = field(init=False)

    def __post_init__(self) -> None:
        batch, length = self.axes.shape[1:]
        if self.mask is None:
            self.real = np.ones((batch, length), dtype=bool)
            self.runs = np.arange(batch), np.zeros(batch, dtype=np.int64), np.full(batch, -1)
            return
        self.real = self.mask != 0
        first, last = self.real.copy(), self.real.copy()
        first[:, 1:] &= ~self.real[:, :-1]
        last[:, :-1] &= ~self.real[:, 1:]
        rows, tokens = np.divmod(np.flatnonzero(first), length)
        before = np.full_like(tokens, -1)
        before[1:] = np.where(rows[1:] == rows[:-1], np.flatnonzero(last)[:-1] % length, -1)
        self.runs = rows, tokens, before

    def left(self, values: NDArray[Any]) -> NDArray[Any]:
        # For each token, the value of the nearest real token to its left. A row's first real token gets its own.
        rows, tokens, before = self.runs
        found = np.concatenate([values[..., :1], values[..., :-1]], axis=-1)
        found[..., rows, tokens] = values[..., rows, np.maximum(before, 0)]
        return found


# Replaces document numbers that their dtype may have rounded or wrapped. float32 holds it.
_MERGED = -(2**40)


def whole_numbers(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.uint8:
        # Document numbers in uint8 begin again at 0, behind 254 and 255.
        wrapped = (mask[:, 1:] == 0) & (mask[:, :-1] == 255) & (mask == 254).any()
        return mask.long().masked_fill(torch.nn.functional.pad(wrapped, (1, 0)), _MERGED)
    if not mask.is_floating_point():
        return mask
    # From 256 on in bfloat16, 2048 in float16 and 2**24 in float32, every second number becomes its neighbour.
    merged_from = 2 / torch.finfo(mask.dtype).eps
    mask = mask.float() if mask.element_size() < 4 else mask  # torch 2.1 has no floor for half precision on a CPU
    # Fractions, NaN, infinities and numbers of 2**31 or more become -1.
    whole = torch.where((mask == mask.floor()) & (mask.abs() < 2**31), mask, -1)
    return torch.where(whole >= merged_from, _MERGED, whole)


def _several(starts: Flags) -> bool:
    return bool((starts.sum(axis=1) > 1).any())


def _first(wrong: Flags) -> str:
    row, token = np.argwhere(wrong)[0]
    return f"row {row}, token {token}"


def _added_to_logits(given: _Given, only_certain: bool) -> bool:
    # A mask with negative numbers is added to logits. In a packed batch that is an error.
    mask = given.mask
    if mask is None or mask.min() >= 0:
        return False
    if (mask == _MERGED).any():
        raise BoundaryConflict(
            "attention_mask: expected document numbers that its dtype can tell apart, found one at "
            f"{_first(mask == _MERGED)}, that may have been another number before it was stored: in half precision "
            "every second number becomes its neighbour from 256 (bfloat16) or 2048 (float16) on, and uint8 begins "
            "again behind 255. Make the numbers as int64, or pass position_ids that restart."
        )
    if mask.max() > 1 or _several(_starts(replace(given, mask=None), only_certain)):
        raise BoundaryConflict(added_to_logits(f"something else at {_first(mask < 0)}"))
    return True


def added_to_logits(found: str) -> str:
    return (
        f"attention_mask: expected zeros for padding and ones, or document numbers, found {found}. A mask that is "
        "added to logits cannot go with a packed row: leave it out."
    )


def _starts(given: _Given, only_certain: bool = False, first_position: int = 0, training: bool = False) -> Flags:
    # Explicit statements win over position ids. A contradiction between two sources is an error.
    stated = _stated_starts(given)
    if not len(given.axes):
        return next(iter(stated.values()), np.zeros_like(given.real))
    starts, doubtful, jumps = _starts_of(given, first_position)
    for source, theirs in stated.items():
        rises = given.axes[0] > given.left(given.axes[0])  # ids of one document may jump (PoSE)
        _no_conflict(starts & ~theirs & ~rises, f"position_ids restart inside what {source} calls one document")
    if stated:
        return next(iter(stated.values()))
    if doubtful.any() and not only_certain:
        row, token = np.argwhere(doubtful)[0]
        found = [given.axes[:, row, at].tolist() for at in (token - 1, token)]
        raise BadPositionIds(
            "position_ids: expected time, height and width as a model's get_rope_index counts them in each document, "
            f"which starts at 0. Found {found[0]} and then {found[1]} at row {row}, token {token}: that may be a "
            "document's start, or not. Say where documents start by cu_seq_lens_q, or by ids [4, batch, length] with "
            "the tokens' own count in front (fa2patch.DataCollatorForMultimodalFlattening gives both)."
        )
    ids = given.axes[0]
    if jumps.any() and training:
        row, token = (places[jumps][0] for places in given.runs[:2])
        raise BoundaryConflict(
            f"position_ids jump to {ids[row, token]} behind padding (row {row}, token {token}): that may be "
            "a document's start, or a filler. Expected ids that go on from the last real token, or restart at "
            f"{first_position}. Say where documents start by cu_seq_lens_q, seq_idx or an attention_mask of document "
            "numbers, or let ids restart there."
        )
    if _several(starts) and ids.min() < first_position:
        starts |= given.real & _behind_padding(ids, given.left(ids), given.left(starts), first_position)
    return starts


def _stated_starts(given: _Given) -> dict[str, Flags]:
    stated: dict[str, Flags] = {}
    if given.seq_idx is not None:
        stated["seq_idx"] = _changes(given, given.seq_idx, step=0)
    if given.mask is not None and given.mask.max() > 1:
        stated["the attention_mask of document numbers"] = _changes(given, given.mask, step=0)
    if len(stated) == 2:
        (first, one), (second, other) = stated.items()
        _no_conflict(one != other, f"{first} and {second} begin different documents")
    return stated


def _starts_of(given: _Given, first_position: int) -> tuple[Flags, Flags, Flags]:
    # Returned are the starts, tokens on three axes that may be starts, and for each run of real tokens, bool [runs],
    # whether its ids jump behind padding.
    axes, (rows, tokens, before) = given.axes, given.runs
    starts, ids = _changes(given, axes[0], step=1), axes[0][rows, tokens]
    jumps = starts[rows, tokens] & (before >= 0) & (ids != 0) & (ids != first_position)
    # Such a jump is treated as a filler, as Transformers' ``generate`` writes it, and the document continues.
    starts[rows, tokens] &= ~jumps
    if len(axes) != 3:
        return starts, np.zeros_like(starts), jumps
    left, near = given.left(axes), np.ones_like(starts)
    near[rows, tokens] = tokens - before == 1
    restarting = given.real & restarts(axes, left)
    restarting[rows, tokens] |= before < 0
    with_images = (axes != axes[0]).any(axis=(0, 2))[:, None]
    doubtful = with_images & given.real & ~restarting & ~goes_on(axes, left) & (near | (axes[0] < left[0]))
    return np.where(with_images, restarting, starts), doubtful, jumps & ~with_images[rows, 0]


def _changes(given: _Given, ids: Ids, step: int) -> Flags:
    """Real tokens that do not continue from the nearest real token to their left."""
    changed = given.real & _breaks(ids, step)
    rows, tokens, before = given.runs
    own, left = ids[rows, tokens], ids[rows, np.maximum(before, 0)]
    # The ids may or may not count padding.
    anew = counts_anew(own, left, step) & counts_anew(own, left, step * (tokens - before))
    changed[rows, tokens] = (before < 0) | anew
    return changed


def counts_anew(own: Array, left: Array, step: Any = 1) -> Array:
    """Whether ids are not their left neighbours' plus one: the rule by which a document starts, in arrays and tensors.

    With ``step=0``, whether numbers of documents are not their neighbours'. A step may be one for each id.
    """
    found: Array = (own != left + step) | (own < left)  # the largest int64 + 1 is the smallest
    return found


# So many numbers are compared at once. What is made of them on the way stays in the processor's cache: made of a row of
# a million tokens, it took more than twice as long for each token as in a row of a tenth.
AT_ONCE = 2**15


def _breaks(ids: Ids, step: int) -> Flags:
    flat = ids.reshape(-1)
    breaks = np.empty(len(flat), dtype=bool)
    for start in range(1, len(flat), AT_ONCE):
        own = flat[start : start + AT_ONCE]
        left = flat[start - 1 : start - 1 + len(own)]
        breaks[start : start + AT_ONCE] = counts_anew(own, left, step)
    breaks[:: ids.shape[1]] = True
    return breaks.reshape(ids.shape)


def _behind_padding(ids: Array, left: Array, left_starts: Array, first_position: int) -> Array:
    """Where a document starts behind an id that is one below its first position, although ids go on from it."""
    # Such an id is padding: ``attention_mask.cumsum(-1) - 1`` gives -1 to what is padded left, and RoBERTa's own count
    # gives 1 where its documents start at 2. An id that itself goes on from another one is no padding. Neither is 0:
    # collators begin there whatever the model.
    found: Array = (ids == first_position) & (left == first_position - 1) & (left != 0) & left_starts
    return found


def restarts(ids: Array, left: Array) -> Array:
    # The ids are [3, batch, length]: time, height and width. Inside a document, time is 0 only at the first token and
    # in an image that starts there, and all three are 0 only at the first token.
    first: Array = (ids[0] == 0) & ((left[0] > 0) | ((ids[1] == 0) & (ids[2] == 0)))
    return first


def goes_on(ids: Array, left: Array) -> Array:
    """Where time, height and width continue from the token to the left as a model's ``get_rope_index`` counts them."""
    (t, h, w), (time, height, width) = ids, left
    beside_image = (t == h) & (t == w)
    # A text token, and the first token of an image, has one number n on all axes, and the token before it has n - 1 on
    # its largest axis. From Transformers 5.3 on, time is left out after a video: text continues from height and width,
    # which may be below the last frame's time.
    follows = (t > height) & (t > width) & ((t == height + 1) | (t == width + 1) | (t == time + 1))
    # The three axes may also be equal inside an image.
    of_its_time = (t == time) & ((height != time) | (width != time))
    # Inside an image or a video, time stays or rises.
    continues: Array = (~beside_image & (t >= time)) | (beside_image & (follows | of_its_time))
    return continues


def axes_of(position_ids: torch.Tensor) -> torch.Tensor:
    return position_ids if position_ids.dim() == 3 else position_ids[None]


def _with_padding(starts: Flags, real: Flags) -> Flags:
    turns = np.ones_like(real)
    turns[:, 1:] = real[:, 1:] != real[:, :-1]
    holes = turns & real & ~starts
    if holes.any():
        raise BoundaryConflict(
            f"the attention_mask hides tokens inside a document of a packed row (it goes on at {_first(holes)}). "
            "Padding may only stand between documents: drop the hidden tokens, or restart position_ids there."
        )
    # Each run of padding is a document of its own.
    return starts | (turns & ~real)


def _no_conflict(conflicts: Flags, what: str) -> None:
    if conflicts.any():
        raise BoundaryConflict(
            f"{what}: at {_first(conflicts)}. Let both describe the same documents, or pass only one of them."
        )


def _from_starts(starts: Flags, on: torch.device, positions: int | None) -> Boundaries:
    (firsts,) = starts.reshape(-1).nonzero()
    ends = np.empty(len(firsts) + 1, dtype=np.int32)
    ends[:-1], ends[-1] = firsts, starts.size
    lengths = tuple((ends[1:] - ends[:-1]).tolist())
    # not by to_device: each forward of a batch with ids would have a call more
    cu = torch.from_numpy(ends).to(on, non_blocking=on.type in tensors.NOT_WAITED_FOR)
    return Boundaries(cu, max(lengths), positions, lengths)


def _require_no_wrap(dtype: torch.dtype, largest: int, counted: int) -> None:
    # behind that, the ids of a longer document begin again, as if another one started
    if torch.iinfo(dtype).bits < 32 and largest == torch.iinfo(dtype).max < counted:
        raise BadPositionIds(
            f"position_ids: expected a dtype that holds the ids of the longest document, found {dtype} and ids up to "
            f"{largest}, which is its largest number: longer documents would restart behind it. Make the ids as int64."
        )


def is_plain(
    position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, seq_idx: torch.Tensor | None
) -> bool:
    """Whether position ids on one axis are all that a batch says of its documents."""
    one_axis = position_ids is not None and (position_ids.dim() < 3 or position_ids.shape[0] == 1)
    return one_axis and attention_mask is None and seq_idx is None


def from_positions(ids: torch.Tensor, device: torch.device, always: bool, first_position: int = 0) -> Boundaries | None:
    # The ids are [batch, length], and the batch says nothing else of its documents (is_plain).
    dtype, ids = ids.dtype, ids.detach().to(device, torch.int64)
    if device.type == "cpu":
        numbers = tensors.read(ids)
        starts = _breaks(numbers, 1)
        # the loops of ufuncs themselves: methods and functions of numpy's are Python around them
        packed, last = int(np.add.reduce(starts, None)) > len(starts), int(np.maximum.reduce(numbers, None))
        if packed and np.minimum.reduce(numbers, None) < first_position:
            starts[:, 1:] |= _behind_padding(numbers[:, 1:], numbers[:, :-1], starts[:, :-1], first_position)
        made = _from_starts(starts, device, last + 1) if packed or always else None
    else:
        # The device looks for first tokens, and the host reads four numbers, whatever the length of the rows.
        ends, found = _on_device(ids)
        documents, longest, least, last = tensors.read(found).tolist()
        packed = documents > ids.shape[0]
        if packed and least < first_position:  # so few batches have such ids that another read costs less than looking
            ends, found = _on_device(ids, first_position)
            documents, longest, *_ = tensors.read(found).tolist()
        made = Boundaries(ends[: documents + 1], longest, last + 1) if packed or always else None
    if made is not None and packed:
        _require_no_wrap(dtype, last, made.max_seqlen + first_position)
    return made


def _on_device(ids: torch.Tensor, first_position: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    # Nothing is read. Returned are the ends of the documents, int32 [tokens + 1], the last of which is repeated, and
    # int64 [4]: the number of documents, the longest one's length, the smallest and the largest id. ``first_position``
    # is given if an id is below it.
    tokens = ids.numel()
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = counts_anew(ids[:, 1:], ids[:, :-1])
    if first_position is not None:
        starts[:, 1:] |= _behind_padding(ids[:, 1:], ids[:, :-1], starts[:, :-1], first_position)
    number = starts.flatten().cumsum(0)
    token = torch.arange(tokens, device=ids.device)
    ends = torch.full((tokens + 2,), tokens, device=ids.device)
    ends = ends.scatter(0, torch.where(starts.flatten(), number - 1, tokens + 1), token)[:-1]  # others to a place apart
    return ends.to(torch.int32), torch.stack([number[-1], ends.diff().max(), *torch.aminmax(ids)])


def _documents(position_ids: torch.Tensor, first_position: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    # The second result is an empty tensor [max_seqlen, 0]: a graph knows a size without reading a tensor.
    found = from_positions(position_ids, position_ids.device, True, first_position)
    assert found is not None, "it is asked for always"
    cu = found.cu_seqlens.clone()
    return cu, cu.new_empty(found.max_seqlen, 0)


def _documents_fake(position_ids: torch.Tensor, first_position: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    cu = position_ids.new_empty(unbacked_size(2), dtype=torch.int32)
    return cu, cu.new_empty(unbacked_size(1), 0)


operator_later(
    "documents",
    _documents,
    "(Tensor position_ids, int first_position=0) -> (Tensor cu_seqlens, Tensor longest)",
    _documents_fake,
)


def in_graph(position_ids: torch.Tensor, first_position: int) -> Boundaries:
    # From torch 2.4 on. The number of documents and the longest length are sizes that the graph does not know.
    cu, longest = torch.ops.fa2patch.documents.default(position_ids, first_position)
    return Boundaries(cu, longest.shape[0], uncounted=True)
