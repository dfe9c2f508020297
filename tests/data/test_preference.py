"""Preference pairs in a packed row, prompts once or twice: sums, losses and gradients as in padded batches."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from padded_cases import assert_near, gradients

import fa2patch
from compat_matrix import tiny_models
from fa2patch.errors import BadBatch, CollatorError
from fa2patch.preference import DataCollatorForPreferenceFlattening, per_document_logps

PAIRS = [
    {"prompt_input_ids": [5, 6, 7], "chosen_input_ids": [8, 9], "rejected_input_ids": [10]},
    {"prompt_input_ids": [11], "chosen_input_ids": [12, 13, 14, 15, 16], "rejected_input_ids": [17, 18, 19]},
    {"prompt_input_ids": [20, 21, 22, 23], "chosen_input_ids": [24], "rejected_input_ids": [25, 26, 27, 28, 29, 30]},
]
# Prompts of three, one, four and no tokens, and completions that begin with the same tokens.
FIVE = [
    *PAIRS,
    {"prompt_input_ids": [], "chosen_input_ids": [31, 34, 32], "rejected_input_ids": [31, 34, 33]},
    {"prompt_input_ids": [40, 41, 42], "chosen_input_ids": [43, 44], "rejected_input_ids": [43, 45]},
]


def documents(pairs: list[dict[str, Any]]) -> list[tuple[list[int], int]]:
    # Returns the ids and the prompt's length of each of the 2n documents.
    return [
        (pair["prompt_input_ids"] + pair[f"{side}_input_ids"], len(pair["prompt_input_ids"]))
        for side in ("chosen", "rejected")
        for pair in pairs
    ]


def padded(pairs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    docs = documents(pairs)
    length = max(len(ids) for ids, _ in docs)
    batch = {name: torch.zeros(len(docs), length, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    batch["labels"] = torch.full((len(docs), length), -100)
    for row, (ids, prompt) in enumerate(docs):
        batch["input_ids"][row, : len(ids)] = torch.tensor(ids)
        batch["attention_mask"][row, : len(ids)] = 1
        batch["labels"][row, prompt : len(ids)] = torch.tensor(ids[prompt:])
    return batch


def row_logps(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    # Computed as TRL does it.
    target = labels[:, 1:]
    logps = logits[:, :-1].log_softmax(-1).gather(2, target.clamp(min=0)[..., None])[..., 0]
    return (logps * (target != -100)).sum(-1)


def dpo_loss(logps: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    # Equation 7 of https://arxiv.org/abs/2305.18290.
    chosen, rejected = (0.1 * (logps - reference)).chunk(2)
    return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


def with_labels(pair: dict[str, list[int]]) -> dict[str, list[int]]:
    # TRL up to 0.11 makes pairs whose ids include the prompt, and whose labels hide it.
    prompt, made = pair["prompt_input_ids"], {}
    for side in ("chosen", "rejected"):
        ids = pair[f"{side}_input_ids"]
        made.update({f"{side}_input_ids": prompt + ids, f"{side}_labels": [-100] * len(prompt) + ids})
    return made


def where(batch: dict[str, Any]) -> Any:
    """What the batch says of its boundaries."""
    if "cu_seq_lens_q" not in batch:
        return batch["position_ids"]
    return fa2patch.Boundaries(batch["cu_seq_lens_q"], batch["max_length_q"], parents=batch.get("segment_parents"))


def shared(pairs: Any, **options: Any) -> dict[str, Any]:
    return DataCollatorForPreferenceFlattening(share_prompts=True, **options)(pairs)


def documents_of(batch: dict[str, Any]) -> list[tuple[list[int], list[int], list[int]]]:
    # The ids, position ids and labels of each document are put together from its path.
    columns = [batch[name][0] for name in ("input_ids", "position_ids", "labels")]
    found = where(batch)
    if found.tree is None:
        return list(zip(*([piece.tolist() for piece in column.split(list(found.lengths))] for column in columns)))
    tree = found.tree
    return [tuple(tree.along(column, leaf).tolist() for column in columns) for leaf in tree.leaves]


class TestCollator:
    def test_row(self) -> None:
        collate = DataCollatorForPreferenceFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
        batch = collate(PAIRS)
        docs = documents(PAIRS)
        lengths = [len(ids) for ids, _ in docs]
        assert batch["input_ids"].tolist() == [[token for ids, _ in docs for token in ids]]
        assert batch["labels"].tolist() == [[t for ids, prompt in docs for t in [-100] * prompt + ids[prompt:]]]
        assert batch["position_ids"].tolist() == [[at for length in lengths for at in range(length)]]
        assert batch["cu_seq_lens_q"].diff().tolist() == lengths
        assert batch["max_length_q"] == max(lengths)
        assert batch["seq_idx"][0].bincount().tolist() == lengths
        assert pickle.loads(pickle.dumps(collate)) == collate

    def test_other_releases_columns(self) -> None:
        expected = DataCollatorForPreferenceFlattening()(PAIRS)
        newer = [{key.replace("_input_ids", "_ids"): np.array(ids) for key, ids in pair.items()} for pair in PAIRS]
        for features in (newer, [with_labels(pair) for pair in PAIRS]):
            batch = DataCollatorForPreferenceFlattening()(features)
            assert batch.keys() == expected.keys()
            assert all(torch.equal(batch[key], expected[key]) for key in expected)

    @pytest.mark.parametrize(("mode", "kept"), [("keep_start", slice(3)), ("keep_end", slice(-3, None))])
    def test_truncated(self, mode: str, kept: slice) -> None:
        batch = DataCollatorForPreferenceFlattening(max_length=3, truncation_mode=mode)(PAIRS)
        docs = [(ids[kept], ([-100] * prompt + ids[prompt:])[kept]) for ids, prompt in documents(PAIRS)]
        assert batch["input_ids"].tolist() == [[token for ids, _ in docs for token in ids]]
        assert batch["labels"].tolist() == [[t for _, labels in docs for t in [-100, *labels[1:]]]]

    @pytest.mark.parametrize("share", [False, True])
    def test_reference_logps(self, share: bool) -> None:
        features = [{**pair, "ref_chosen_logps": -1.5, "ref_rejected_logps": torch.tensor(-2.0)} for pair in PAIRS]
        batch = DataCollatorForPreferenceFlattening(share_prompts=share)(features)
        assert batch["ref_chosen_logps"].tolist() == [-1.5] * 3
        assert batch["ref_rejected_logps"].tolist() == [-2.0] * 3
        assert batch["ref_rejected_logps"].dtype == torch.float32
        with pytest.raises(CollatorError, match="ref_chosen_logps is in only some examples"):
            DataCollatorForPreferenceFlattening()([features[0], PAIRS[1]])

    @pytest.mark.parametrize("share", [False, True])
    @pytest.mark.parametrize(
        ("features", "message"),
        [
            (
                [{"chosen_ids": [1], "rejected_ids": [1]}],
                "example 0: expected prompt_input_ids or prompt_ids, found chosen",
            ),
            ([{"prompt_ids": [1], "chosen_ids": [1]}], "expected rejected_input_ids or rejected_ids"),
            ([{"prompt_ids": [], "chosen_ids": [], "rejected_ids": [1]}], "example 0: no token in prompt and chosen"),
            ([{"prompt_ids": [1.5], "chosen_ids": [1], "rejected_ids": [1]}], "prompt_ids must be integers"),
            ([{"prompt_ids": [True], "chosen_ids": [1], "rejected_ids": [1]}], "integers, found booleans"),
            (
                [{"chosen_ids": [1], "chosen_labels": [0.5], "rejected_ids": [1], "rejected_labels": [1]}],
                "example 0: chosen_labels must be integers, found floats",
            ),
            ([], "empty batch"),
            (3, "expected a list of examples, found int"),
        ],
    )
    def test_errors(self, features: Any, message: str, share: bool) -> None:
        with pytest.raises(CollatorError, match=message):
            DataCollatorForPreferenceFlattening(share_prompts=share)(features)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_length": 0}, "max_length"),
            ({"truncation_mode": "middle"}, "truncation_mode"),
            (
                {"share_prompts": True, "return_seq_idx": True},
                "seq_idx cannot say that a segment continues another one",
            ),
        ],
    )
    def test_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(CollatorError, match=message):
            DataCollatorForPreferenceFlattening(**options)


class TestSharedPrompts:
    def test_row(self) -> None:
        batch = shared(FIVE[:3])
        assert batch["input_ids"].tolist() == [
            [5, 6, *(7, 8, 9), *(11, 12, 13, 14, 15, 16), *(20, 21, 22), *(23, 24), *(7, 10), *(11, 17, 18, 19)]
            + [23, 25, 26, 27, 28, 29, 30]
        ]
        assert batch["cu_seq_lens_q"].diff().tolist() == [2, 3, 6, 3, 2, 2, 4, 7]
        assert batch["segment_parents"].tolist() == [-1, 0, -1, -1, 3, 0, -1, 3]
        assert batch["segment_parents"].dtype == torch.int32
        assert batch["max_length_q"] == batch["max_length_k"] == 7
        collator = DataCollatorForPreferenceFlattening(share_prompts=True)
        assert pickle.loads(pickle.dumps(collator)) == collator
        assert "segment_parents" not in DataCollatorForPreferenceFlattening()(FIVE)

    @pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 16}, {"position_ids_start": 2}])
    @pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
    @pytest.mark.parametrize("max_length", [None, 1, 2, 3, 4, 5, 6, 8])
    @pytest.mark.parametrize("older", [False, True], ids=["", "trl-0.11"])
    def test_the_documents_are_those_without_sharing(
        self, options: Any, mode: str, max_length: int | None, older: bool
    ) -> None:
        options = {**options, "max_length": max_length, "truncation_mode": mode}
        pairs = [with_labels(pair) for pair in FIVE] if older else FIVE
        batch = shared(pairs, **options)
        without = DataCollatorForPreferenceFlattening(return_flash_attn_kwargs=True, **options)(pairs)
        found, wanted = documents_of(batch), documents_of(without)
        assert found[:10] == wanted[:10]
        assert batch["input_ids"].shape[1] % options.get("pad_to_multiple_of", 1) == 0
        for ids, positions, labels in found[10:]:
            assert "pad_to_multiple_of" in options and batch["segment_parents"][-1] == -1
            assert (set(ids), set(labels)) == ({0}, {-100})
            assert positions == list(range(len(positions)))
        assert (batch["labels"][0, batch["cu_seq_lens_q"][:-1].long()] == -100).all()
        assert batch["cu_seq_lens_q"].diff().min() > 0
        prompts = batch["segment_parents"].unique().numel() - 1
        assert prompts <= 3, "prompts of no token or one are not shared"
        assert prompts == 3 or max_length is not None

    def test_prompts_that_were_cut_differently_share_what_is_equal(self) -> None:
        pair = {"prompt_input_ids": [1, 2, 3, 4], "chosen_input_ids": [5], "rejected_input_ids": [6, 7]}
        assert shared([pair], max_length=5, truncation_mode="keep_end")["segment_parents"].tolist() == [-1, -1]
        same = {**pair, "prompt_input_ids": [9, 9, 9, 9]}
        batch = shared([same], max_length=5, truncation_mode="keep_end")
        assert batch["input_ids"].tolist() == [[9, 9, 9, 9, 5, 9, 6, 7]]
        assert batch["segment_parents"].tolist() == [-1, 0, 0]
        assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 2, 3, 4]]
        assert batch["labels"].tolist() == [[-100, -100, -100, -100, 5, -100, 6, 7]]

    def test_labels_of_older_releases_that_hide_other_parts_of_the_prompt(self) -> None:
        # Only what both documents hide is shared, so that each keeps its own labels.
        pair = {
            "chosen_input_ids": [1, 2, 3, 4, 5], "chosen_labels": [-100, -100, 3, 4, 5],
            "rejected_input_ids": [1, 2, 3, 4, 6], "rejected_labels": [-100, -100, -100, -100, 6],
        }  # fmt: skip
        batch = shared([pair])
        assert batch["cu_seq_lens_q"].tolist() == [0, 1, 5, 9]
        assert batch["labels"].tolist() == [[-100, -100, 3, 4, 5, -100, -100, -100, 6]]


class TestLogps:
    @pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2_moe", "jamba"])
    @pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"pad_to_multiple_of": 16}])
    def test_sums_dpo_and_gradients_are_those_of_padded_batches(self, family: str, options: dict[str, Any]) -> None:
        pairs = [*PAIRS, FIVE[4]]
        model, reference = tiny_models.build(family, "sdpa"), tiny_models.build(family, "eager")
        tiny_models.scale_up(reference, seed=1)
        batch = padded(pairs)
        call = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            of_reference = row_logps(reference(**call).logits, batch["labels"])
        expected = row_logps(model(**call).logits, batch["labels"])
        assert expected.abs().min() > 1
        loss = dpo_loss(expected, of_reference)
        wanted = gradients(model, loss)

        fa2patch.apply(model)
        fa2patch.apply(reference)
        for share, tokens in ((False, 44), (True, 44 - 2 - 3 - 2)):  # three prompts, all but their last token
            row = DataCollatorForPreferenceFlattening(share_prompts=share, **options)(pairs)
            real = row.get("real_tokens")
            assert (row["input_ids"].numel() if real is None else int(real.sum())) == tokens
            labels = row.pop("labels")
            with torch.no_grad():
                packed_reference, _ = per_document_logps(reference(**row).logits, labels, where(row), real)
            sums, counts = per_document_logps(model(**row).logits, labels, where(row), real)
            assert sums.dtype == torch.float32
            assert counts.tolist() == [2, 5, 1, 2, 1, 3, 6, 2]
            assert torch.allclose(sums, expected, rtol=1e-5, atol=1e-4)
            ours = dpo_loss(sums, packed_reference)
            assert torch.allclose(ours, loss, rtol=1e-5)
            assert_near(gradients(model, ours), wanted)

    def test_a_documents_first_label_counts_for_nothing(self) -> None:
        logits = torch.zeros(1, 4, 8)
        labels = torch.tensor([[1, 2, 3, 4]])
        sums, counts = per_document_logps(logits, labels, torch.tensor([[0, 1, 0, 1]]))
        assert counts.tolist() == [1, 1]
        assert torch.allclose(sums, torch.tensor([0.125, 0.125]).log())

    def test_several_rows_and_nothing_to_learn(self) -> None:
        logits = torch.randn(2, 3, 8).bfloat16().requires_grad_()
        labels = torch.tensor([[1, 2, -100], [-100, -100, -100]])
        real = torch.ones_like(labels)
        sums, counts = per_document_logps(logits, labels, torch.tensor([[0, 1, 0], [0, 1, 2]]), real)
        assert counts.tolist() == [1, 0, 0]
        assert torch.equal(sums[1:], torch.zeros(2))
        assert sums.dtype == torch.float32
        sums.sum().backward()
        assert (logits.grad[0, 0] != 0).all()
        assert logits.grad.flatten(0, 1)[1:].abs().max() == 0

    def test_shapes(self) -> None:
        with pytest.raises(BadBatch, match=r"found \[1, 4, 8\] and \[1, 3\]"):
            per_document_logps(torch.zeros(1, 4, 8), torch.zeros(1, 3).long(), torch.arange(4)[None])
        with pytest.raises(BadBatch, match=r"expected position_ids \[1, 4\], found \[1, 3\]"):
            per_document_logps(torch.zeros(1, 4, 8), torch.zeros(1, 4).long(), torch.arange(3)[None])

    def test_a_shared_segments_labels_belong_to_every_document_below_it(self) -> None:
        # The tree: 0 is continued by 1 and 2, 2 by 3 and 4; 5 is alone.
        lengths, parents = [3, 2, 2, 2, 3, 2], [-1, 0, 0, 2, 2, -1]
        cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        labels = torch.tensor([[-100, 1, 2, -100, 3, -100, 4, -100, 5, -100, -100, 6, 7, 1]])
        logits = torch.randn(1, 14, 8, requires_grad=True)
        found = fa2patch.Boundaries(cu, 3, parents=torch.tensor(parents, dtype=torch.int32))
        sums, counts = per_document_logps(logits, labels, found)
        logps = logits[0].log_softmax(-1)
        at = {1: [1, 2, 4], 3: [1, 2, 6, 8], 4: [1, 2, 6, 11], 5: [13]}
        wanted = torch.stack(
            [sum((logps[t - 1, labels[0, t]] for t in tokens), logps.new_zeros(())) for tokens in at.values()]
        )
        assert counts.tolist() == [3, 4, 4, 1]
        assert torch.allclose(sums, wanted, atol=1e-6)
        of_shared = torch.autograd.grad(sums.sum(), logits)[0][0, 0]
        of_one = torch.autograd.grad(logps[0, 1], logits)[0][0, 0]
        assert torch.allclose(of_shared, 3 * of_one, atol=1e-6), "three documents begin with it"
        labels[0, 3] = 5
        with pytest.raises(BadBatch, match="first token of a segment with a parent has a label"):
            per_document_logps(logits, labels, found)
