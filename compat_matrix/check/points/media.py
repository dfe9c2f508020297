"""The points of models with pictures or sound in their rows. They have the names of what they are for rows of text.

A packed row is what ``DataCollatorForMultimodalFlattening`` makes of documents. Documents alone are computed unpatched,
from the same keys.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

import fa2patch
from fa2patch.documents.names import MEDIA

from ... import tiny_media
from ..cell import Cell, NotApplicable, assert_unmoved
from ..compare import GRADIENT_TOLERANCE, assert_close, assert_same_gradients
from ..rows import gradients, output_or_error, without_lengths
from .training import as_near_as_alone, checkpoint

POINTS: dict[str, Callable[[Cell], None]] = {}

Row = dict[str, Any]


def point(function: Callable[[Cell], None]) -> Callable[[Cell], None]:
    POINTS[function.__name__] = function
    return function


def document(cell: Cell, *parts: int | str, **how: int) -> tiny_media.Document:
    return _cast(tiny_media.document(cell.family, *parts, **how), cell.dtype)


def documents(cell: Cell) -> list[tiny_media.Document]:
    # One has a picture or sound, one has none, and one has two if the family may have two.
    another = ("it", 1) if tiny_media.holds_several(cell.family) else ()
    return [
        document(cell, 3, "it", 2, seed=1),
        text(cell, 5, seed=2),
        document(cell, 2, *another, "it", 4, seed=3, first=1),
    ]


def text(cell: Cell, words: int, seed: int) -> tiny_media.Document:
    # Llava of 4.46 and 4.47 fails unpatched on a document without a picture.
    plain = document(cell, words, seed=seed)
    try:
        alone(cell.reference(), plain)
    except AttributeError:
        return document(cell, words, "it", seed=seed)
    return plain


def packed(model: Any, docs: list[tiny_media.Document], **options: Any) -> tuple[Row, torch.Tensor]:
    # The row keeps its labels only if documents have them (PaliGemma).
    on_host = [{name: value.cpu() for name, value in doc.items()} for doc in docs]
    made = fa2patch.DataCollatorForMultimodalFlattening(model, **options)(on_host)
    row = {name: value.to(model.device) if isinstance(value, torch.Tensor) else value for name, value in made.items()}
    labels = row["labels"]
    if "labels" not in docs[0]:
        del row["labels"]
    return row, labels


def alone(model: Any, doc: tiny_media.Document, **call: Any) -> torch.Tensor:
    # The unpatched model gives [tokens, vocabulary].
    grids = {name: doc[name] for name in doc if name.endswith("_grid_thw")}
    if grids and hasattr(model, "get_rope_index"):  # up to 4.48 only generate() calls it
        ids = model.get_rope_index(doc["input_ids"], attention_mask=doc["attention_mask"], **grids)[0]
        call = {"position_ids": ids, **call}
    found: torch.Tensor = model(**doc, use_cache=False, **call).logits[0]
    return found


def failure_alone(cell: Cell, checkpointed: bool = False) -> str:
    # Some towers have no flash attention that works in a version, or in float32, or on a CPU.
    model = cell.model()
    try:
        if checkpointed:
            checkpoint(model, reentrant=False)
        alone(model, document(cell, 3, "it", 2, seed=1)).sum().backward()
    except Exception as error:
        kind = str(cell.dtype).partition(".")[2]
        return f"the unpatched model fails on one document in {kind}: {type(error).__name__}: {error}"[:200]
    return ""


def _ignores_labels(model: Any, doc: tiny_media.Document) -> bool:
    # 4.40's Idefics 2 ignores its placeholder instead of -100.
    try:
        model(**{**doc, "labels": torch.full_like(doc["input_ids"], -100)}, use_cache=False)
    except IndexError:
        return False
    return True


def of_each(row: Row, values: torch.Tensor) -> list[torch.Tensor]:
    return list(values.split(row["cu_seq_lens_q"].diff().tolist()))


def loss_of(row: Row, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    # logits: [tokens, vocabulary] of a row
    pieces = zip(of_each(row, logits), of_each(row, labels[0]))
    return sum(torch.nn.functional.cross_entropy(piece[:-1].float(), own[1:], reduction="sum") for piece, own in pieces)


@point
def packed_row(cell: Cell) -> None:
    """Logits, loss and the gradients of all weights, the encoder's too, equal those of documents alone."""
    docs, reference, model = documents(cell), cell.reference(), cell.model()
    row, labels = packed(model, docs)
    learned = (labels != -100).sum()
    expected = torch.cat([alone(reference, doc) for doc in docs])
    total = loss_of(row, expected, labels) / learned
    total.backward()
    with fa2patch.apply(model):
        found = model(**row, use_cache=False).logits[0]
        assert_close(found, expected, "logits")
        assert_close(model(**without_lengths(row)).logits[0], expected, "logits, position_ids alone")
        if _ignores_labels(reference, docs[1]):
            loss = model(**{**row, "labels": labels}, use_cache=False).loss
            assert_close(loss.detach(), total.detach(), "loss")
        else:
            loss = loss_of(row, found, labels) / learned
        loss.backward()
    assert_same_gradients(gradients(model), gradients(reference), GRADIENT_TOLERANCE, 0.01)


