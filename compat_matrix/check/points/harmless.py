"""Points about what fa2patch leaves unchanged, what it costs and what it refuses."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import torch

import fa2patch
from fa2patch import errors
from fa2patch.upstream.find_models import models

from ... import tiny_models
from .. import reads
from ..cell import AloneFails, Cell, NotApplicable, point, unless_alone_raises
from ..compare import assert_close
from ..rows import alone, documents, output_or_error, pack, takes_cache
from .training import checkpointed_alone


@point
def generation(cell: Cell) -> None:
    """A patched model generates the same tokens for a left-padded batch."""
    if tiny_models.is_encoder(cell.family):
        raise NotApplicable("an encoder has no generate()")
    model = cell.model(_exact(cell))
    ids = torch.stack(documents(6, 6))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    ways: list[dict[str, Any]] = [{"do_sample": False}]
    if cell.family in tiny_models.SEEDS:  # the others depend on generate(), not on the architecture
        beams, uncached = {"do_sample": False, "num_beams": 3}, {"do_sample": False, "use_cache": False}
        ways += [{"do_sample": True, "top_k": 5}, beams, uncached]
    try:
        before = [_generate(model, ids, mask, way) for way in ways]
    except Exception as error:  # 5.4's OlmoConfig does not pass its own validation
        raise AloneFails(f"the unpatched model fails to generate: {type(error).__name__}") from error
    static = {"do_sample": False, "cache_implementation": "static"}
    with contextlib.suppress(Exception):  # this version or family has no static cache
        # by a model of its own, and tried last: 4.38 leaves its static cache in the layers
        before.append(_generate(cell.model(_exact(cell)), ids, mask, static))
        ways.append(static)
    with fa2patch.apply(model):
        for way, expected in zip(ways, before):
            if not torch.equal(_generate(model, ids, mask, way), expected):
                raise AssertionError(f"generate({way}) gave other tokens")


def _generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, way: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    return model.generate(ids, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, pad_token_id=0, **way)


def _exact(cell: Cell) -> torch.dtype:
    # 4.34's flash classes cast float32 to float16 before float32 weights.
    return torch.bfloat16 if cell.implementation == "flash_attention_2" else torch.float32


@point
def inertness(cell: Cell) -> None:
    """Dense, left-padded and right-padded batches give bit for bit the same logits, eager attention weights too."""
    model = cell.model(_exact(cell))
    ids = torch.stack(documents(7, 7))
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :3], right[1, -2:] = 0, 0
    counted = (left.cumsum(-1) - 1).masked_fill(left == 0, 1)
    batches: list[dict[str, Any]] = [
        {},
        {"attention_mask": torch.ones_like(ids)},
        {"attention_mask": left},
        {"attention_mask": left, "position_ids": counted},
        {"attention_mask": right},
        {"position_ids": torch.arange(7)[None].expand(2, -1)},
        {"output_hidden_states": True},
    ]
    if cell.implementation == "eager":
        batches.append({"output_attentions": True})
    before = [output_or_error(model, input_ids=ids, **batch) for batch in batches]
    with fa2patch.apply(model):
        for batch, expected in zip(batches, before):
            found = output_or_error(model, input_ids=ids, **batch)
            if isinstance(expected, str) and "argument 'position_ids'" in expected:
                continue  # only a patched model takes them: DistilBERT up to 4.57, OPT up to 4.45
            if isinstance(found, str) or isinstance(expected, str):
                if found != expected:  # the flash Mistral of some versions refuses padding on the right
                    raise AssertionError(f"a batch with {sorted(batch)} gave {found}, before {expected}")
                continue
            if not torch.equal(found.logits, expected.logits):
                raise AssertionError(f"a batch with {sorted(batch)} gave other logits")
            weights = (getattr(output, "attentions", None) or () for output in (found, expected))
            if batch.get("output_attentions") and not all(map(torch.equal, *weights)):
                raise AssertionError("other attention weights")


@point
def reverted(cell: Cell) -> None:
    """``apply`` and ``revert`` leave every namespace as it was."""
    # They are tried alone, with two models, and in every order with somebody else's patch of the same attribute.
    model, other = cell.model(), cell.model()
    names = [model.__class__.__module__, models(model)[-1].__class__.__module__]
    spaces = [sys.modules[name] for name in names]
    spaces += [value for space in list(spaces) for value in vars(space).values() if isinstance(value, type)]
    spaces += [model, models(model)[-1], *model.modules()]
    before = [dict(vars(space)) for space in spaces]

    def check(when: str) -> None:
        for space, known in zip(spaces, before):
            now = vars(space)
            changed = [name for name in {*now, *known} if now.get(name, known) is not known.get(name, now)]
            if changed:
                raise AssertionError(f"{when}: {space!r:.60} differs in {changed}")

    fa2patch.apply(model).revert()
    check("apply, revert")
    first, second = fa2patch.apply(model), fa2patch.apply(other)
    first.revert()
    docs = documents(5, 9)
    assert_close(other(**pack(docs)).logits[0], alone(cell.reference(), docs), "the other model")
    second.revert()
    check("two models")
    if {layer.seam for layer in first.layers} == {"interface"} and cell.family not in tiny_models.SEEDS:
        return  # the rest depends on bindings, not on the architecture
    owners = [(site.owner, site.attribute) for site in fa2patch.apply(model).plan.sites]
    fa2patch.revert(model)
    for order in ("ours first, theirs off first", "ours first, ours off first", "theirs first"):
        for owner, attribute in owners:
            if not callable(vars(owner).get(attribute)):
                continue
            ours = fa2patch.apply(model) if order != "theirs first" else None
            saved = vars(owner)[attribute]
            setattr(owner, attribute, _passes_on(saved))
            if order == "theirs first":
                try:
                    fa2patch.apply(model).revert()
                except (errors.LayerNotPatchable, errors.UnsupportedModel):
                    # the code of such layers and embeddings must be seen, and theirs hides it
                    by_code = {layer.seam for layer in first.layers} & {"formula", "document"}
                    if not by_code and not first.facts.row_positions:
                        raise
                finally:
                    setattr(owner, attribute, saved)
            elif order == "ours first, theirs off first":
                setattr(owner, attribute, saved)
                ours.revert()
            else:
                ours.revert()
                setattr(owner, attribute, saved)
            check(f"{order}: {attribute}")


def _passes_on(saved: Any) -> Any:
    return lambda *args, **kwargs: saved(*args, **kwargs)


@point
def host_reads(cell: Cell) -> None:
    """The host reads of fa2patch's code do not grow with the layers, and there are none with the collator's lengths."""
    # A forward and a recomputing backward are counted. Where a mixer, embeddings or the whole model compute documents
    # apart, the lengths themselves are read once. The checks of the collator's lengths are not counted, since they are
    # assertions on the device elsewhere. Neither is the first packed batch: mixers are tried on it.
    docs = documents(5, 9, 1)
    counts, where = {}, {}
    for depth in (2, 3):
        try:
            model = cell.model(**tiny_models.with_layers(cell.family, depth))
        except Exception as error:
            raise NotApplicable(f"no config with {depth} layers: {type(error).__name__}: {error}"[:160]) from error
        if not model.supports_gradient_checkpointing:
            raise NotApplicable("this version of the architecture has no gradient checkpointing")
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        model.train()
        collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        lengths = dict(collate([{"input_ids": doc.tolist()} for doc in docs]))
        del lengths["labels"]
        unpatched = functools.partial(checkpointed_alone, cell, True, docs)
        # the proof on the first batch would run it more than once
        with fa2patch.apply(model, prove=False) as patch, unless_alone_raises(unpatched):
            apart = not {"mixer", "document"}.isdisjoint(layer.seam for layer in patch.layers)
            apart |= "scaled embeddings" in patch.found  # ESM's embeddings look at one document at a time
            model(**pack(docs))
            for what, batch in {"position_ids": pack(docs), "lengths": lengths}.items():
                with reads.counted(packages=("fa2patch",)) as count:
                    model(**batch).logits.sum().backward()
                counts[what, depth] = {"reads": count.reads, "kernel": count.kernel, "derived": count.derived}
                where[what] = count.where
    if any(counts[what, 2] != counts[what, 3] for what in ("position_ids", "lengths")):
        raise AssertionError(f"reads grow with the layers: {counts}")
    if counts["lengths", 2]["reads"] > apart or counts["lengths", 2]["derived"]:
        raise AssertionError(f"reads with the collator's lengths: {counts}, {dict(where['lengths'])}")
    if counts["position_ids", 2] != {"reads": 1, "kernel": 0, "derived": 1}:
        raise AssertionError(f"position_ids are read once: {counts}")


@point
def no_dense_mask(cell: Cell) -> None:
    """No tensor of the row's length squared is made for a packed batch."""
    docs = documents(31, 33, 23)  # longer than 64, because gated delta nets make squares of a chunk of 64
    model = cell.model()
    with fa2patch.apply(model), reads.Squares(87) as seen:
        model(**pack(docs))
    if seen.found:
        raise AssertionError(f"made for a row of 87 tokens: {seen.found[:3]}")


