"""``fa2patch run`` runs a script as ``python`` does, and patches its models; tests stay in-process if they can."""

from __future__ import annotations

import functools
import gc
import json
import os
import pickle
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import wrapt
from click.testing import CliRunner
from padded_cases import layers_tokens
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    FalconConfig,
    FalconForCausalLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTModel,
    default_data_collator,
)

import fa2patch
from compat_matrix import environments, tiny_models
from compat_matrix.user_models import matrix
from fa2patch.cli import commands as cli
from fa2patch.cli import run as run_command
from fa2patch.errors import KernelUnavailable, UnknownKernel
from fa2patch.packing.passes import Counts
from fa2patch.run import flattening, patcher
from fa2patch.run import start as run
from fa2patch.run.startup import fa2patch_startup
from fa2patch.upstream import transformers_names

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = HERE / "scripts"
TINY_BERT = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
NEAR = 1e-5  # the same sums in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # The folder has a tiny Llama, its tokenizer and documents for the scripts.
    home = tmp_path_factory.mktemp("model")
    runpy.run_path(str(SCRIPTS / "folder.py"))["make"](home)
    return home


@pytest.fixture
def hooked():
    # ``off()`` and the test's end switch the patcher off.
    made = []

    def hooked(**options):
        hooked.off()
        made.append(patcher.Patcher(run.RunOptions(**options)))
        for name, (kind, cls) in fa2patch_startup.WATCHED.items():
            wrapt.register_post_import_hook(functools.partial(made[-1].watch, kind, cls), name)

    hooked.off = lambda: [each.off() for each in made]
    yield hooked
    hooked.off()


@pytest.fixture
def lines(capsys):
    # The messages are those since the last call.
    return lambda: messages(capsys.readouterr().err)


def messages(printed):
    return [line for line in printed.splitlines() if line.startswith("fa2patch:")]


PATCHED = "fa2patch: LlamaForCausalLM patched: 2 attention layers, interface seam, kernel auto."
OPTION = ["fa2patch: padded_batches=True is the option --padded-batches here."]
NOTHING = (
    "fa2patch: nothing was packed: LlamaForCausalLM had no batch whose rows say where documents start. If batches are "
    "padded, --padded-batches computes them packed."
)


def by_its_class():
    return LlamaForCausalLM(tiny_models.config_of("llama"))


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def from_config():
    return AutoModelForCausalLM.from_config(tiny_models.config_of("llama"))


# --- a script runs as python runs it ---------------------------------------------------------------------------------


def started(*arguments, options=None, **more):
    # This saves the second that the imports of ``fa2patch run`` take.
    variables = run.environment(options or run.RunOptions(), {**os.environ, **more.pop("env", {})})
    return subprocess.run(run.command(arguments), env=variables, capture_output=True, text=True, timeout=600, **more)


def plainly(*arguments, python=sys.executable, **more):
    return subprocess.run([python, *arguments], capture_output=True, text=True, **more)


@pytest.mark.parametrize("way", [["seen.py"], [str(SCRIPTS / "seen.py")], ["-m", "seen"], ["-"]])
def test_a_script_sees_what_it_sees_under_python_and_nothing_is_imported(way, monkeypatch):
    monkeypatch.chdir(SCRIPTS)
    arguments = [*way, "--kernel", "-m", "x", "", "--help", *(["child"] if way != ["-"] else [])]
    given = {"cwd": SCRIPTS, "input": "__file__ = ''\n" + (SCRIPTS / "seen.py").read_text()}
    ours, pythons = started(*arguments, **given), plainly(*arguments, **given)
    assert ours.returncode == 0, ours.stderr
    seen, expected = json.loads(ours.stdout), json.loads(pythons.stdout)
    for both in (seen, seen.get("child", {})):
        both.pop("sitecustomize", None)
        assert not both.get("heavy")
    for both in (expected, expected.get("child", {})):
        both.pop("sitecustomize", None)
    assert seen == expected


@pytest.fixture
def children_can_be_interrupted():
    # A background job of a shell ignores SIGINT, and its children would too. With a handler in this process, children
    # start with the system's default.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("how", ["exit", "words", "error", "interrupt", "late"])
def test_it_ends_as_it_ends_under_python(how, children_can_be_interrupted):
    script = str(SCRIPTS / "ends.py")
    ours, pythons = started(script, how), plainly(script, how)
    assert (ours.returncode, ours.stdout, ours.stderr) == (pythons.returncode, pythons.stdout, pythons.stderr)
    assert pythons.returncode == {"exit": 7, "words": 1, "error": 1, "interrupt": -2, "late": 0}[how]


