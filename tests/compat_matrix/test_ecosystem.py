"""Stacks and rows: what they are made of, how a run becomes evidence, and what their pages say of it."""

import copy
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from stage import packed, padded, tiny_llama

import fa2patch
from compat_matrix import environments, suite
from compat_matrix.ecosystem import __main__ as runner
from compat_matrix.ecosystem.stacks import (
    DISTRIBUTED,
    EVIDENCE,
    INTEGRATIONS,
    Row,
    releases,
    rows,
    split,
    stack_of,
    stacks,
)
from compat_matrix.publish import stacks as pages
from compat_matrix.results import Malformed

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
STACKS, ROWS = {name: stack for name, stack in stacks().items() if stack.tests}, rows()
TRAINERS = [name for name in STACKS if name.startswith(("transformers-", "trl-"))]
OWN = {"completion_collator", "own_padding_free", "own_packing"}
SINGLE = {
    "accumulation", "checkpointing", "lengths", "verified", "streaming", "evaluation", "predict", "resume", "lora",
    "dora", "qlora",
}  # fmt: skip
CHECKED = {
    "fused-losses": {
        "cut_cross_entropy", "liger_on_the_class", "liger_on_the_object", "run_with_liger", "trainer_with_liger",
    },
    "fused-head-trl-1.16.0": {"sft_with_its_fused_head", "trl_fused_head"},
    "triton-3.9.0": {
        "it_tells_right_rows_from_wrong_ones", "it_says_what_the_operators_say",
        "it_compiles_for_devices_that_are_not_here",
    },
}  # fmt: skip
EXAMPLES = [{"input_ids": list(range(start, start + length))} for start, length in ((3, 9), (40, 1), (70, 14))]


@pytest.fixture
def patched():
    model = tiny_llama().eval()
    fa2patch.apply(model)
    return model


def test_lengths_as_trl_014_to_019_gives_them(patched):
    batch = packed(EXAMPLES, return_flash_attn_kwargs=True)
    batch.update({name: batch[name][None] for name in ("cu_seq_lens_q", "cu_seq_lens_k")})
    batch.update({name: torch.tensor([batch[name]]) for name in ("max_length_q", "max_length_k")})
    torch.testing.assert_close(patched(**batch).loss, tiny_llama().eval()(**padded(EXAMPLES)).loss)


def test_a_packed_row_that_does_not_say_so_is_named(patched):
    # TRL 0.19's padding_free gives such a batch to a model that is not loaded with flash attention.
    batch = packed(EXAMPLES)
    batch["attention_mask"] = torch.ones_like(batch.pop("position_ids"))
    with pytest.raises(fa2patch.errors.BadBatch, match="found attention_mask, input_ids, labels"):
        fa2patch.verify(patched, batch=batch)


def test_hooks_of_accelerate_that_drop_masks_are_passed(patched):
    # It attaches them for context parallelism, and they stay where rows are whole, as in an evaluation of one's own.
    from accelerate.big_modeling import _attach_context_parallel_hooks

    batch, hooks = packed(EXAMPLES), [module._forward_pre_hooks for module in patched.modules()]
    expected = patched(**batch).logits
    _attach_context_parallel_hooks(patched)
    before = [dict(held) for held in hooks]
    assert torch.equal(patched(**batch).logits, expected) and torch.equal(patched(**batch).logits, expected)
    fa2patch.revert(patched)
    for held, attached in zip(hooks, before):
        assert {*held.values()} <= {*attached.values()}


def test_every_stack_is_pinned():
    for name, stack in stacks().items():
        assert all("==" in pin or pin == "rich" for pin in stack.environment.pins), name
        if name in TRAINERS:
            assert name == (
                f"trl-{stack.pins['trl']}" if "trl" in stack.pins else f"transformers-{stack.pins['transformers']}"
            )
    assert {f"transformers-{name}" for name in ("4.36.2", "4.44.2", "4.57.6", "5.23.0")} <= {*TRAINERS}
    assert {f"trl-{name}" for name in ("0.7.11", "0.9.6", "0.12.2", "0.19.1", "1.16.0")} <= {*TRAINERS}


