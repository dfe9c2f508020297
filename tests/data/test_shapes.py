"""Options of the collator with which rows of any documents have the same shapes."""

import numpy as np
import pytest

from fa2patch import DataCollatorForCompletionOnlyLM, DataCollatorWithFlattening
from fa2patch.documents.row_shape import rounded_up
from fa2patch.errors import CollatorError

DOCS = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 10]}]


def collate(features=DOCS, **options):
    return DataCollatorWithFlattening(return_flash_attn_kwargs=True, **options)(features)


@pytest.mark.parametrize(("to", "most"), [("power", 1 / 2), ("eighth", 1 / 8)])
def test_a_rule_gives_few_lengths_and_bounded_padding(to, most):
    padded = [rounded_up(tokens, to) for tokens in range(1, 5000)]
    assert all(0 <= length - tokens < most * length for tokens, length in enumerate(padded, 1))
    assert sorted(padded) == padded and all(rounded_up(length, to) == length for length in padded)
    a_doubling = {length for length in padded if 1024 < length <= 2048}
    assert len(a_doubling) == {"power": 1, "eighth": 8}[to]


@pytest.mark.parametrize(("to", "length"), [("power", 32), ("eighth", 18), (None, 17), (7, 21)])
def test_a_row_is_padded_by_the_rule(to, length):
    batch = collate([{"input_ids": [*range(17)]}], pad_to_multiple_of=to)
    assert batch["input_ids"].shape == (1, length)
    assert int(batch.get("real_tokens", np.ones(17)).sum()) == 17
    assert batch["cu_seq_lens_q"].tolist() == ([0, 17, length] if length > 17 else [0, 17])


def test_a_padded_batch_is_as_wide_as_the_rule_says():
    class Words:
        pad_token_id, padding_side = 0, "right"

    collator = DataCollatorForCompletionOnlyLM([7], tokenizer=Words(), padding_free=False, pad_to_multiple_of="power")
    assert collator([{"input_ids": [5, 7, 6, 8, 9]}, {"input_ids": [7, 8]}])["input_ids"].shape == (2, 8)


def test_ends_have_as_many_entries_in_every_batch():
    batch = collate(max_documents=5)
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 4, 6, 6, 6]
    assert batch["max_length_q"] == 3
    assert collate(max_documents=3)["cu_seq_lens_q"].tolist() == [0, 3, 4, 6]


@pytest.mark.parametrize(("to", "ends"), [(8, [0, 3, 4, 6, 8]), (6, [0, 3, 4, 6, 6]), (1, [0, 3, 4, 6, 6])])
def test_padding_has_an_entry_of_its_own_whether_a_row_needs_it_or_not(to, ends):
    assert collate(max_documents=3, pad_to_multiple_of=to)["cu_seq_lens_q"].tolist() == ends


@pytest.mark.parametrize("to", [None, 6, 8])
def test_a_row_of_more_documents_is_an_error_with_and_without_padding(to):
    with pytest.raises(CollatorError, match="max_documents=2, but a row has 3 documents. Raise max_documents"):
        collate(max_documents=2, pad_to_multiple_of=to)


def test_documents_inside_an_example_count():
    example = {"input_ids": [5, 6, 7, 8], "seq_lengths": [1, 3]}
    assert collate([example], max_documents=2)["cu_seq_lens_q"].tolist() == [0, 1, 4]
    with pytest.raises(CollatorError, match="has 2 documents"):
        collate([example], max_documents=1)


@pytest.mark.parametrize(("stated", "found"), [(None, 3), (3, 3), (100, 100), ("power", 4), ("eighth", 3)])
def test_the_longest_document_is_stated(stated, found):
    batch = collate(longest_document=stated)
    assert batch["max_length_q"] == batch["max_length_k"] == found


@pytest.mark.parametrize("to", [None, 16])
def test_a_longer_document_or_padding_is_an_error(to):
    with pytest.raises(CollatorError, match="longest_document=2, but a document of the row, or its padding, has"):
        collate(longest_document=2, pad_to_multiple_of=to)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_to_multiple_of": "half"}, "pad_to_multiple_of: expected a positive number, 'power', 'eighth' or None"),
        ({"longest_document": 0}, "longest_document: expected a positive number, 'power', 'eighth' or None, found 0"),
        (
            {"longest_document": 1.5},
            "longest_document: expected a positive number, 'power', 'eighth' or None, found 1.5",
        ),
        ({"max_documents": 0}, "max_documents: expected a positive number or None, found 0"),
        ({"max_documents": 4, "document_labels": True}, "leave max_documents out"),
        ({"max_documents": 4, "return_flash_attn_kwargs": False}, "max_documents is of lengths: set return_flash_attn"),
        ({"longest_document": 4, "return_flash_attn_kwargs": False}, "longest_document is of lengths: set return_fl"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(CollatorError, match=message):
        DataCollatorWithFlattening(**{"return_flash_attn_kwargs": True, **options})


def test_every_layout_has_the_same_shapes_and_numbers():
    drawn = np.random.default_rng(0)

    def shapes(lengths):
        docs = [{"input_ids": [5] * int(length)} for length in lengths]
        batch = collate(docs, pad_to_multiple_of=64, max_documents=8, longest_document=64, return_seq_idx=True)
        return {name: value if isinstance(value, int) else tuple(value.shape) for name, value in batch.items()}

    found = [shapes(drawn.integers(1, 9, drawn.integers(1, 9))) for _ in range(30)]
    assert all(each == found[0] for each in found)