def test_a_sitecustomize_that_ours_hides_is_run(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("WHOSE = 'mine'")
    done = started(str(SCRIPTS / "seen.py"), "child", env={"PYTHONPATH": str(tmp_path)})
    found = json.loads(done.stdout)
    assert found["sitecustomize"] == found["child"]["sitecustomize"] == "mine"
    assert str(tmp_path) in found["path"] and str(run.STARTUP) not in found["path"]
    (tmp_path / "sitecustomize.py").write_text("import not_there")
    broken = started(str(SCRIPTS / "seen.py"), env={"PYTHONPATH": str(tmp_path)})
    assert "No module named 'not_there'" in broken.stderr


LOOKS = "import sys; print([sys.executable, sys.path, sorted(sys.modules), [str(type(it)) for it in sys.meta_path]])"


def other_pythons():
    # Every interpreter on this machine that a script could start, beside that of this environment.
    names = [shutil.which(f"python{version}") for version in ("2.7", "3.6", "3.9", "3.10", "3.12", "3.13")]
    homes = Path.home().glob(".pyenv/versions/*/bin/python")
    working = [name for name in (*names, *map(str, homes)) if name and not plainly("-V", python=name).returncode]
    return [os.path.realpath(sys.executable), *working]


@pytest.fixture
def bare(tmp_path):
    # The Python of an empty environment, made with the interpreter of this one.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    return str(tmp_path / "bare" / "bin" / "python")


def test_a_python_of_another_environment_is_as_without_it(bare, tmp_path):
    variables = run.environment(run.RunOptions(), os.environ)
    (tmp_path / "sitecustomize.py").write_text("WHOSE = 'mine'")
    hidden = run.environment(run.RunOptions(), {**os.environ, "PYTHONPATH": str(tmp_path)})
    for python in (bare, *other_pythons()):
        ours, alone = plainly("-c", LOOKS, python=python, env=variables), plainly("-c", LOOKS, python=python)
        assert alone.returncode == 0 and sys.executable not in alone.stdout, alone.stderr
        assert ours.returncode == 0 and ours.stderr == alone.stderr == "", (python, ours.stderr)
        assert ours.stdout.replace("'sitecustomize', ", "") == alone.stdout.replace("'sitecustomize', ", ""), python
        assert "fa2patch" not in ours.stdout.replace(str(tmp_path), "")
        found = plainly("-c", "import sitecustomize as it; print(it.WHOSE)", python=python, env=hidden)
        assert found.stdout == "mine\n", (python, found.stderr)


def test_a_python_of_the_same_environment_waits_for_transformers(bare):
    code = "import sys; print('fa2patch_startup' in sys.modules)"
    for python, expected in ((sys.executable, "True\n"), (bare, "False\n")):
        found = plainly("-c", code, python=python, env=run.environment(run.RunOptions(), os.environ))
        assert found.stdout == expected, found.stderr


@pytest.mark.parametrize(("first_line", "ok"), [
    ("#!{own}", True), ("#!{bare}", False), ("#! {bare} -I", False), ('#!"{bare}"', False),
    ("#!/usr/bin/env python3", True), ("#!/bin/sh", True), ("", True),
])  # fmt: skip
def test_a_command_of_another_environment_is_an_error(monkeypatch, bare, tmp_path, first_line, ok):
    script = tmp_path / "train-it"
    script.write_text(first_line.format(own=sys.executable, bare=bare) + "\nprint('started')\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if ok:
        assert run.command(["train-it", "x"]) == [str(script), "x"]
        return
    with pytest.raises(
        run.CannotRun, match=f"train-it belongs to another one: it starts {bare}.*Install fa2patch there"
    ):
        run.command(["train-it", "x"])
    done = CliRunner().invoke(cli.main, ["run", "train-it", "x"])
    assert done.exit_code == 2 and "belongs to another one" in " ".join(done.output.split())


@pytest.mark.slow
def test_the_whole_way_by_the_command_line():
    line = [sys.executable, "-W", "error", "-X", "utf8", "-m", "fa2patch", "run", "--quiet", "ends.py", "exit"]
    done = subprocess.run(line, cwd=SCRIPTS, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


@pytest.mark.slow
def test_without_fa2patch_on_its_path_a_child_takes_the_one_that_started_it(folder, tmp_path):
    # As with ``python -m fa2patch`` in a checkout, the package is not installed. The startup file knows its place.
    file = tmp_path / "hide.py"
    file.write_text(
        f"import sys; sys.path.insert(0, {str(run.STARTUP)!r}); import fa2patch_startup, importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'fa2patch' else find(name, *rest)\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
        f"sys.path[:] = [entry for entry in sys.path if entry != {str(ROOT)!r}]\n"
        "fa2patch_startup._fa2patch(); import fa2patch; print(fa2patch.__file__)\n"
    )
    packages = os.pathsep.join(entry for entry in sys.path if "site-packages" in entry)
    done = plainly("-S", str(file), env={**os.environ, "PYTHONPATH": packages})
    assert done.stdout.strip() == str(ROOT / "fa2patch" / "__init__.py"), done.stderr


def test_what_is_no_file_but_an_installed_command_is_that_command(monkeypatch, tmp_path):
    monkeypatch.setattr(run.subprocess, "_args_from_interpreter_flags", lambda: ["-O"])
    monkeypatch.setattr(run.sys, "stdout", SimpleNamespace(write_through=True))
    python = sys.executable
    beside = str(Path(python).with_name("accelerate"))
    assert run.command(["accelerate", "launch", "x.py"]) == [beside, "launch", "x.py"]
    with pytest.raises(run.CannotRun, match="expected a script.*no file of this name, and no command"):
        run.command(["nowhere-to-be-found", "x"])
    with pytest.raises(run.CannotRun, match="acelerate'.*Did you mean accelerate"):
        run.command(["acelerate"])
    with pytest.raises(run.CannotRun, match="no file of this name"):
        run.command(["./accelerate"])
    with pytest.raises(run.CannotRun, match="-m: expected the name of a module"):
        run.command(["-m"])
    assert run.command(["-m", "accelerate", "-h"]) == [python, "-O", "-u", "-m", "accelerate", "-h"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_it.py").touch()
    with pytest.raises(run.CannotRun, match="Did you mean train_it.py"):
        run.command(["trian_it.py"])
    (tmp_path / "settings.json").write_text('{"model_type": "llama"}')  # Python that does nothing
    with pytest.raises(run.CannotRun, match="neither called .py nor begins with #!.*fa2patch run SCRIPT settings.json"):
        run.command(["settings.json"])
    (tmp_path / "accelerate").touch()
    assert run.command(["accelerate"]) == [python, "-O", "-u", "accelerate"]


def test_the_environment_reaches_further_processes_once():
    once = run.environment(run.RunOptions("reference", True), {"PYTHONPATH": f"a{os.pathsep}b", "OTHER": "kept"})
    assert once["PYTHONPATH"].split(os.pathsep) == [str(run.STARTUP), "a", "b"] and once["OTHER"] == "kept"
    assert run.environment(run.RunOptions("reference", True), once) == once
    assert once[run.WHERE].endswith(os.path.realpath(sys.prefix))
    options = {"kernel": "reference", "collate": True, "quiet": False, "pack": True, "max_tokens": None}
    options["padded_batches"] = False
    assert json.loads(once[run.VARIABLE]) == options


def test_options_end_where_the_script_begins(monkeypatch):
    asked = []
    monkeypatch.setattr(run_command, "start", lambda command, options: asked.append((command, options)))

    def line(*arguments):
        done = CliRunner().invoke(cli.main, ["run", *arguments])
        assert done.exit_code == 0, done.output
        return asked.pop()

    assert line("a.py") == (("a.py",), run.RunOptions())
    assert line("--kernel", "flex", "--collate", "--quiet", "a.py", "--kernel", "x", "-h") == (
        ("a.py", "--kernel", "x", "-h"),
        run.RunOptions("flex", True, True),
    )
    assert line("--no-pack", "a.py") == (("a.py",), run.RunOptions(pack=False))
    assert line("--padded-batches", "a.py") == (("a.py",), run.RunOptions(padded_batches=True))
    assert line("--collate", "-m", "trl", "--quiet", "--help") == (
        ("-m", "trl", "--quiet", "--help"),
        run.RunOptions(collate=True),
    )
    for wrong, said in ((["--colate", "a.py"], "Did you mean '--collate'"), ([], "SCRIPT")):
        done = CliRunner().invoke(cli.main, ["run", *wrong])
        assert done.exit_code == 2 and said in done.output and not asked


def test_what_cannot_work_is_said_before_anything_starts(monkeypatch):
    done = CliRunner().invoke(cli.main, ["run", "--kernel", "bogus", "a.py"])
    assert done.exit_code == 2 and "bogus" in done.output
    monkeypatch.setattr(run.sys, "flags", SimpleNamespace(ignore_environment=1, no_site=0))
    with pytest.raises(run.CannotRun, match="-I, -E or -S.*fa2patch.apply"):
        run.start(["a.py"], run.RunOptions())


# --- models are patched as they are made -----------------------------------------------------------------------------


def test_models_are_patched_as_they_are_made_named_once_and_reverted_in_the_end(hooked, folder, lines):
    before = {name: vars(PreTrainedModel)[name] for name in ("from_pretrained", "_from_config")}
    before_init, before_model_init = vars(Trainer)["__init__"], vars(Trainer)["call_model_init"]
    hooked()
    made = [from_config(), loaded(folder), LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)[0]]
    assert lines() == [PATCHED] * len(made)
    assert all(fa2patch.status(model) is not None for model in made)
    trainer_of(made[0], folder)
    assert lines() == []
    hooked.off()
    assert all(fa2patch.status(model) is None for model in made)
    assert {name: vars(PreTrainedModel)[name] for name in before} == before
    assert vars(Trainer)["__init__"] is before_init and vars(Trainer)["call_model_init"] is before_model_init
    assert "__init_subclass__" not in vars(Trainer)
    assert fa2patch.status(from_config()) is None
    assert lines() == [NOTHING]


def test_a_model_that_apply_fails_on_is_named_and_one_that_there_was_no_memory_for_is_met_again(
    hooked, lines, monkeypatch
):
    model, outcomes = tiny_models.build("llama"), [MemoryError(), ZeroDivisionError("of ours")]

    def failing(model, **options):
        raise outcomes.pop(0)

    monkeypatch.setattr(patcher, "apply", failing)
    hooked()
    met = patcher.Patcher(run.RunOptions())
    with pytest.raises(MemoryError):
        met.patch(model)
    assert not lines()
    met.patch(model)
    met.patch(model)
    (said,) = lines()
    assert "left alone: fa2patch.apply failed, please report it: ZeroDivisionError: of ours" in said


@pytest.mark.parametrize(
    ("cls", "config", "reason"),
    [
        (FalconForCausalLM, FalconConfig(alibi=True, vocab_size=8, hidden_size=8, num_attention_heads=2),
         "FalconForCausalLM left alone: .*alibi"),
        (T5ForConditionalGeneration, T5Config(d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, vocab_size=9),
         "T5ForConditionalGeneration left alone: .*encoder-decoder"),
        (BertForSequenceClassification, BertConfig(**TINY_BERT),
         "BertForSequenceClassification left alone: .*pools one vector per row"),
        (ViTModel, ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=4, patch_size=2),
         "ViTModel left alone: its attention looks both ways, and not at text alone"),
    ],
)  # fmt: skip
def test_others_are_left_alone_and_named_even_quietly(hooked, lines, cls, config, reason):
    hooked(quiet=True)
    model = cls._from_config(config)
    line, *more = lines()
    assert re.search(reason, line)
    assert more == (OPTION if cls is BertForSequenceClassification else [])
    assert fa2patch.status(model) is None
    state = vars(type(model))
    hooked.off()
    assert vars(type(model)) == state


def test_padded_pairs_are_counted_in_both_stacks(hooked, lines):
    config = T5Config(d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, vocab_size=9, decoder_start_token_id=0)
    hooked(padded_batches=True)
    model = T5ForConditionalGeneration._from_config(config)
    (line,) = lines()
    assert "T5ForConditionalGeneration patched: 3 attention layers" in line and "packed, too" in line
    fa2patch.apply(model, prove=False)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    model(input_ids=mask + 2, attention_mask=mask, labels=torch.tensor([[3, 4, 5], [3, -100, -100]]))
    hooked.off()
    assert "T5ForConditionalGeneration computed 11 tokens for the 14 of 1 padded batches" in lines()[-1]


def test_encoders_of_text_are_patched(hooked, lines):
    hooked()
    model = BertForMaskedLM._from_config(BertConfig(**TINY_BERT))
    (line,) = lines()
    if fa2patch.status(model) is None:  # in versions up to 4.57
        assert "BertForMaskedLM left alone: BertModel: looked in every layer for attention with a seam" in line
    else:
        assert line == "fa2patch: BertForMaskedLM patched: 1 attention layers, interface seam, kernel auto."


def test_a_part_of_a_model_is_not_patched_on_its_own(hooked, lines):
    hooked()
    cls, config = tiny_models.model_class("llava"), tiny_models.config_of("llava")
    by_hand = cls(config)
    assert not any("_fa2patch" in vars(module) for module in by_hand.modules()) and lines() == []
    assert fa2patch.status(cls._from_config(config)) is not None
    (line,) = lines()
    assert "LlavaForConditionalGeneration patched" in line


def test_a_model_made_by_its_class_is_patched_when_a_trainer_is_given_it(hooked, folder, lines):
    hooked()
    model = by_its_class()
    assert fa2patch.status(model) is None
    trainer_of(model, folder)
    assert fa2patch.status(model) is not None and len(lines()) == 1


def test_a_model_that_model_init_makes_by_its_class_is_patched(hooked, folder, lines):
    hooked()
    trainer = trainer_of(None, folder, model_init=by_its_class)
    assert fa2patch.status(trainer.model) is not None
    again = trainer.call_model_init()
    assert again is not trainer.model and fa2patch.status(again) is not None
    assert len(lines()) == 2


class WithReference(Trainer):
    # It makes further models after Transformers' own constructor, as trainers of TRL do.

    def __init__(self, *args, other=None, **options):
        super().__init__(*args, **options)
        self.ref_model = by_its_class()
        self.rewards = [BertForMaskedLM(BertConfig(**TINY_BERT)), other]


GRPOTrainer = type("GRPOTrainer", (WithReference,), {"__module__": "trl.trainer"})


def of_ones_own():
    # The subclass is defined after the hook is on, as every package's is under ``fa2patch run``.

    class Mine(GRPOTrainer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.late = by_its_class()

    return Mine


def tokens_of(model):
    seen = layers_tokens(model)
    ids = torch.tensor([[0, 0, 5, 6], [4, 5, 6, 7]])
    model(input_ids=ids, attention_mask=(ids != 0).long(), use_cache=False)
    return sum(seen)


def test_the_models_of_trls_trainers_compute_padded_batches_packed(hooked, folder, lines):
    hooked()
    trainer = trainer_of(loaded(folder), folder, cls=of_ones_own())
    assert [tokens_of(held) for held in (trainer.model, trainer.ref_model, trainer.late)] == [6, 6, 6]
    said = lines()[-1]
    assert "Mine computes padded batches packed" in said and "model, ref_model, " in said
    assert "late." in said and "model_wrapped" not in said


def test_a_model_of_model_init_is_packed_again_for_each_training(hooked, folder):
    hooked()
    trainer = trainer_of(None, folder, cls=GRPOTrainer, model_init=by_its_class)
    assert tokens_of(trainer.model) == tokens_of(trainer.call_model_init()) == 6


def test_a_model_that_a_trl_trainer_holds_and_cannot_pack_is_named_even_quietly(hooked, folder, lines):
    hooked(quiet=True)
    other = FalconForCausalLM(FalconConfig(alibi=True, vocab_size=8, hidden_size=8, num_attention_heads=2))
    trainer_of(loaded(folder), folder, cls=GRPOTrainer, other=other)
    assert any(re.search(r"GRPOTrainer computes padded batches of rewards\[1\] padded: .*alibi", it) for it in lines())


@pytest.mark.parametrize("how", ["no pack", "another trainer", "packed by packed_trainer"])
def test_other_batches_stay_as_they_are(hooked, folder, lines, how):
    hooked(pack=how != "no pack")
    cls = {"another trainer": WithReference}.get(how, GRPOTrainer)
    if how == "packed by packed_trainer":
        cls = fa2patch.packed_trainer(cls, share_prompts=False)
    trainer = trainer_of(loaded(folder), folder, cls=cls)
    packs = how == "packed by packed_trainer"
    assert tokens_of(trainer.model) == (6 if packs else 8)
    assert not any("packed" in line for line in lines())
    hooked.off()
    assert lines() == [
        "fa2patch: LlamaForCausalLM computed 6 tokens for the 8 of 1 padded batches." if packs else NOTHING
    ]


def test_a_loop_of_ones_own_is_computed_packed_if_that_is_asked_for(hooked, folder, lines):
    # A head that pools rows is patched, too.
    hooked(padded_batches=True)
    model = loaded(folder)
    classifier = LlamaForSequenceClassification._from_config(tiny_models.config_of("llama"))
    assert [line for line in lines() if line.endswith("Padded batches are computed packed, too.")]
    assert [tokens_of(each) for each in (model, classifier, model)] == [6, 6, 6]
    hooked.off()
    names = "LlamaForCausalLM and LlamaForSequenceClassification"
    assert lines() == [f"fa2patch: {names} computed 18 tokens for the 24 of 3 padded batches."]


def test_what_was_packed_is_said_of_models_that_are_gone(hooked, folder, lines):
    hooked()
    model = loaded(folder)
    model(torch.tensor([[4, 5, 6, 7]]), position_ids=torch.tensor([[0, 1, 0, 1]]))
    del model
    gc.collect()
    hooked.off()
    assert lines()[1:] == ["fa2patch: LlamaForCausalLM computed packed rows, each document by itself."]


def test_why_nothing_was_packed_is_said_even_quietly(hooked, folder, lines):
    hooked(padded_batches=True, quiet=True)
    model = loaded(folder)
    hooked.off()
    assert "had no batch with padding, and none whose rows say where documents start" in lines()[-1]
    hooked(padded_batches=True, quiet=True)
    model = loaded(folder)
    ids = torch.tensor([[4, 5, 6, 7], [4, 5, 6, 7]])
    with pytest.warns(fa2patch.errors.StaysPadded):
        model(ids, attention_mask=torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]), use_cache=False)
    hooked.off()
    (line,) = lines()
    assert "nothing was packed: batches of LlamaForCausalLM were computed as they came: each row of its mask" in line


@pytest.mark.parametrize("how", ["padded", "collate", "TRL's", "no pack"])
def test_max_tokens_cuts_the_batches_of_each_trainer(hooked, folder, lines, how):
    hooked(max_tokens=40, collate=how == "collate", pack=how != "no pack")
    cls = GRPOTrainer if how == "TRL's" else Trainer
    trainer = trainer_of(loaded(folder), folder, DataCollatorForSeq2Seq(tokenizer_of(folder)), cls=cls)
    trainer.train()
    assert any(f"{cls.__name__} computes each batch in passes of at most 40 tokens" in line for line in lines())
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs and all(entry["passes_per_batch"] >= 1 for entry in logs)
    assert fa2patch.status(trainer.model).budget.max_tokens == 40


def test_max_tokens_holds_in_a_loop_of_a_trainers_own(hooked, folder, lines):
    class OwnLoop(Trainer):
        def train(self):
            return self.model(**next(iter(self.get_train_dataloader()))).loss.backward()

    hooked(max_tokens=40)
    trainer = trainer_of(loaded(folder), folder, DataCollatorForSeq2Seq(tokenizer_of(folder)), cls=OwnLoop)
    budget = fa2patch.status(trainer.model).budget
    budget.counts = Counts()
    trainer.train()
    assert budget.counts.batches == 1


def test_collate_says_nothing_of_a_trainer_whose_batches_are_packed_in_its_models(hooked, folder, lines):
    hooked(collate=True)
    trainer_of(
        loaded(folder), folder, DataCollatorForSeq2Seq(tokenizer_of(folder)), cls=GRPOTrainer
    ).get_train_dataloader()
    hooked.off()
    assert not any("--collate" in line for line in lines() if "nothing was packed" not in line)


class Holder:
    # It makes its model's batches, as objects of sentence-transformers do.

    def __init__(self, folder):
        self.tokenizer = "a tokenizer"
        self.model = loaded(folder)


@pytest.fixture
def holders(monkeypatch):
    # The module of the class is known, as one of a package that is watched.
    name = "package_of_holders"
    monkeypatch.setitem(fa2patch_startup.WATCHED, name, ("holders", "Holder"))
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(__name__=name, Holder=Holder))


