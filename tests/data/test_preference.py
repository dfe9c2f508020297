"""Preference pairs in a packed row: the same log-probabilities and gradients as in a padded batch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import fa2patch
from compat_matrix import tiny_models
from fa2patch.errors import BadBatch, CollatorError, NotAModel
from fa2patch.patch.padding import pack_padded_batches
from fa2patch.preference import DataCollatorForPreferenceFlattening, per_document_logps

PAIRS = [
    {"prompt_input_ids": [5, 6, 7], "chosen_input_ids": [8, 9], "rejected_input_ids": [10]},
    {"prompt_input_ids": [11], "chosen_input_ids": [12, 13, 14, 15, 16], "rejected_input_ids": [17, 18, 19]},
    {"prompt_input_ids": [20, 21, 22, 23], "chosen_input_ids": [24], "rejected_input_ids": [25, 26, 27, 28, 29, 30]},
]


def documents(pairs: list[dict[str, Any]]) -> list[tuple[list[int], int]]:
    """Return the ids and the prompt's length of each of the 2n documents."""
    return [
        (pair["prompt_input_ids"] + pair[f"{side}_input_ids"], len(pair["prompt_input_ids"]))
        for side in ("chosen", "rejected")
        for pair in pairs
    ]


def padded(pairs: list[dict[str, Any]], left: bool = False) -> dict[str, torch.Tensor]:
    docs = documents(pairs)
    length = max(len(ids) for ids, _ in docs)
    batch = {name: torch.zeros(len(docs), length, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    batch["labels"] = torch.full((len(docs), length), -100)
    for row, (ids, prompt) in enumerate(docs):
        at = length - len(ids) if left else 0
        batch["input_ids"][row, at : at + len(ids)] = torch.tensor(ids)
        batch["attention_mask"][row, at : at + len(ids)] = 1
        batch["labels"][row, at + prompt : at + len(ids)] = torch.tensor(ids[prompt:])
    return batch


def row_logps(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each row of a padded batch, as TRL computes it."""
    target = labels[:, 1:]
    logps = logits[:, :-1].log_softmax(-1).gather(2, target.clamp(min=0)[..., None])[..., 0]
    return (logps * (target != -100)).sum(-1)


def dpo_loss(logps: torch.Tensor, reference: torch.Tensor, beta: float = 0.1) -> torch.Tensor:
    """Return the DPO loss, equation 7 of https://arxiv.org/abs/2305.18290."""
    ratio = logps - reference
    n = len(ratio) // 2
    return -torch.nn.functional.logsigmoid(beta * (ratio[:n] - ratio[n : 2 * n])).mean()


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    scale = max(float(value.abs().max()) for value in theirs.values())
    for name, expected in theirs.items():
        assert (ours[name] - expected).abs().max() <= 2e-5 * scale, name


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
        older = [dict(pair) for pair in PAIRS]
        for pair in older:
            for side in ("chosen", "rejected"):
                prompt, ids = pair["prompt_input_ids"], pair[f"{side}_input_ids"]
                pair[f"{side}_labels"] = [-100] * len(prompt) + ids
                pair[f"{side}_input_ids"] = prompt + ids
        for features in (newer, older):
            batch = DataCollatorForPreferenceFlattening()(features)
            assert batch.keys() == expected.keys()
            assert all(torch.equal(batch[key], expected[key]) for key in expected)

    @pytest.mark.parametrize(("mode", "kept"), [("keep_start", slice(3)), ("keep_end", slice(-3, None))])
    def test_truncated(self, mode: str, kept: slice) -> None:
        batch = DataCollatorForPreferenceFlattening(max_length=3, truncation_mode=mode)(PAIRS)
        docs = [(ids[kept], ([-100] * prompt + ids[prompt:])[kept]) for ids, prompt in documents(PAIRS)]
        assert batch["input_ids"].tolist() == [[token for ids, _ in docs for token in ids]]
        assert batch["labels"].tolist() == [[t for _, labels in docs for t in [-100, *labels[1:]]]]

    def test_reference_logps(self) -> None:
        features = [{**pair, "ref_chosen_logps": -1.5, "ref_rejected_logps": torch.tensor(-2.0)} for pair in PAIRS]
        batch = DataCollatorForPreferenceFlattening()(features)
        assert batch["ref_chosen_logps"].tolist() == [-1.5] * 3
        assert batch["ref_rejected_logps"].dtype == torch.float32
        with pytest.raises(CollatorError, match="ref_chosen_logps is in only some examples"):
            DataCollatorForPreferenceFlattening()([features[0], PAIRS[1]])

    @pytest.mark.parametrize(
        ("feature", "message"),
        [
            (
                {"chosen_ids": [1], "rejected_ids": [1]},
                "example 0: expected prompt_input_ids or prompt_ids, found chosen",
            ),
            ({"prompt_ids": [1], "chosen_ids": [1]}, "expected rejected_input_ids or rejected_ids"),
            ({"prompt_ids": [], "chosen_ids": [], "rejected_ids": [1]}, "no token in prompt and chosen"),
            ({"prompt_ids": [1.5], "chosen_ids": [1], "rejected_ids": [1]}, "prompt_ids must be integers"),
        ],
    )
    def test_errors(self, feature: dict[str, Any], message: str) -> None:
        with pytest.raises(CollatorError, match=message):
            DataCollatorForPreferenceFlattening()([feature])

    def test_options(self) -> None:
        with pytest.raises(CollatorError, match="max_length"):
            DataCollatorForPreferenceFlattening(max_length=0)
        with pytest.raises(CollatorError, match="truncation_mode"):
            DataCollatorForPreferenceFlattening(truncation_mode="middle")
        with pytest.raises(CollatorError, match="empty batch"):
            DataCollatorForPreferenceFlattening()([])


class TestLogps:
    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    @pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"pad_to_multiple_of": 16}])
    def test_values_and_gradients_are_the_padded_runs(self, family: str, options: dict[str, Any]) -> None:
        model, reference = tiny_models.build(family, "sdpa"), tiny_models.build(family, "eager")
        tiny_models.scale_up(reference, seed=1)
        batch = padded(PAIRS)
        call = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            of_reference = row_logps(reference(**call).logits, batch["labels"])
        expected = row_logps(model(**call).logits, batch["labels"])
        loss = dpo_loss(expected, of_reference)
        wanted = gradients(model, loss)

        fa2patch.apply(model)
        fa2patch.apply(reference)
        row = DataCollatorForPreferenceFlattening(**options)(PAIRS)
        labels = row.pop("labels")
        where = fa2patch.Boundaries(row["cu_seq_lens_q"], row["max_length_q"]) if options.get(
            "return_flash_attn_kwargs"
        ) else row["position_ids"]  # fmt: skip
        real = row.get("real_tokens")
        with torch.no_grad():
            packed_reference, _ = per_document_logps(reference(**row).logits, labels, where, real)
        sums, counts = per_document_logps(model(**row).logits, labels, where, real)
        assert sums.dtype == torch.float32
        assert counts.tolist() == [2, 5, 1, 1, 3, 6]
        assert torch.allclose(sums, expected, rtol=1e-5, atol=1e-4)
        assert expected.abs().min() > 1
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


