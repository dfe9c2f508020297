"""Preference pairs whose prompts are in the row once: the same documents, sums, losses and gradients."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch

import fa2patch
from compat_matrix import tiny_models
from fa2patch.errors import BadBatch, CollatorError
from fa2patch.preference import DataCollatorForPreferenceFlattening, per_document_logps

PAIRS = [
    {"prompt_input_ids": [5, 6, 7], "chosen_input_ids": [8, 9], "rejected_input_ids": [10]},
    {"prompt_input_ids": [11], "chosen_input_ids": [12, 13, 14, 15, 16], "rejected_input_ids": [17, 18, 19]},
    {"prompt_input_ids": [20, 21, 22, 23], "chosen_input_ids": [24], "rejected_input_ids": [25, 26, 27, 28, 29, 30]},
    {"prompt_input_ids": [], "chosen_input_ids": [31, 34, 32], "rejected_input_ids": [31, 34, 33]},
    {"prompt_input_ids": [40, 41, 42], "chosen_input_ids": [43, 44], "rejected_input_ids": [43, 45]},
]
"""Prompts of three, one, four and no tokens, and completions that begin with the same tokens."""


def collate(pairs: Any, **options: Any) -> dict[str, Any]:
    return DataCollatorForPreferenceFlattening(share_prompts=True, **options)(pairs)


def where(batch: dict[str, Any]) -> fa2patch.Boundaries:
    return fa2patch.Boundaries(batch["cu_seq_lens_q"], batch["max_length_q"], parents=batch.get("segment_parents"))


def documents(batch: dict[str, Any]) -> list[tuple[list[int], list[int], list[int]]]:
    """Return the ids, position ids and labels of each document, put together from its path."""
    columns = [batch[name][0] for name in ("input_ids", "position_ids", "labels")]
    found = where(batch)
    if found.tree is None:
        return list(zip(*([piece.tolist() for piece in column.split(list(found.lengths))] for column in columns)))
    tree = found.tree
    return [tuple(tree.along(column, leaf).tolist() for column in columns) for leaf in tree.leaves]


def test_row() -> None:
    batch = collate(PAIRS[:3])
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
    assert "segment_parents" not in DataCollatorForPreferenceFlattening()(PAIRS)


@pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 16}, {"position_ids_start": 2}])
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("max_length", [None, 1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("older", [False, True], ids=["", "trl-0.11"])
def test_the_documents_are_those_without_sharing(options: Any, mode: str, max_length: int | None, older: bool) -> None:
    options = {**options, "max_length": max_length, "truncation_mode": mode}
    pairs = [with_labels(pair) for pair in PAIRS] if older else PAIRS
    batch = collate(pairs, **options)
    without = DataCollatorForPreferenceFlattening(return_flash_attn_kwargs=True, **options)(pairs)
    found, wanted = documents(batch), documents(without)
    assert found[:10] == wanted[:10]
    assert batch["input_ids"].shape[1] % options.get("pad_to_multiple_of", 1) == 0
    for ids, positions, labels in found[10:]:
        assert "pad_to_multiple_of" in options and batch["segment_parents"][-1] == -1
        assert (set(ids), set(labels)) == ({0}, {-100})
        assert positions == list(range(len(positions)))
    assert (batch["labels"][0, batch["cu_seq_lens_q"][:-1].long()] == -100).all()
    assert batch["cu_seq_lens_q"].diff().min() > 0
    shared = batch["segment_parents"].unique().numel() - 1
    assert shared <= 3, "prompts of no token or one are not shared"
    assert shared == 3 or max_length is not None


def with_labels(pair: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return a pair as TRL up to 0.11 makes it: the ids include the prompt, and labels hide it."""
    prompt, made = pair["prompt_input_ids"], {}
    for side in ("chosen", "rejected"):
        ids = pair[f"{side}_input_ids"]
        made.update({f"{side}_input_ids": prompt + ids, f"{side}_labels": [-100] * len(prompt) + ids})
    return made


def test_prompts_that_were_cut_differently_share_what_is_equal() -> None:
    pair = {"prompt_input_ids": [1, 2, 3, 4], "chosen_input_ids": [5], "rejected_input_ids": [6, 7]}
    assert collate([pair], max_length=5, truncation_mode="keep_end")["segment_parents"].tolist() == [-1, -1]
    same = {**pair, "prompt_input_ids": [9, 9, 9, 9]}
    batch = collate([same], max_length=5, truncation_mode="keep_end")
    assert batch["input_ids"].tolist() == [[9, 9, 9, 9, 5, 9, 6, 7]]
    assert batch["segment_parents"].tolist() == [-1, 0, 0]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 2, 3, 4]]
    assert batch["labels"].tolist() == [[-100, -100, -100, -100, 5, -100, 6, 7]]


