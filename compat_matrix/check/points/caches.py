"""Points about caches. A cache is found by what the model returns and takes, because releases name it differently."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch

import fa2patch
from fa2patch import errors

from ... import tiny_models
from ..cell import Cell, NotApplicable, point
from ..compare import TOLERANCE, assert_close
from ..rows import documents, pack, takes_cache, takes_positions
from ..upstream import alone_computes


@point
def packed_row_with_a_cache(cell: Cell) -> None:
    """A packed row with a cache is refused, and so is generation from a packed row, unless its tokens are right."""
    # The cache that the model makes itself, one without tokens and a static one are tried.
    model, docs = cell.model(), documents(5, 9)
    with torch.no_grad():  # a cache with a graph cannot be copied
        caches = dict(_caches(model))
    if not caches:
        raise NotApplicable("the model returns no cache that its forward takes")
    with fa2patch.apply(model):
        for kind, given in caches.items():
            try:
                model(**pack(docs), **given)
            except errors.Fa2PatchError:
                continue
            raise AssertionError(f"a packed row with {next(iter(given))} ({kind}) gave no error")
    if not tiny_models.is_encoder(cell.family):
        _generates_nothing_wrong(model, docs)
        _generates_nothing_wrong(model, docs, cache_implementation="static")


def _generates_nothing_wrong(model: Any, docs: list[torch.Tensor], **cache: str) -> None:
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0, **cache}
    seen = []
    hook = model.register_forward_pre_hook(
        lambda module, given, named: seen.append(named.get("position_ids")), with_kwargs=True
    )
    try:
        with fa2patch.apply(model):
            found = model.generate(**pack(docs), **settings)
    except Exception:  # fa2patch refused the row, or generate() of this version cannot take position_ids
        return
    finally:
        hook.remove()
    first = seen[0] if seen else None
    if first is None or first.shape[-1] != sum(map(len, docs)) or not (first.diff() < 0).any():
        return  # generate() did not hand the position_ids on, so that nothing says that the row is packed
    expected = model.generate(docs[-1][None], **settings)
    if not torch.equal(found[0, -3:], expected[0, -3:]):
        raise AssertionError("generate() of a packed row gave other tokens than for its last document, and no error")


def _caches(model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    # The caches hold three tokens or none. Each is the argument of a forward that takes it.
    name, cache = _returned(model)
    if not name:
        return
    yield "filled", {name: cache}
    empty = copy.deepcopy(cache)
    if callable(getattr(empty, "reset", None)) and not isinstance(getattr(empty, "key_cache", None), list):
        try:
            empty.reset()  # of a DynamicCache up to 4.53 it leaves the layers' lengths as they are
        except AttributeError:  # Mamba 2's of 4.45 fails in it
            pass
        else:
            yield "emptied", {name: empty}
    with_static = {"cache_implementation": "static", "return_dict_in_generate": True, "max_new_tokens": 2}
    try:
        static = model.generate(documents(3)[0][None], pad_token_id=0, **with_static)
    except Exception:  # this version or family has no static cache
        return
    if static.get(name) is not None:
        yield "static", {name: static[name]}


def _returned(model: Any) -> tuple[str, Any]:
    # The name is empty if the model returns no cache that its forward takes.
    caching = {"use_cache": True} if takes_cache(model) else {}
    with alone_computes():
        output = model(documents(3)[0][None], **caching)
    taken = inspect.signature(type(model).forward).parameters
    for name, value in output.items():
        if name in taken and value is not None and not isinstance(value, torch.Tensor):
            return name, value
    return "", None


@point
def padded_rows_with_a_cache(cell: Cell) -> None:
    """Left-padded rows and the step after them, with the cache, give the logits of the unpatched model, bit for bit."""
    model = cell.model()
    with torch.no_grad():
        name, _ = _returned(model)
    if not name:
        raise NotApplicable("the model returns no cache that its forward takes")
    counts = takes_positions(model)
    with alone_computes():
        expected = _two_steps(cell.model(), name, counts)
    with fa2patch.apply(model):
        for step, both in enumerate(zip(_two_steps(model, name, counts), expected)):
            if not torch.equal(*both):
                raise AssertionError(f"step {step} of left-padded rows gave other logits")
    model = cell.model()
    # If padded batches are computed packed, the logits of real tokens are the same up to rounding, or it is an error.
    try:
        with fa2patch.apply(model, padded_batches=True):
            found = _two_steps(model, name, counts)
    except errors.Fa2PatchError:
        return
    for step, both in enumerate(zip(found, expected)):
        tolerance = 1e-2 if tiny_models.is_mixture(cell.family) else TOLERANCE
        assert_close(*both, f"step {step} of left-padded rows that are computed packed", tolerance)


@torch.no_grad()
def _two_steps(model: Any, name: str, counts: bool) -> tuple[torch.Tensor, torch.Tensor]:
    # The last token's logits [2, vocabulary] of left-padded rows, and those of the step after them.
    # name: the argument that takes the cache. counts: whether position ids are given
    ids = torch.stack(documents(7, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def call(ids: torch.Tensor, mask: torch.Tensor, **cache: Any) -> Any:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        counted = {"position_ids": positions} if counts else {}
        return model(input_ids=ids, attention_mask=mask, use_cache=True, **counted, **cache)

    first = call(ids, mask)
    longer = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
    second = call(torch.tensor([[11], [12]]), longer, **{name: first[name]})
    return first.logits[:, -1], second.logits[:, -1]
