"""What a MODEL argument means: one answer for every command."""

import click
import pytest
import transformers

pytest.importorskip("click")
pytest.importorskip("rich")

from command_line import as_json, output
from two_layers import tiny_llama

from fa2patch import evidence
from fa2patch.cli import models
from fa2patch.patch.applying import OLDEST


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


@pytest.mark.parametrize(
    ("given", "name", "said"),
    [
        ("llama", "llama", "llama: a model type; "),
        ("Llama", "llama", "Llama: read as the model type llama; "),
        ("GPT-2", "gpt2", "GPT-2: read as the model type gpt2; "),
        ("qwen2-moe", "qwen2_moe", "qwen2-moe: read as the model type qwen2_moe; "),
        ("bert:masked", "bert:masked", "bert:masked: a model type; "),
        ("BERT:masked", "bert:masked", "BERT:masked: read as the model type bert:masked; "),
    ],
)
def test_a_model_type(given, name, said):
    found = models.resolve(given)
    assert (found.kind, found.name) == ("type", name) and found.said("x") == f"{said}x"


def test_a_path_comes_before_a_model_type(folder, monkeypatch):
    (folder / "gpt2").mkdir()
    monkeypatch.chdir(folder)
    assert models.resolve("gpt2").kind == "type"  # a folder without a config is not meant
    (folder / "gpt2" / "config.json").write_text('{"model_type": "llama"}')
    found = models.resolve("gpt2")
    assert (found.kind, found.model_type) == ("folder", "llama") and "no weights" in found.said("")


def test_files_and_folders(folder):
    assert models.resolve(str(folder)).kind == "folder"
    found = models.resolve(str(folder / "config.json"))
    assert found.kind == "config" and found.said("x.").endswith("a config of model type llama; x.")
    (folder / "training_args.bin").write_text("")
    assert models.resolve(str(folder)).kind == "folder"
    (folder / "model.safetensors").write_text("")
    assert models.resolve(str(folder)).kind == models.resolve(str(folder), pretrained=True).kind == "weights"


def test_a_path_that_is_not_there_is_no_name_on_the_hub(tmp_path):
    # ``--pretrained`` says that a name without a slash is of the hub.
    with pytest.raises(click.BadParameter, match="found nothing"):
        models.resolve(str(tmp_path / "none"), pretrained=True)


def test_a_name_with_a_slash_is_of_the_hub(monkeypatch):
    monkeypatch.setattr(models, "must_stay_local", lambda name, hint: False)
    assert models.resolve("org/llama").kind == "hub" and models.resolve("llama", pretrained=True).kind == "hub"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("lama", "llama"),
        ("mistrl", "mistral"),
        ("LlamaForCausalLM", "llama"),
        ("Qwen3-8B", "qwen3"),
        ("gema2", "gemma2"),
    ],
)
def test_suggestions(given, wanted):
    assert wanted in models.suggestions(given, models.model_types())


def test_nothing_is_suggested_for_something_else():
    assert models.did_you_mean("zzzzzz", models.model_types()) == ""


def test_verify_says_what_it_made(folder):
    said = output("verify", "gpt2")
    assert said.startswith("gpt2: a model type; checks a tiny model with random weights. --pretrained loads")
    tiny_llama().save_pretrained(folder)
    assert "a folder with weights; loads its weights." in output("verify", folder)


def test_an_encoder_is_found_without_its_suffix():
    assert as_json(output("verify", "modernbert", "--json"))["model"] == "ModernBertForMaskedLM"


def test_the_class_that_a_config_names_is_loaded(folder):
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=64
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    assert as_json(output("status", folder, "--json"))["model"] == "BertForMaskedLM"


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("dbrx", "modernbert", "qwen2_vl"))]
)
def test_status_takes_a_model_type(name):
    found = as_json(output("status", name, "--json"))
    assert found["layers"] and found["checked"].startswith(f"{name}: a model type; uses")


def test_the_oldest_release_is_the_one_that_apply_takes():
    assert evidence.minors()[0] == "{}.{}".format(*OLDEST)
