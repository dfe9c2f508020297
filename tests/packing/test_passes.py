"""Batches are cut into passes of a budget: every token is in one of them, and their gradients add up to the batch's."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage import padded, tiny_llama

import fa2patch
from fa2patch.packing import passes

LENGTHS = [5, 60, 9, 33, 12, 7, 48, 20]
LISTS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def documents(lengths: list[int]) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(len(lengths))
    ids = [torch.randint(3, 90, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": each, "labels": list(each)} for each in ids]


def packed(lengths: list[int], **options: object) -> dict[str, torch.Tensor]:
    return fa2patch.DataCollatorWithFlattening(**options)(documents(lengths))


def visible(batch: dict[str, torch.Tensor]) -> list[int]:
    ids = batch["input_ids"]
    return ids[batch["attention_mask"] != 0].tolist() if "attention_mask" in batch else ids.flatten().tolist()


KINDS = {
    "packed": packed,
    "packed, with lengths": lambda lengths: packed(lengths, return_flash_attn_kwargs=True, return_seq_idx=True),
    "padded": lambda lengths: padded(documents(lengths)),
    "examples": documents,
}


@settings(max_examples=40, deadline=None)
@given(LISTS, st.integers(40, 90), st.sampled_from(sorted(KINDS)))
def test_every_token_is_in_exactly_one_pass_within_the_budget(lengths: list[int], budget: int, kind: str) -> None:
    batch = KINDS[kind](lengths)
    cut = passes(batch, budget)
    assert sorted(np.concatenate(cut.units).tolist()) == list(range(len(lengths)))
    assert max(cut.tokens) <= budget and sum(cut.tokens) == sum(lengths)
    for units, tokens, part in zip(cut.units, cut.tokens, cut):
        assert units.tolist() == sorted(units.tolist())
        held = [token for one in part for token in one["input_ids"]] if kind == "examples" else visible(part)
        assert held == [token for unit in units for token in documents(lengths)[unit]["input_ids"]]
        assert len(held) == tokens == sum(lengths[unit] for unit in units)
    if any(length > 1 for length in lengths):
        assert cut.shares.sum() == pytest.approx(1)


@settings(max_examples=30, deadline=None)
@given(st.lists(LISTS, min_size=1, max_size=5), st.integers(40, 90), st.sampled_from(sorted(KINDS)))
def test_ranks_make_as_many_passes_within_the_budget(ranks: list[list[int]], budget: int, kind: str) -> None:
    # Passes beyond a rank's documents have nothing to learn.
    batches = [KINDS[kind](lengths) for lengths in ranks]
    needed = max(len(passes(batch, budget)) for batch in batches)
    for lengths, batch in zip(ranks, batches):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules["fa2patch.packing.ranks"], "of_all_ranks", lambda own: [own, (needed, "")])
            cut = passes(batch, budget, every_rank=True)
            parts = list(cut)
        assert len(parts) == len(cut) == needed
        assert sorted(np.concatenate(cut.units).tolist()) == list(range(len(lengths)))
        assert max(cut.tokens) <= budget and sum(cut.tokens) == sum(lengths)
        for units, part in zip(cut.units, parts):
            rows = [one["labels"] for one in part] if kind == "examples" else [part["labels"].flatten().tolist()]
            assert len(units) or {label for row in rows for label in row} == {-100}


@settings(max_examples=20, deadline=None)
@given(LISTS, st.integers(40, 90))
def test_a_packed_pass_is_what_the_collator_makes_of_its_documents(lengths: list[int], budget: int) -> None:
    options = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
    cut = passes(packed(lengths, **options), budget)
    all_of = documents(lengths)
    for units, part in zip(cut.units, cut):
        expected = fa2patch.DataCollatorWithFlattening(**options)([all_of[unit] for unit in units])
        assert part.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(part[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("kind", ["packed", "packed, with lengths", "padded"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_passes_add_up_to_the_padded_batchs(kind: str, checkpointing: bool) -> None:
    reference = tiny_llama().train()
    whole = padded(documents(LENGTHS))
    expected = reference(**whole).loss
    expected.backward()
    model = tiny_llama().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    fa2patch.apply(model, padded_batches=kind == "padded")
    cut = passes(KINDS[kind](LENGTHS), 64)
    assert len(cut) > 2
    total = 0.0
    for part, share in zip(cut, cut.shares):
        loss = model(**part).loss * share
        loss.backward()
        total += float(loss)
    assert total == pytest.approx(float(expected), rel=1e-6)
    for (name, one), other in zip(model.named_parameters(), reference.parameters()):
        assert torch.allclose(one.grad, other.grad, rtol=0, atol=1e-5 * float(other.grad.abs().max())), name


def test_a_pass_of_padded_rows_loses_columns_of_padding_only() -> None:
    batch = padded(documents(LENGTHS))
    cut = passes(batch, 64)
    assert {part["input_ids"].shape[1] for part in cut} == {max(LENGTHS[unit] for unit in units) for units in cut.units}
    batch["position_ids"] = torch.arange(60).expand(8, -1)  # a number at padding that is not the same everywhere
    assert {part["input_ids"].shape[1] for part in passes(batch, 64)} == {60}


def test_labels_and_columns_of_documents_go_with_them() -> None:
    examples = [
        {**one, "labels": at, "weight": [at] * len(one["input_ids"])} for at, one in enumerate(documents([4, 9, 3]))
    ]
    batch = fa2patch.DataCollatorWithFlattening(document_labels=True)(examples)
    cut = passes(batch, 9)
    assert [part["labels"].tolist() for part in cut] == [units.tolist() for units in cut.units]
    for units, part in zip(cut.units, cut):
        assert part["weight"][0].tolist() == [unit for unit in units for _ in examples[unit]["input_ids"]]


def test_padding_of_a_row_is_no_document() -> None:
    batch = packed([4, 9, 3], pad_to_multiple_of=16)
    batch_without = packed([4, 9, 3], pad_to_multiple_of=32)
    for one in (batch, batch_without):
        cut = passes(one, 9)
        assert sorted(np.concatenate(cut.units).tolist()) == [0, 1, 2]
        assert all("real_tokens" not in part for part in cut)


def test_a_document_longer_than_the_budget_is_an_error_or_alone() -> None:
    with pytest.raises(fa2patch.packing.PackingError, match=r"2 of 8 examples .* first is example 1 of 60 tokens"):
        passes(packed(LENGTHS), 40)
    cut = passes(packed(LENGTHS), 40, too_long="alone")
    assert [units.tolist() for units, tokens in zip(cut.units, cut.tokens) if tokens > 40] == [[1], [6]]
    assert sorted(np.concatenate(cut.units).tolist()) == list(range(8))
    assert max(tokens for tokens in cut.tokens if tokens not in (60, 48)) <= 40


@pytest.mark.parametrize(
    ("batch", "options", "said"),
    [
        (packed(LENGTHS), {"max_tokens": 0}, "expected a positive number of tokens"),
        (packed(LENGTHS), {"too_long": "drop"}, "expected 'error' or 'alone'"),
        (3, {}, "expected a mapping or a list of examples, found int"),
        ({"x": 1}, {}, "expected tensors with one row for each example, found x"),
        ({**packed(LENGTHS), "more": torch.zeros(3)}, {}, r"batch\['more'\]: expected one number for each of 194 tok"),
        ({**padded(documents(LENGTHS)), "pixel_values": torch.zeros(3, 2)}, {}, r"pixel_values.* pass is not known"),
        ({**packed(LENGTHS), "segment_parents": torch.zeros(8)}, {}, "documents share tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(batch: object, options: dict[str, object], said: str) -> None:
    with pytest.raises(fa2patch.packing.PackingError, match=said):
        passes(batch, **{"max_tokens": 64, **options})


def test_shares_need_labels() -> None:
    batch = padded(documents(LENGTHS))
    del batch["labels"]
    with pytest.raises(fa2patch.packing.PackingError, match="expected labels with one number for each token"):
        _ = passes(batch, 64).shares


@pytest.mark.parametrize("width", [4, 3])
def test_prompts_and_completions_count_with_their_padding(width: int) -> None:
    # GRPO's batches hold them apart, in tensors of their own widths, or by chance of one.
    batch = {
        "prompt_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 5]])[:, 4 - width :],
        "prompt_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])[:, 4 - width :],
        "completion_ids": torch.tensor([[3, 4, 5, 6], [4, 0, 0, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]),
    }
    cut = passes(batch, 16)
    assert cut.padded_tokens == 2 * (width + 4) and cut.tokens.sum() == 2 + width + 5


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_a_batch_with_its_padding(kind: str) -> None:
    cut = passes(KINDS[kind](LENGTHS), 200)
    assert cut.padded_tokens == (len(LENGTHS) * max(LENGTHS) if kind == "padded" else sum(LENGTHS))