def test_an_object_that_makes_its_models_batches_is_patched_as_a_whole(holders, hooked, folder, lines):
    before = vars(Holder)["__init__"]
    hooked()
    held = type("Special", (Holder,), {})(folder)
    (line,) = lines()
    assert "Special patched: 2 attention layers" in line and line.endswith("Padded batches are computed packed, too.")
    assert tokens_of(held.model) == 6
    hooked.off()
    assert vars(Holder)["__init__"] is before and tokens_of(held.model) == 8


class HolderOfTwo(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokenizer, self.one, self.other = "a tokenizer", by_its_class(), by_its_class()


def test_the_option_does_not_help_an_object_of_two_models(lines):
    patcher.Patcher(run.RunOptions())._patch(HolderOfTwo())
    (line,) = lines()
    assert "HolderOfTwo left alone: expected one Transformers model, found 2" in line and "padded_batches=True" in line


def test_an_object_whose_padded_batches_are_packed_is_not_told_to_pack_them(holders, hooked, folder, lines):
    hooked()
    held = Holder(folder)
    hooked.off()
    assert held
    assert "had no batch with padding, and none whose rows say where documents start" in lines()[-1]


def test_a_model_beside_such_an_object_is_told_to_pack_its_padded_batches(holders, hooked, folder, lines):
    hooked()
    held, model = Holder(folder), loaded(folder)
    model(torch.tensor([[4, 5], [6, 0]]), attention_mask=torch.tensor([[1, 1], [1, 0]]))
    hooked.off()
    assert held
    assert "If batches are padded, --padded-batches computes them packed" in lines()[-1]


def test_only_the_first_rank_speaks_and_quiet_is_quiet(hooked, lines, monkeypatch):
    for variables in ({"RANK": "1"}, {"LOCAL_RANK": "1"}, {"RANK": "2", "LOCAL_RANK": "0"}):
        with monkeypatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            hooked()
            assert fa2patch.status(from_config()) is not None
            hooked.off()
            assert lines() == []
    hooked(quiet=True)
    assert fa2patch.status(from_config()) is not None
    assert lines() == []


def test_a_kernel_that_was_asked_for_and_is_not_there_is_an_error(hooked):
    hooked(kernel="bogus")
    with pytest.raises(UnknownKernel):
        from_config()
    if not torch.cuda.is_available():
        hooked(kernel="flash_attn")
        with pytest.raises(KernelUnavailable):
            from_config()
    hooked(kernel="reference")
    assert fa2patch.status(from_config()).kernel == "reference"


# --- training: packed rows, and --collate ----------------------------------------------------------------------------


def documents(folder):
    return json.loads((folder / "documents.json").read_text())


def tokenizer_of(folder, side="right"):
    return AutoTokenizer.from_pretrained(folder, padding_side=side)


def features_of(texts):
    return [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids} for ids in texts]