def test_labels_of_older_releases_that_hide_other_parts_of_the_prompt() -> None:
    """Only what both documents hide is shared, so that each keeps its own labels."""
    pair = {
        "chosen_input_ids": [1, 2, 3, 4, 5], "chosen_labels": [-100, -100, 3, 4, 5],
        "rejected_input_ids": [1, 2, 3, 4, 6], "rejected_labels": [-100, -100, -100, -100, 6],
    }  # fmt: skip
    batch = collate([pair])
    assert batch["cu_seq_lens_q"].tolist() == [0, 1, 5, 9]
    assert batch["labels"].tolist() == [[-100, -100, 3, 4, 5, -100, -100, -100, 6]]


def test_reference_logps_and_errors() -> None:
    features = [{**pair, "ref_chosen_logps": -1.5, "ref_rejected_logps": -2.0} for pair in PAIRS]
    assert collate(features)["ref_rejected_logps"].tolist() == [-2.0] * 5
    with pytest.raises(CollatorError, match="seq_idx cannot say that a segment continues another one"):
        DataCollatorForPreferenceFlattening(share_prompts=True, return_seq_idx=True)
    with pytest.raises(CollatorError, match="empty batch"):
        collate([])
    with pytest.raises(CollatorError, match="example 0: no token in prompt and chosen"):
        collate([{"prompt_ids": [], "chosen_ids": [], "rejected_ids": [1]}])


def row_logps(model: Any, pairs: Any) -> torch.Tensor:
    """Return the completion's sum of log-probabilities of each document, in a padded batch, as TRL computes it."""
    docs = [
        (pair["prompt_input_ids"] + pair[f"{side}_input_ids"], len(pair["prompt_input_ids"]))
        for side in ("chosen", "rejected")
        for pair in pairs
    ]
    length = max(len(ids) for ids, _ in docs)
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in docs])
    mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in docs])
    learned = torch.tensor([[prompt <= at < len(ids) for at in range(1, length)] for ids, prompt in docs])
    logps = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    return (logps.gather(2, ids[:, 1:, None])[..., 0] * learned).sum(-1)


def dpo_loss(logps: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the DPO loss, equation 7 of https://arxiv.org/abs/2305.18290."""
    chosen, rejected = (0.1 * (logps - reference)).chunk(2)
    return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2_moe", "jamba"])
@pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 16}], ids=["", "multiple"])
def test_dpo_is_that_without_sharing_and_that_of_padded_batches(family: str, options: dict[str, Any]) -> None:
    pairs = [*PAIRS[:3], PAIRS[4]]
    padded, reference = tiny_models.build(family, "sdpa"), tiny_models.build(family, "sdpa")
    tiny_models.scale_up(reference, seed=1)
    model = copy.deepcopy(padded)
    fa2patch.apply(model)
    with torch.no_grad():
        of_reference = row_logps(reference, pairs)
    loss = dpo_loss(row_logps(padded, pairs), of_reference)
    wanted, tokens = gradients(padded, loss), {}
    for shared in (False, True):
        batch = DataCollatorForPreferenceFlattening(return_flash_attn_kwargs=True, share_prompts=shared)(pairs)
        tokens[shared] = batch["input_ids"].shape[1]
        if options:
            batch = DataCollatorForPreferenceFlattening(return_flash_attn_kwargs=True, share_prompts=shared, **options)(
                pairs
            )
        labels = batch.pop("labels")
        sums, counts = per_document_logps(model(**batch).logits, labels, where(batch), batch.get("real_tokens"))
        assert counts.tolist() == [2, 5, 1, 2, 1, 3, 6, 2]
        ours = dpo_loss(sums, of_reference)
        assert torch.allclose(ours, loss, rtol=1e-5)
        found = gradients(model, ours)
        scale = max(float(value.abs().max()) for value in wanted.values())
        assert found.keys() == wanted.keys()
        for name, expected in wanted.items():
            assert (found[name] - expected).abs().max() <= 1e-5 * scale, name
    assert tokens == {False: 44, True: 44 - 2 - 3 - 2}, "three prompts, all but their last token"


def test_a_shared_segments_labels_belong_to_every_document_below_it() -> None:
    """The tree: 0 is continued by 1 and 2, 2 by 3 and 4; 5 is alone."""
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
