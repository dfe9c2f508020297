"""The points of encoder-decoders: sources in one row, targets in another. They have the names of what they are for rows
of text.

Pairs alone are computed unpatched, with eager attention.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, Callable

import torch

import fa2patch
from fa2patch import errors
from fa2patch.documents.names import OF_TARGETS

from ... import tiny_pairs
from ...tiny_pairs import Pairs, pairs
from ..cell import Cell, NotApplicable, assert_unmoved, unless_alone_raises
from ..compare import GRADIENT_TOLERANCE, assert_close, assert_same_gradients
from ..rows import gradients, output_or_error
from ..upstream import alone_computes
from .training import as_near_as_alone, checkpoint

POINTS: dict[str, Callable[[Cell], None]] = {}

SOURCES, TARGETS = (6, 2, 9, 4, 1), (5, 3, 7, 1, 4)


def point(function: Callable[[Cell], None]) -> Callable[[Cell], None]:
    POINTS[function.__name__] = function
    return function


def drawn(cell: Cell, *lengths: tuple[int, ...], seed: int = 0) -> Pairs:
    made = pairs(cell.family, *(cell.lengths(*of) for of in lengths or (SOURCES, TARGETS)), seed=seed)
    return cast(made, cell.dtype)


def cast(own: Pairs, dtype: torch.dtype) -> Pairs:
    for source in own.sources:
        source.update({name: value.to(dtype) for name, value in source.items() if value.is_floating_point()})
    return own


def alone(model: Any, batch: Pairs) -> list[Any]:
    return [model(**batch.alone(at)) for at in range(len(batch.targets))]


def logits_of(outputs: list[Any]) -> torch.Tensor:
    return torch.cat([output.logits[0] for output in outputs])


def mean_loss(outputs: list[Any], batch: Pairs) -> torch.Tensor:
    """The mean loss over all labels that count: VisionEncoderDecoder of 4.57 shifts its labels once more."""
    counts = [target.shape[1] for target in batch.targets]
    plain = torch.nn.functional.cross_entropy(outputs[0].logits[0].float(), batch.targets[0][0])
    if not torch.allclose(plain, outputs[0].loss.float(), rtol=1e-3):
        counts = [count - 1 for count in counts]
    pieces = [output.loss * count for output, count in zip(outputs, counts) if count]
    return sum(pieces[1:], pieces[0]) / sum(counts)


def failure_alone(cell: Cell) -> str:
    try:
        logits_of(alone(cell.model(), drawn(cell))).sum().backward()
    except Exception as error:
        return f"the unpatched model fails on one pair: {type(error).__name__}: {error}".splitlines()[0][:200]
    return ""


@point
def packed_row(cell: Cell) -> None:
    """Logits, loss and the gradients of all weights equal those of pairs alone, also if the first batch is proven."""
    batch, reference, model = drawn(cell), cell.reference(), cell.model()
    expected = alone(reference, batch)
    total = mean_loss(expected, batch)
    total.backward()
    with fa2patch.apply(model):
        found = model(**batch.packed())
        assert_close(found.logits[0], logits_of(expected), "logits")
        assert_close(found.loss.detach(), total.detach(), "loss")
        found.loss.backward()
    assert_same_gradients(gradients(model), gradients(reference), GRADIENT_TOLERANCE, 0.01)


@point
def every_layout(cell: Cell) -> None:
    """Sources and targets of one token anywhere, one pair, and decoder inputs that are given."""
    reference, model = cell.reference(), cell.model()
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    with fa2patch.apply(model, prove=False):
        for lengths in (((1, 5), (4, 1)), ((5, 1, 1), (1, 1, 6)), ((1, 1), (1, 1)), ((3, 3), (3, 3))):
            batch = drawn(cell, *lengths)
            expected = logits_of(alone(reference, batch))
            assert_close(model(**batch.packed()).logits[0], expected, f"logits of {lengths}")
            if shift is not None:
                given = torch.cat([shift(labels=target) for target in batch.targets], 1)
                assert_close(model(**batch.packed(), decoder_input_ids=given).logits[0], expected, "inputs given")


@point
def lengths(cell: Cell) -> None:
    """Logits equal those of pairs alone with lengths in place of positions, and with numbers of documents."""
    batch, model = drawn(cell), cell.model()
    expected = logits_of(alone(cell.reference(), batch))
    packed = batch.packed()
    rows = {OF_TARGETS: batch.targets}
    if batch.of_tokens:
        rows[""] = [source["input_ids"] for source in batch.sources]
    call = {name: value for name, value in packed.items() if not name.endswith("position_ids")}
    by_length: dict[str, Any] = {}
    by_number: dict[str, Any] = {}
    for prefix, each in rows.items():
        sizes = [row.shape[1] for row in each]
        ends = torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32)
        by_length |= {f"{prefix}cu_seq_lens_{side}": ends for side in "qk"}
        by_length |= {f"{prefix}max_length_{side}": max(sizes) for side in "qk"}
        numbers = torch.arange(1, len(sizes) + 1).repeat_interleave(torch.tensor(sizes))
        by_number[f"{prefix}attention_mask"] = numbers[None]
    with fa2patch.apply(model, prove=False):
        assert_close(model(**call, **by_length).logits[0], expected, "lengths")
        assert_close(model(**call, **by_number).logits[0], expected, "numbers of documents")


@point
def packed_rows(cell: Cell) -> None:
    """Logits of two rows of pairs equal those of pairs alone."""
    if not drawn(cell).of_tokens:
        raise NotApplicable  # sounds and pictures are a batch already, and refused with targets in two rows
    first, second = drawn(cell, (6, 2, 4), (5, 3, 2)), drawn(cell, (3, 9), (6, 4), seed=1)
    reference, model = cell.reference(), cell.model()
    rows = first.packed(), second.packed()
    batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    expected = torch.stack([logits_of(alone(reference, each)) for each in (first, second)])
    with fa2patch.apply(model, prove=False):
        assert_close(model(**batch).logits, expected, "logits of two rows")


@point
def padding(cell: Cell) -> None:
    """Real tokens are right in rows that the collator pads to a multiple."""
    batch, reference, model = drawn(cell), cell.reference(), cell.model()
    if not batch.of_tokens and not {*batch.sources[0]} <= {"input_features", "pixel_values"}:
        raise NotApplicable  # the collator knows no raw sounds
    expected = logits_of(alone(reference, batch))
    examples = [
        {**{name: value[0] for name, value in source.items()}, "labels": target[0]}
        for source, target in zip(batch.sources, batch.targets)
    ]
    if not batch.of_tokens:  # they stay a batch, and have no padding to belong to
        row = fa2patch.DataCollatorForSeq2Seq()(examples)
    else:
        row = fa2patch.DataCollatorForSeq2Seq(pad_to_multiple_of=32, pad_token_id=7)(examples)
    with fa2patch.apply(model, prove=False):
        found = model(**row)
        assert_close(found.logits[0, : len(expected)], expected, "logits before the padding")
        assert_close(found.loss.detach(), mean_loss(alone(reference, batch), batch).detach(), "loss")


@point
def nothing_crosses(cell: Cell) -> None:
    """``verify`` passes. Another source, or another target, moves its own pair, and no other; gradients neither."""
    batch, model = drawn(cell), cell.model()
    at, sizes = 2, [target.shape[1] for target in batch.targets]
    with fa2patch.apply(model, prove=False):
        fa2patch.verify(model, batch=batch.packed())
        before = model(**batch.packed()).logits[0].detach()
        own = slice(sum(sizes[:at]), sum(sizes[: at + 1]))
        others = drawn(cell, seed=5)
        for what, rows in (("source", "sources"), ("target", "targets")):
            changed = drawn(cell)
            getattr(changed, rows)[at] = getattr(others, rows)[at]
            after = model(**changed.packed()).logits[0].detach()
            if torch.equal(after[own], before[own]):
                raise AssertionError(f"another {what} does not move its own pair")
            for rest in (slice(0, own.start), slice(own.stop, None)):
                assert_unmoved(cell, after[rest], before[rest])
        _require_no_gradient(model, batch, at, own)


def _require_no_gradient(model: Any, batch: Pairs, at: int, own: slice) -> None:
    # of one target's outputs to the embedded tokens of all others, in both rows
    found: list[torch.Tensor] = []

    def kept(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        padding = -1 if module.padding_idx is None else module.padding_idx
        if bool((args[0] == padding).all()):  # LED pads each source to its window
            return output
        found.append(output.detach().requires_grad_())
        return found[-1] * 1

    tables = [each for each in model.modules() if isinstance(each, torch.nn.Embedding)]
    tables = [table for table in tables if table.num_embeddings == tiny_pairs.VOCABULARY]
    handles = [table.register_forward_hook(kept) for table in tables]
    try:
        logits = model(**batch.packed()).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    rows = [batch.targets] if not batch.of_tokens else [[each["input_ids"] for each in batch.sources], batch.targets]
    gradients = torch.autograd.grad(logits[own].square().sum(), found, allow_unused=True)
    whole = [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(found, gradients)]
    row, lengths = torch.cat(whole, 1)[0], [each.shape[1] for of in rows for each in of]
    if len(row) != sum(lengths):
        raise AssertionError(f"expected the embeddings of {sum(lengths)} tokens, found {len(row)}")
    for start in range(0, len(lengths), len(batch.targets)):
        sizes = [piece.abs().max().item() for piece in row.split(lengths)[start : start + len(batch.targets)]]
        if not sizes[at] > 0 or any(size for place, size in enumerate(sizes) if place != at):
            raise AssertionError(f"gradients of pair {at} to the tokens of pairs: {sizes}")


@point
def inertness(cell: Cell) -> None:
    """A padded batch gives bit for bit the same logits, loss and gradients before, under and after the patch."""
    batch, model = drawn(cell), cell.model()
    padded = batch.padded(0)

    def computed() -> Any:
        found = output_or_error(model, **padded)
        if isinstance(found, str):
            return found
        found.loss.backward()
        return {"logits": found.logits.detach(), "loss": found.loss.detach(), **gradients(model)}

    before = computed()
    if isinstance(before, str):
        raise NotApplicable(f"the unpatched model fails on a padded batch: {before}"[:200])
    with fa2patch.apply(model, prove=False):
        _require_same(computed(), before, "under the patch")
        model(**batch.packed())
        _require_same(computed(), before, "after a packed batch")
    _require_same(computed(), before, "after revert")


def _require_same(found: Any, expected: Any, when: str) -> None:
    if isinstance(found, str):
        raise AssertionError(f"{when}: {found}")
    other = [name for name in expected if not torch.equal(found[name], expected[name])]
    if other:
        raise AssertionError(f"{when}: a padded batch has other {', '.join(other[:3])}")


@point
def reverted(cell: Cell) -> None:
    """After ``revert`` nothing of the patch is left in the model."""
    model = cell.model()
    classes = [type(module) for module in model.modules()]
    held = [{name: id(value) for name, value in vars(module).items()} for module in model.modules()]
    own = [{name: id(value) for name, value in vars(cls).items()} for cls in classes]
    fa2patch.apply(model).revert()
    if held != [{name: id(value) for name, value in vars(module).items()} for module in model.modules()]:
        raise AssertionError("a module holds something else than before")
    if own != [{name: id(value) for name, value in vars(cls).items()} for cls in classes]:
        raise AssertionError("a class holds something else than before")


@point
def generation(cell: Cell) -> None:
    """A patched model generates the same tokens for a padded batch, greedily and with beams."""
    model, batch = cell.model(), drawn(cell)
    given = {name: value for name, value in batch.padded(0).items() if name != "labels"}
    ways: list[dict[str, Any]] = [{}, {"num_beams": 3}]

    def generated() -> list[Any]:
        return [model.generate(**given, **way, max_new_tokens=5, do_sample=False) for way in ways]

    try:
        before = generated()
    except Exception as error:
        raise NotApplicable(f"the unpatched model generates nothing: {type(error).__name__}: {error}"[:200]) from error
    with fa2patch.apply(model, prove=False):
        for found, expected in zip(generated(), before):
            if not torch.equal(found, expected):
                raise AssertionError(f"generated {found.tolist()}, before {expected.tolist()}")


@point
def checkpointing(cell: Cell) -> None:
    """Gradients with checkpointing, reentrant or not, equal those of pairs alone."""
    batch, reference = drawn(cell), cell.reference()
    if not reference.supports_gradient_checkpointing:
        raise NotApplicable("this version of the architecture has no gradient checkpointing")
    mean_loss(alone(reference, batch), batch).backward()
    expected = gradients(reference)
    for reentrant in (True, False):
        model = cell.model()
        try:
            checkpoint(model, reentrant)
        except NotImplementedError as error:
            raise NotApplicable("this version of the architecture does not say its input embeddings") from error
        unpatched = functools.partial(_checkpointed_padded, cell, batch, reentrant)
        with fa2patch.apply(model, prove=False), unless_alone_raises(unpatched):
            model(**batch.packed()).loss.backward()
        found = gradients(model)
        try:
            assert_same_gradients(found, expected, GRADIENT_TOLERANCE, 0.01)
        except AssertionError:
            # encoders of sound may norm over a batch in training, and UMT5 up to 4.48 loses gradients, also unpatched
            with alone_computes(" in training"):
                alone_too = unpatched()
            assert_same_gradients(found, alone_too, GRADIENT_TOLERANCE, 0.01)


def _checkpointed_padded(cell: Cell, batch: Pairs, reentrant: bool) -> dict[str, torch.Tensor]:
    model = cell.model()
    checkpoint(model, reentrant)
    model(**batch.padded(0)).loss.backward()
    return gradients(model)


@point
def half_precision(cell: Cell) -> None:
    """Packed pairs in a bfloat16 model are about as close to float32 as pairs alone, and are isolated."""
    _as_near_as_alone(cell, cell.model(torch.bfloat16), cell.reference(torch.bfloat16))


@point
def autocast(cell: Cell) -> None:
    """The same holds for a float32 model under autocast to bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        _as_near_as_alone(cell, cell.model(), cell.reference())


