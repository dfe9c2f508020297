"""Points about trees of segments: a prompt that several completions follow is in the row once."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

import fa2patch
from fa2patch.errors import BadParents, PackingNotIsolated
from fa2patch.proof.runs import outputs_and_embeddings

from ... import tiny_models
from ..cell import AloneFails, Cell, NotApplicable, assert_unmoved, point, unless_alone_raises
from ..compare import GRADIENT_TOLERANCE, assert_close, assert_same_gradients
from ..rows import alone, documents, gradients, loss_of
from .training import checkpoint, checkpointed_alone

# Two prompts. The second completion of the first one is continued twice.
PARENTS = (-1, 0, 0, 2, 2, -1, 5, 5)

LENGTHS = (9, 5, 4, 1, 6, 3, 7, 2)

# each segment's path
_UP_TO = ((0,), (0, 1), (0, 2), (0, 2, 3), (0, 2, 4), (5,), (5, 6), (5, 7))

_PATHS = [path for path in _UP_TO if path[-1] not in PARENTS]


class _Tree:
    # The batch of a tree, and each path's tokens: alone, and as places in the row.

    def __init__(self, model: Any) -> None:
        segments = documents(*LENGTHS)
        ends = torch.tensor([0, *LENGTHS]).cumsum(0)
        places = [torch.arange(ends[i], ends[i + 1]) for i in range(len(LENGTHS))]
        self.paths = [torch.cat([segments[i] for i in path]) for path in _PATHS]
        self.at = [torch.cat([places[i] for i in path]) for path in _PATHS]
        self.positions = torch.zeros(sum(LENGTHS), dtype=torch.int64)
        for at in self.at:
            self.positions[at] = torch.arange(len(at)) + tiny_models.first_position(model)
        self.batch: dict[str, Any] = {
            "input_ids": torch.cat(segments)[None],
            "position_ids": self.positions[None],
            **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends.int()),
            **dict.fromkeys(("max_length_q", "max_length_k"), max(LENGTHS)),
            "segment_parents": torch.tensor(PARENTS, dtype=torch.int32),
        }

    def on_paths(self, of_tokens: torch.Tensor) -> torch.Tensor:
        # The row's [tokens, ...] become those of the paths, one after the other.
        return of_tokens[torch.cat(self.at)]


def _dtype(cell: Cell) -> torch.dtype:
    # A prompt's gradient sums the rounding of experts that multiply other rows. So the seeds' mixtures are computed in
    # double precision, in versions that can.
    if not (tiny_models.is_mixture(cell.family) and cell.family in tiny_models.SEEDS):
        return cell.dtype
    try:
        alone(cell.reference(torch.float64), documents(2))
    except RuntimeError:  # the grouped products of 5.x take no float64, nor do the masks of 4.36
        return cell.dtype
    return torch.float64


def _of_gradients(cell: Cell, dtype: torch.dtype) -> dict[str, float]:
    # A mixture in float32 needs other tolerances for the reason that _dtype gives.
    rounds = tiny_models.is_mixture(cell.family) and dtype == torch.float32
    return {"tolerance": GRADIENT_TOLERANCE, "floor": 0.01} if rounds else cell.of_gradients


def _unless_upstream_looks_ahead(check: Callable[[Cell], None]) -> Callable[[Cell], None]:
    # Transformers alone fails if the unpatched model's tokens depend on later ones. That is seen in double precision,
    # where it is no rounding: Mamba 2 up to 4.47 without its fast kernels is off by up to 1e-4 of the scale, so a
    # prompt is another one before each completion.

    @functools.wraps(check)
    def checked(cell: Cell) -> None:
        try:
            check(cell)
        except (AssertionError, BadParents, PackingNotIsolated) as error:
            if _looks_ahead(cell):
                raise AloneFails("tokens depend on later ones in the unpatched model, by more than rounding") from error
            raise

    return checked


def _looks_ahead(cell: Cell) -> bool:
    if tiny_models.is_encoder(cell.family):
        return False
    try:
        model = cell.reference(torch.float64)
        one, other = documents(20, 20)
        other[:13] = one[:13]  # in the middle of a chunk
        first, second = alone(model, [one, other]).split(20)
    except RuntimeError:  # this model does not compute in double precision
        return False
    return bool((first[:13] - second[:13]).abs().max() > 1e-9 * first.abs().max())


@point
@_unless_upstream_looks_ahead
def shared_prompts(cell: Cell) -> None:
    """Logits, losses and gradients of a tree equal those of its paths alone, and nothing reaches a sibling."""
    dtype = _dtype(cell)
    reference, model, near = cell.reference(dtype), cell.model(dtype), _of_gradients(cell, dtype)
    tree = _Tree(model)
    with fa2patch.apply(model) as patch:
        if patch.facts.both_ways or tiny_models.is_encoder(cell.family):
            try:
                model(**tree.batch)
            except BadParents:
                return
            raise AssertionError("a model whose tokens see later tokens took a tree of segments")
        expected, of_embeddings = _alone(reference, tree)
        found, leaf = outputs_and_embeddings(model, model, tree.batch)
        assert_close(tree.on_paths(found[0]), expected, "logits")
        loss_of(tree.on_paths(found[0]), tree.paths).backward()
        assert leaf.grad is not None
        # The gradients of a prompt's embeddings are the sums over the paths that start with it.
        assert_same_gradients({"embeddings": leaf.grad[0]}, {"embeddings": of_embeddings}, **near)
        assert_same_gradients(gradients(model), gradients(reference), **near)
        without_ids = {name: value for name, value in tree.batch.items() if name != "position_ids"}
        assert_close(tree.on_paths(model(**without_ids).logits[0]), expected, "logits without position_ids")
        _nothing_reaches_siblings(cell, model, tree)


def _alone(reference: Any, tree: _Tree) -> tuple[torch.Tensor, torch.Tensor]:
    leaves: list[torch.Tensor] = []

    def keep(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1] * 1

    hook = reference.get_input_embeddings().register_forward_hook(keep)
    expected = alone(reference, tree.paths)
    hook.remove()
    loss_of(expected, tree.paths).backward()
    summed = torch.zeros(sum(LENGTHS), leaves[0].shape[-1], dtype=leaves[0].dtype)
    for at, leaf in zip(tree.at, leaves):
        assert leaf.grad is not None
        summed.index_add_(0, at, leaf.grad[0])
    return expected, summed


def _nothing_reaches_siblings(cell: Cell, model: Any, tree: _Tree) -> None:
    # Other tokens in the segment that is continued twice change its descendants only. So do gradients.
    changed, sending = 2, 4
    segments = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    inside = torch.tensor([changed in path for path in _UP_TO])[segments]
    other = tree.batch["input_ids"].clone()
    other[0, segments == changed] = documents(LENGTHS[changed], seed=9)[0]
    before, leaf = outputs_and_embeddings(model, model, tree.batch)
    after = model(**{**tree.batch, "input_ids": other}).logits
    assert_unmoved(cell, after[0, ~inside], before[0, ~inside])
    if torch.equal(after[0, inside], before[0, inside]):
        raise AssertionError("other tokens in a segment change nothing in what continues it")
    (gradient,) = torch.autograd.grad(before[0, segments == sending].float().square().sum(), leaf)
    for segment in range(len(LENGTHS)):
        reached = bool(gradient[0, segments == segment].any())
        if reached != (segment in _UP_TO[sending]):
            raise AssertionError(f"segment {sending} sends {'a' if reached else 'no'} gradient to segment {segment}")


@point
@_unless_upstream_looks_ahead
def shared_prompts_checkpointed(cell: Cell) -> None:
    """Gradients of a tree with checkpointing, reentrant or not, equal those of its paths alone."""
    dtype = _dtype(cell)
    reference, near = cell.reference(dtype), _of_gradients(cell, dtype)
    tree = _Tree(reference)
    if not reference.supports_gradient_checkpointing:
        raise NotApplicable("this version of the architecture has no gradient checkpointing")
    with fa2patch.apply(reference) as patch:
        if patch.facts.both_ways or tiny_models.is_encoder(cell.family):
            raise NotApplicable("a tree of segments is refused, because tokens see later tokens")
    loss_of(alone(reference, tree.paths, use_cache=False), tree.paths).backward()
    expected = gradients(reference)
    for reentrant in (True, False):
        model = cell.model(dtype)
        checkpoint(model, reentrant)
        unpatched = functools.partial(checkpointed_alone, cell, reentrant, tree.paths)
        with fa2patch.apply(model), unless_alone_raises(unpatched):
            loss_of(tree.on_paths(model(**tree.batch).logits[0]), tree.paths).backward()
        found = gradients(model)
        try:
            assert_same_gradients(found, expected, **near)
        except AssertionError:  # Gemma 3n and 4 lose gradients through keys that layers share, also unpatched
            assert_same_gradients(found, checkpointed_alone(cell, reentrant, tree.paths), **near)