def trainer_of(model, folder, collator=None, features=None, cls=Trainer, **options):
    settings = {
        "output_dir": str(folder / "out"), "per_device_train_batch_size": 3, "max_steps": 4, "learning_rate": 1e-3,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 0,
        "remove_unused_columns": False,
        **{name: options.pop(name) for name in [*options] if name in vars(TrainingArguments)},
    }  # fmt: skip
    arguments = TrainingArguments(**settings)
    features = features or features_of(documents(folder))
    return cls(model, arguments, train_dataset=features, eval_dataset=features[:3], data_collator=collator, **options)


def losses(trainer):
    shapes = []
    embedding = trainer.model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape[:2])))
    if fa2patch.status(trainer.model):
        fa2patch.apply(trainer.model, prove=False)  # the hook only looks, and a proof would run it
    trainer.train()
    handle.remove()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], shapes


def padded_before(texts, length):
    # The examples are already padded to one length.
    return [
        {
            "input_ids": ids + [0] * (length - len(ids)),
            "attention_mask": [1] * len(ids) + [0] * (length - len(ids)),
            "labels": ids + [-100] * (length - len(ids)),
        }
        for ids in texts
    ]


COLLATORS = {
    "seq2seq": lambda tokenizer: DataCollatorForSeq2Seq(tokenizer, padding=True),
    "language modeling": lambda tokenizer: DataCollatorForLanguageModeling(tokenizer, mlm=False),
    "with padding": lambda tokenizer: DataCollatorWithPadding(tokenizer),
    "default": lambda tokenizer: default_data_collator,
}
OPTIONS = {
    "accumulated": {"gradient_accumulation_steps": 2},
    "smoothed": {"label_smoothing_factor": 0.1},
    "workers": {"dataloader_num_workers": 1},
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(pytest.param(kind, {}, marks=[] if kind == "default" else pytest.mark.slow) for kind in COLLATORS),
        *(pytest.param("seq2seq", options, marks=pytest.mark.slow) for options in OPTIONS.values()),
    ],
    ids=[*COLLATORS, *OPTIONS],
)
def test_collate_trains_step_by_step_as_the_padded_run(hooked, folder, lines, kind, options):
    texts = documents(folder)
    features = features_of(texts) if kind == "seq2seq" else [
        {key: value for key, value in feature.items() if key != "labels"} for feature in features_of(texts)
    ]  # fmt: skip
    if kind in ("with padding", "default"):
        features = padded_before(texts, max(map(len, texts)))

    def trained():
        trainer = trainer_of(loaded(folder), folder, COLLATORS[kind](tokenizer_of(folder)), features, **options)
        found = losses(trainer), trainer.state.global_step, trainer.evaluate()["eval_loss"]
        assert not isinstance(trainer.data_collator, flattening.Flattening)
        return found

    (padded, shapes), steps, evaluated = trained()
    assert all(rows > 1 or length == max(map(len, texts)) for rows, length in shapes)
    hooked(collate=True)
    (flattened, flat), same, after = trained()
    assert flattened == pytest.approx(padded, rel=NEAR) and same == steps == 4
    assert after == pytest.approx(evaluated, rel=NEAR)
    assert len(flat) == len(shapes) and all(rows == 1 for rows, _ in flat)
    assert sum(length for _, length in flat) < sum(rows * length for rows, length in shapes)
    patched, told = lines()
    assert "LlamaForCausalLM patched" in patched and "laid end to end" in told


