"""Pictures, films and sound of several examples become those of one row."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..documents.media import JOINS, ZEROS, Key, meaning
from ..documents.names import GRIDS
from ..errors import CollatorError

Media = dict[str, torch.Tensor]
"""The keys of one example that the table of :mod:`fa2patch.documents.media` has, as tensors."""

TOKEN = "token"
"""What the option ``keys`` says of a column with one number per token."""


class Table:
    """The table of keys, with what the user says of more keys.

    Args:
        keys: a name of :data:`~fa2patch.documents.media.JOINS`, or :data:`TOKEN`, for each key that the table lacks or
            means otherwise.
        grids: the grids that the model's forward takes. Pictures without them are an error.

    Raises:
        CollatorError: ``keys`` is no mapping, or has another value.
    """

    def __init__(self, keys: Mapping[str, str], grids: Collection[str] = ()) -> None:
        known = (*JOINS, TOKEN)
        if not isinstance(keys, Mapping):
            raise CollatorError(f"keys: expected a mapping from keys to one of {', '.join(known)}, found {keys!r}.")
        for name, join in keys.items():
            if join not in known:
                raise CollatorError(f"keys[{name!r}]: expected one of {', '.join(known)}, found {join!r}.")
        self._said, self.grids = dict(keys), tuple(grids)

    def of(self, example: Mapping[str, Any]) -> dict[str, Key]:
        """The rows of the table for those keys of an example that are no columns with one number per token."""
        said = {name: Key(name, "", join, "", optional=True) for name, join in self._said.items() if name in example}
        found = {name: meaning(name, example) for name in example if name not in said}
        return {name: key for name, key in {**found, **said}.items() if key is not None and key.join != TOKEN}


def split(index: int, found: dict[str, Any], table: Table) -> tuple[Media, dict[str, Key]]:
    """Take an example's pictures, films and sound out of its keys. What remains are columns.

    Args:
        index: the example's index in the batch, for errors.
        found: the example's keys, without those whose value is None.
        table: the table of keys.

    Returns:
        The tensors, and the row of the table for each of them.

    Raises:
        CollatorError: a value is no array of numbers, or pictures and what describes them do not belong together.
    """
    keys = table.of(found)
    own = {name: _tensor(index, name, found.pop(name)) for name in keys}
    keys = {name: key for name, key in keys.items() if key.join != "drop"}
    _check_grids(index, own, table.grids)
    counts = {
        name: entries(own[name], key)
        for name, key in keys.items()
        if key.of and key.join in ("each", "padded", "in row")
    }
    for kind in {keys[name].of for name in counts}:
        of_kind = {name: count for name, count in counts.items() if keys[name].of == kind and name not in GRIDS}
        if len(set(of_kind.values())) > 1:
            raise CollatorError(
                f"example {index}: {', '.join(f'{name} has {count}' for name, count in of_kind.items())} {kind}s. Pass "
                "what the processor returned for this example."
            )
    return {name: own[name] for name in keys}, keys


def entries(value: torch.Tensor, key: Key) -> int:
    """The number of pictures, films or sounds that a tensor has an entry for."""
    return value.shape[1] if key.join == "in row" and value.dim() > 1 else len(value) if value.dim() else 1


def require_the_same_keys(all_keys: Sequence[Mapping[str, Key]]) -> None:
    """Raise :class:`CollatorError` if examples with pictures (or films, or sound) describe them by different keys."""
    first: dict[str, tuple[int, set[str]]] = {}
    for index, keys in enumerate(all_keys):
        for kind in {key.of for key in keys.values()} - {""}:
            needed = {
                name for name, key in keys.items() if key.of == kind and not key.optional and key.join != "positions"
            }
            at, others = first.setdefault(kind, (index, needed))
            for name in sorted(needed ^ others):
                have, lack = (index, at) if name in needed else (at, index)
                raise CollatorError(
                    f"example {lack}: {kind} without {name}, which example {have} has. Use one processor with the same "
                    "options for all."
                )


def require_alike(media: Sequence[Media], all_keys: Sequence[Mapping[str, Key]]) -> None:
    """Raise :class:`CollatorError` if the model would compute an example otherwise beside the others.

    Phi-4-multimodal projects sound by other weights in a forward that has pictures.
    """
    for index, keys in enumerate(all_keys):
        for name, key in keys.items():
            if key.apart == ZEROS:
                _require_masks_alike(name, media)
                continue
            beside = next((at for at, own in enumerate(media) if key.apart and key.apart in own), None)
            if beside is not None and key.apart not in media[index]:
                raise CollatorError(
                    f"example {index}: {name} without {key.apart}, which example {beside} has. This model computes "
                    "sound otherwise in a forward with pictures, so the two do not go into one row. Put examples with "
                    "sound alone, and those with pictures, into batches of their own."
                )


def _require_masks_alike(name: str, media: Sequence[Media]) -> None:
    masks = {index: own[name] for index, own in enumerate(media) if name in own}
    shapes = {mask.shape[1:] for mask in masks.values()}
    full = [index for index, mask in masks.items() if bool(mask.all())]
    if full and (len(shapes) > 1 or len(full) < len(masks)):
        raise CollatorError(
            f"example {full[0]}: its {name} is 1 everywhere, and that of the row would not be. Where every patch is "
            "seen, this model's encoder computes attention in one direction, else in both, so the example would not be "
            "computed as alone. Put pictures of one size into a row, or the example into a batch of its own."
        )


def joined(
    media: Sequence[Media], all_keys: Sequence[Mapping[str, Key]]
) -> tuple[Media, dict[str, tuple[int, list[int]]]]:
    """Join the pictures, films and sound of all examples for one row.

    Returns:
        The row's keys, and their :attr:`~fa2patch.documents.media.MediaRow.parts`.

    Raises:
        CollatorError: entries of one key have different shapes, or differ and must be the same.
    """
    row: Media = {}
    whose: dict[str, tuple[int, list[int]]] = {}
    for name, key in {name: key for keys in all_keys for name, key in keys.items()}.items():
        if key.join == "positions":
            continue
        complete = _with_masks(name, key, media)
        parts = [own[name] for own in complete if name in own]
        if key.join == "same":
            if any(not torch.equal(part, parts[0]) for part in parts) or len(parts) < len(media):
                raise CollatorError(f"{name}: expected the same value in all examples of a row. Batch alike examples.")
            row[name] = parts[0]
        else:
            row[name] = _concatenated(name, key, parts)
            along = 1 if key.join == "in row" else 0
            sizes = [(own[name].shape[along] if own[name].dim() else 1) if name in own else 0 for own in complete]
            whose[name] = along, sizes
    return row, whose


def _with_masks(name: str, key: Key, media: Sequence[Media]) -> Sequence[Media]:
    """The media of all examples, with a mask of ones where a processor left it out.

    Phi-4-multimodal's leaves it out for a single sound, which is never filled.
    """
    like = SHAPES.get(name, "")
    if not key.optional or not any(like in own for own in media):
        return media
    return [
        {**own, name: torch.ones(own[like].shape[:2], dtype=torch.bool)} if like in own and name not in own else own
        for own in media
    ]


SHAPES = {"audio_attention_mask": "audio_input_features"}
"""The key whose first two dimensions an optional mask has."""


def _check_grids(index: int, own: Media, needed: Collection[str]) -> None:
    for grid, patches in GRIDS.items():
        if (grid in own) != (patches in own) and (grid in own or grid in needed):
            there, missing = (grid, patches) if grid in own else (patches, grid)
            raise CollatorError(f"example {index}: {there} without {missing}. Keep both, as the processor gives them.")
        if grid not in own:
            continue
        if own[grid].dim() != 2 or own[grid].shape[1] != 3 or own[grid].is_floating_point():
            raise CollatorError(
                f"example {index}: {grid} must be integers [pictures, 3], found {own[grid].dtype} "
                f"{list(own[grid].shape)}."
            )
        expected = int(own[grid].prod(dim=1).sum())
        if len(own[patches]) != expected:
            raise CollatorError(
                f"example {index}: {grid} says {expected} patches, {patches} holds {len(own[patches])}. Pass what "
                "the processor returned for this example, a row for each patch."
            )


def _tensor(index: int, name: str, value: Any) -> torch.Tensor:
    try:
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise CollatorError(f"example {index}: {name} is no array of numbers ({error}).") from error


def _concatenated(name: str, key: Key, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    along = 1 if key.join == "in row" else 0
    parts = [part if part.dim() else part[None] for part in parts]
    sizes = {part.dim() for part in parts}
    if key.join == "in row" and (min(sizes) < 2 or any(len(part) != 1 for part in parts)):
        raise CollatorError(f"{name}: expected [1, n, ...] in every example, found {[list(p.shape) for p in parts]}.")
    if len(sizes) == 1 and key.join in ("padded", "in row"):
        largest = [max(part.shape[dim] for part in parts) for dim in range(parts[0].dim())]
        parts = [_filled(part, largest, along) for part in parts]
    shapes = {(*part.shape[:along], *part.shape[along + 1 :]) for part in parts}
    if len(shapes) > 1:
        raise CollatorError(
            f"{name}: examples hold entries of shapes {sorted(shapes)}, which do not go into one row. Let the "
            "processor give entries of one shape, or put these examples into different batches."
        )
    return torch.cat(list(parts), dim=along)


def _filled(part: torch.Tensor, largest: Sequence[int], along: int) -> torch.Tensor:
    """Fill a tensor with zeros to the largest size of each dimension, except along which it is joined."""
    missing = [0 if dim == along else largest[dim] - part.shape[dim] for dim in range(part.dim())]
    return torch.nn.functional.pad(part, [side for fill in reversed(missing) for side in (0, fill)])
