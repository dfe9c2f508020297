"""Points about isolation: packed equals alone in every layout, and nothing reaches another document."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import fa2patch
from fa2patch.upstream import find_models
from fa2patch.upstream.find_layers import ModelLayers
from fa2patch.upstream.positions import first_position

from ... import tiny_models
from ...user_models import models
from ..cell import Cell, NotApplicable, point, unless_alone_raises
from ..compare import assert_close, assert_same_gradients
from ..rows import alone, documents, gradients, loss_of, pack, takes_cache, takes_positions

LENGTHS = (5, 9, 1, 3, 7)
# Configs have the length of the longest document under these names.
LIMITS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
LIMIT = 128  # a row of so many tokens counts as long for a model without a limit
BELOW_MEDIA = 90  # the largest token id that stands for no picture in any tiny model
WIDTH = 10  # tokens of a padded row


@point
def packed_row(cell: Cell) -> None:
    """Logits and parameter gradients of one packed row equal those of documents alone, with the default cache."""
    docs = documents(*LENGTHS)
    reference, model = cell.reference(), cell.model()
    expected = alone(reference, docs)
    loss_of(expected, docs).backward()
    with fa2patch.apply(model):
        found = model(**pack(docs)).logits[0]
        assert_close(found, expected, "logits")
        loss_of(found, docs).backward()
        assert_same_gradients(gradients(model), gradients(reference), **cell.of_gradients)
        if not takes_cache(model):
            return
        expected = alone(reference, docs, use_cache=False)
        assert_close(model(**pack(docs), use_cache=False).logits[0], expected, "logits without cache")


@point
def packed_rows(cell: Cell) -> None:
    """Logits of two packed rows with different boundaries equal those of documents alone."""
    rows = [documents(5, 9, 2), documents(1, 7, 8, seed=1)]
    reference, model = cell.reference(), cell.model()
    batch = {name: torch.cat([pack(docs)[name] for docs in rows]) for name in pack(rows[0])}
    expected = torch.stack([alone(reference, docs) for docs in rows])
    with fa2patch.apply(model):
        assert_close(model(**batch).logits, expected, "logits of two rows")


@point
def every_layout(cell: Cell) -> None:
    """Rows that upstream's rules get wrong: offsets, restarts above zero, documents of length 1 anywhere."""
    # A model that takes no position_ids without a patch is also given one document with them.
    reference, model = cell.reference(), cell.model()
    counts, first = takes_positions(reference), first_position(ModelLayers(model).text_modules)
    with fa2patch.apply(model):
        for positions in [
            [[7, 8, 9], [0, 1, 2]], [[0, 1, 2], [1, 2, 3]], [[0, 1, 2], [5, 6, 7]], [[0], [0, 1, 2]],
            [[0], [0], [0]], [[2, 3, 4], [2, 3]], [[0, 1, 2], [0]], [[0, 1, 2], [0], [0, 1]],
            *([] if counts else [[[0, 1, 2]], [[0]]]),
        ]:  # fmt: skip
            if not counts and any(ids[0] for ids in positions):
                continue  # OPT up to 4.45 cannot be told where a document's positions start
            if any(0 < ids[0] < first for ids in positions):
                continue  # RoBERTa and its kin give padding this number
            docs = documents(*map(len, positions))
            ids = torch.tensor([sum(positions, [])])
            given = [{"position_ids": torch.tensor([own])} if counts else {} for own in positions]
            try:
                expected = [reference(input_ids=doc[None], **own).logits[0] for doc, own in zip(docs, given)]
            except IndexError:  # 4.46 on: PhiMoE's table of rotary embeddings ends at the row's length
                continue
            found = model(input_ids=torch.cat(docs)[None], position_ids=ids).logits[0]
            assert_close(found, torch.cat(expected), f"logits of {ids.tolist()}", 3e-5)