class Streamed(torch.utils.data.IterableDataset):
    def __init__(self, features):
        self.features = features

    def __iter__(self):
        return iter(self.features)


@pytest.mark.slow
def test_collate_goes_through_accelerates_dispatcher(hooked, folder):
    # The dispatcher slices every tensor of a streamed batch by rows, which would break lengths.

    def trained():
        trainer = trainer_of(loaded(folder), folder, DataCollatorForSeq2Seq(tokenizer_of(folder)), max_steps=2)
        trainer.train_dataset = Streamed(features_of(documents(folder)))
        return losses(trainer)

    padded, _ = trained()
    hooked(collate=True)
    flattened, shapes = trained()
    assert flattened == pytest.approx(padded, rel=NEAR) and all(rows == 1 for rows, _ in shapes)


class LooksAtRows(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        self.rows = len(inputs["input_ids"])
        return super().compute_loss(model, inputs, *args, **kwargs)


class LoadsItself(Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=3, collate_fn=self.data_collator)


class OfOnesOwn(DataCollatorForSeq2Seq):
    pass


@pytest.mark.parametrize(
    ("collator", "options", "why"),
    [
        (OfOnesOwn, {}, "OfOnesOwn, of .*test_run, is none of the collators"),
        (DataCollatorForSeq2Seq, {"cls": LooksAtRows}, "LooksAtRows.compute_loss is not Transformers' own"),
        (DataCollatorForSeq2Seq, {"cls": LoadsItself}, "LoadsItself.get_train_dataloader is not Transformers' own"),
        (DataCollatorForSeq2Seq, {"compute_loss_func": lambda outputs, labels, **_: outputs.logits.mean()},
         "its compute_loss_func may look at rows"),
    ],
    ids=["collator", "compute_loss", "get_train_dataloader", "compute_loss_func"],
)  # fmt: skip
def test_collate_leaves_alone_what_may_look_at_rows(hooked, folder, lines, collator, options, why):
    hooked(collate=True)
    _, shapes = losses(trainer_of(loaded(folder), folder, collator(tokenizer_of(folder)), **options))
    assert any(rows > 1 for rows, _ in shapes)
    hooked.off()
    *said, last = (line for line in lines() if "patched" not in line)
    assert (
        last == NOTHING
        and len(said) == 1
        and re.search(f"trains padded, as it would without --collate: .*{why}", said[0])
    ), said


def test_collate_says_of_what_else_it_will_not_flatten(hooked, folder, monkeypatch):
    tokenizer = tokenizer_of(folder)
    trainer = trainer_of(by_its_class(), folder, DataCollatorForSeq2Seq(tokenizer))
    assert "not patched" in flattening.why_trainer_stays_padded(trainer)
    fa2patch.apply(trainer.model)
    assert flattening.why_trainer_stays_padded(trainer) == ""
    for name, value, why in (
        ("data_collator", DataCollatorForSeq2Seq(tokenizer, return_tensors="np"), "return_tensors='np'"),
        ("model", torch.nn.Linear(1, 1), "no Transformers model"),
        ("args", SimpleNamespace(n_gpu=2, world_size=1), "DataParallel"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(trainer, name, value)
            assert why in flattening.why_trainer_stays_padded(trainer)
    for accelerator, options, why in (
        ({"split_batches": True}, {"world_size": 2}, "split_batches"),
        ({"dispatch_batches": None}, {"world_size": 2}, "dispatch_batches"),
        ({"dispatch_batches": None}, {"world_size": 1, "torch_compile": True}, "torch_compile"),
        ({"parallelism_config": SimpleNamespace(cp_enabled=True)}, {"world_size": 2}, "context or sequence"),
        ({"dispatch_batches": False}, {"world_size": 2}, ""),
        ({"dispatch_batches": None}, {"world_size": 1}, ""),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(trainer, "accelerator", SimpleNamespace(**accelerator))
            patched.setattr(trainer, "args", SimpleNamespace(n_gpu=1, **options))
            patched.setattr(trainer, "train_dataset", Streamed([]))
            found = flattening.why_trainer_stays_padded(trainer)
            assert (why in found) if why else not found


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"labels": None}, "no labels"),
        ({"attention_mask": None}, "no attention_mask"),
        ({"attention_mask": [[0, 1, 1], [1, 1, 1]]}, "right"),
        ({"attention_mask": [[1, 0, 1], [1, 1, 1]]}, "right"),
        ({"attention_mask": [[1, 1, 2], [1, 1, 1]]}, "right"),
        ({"labels": [[1, 2, 3], [4, 5, 6]]}, "padding has labels"),
        ({"position_ids": [[0, 1, 2], [0, 1, 2]]}, "position_ids"),
        ({"scores": [1.0, 2.0]}, "its scores"),
        ({"pixels": [[[1.0] * 2] * 3] * 2}, "its pixels"),
    ],
)
def test_a_batch_that_would_train_otherwise_stays_padded(lines, change, why):
    good = {"input_ids": [[1, 2, 0], [4, 5, 6]], "attention_mask": [[1, 1, 0], [1, 1, 1]],
            "labels": [[1, 2, -100], [4, 5, 6]]}  # fmt: skip
    padded = {key: torch.tensor(value) for key, value in {**good, **change}.items() if value is not None}
    collate = flattening.Flattening(lambda features: padded, keep_first=False, lengths=True)
    assert collate([]) is padded and collate([]) is padded
    (line,) = lines()
    assert "a batch stays padded" in line and why in line


