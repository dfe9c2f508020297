"""The ecosystem's checks in this environment, its stacks, evidence and page. ``-m slow`` runs every stack."""

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import torch

import fa2patch
from compat_matrix.ecosystem import __main__ as runner
from compat_matrix.ecosystem import child, page, stacks
from compat_matrix.ecosystem.checks import CHECKS, curve
from compat_matrix.ecosystem.collators import packed, padded
from compat_matrix.ecosystem.training import Stage, tiny_llama

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
STACKS = stacks.checked()


@pytest.fixture(scope="module")
def stage():
    return Stage(trl=False)


@pytest.fixture
def examples():
    return [{"input_ids": list(range(start, start + length))} for start, length in ((3, 9), (40, 1), (70, 14))]


def test_packed_trains_as_padded_and_the_control_does_not(stage):
    found = curve.curve(stage, steps=4)
    assert found["ok"], found
    assert found["packed"]["largest_relative_difference"] < 1e-5
    assert found["two_rows_alone"]["largest_relative_difference"] > 1e-2, "a leak would show"


def test_the_curve_is_not_ok_where_nothing_is_patched(stage, monkeypatch):
    monkeypatch.setattr(fa2patch, "apply", lambda model: None)
    found = curve.curve(stage, steps=3)
    assert not found["ok"] and found["control_leaks"] and found["same_mini_batches"]


@pytest.mark.parametrize("check", ["accumulation", "predict", "verified"])
def test_a_check_holds_here(stage, check):
    options = {"steps": 1, "every": 3} if check == "accumulation" else {}
    found = CHECKS[check](stage, **options)
    assert found["ok"], found


def test_lengths_as_trl_014_to_019_gives_them(examples):
    batch = packed(examples, return_flash_attn_kwargs=True)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        batch[name] = batch[name][None]
    for name in ("max_length_q", "max_length_k"):
        batch[name] = torch.tensor([batch[name]])
    model = tiny_llama().eval()
    alone = model(**padded(examples)).loss
    fa2patch.apply(model)
    torch.testing.assert_close(model(**batch).loss, alone)


def test_a_packed_row_that_does_not_say_so_is_named(examples):
    """TRL 0.19's padding_free gives such a batch to a model that is not loaded with flash attention."""
    batch = packed(examples)
    del batch["position_ids"]
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    model = tiny_llama()
    fa2patch.apply(model)
    with pytest.raises(fa2patch.errors.BadBatch, match="found attention_mask, input_ids, labels"):
        fa2patch.verify(model, batch=batch)


