"""``fa2patch architectures``, and that tables of 80 columns cut nothing that tells two rows apart."""

import json
import sys
from pathlib import Path

import pytest
import transformers

pytest.importorskip("click")
pytest.importorskip("rich")

from command_line import as_json, on_one_line, output, run

from fa2patch import evidence
from fa2patch.kernels import ORDER

OWN_CONFIG = Path(__file__).parents[1] / "own_configs" / "llama_3_1.json"
MINOR = evidence.minor_of(transformers.__version__)


def rows():
    return as_json(output("architectures", "--json"))["architectures"]


@pytest.mark.skipif(MINOR not in evidence.minors(), reason="there is no evidence of this Transformers")
def test_it_lists_what_this_transformers_has_and_is_isolated():
    found = {row["model_type"]: row for row in rows()}
    assert len(found) > 20 and {"llama", "gpt2", "mamba"} <= set(found)
    llama = found["llama"]
    assert llama["state"] == "ok" and llama["seam"] and llama["does"] == ["attention"] and llama["family"]
    assert llama["isolated_in"].startswith("4.34-")
    assert "mixers" in found["mamba"]["does"] and "some configs refused" in found["falcon"]["does"]
    assert all(row["reason"] for row in found.values() if row["state"] != "ok")
    assert not {"t5", "vit"} & set(found)


def test_the_fourteen_families_are_first():
    families = [row["family"] for row in rows()]
    assert sum(families) == 14 and all(families[:14])


def test_a_model_that_an_older_version_refuses_says_why(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.43.4")
    llava = next(row for row in rows() if row["model_type"] == "llava:picture")
    assert llava["state"] == "refused" and "documents are lost" in llava["reason"]
    assert "refused" in output("architectures")


@pytest.fixture
def unchecked(monkeypatch):
    # A release without evidence: the fixture returns the newest minor that has some.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "9.9.0")
    return evidence.minors()[-1]


def test_nothing_is_called_isolated_in_a_version_without_evidence(unchecked, monkeypatch):
    found = rows()
    assert {row["state"] for row in found} == {"not checked"} and not any(row["seam"] or row["does"] for row in found)
    assert all(f"In {unchecked}" in row["reason"] for row in found)
    monkeypatch.setenv("COLUMNS", "250")
    shown = on_one_line(output("architectures"))
    assert f"No architecture was checked in this release. The newest one with evidence is {unchecked}" in shown
    assert f"not checked here. In {unchecked}: isolated at the seam" in shown


def test_one_of_them_in_a_version_without_evidence(unchecked):
    shown = on_one_line(output("architectures", "llama"))
    assert f"in Transformers 9.9.0: not checked here. In {unchecked}: " in shown
    assert "fa2patch verify llama shows what fa2patch does with it here" in shown
    assert "Transformers 9.9.0: isolated" not in shown


def test_one_that_is_new_in_a_version_without_evidence(unchecked, monkeypatch):
    monkeypatch.setattr("fa2patch.cli.models.model_types", lambda: ["brand_new"])
    assert "brand_new: there is no evidence of it" in output("architectures", "brand_new")


def test_one_of_them():
    shown = output("architectures", "Llama")
    assert shown.startswith("llama, one of the fourteen families") and "isolated at the seam formula" in shown
    assert "bert:masked" in output("architectures", "bert")
    assert "there is no evidence of it. It is not checked: vision-language" in output("architectures", "gemma3n")
    assert output("architectures", str(OWN_CONFIG)).splitlines()[:2] == shown.splitlines()[:2]
    wrong = run("architectures", "lama")
    assert wrong.exit_code == 2 and "Did you mean llama" in wrong.output and "--pretrained" not in wrong.output


def test_the_file_is_small_and_its_ranges_read_back():
    assert all(evidence.within(minor, "4.34-4.36, 5.0") for minor in ("4.34", "4.35", "4.36", "5.0"))
    assert not any(evidence.within(minor, "4.34-4.36, 5.0") for minor in ("4.37", "5.1"))
    assert evidence.within("5.10", "5.9-5.11") and not evidence.within("5.1", "5.9-5.11")
    assert len(json.dumps(evidence.evidence())) < 40_000
    for states in evidence.by_architecture().values():
        there = evidence.minors_with(states)
        assert there and evidence.ranges_of(there)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("architectures",), ()),
        (("kernels",), ()),
        (("status", "llama"), ("layers.0.self_attn ", "… layers.31.self_attn ")),
        (("doctor",), ("alone, default cache", "alone, use_cache=False")),
    ],
)
def test_tables_in_80_columns(monkeypatch, arguments, shown):
    monkeypatch.setenv("COLUMNS", "80")
    said = output(*arguments)
    assert all(len(line) <= 80 for line in said.splitlines())
    assert all(text in said for text in shown)
    assert "cannot be told" not in said
    firsts = {line.split()[0] for line in said.splitlines() if line.strip()}
    named = {"architectures": {row["model_type"] for row in rows()}, "kernels": {kernel.name for kernel in ORDER}}
    if arguments[0] in named:
        assert "…" not in said and named[arguments[0]] <= firsts
