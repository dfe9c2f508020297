"""Mistakes on the command line end with one sentence and exit code 2, before anything is built or a hub is asked."""

import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

pytest.importorskip("click")
pytest.importorskip("rich")

from command_line import on_one_line, run

from compat_matrix import environments
from compat_matrix import run as matrix_run
from fa2patch.cli import models


@pytest.fixture(autouse=True)
def nothing_is_built(monkeypatch):
    def build(*arguments, **options):
        raise AssertionError("an environment was made")

    monkeypatch.setattr(matrix_run, "evidence", build)
    monkeypatch.setattr(environments, "make", build)


@pytest.fixture
def online(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def fails(*arguments):
    result = run(*arguments)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), (result.output, result.exception)
    return on_one_line(result.output)


MATRIX = ("matrix", "--transformers", "4.57.6", "--model")


@pytest.mark.parametrize("command", [("verify",), ("status",), MATRIX])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lama", ["'lama' is no file or folder here and no model type", "Did you mean llama"]),
        ("nofile.json", ["nofile.json: looked for a Hugging Face config.json, found nothing"]),
    ],
)
def test_a_model_that_is_not_here(command, name, said):
    found = fails(*command, name)
    assert all(part in found for part in said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("status", "llama", "--kernel", "fast"), "kernel='fast': expected one of 'auto'"),
        (("status", "llama", "--dtype", "int8"), "looked for float32, bfloat16 or float16, found 'int8'"),
        (("status", "llama", "--dtype", "half precision"), "found 'half precision'"),
        (("verify", "llama", "--dtype", "int8"), "looked for float32"),
        (("verify", "llama", "--batch", __file__), "looked for a dict of tensors"),
        (("verify", "llama", "--batch", "LIST"), "found list.json, which holds a list"),
        (("verify", "llama", "--batch", "FLAT"), "flat.json: batch['input_ids']: expected integers [batch, length]"),
        (("verify", "llama", "--batch", "TEXT"), "found text.json, which does not read"),
        (
            ("verify", "./nothing"),
            "nothing/config.json: looked for a Hugging Face config.json, found nothing: its folder",
        ),
        (("verify", "holds/config.json"), "found nothing of that name; its folder holds batch.json"),
        (("verify", "holds/"), "holds/config.json: looked for a Hugging Face config.json, found nothing of that name"),
        (("verify", "nowhere/at/all.json"), "found nothing, and no folder nowhere/at"),
        (("verify", "llama", "--max-documents", 0), "max-documents"),
        (("verify", "lama"), f"Transformers {transformers.__version__}"),
        ((*MATRIX, "t5"), "the matrix does not check this model type. Give a config.json"),
        ((*MATRIX, "gemma3n"), "vision-language; its text side is there"),
        (
            ("matrix", "--model", "qwen3", "--transformers", "4.44.2,4.45.2"),
            "qwen3: looked for it in Transformers 4.44.2, 4.45.2, found none. It is in 4.51-",
        ),
        (
            ("matrix", "--model", "llama", "--transformers", "4.20.0"),
            "looked for Transformers 4.34 or newer, found 4.20.0",
        ),
        (("matrix", "--model", "llama", "--transformers", "4.57.6,4.33.3"), "found 4.33.3"),
        (("matrix", "--model", "llama", "--transformers", "newest"), "looked for a version number"),
        ((*MATRIX, "llama", "--json", "nowhere/cells.json"), "looked for the folder 'nowhere' to write"),
        (("doctor", "--svg", "nowhere/doctor.svg"), "looked for the folder 'nowhere' to write"),
    ],
)
def test_a_wrong_option_is_named(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "holds").mkdir()
    (tmp_path / "holds" / "batch.json").touch()
    texts = {"LIST": "[1, 2]", "FLAT": '{"input_ids": [1, 2]}', "TEXT": '{"input_ids": [["a"]]}'}
    for name, text in texts.items():
        (tmp_path / f"{name.lower()}.json").write_text(text)
    arguments = [f"{each.lower()}.json" if each in texts else each for each in arguments]
    assert said in fails(*arguments)