@pytest.mark.parametrize("name", STACKS)
def test_the_evidence_is_of_these_pins_and_complete(name):
    evidence = json.loads((EVIDENCE / f"{name}.json").read_text(encoding="utf-8"))
    checks = evidence["checks"]
    assert all(evidence["versions"].get(package, number) == number for package, number in STACKS[name].pins.items())
    wanted = {
        test for test in map(runner.check_of, STACKS[name].tests) if DISTRIBUTED.format(test) in STACKS[name].tests
    }
    if name in TRAINERS:
        wanted |= {"curve", "counting", *SINGLE, *OWN}
        assert checks["curve"]["steps"] == 200
    assert {*checks} == wanted | CHECKED.get(name, set()) == {*evidence["made"]}
    assert all(made["commit"] and made["date"] for made in evidence["made"].values())
    assert not [check for check, found in checks.items() if not found.get("ok") and "skipped" not in found]
    assert {check for check, found in checks.items() if "skipped" in found} <= {"streaming", "dora", "qlora", *OWN}


REPORT = """
import pytest

def test_curve(finding):
    finding["steps"] = 200

@pytest.mark.slow
@pytest.mark.parametrize("entry", ["trainer zero2"])
def test_a_script(entry, finding):
    finding.update(ok=True, loss=0.5)
    assert finding["loss"] < 0.1, "far"

def test_lora(finding):
    pytest.skip("no PEFT")

def test_quick():
    pass
"""


@pytest.mark.slow
def test_a_run_of_a_stack_becomes_its_evidence(tmp_path, monkeypatch, capsys):
    (tmp_path / "test_them.py").write_text(REPORT)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    stack = runner.Stack(environments.Version("own", "5.0.0", "3.11", "2.13.0", ()), {"A": "b"}, (str(tmp_path),))
    monkeypatch.setattr(runner, "stacks", lambda: {"own": stack})
    monkeypatch.setattr(suite.environments, "make", lambda version, folder: Path(sys.executable))
    monkeypatch.setattr(suite, "stacks", lambda: {"own": stack})
    given = ["own", "--evidence", str(tmp_path)]
    monkeypatch.setenv("PYTEST_ADDOPTS", f"-c {ROOT / 'pyproject.toml'} --rootdir {tmp_path}")
    assert runner.main(given) == 1
    assert (
        "own: 1 failure, 2 passed, 1 skipped\n  test_a_script[trainer zero2]: AssertionError: far"
        in capsys.readouterr().out
    )
    found = json.loads((tmp_path / "own.json").read_text())
    assert found["versions"]["torch"] == torch.__version__ and found["variables"] == {"A": "b"}
    checks = {name: {**one, "seconds": 0} for name, one in found["checks"].items()}
    assert checks["curve"] == {"steps": 200, "ok": True, "seconds": 0} and checks["lora"]["skipped"] == "no PEFT"
    assert not checks["trainer zero2"]["ok"] and "far" in checks["trainer zero2"]["error"]
    assert {*checks} == {"curve", "trainer zero2", "lora"} == {*found["made"]} and "date" in found["made"]["curve"]
    (tmp_path / "test_them.py").write_text("import no_such_package")
    assert runner.main(given) == 1
    with pytest.raises(SystemExit):
        runner.main(["no such stack"])


def test_a_rows_tests_are_kept_with_the_stacks_that_they_name():
    cases = [
        suite.Case(name, "", outcome, "", 1.0, {})
        for name, outcome in (("test_losses[trl-0.12.2-kto]", "passed"), ("test_losses[trl-1.16.0]", "failure"))
    ]
    found = runner.of_tests(ROWS["trl_losses"], cases)
    assert found["outcomes"] == {"failure": 1, "passed": 1} and found["stacks"] == ["trl-0.12.2", "trl-1.16.0"]
    assert found["command"] == ROWS["trl_losses"].command and {"commit", "dirty", "date"} <= {*found}
    assert stack_of("test_losses[kto-trl-0.12.2]") == "trl-0.12.2"
    assert stack_of("test_losses[fused-head-trl-1.16.0]") == "fused-head-trl-1.16.0", "the longest name"
    assert stack_of("test_losses[trl-0.12.20]") == stack_of("test_losses") == ""


def test_the_releases_of_a_row_are_those_that_its_stacks_pin():
    row = Row("x", "liger-kernel", "", (), "", "")
    assert releases(row, ["fused-losses"]) == ["0.8.5"]
    with pytest.raises(Malformed, match="does not pin liger-kernel"):
        releases(row, ["trl-1.16.0"])


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_a_row_names_tests_and_a_page_that_exist(row):
    files = [Path(ROOT, word) for word in row.tests if word.startswith("tests/")]
    assert files and all("pytest.mark.slow" in file.read_text(encoding="utf-8") for file in files)
    assert (ROOT / "docs" / row.page).with_suffix(".md").exists()
    names = [name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.M)]
    words = " ".join(row.tests[row.tests.index("-k") + 1 :]).split(" or ") if "-k" in row.tests else []
    assert all(any(word in name for name in names) for word in words), f"{words}: one of them names no test"