def test_torchs_context_parallelism_is_refused(examples):
    """The hook removes every layer's mask, without which the row would be computed as one document."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    model = tiny_llama()
    fa2patch.apply(model)
    _attach_context_parallel_hooks(model)
    with pytest.raises(fa2patch.errors.PackingNotIsolated, match="0 were given the boundaries"):
        model(**packed(examples))


def test_every_stack_is_pinned():
    for stack in stacks.stacks().values():
        assert all("==" in pin or pin == "rich" for pin in stack.environment.pins), stack.name
        if stack.checks is not None:
            continue  # such a stack is named after its checks
        assert stack.name == (f"trl-{stack.trl}" if stack.trl else f"transformers-{stack.environment.transformers}")
    trainers = {stack.environment.transformers for stack in STACKS.values() if stack.trl is None}
    assert {"4.36.2", "4.44.2", "4.57.6", "5.23.0"} <= trainers
    assert {"0.7.11", "0.9.6", "0.12.2", "0.19.1", "1.16.0"} <= {stack.trl for stack in STACKS.values()}


@pytest.mark.parametrize("name", STACKS)
def test_the_evidence_is_of_these_pins_and_complete(name):
    stack = STACKS[name]
    evidence = json.loads((page.EVIDENCE / f"{name}.json").read_text(encoding="utf-8"))
    for pin in (f"transformers=={stack.environment.transformers}", *stack.environment.pins):
        package, _, number = pin.partition("==")
        assert evidence["versions"].get(package) == number or package not in child.PACKAGES
    assert {*evidence["checks"]} == {*(CHECKS if stack.checks is None else stack.checks), *stack.distributed}
    assert [*evidence["made"]] == [*evidence["checks"]]
    assert not runner.failures(evidence)
    assert stack.checks is not None or evidence["checks"]["curve"]["steps"] == 200
    skipped = {check for check, finding in evidence["checks"].items() if "skipped" in finding}
    assert skipped <= {"streaming", "dora", "qlora", "completion_collator", "own_padding_free", "own_packing"}


def test_checks_that_do_not_run_again_keep_the_commit_that_made_them(monkeypatch):
    old, new = ({"commit": number * 40, "dirty": False} for number in "12")
    monkeypatch.setattr(runner.commits, "of_code", lambda *code: new)
    before = {"made": {"curve": old, "lora": old}, "checks": {"curve": {"ok": True}, "lora": {"ok": False}}}
    found = runner.merged(next(iter(STACKS.values())), before, {"versions": {}, "checks": {"lora": {"ok": True}}})
    assert found["checks"] == {"curve": {"ok": True}, "lora": {"ok": True}}
    assert found["made"] == {"curve": old, "lora": {**new, "date": str(date.today())}}


def test_the_page_is_what_the_evidence_gives():
    assert page.main(["--check"]) == 0, "python -m compat_matrix.ecosystem.page"


def test_the_page_tells_what_failed():
    found = page.read(page.EVIDENCE)
    name = next(iter(found))
    assert "**failed**" not in page.page({name: found[name]})
    for check in ("curve", "lora"):
        broken = {name: {**found[name], "checks": {**found[name]["checks"], check: {"ok": False, "error": "E"}}}}
        assert "**failed**" in page.page(broken)
        assert runner.failures(broken[name]) == [check]


@pytest.mark.parametrize("name", ["accelerate_multi_node", "accelerate_fsdp2", "accelerate_deepspeed"])
def test_accelerate_starts_the_example_configurations(name):
    from accelerate.commands import launch
    from accelerate.commands.config.config_args import load_config_from_file

    file = str(CONFIGS / f"{name}.yaml")
    assert load_config_from_file(file).num_processes == 16
    command = ["--config_file", file, "--machine_rank", "1", "--main_process_ip", "192.0.2.1", "train.py"]
    given, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(command))
    if given.use_deepspeed:
        assert (ROOT / given.deepspeed_config_file) == CONFIGS / "deepspeed_zero3.json"
        return
    environment = launch.prepare_multi_gpu_env(given)
    assert (given.nnodes, given.nproc_per_node, str(given.node_rank)) == ("2", "8", "1")
    assert given.rdzv_endpoint == "192.0.2.1:29500"
    if name == "accelerate_fsdp2":
        assert environment["FSDP_VERSION"] == "2" and environment["FSDP_ACTIVATION_CHECKPOINTING"] == "true"


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_reads_the_example_configurations(stage):
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    config = HfDeepSpeedConfig(str(CONFIGS / f"deepspeed_zero{stage}.json"))
    assert (config.is_zero2(), config.is_zero3()) == (stage == 2, stage == 3)


def test_trainer_takes_the_example_of_fsdp(tmp_path):
    from transformers import TrainingArguments

    file = str(CONFIGS / "fsdp_trainer.json")
    arguments = TrainingArguments(output_dir=str(tmp_path), fsdp=True, fsdp_config=file, use_cpu=True)
    assert arguments.fsdp_plugin_args["fsdp_version"] == 2 and arguments.fsdp_plugin_args["activation_checkpointing"]


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
def test_a_stack(name, tmp_path):
    command = [sys.executable, "-m", "compat_matrix.ecosystem", "--stacks", name, "--evidence", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert not runner.failures(json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")))