@point
def padding(cell: Cell) -> None:
    """Real tokens are right with every kind of ``attention_mask``."""
    docs = documents(5, 9, 3)
    reference, model = cell.reference(), cell.model()
    expected, batch, real = alone(reference, docs), pack(docs), sum(map(len, docs))
    padded = {name: torch.nn.functional.pad(ids, (0, 6)) for name, ids in batch.items()}
    mask = torch.tensor([[1] * real + [0] * 6])
    counted = {**padded, "position_ids": torch.cat([batch["position_ids"], torch.arange(6)[None]], 1)}
    with fa2patch.apply(model):
        assert_close(
            model(**batch, attention_mask=torch.ones(1, real, dtype=torch.long)).logits[0], expected, "all ones"
        )
        for name, given in {"mask": {**padded, "attention_mask": mask}, "document": counted}.items():
            assert_close(model(**given).logits[0, :real], expected, f"padding as {name}")
        numbered = torch.tensor([sum(([number + 1] * len(doc) for number, doc in enumerate(docs)), [])])
        assert_close(model(**batch, attention_mask=numbered).logits[0], expected, "mask of document numbers")
        other = documents(4, 13, seed=1)
        two = {name: torch.cat([padded[name], torch.nn.functional.pad(pack(other)[name], (0, 6))]) for name in padded}
        logits = model(**two, attention_mask=mask.expand(2, -1)).logits
        assert_close(logits[0, :real], expected, "padded row 1 of 2")
        assert_close(logits[1, :real], alone(reference, other), "padded row 2 of 2")


@point
def lengths(cell: Cell) -> None:
    """Logits equal those of documents alone with the collator's lengths, with ``seq_idx`` alone, and without ids."""
    docs = documents(*LENGTHS)
    expected, model = alone(cell.reference(), docs, counts_itself=True), cell.model()
    first = tiny_models.first_position(model)
    collate = fa2patch.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True, position_ids_start=first
    )
    batch = dict(collate([{"input_ids": doc.tolist()} for doc in docs]))
    labels = batch.pop("labels")
    with fa2patch.apply(model):
        assert_close(model(**batch).logits[0], expected, "lengths and position_ids")
        loss = model(**batch, labels=labels).loss
        if tiny_models.is_encoder(cell.family):  # an encoder's label is not shifted
            per_token = torch.nn.functional.cross_entropy(expected.float(), labels[0])
        else:
            per_token = loss_of(expected, docs) / (labels[:, 1:] != -100).sum()
        assert_close(loss, per_token, "loss")
        del batch["position_ids"]
        assert_close(model(**batch).logits[0], expected, "lengths alone")
        only = {"input_ids": batch["input_ids"], "seq_idx": batch["seq_idx"]}
        assert_close(model(**only).logits[0], expected, "seq_idx alone")