@pytest.mark.parametrize("command", [("verify",), ("status",), MATRIX])
def test_a_config_that_cannot_be_read(command, tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama"}')

    def refused(*arguments, **options):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_text", refused)  # root may read every file
    assert "Permission denied" in fails(*command, str(file))
    monkeypatch.setattr(Path, "is_file", refused)  # nor may the folder be looked into
    assert "config.json: Permission denied" in fails(*command, str(file))


def test_matrix_without_uv_names_the_extra(monkeypatch):
    monkeypatch.setattr(environments.sys, "executable", "/nowhere/python")
    monkeypatch.setattr(environments.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"uv, which was not found: pip install uv.*'fa2patch\[cli\]'"):
        environments._uv("venv")


def test_a_config_is_not_what_is_tried(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": -32}')
    result = run("verify", tmp_path)
    said = on_one_line(result.output)
    assert "a tiny model of its kind, with random weights, stands in for it. Its sizes are not tried" in said


@pytest.mark.parametrize("command", [("verify",), ("status",), MATRIX])
def test_a_model_of_the_hub_offline_says_so_at_once(command, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(models, "_request", lambda *arguments: pytest.fail("the hub was asked"))
    assert "HF_HUB_OFFLINE is set, and it is not in the local cache" in fails(*command, "org/none")


@pytest.mark.parametrize("command", [("verify",), ("status",)])
def test_pretrained_asks_for_a_name_without_a_slash(command, online, monkeypatch):
    monkeypatch.setattr(models, "_request", lambda name, seconds: f"{name} is not there")
    assert "gpt2 is not there" in fails(*command, "gpt2", "--pretrained")


def test_a_hub_that_does_not_answer_is_not_waited_for(online, monkeypatch):
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
    monkeypatch.setattr(models, "_request", lambda *arguments: time.sleep(5) or "")
    begun = time.perf_counter()
    said = fails("verify", "org/none")
    assert "did not answer within 0.2 s" in said and time.perf_counter() - begun < 3


def test_a_hub_without_the_model_says_so(online, monkeypatch):
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.utils import RepositoryNotFoundError

    def asked(self, name, timeout):
        assert timeout == models.SECONDS
        raise RepositoryNotFoundError("404", response=httpx.Response(404, request=httpx.Request("GET", "https://hub")))

    monkeypatch.delenv("HF_HUB_ETAG_TIMEOUT", raising=False)
    monkeypatch.setattr(HfApi, "model_info", asked)
    assert "has no model of this name" in fails("status", "org/none")


def test_an_unreachable_hub_leaves_the_local_cache(online, monkeypatch):
    monkeypatch.setattr(models, "_request", lambda *arguments: "it cannot be reached")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: f"{name}/{file}")
    found = models.resolve("org/name")
    assert found.kind == "hub" and found.local_only
    monkeypatch.setattr(models, "_request", lambda *arguments: "")
    assert not models.resolve("org/name").local_only


@pytest.mark.parametrize("name", ["cuda", "cuda:99", "gpu"])
@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has a GPU")
def test_a_device_that_is_not_here(name):
    assert f"looked for a device of this machine (cpu), found '{name}'" in fails("verify", "llama", "--device", name)


@pytest.mark.parametrize("command", ["verify", "status"])
def test_an_attention_implementation_that_does_not_exist(command):
    said = fails(command, "llama", "--attn-implementation", "flash")
    assert "looked for one of eager, sdpa, flash_attention_2" in said and "Did you mean flash_attention_2?" in said


@pytest.mark.parametrize("config", ['{"model_type": "no_such_type"}', '{"model_type": "llama", "hidden_act": "none"}'])
def test_a_config_that_transformers_cannot_use(config, tmp_path):
    (tmp_path / "config.json").write_text(config)
    assert "Transformers cannot" in fails("status", tmp_path)
    assert "Transformers cannot" in fails("verify", tmp_path)


def test_a_config_of_wrong_types_keeps_the_reason(tmp_path):
    from fa2patch.cli.output import in_one_line

    error = ValueError("Validation error for field 'hidden_size':\n    TypeError: expected int, got str\nmore")
    assert (
        in_one_line(error) == "ValueError: Validation error for field 'hidden_size': TypeError: expected int, got str"
    )


def test_weights_that_do_not_load(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_text("nothing")
    assert "does not load" in fails("verify", tmp_path)


@pytest.mark.parametrize("command", ["verify", "status"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fnet", "looked in every layer for attention with a seam"),
        ("vit", "embeds token ids; found ViTModel"),
    ],
)
def test_a_refused_kind_of_model_gets_the_sentence_of_apply(command, name, said):
    result = run(command, name)
    shown = on_one_line(result.output)
    assert result.exit_code == 1 and said in shown and len(shown) < 600, shown


def test_no_package_index_has_this_release(monkeypatch):
    uv = "error: No solution found\n  because: Because there is no version of\n  transformers==4.99.1 and you require"
    monkeypatch.undo()
    assert (
        environments._why(uv) == "the package index has no transformers==4.99.1. Ask for a release that was published"
    )
    assert environments._why("error: no space left") == ""


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys):
    from fa2patch.cli.output import progress_of

    with progress_of(["4.57.6"]) as progress:
        progress("4.57.6", "preparing an environment")
        progress("4.57.6", "done", ended=True)
    assert capsys.readouterr().err.splitlines() == ["4.57.6: preparing an environment", "4.57.6: done"]


def test_progress_is_one_changing_line_on_a_terminal(monkeypatch, capsys):
    from fa2patch.cli.output import progress_of

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_of(["4.57.6"]) as progress:
        progress("4.57.6", "preparing an environment")
    captured = capsys.readouterr()
    assert "4.57.6: preparing an environment" in captured.err and not captured.out
