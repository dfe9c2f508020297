"""TRL's own collator, ``padding_free`` and ``packing``, on a patched model."""

import inspect

import pytest
import torch
from stage import IGNORED, compared, losses_of, tiny_llama

import fa2patch
from fa2patch.proof.inputs import slices_of

pytestmark = pytest.mark.slow
BOUND = 1e-3
ANSWER = "\n### Answer:"


@pytest.fixture
def trl(finding, stage):  # a skip is a finding, too, so finding has to be there before it
    if not stage.trl:
        pytest.skip("no TRL here")
    return pytest.importorskip("trl")


def shapes(batch):
    # Other values than tensors are given as text.
    return {
        name: f"{str(value.dtype).replace('torch.', '')} {list(value.shape)}" if torch.is_tensor(value) else str(value)
        for name, value in batch.items()
    }


def test_completion_collator(trl, stage, finding, steps=20):
    kind = getattr(trl, "DataCollatorForCompletionOnlyLM", None)
    if kind is None or "padding_free" not in inspect.signature(kind).parameters:
        pytest.skip("this TRL has none any more" if kind is None else "this TRL's has no padding_free yet")
    from datasets import Dataset

    template = stage.tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    texts = [f"{one[: len(one) // 4]}{ANSWER}{one[len(one) // 4 :]}" for one in stage.train if len(one) < 200]

    def run(padding_free):
        collator = kind(template, tokenizer=stage.tokenizer, padding_free=padding_free)
        data = Dataset.from_dict({"text": texts})
        return stage.run(tiny_llama(), collator, patched=padding_free, steps=steps, train_dataset=data)

    reference, flat = run(False), run(True)
    finding.update(steps=steps, batch=shapes(flat["batch"]), **compared(flat, reference))
    assert finding["largest_relative_difference"] < BOUND and flat["seen"] == reference["seen"]
    fa2patch.verify(flat["model"], batch=flat["batch"], max_documents=3)


@pytest.mark.parametrize("option", [pytest.param(name, id=f"own_{name}") for name in ("padding_free", "packing")])
def test_sftconfig(trl, stage, finding, option, steps=10):
    # Records which batch SFTConfig's own packing passes to the model, and what fa2patch does with it. If nothing in the
    # batch says where documents start, they cannot be isolated, and ``verify`` has to say so.
    config = getattr(trl, "SFTConfig", None)
    if config is None or option not in inspect.signature(config).parameters:
        pytest.skip(f"this TRL's SFTConfig has no {option}")
    for name in ("as_sdpa", "named_flash_attention_2"):
        model = tiny_llama()
        fa2patch.apply(model)
        if name != "as_sdpa":
            model.config._attn_implementation = "flash_attention_2"  # TRL looks only at the config
        length = {"max_length": None} if option == "padding_free" else {}  # TRL 1.16 requires it
        trainer = stage.trainer(model, None, max_steps=steps, **{option: True}, **length)
        batch = dict(next(iter(trainer.get_train_dataloader())))
        found = finding[name] = {"batch": shapes(batch)}
        try:
            verification = fa2patch.verify(model, batch=batch, max_documents=3)
            found.update(verify="isolated", documents=len(verification.documents))
        except fa2patch.Fa2PatchError as error:
            found.update(verify=type(error).__name__, said=error.message)
        trainer.train()
        losses = losses_of(trainer)
        assert len(losses) == steps
        if {"position_ids", "cu_seq_lens_q", "seq_idx"} & {*batch}:
            found.update(by_hand(batch, losses[0]))
            assert found["verify"] == "isolated" and found["off_by"] < BOUND
        else:
            assert found["verify"] == "BadBatch"


@torch.no_grad()
def by_hand(batch, loss):
    # The untrained model's loss on the batch's documents, each run alone, is compared with the trainer's first loss.
    # The batch is the trainer's first, because its sampler is seeded. TRL keeps every document's first label, which
    # nothing predicts; Trainer 4.46 to 4.57 divides by those labels too.
    model = tiny_llama().eval()
    total, trained = 0.0, 0
    for span in slices_of({name: value for name, value in batch.items() if name != "labels"}):
        ids, labels = span.of(batch["input_ids"])[None], span.of(batch["labels"])[1:]
        logits = model(input_ids=ids).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED))
        trained += int((labels != IGNORED).sum())
    means = {"tokens trained on": total / trained, "labels": total / int((batch["labels"] != IGNORED).sum())}
    divided_by = min(means, key=lambda name: abs(means[name] - loss))
    return {"by_hand": means[divided_by], "divided_by": divided_by, "off_by": abs(loss / means[divided_by] - 1)}