def _as_near_as_alone(cell: Cell, model: Any, reference: Any) -> None:
    batch, changed = drawn(cell), drawn(cell)
    changed.sources[0], changed.targets[0] = (getattr(drawn(cell, seed=5), name)[0] for name in ("sources", "targets"))

    def computed_alone(model: Any) -> torch.Tensor:
        return logits_of(alone(model, cast(drawn(cell), model.dtype)))

    rows = [cast(each, model.dtype).packed() for each in (batch, changed)]
    labels = torch.cat(batch.targets, 1)[0]
    as_near_as_alone(
        cell, model, reference, *rows, batch.targets[0].shape[1], computed_alone,
        lambda logits: torch.nn.functional.cross_entropy(logits.float(), labels), prove=False,
    )  # fmt: skip


@point
def refusals(cell: Cell) -> None:
    """Pairs that do not fit raise fa2patch's own error and change nothing."""
    batch, model = drawn(cell), cell.model()
    packed = batch.packed()
    fewer = drawn(cell, (6, 2), (12, 8)).packed()["decoder_position_ids"]
    wrong = {"fewer targets than sources": {**packed, "decoder_position_ids": fewer}}
    if batch.of_tokens:
        wrong |= {
            "sources that are not packed": {**packed, "position_ids": None},
            "targets that are not packed": {**packed, "decoder_position_ids": None},
            "ids that are no integers": {**packed, "position_ids": packed["position_ids"].float()},
        }
    with fa2patch.apply(model, prove=False):
        expected = model(**packed).logits
        for what, given in wrong.items():
            try:
                model(**given)
            except errors.Fa2PatchError:
                continue
            raise AssertionError(f"{what}: expected an error")
        if not torch.equal(model(**packed).logits, expected):
            raise AssertionError("an error changed what came after it")


@point
def padded_batches(cell: Cell) -> None:
    """A padded batch that is computed packed has the logits and the loss of pairs alone."""
    batch, model = drawn(cell), cell.model()
    expected = alone(cell.reference(), batch)
    padded = batch.padded(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.StaysPadded)
        try:
            with fa2patch.apply(model, prove=False, padded_batches=True):
                found = model(**padded)
        except (errors.UnsupportedModel, errors.StaysPadded) as why:
            raise NotApplicable(str(why)) from None
    assert_close(found.logits[padded["labels"] != -100], logits_of(expected), "logits of a padded batch")
    assert_close(found.loss.detach(), mean_loss(expected, batch).detach(), "loss of a padded batch")