@pytest.mark.parametrize(
    "changes",
    [
        {"outcomes": {"passed": 4, "failure": 1}}, {"outcomes": {"skipped": 1}}, {"outcomes": {}},
        {"command": "pytest"}, None,
    ],
)  # fmt: skip
def test_a_row_whose_tests_did_not_all_pass_is_an_error(changes, tmp_path, monkeypatch):
    found, name = json.loads(INTEGRATIONS.read_text(encoding="utf-8")), next(iter(ROWS))
    passed, commit = found[name]["outcomes"]["passed"], found[name]["commit"][:8]
    assert f"| {passed} passed at `{commit}` |" in pages.integrations().splitlines()[2]
    found[name] = changes and {**found[name], **changes}
    monkeypatch.setattr(pages, "INTEGRATIONS", tmp_path / "tests.json")
    pages.INTEGRATIONS.write_text(json.dumps(found))
    with pytest.raises(Malformed, match=f"ecosystem {name}"):
        pages.integrations()


def test_a_page_tells_what_failed():
    name = "transformers-5.23.0"
    found = {name: json.loads((EVIDENCE / f"{name}.json").read_text(encoding="utf-8"))}
    assert "**failed**" not in pages.text_of("ECOSYSTEM", found, [name])
    for check in found[name]["checks"]:
        broken = copy.deepcopy(found)
        broken[name]["checks"][check].update(ok=False, error="why_not")
        broken[name]["checks"][check].pop("skipped", None)
        text = pages.text_of("ECOSYSTEM", broken, [name])
        assert f"**failed**: {name}, {check.replace('_', chr(92) + '_')}: why\\_not" in text
        assert ("| **failed** |" in text) == (check in SINGLE)


NAME = "long-rows-5.23.0"
REFUSAL = "PackingNotIsolated: mixers\nSee https://example.org"
RUNS = {
    "ulysses, 2 processes": {
        "table": {
            "ids": {"found": "right", "off_by": {"loss": 1e-7, "gradient": 3e-6}},
            "one key head": {"found": "right", "off_by": {"loss": 1e-7}},
            "mixers, documents cut": {"found": "refused", "said": REFUSAL},
        },
        "alone": {
            "ids": {"found": "leaks", "said": "", "off_by": 0.25},
            "window": {"found": "error", "said": "KeyError: x"},
        },
        "bytes": {"llama, ids": {"a layer's forward": {"counted": 2048.0, "on paper": 2048, "without fa2patch": 4096}}},
    },
    "ulysses, 4 processes": {
        "table": {
            "ids": {"found": "right", "off_by": {"loss": 1e-7, "gradient": 5e-6}},
            "one key head": {"found": "refused", "said": "too few heads"},
        },
    },
    "ulysses_engine loop zero2": {"loss": 1e-7, "weight": 2e-7, "gradients_times": 2, "verify": "isolated: 4"},
    "ulysses_engine loop alone": {"alone": {"found": "leaks", "said": "", "off_by": 0.041}},
    "architectures ulysses": {
        "architectures": {
            "llama": {"crossing": {"found": "right"}},
            "jamba": {"crossing": {"found": "refused"}, "whole": {"found": "right"}},
            "esm": {"crossing": {"found": "refused"}, "whole": {"found": "refused"}},
            "old": {"crossing": {"found": "upstream", "said": "one process: RuntimeError"}},
        },
    },
    "context_parallel torch": {
        "table": {"mixers": {"found": "refused", "said": REFUSAL, "off_by": None}},
        "exchanged": {
            "chats, balanced": {
                "forward": 1792.0, "backward": 1792.0, "on paper": 1792, "step": 31816, "ring": 393216,
                "Ulysses": 393216.0, "work": 1.02,
            },
        },
    },
}  # fmt: skip


def long_rows(**changes):
    runs = {entry: {"ok": True, **run, **changes.get(entry, {})} for entry, run in RUNS.items()}
    made = {"commit": "1" * 40, "dirty": False, "date": "2026-01-01"}
    found = {NAME: {"made": dict.fromkeys(runs, made), "versions": {"torch": "2.13.0"}, "checks": runs}}
    return pages.text_of("LONG_ROWS", found, [NAME, "long-rows-4.57.6"]).splitlines()


