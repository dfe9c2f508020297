"""Inputs that do not say what they seem to: numbers that merge, wrap or overflow, padding, streams read twice."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
import transformers
from small_models import (
    Result,
    alone,
    assert_right,
    called,
    class_of,
    config_of,
    labels_of,
    llama,
    logits_alone,
    of_family,
    patched,
    refusal,
    right_or_refused,
    small,
    told,
    with_gradients,
    without_dropout,
)
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import fa2patch
from compat_matrix.check.rows import documents, pack
from fa2patch.documents import find
from fa2patch.documents.find import find_boundaries
from fa2patch.errors import BadPositionIds, BoundaryConflict, CollatorError
from fa2patch.packing import PackedBatchSampler, PackingError, stream
from fa2patch.preference import DataCollatorForPreferenceFlattening

SHORT = documents(2, 3, 2, 1, 2, 2)
THREE = documents(5, 1, 4)


def refused(call, match, error=fa2patch.Fa2PatchError):
    with refusal(f"(?s){match}", error):
        call()


def numbers(docs, first=1):
    lengths = torch.tensor([len(doc) for doc in docs])
    return torch.repeat_interleave(torch.arange(first, first + len(docs)), lengths)[None]


def patched_or_skipped(model):
    try:
        return patched(model)
    except fa2patch.UnsupportedModel:
        pytest.skip(f"{type(model).__name__} is refused in {transformers.__version__}")


# Document numbers in a mask

# Dtypes, and the first number that another one becomes.
MERGES = [(torch.bfloat16, 256), (torch.float16, 2048), (torch.float32, 2**24)]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize(("dtype", "merged"), MERGES, ids=str)
def test_numbers_that_a_dtype_merges_are_refused_and_smaller_ones_are_right(dtype, merged, training):
    model, ids = patched().train(training), torch.cat(SHORT)[None]
    expected = Result(logits_alone(llama(), SHORT))

    def run(first):
        return lambda: Result(model(ids, attention_mask=numbers(SHORT, first).to(dtype)).logits[0].detach())

    assert right_or_refused(run(merged - 6), expected) == "right"
    assert right_or_refused(run(merged - 4), expected) == "refused: BoundaryConflict"
    assert right_or_refused(run(merged), expected) == "refused: BoundaryConflict"


def test_one_number_that_may_be_two_is_refused():
    # 300 and 301 are both 300 in bfloat16, so that the row looks like one document.
    mask = torch.tensor([[300, 300, 300, 301, 301]]).bfloat16()
    assert mask.unique().numel() == 1
    refused(lambda: patched()(torch.cat(SHORT[:2])[None], attention_mask=mask), "found one at row 0, token 0")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64])
def test_numbers_that_wrap_are_refused(dtype):
    model, docs = patched(), documents(*[2] * 270)
    mask = numbers(docs, 32767 - 260 if dtype == torch.int16 else 1).to(dtype)

    def run():
        return Result(model(torch.cat(docs)[None], attention_mask=mask).logits[0].detach())

    found = right_or_refused(run, Result(llama()(torch.stack(docs)).logits.detach().flatten(0, 1)))
    assert found == ("right" if dtype == torch.int64 else "refused: BoundaryConflict")


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[255, 255, 255, 0, 0, 0]], dtype=torch.uint8),
        torch.tensor([[1.0, 1, 1, 1, 0, 0]]),
        torch.tensor([[0.0, 0, 1, 1, 1, 1]]),
        torch.tensor([[7, 7, 7, 7, 7, 7]]),
    ],
    ids=["0 and 255", "floats", "floats, padded left", "one number"],
)
def test_padded_rows_are_computed_as_without_the_patch(mask):
    ids = torch.cat(SHORT)[None, :6]
    given, plain = {"input_ids": ids, "attention_mask": mask}, llama()
    try:
        expected = plain(**given).logits
    except RuntimeError as error:  # SDPA takes no masks of uint8
        refused_too = type(error)
        with pytest.raises(refused_too):
            patched()(**given)
        return
    assert torch.equal(patched()(**given).logits, expected)


# Position ids

# Runs of position ids: ``(first, length)`` of a document, ``(-1,)`` for a token of padding.
PADDED = {
    "between documents": [(0, 5), (-1,), (-1,), (0, 1), (-1,), (0, 4)],
    "one between documents": [(0, 5), (-1,), (0, 4)],
    "at the left": [(-1,), (-1,), (-1,), (0, 6)],
    "at both ends": [(-1,), (0, 3), (0, 2), (-1,), (-1,)],
}


def padded_row(runs, first=0):
    # Returns the tokens and ids of a row, its parts, and whether each part is a document.
    parts = documents(*(run[1] if len(run) > 1 else 1 for run in runs), seed=3)
    ids = [torch.arange(len(part)) + run[0] + first for part, run in zip(parts, runs)]
    real = [len(run) > 1 for run in runs]
    return parts, torch.cat(ids)[None], real


@pytest.mark.parametrize("says", ["ids", "ids and a mask of ones", "two rows"])
@pytest.mark.parametrize("name", PADDED)
def test_an_id_below_the_first_position_is_padding(name, says):
    # ``attention_mask.cumsum(-1) - 1`` gives such ids.
    parts, position_ids, real = padded_row(PADDED[name])
    row = torch.cat(parts)[None]
    given = {"input_ids": row, "position_ids": position_ids}
    if says == "two rows":
        given = {name: torch.cat([value, value]) for name, value in given.items()}
    elif says != "ids":
        given["attention_mask"] = torch.ones_like(row)
    found = patched()(**given).logits.detach()
    assert found.isfinite().all()
    for logits in found:
        for part, one, is_document in zip(parts, logits.split([*map(len, parts)]), real):
            if is_document:
                torch.testing.assert_close(one, llama()(part[None]).logits[0].detach(), rtol=1e-4, atol=1e-4)


def test_padding_gets_no_gradient_from_a_document_behind_it():
    parts, position_ids, real = padded_row(PADDED["one between documents"])
    model = patched()
    embeds = model.get_input_embeddings()(torch.cat(parts)[None]).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, position_ids=position_ids).logits[0]
    (gradient,) = torch.autograd.grad(logits[6:].square().sum(), embeds)
    assert (gradient[0, :6] == 0).all() and (gradient[0, 6:] != 0).any()


@pytest.mark.parametrize("pad", [0, 1, 2])
def test_padding_of_roberta_is_one_below_its_first_position(pad):
    # RoBERTa's own count gives padding the id of the padding token, and documents begin behind it. With the padding
    # token 0, documents may begin at 0, too, because a collator counts so.
    cls, config = class_of("RobertaForMaskedLM"), config_of("roberta", pad_token_id=pad)
    parts, position_ids, real = padded_row([(0, 5), (-1,), (-1,), (0, 4), (0, 2)], first=pad + 1)
    plain, model = small(cls, config), small(cls, config)
    with torch.no_grad():
        expected = [plain(part[None]).logits[0] for part in parts]
        from_zero = [plain(part[None], position_ids=torch.arange(len(part))[None]).logits[0] for part in parts]
    patched_or_skipped(model)
    row, lengths = torch.cat(parts)[None], [*map(len, parts)]
    found = model(row, position_ids=position_ids).logits[0].detach().split(lengths)
    for logits, one, is_document in zip(found, expected, real):
        if is_document and pad:
            torch.testing.assert_close(logits, one, rtol=1e-4, atol=1e-4)
    counted_by_a_collator = torch.cat([torch.arange(length) for length in lengths])[None]
    found = model(row, position_ids=counted_by_a_collator).logits[0].detach()
    torch.testing.assert_close(found, torch.cat(from_zero), rtol=1e-4, atol=1e-4)


# Ids of documents of eight and nine tokens, in each of which they jump (PoSE). Old tables hold a row's length only.
JUMPING = torch.tensor([[0, 1, 2, 9, 10, 11, 12, 13, 0, 1, 2, 3, 4, 7, 8, 15, 16]])


def padded_alone(model, docs, position_ids):
    # The batch is padded to the row's length, and the model has no patch.
    rows, ids, mask = torch.zeros(3, len(docs), position_ids.shape[1], dtype=torch.long)
    for at, (doc, own) in enumerate(zip(docs, position_ids[0].split([*map(len, docs)]))):
        rows[at, : len(doc)], ids[at, : len(doc)], mask[at, : len(doc)] = doc, own, 1
    logits = model(rows, attention_mask=mask, position_ids=ids).logits
    pieces = [cross_entropy(one[: len(doc) - 1], doc[1:], reduction="sum") for one, doc in zip(logits, docs)]
    found = with_gradients(model, sum(pieces) / sum(len(doc) - 1 for doc in docs))
    return Result(torch.cat([one[: len(doc)] for one, doc in zip(logits, docs)]).detach(), *found)


@pytest.mark.parametrize("way", ["all lengths", "seq_idx", "document numbers in the mask"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neox", "falcon", "gemma2"])
def test_ids_may_jump_inside_a_stated_document(family, way):
    docs = documents(8, 9)
    expected = padded_alone(of_family(family), docs, JUMPING)
    model = patched_or_skipped(of_family(family))
    batch = told(docs, way, labels=labels_of(docs), use_cache=False)
    assert_right(called(model, {**batch, "position_ids": JUMPING}), expected)


@pytest.mark.parametrize("way", ["all lengths", "seq_idx", "document numbers in the mask"])
def test_ids_that_restart_inside_a_stated_document_are_refused(way):
    batch = {**told(documents(8, 9), way), "position_ids": JUMPING - 9 * (JUMPING == 9)}
    refused(lambda: patched()(**batch), "restart inside what", BoundaryConflict)


@pytest.mark.parametrize("says", ["all lengths", "seq_idx", "document numbers in the mask"])
@pytest.mark.parametrize("name", ["RobertaForMaskedLM", "XLMRobertaForMaskedLM", "MPNetForMaskedLM", "EsmForMaskedLM"])
def test_a_token_with_the_number_of_padding_has_its_position(name, says):
    # A document alone gives such a token the position of padding, and the tokens behind it count on without it.
    cls, pad = class_of(name), 1
    config = cls.config_class(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=pad, position_embedding_type="absolute", emb_layer_norm_before=False,
    )  # fmt: skip
    docs = documents(6, 4, 5)
    docs[0][2] = docs[1][0] = docs[2][3] = docs[2][4] = pad
    model = small(cls, config)
    model.get_input_embeddings().weight.data[pad] = 1.0
    with torch.no_grad():
        expected = [model(doc[None], attention_mask=torch.ones_like(doc)[None]).logits[0] for doc in docs]
    patched_or_skipped(model)
    batch = told(docs, says)
    batch.pop("position_ids", None)
    torch.testing.assert_close(model(**batch).logits[0].detach(), torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ids", [[[-1, 0, 1, 2, 3]], [[-3, -2, -1, 0, 1]], [[-1, 0, 1, 2], [0, 1, 2, 3]]], ids=str)
def test_rows_of_one_document_stay_dense(ids):
    ids = torch.tensor(ids)
    given = {"input_ids": torch.cat(SHORT)[: ids.numel()].view(ids.shape), "position_ids": ids}
    assert torch.equal(patched()(**given).logits, llama()(**given).logits)


GRAMMAR = {
    (0, 1, -1, 0, 1): [2, 1, 2],
    (-1, -1, 0, 1): [1, 1, 2],
    (5, 6, -1, 0): [2, 1, 1],
    (0, -2, -1, 0, 1): [1, 4],
    (0, 1, -1, 1, 2): [2, 1, 2],
    (-1, 0, 1): [3],
}


@pytest.mark.parametrize("ids", GRAMMAR)
def test_every_way_finds_the_same_padding(ids):
    tensor, lengths = torch.tensor([ids]), GRAMMAR[ids]
    ends = [0, *itertools.accumulate(lengths)]
    assert fa2patch.boundaries(tensor).cu_seqlens.tolist() == ends
    mask = torch.ones_like(tensor)
    masked = find_boundaries(tensor.shape, tensor.device, position_ids=tensor, attention_mask=mask, always=True)
    assert masked.cu_seqlens.tolist() == ends
    if len(lengths) > 1:
        found, _ = find._on_device(tensor, 0)
        assert found[: len(ends)].tolist() == ends
    if find.in_graph is not None:
        assert find.in_graph(tensor, 0).cu_seqlens.tolist() == ends


def test_a_device_is_read_again_only_for_such_ids(monkeypatch):
    # The meta device has no values; they are put in where the host reads them.
    answers = [torch.tensor(found) for found in ([3, 5, -1, 4], [4, 5, -1, 4], [3, 5, 0, 4])]
    monkeypatch.setattr(find.tensors, "read", lambda tensor: answers.pop(0).numpy())
    ids = torch.empty(1, 12, dtype=torch.int64, device="meta")
    assert len(find.from_positions(ids, ids.device, False)) == 4
    assert len(find.from_positions(ids, ids.device, False)) == 3 and not answers


@pytest.mark.parametrize("masked", [False, True], ids=["ids", "with a mask"])
@pytest.mark.parametrize(("dtype", "longest"), [(torch.uint8, 255), (torch.int8, 127), (torch.int16, 32767)], ids=str)
def test_ids_that_wrapped_are_refused(dtype, longest, masked):
    ids = torch.arange(longest + 5).to(dtype)[None]
    mask = torch.ones(ids.shape, dtype=torch.long) if masked else None
    given = {"position_ids": ids, "attention_mask": mask}
    refused(lambda: find_boundaries(ids.shape, ids.device, **given), "Make the ids as int64", BadPositionIds)
    shorter = ids[:, : (ids == longest).nonzero()[0, 1] + 1]
    given = {"position_ids": shorter, "attention_mask": None if mask is None else mask[:, : shorter.shape[1]]}
    assert find_boundaries(shorter.shape, ids.device, **given) is None, "one document is no packed batch"


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma", "bert", "falcon"])
def test_position_ids_need_no_batch_dimension(family, training):
    plain, model = of_family(family), without_dropout(of_family(family))
    if "position_ids" not in inspect.signature(type(plain).forward).parameters:
        pytest.skip(f"{family} takes no position_ids in {transformers.__version__}")
    fa2patch.apply(model)
    row, expected = pack(THREE), logits_alone(plain, THREE)
    found = model.train(training)(row["input_ids"], position_ids=row["position_ids"][0]).logits[0].detach()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_row_of_one_document_needs_no_batch_dimension_either():
    # An epoch's last row may hold one document. The ids are those that the model makes by itself.
    for ids in (THREE[0][None], torch.stack([THREE[0], THREE[0].flip(0)])):
        assert torch.equal(patched()(ids, position_ids=torch.arange(5)).logits, llama()(ids).logits)


def test_seq_idx_needs_no_batch_dimension():
    found = patched()(torch.cat(THREE)[None], seq_idx=numbers(THREE)[0].int()).logits[0].detach()
    torch.testing.assert_close(found, logits_alone(llama(), THREE), rtol=1e-4, atol=1e-4)


def test_ids_without_a_batch_dimension_give_the_same_loss_and_gradients():
    row, model = pack(THREE), patched()
    expected = alone(llama(), THREE)
    loss = model(row["input_ids"], position_ids=row["position_ids"][0], labels=labels_of(THREE)).loss
    torch.testing.assert_close(loss.detach(), expected.loss, rtol=1e-4, atol=1e-5)


# Forms of arguments

ROW = pack(THREE)
IDS, POSITIONS, NUMBERS = ROW["input_ids"], ROW["position_ids"], numbers(THREE, 0)
CU = torch.tensor([0, 5, 6, 10], dtype=torch.int32)
BLOCKS = (NUMBERS[0, :, None] == NUMBERS[0]).tril()[None, None]


class Sub(torch.Tensor):
    pass


# Arguments beside the tokens, and the verdict.
FORMS = {
    "int32": ("right", {"position_ids": POSITIONS.int()}),
    "uint8": ("right", {"position_ids": POSITIONS.to(torch.uint8)}),
    "floats": ("BadPositionIds", {"position_ids": POSITIONS.float()}),
    "not contiguous": ("right", {"position_ids": POSITIONS.repeat(2, 1).T.contiguous().T[:1]}),
    "a subclass": ("right", {"position_ids": POSITIONS.as_subclass(Sub)}),
    "tokens of a subclass": ("right", {"input_ids": IDS.as_subclass(Sub), "position_ids": POSITIONS}),
    "on meta": ("BadPositionIds", {"position_ids": POSITIONS.to("meta")}),
    "from 1": ("right", {"position_ids": POSITIONS + 1}),
    "no tokens": ("BadPositionIds", {"input_ids": IDS[:, :0], "position_ids": POSITIONS[:, :0]}),
    "no rows": ("BadPositionIds", {"input_ids": IDS[:0], "position_ids": POSITIONS[:0]}),
    "a list of ends": ("BadCuSeqlens", {"cu_seq_lens_q": CU.tolist()}),
    "int64 ends of keys": ("right", {"cu_seq_lens_k": CU.long(), "max_length_k": 5}),
    "repeated ends": ("right", {"cu_seq_lens_q": torch.tensor([0, 0, 5, 6, 6, 10, 10]), "max_length_q": 5}),
    "tensors of lengths": ("right", {"cu_seq_lens_q": CU, "max_length_q": torch.tensor([5])}),
    "too short": ("BadCuSeqlens", {"cu_seq_lens_q": CU, "max_length_q": 4}),
    "uint8 ends": ("right", {"cu_seq_lens_q": CU.to(torch.uint8), "max_length_q": 5}),
    "ends that wrapped": ("BadCuSeqlens", {"cu_seq_lens_q": torch.tensor([0, 6, 4], dtype=torch.uint8)}),
    "coarser ends": ("BoundaryConflict", {"cu_seq_lens_q": torch.tensor([0, 6, 10]), "position_ids": POSITIONS}),
    "seq_idx": ("right", {"seq_idx": NUMBERS.int()}),
    "seq_idx of 0 and 1": ("right", {"seq_idx": NUMBERS % 2}),
    "seq_idx of half precision": ("BadCuSeqlens", {"seq_idx": NUMBERS.half()}),
    "seq_idx against ids": ("BoundaryConflict", {"seq_idx": NUMBERS * 0, "position_ids": POSITIONS}),
    "document numbers": ("right", {"attention_mask": NUMBERS + 1}),
    "document numbers, bfloat16": ("right", {"attention_mask": (NUMBERS + 1).bfloat16()}),
    "document numbers 1 and 2": ("right", {"attention_mask": NUMBERS % 2 + 1}),
    "blocks": ("right", {"attention_mask": BLOCKS, "position_ids": POSITIONS}),
    "ones": ("right", {"attention_mask": torch.ones_like(IDS), "position_ids": POSITIONS}),
    "bool ones": ("right", {"attention_mask": torch.ones_like(IDS, dtype=torch.bool), "position_ids": POSITIONS}),
    "float ones": ("right", {"attention_mask": torch.ones(IDS.shape), "position_ids": POSITIONS}),
    "weights asked for": ("PackingNotIsolated", {"position_ids": POSITIONS, "output_attentions": True}),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_arguments_is_right_or_refused(name):
    verdict, given = FORMS[name]

    def run():
        found = patched()(**{"input_ids": IDS, **given}, use_cache=False).logits[0].detach()
        return Result(found.as_subclass(torch.Tensor))

    expected = Result(logits_alone(llama(), THREE))
    try:
        found = right_or_refused(run, expected)
    except (IndexError, ValueError) as error:  # up to 4.36, ids of uint8 choose like a mask; 4-D masks have two forms
        with pytest.raises(type(error)):
            llama()(**{"input_ids": IDS, **given})
        pytest.skip(f"{transformers.__version__} without the patch fails in the same way: {error}")
    assert found == (verdict if verdict == "right" else f"refused: {verdict}")


# Collators

collate = fa2patch.DataCollatorWithFlattening()


def lengths_of(batch):
    return list(fa2patch.boundaries(batch["position_ids"]).lengths)


def example(mask, **columns):
    return {"input_ids": [*range(5, 5 + len(mask))], "attention_mask": mask, **columns}


# A mask, position ids, and the lengths of the documents; None for an error.
HIDDEN = {
    "ids count the hidden token": ([1, 1, 0, 1, 1], [0, 1, 2, 3, 4], None),
    "ids go on behind it": ([1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 2, 3], [4]),
    "ids restart behind it": ([1, 1, 0, 0, 1, 1], [0, 1, 0, 0, 0, 1], [2, 2]),
    "it belongs to the document before": ([1, 1, 0, 1, 1], [0, 1, 2, 0, 1], [2, 2]),
    "it begins the next document": ([1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 2, 3], None),
    "documents that begin anywhere": ([1, 1, 0, 1, 1], [0, 1, 0, 7, 8], None),
    "a whole document is hidden": ([1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1], [2, 2]),
    "it is at the left": ([0, 0, 1, 1, 1], [0, 0, 0, 1, 2], [3]),
    "it is at the left and counted": ([0, 0, 1, 1, 1], [0, 1, 2, 3, 4], [3]),
    "it is at the right": ([1, 1, 1, 0, 0], [0, 1, 2, 3, 4], [3]),
}


@pytest.mark.parametrize("others", [0, 1], ids=["one example", "two examples"])
@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_tokens_leave_the_documents_as_they_are(name, others):
    mask, position_ids, lengths = HIDDEN[name]
    examples = [{"input_ids": [1], "attention_mask": [1], "position_ids": [0]}] * others
    examples.append(example(mask, position_ids=position_ids))
    if lengths is None:
        refused(lambda: collate(examples), f"example {others}: position_ids are .* behind tokens", CollatorError)
        return
    batch = collate(examples)
    assert lengths_of(batch) == [1] * others + lengths
    assert batch["input_ids"][0, others:].tolist() == [5 + place for place, shown in enumerate(mask) if shown]


@pytest.mark.parametrize(
    ("mask", "seq_lengths", "lengths"),
    [
        ([1, 1, 0, 0, 1, 1, 1], [2, 5], [2, 3]),
        ([0, 1, 1, 1, 0, 1, 0], [3, 4], [2, 2]),
        ([1, 1, 0, 0, 1, 1, 0], [2, 2, 3], [2, 2]),
        ([1, 1, 1, 1, 1, 1, 1], [2, 5], [2, 5]),
    ],
)
def test_lengths_count_hidden_tokens_and_positions_do_not(mask, seq_lengths, lengths):
    # A second document that was padded left went on where the first one ended.
    batch = collate([example(mask, seq_lengths=seq_lengths)])
    assert lengths_of(batch) == lengths
    assert batch["position_ids"][0].tolist() == [place for length in lengths for place in range(length)]


def test_what_the_collator_makes_of_hidden_tokens_is_right_in_a_model():
    model, rows = patched(), [example([1, 1, 0, 0, 1, 1, 1], seq_lengths=[2, 5])]
    docs = [torch.tensor([5, 6]), torch.tensor([9, 10, 11])]
    found = model(**collate(rows)).logits[0].detach()
    torch.testing.assert_close(found, logits_alone(llama(), docs), rtol=1e-4, atol=1e-4)


FLOATS = {
    "a list": [1e300, 1.0],
    "an array": np.array([1e300, 1.0]),
    "a tensor": torch.tensor([-1e39, 1.0], dtype=torch.float64),
    "a long double": np.array([1e39, 1.0], dtype=np.longdouble),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats_that_float32_does_not_hold_are_refused(name):
    good = {"input_ids": [5, 6], "score": [1.0, 2.0]}
    with refusal("example 1: score must fit into float32, found", CollatorError):
        collate([good, {"input_ids": [5, 6], "score": FLOATS[name]}])
    one = {"input_ids": [5, 6], "labels": float(np.asarray(FLOATS[name])[0])}
    of_documents = fa2patch.DataCollatorWithFlattening(document_labels=True)
    refused(lambda: of_documents([one]), "labels must fit into float32", CollatorError)


def test_a_reference_that_float32_does_not_hold_is_refused():
    pair = {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7], "ref_rejected_logps": -1.0}
    with refusal("ref_chosen_logps must fit into float32", CollatorError):
        DataCollatorForPreferenceFlattening()([{**pair, "ref_chosen_logps": -1e300}])


def test_infinities_and_other_floats_pass():
    given = [float("inf"), -float("inf"), float("nan"), 1e38, 1e-50]
    found = collate([{"input_ids": [*range(5)], "score": given}])["score"][0]
    torch.testing.assert_close(found, torch.tensor(given), equal_nan=True)


def test_integers_among_floats_are_not_rounded():
    floats, whole = {"input_ids": [5, 6], "score": [0.5, 1.0]}, {"input_ids": [5, 6], "score": [2, 2**24]}
    assert collate([whole, floats])["score"].tolist() == [[2, 2**24, 0.5, 1]]
    with refusal("example 1: score holds the integer 16777217"):
        collate([floats, {**whole, "score": [2, 2**24 + 1]}])
    of_documents = fa2patch.DataCollatorWithFlattening(document_labels=True)
    with refusal("example 1: labels holds the integer 16777217"):
        of_documents([{"input_ids": [5], "labels": 0.5}, {"input_ids": [5], "labels": 2**24 + 1}])


@pytest.mark.parametrize("wrong", [0.5, 2, -1, float("nan"), float("inf")])
def test_a_loss_mask_holds_zeros_and_ones(wrong):
    masked = fa2patch.DataCollatorWithFlattening(loss_masks=["completion_mask"])
    good = {"input_ids": [5, 6, 7], "completion_mask": [0.0, 0.0, 1.0]}
    batch = masked([good, {**good, "completion_mask": [False, True, True]}])
    assert batch["labels"].tolist() == [[-100, -100, 7, -100, 6, 7]]
    with refusal("example 1: the loss mask completion_mask holds", CollatorError):
        masked([good, {**good, "completion_mask": [0.0, wrong, 1.0]}])


def test_weights_of_ones_own_are_no_weights_of_documents():
    # The loss would be divided by the number of tokens with a label, and not by the sum of the weights.
    batch = fa2patch.DataCollatorWithFlattening(loss_weights="document")([{"input_ids": [5, 6, 7]}])
    assert patched()(**batch).loss.isfinite()
    batch["labels"] = batch["loss_labels"]
    refused(lambda: patched()(**batch), "came with labels of tokens", fa2patch.errors.BadBatch)


# Streams

EXAMPLES = [{"input_ids": [number + 3] * (number % 5 + 2)} for number in range(40)]


class Whole(IterableDataset):
    # The examples are the same in every worker.

    def __iter__(self):
        yield from EXAMPLES


class Shared(IterableDataset):
    # Every worker gives its own part of the examples.

    def __iter__(self):
        worker = get_worker_info()
        yield from EXAMPLES if worker is None else EXAMPLES[worker.id :: worker.num_workers]


class InANestedGenerator:
    def __iter__(self):
        return (example for example in Shared())


def given_by(rows, workers):
    fork = {"multiprocessing_context": "fork"} if workers else {}
    loaded = iter(DataLoader(rows, batch_size=None, num_workers=workers, **fork))
    try:
        return Counter(example["input_ids"][0] for row in loaded for example in row)
    finally:
        if workers:
            loaded._shutdown_workers()  # an error holds the iterator; workers that are ended late are waited for


@pytest.mark.parametrize("workers", [0, 2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["list", "generator", "whole", "shared", "nested"])
def test_workers_give_every_example_once_or_say_so(name, workers):
    made = {
        "list": lambda: EXAMPLES, "generator": lambda: (one for one in EXAMPLES), "whole": Whole, "shared": Shared,
        "nested": InANestedGenerator,
    }  # fmt: skip
    rows = stream(made[name](), max_tokens=16, buffer=5)
    if workers == 2 and name == "generator":
        refused(lambda: given_by(rows, workers), "read by 2 workers.*num_workers=1", PackingError)
        return
    assert given_by(rows, workers) == Counter(range(3, 43))


def test_a_worker_without_examples_gives_none():
    class FirstOnly(IterableDataset):
        def __iter__(self):
            yield from EXAMPLES if get_worker_info().id == 0 else ()

    assert given_by(stream(FirstOnly(), max_tokens=16), 2) == Counter(range(3, 43))


class ReadOnce:
    # The iterable makes no new iterator.

    def __init__(self):
        self.rest = iter(EXAMPLES)

    def __iter__(self):
        yield from self.rest


class BeginsAgain:
    # The iterator begins again, as loaders of batches do.

    def __iter__(self):
        self.rest = iter(EXAMPLES)
        return self

    def __next__(self):
        return next(self.rest)


ONCE = {
    "generator": lambda: (one for one in EXAMPLES),
    "iterator": lambda: iter(EXAMPLES),
    "map": lambda: map(dict, EXAMPLES),
    "chain": lambda: itertools.chain(EXAMPLES),
    "an iterable around an iterator": ReadOnce,
}


@pytest.mark.parametrize("name", ONCE)
def test_what_can_be_read_once_has_no_second_epoch(name):
    rows = stream(ONCE[name](), max_tokens=16, buffer=5)
    assert sum(map(len, rows)) == 40
    refused(lambda: list(rows), "only once, as a generator", PackingError)


def test_rows_are_collated_one_by_one_or_joined():
    rows = stream(EXAMPLES, max_tokens=16, buffer=5)
    refused(lambda: next(iter(DataLoader(rows, 2, collate_fn=collate))), "per_device_train_batch_size=1", CollatorError)
    joined = DataLoader(rows, 2, collate_fn=lambda batch: collate([*itertools.chain.from_iterable(batch)]))
    alone = DataLoader(rows, 1, collate_fn=collate)
    assert [sum(len(lengths_of(batch)) for batch in loader) for loader in (joined, alone)] == [40, 40]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_trainer_trains_on_the_rows_of_a_stream(workers, tmp_path):
    # Two epochs of the stream. Trainer makes batches of rows, with a batch size of 8 unless it is told otherwise.
    pytest.importorskip("accelerate")
    seen = []

    class Seeing(transformers.Trainer):
        def training_step(self, model, inputs, *rest):
            seen.append(inputs["input_ids"].unique_consecutive().tolist())
            return super().training_step(model, inputs, *rest)

    def train(**options):
        cpu = {"use_cpu": True} if "use_cpu" in inspect.signature(transformers.TrainingArguments).parameters else {}
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2 * steps, save_strategy="no", report_to=[], disable_tqdm=True,
            dataloader_num_workers=workers, **options, **cpu,
        )  # fmt: skip
        trainer = Seeing(patched(), arguments, train_dataset=stream(EXAMPLES, 16, 5), data_collator=collate)
        return trainer.train().training_loss

    steps = len([*DataLoader(stream(EXAMPLES, 16, 5), batch_size=None, num_workers=workers, collate_fn=list)])
    refused(train, "expected a mapping, found list.*per_device_train_batch_size=1", CollatorError)
    assert np.isfinite(train(per_device_train_batch_size=1)) and len(seen) == 2 * steps
    for epoch in (seen[:steps], seen[steps:]):
        assert Counter(itertools.chain.from_iterable(epoch)) == Counter(range(3, 43))


def test_an_epoch_that_was_broken_off_does_not_go_on_without_what_had_waited():
    rows = stream((one for one in EXAMPLES), max_tokens=16, buffer=5)
    next(iter(rows))
    refused(lambda: next(iter(rows)), "begin where the first one ended", PackingError)


@pytest.mark.parametrize("made", [lambda: EXAMPLES, Whole, BeginsAgain, lambda: range(2, 12), lambda: []])
def test_what_can_be_read_again_has_many_epochs(made):
    rows = stream(made(), max_tokens=16, buffer=5, length=lambda one: one if isinstance(one, int) else 6)
    first = list(rows)
    assert list(rows) == first and list(rows) == first


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_error_is_the_same_in_a_worker(workers):
    # A DataLoader makes a worker's error again. It calls the class of one that has a message otherwise.
    fork = {"multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader([{"input_ids": []}, {"input_ids": []}], 2, num_workers=workers, collate_fn=collate, **fork)
    refused(lambda: next(iter(loader)), "all 2 examples.*without tokens.*errors.html#collatorerror", CollatorError)
    for kind in (CollatorError, PackingError, fa2patch.errors.NotAModel, fa2patch.errors.UnknownKernel):
        assert str(kind(message="found 5")) == str(kind("found 5")) and kind(message="found 5").args == ("found 5",)


# A sampler that goes on in the middle of an epoch


@pytest.mark.parametrize("rank", [0, 1, "all"])
def test_the_length_is_that_of_what_is_iterated(rank):
    sampler = PackedBatchSampler([3, 5, 2, 7, 4, 6] * 7, 16, 2, rank)
    whole = len(sampler)
    assert whole == len(list(sampler))
    for steps in (0, 3, whole if rank != "all" else whole // 2):
        sampler.load_state_dict(sampler.state_dict(steps=steps))
        expected = whole - steps * (2 if rank == "all" else 1)
        assert len(sampler) == len(DataLoader([None] * 42, batch_sampler=sampler)) == expected
        rows = iter(sampler)
        inside = [len(sampler) for _ in rows]
        assert inside == [expected] * expected, "Trainer looks for the last step by this number, in the epoch too"
        list(sampler)
        assert len(sampler) == whole
    sampler.load_state_dict(sampler.state_dict(steps=3))
    sampler.set_epoch(1)
    assert len(sampler) == len(list(sampler))
