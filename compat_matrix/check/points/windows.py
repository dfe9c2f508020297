"""The point that compares windows, chunks and local layers of packed rows with the model's definition.

Gradients measure which tokens of its input each block of a model depends on: its reach.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

import torch

import fa2patch

from ... import tiny_models
from .. import window_kinds
from ..cell import Cell, NotApplicable, point
from ..compare import TOLERANCE, assert_close
from ..rows import alone, documents, pack
from ..window_kinds import Kind, Way

# booleans [query, key] for each block, by its name
Reach = dict[str, torch.Tensor]

LONGEST = 12
WIDE = 96  # larger than any document here, and smaller than max_position_embeddings

SMALL = 4  # the size with which a block's reach is measured


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
        ways = window_kinds.ways(cell.family).values()
        if window_kinds.reads(cell.family, kind) and not any(_of_flash_alone(cell, kind, way) for way in ways):
            raise AssertionError(
                f"{kind.name} changes nothing, neither in packed rows nor in eager code, and the modeling file speaks "
                "of it: window_kinds.py does not know how this config turns it on."
            )
        without.append(kind.name)
    if len(without) == len(kinds):
        raise NotApplicable(f"its {' and '.join(without)} changes nothing in this version: no code of the model has it")


def _of_flash_alone(cell: Cell, kind: Kind, way: Way) -> bool:
    # Packed rows of other implementations then have no window.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return fa2patch.apply(cell.model(**way.changes, **{kind.name: SMALL})).facts.windows_of_flash


def _held(cell: Cell, kind: Kind, name: str, way: Way) -> bool:
    # It is False without such a window, and an AssertionError if packed rows do not have it as defined.
    what, changes, encoder = f"{kind.name} by {name}", way.changes, tiny_models.is_encoder(cell.family)
    excess, in_eager = _of_eager(cell, kind, changes, what)
    in_packed = _of_packed(cell, kind, changes, what)
    if not in_eager and not in_packed and _of_flash_alone(cell, kind, way):
        return False
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
    model, bounded = _bounded(cell.reference, reach_alone, kind, changes)
    for excess in (0, 1, -1):
        if all(torch.equal(seen, _defined(model, name, kind, SMALL + excess)) for name, seen in bounded.items()):
            return excess, list(bounded)
    shown = {name: seen.int().tolist() for name, seen in bounded.items()}
    raise AssertionError(f"{what} of {SMALL}: eager code sees what no definition says: {shown}")


def _of_packed(cell: Cell, kind: Kind, changes: dict[str, Any], what: str) -> list[str]:
    model, bounded = _bounded(cell.model, reach_packed, kind, changes)
    for name, seen in bounded.items():
        if not torch.equal(seen, _defined(model, name, kind, SMALL)):
            raise AssertionError(f"{what} of {SMALL}: {name} sees {seen.int().tolist()} in packed rows")
    return list(bounded)


def _bounded(
    build: Callable[..., Any], measured: Callable[[Any], Reach], kind: Kind, changes: dict[str, Any]
) -> tuple[Any, Reach]:
    # Only blocks that reach further with a wide window are returned.
    model, other = (build(**changes, **{kind.name: size}) for size in (SMALL, WIDE))
    small, wide = measured(model), measured(other)
    return model, {name: seen for name, seen in small.items() if not torch.equal(seen, wide[name])}


def _defined(model: Any, block: str, kind: Kind, size: int) -> torch.Tensor:
    # Convolutions in a block, besides its attention, extend its reach (Zaya's are before keys).
    inside = model.get_submodule(block).modules()
    return defined(kind, size, sum(each.kernel_size[0] - 1 for each in inside if isinstance(each, torch.nn.Conv1d)))


def defined(kind: Kind, size: int, spread: int = 0) -> torch.Tensor:
    # spread: how far convolutions before the attention look back
    places, back = range(LONGEST), range(spread + 1)
    return torch.tensor([[any(kind.sees(query, key + s, size) for s in back) for key in places] for query in places])


def reach_alone(model: Any) -> Reach:
    with _watched(model) as seen:
        alone(model, documents(LONGEST))
    return {name: _depends(*states, start=0) for name, states in seen.items()}


def reach_packed(model: Any) -> Reach:
    with fa2patch.apply(model), _watched(model) as seen:
        model(**pack(documents(3, LONGEST, 2)))
    return {name: _depends(*states, start=3) for name, states in seen.items()}


def _alone_same_route(model: Any, doc: torch.Tensor) -> torch.Tensor:
    cu = torch.tensor([0, len(doc)], dtype=torch.int32)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": len(doc), "max_length_k": len(doc)}
    return model(input_ids=doc[None], **given).logits[0]


@contextmanager
def _watched(model: Any) -> Iterator[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    # Blocks are the members of module lists. The input and output of a block's first call are kept. They are [..., 1,
    # tokens, width], because Gemma 3n has four streams.
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    lists = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    blocks = [(f"{name}.{i}", block) for name in lists for i, block in model.get_submodule(name).named_children()]

    def note(name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            states = args[0] if args else kwargs.get("hidden_states")
            out = output[0] if isinstance(output, tuple) else output
            whole = all(isinstance(x, torch.Tensor) and x.dim() >= 3 and x.requires_grad for x in (states, out))
            if whole and states.shape == out.shape and states.shape[-3] == 1 and name not in seen:
                seen[name] = states, out

        return hook

    handles = [block.register_forward_hook(note(name), with_kwargs=True) for name, block in blocks]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _depends(states: torch.Tensor, output: torch.Tensor, start: int) -> torch.Tensor:
    # [i, j] says whether output token start + i has a gradient to input token start + j.
    direction = torch.randn(output.shape[-1], generator=torch.Generator().manual_seed(0)).to(output.dtype)
    rows = []
    for query in range(start, start + LONGEST):
        scalar = (output[..., query, :] @ direction).sum()
        (gradient,) = torch.autograd.grad(scalar, states, retain_graph=True, allow_unused=True)
        if gradient is None:
            gradient = torch.zeros_like(states)
        rows.append(gradient[..., start : start + LONGEST, :].flatten(0, -3).any(-1).any(0))
    return torch.stack(rows)
