"""The point that compares windows, chunks and local layers of packed rows with the model's definition."""

from __future__ import annotations

from typing import Any

import torch

import fa2patch

from ... import tiny_models
from .. import reach, window_kinds
from ..cell import Cell, NotApplicable, point
from ..compare import TOLERANCE, assert_close
from ..rows import alone, documents, pack
from ..window_kinds import Kind, Way

LONGEST = 12
WIDE = 96
"""A size larger than any document here and smaller than ``max_position_embeddings``."""

SMALL = 4
"""The size with which a block's reach is measured."""


@point
def windows(cell: Cell) -> None:
    """Packed rows have every window, chunk and local layer of the config, smaller than, equal to and above documents.

    A block's reach is measured: the tokens of its input that a token of its output depends on. In packed rows it must
    equal the definition, in the same blocks as in eager code if that has a window at all. Logits must be equal too.
    """
    kinds = window_kinds.of(cell.family)
    if not kinds:
        raise NotApplicable("no sliding window")
    without = []
    for kind in kinds:
        held = [_held(cell, kind, name, way) for name, way in window_kinds.ways(cell.family).items()]
        if any(held):
            continue
        if window_kinds.reads(cell.family, kind):
            raise AssertionError(
                f"{kind.name} changes nothing, neither in packed rows nor in eager code, and the modeling file speaks "
                "of it: window_kinds.py does not know how this config turns it on."
            )
        without.append(kind.name)
    if len(without) == len(kinds):
        raise NotApplicable(f"its {' and '.join(without)} changes nothing in this version: no code of the model has it")


def _held(cell: Cell, kind: Kind, name: str, way: Way) -> bool:
    """Whether there is such a window; raises an AssertionError if packed rows do not have it as defined."""
    what, changes, encoder = f"{kind.name} by {name}", way.changes, tiny_models.is_encoder(cell.family)
    excess, in_eager = _of_eager(cell, kind, changes, what)
    in_packed = _of_packed(cell, kind, changes, what)
    if way.layers is not None and len(in_packed) != way.layers:
        raise AssertionError(f"{what}: expected it in {way.layers} layers of packed rows, found it in {in_packed}")
    if in_eager != in_packed and in_eager and way.one is not None and len(_of_eager(cell, kind, way.one, what)[1]) != 1:
        in_eager = []  # Qwen2-MoE (to 4.57) and Qwen2-VL (to 4.52) use one mask for all layers
    if in_eager and in_eager != in_packed:
        raise AssertionError(f"{what}: in eager code blocks {in_eager} have it, in packed rows {in_packed or 'none'}")
    if not in_packed:
        return False
    docs = documents(5, LONGEST, 1, 7)
    seed = cell.family in tiny_models.SEEDS
    near, moved, found = TOLERANCE if seed else 2 * TOLERANCE, {}, {}
    for size in (WIDE, *(kind.sizes if seed or encoder else (kind.sizes[0], kind.sizes[2], kind.sizes[-1]))):
        model = cell.model(**changes, **{kind.name: size})
        with fa2patch.apply(model):
            found[size] = model(**pack(docs)).logits[0]
            if in_eager and size > excess:
                expected = alone(cell.reference(**changes, **{kind.name: size - excess}), docs)
            else:  # upstream computes nothing to compare with
                expected = torch.cat([_alone_same_route(model, doc) for doc in docs])
        assert_close(found[size], expected, f"{what} of {size}", near)
        moved[size] = bool((found[size] - found[WIDE]).abs().max() > 1e-4 * found[WIDE].abs().max())
    if any(changed != kind.hides(LONGEST, size, encoder) for size, changed in moved.items()):
        raise AssertionError(f"{what}: documents of up to {LONGEST} tokens, and sizes that change something: {moved}")
    return True


def _of_eager(cell: Cell, kind: Kind, changes: dict[str, Any], what: str) -> tuple[int, list[str]]:
    """How many tokens more than defined this version's eager code sees, and the blocks that have a window."""
    models = [cell.reference(**changes, **{kind.name: size}) for size in (SMALL, WIDE)]
    small, wide = map(reach.alone, models)
    bounded = [name for name in small if not torch.equal(small[name], wide[name])]
    for excess in (0, 1, -1):
        if all(torch.equal(small[name], _defined(models[0], name, kind, SMALL + excess)) for name in bounded):
            return excess, bounded
    shown = {name: small[name].int().tolist() for name in bounded}
    raise AssertionError(f"{what} of {SMALL}: eager code sees what no definition says: {shown}")


def _of_packed(cell: Cell, kind: Kind, changes: dict[str, Any], what: str) -> list[str]:
    """The blocks that have a window in packed rows; raises an AssertionError if one differs from the definition."""
    models = [cell.model(**changes, **{kind.name: size}) for size in (SMALL, WIDE)]
    small, wide = map(reach.packed, models)
    bounded = [name for name in small if not torch.equal(small[name], wide[name])]
    for name in bounded:
        if not torch.equal(small[name], _defined(models[0], name, kind, SMALL)):
            raise AssertionError(f"{what} of {SMALL}: {name} sees {small[name].int().tolist()} in packed rows")
    return bounded


def _defined(model: Any, block: str, kind: Kind, size: int) -> torch.Tensor:
    return reach.of(kind.sees, size, reach.spread(model, block))


def _alone_same_route(model: Any, doc: torch.Tensor) -> torch.Tensor:
    cu = torch.tensor([0, len(doc)], dtype=torch.int32)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": len(doc), "max_length_k": len(doc)}
    return model(input_ids=doc[None], **given).logits[0]