@point
def refusals(cell: Cell) -> None:
    """Bad input raises fa2patch's own error and changes nothing."""
    model = cell.model()
    docs = documents(5, 9)
    batch, length = pack(docs), 14
    cu = torch.tensor([0, 5, 13], dtype=torch.int32)
    right = torch.tensor([0, 5, 14], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": right, "cu_seq_lens_k": right, "max_length_q": 9, "max_length_k": 9}
    caching = {"use_cache": True} if takes_cache(model) else {}
    filled = getattr(cell.reference()(documents(3)[0][None], **caching), "past_key_values", None)
    wrong: dict[str, dict[str, Any]] = {
        "PackedWithDenseMask": {**batch, **lengths, "attention_mask": torch.zeros(1, 1, length, length)},
        "PackedWithCache": {**batch, "past_key_values": filled},
        "BadPositionIds": {**batch, "position_ids": batch["position_ids"].float()},
        "BadPositionIds for too few ids": {**batch, "position_ids": batch["position_ids"][:, :-1]},
        "BadCuSeqlens": {**batch, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 8, "max_length_k": 8},
        "BoundaryConflict": {**batch, "attention_mask": torch.tensor([[1] * 7 + [2] * 7])},
    }
    if filled is None:
        del wrong["PackedWithCache"]
    with fa2patch.apply(model):
        expected = model(**batch).logits
        for error, given in wrong.items():
            try:
                model(**given)
            except getattr(errors, error.split()[0]):
                continue
            raise AssertionError(f"expected {error}")
        if not torch.equal(model(**batch).logits, expected):
            raise AssertionError("an error changed what came after it")
