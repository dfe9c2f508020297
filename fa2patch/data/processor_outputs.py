"""Pictures, films and sound, as processors return them: those of several examples become those of one row."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..documents.names import GRIDS, JOINS, ZEROS, Key, media_key
from ..errors import CollatorError
from .columns import Columns, read_example, refuse_keys

Media = dict[str, torch.Tensor]  # the keys of one example that the table of fa2patch.documents.names has

TOKEN = "token"  # in the option `keys`: a column with one number per token


class Example(NamedTuple):
    columns: Columns  # one number per token, without masked tokens
    media: Media
    keys: dict[str, Key]  # what each of these means


def require_joins(keys: object) -> None:
    known = (*JOINS, TOKEN)
    if not isinstance(keys, Mapping):
        raise CollatorError(f"keys: expected a mapping from keys to one of {', '.join(known)}, found {keys!r}.")
    for name, join in keys.items():
        if join not in known:
            raise CollatorError(f"keys[{name!r}]: expected one of {', '.join(known)}, found {join!r}.")


def read_output(index: int, found: dict[str, Any], joins: Mapping[str, str], grids: Collection[str]) -> Example:
    # `joins` is what the user says of keys that the table lacks or means otherwise. Pictures without one of the
    # `grids`, which the model's forward takes, are an error.
    refuse_keys(index, found, ("position_ids", "seq_lengths", "rope_deltas"))
    keys = {name: key for name in found if (key := _key(name, found, joins)) is not None}
    media = {name: _tensor(index, name, found.pop(name)) for name in keys}
    keys = {name: key for name, key in keys.items() if key.join != "drop"}
    _check_grids(index, media, grids)
    counts: dict[str, dict[str, int]] = {}
    for name, key in keys.items():
        if key.of and key.join in ("each", "padded", "in row") and name not in GRIDS:
            counts.setdefault(key.of, {})[name] = entries(media[name], key)
    for kind, of_kind in counts.items():
        if len(set(of_kind.values())) > 1:
            raise CollatorError(
                f"example {index}: {', '.join(f'{name} has {count}' for name, count in of_kind.items())} {kind}s. Pass "
                "what the processor returned for this example."
            )
    columns = {name: _without_row(value) for name, value in found.items()}
    _require_columns(index, columns)
    return Example(read_example(index, columns), {name: media[name] for name in keys}, keys)


def _key(name: str, example: Mapping[str, Any], joins: Mapping[str, str]) -> Key | None:
    # The result is None for a column with one number per token.
    if name not in joins:
        return media_key(name, example)
    return None if joins[name] == TOKEN else Key(name, "", joins[name], "", optional=True)


def _without_row(value: Any) -> Any:
    # A processor returns [1, n].
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value[0] if value.ndim == 2 and len(value) == 1 else value
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], (list, tuple, np.ndarray)):
        return value[0]
    return value


def _require_columns(index: int, found: Mapping[str, Any]) -> None:
    # The meaning of a tensor that is not for each token is unknown.
    ids: Any = found.get("input_ids")
    for name, value in found.items():
        shape = getattr(value, "shape", None)
        if name in ("input_ids", "labels", "attention_mask") or shape is None or not hasattr(ids, "__len__"):
            continue
        if tuple(shape) != (len(ids),):
            raise CollatorError(
                f"example {index}: {name} has shape {list(shape)}, which is not one number for each of {len(ids)} "
                f"tokens, and the collator does not know what it means. Say it, as keys={{{name!r}: 'each'}} does "
                "for one entry for each picture, or remove it."
            )


def entries(value: torch.Tensor, key: Key) -> int:
    # This is the number of pictures, films or sounds that a tensor has an entry for.
    return value.shape[1] if key.join == "in row" and value.dim() > 1 else len(value) if value.dim() else 1


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


def require_the_same_keys(examples: Sequence[Example]) -> None:
    first: dict[str, tuple[int, set[str]]] = {}
    for index, (_, _, keys) in enumerate(examples):
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


def require_alike(examples: Sequence[Example]) -> None:
    # The model must compute each example in the row as it does alone.
    media = [example.media for example in examples]
    for index, (_, own, keys) in enumerate(examples):
        for name, key in keys.items():
            if key.apart == ZEROS:
                _require_masks_alike(name, media)
                continue
            beside = next((at for at, other in enumerate(media) if key.apart and key.apart in other), None)
            if beside is not None and key.apart not in own:  # Phi-4-multimodal projects sound by other weights there
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


def join_media(examples: Sequence[Example]) -> tuple[Media, dict[str, tuple[int, list[int]]]]:
    # The second result is MediaRow.parts.
    row: Media = {}
    whose: dict[str, tuple[int, list[int]]] = {}
    for name, key in {name: key for example in examples for name, key in example.keys.items()}.items():
        if key.join == "positions":
            continue
        media = [_own_or_ones(name, key, example.media) for example in examples]
        parts = [part for part in media if part is not None]
        if key.join == "same":
            if any(not torch.equal(part, parts[0]) for part in parts) or len(parts) < len(media):
                raise CollatorError(f"{name}: expected the same value in all examples of a row. Batch alike examples.")
            row[name] = parts[0]
        else:
            along = 1 if key.join == "in row" else 0
            row[name] = _concatenated(name, key, parts, along)
            whose[name] = along, [0 if part is None else entries(part, key) for part in media]
    return row, whose


def _own_or_ones(name: str, key: Key, own: Media) -> torch.Tensor | None:
    # Phi-4-multimodal's processor leaves the mask out for a single sound, which is never filled. A mask of ones stands
    # for it.
    like = own.get({"audio_attention_mask": "audio_input_features"}.get(name, ""))
    if name in own or like is None or not key.optional:
        return own.get(name)
    return torch.ones(like.shape[:2], dtype=torch.bool)


def _concatenated(name: str, key: Key, parts: Sequence[torch.Tensor], along: int) -> torch.Tensor:
    parts = [part if part.dim() else part[None] for part in parts]
    sizes = {part.dim() for part in parts}
    if key.join == "in row" and (min(sizes) < 2 or any(len(part) != 1 for part in parts)):
        raise CollatorError(f"{name}: expected [1, n, ...] in every example, found {[list(p.shape) for p in parts]}.")
    if len(sizes) == 1 and key.join in ("padded", "in row"):
        largest = [max(lengths) for lengths in zip(*(part.shape for part in parts))]
        parts = [_filled(part, largest, along) for part in parts]
    shapes = {(*part.shape[:along], *part.shape[along + 1 :]) for part in parts}
    if len(shapes) > 1:
        raise CollatorError(
            f"{name}: examples hold entries of shapes {sorted(shapes)}, which do not go into one row. Let the "
            "processor give entries of one shape, or put these examples into different batches."
        )
    return torch.cat(parts, dim=along)


def _filled(part: torch.Tensor, largest: Sequence[int], along: int) -> torch.Tensor:
    # Zeros fill each dimension to its largest size, except the one along which tensors are joined.
    missing = [0 if dim == along else largest[dim] - part.shape[dim] for dim in range(part.dim())]
    return torch.nn.functional.pad(part, [side for fill in reversed(missing) for side in (0, fill)])