@pytest.mark.parametrize("keep_first", [True, False])
def test_a_flattened_batch_holds_the_padded_ones_real_tokens(keep_first):
    padded = {
        "input_ids": [[1, 2, 0], [4, 5, 6]],
        "attention_mask": [[1, 1, 0], [1, 1, 1]],
        "labels": [[1, -100, -100], [4, 5, 6]],
        "token_type_ids": [[0, 1, 0], [0, 1, 1]],
    }
    tensors = {key: torch.tensor(value) for key, value in padded.items()}
    batch = flattening.Flattening(lambda features: tensors, keep_first, lengths=True)([])
    first = [1, 4] if keep_first else [-100, -100]
    assert {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in batch.items()} == {
        "input_ids": [[1, 2, 4, 5, 6]],
        "labels": [[first[0], -100, first[1], 5, 6]],
        "position_ids": [[0, 1, 0, 1, 2]],
        "token_type_ids": [[0, 1, 0, 1, 1]],
        "cu_seq_lens_q": [0, 2, 5],
        "cu_seq_lens_k": [0, 2, 5],
        "max_length_q": 3,
        "max_length_k": 3,
    }


def test_a_flattening_collator_goes_to_workers(folder):
    made = flattening.Flattening(DataCollatorForSeq2Seq(tokenizer_of(folder)), keep_first=True, lengths=False)
    features = features_of([[3, 4], [5, 6, 7]])
    there, here = pickle.loads(pickle.dumps(made))(features), made(features)
    assert {*there} == {*here} == {"input_ids", "labels", "position_ids"}
    assert all(torch.equal(there[key], here[key]) for key in here)


