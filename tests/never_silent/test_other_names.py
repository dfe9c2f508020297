"""Boundaries under the names of other frameworks are read, or they are noticed; other columns pass."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from small_models import Result, assert_right, llama, logits_alone, of_family, patched, refusal, takes_any_name

import fa2patch
from compat_matrix.check.rows import documents

TWO = documents(9, 13)
THREE = documents(6, 9, 7)


@dataclasses.dataclass
class FlashAttentionKwargs:
    # NeMo RL hands such an object to its models.

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def numbers(docs, dtype=torch.long):
    return torch.repeat_interleave(torch.arange(len(docs), dtype=dtype), torch.tensor(lengths(docs)))[None]


def cu(docs):
    return torch.tensor([0, *lengths(docs)]).cumsum(0).to(torch.int32)


def lengths(docs):
    return [len(doc) for doc in docs]


READ = {
    "cu_seqlens": lambda docs: {"cu_seqlens": cu(docs), "max_seqlen": max(lengths(docs))},
    "cu_seqlens alone": lambda docs: {"cu_seqlens": cu(docs)},
    "cu_seqlens with a batch dimension": lambda docs: {"cu_seqlens": cu(docs)[None]},
    "cu_seqlens_q and _k": lambda docs: {
        "cu_seqlens_q": cu(docs), "cu_seqlens_k": cu(docs), "max_seqlen_q": 13, "max_seqlen_k": 13,
    },
    "cu_seqlens_q and _kv": lambda docs: {"cu_seqlens_q": cu(docs), "cu_seqlens_kv": cu(docs)},
    "cumulative_seqlens_q and _k": lambda docs: {
        "cumulative_seqlens_q": cu(docs), "cumulative_seqlens_k": cu(docs), "max_length_q": 13, "max_length_k": 13,
    },
    "seq_lens": lambda docs: {"seq_lens": torch.tensor(lengths(docs))},
    "seq_lens, a list": lambda docs: {"seq_lens": lengths(docs)},
    "seq_lens, an array": lambda docs: {"seq_lens": np.array(lengths(docs))},
    "seq_lengths": lambda docs: {"seq_lengths": torch.tensor([lengths(docs)])},
    "packed_seq_lengths": lambda docs: {"packed_seq_lengths": torch.tensor(lengths(docs), dtype=torch.int32)},
    "document_ids": lambda docs: {"document_ids": numbers(docs)},
    "doc_ids, int32": lambda docs: {"doc_ids": numbers(docs, torch.int32)},
    "sequence_ids": lambda docs: {"sequence_ids": numbers(docs)},
    "flash_attn_kwargs": lambda docs: {"flash_attn_kwargs": FlashAttentionKwargs(cu(docs), cu(docs), 13, 13)},
    "a dict of them": lambda docs: {"flash_attn_kwargs": {"cu_seqlens_q": cu(docs), "max_seqlen_q": 13}},
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("docs", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("name", READ)
def test_a_known_name_is_read(name, docs, training):
    found = patched(llama().train(training))(torch.cat(docs)[None], **READ[name](docs)).logits[0].detach()
    assert_right(Result(found), Result(logits_alone(llama(), docs)))


@pytest.mark.parametrize("name", ["cu_seqlens", "seq_lens", "document_ids", "flash_attn_kwargs"])
@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma", "bert", "mamba2", "falcon"])
def test_a_known_name_is_read_in_other_families(family, name):
    expected = logits_alone(of_family(family), TWO)
    with torch.no_grad():
        found = patched(of_family(family))(torch.cat(TWO)[None], **READ[name](TWO)).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_lengths_of_several_rows_are_read():
    # Rows hold different numbers of documents, so that zeros fill up their lengths.
    rows = [documents(5, 9, 2), documents(7, 9, seed=1)]
    model = patched()
    ids = torch.stack([torch.cat(docs) for docs in rows])
    found = model(ids, seq_lens=torch.tensor([[5, 9, 2], [7, 9, 0]])).logits.detach()
    for row, docs in zip(found, rows):
        torch.testing.assert_close(row, logits_alone(llama(), docs), rtol=1e-4, atol=1e-4)


WRONG = {
    "lengths of another row": {"seq_lens": torch.tensor([5, 9])},
    "lengths that are fractions": {"seq_lens": torch.tensor([9.0, 13.0])},
    "ends of another row": {"cu_seqlens": torch.tensor([0, 9, 20])},
    "two names for one thing": {"cu_seqlens": cu(TWO), "cu_seqlens_q": cu(TWO)},
    "a contradiction to position_ids": {
        "cu_seqlens": torch.tensor([0, 5, 22]), "position_ids": torch.cat([torch.arange(9), torch.arange(13)])[None],
    },
    "a longest document that is too short": {"cu_seqlens": cu(TWO), "max_seqlen": 9},
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_statement_is_an_error(name, training):
    model = patched(llama().train(training))
    with refusal():
        model(torch.cat(TWO)[None], **WRONG[name])


class Fields:
    # An object of some framework, with boundaries in a field of any name.

    def __init__(self, ends):
        self.ends_of_sequences = ends


LOOKS = {
    "ends": {"ends_of_documents": cu(THREE)},
    "a list of ends": {"ends_of_documents": cu(THREE).tolist()},
    "lengths": {"sample_sizes": torch.tensor(lengths(THREE))},
    "a row of lengths": {"sample_sizes": torch.tensor([lengths(THREE)])},
    "numbers of documents": {"which_sample": numbers(THREE)},
    "an array of them": {"which_sample": numbers(THREE).numpy()},
    "numbers from 1": {"which_sample": numbers(THREE) + 1},
    "a field of an object": {"packed_seq_params": Fields(cu(THREE))},
    "an entry of a dict": {"packing": {"ends": cu(THREE)}},
    "max_length_q alone": {"max_length_q": 9, "max_length_k": 9},
}


@pytest.mark.parametrize("name", LOOKS)
def test_what_looks_like_boundaries_is_an_error_in_training_and_a_warning_otherwise(name):
    model = llama()
    if not takes_any_name(model):
        pytest.skip("this version's forward takes no other names")
    fa2patch.apply(model)
    batch = {"input_ids": torch.cat(THREE)[None], **LOOKS[name]}
    with pytest.warns(fa2patch.errors.NothingPacked, match=next(iter(LOOKS[name]))):
        model(**batch)
    with refusal(next(iter(LOOKS[name])), fa2patch.errors.BoundaryConflict):
        model.train()(**batch)


def columns(rows, length):
    # Trainers hand such columns on. None of them says where documents start.
    half = torch.arange(length).expand(rows, length) >= length // 2
    return {
        "length": torch.full((rows,), length),
        "completion_mask": half.long(),
        "loss_mask": half,
        "special_tokens_mask": torch.zeros(rows, length, dtype=torch.long),
        "idx": torch.arange(rows),
        "num_items_in_batch": torch.tensor(rows * length),
        "advantages": torch.rand(rows, length),
        "text": ["a text"] * rows,
        "old_ids": torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(0)),
        "token_index": torch.arange(length).expand(rows, length),
    }


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
def test_ten_columns_of_trainers_pass_as_before(padded, training):
    model, reference = llama().train(training), llama().train(training)
    if not takes_any_name(model):
        pytest.skip("this version's forward takes no other names")
    fa2patch.apply(model)
    ids = torch.stack(documents(12, 12, 12))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 7:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, **columns(*ids.shape)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model(**batch).logits
    assert torch.equal(found, reference(**batch).logits)


def test_a_column_that_the_forward_takes_keeps_its_meaning():
    # BERT's ``token_type_ids`` may count like numbers of documents.
    model, reference = patched(of_family("bert", type_vocab_size=4)), of_family("bert", type_vocab_size=4)
    batch = {"input_ids": torch.cat(THREE)[None], "token_type_ids": numbers(THREE)}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(**batch).logits, reference(**batch).logits)