@point
def long_row(cell: Cell) -> None:
    """Logits of a row that is longer than any document may be equal those of documents alone."""
    config = tiny_models.config_of(cell.family)
    limits = [getattr(part, name, None) for part in (config, getattr(config, "text_config", None)) for name in LIMITS]
    longest = max((limit for limit in limits if isinstance(limit, int)), default=LIMIT)
    # The first document is longer than 64 tokens, because gated delta nets compute so many at a time.
    docs = [doc.clamp(max=BELOW_MEDIA) for doc in documents(longest * 5 // 8, longest // 3, longest // 6)]
    reference, model = cell.reference(), cell.model()
    with unless_alone_raises(lambda: alone(reference, docs)):
        expected = alone(reference, docs)
    with fa2patch.apply(model):
        assert_close(model(**pack(docs)).logits[0], expected, "logits of a long row")


@point
def nothing_crosses(cell: Cell) -> None:
    """``verify`` passes: other documents' tokens do not change outputs, and gradients to them are exactly zero."""
    model = cell.model()
    with fa2patch.apply(model):
        fa2patch.verify(model, batch=pack(documents(*cell.lengths(*LENGTHS))))


@point
def rope_scaling(cell: Cell) -> None:
    """Rope scaling by length uses the document's length, not the row's, or the batch is refused."""
    # Only dynamic scaling may refuse a batch, and only one with a document beyond the limit.
    limit = 10
    short, long = documents(9, 7, 10, 8), documents(9, 14, 4)
    checked = {}
    for kind in ("dynamic", "longrope"):
        for changes in _scalings(cell.family, kind, limit):
            try:
                reference, model = cell.reference(**changes), cell.model(**changes)
                expected = alone(reference, short)
            except Exception as error:  # this version spells it otherwise, or the family does not have it
                checked[kind] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            checked[kind] = "ok"
            with fa2patch.apply(model):
                within = f"{kind}, documents within the limit"
                assert_close(model(**pack(short)).logits[0], expected, within)
                try:
                    expected = alone(cell.reference(**changes), [long[1]])
                except Exception:  # Jina v3 of some releases reads a table as long as the limit
                    break
                try:
                    found = model(**pack(long)).logits[0, 9:23]
                except fa2patch.errors.PackingNotIsolated:
                    if kind == "longrope":
                        raise
                else:
                    assert_close(found, expected, f"{kind}, a document beyond the limit")
            break
    if "ok" not in checked.values():
        raise NotApplicable(f"this version of the family takes no such rope scaling {checked}")


def _scalings(family: str, kind: str, limit: int) -> list[dict[str, Any]]:
    if kind == "longrope" and models.kind(family) != "phi3":
        return []
    pairs = tiny_models.text_config_of(family)
    names = [name for name in ("rope_parameters", "rope_scaling") if name in tiny_models.parameters(type(pairs))]
    if not names:
        return []
    try:
        head_dim = getattr(pairs, "head_dim", None) or pairs.hidden_size // pairs.num_attention_heads
    except Exception:  # Gemma 4's head_dim differs from layer to layer
        return []
    half = int(head_dim * getattr(pairs, "partial_rotary_factor", 1.0)) // 2
    if kind == "dynamic":
        common: dict[str, Any] = {"factor": 4.0}
        changes: dict[str, Any] = {"max_position_embeddings": limit}
    else:
        common = {"short_factor": [1.0 + 0.1 * i for i in range(half)], "long_factor": [3.0 + i for i in range(half)]}
        changes = {"max_position_embeddings": 4 * limit, "original_max_position_embeddings": limit}
    if "head_dim" in vars(pairs):
        changes["head_dim"] = head_dim  # dynamic scaling multiplies by it even if it is None
    theta = {"rope_theta": 10000.0}
    spelled = [{"rope_type": kind, **theta, **common}, {"type": kind, **common}]
    if kind == "longrope":
        spelled += [{"type": "su", **common}]
    return [{**changes, name: scaling} for name in names for scaling in spelled]


@point
def padded_batches(cell: Cell) -> None:
    """Padded batches that are computed packed have the logits of documents alone, padded right and left."""
    docs = documents(5, 9, 3)
    reference, model = cell.reference(), cell.model()
    with unless_alone_raises(lambda: alone(reference, docs, use_cache=False)):
        expected = alone(reference, docs, use_cache=False)
    batches = {side: padded(docs, side, model) for side in ("right", "left")}
    with fa2patch.apply(model, padded_batches=True) as patch, warnings.catch_warnings():
        warnings.simplefilter("error", fa2patch.errors.StaysPadded)
        for side, batch in batches.items():
            mask = batch["attention_mask"]
            arrived = _arrives(mask, find_models.models(model)[-1])
            try:
                found = model(**batch).logits
            except fa2patch.errors.StaysPadded as why:
                raise NotApplicable(str(why)) from None
            if not any(arrived):
                raise NotApplicable("no mask reaches its base model, so its padded batches look like any others")
            assert_close(found[mask.bool()], expected, f"logits of rows padded {side}")
        if patch.unpacked is not None:
            raise AssertionError("the batches stayed padded without a warning")


def padded(docs: list[torch.Tensor], side: str, model: Any) -> dict[str, Any]:
    # The batch is [documents, WIDTH] and has only arguments that an unpatched model takes.
    rows = []
    for doc in docs:
        missing = WIDTH - len(doc)
        around = (0, missing) if side == "right" else (missing, 0)
        values = doc, torch.ones_like(doc), torch.arange(len(doc))
        rows.append([torch.nn.functional.pad(value, around) for value in values])
    ids, mask, positions = map(torch.stack, zip(*rows))
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if takes_positions(model):
        batch["position_ids"] = positions
    if takes_cache(model):
        batch["use_cache"] = False
    return batch


def _arrives(mask: torch.Tensor, base: Any) -> list[bool]:
    # Each call of the base model adds whether its arguments hold the mask.
    found: list[bool] = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        found.append(any(torch.equal(value, mask) for value in tensors))

    base.register_forward_pre_hook(look, with_kwargs=True)
    return found