def test_left_padded_rows_stay_padded(hooked, folder, lines):
    hooked(collate=True)
    collator = DataCollatorForSeq2Seq(tokenizer_of(folder, "left"))
    _, shapes = losses(trainer_of(loaded(folder), folder, collator))
    assert any(rows > 1 for rows, _ in shapes)
    assert "padding_side='right'" in lines()[-1]


def test_collate_without_a_trainer_says_that_it_did_nothing(hooked, lines):
    hooked(collate=True)
    hooked.off()
    assert lines() == []
    hooked(collate=True)
    from_config()
    hooked.off()
    assert "--collate has changed nothing: no Trainer" in lines()[-1]


def script(how, folder, layout, output, python=sys.executable, **env):
    output.mkdir(exist_ok=True)
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env}
    line = [str(python), *how, str(SCRIPTS / "train.py"), str(folder), layout, str(output)]
    done = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads((output / "found.json").read_text()), messages(done.stderr)


RUN = ("-m", "fa2patch", "run")


def test_an_unchanged_script_leaks_without_and_is_isolated_with_it(folder, tmp_path):
    train = runpy.run_path(str(SCRIPTS / "train.py"))["main"]
    found = {}
    for layout in ("pad", "pack"):
        (tmp_path / layout).mkdir()
        train(str(folder), layout, str(tmp_path / layout))
        found[layout] = json.loads((tmp_path / layout / "found.json").read_text())["losses"]
    isolated, said = script(RUN, folder, "pack", tmp_path / "run")
    assert max(abs(a - b) for a, b in zip(found["pack"], found["pad"])) > 0.01, "it does not leak, so nothing is shown"
    assert isolated["losses"] == pytest.approx(found["pad"], rel=NEAR)
    assert said == [PATCHED, "fa2patch: LlamaForCausalLM computed packed rows, each document by itself."]


