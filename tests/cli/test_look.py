"""``fa2patch verify``, ``doctor``, ``status`` and ``architectures``: their output and their exit codes."""

import json
from pathlib import Path

import pytest
import torch
import transformers

pytest.importorskip("click")
pytest.importorskip("rich")

from command_line import as_json, on_one_line, run
from tree_cases import rows_of_segments
from two_layers import tiny_llama

import fa2patch
from compat_matrix import tiny_models
from fa2patch import evidence
from fa2patch.cli import doctor
from fa2patch.cli.verify import is_isolated, verify_unpatched
from fa2patch.proof.inputs import example

CONFIG = str(Path(__file__).parents[1] / "own_configs" / "llama_3_1.json")


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.json"
    ids = torch.randint(3, 64, (2, 9)).tolist()
    file.write_text(json.dumps({"input_ids": ids, "position_ids": [[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2}))
    return file


@pytest.mark.parametrize("model", ["llama", CONFIG])
def test_verify_shows_upstreams_leak_and_our_isolation(model, rows):
    result = run("verify", model, "--batch", rows, "--json")
    assert result.exit_code == 0, result.output
    found = as_json(result.output)
    assert found["model"] == "LlamaForCausalLM" and found["ok"] and found["fa2patch"]["ok"]
    assert not found["alone"]["ok"] and found["alone"]["first_leak"] == "model.layers.0.self_attn"
    assert len(found["fa2patch"]["documents"]) == 4
    text = run("verify", model, "--batch", rows).output
    assert "Transformers alone" in text and "NOT ISOLATED" in text and "with fa2patch: isolated" in text
    assert "attention computed without boundaries" in " ".join(text.split())


def test_verify_shows_segments_and_what_they_continue(tmp_path):
    file = tmp_path / "tree.json"
    batch = rows_of_segments([(4, -1), (3, 0), (2, 0)])
    file.write_text(json.dumps({k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}))
    result = run("verify", "llama", "--batch", file, "--json")
    found = as_json(result.output)
    assert result.exit_code == 0 and "is not patched" in found["alone"]["error"]
    assert [one["parent"] for one in found["fa2patch"]["documents"]] == [None, 1, 1]
    lines = [line.split() for line in run("verify", "llama", "--batch", file).output.splitlines()]
    assert ["segment", "row", "token", "length", "continues"] in [line[:5] for line in lines]
    assert ["3", "0", "7", "2", "1", "0", "0"] in [line[:7] for line in lines]


def test_verify_takes_weights_and_a_batch_that_torch_saved(tmp_path, rows):
    tiny_llama().save_pretrained(tmp_path / "model")
    batch = {name: torch.tensor(value) for name, value in json.loads(rows.read_text()).items()}
    torch.save(batch, tmp_path / "rows.pt")
    found = as_json(
        run("verify", tmp_path / "model", "--batch", tmp_path / "rows.pt", "--max-documents", 1, "--json").output
    )
    assert found["ok"] and [doc["gradient"] is None for doc in found["fa2patch"]["documents"]] == [False] + [True] * 3


def test_verify_exits_with_1_where_fa2patch_refuses(tmp_path):
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon", "alibi": True, **sizes}))
    result = run("verify", tmp_path, "--json")
    assert result.exit_code == 1 and "alibi" in as_json(result.output)["fa2patch"]["error"]


def test_doctor_tries_it(tmp_path):
    result = run("doctor", "--json", "--svg", tmp_path / "doctor.svg")
    found = as_json(result.output)
    assert result.exit_code == 0 and found["ok"] and found["patched"]["state"] == "isolated"
    assert found["torch"] == torch.__version__ and found["seam"] in ("interface", "function", "method")
    assert found["packages"]["flash-attn-4"] == {"version": None, "problem": "not installed"}
    assert {"name": "reference", "usable": True, "reason": ""} in found["kernels"]
    svg = (tmp_path / "doctor.svg").read_text()
    assert "fa2patch" in svg and "@font-face" not in svg


def test_doctor_exits_with_1_where_a_patched_model_leaks(monkeypatch):
    monkeypatch.setattr(doctor, "_state", lambda found: {"state": "leaks", "reason": "here"})
    result = run("doctor")
    assert result.exit_code == 1 and "fa2patch does not work here: here" in result.output


def test_doctor_says_it_when_a_package_does_not_import(monkeypatch, tmp_path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    (tmp_path / "flash_attn-2.5.dist-info").mkdir()
    (tmp_path / "flash_attn-2.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.5"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor._package("flash-attn") == {
        "version": "2.5",
        "problem": "does not import: ImportError: undefined symbol",
    }


@pytest.mark.parametrize("minor, defects", [("4.43", 3), ("4.53", 4), ("4.54", 4), ("5.23", 1)])
def test_every_version_has_its_own_defects(minor, defects):
    assert len(doctor.defects_in(minor)) == defects


def test_doctor_says_what_it_does_not_know_of_a_release_without_evidence(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "9.9.0" if name == "transformers" else "1.0")
    last = list(evidence.upstream())[-1]
    found = doctor.diagnose()
    assert found["known"] is None and found["evidence_ends"] == last
    shown = on_one_line(run("doctor").output)
    assert f"Transformers 9.9.0 was not checked with fa2patch: the evidence ends with {last}" in shown
    assert "Only the tiny Llama above was tried here" in shown and "fa2patch matrix --model" in shown
    assert "Defects known up to" in shown and "from the compat matrix, on its flash route" not in shown


def test_doctor_says_nothing_of_it_where_there_is_evidence(monkeypatch):
    last = list(evidence.upstream())[-1]
    real = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: f"{last}.9" if name == "transformers" else real(name))
    shown = run("doctor").output
    assert "was not checked with fa2patch" not in shown and "Defects known up to" not in shown


def test_what_the_matrix_knows_comes_along():
    known = evidence.upstream()
    assert {"4.34", "4.43", "4.57", "5.0"} <= set(known)
    assert "gptj" in known["4.57"]["leak"] and known["4.57"]["rows"]["one row"] > 40


def test_status_tells_what_apply_would_do_and_does_nothing(tmp_path):
    tiny_llama().config.save_pretrained(tmp_path)
    result = run("status", tmp_path, "--json")
    found = as_json(result.output)
    assert result.exit_code == 0 and [layer["name"] for layer in found["layers"]] == [
        "layers.0.self_attn",
        "layers.1.self_attn",
    ]
    assert fa2patch.status(tiny_llama()) is None
    assert "would be" in run("status", tmp_path).output and run("status", tmp_path / "config.json").exit_code == 0


def test_status_exits_with_1_for_a_model_that_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon", "alibi": True}))
    assert run("status", tmp_path).exit_code == 1 and "refused" in as_json(run("status", tmp_path, "--json").output)
    assert run("status", tmp_path / "nothing").exit_code == 2


# --- Transformers alone, with its default cache and without one: doctor and verify say the same, and why

NEWEST = tuple(int(number) for number in transformers.__version__.split(".")[:2]) >= (5, 0)
new = pytest.mark.skipif(not NEWEST, reason="earlier versions leak both ways as sdpa")


def of(model, **more):
    return verify_unpatched(model, {**example(torch.device("cpu"), model), **more})


@new
def test_it_is_isolated_without_a_cache_only_and_the_cause_is_named():
    found = of(tiny_models.build("llama", "sdpa"))
    assert not is_isolated(found.by_default) and is_isolated(found.without_cache)
    assert "Loaded as sdpa" in found.why and "use_cache=False" in found.why and "config.use_cache" in found.why


def test_a_batch_that_says_so_is_taken_one_way():
    for use_cache in (True, False):
        found = of(tiny_models.build("llama", "sdpa"), use_cache=use_cache)
        assert found.without_cache is None and not found.why
        assert is_isolated(found.by_default) == (NEWEST and not use_cache)


def test_a_model_that_makes_no_cache_is_taken_one_way():
    model = tiny_models.build("llama", "sdpa")
    model.config.use_cache = False
    assert of(model).without_cache is None


def test_an_error_is_text():
    model = tiny_models.build("llama", "sdpa")
    found = verify_unpatched(model, {"input_ids": torch.zeros(1, 8, dtype=torch.int64)})
    assert found.by_default.startswith("BadBatch") and not found.why


def test_doctor_says_what_verify_says():
    model = tiny_llama()
    found, examined = of(model), doctor.diagnose()
    assert (examined["alone"]["state"] == "isolated") == is_isolated(found.by_default)
    assert (examined["alone_without_cache"]["state"] == "isolated") == is_isolated(found.without_cache)
    assert examined["why"] == found.why and examined["patched"]["state"] == "isolated"
