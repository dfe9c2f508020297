"""Each of the small examples trains with the same losses as with padding and without fa2patch.
The slow tests run the TRL examples in an environment for each version, and those of two processes under torchrun.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fa2patch

for needed in ("transformers", "accelerate", "peft", "tokenizers", "matplotlib", "rich", "psutil"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parents[2]
STEPS = 5
# The tolerance is relative. After five steps rounding is 1e-7, and a leak 1e-3 (``test_a_leak_would_be_seen``).
SAME = 1e-5

# Versions that worked together when they were new. Newer pyarrow needs NumPy 2, which resolvers do not know.
OLD_NUMPY = ("numpy==1.26.4", "pyarrow==15.0.2", "pandas==2.2.3")
TRL = {
    "0.7.11": ("4.36.2", "accelerate==0.25.0", "peft==0.7.1", "datasets==2.16.1", *OLD_NUMPY),
    "0.9.6": ("4.42.4", "accelerate==0.32.1", "peft==0.11.1", "datasets==2.20.0", *OLD_NUMPY),
    "0.12.2": ("4.46.3", "accelerate==1.1.1", "peft==0.13.2", "datasets==3.1.0"),
    "0.19.1": ("4.53.3", "accelerate==1.8.1", "peft==0.16.0", "datasets==3.6.0"),
    "1.16.0": ("5.23.0", "accelerate==1.15.0", "peft==0.21.2", "datasets==5.2.0"),
}
OLD_TRL = ("0.7.11", "0.9.6")


def padding(**options):
    # It replaces the flattening collator: one row for each document, padded to the longest.

    def collate(examples):
        from torch.nn.utils.rnn import pad_sequence

        ids = [torch.tensor(example["input_ids"]) for example in examples]
        labels = [torch.tensor([-100, *example.get("labels", example["input_ids"])[1:]]) for example in examples]
        return {
            "input_ids": pad_sequence(ids, batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        }

    return collate


def leaking(**options):
    # It replaces the flattening collator: a packed row without position ids.
    collate = fa2patch.data.collators.DataCollatorWithFlattening(return_position_ids=False)
    return lambda examples: {key: value for key, value in collate(examples).items() if key in ("input_ids", "labels")}


def losses(found) -> list[float]:
    # An example's ``main`` returned the losses, or its Trainer logged them.
    return found if isinstance(found, list) else [entry["loss"] for entry in found.state.log_history if "loss" in entry]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # SAME is for training on a CPU


def train(module: ModuleType, output: Path, *options: str) -> list[float]:
    return losses(module.main(["--steps", str(STEPS), "--output", str(output), *options]))


def instead(monkeypatch: pytest.MonkeyPatch, collator: Callable) -> None:
    """Make the examples use this collator and not patch the model."""
    monkeypatch.setattr(fa2patch, "DataCollatorWithFlattening", collator)
    monkeypatch.setattr(fa2patch, "apply", lambda model: None)


@pytest.mark.parametrize(
    "name", ["trainer", *(pytest.param(name, marks=pytest.mark.slow) for name in ("peft_lora", "accelerate_loop"))]
)
def test_trains_as_with_padding(example, name, monkeypatch, tmp_path):
    packed = train(example(name), tmp_path)
    assert len(packed) == STEPS and packed[-1] < packed[0], "something is learnt"
    instead(monkeypatch, padding)
    assert packed == pytest.approx(train(example(name), tmp_path), rel=SAME)


def test_a_leak_would_be_seen(example, monkeypatch, tmp_path):
    instead(monkeypatch, padding)
    padded = train(example("accelerate_loop"), tmp_path)
    instead(monkeypatch, leaking)
    leaked = train(example("accelerate_loop"), tmp_path)
    assert max(abs(one - other) / one for one, other in zip(padded, leaked)) > 10 * SAME


def test_model_and_data_by_option(example, tmp_path):
    small = example("small")
    texts = small.docstrings()
    model, tokenizer = small.load(small.options(None, []), texts)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in texts]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    named = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl")]
    trained = train(example("accelerate_loop"), tmp_path, *named)
    at_first = train(example("accelerate_loop"), tmp_path)[0]
    assert trained[0] == pytest.approx(at_first, rel=SAME), "the same weights, the same documents"


def test_prompts_are_not_learnt(example):
    small = example("small")
    tokenizer = small.tiny_tokenizer(small.docstrings())
    with_prompt, without = small.tokenized([("def f():\n", "Say so."), ("", "Say so.")], tokenizer)
    learnt = [label for label in with_prompt["labels"] if label != -100]
    assert tokenizer.decode(learnt) == "Say so." + tokenizer.eos_token
    assert without["labels"] == without["input_ids"] == learnt


def test_preferences_are_learnt_as_from_each_document_alone(example, monkeypatch, tmp_path):
    dpo = example("dpo")
    packed = train(dpo, tmp_path)
    assert packed[0] == pytest.approx(math.log(2)), "at first the model is the reference"
    assert packed[-1] < packed[0] - 0.01

    def alone(model, batch):
        lengths = fa2patch.boundaries(batch["position_ids"]).lengths
        documents = zip(batch["input_ids"][0].split(lengths), batch["labels"][0].split(lengths))
        sums = []
        for ids, labels in documents:
            logps = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            learnt = labels[1:] != -100
            sums.append(logps[learnt].gather(1, labels[1:][learnt, None]).sum())
        return torch.stack(sums)

    monkeypatch.setattr(dpo, "logps", alone)
    monkeypatch.setattr(fa2patch, "apply", lambda model: None)
    assert packed == pytest.approx(train(dpo, tmp_path), rel=10 * SAME), "sums of log-probabilities are large"


@pytest.mark.slow
def test_completions_of_one_prompt_are_learnt_as_from_padded_batches(example, monkeypatch, tmp_path, capsys):
    grpo = example("grpo")
    shared = train(grpo, tmp_path)
    said = capsys.readouterr().out
    padded, once = re.findall(r"(-?\d+\.\d+) (?:padded|with each prompt once)", said)
    assert float(once) == pytest.approx(float(padded), abs=2e-6) and float(once) != 0
    tokens = re.findall(r"(\d+) tokens instead of (\d+)", said)
    assert len(tokens) == STEPS and all(int(after) < int(before) / 2 for after, before in tokens)

    def alone(model, row, prompts):
        sequences = [row.batch["input_ids"][0, places].tolist() for places in row.indices]
        return padded_logps(model, sequences, prompts)

    padded_logps = inspect.unwrap(grpo.padded_logps)
    monkeypatch.setattr(grpo, "logps", alone)
    monkeypatch.setattr(fa2patch, "apply", lambda model: None)
    assert shared == pytest.approx(train(grpo, tmp_path), abs=10 * SAME)


@pytest.mark.slow
def test_two_processes_of_fsdp_train_as_one(printed):
    def run(processes: int) -> list[float]:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        said = printed(*launch, ROOT / "examples/fsdp.py", "--steps", STEPS, OMP_NUM_THREADS="1")
        return [float(line.rpartition(" ")[2]) for line in said.splitlines() if line.startswith("step")]

    alone, together = run(1), run(2)
    assert len(alone) == STEPS and alone[-1] < alone[0]
    assert together == pytest.approx(alone, rel=SAME)


@pytest.mark.slow
def test_a_budget_of_tokens_trains_as_padding_does(example, tmp_path):
    found = example("token_budget").main(["--steps", "3", "--output", str(tmp_path)])
    for one in found.values():
        assert one["losses"] == pytest.approx(found["padded"]["losses"], rel=SAME)
    assert found["half a batch"]["passes"] > found["one batch"]["passes"] >= found["two batches"]["passes"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("version", TRL)
def test_sft_trains_as_with_padding(printed, version, tmp_path):
    from compat_matrix import environments

    transformers, *pins = TRL[version]
    pins = (f"trl=={version}", *pins, "matplotlib", "rich")
    wanted = environments.Version(f"examples-trl-{version}", transformers, "3.11", "2.13.0", pins)
    python = environments.make(wanted, ROOT / ".compat")
    script = "sft_old" if version in OLD_TRL else "sft"
    with environments.only_our_packages() as packages:
        path = os.pathsep.join(map(str, (packages, ROOT / "examples")))
        arguments = ["-c", DRIVER, script, "--steps", STEPS, "--output", tmp_path]
        said = printed(*arguments, python=python, PYTHONPATH=path, OMP_NUM_THREADS="1")
    packed, padded = json.loads(said.splitlines()[-1])
    assert len(packed) == STEPS and packed[-1] < packed[0]
    assert packed == pytest.approx(padded, abs=2e-4), "these Trainers log four digits"


# The Python of a TRL environment runs it. It prints a script's losses, packed, then padded without fa2patch.
DRIVER = f"""
import importlib, json, sys
import torch
import fa2patch

{inspect.getsource(padding)}
{inspect.getsource(losses)}
module = importlib.import_module(sys.argv[1])
packed = losses(module.main(sys.argv[2:]))
fa2patch.DataCollatorWithFlattening, fa2patch.apply = padding, lambda model: None
print()
print(json.dumps([packed, losses(module.main(sys.argv[2:]))]))
"""