# --- slow: other versions, other command lines, more processes -------------------------------------------------------


def environment(release, *pins):
    return environments.make(environments.version(release).changed(["click", *pins]), matrix.environments_folder())


@pytest.fixture
def there(tmp_path):
    # Another Python makes the scripts' folder.

    def set_up(python):
        home = tmp_path / "model"
        home.mkdir()
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        line = [str(python), str(SCRIPTS / "folder.py"), str(home)]
        subprocess.run(line, env=variables, check=True, capture_output=True)
        return home

    return set_up


@pytest.mark.slow
@pytest.mark.parametrize(
    ("release", "accelerate", "leaks"),
    [("4.36.2", "0.25.0", True), ("4.44.2", "0.34.2", True), ("4.57.6", "1.12.0", False), ("5.2.0", "1.12.0", True)],
)
def test_an_unchanged_script_with_other_versions(there, tmp_path, release, accelerate, leaks):
    python = environment(release, f"accelerate=={accelerate}")
    model = there(python)
    using = {"python": python, "PYTHONPATH": str(ROOT)}
    padded, _ = script((), model, "pad", tmp_path / "pad", **using)
    packed, _ = script((), model, "pack", tmp_path / "pack", **using)
    isolated, said = script(RUN, model, "pack", tmp_path / "run", **using)
    assert len(said) == 2 and "LlamaForCausalLM patched: 2 attention layers" in said[0]
    assert "computed packed rows" in said[1]
    alone = max(abs(a - b) for a, b in zip(packed["losses"], isolated["losses"]))
    assert not leaks or alone > 0.01
    if release in ("4.36.2", "4.44.2"):  # later padded runs count labels that nothing predicts
        assert isolated["losses"] == pytest.approx(padded["losses"], rel=1e-4)  # logs have four digits
    collated, said = script((*RUN, "--collate"), model, "pad", tmp_path / "collate", **using)
    assert collated["losses"] == pytest.approx(padded["losses"], abs=1.01e-4) and collated["steps"] == padded["steps"]
    assert collated["eval_loss"] == pytest.approx(padded["eval_loss"], rel=1e-4)
    assert any("laid end to end" in line for line in said)


TRL = ("trl==1.16.0", "accelerate==1.15.0", "peft==0.21.2", "datasets==5.2.0")


@pytest.mark.slow
def test_trls_own_command_line(there, tmp_path):
    # ``trl sft`` starts its script through accelerate, in a separate process. In Transformers 5.23 one padding-free row
    # does not leak without fa2patch, so the test shows only that the patch reaches that process.
    python = environment("5.23.0", *TRL)
    model = there(python)

    def sft(name, how, *options):
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        line = [
            *how, "sft", "--model_name_or_path", model, "--dataset_name", model / "data", "--output_dir",
            tmp_path / name, "--max_steps", "3", "--per_device_train_batch_size", "4", "--logging_steps", "1",
            "--learning_rate", "1e-3", "--report_to", "none", "--use_cpu", "--save_steps", "3",
            "--bf16", "false", *options,
        ]  # fmt: skip
        done = subprocess.run([*map(str, line)], env=variables, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        state = json.loads((tmp_path / name / "checkpoint-3" / "trainer_state.json").read_text())
        return [entry["loss"] for entry in state["log_history"] if "loss" in entry], messages(done.stderr)

    free = ("--padding_free", "--max_length", "None")
    padded, _ = sft("padded", [python.with_name("trl")])
    isolated, said = sft("isolated", [python, *RUN, "trl"], *free)
    assert isolated == pytest.approx(padded, rel=NEAR)
    assert said[0] == PATCHED and "computed packed rows" in said[-1]
    packed, said = sft("packed", [python, *RUN, "-m", "trl.cli.main"])
    assert packed == pytest.approx(padded, rel=NEAR)
    assert "SFTTrainer computes padded batches packed" in said[-2]
    tokens, cells = (int(number.replace(",", "")) for number in re.findall(r"(?<= )[\d,]+(?= tokens| of)", said[-1]))
    assert tokens < cells


def launchers():
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    return {
        "torchrun": (*torchrun, "-m", "fa2patch", "run", "--collate"),
        "around torchrun": (*RUN, "--collate", *torchrun),
        "accelerate": ("-m", "accelerate.commands.launch", "--cpu", "-m", "fa2patch", "run", "--collate"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", launchers())
def test_under_launchers_one_rank_speaks_and_both_train_as_padded(folder, tmp_path, how):
    line = launchers()[how]
    without = line[len(RUN) + 1 :] if line[: len(RUN)] == RUN else line[: line.index("fa2patch") - 1]
    padded, _ = script(without, folder, "pad", tmp_path / "padded")
    found, said = script(line, folder, "pad", tmp_path / "out")
    assert found["losses"] == pytest.approx(padded["losses"], rel=NEAR) and found["steps"] == padded["steps"] == 4
    assert len(said) == 3 and "patched" in said[0] and "laid end to end" in said[1]
    assert "computed packed rows" in said[2]


@pytest.mark.slow
def test_processes_that_a_script_starts_are_reached(folder):
    done = started(str(SCRIPTS / "spawned.py"), str(folder))
    assert done.stdout.split() == ["spawn", "True", "fork", "True"], done.stderr


def test_what_waits_for_transformers_names_its_modules_as_fa2patch_does():
    # The file that waits imports nothing of fa2patch, so it names them once more.
    watched = {*fa2patch_startup.WATCHED.items()}
    assert {(name, ("models", transformers_names.PRETRAINED)) for name in transformers_names.MODELING} <= watched
    assert {(name, ("trainers", transformers_names.TRAINER)) for name in transformers_names.TRAINERS} <= watched