@pytest.mark.parametrize(
    "line",
    [
        "|  | DeepSpeed's Ulysses | accelerate's `sp_size` | torch's `context_parallel` |",
        "| packed rows by ids | right (5e-06) | right (2e-07) |  |",
        "| documents that cross the border | **leaks** (0.25) | **leaks** (0.041) |",
        "| fewer key heads than processes | right (1e-07) with 2 processes; refused [1] with 4 processes |  |  |",
        "| mixers, documents cut | refused [2] |  | refused [2] |",
        "| ten steps with ZeRO-2 |  | right (2e-07), gradients × 2 |  |",
        "| verify |  | right |  |",
        "| windows | error [3] |  |",
        "2. PackingNotIsolated: mixers",
        "3. KeyError: x",
        f"| {NAME} | DeepSpeed's Ulysses | 2 | 1 | 1 | 1 | 1 | 0 |",
        f"- {NAME}, DeepSpeed's Ulysses with 2 processes, refused: `esm`",
        f"- {NAME}, DeepSpeed's Ulysses with 2 processes, right if documents lie whole: `jamba`",
        f"- {NAME}, DeepSpeed's Ulysses with 2 processes, upstream: `old`",
        f"| {NAME} | 2 | llama, ids | a layer's forward | 2,048 | 2,048 | 4,096 |",
        f"| {NAME} | 2 | chats, balanced | 1,792 | 1,792 | 1,792 | 31,816 | 393,216 | 393,216 | 1.02 |",
        f"| {NAME} | 2026-01-01 | commit 111111111111 | torch 2.13.0 |",
        "Without evidence: long-rows-4.57.6.",
        "    python -m compat_matrix.ecosystem long-rows-5.23.0 long-rows-4.57.6",
    ],
)
def test_the_page_of_long_rows_has_this_line(line):
    assert line in long_rows()


def test_a_failure_is_on_the_page_of_long_rows():
    assert not any("**failed**" in line or "**wrong**" in line for line in long_rows())
    crashed = long_rows(**{"ulysses_engine loop zero2": {"ok": False, "error": "not ready after 1800 s"}})
    assert f"**failed**: {NAME}, ulysses\\_engine loop zero2: not ready after 1800 s" in crashed
    off = long_rows(
        **{"ulysses, 4 processes": {"ok": False, "table": {"ids": {"found": "WRONG", "off_by": {"loss": 0.5}}}}}
    )
    row = "| packed rows by ids | right (3e-06) with 2 processes; **wrong** (0.5) with 4 processes | right (2e-07) |  |"
    assert row in off and f"**failed**: {NAME}, ulysses, 4 processes: off" in off
    leaking = {
        "llama": {"crossing": {"found": "WRONG"}},
        "phi": {"crossing": {"found": "refused"}, "whole": {"found": "WRONG"}},
    }
    text = long_rows(**{"architectures ulysses": {"ok": False, "architectures": leaking}})
    assert f"| {NAME} | DeepSpeed's Ulysses | 2 | 0 | 0 | 0 | 0 | 2 |" in text
    assert f"- {NAME}, DeepSpeed's Ulysses with 2 processes, **wrong**: `llama`, `phi`" in text


def test_every_script_of_the_stacks_is_of_an_engine_or_about_architectures():
    # The page would not show a script that no column is made of.
    for name in (name for name in STACKS if name.startswith(pages.LONG)):
        scripts = {runner.check_of(test) for test in STACKS[name].tests}
        scripts = {script for script in scripts if split(script)[0] not in pages.EVERY}
        evidence = {"checks": {script: {"ok": True, "table": {"x": {}}} for script in scripts}}
        started = {script for script in scripts if script.startswith(("ulysses_engine", *pages.TRAINING))}
        columns = pages.by_engine(evidence, "table")
        assert sum(len(one["x"]) for one in columns.values()) == len(scripts - started)
        assert all(any(script.startswith((engine, *pages.TRAINING)) for engine in pages.ENGINES) for script in started)


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


def test_deepspeed_and_trainer_read_the_example_configurations(tmp_path):
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from transformers import TrainingArguments

    configs = [HfDeepSpeedConfig(str(CONFIGS / f"deepspeed_zero{stage}.json")) for stage in (2, 3)]
    assert [(config.is_zero2(), config.is_zero3()) for config in configs] == [(True, False), (False, True)]
    file = str(CONFIGS / "fsdp_trainer.json")
    arguments = TrainingArguments(output_dir=str(tmp_path), fsdp=True, fsdp_config=file, use_cpu=True)
    assert arguments.fsdp_plugin_args["fsdp_version"] == 2 and arguments.fsdp_plugin_args["activation_checkpointing"]


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
def test_a_stack(name, tmp_path):
    assert runner.main([name, "--evidence", str(tmp_path)]) == 0