class TestPaddedBatches:
    """A padded batch is computed packed, and its outputs are padded again."""

    @pytest.fixture
    def model(self) -> Any:
        return tiny_models.build("llama", "sdpa")

    @staticmethod
    def computed(model: Any) -> list[int]:
        """Return a list to which each forward adds the number of tokens that the first layer computes."""
        found: list[int] = []

        def note(module: Any, args: Any, kwargs: Any) -> None:
            found.append((args[0] if args else kwargs["hidden_states"])[..., 0].numel())

        model.model.layers[0].register_forward_pre_hook(note, with_kwargs=True)
        if fa2patch.status(model):
            fa2patch.apply(model, prove=False)  # the hook only looks, and a proof would run it
        return found

    @pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
    def test_same_logits_loss_and_gradients(self, model: Any, left: bool) -> None:
        batch = padded(PAIRS, left)
        before = model(**batch)
        wanted = gradients(model, before.loss)
        fa2patch.apply(model)
        seen = self.computed(model)
        with pack_padded_batches(model):
            after = model(**batch, output_hidden_states=True)
            real = batch["attention_mask"] != 0
            assert seen == [int(real.sum())]
            assert after.logits.shape == before.logits.shape
            assert torch.allclose(after.logits[real], before.logits[real], atol=1e-4)
            assert torch.allclose(after.loss, before.loss, rtol=1e-5)
            assert {tuple(hidden.shape[:2]) for hidden in after.hidden_states} == {tuple(real.shape)}
            assert_near(gradients(model, after.loss), wanted)
            tuples = model(**batch, return_dict=False)
            assert torch.equal(tuples[1], after.logits)
        assert torch.equal(model(**batch).logits, before.logits)
        assert seen[-1] == real.numel()

    def test_mixture_of_experts_router_logits(self) -> None:
        """Upstream takes the batch's mask for the balancing loss, so router logits come back padded too."""
        model = tiny_models.build("mixtral", "sdpa")
        batch = padded(PAIRS)
        before = model(**batch, output_router_logits=True)
        fa2patch.apply(model)
        pack_padded_batches(model)
        after = model(**batch, output_router_logits=True)
        assert torch.allclose(after.aux_loss, before.aux_loss, rtol=1e-5)
        assert torch.allclose(after.loss, before.loss, rtol=1e-5)

    def test_what_is_left_alone(self, model: Any) -> None:
        fa2patch.apply(model)
        seen = self.computed(model)
        batch = padded(PAIRS)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        gaps = mask.clone()
        gaps[0, 1] = 0
        calls = [
            {"input_ids": ids},
            {"input_ids": ids, "attention_mask": torch.ones_like(mask)},
            {"input_ids": ids, "attention_mask": gaps},
            {"input_ids": ids, "attention_mask": mask, "use_cache": True},
        ]
        expected = [model(**call).logits for call in calls]
        seen.clear()
        pack_padded_batches(model)
        for call, before in zip(calls, expected):
            assert torch.equal(model(**call).logits, before)
        assert seen == [ids.numel()] * len(calls)
        row = DataCollatorForPreferenceFlattening()(PAIRS)
        assert model(**row).logits.shape[:2] == row["input_ids"].shape

    def test_generate(self, model: Any) -> None:
        batch = {name: padded(PAIRS, left=True)[name] for name in ("input_ids", "attention_mask")}
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(**batch, **options)
        fa2patch.apply(model)
        pack_padded_batches(model)
        for more in ({}, {"use_cache": False}):
            assert torch.equal(model.generate(**batch, **options, **more), expected)

    def test_classifier_reverted_model_and_copy(self) -> None:
        from classification_cases import build

        model = build("llama", "SequenceClassification", num_labels=1)
        batch = {name: padded(PAIRS)[name] for name in ("input_ids", "attention_mask")}
        before = model(**batch).logits
        patch = fa2patch.apply(model)
        pack_padded_batches(model)
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        seen = self.computed(copied)
        assert torch.allclose(copied(**batch).logits, before, atol=1e-4)
        assert seen == [int(batch["attention_mask"].sum())]
        patch.revert()
        assert torch.equal(model(**batch).logits, before)

    def test_under_peft_and_checkpointing(self, model: Any) -> None:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        wrapped = peft.get_peft_model(model, config)
        batch = padded(PAIRS)
        before = wrapped(**batch)
        wanted = gradients(wrapped, before.loss)
        fa2patch.apply(wrapped)
        pack_padded_batches(wrapped)
        seen = self.computed(model)
        wrapped.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        wrapped.train()
        assert_near(gradients(wrapped, wrapped(**batch).loss), wanted)
        assert set(seen) == {int(batch["attention_mask"].sum())}

    def test_not_patched(self, model: Any) -> None:
        with pytest.raises(NotAModel, match="expected a patched model"):
            pack_padded_batches(model)
