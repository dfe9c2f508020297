"""Batches are cut into passes of a budget: every token is in one of them, and their gradients add up to the batch's.

The shapes of passes may stand still, whatever their documents are: the same tokens, gradients and loss as without.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage import padded, tiny_llama

import fa2patch
from fa2patch.packing import PackingError, passes

LENGTHS = [5, 60, 9, 33, 12, 7, 48, 20]
BUDGET = 64
LISTS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def documents(lengths: list[int]) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(len(lengths))
    ids = [torch.randint(3, 90, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": each, "labels": list(each)} for each in ids]


def packed(lengths: list[int], **options: Any) -> dict[str, Any]:
    return fa2patch.DataCollatorWithFlattening(**options)(documents(lengths))


def visible(batch: dict[str, torch.Tensor]) -> list[int]:
    ids = batch["input_ids"]
    return ids[batch["attention_mask"] != 0].tolist() if "attention_mask" in batch else ids.flatten().tolist()


SAID = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
KINDS = {
    "packed": packed,
    "packed, with lengths": lambda lengths: packed(lengths, **SAID),
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


@pytest.mark.parametrize(
    "batch, options",
    [
        (packed([5, 70]), {}),  # a document that is longer than the budget
        (packed([5, 30]), {"longest_document": 20}),
        ({"labels": [1]}, {}),
        ({**packed([5, 9]), "of nobody knows whom": torch.zeros(3)}, {}),
    ],
)
def test_a_rank_that_refuses_its_batch_tells_the_others_which_wait(
    batch: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys.modules["fa2patch.packing.ranks"], "of_all_ranks", lambda own: told.append(own) or [own])
    with pytest.raises(PackingError) as refused:
        passes(batch, 64, every_rank=True, **options)
    assert told == [(-1, refused.value.message)]


def assert_as_collated(cut: Any, lengths: list[int], **options: Any) -> None:
    # A pass is what the collator makes of its documents.
    collate, all_of = fa2patch.DataCollatorWithFlattening(**options), documents(lengths)
    for units, part in zip(cut.units, cut):
        expected = collate([all_of[unit] for unit in units])
        assert part.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(part[name]), torch.as_tensor(value)), name


@settings(max_examples=20, deadline=None)
@given(LISTS, st.integers(40, 90))
def test_a_packed_pass_is_what_the_collator_makes_of_its_documents(lengths: list[int], budget: int) -> None:
    assert_as_collated(passes(packed(lengths, **SAID), budget), lengths, **SAID)


def assert_add_up(model: Any, cut: Any) -> None:
    # Losses and gradients of the passes add up to those of the padded batch.
    reference = tiny_llama().train()
    expected = reference(**padded(documents(LENGTHS))).loss
    expected.backward()
    total = 0.0
    for part, share in zip(cut, cut.shares):
        loss = model(**part).loss * share
        loss.backward()
        total += float(loss.detach())
    assert total == pytest.approx(float(expected.detach()), rel=1e-6)
    for (name, one), other in zip(model.named_parameters(), reference.parameters()):
        assert torch.allclose(one.grad, other.grad, rtol=0, atol=1e-5 * float(other.grad.abs().max())), name


@pytest.mark.parametrize("kind", ["packed", "packed, with lengths", "padded"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_passes_add_up_to_the_padded_batchs(kind: str, checkpointing: bool) -> None:
    model = tiny_llama().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    fa2patch.apply(model, padded_batches=kind == "padded")
    cut = passes(KINDS[kind](LENGTHS), BUDGET)
    assert len(cut) > 2
    assert_add_up(model, cut)


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
    with pytest.raises(PackingError, match=r"2 of 8 documents .* first is document 1 of 60 tokens"):
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
    with pytest.raises(PackingError, match=said):
        passes(batch, **{"max_tokens": 64, **options})


def test_shares_need_labels() -> None:
    batch = padded(documents(LENGTHS))
    del batch["labels"]
    with pytest.raises(PackingError, match="expected labels with one number for each token"):
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


# Shapes that stand still

STILL: dict[str, Any] = {"pad_to_multiple_of": BUDGET, "max_documents": 4, "longest_document": BUDGET}
MORE = st.lists(st.integers(1, 40), min_size=1, max_size=24)


def shapes(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value.shape) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def real(batch: dict[str, Any]) -> list[int]:
    ids: list[int] = batch["input_ids"][batch["real_tokens"] != 0].tolist()
    return ids


@settings(max_examples=40, deadline=None)
@given(st.lists(MORE, min_size=1, max_size=4))
def test_all_passes_of_all_batches_have_the_same_shapes_and_numbers(batches: list[list[int]]) -> None:
    found = []
    for lengths in batches:
        cut = passes(packed(lengths, return_seq_idx=True), BUDGET, **STILL)
        assert sorted(np.concatenate(cut.units).tolist()) == list(range(len(lengths)))
        assert max(map(len, cut.units)) <= 4 and max(cut.tokens) <= BUDGET and set(cut.lengths) == {BUDGET}
        for units, part in zip(cut.units, cut):
            assert real(part) == [token for unit in units for token in documents(lengths)[unit]["input_ids"]]
            found.append(shapes(part))
    assert all(each == found[0] for each in found)
    assert found[0]["cu_seq_lens_q"] == (4 + 1 + 1,) and found[0]["max_length_q"] == BUDGET


@settings(max_examples=30, deadline=None)
@given(st.lists(MORE, min_size=1, max_size=4))
def test_ranks_make_as_many_passes_of_few_documents(ranks: list[list[int]]) -> None:
    batches = [packed(lengths) for lengths in ranks]
    needed = max(len(passes(batch, BUDGET, **STILL)) for batch in batches)
    for lengths, batch in zip(ranks, batches):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules["fa2patch.packing.ranks"], "of_all_ranks", lambda own: [own, (needed, "")])
            cut = passes(batch, BUDGET, every_rank=True, **STILL)
        assert len(cut) == needed and max(map(len, cut.units)) <= 4
        assert sorted(np.concatenate(cut.units).tolist()) == list(range(len(lengths)))
        assert len({str(shapes(part)) for part in cut}) == 1


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"pad_to_multiple_of": 32}])
@pytest.mark.parametrize("still", [STILL, {"pad_to_multiple_of": "eighth"}, {"max_documents": 2}])
def test_gradients_of_still_passes_add_up_to_the_padded_batchs(options: dict[str, Any], still: dict[str, Any]) -> None:
    model = tiny_llama().train()
    fa2patch.apply(model)
    assert_add_up(model, passes(packed(LENGTHS, **options), BUDGET, **still))


def test_a_padded_pass_is_what_the_collator_makes_of_its_documents() -> None:
    assert_as_collated(passes(packed(LENGTHS, **SAID), BUDGET, **STILL), LENGTHS, **SAID, **STILL)


@pytest.mark.parametrize("weights", ["document", "token"])
def test_padding_has_no_weight_in_a_loss(weights: str) -> None:
    examples = [{**one, "loss_weights": [0.5] * len(one["input_ids"])} for one in documents(LENGTHS)]
    examples = examples if weights == "token" else documents(LENGTHS)
    batch = fa2patch.DataCollatorWithFlattening(loss_weights=weights)(examples)
    model = tiny_llama()
    fa2patch.apply(model)
    with torch.no_grad():
        expected = float(model(**batch).loss)
        cut = passes(batch, BUDGET, **STILL)
        found = sum(float(model(**part).loss) * share for part, share in zip(cut, cut.shares))
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("to", "lengths"), [("power", {32, 64, 80}), ("eighth", {22, 80, 72}), (40, {40, 80})])
def test_no_pass_is_padded_beyond_the_budget(to: object, lengths: set[int]) -> None:
    cut = passes(packed([70, 50, 25, 21]), 80, pad_to_multiple_of=to)
    assert [part["input_ids"].shape[1] for part in cut] == cut.lengths.tolist()
    assert set(cut.lengths) <= lengths and max(cut.lengths) == 80


def test_padding_is_no_longer_than_the_longest_document_may_be() -> None:
    # A nearly empty pass would have been an error, and attention over its padding costs the most.
    model = tiny_llama()
    fa2patch.apply(model)
    (part,) = passes(packed([5, 9]), BUDGET, pad_to_multiple_of=BUDGET, max_documents=4, longest_document=16)
    assert part["cu_seq_lens_q"].tolist() == [0, 5, 14, 30, 46, 62, 64, 64, 64] and part["max_length_q"] == 16
    assert part["position_ids"][0, 14:].tolist() == [*range(16)] * 3 + [0, 1]
    assert float(model(**part).loss) == pytest.approx(float(model(**packed([5, 9])).loss), rel=1e-6)
    (full,) = passes(packed([16] * 4), BUDGET, pad_to_multiple_of=BUDGET, max_documents=4, longest_document=16)
    assert shapes(full) == shapes(part)


def test_position_ids_of_padding_begin_where_the_collator_began() -> None:
    (part,) = passes(packed([5, 9], position_ids_start=2), 16, pad_to_multiple_of=16)
    assert part["position_ids"][0].tolist() == [*range(2, 7), *range(2, 11), 2, 3]


def test_short_documents_move_to_passes_with_space() -> None:
    cut = passes(packed([60, 1, 1, 1, 1, 1, 1, 1]), BUDGET, max_documents=4)
    assert sorted(map(len, cut.units)) == [4, 4]
    assert [len(part["cu_seq_lens_q"]) for part in cut] == [5, 5]


def test_lists_of_examples_are_cut_into_few() -> None:
    cut = passes(documents([2] * 9), BUDGET, max_documents=4)
    assert sorted(map(len, cut)) == [1, 4, 4]


def test_documents_alone_have_a_length_of_their_own() -> None:
    cut = passes(packed([70, 5]), BUDGET, too_long="alone", pad_to_multiple_of=BUDGET)
    assert sorted(cut.lengths) == [64, 70]


@pytest.mark.parametrize(
    ("batch", "options", "said"),
    [
        (packed(LENGTHS), {"pad_to_multiple_of": 48}, r"48: expected a number that divides max_tokens.*max_tokens=96"),
        (packed(LENGTHS), {"pad_to_multiple_of": "half"}, "expected a positive number, 'power', 'eighth' or None"),
        (packed(LENGTHS), {"max_documents": 0}, "max_documents: expected a positive number or None, found 0"),
        (packed(LENGTHS), {"max_documents": "power"}, "expected a positive number or None, found 'power'"),
        (packed(LENGTHS), {"longest_document": 1.5}, "longest_document: expected a positive number, 'power'"),
        (padded(documents(LENGTHS)), STILL, "found a padded batch. Collate with fa2patch.DataCollatorWithFlattening"),
        (documents(LENGTHS), STILL, "found a list of examples, whose passes you collate yourself"),
    ],
)  # fmt: skip
def test_options_of_shapes_that_cannot_be(batch: object, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PackingError, match=said):
        passes(batch, BUDGET, **options)


def test_a_document_longer_than_stated_is_an_error() -> None:
    with pytest.raises(PackingError, match="longest_document=32, but a document of the row, or its padding, has 60"):
        passes(packed(LENGTHS), BUDGET, longest_document=32)


def test_labels_of_documents_do_not_stand_still() -> None:
    examples = [{**one, "labels": at} for at, one in enumerate(documents([4, 9, 3]))]
    batch = fa2patch.DataCollatorWithFlattening(document_labels=True)(examples)
    with pytest.raises(PackingError, match="max_documents: expected labels of tokens"):
        passes(batch, 16, max_documents=4)
    assert [part["labels"].tolist() for part in passes(batch, 16, pad_to_multiple_of=16)] == [[0, 1, 2]]