@point
def packed_rows(cell: Cell) -> None:
    """Logits of two packed rows with other boundaries equal those of documents alone."""
    reference, model = cell.reference(), cell.model()
    first, second = (
        [document(cell, 3, "it", 2, seed=1), text(cell, 5, seed=2)],
        [text(cell, 5, seed=3), document(cell, 1, "it", 4, seed=4)],
    )
    rows = [without_lengths(packed(model, docs)[0]) for docs in (first, second)]
    batch = {
        name: torch.cat([row[name] for row in rows], dim=value.dim() - 2 if name == "position_ids" else 0)
        for name, value in rows[0].items()
    }
    expected = torch.stack([torch.cat([alone(reference, doc) for doc in docs]) for docs in (first, second)])
    with fa2patch.apply(model):
        assert_close(model(**batch, use_cache=False).logits, expected, "logits of two rows")


@point
def padding(cell: Cell) -> None:
    """Real tokens are right in a row that is padded to a multiple."""
    docs, reference, model = documents(cell), cell.reference(), cell.model()
    row, _ = packed(model, docs, pad_to_multiple_of=32, pad_token_id=7)
    expected = torch.cat([alone(reference, doc) for doc in docs])
    with fa2patch.apply(model):
        assert_close(model(**row, use_cache=False).logits[0, : len(expected)], expected, "padded to a multiple")


@point
def nothing_crosses(cell: Cell) -> None:
    """Other tokens, pictures or sound in one document move no other, and gradients to them are exactly zero."""
    docs, model = documents(cell), cell.model()
    row, _ = packed(model, docs)
    held = [name for name in row if name in MEDIA and row[name].is_floating_point() and "mask" not in name]
    ids = row["input_ids"].clone()
    ids[0, :2] = torch.tensor([11, 12])
    others = [{"input_ids": ids}]
    for name in held:
        changed = row[name].clone()
        of_first(row, docs, name, changed).add_(1.0)
        others.append({name: changed})
    with fa2patch.apply(model):
        before = model(**row, use_cache=False).logits[0].detach()
        start = len(of_each(row, before)[0])
        for other in others:
            after = model(**{**row, **other}, use_cache=False).logits[0].detach()
            if torch.equal(after[:start], before[:start]):
                raise AssertionError(f"other {', '.join(other)} in the first document do not move it")
            assert_unmoved(cell, after[start:], before[start:])
        leaves = {name: row[name].clone().requires_grad_() for name in held}
        logits = model(**{**row, **leaves}, use_cache=False).logits[0]
        found = torch.autograd.grad(logits[start:].square().sum(), list(leaves.values()))
    for name, gradient in zip(held, found):
        if of_first(row, docs, name, gradient).any() or not gradient.any():
            raise AssertionError(f"gradients of later documents to {name} of the first, or none at all")


def of_first(row: Row, docs: list[tiny_media.Document], name: str, values: torch.Tensor) -> torch.Tensor:
    # What was filled in is left out.
    own = docs[0][name]
    part = values
    for dim, size in enumerate(own.shape):
        part = part.narrow(dim, 0, size)
    return part


