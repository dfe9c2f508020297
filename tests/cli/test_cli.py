"""``fa2patch matrix``: its output, its exit codes, and its messages about input that it cannot use."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("click")
pytest.importorskip("packaging")

from command_line import as_json, on_one_line, output, run
from evidence import GOOD, evidence

from compat_matrix import run as matrix_run
from compat_matrix.environments import tomllib
from compat_matrix.user_models.matrix import model as model_of
from fa2patch.cli import kernels
from fa2patch.cli.commands import COMMANDS, NEEDED, main

ROOT = Path(__file__).parents[2]
LLAMA = str(ROOT / "tests" / "own_configs" / "llama_3_1.json")
ROWS = ["one row", "two rows"]
OK = {"fa2patch": {"sdpa": GOOD}, "seam": ["interface"], "upstream": {"sdpa": dict.fromkeys(ROWS, "ok")}}
LEAK = {**OK, "fa2patch": {"sdpa": {**GOOD, "ok": GOOD["ok"] - 1, "fail": {"packed_row": "logits: off by 2.1"}}}}
REFUSED = {"refused": "UnsupportedModel: alibi", "upstream": {"sdpa": dict.fromkeys(ROWS, "leak")}}


def matrix(*arguments):
    return run("matrix", *arguments)


@pytest.fixture
def finding(monkeypatch):
    # The checks in environments are replaced by given cells, and their calls are returned.
    asked = []

    def set_up(cells):
        def found(version, folder, packages, *options, doing):
            doing("preparing")
            asked.append((version, sorted(os.listdir(packages)), options))
            named = {name: cell for end, cell in cells.items() for name in options if name.endswith(end)}
            return evidence(version.name, named, transformers="4.44.2", upstream_rows=ROWS)

        monkeypatch.setattr(matrix_run, "evidence", found)
        return asked

    return set_up


def test_a_cell_shows_both_states_in_every_format(finding, tmp_path):
    asked = finding({"llama_3_1.json": {**OK, "notes": ["left out of the config: pretraining_tp"]}})
    arguments = ("--model", LLAMA, "--transformers", "4.44,4.57.6", "--pins", "peft==0.12.0")
    text = matrix(*arguments, "--format", "markdown")
    assert text.exit_code == 0, text.output
    assert "| llama_3_1 (llama) | ok / alone: ok | ok / alone: ok |" in text.output
    assert "left out of the config: pretraining_tp" in text.output
    table = matrix(*arguments, "--format", "table")
    assert "llama_3_1" in table.output and "alone: ok" in table.output
    cells = as_json(matrix(*arguments, "--format", "json").output)["cells"]
    assert [(cell["transformers"], cell["fa2patch"], cell["upstream"]) for cell in cells] == [
        ("4.44.2", "ok", "ok"),
        ("4.57.6", "ok", "ok"),
    ]
    file = tmp_path / "cells.json"
    assert matrix(*arguments, "--json", str(file)).exit_code == 0 and json.loads(file.read_text())["ok"]
    version, packages, options = asked[0]
    assert "peft==0.12.0" in version.requirements and "peft==0.13.2" not in version.requirements
    assert packages == ["compat_matrix", "fa2patch"] and options == ("--families", str(Path(LLAMA).resolve()))


@pytest.mark.parametrize(
    ("cell", "options", "code", "said"),
    [
        (OK, (), 0, "ok / alone: ok"),
        (LEAK, (), 1, "FAIL / alone: ok"),
        (REFUSED, (), 1, "refused / alone: LEAKS"),
        (REFUSED, ("--allow-refused",), 0, "UnsupportedModel: alibi"),
        ({"error": "sdpa: ValueError: no such rope"}, (), 1, "no such rope"),
        (None, (), 1, "found none in these versions"),
    ],
)
def test_the_exit_code_says_whether_every_cell_is_ok(finding, cell, options, code, said):
    finding({"llama": cell} if cell else {})
    result = matrix("--model", "llama", "--transformers", "4.44.2", *options)
    assert result.exit_code == code and said in result.output, result.output


def test_an_environment_that_cannot_be_made_is_a_failure_with_its_reason(monkeypatch):
    def evidence(*arguments, doing):
        raise RuntimeError("uv pip install failed: no version of transformers==4.99.1")

    monkeypatch.setattr(matrix_run, "evidence", evidence)
    result = matrix("--model", "llama", "--transformers", "4.99.1")
    assert result.exit_code == 1 and "no version of transformers==4.99.1" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "nowhere/config.json", "--transformers", "4.44.2"), ["nowhere", "config.json", "save_pretrained"]),
        (("--model", str(ROOT / "tests"), "--transformers", "4.44.2"), ["config.json", "found nothing"]),
        (("--model", "llama", "--transformers", "newest"), ["--transformers", "version number", "'newest'"]),
        (("--model", "llama", "--transformers", "4.44.2", "--python", "three"), ["--python", "3.11", "'three'"]),
        (
            ("--model", "llama", "--transformers", "4.44.2", "--pins", "peft=0.1"),
            ["--pins", "peft==0.13.2", "peft=0.1"],
        ),
        (("--model", "llama", "--transformers", "4.44.2", "--format", "html"), ["'html'", "markdown"]),
        (("--transformers", "4.44.2"), ["--model"]),
    ],
)
def test_bad_usage_exits_with_2_and_says_what_was_looked_for(arguments, said):
    result = matrix(*arguments)
    assert result.exit_code == 2
    shown = on_one_line(result.output)
    assert all(what in shown for what in said), shown


def test_a_config_without_a_model_type_is_bad_usage(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    result = matrix("--model", str(tmp_path), "--transformers", "4.44.2")
    assert result.exit_code == 2 and '"model_type"' in result.output and "hidden_size" in result.output


def test_a_folder_is_called_by_its_name(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    model = model_of(str(folder))
    assert (model.name, model.kind, model.architecture) == ("my-model", "llama", str(folder / "config.json"))
    assert model_of("llama").architecture == "llama"


def alone(before=""):
    # A process of its own: this one has the command line imported already.
    code = f"""import sys
{before}
import fa2patch.cli.commands
from click.testing import CliRunner
for arguments in (["--version"], ["--help"], ["no-such-command"], ["run", "--help"]):
    CliRunner().invoke(fa2patch.cli.commands.main, arguments)
assert not {{"torch", "numpy", "transformers", "rich", "compat_matrix"}} & {{*sys.modules}}"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


def test_the_command_line_imports_nothing_heavy():
    done = alone()
    assert done.returncode == 0, done.stderr


def test_the_list_of_commands_is_whole():
    for name, what in COMMANDS.items():
        command = main.get_command(None, name)
        assert command.name == name and what in output("--help").replace("\n                 ", " ")


def test_without_click_one_line_says_what_to_install():
    done = alone("sys.modules['click'] = None")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "fa2patch's command line needs click, which is not installed: pip install 'fa2patch[cli]' (in a clone: "
        "pip install -e '.[cli]')"
    ]


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (["kernels"], "rich"),
        pytest.param(["doctor"], "rich", marks=pytest.mark.slow),
        pytest.param(["matrix", "--model", LLAMA, "--transformers", "4.44"], "packaging", marks=pytest.mark.slow),
    ],
)
def test_without_another_package_of_the_extra_one_line_says_what_to_install(command, missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from fa2patch.cli.commands import main; main({command})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: fa2patch's command line needs {missing}") and "pip install 'fa2patch[cli]'" in line


def test_the_extra_of_the_command_line_is_what_it_needs():
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extra = metadata["project"]["optional-dependencies"]["cli"]
    assert tuple(re.match(r"[a-z]+", requirement)[0] for requirement in extra) == NEEDED


def test_an_import_error_of_another_package_is_not_hidden(monkeypatch):
    def rows():
        import no_such_package  # noqa: F401

    monkeypatch.setattr(kernels, "kernel_rows", rows)
    found = run("kernels")
    assert isinstance(found.exception, ModuleNotFoundError) and found.exception.name == "no_such_package"


def test_help_names_every_option():
    shown = output("matrix", "--help")
    options = ("model", "transformers", "format", "pins", "torch", "python", "environments", "jobs", "allow-refused")
    for option in options:
        assert f"--{option}" in shown


@pytest.mark.slow
def test_a_real_matrix_in_an_environment_made_for_it(tmp_path):
    options = ["--transformers", "4.57.6", "--environments", str(tmp_path), "--format", "json"]
    result = matrix("--model", LLAMA, *options)
    assert result.exit_code == 0, result.output
    (cell,) = as_json(result.output)["cells"]
    assert cell["fa2patch"] == "ok" and cell["upstream"] in ("ok", "plain")