@point
def checkpointing(cell: Cell) -> None:
    """Gradients with checkpointing equal those of documents alone."""
    docs, reference, model = documents(cell), cell.reference(), cell.model()
    if not model.supports_gradient_checkpointing:
        raise NotApplicable("this version of the architecture has no gradient checkpointing")
    failure = failure_alone(cell, checkpointed=True)
    if failure:
        raise NotApplicable(failure)
    checkpoint(model, reentrant=False)
    row, labels = packed(model, docs)
    reference.train()
    torch.manual_seed(0)
    loss_of(row, torch.cat([alone(reference, doc) for doc in docs]), labels).backward()
    with fa2patch.apply(model):
        loss_of(row, model(**row, use_cache=False).logits[0], labels).backward()
    assert_same_gradients(gradients(model), gradients(reference), GRADIENT_TOLERANCE, 0.01)


@point
def half_precision(cell: Cell) -> None:
    """A packed row in a bfloat16 model is about as close to float32 as documents alone, and is isolated."""
    _as_near_as_alone(cell, cell.model(torch.bfloat16), cell.reference(torch.bfloat16), documents(cell))


@point
def autocast(cell: Cell) -> None:
    """The same holds for a float32 model under autocast to bfloat16."""
    docs = documents(cell)
    with torch.autocast("cpu", torch.bfloat16):
        _as_near_as_alone(cell, cell.model(), cell.reference(), docs)


def _as_near_as_alone(cell: Cell, model: Any, reference: Any, docs: list[tiny_media.Document]) -> None:
    def computed_alone(model: Any) -> torch.Tensor:
        return torch.cat([alone(model, _cast(doc, model.dtype)) for doc in docs])

    row, labels = packed(model, [_cast(doc, model.dtype) for doc in docs])
    row["use_cache"] = False
    ids = row["input_ids"].clone()
    ids[0, :2] = torch.tensor([11, 12])
    changed, first = {**row, "input_ids": ids}, int(row["cu_seq_lens_q"][1])
    as_near_as_alone(cell, model, reference, row, changed, first, computed_alone, lambda x: loss_of(row, x, labels))


def _cast(doc: tiny_media.Document, dtype: torch.dtype) -> tiny_media.Document:
    # A processor's output is cast so by .to(dtype).
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in doc.items()}


@point
def inertness(cell: Cell) -> None:
    """A document alone gives bit for bit the same logits when the model is patched, and so do two in a batch."""
    doc = document(cell, 3, "it", 2, seed=1)
    two = {name: torch.cat([value, value]) for name, value in doc.items()}
    for what, given in {"a document": doc, "two documents": two}.items():
        before = output_or_error(cell.model(), **given, use_cache=False)
        model = cell.model()  # 4.48's Qwen2-VL keeps what it counted in its first forward
        with fa2patch.apply(model):
            after = output_or_error(model, **given, use_cache=False)
        # 4.54's flash attention fails for two, unpatched. Then the patched model fails with the same error.
        if isinstance(before, str) or isinstance(after, str):
            if before != after or what == "a document":
                raise AssertionError(f"{what}: {before if isinstance(before, str) else 'logits'}, patched: {after}")
        elif not torch.equal(after.logits, before.logits):
            raise AssertionError(f"{what}: other logits")


@point
def refusals(cell: Cell) -> None:
    """An example that was truncated inside a picture or sound, or lost it, is an error."""
    docs, model = documents(cell), cell.model()
    tokens = docs[0]["input_ids"].shape[1]
    cut = {name: value if name in MEDIA else value[:, : tokens - 3] for name, value in docs[0].items()}
    lost = {name: value for name, value in docs[0].items() if name not in MEDIA}
    plain = document(cell, 5)
    without = {**plain, **{name: docs[0][name] for name in docs[0] if name in MEDIA}}
    for what, wrong in {"cut": cut, "lost": lost, "without placeholders": without}.items():
        if what == "cut" and _all_or_nothing(docs[0]):
            continue
        try:
            packed(model, [docs[2], wrong])
        except fa2patch.errors.CollatorError as error:
            if "example 1" not in error.message:
                raise AssertionError(f"{what}: the error names no example: {error.message}") from error
            continue
        raise AssertionError(f"{what}: expected CollatorError")


def _all_or_nothing(doc: tiny_media.Document) -> bool:
    # The placeholders of one picture are one token, or nothing in the example says how many there are.
    return "image_pixel_values" in doc or int((doc["input_ids"] >= tiny_media.PICTURE).sum()) < 2
