"""A release needs cells that are not stale, and measurements after which the code did not change."""

import json
import subprocess

import pytest
from evidence import GOOD, MADE, evidence

from compat_matrix import commits, environments, keys, provenance, run

CELL = {"seam": ["interface"], "fa2patch": {"sdpa": GOOD}, "upstream": {}}
CLEAN = {"commit": MADE["commit"], "dirty": False}
MEASURED = {"bench mixers": CLEAN, "trl-1.16.0 curve": CLEAN}
KEY = keys.Sources(environments.HERE.parent).depended(["fa2patch/errors.py"], [])
FRESH = {**MADE, "key": KEY}


@pytest.fixture
def checked(tmp_path, capsys, monkeypatch):
    # The files of ``changed`` count as changed after the cells' commit.

    def checked(*made, changed=(), measured=MEASURED, requirements=None):
        monkeypatch.setattr(provenance.environments, "versions", lambda: blocks)
        monkeypatch.setattr(commits, "changed", lambda commit: list(changed))
        monkeypatch.setattr(provenance, "measurements", lambda: iter(measured.items()))
        cells = {f"llama{number}": {**CELL, "made": each} for number, each in enumerate(made)}
        header = evidence("5.0.0", {}, requirements=wanted.stated if requirements is None else requirements)
        (tmp_path / "5.0.0.json").write_text(run.text(run.written(header, cells)))
        code = provenance.main(["--evidence", str(tmp_path)])
        return code, capsys.readouterr().out

    wanted = environments.version("5.0.0")
    blocks = {"5.0.0": wanted, "main": environments.version("main")}
    return checked


def test_cells_that_are_not_stale_are_accepted_whatever_commits_made_them(checked):
    assert checked(FRESH, {**FRESH, "commit": "2" * 40}) == (
        0,
        "None of 2 cells is stale, and the present code made all 2 measurements of the bench, the ecosystem and the "
        "examples.\n",
    )


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({**FRESH, "key": dict.fromkeys(KEY, "other")}, "1 of 2 cells of 5.0.0 are stale: llama1."),
        (MADE, "1 of 2 cells of 5.0.0 are stale: llama1."),
        ({**FRESH, "dirty": True}, "1 cells were made with commit 111111111111 with uncommitted changes."),
        ({**FRESH, "commit": None, "dirty": None}, "1 cells were made with an unknown commit."),
    ],
)
def test_cells_of_other_code_or_of_unknown_code_are_named(checked, made, said):
    code, text = checked(FRESH, made)
    assert code == 1 and said in text


def test_cells_of_another_environment_are_stale(checked):
    assert checked(FRESH, requirements=["python3.11", "torch==1.0"])[0] == 1


UNSAID = "Some measurements do not say which commit made them."
BY_HAND = "uncommitted changes, or its commit was stated by hand."


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({}, UNSAID),
        ({"commit": None, "dirty": None}, UNSAID),
        ({**CLEAN, "dirty": True}, BY_HAND),
        ({**CLEAN, "dirty": None}, BY_HAND),
    ],
)
def test_measurements_of_other_code_or_of_none_are_named(checked, made, said):
    code, text = checked(FRESH, measured={**MEASURED, "bench startup": made})
    assert code == 1 and f"{said} Affected: bench startup." in text


def test_a_change_after_the_commit_of_a_measurement_is_named(checked):
    code, text = checked(FRESH, changed=["fa2patch/patch/model_plan.py"])
    assert code == 1 and "patch/model_plan.py. Affected: bench mixers, trl-1.16.0 curve." in text


def test_every_bench_check_integration_and_experiment_is_among_the_measurements():
    names = [name for name, _ in provenance.measurements()]
    assert len(names) == len({*names}) > 190
    assert {"bench sharing", "long-rows-5.23.0 ulysses, 2 processes", "trl-1.16.0 curve", "integration trl"} <= {*names}
    assert {"examples paper", "examples longer", "examples padded_and_packed"} <= {*names}


@pytest.mark.parametrize(("commit", "dirty"), [("1" * 12, False), (f"{'1' * 12}-dirty", True), (None, False)])
def test_the_commit_of_an_experiment_is_read_from_its_results(monkeypatch, tmp_path, commit, dirty):
    monkeypatch.setattr(provenance.environments, "HERE", tmp_path / "compat_matrix")
    file = tmp_path / "examples" / "paper" / "results.json"
    integrations = tmp_path / "compat_matrix" / "ecosystem" / "evidence" / "integrations" / "tests.json"
    for made, content in ((file, {"commit": commit}), (integrations, {})):
        made.parent.mkdir(parents=True)
        made.write_text(json.dumps(content))
    expected = {"commit": "1" * 12 if commit else "", "dirty": dirty}
    assert [*provenance.measurements()] == [("examples paper", expected)]


def test_a_version_without_evidence_is_named(checked, tmp_path):
    checked(FRESH)
    (tmp_path / "5.0.0.json").rename(tmp_path / "4.57.6.json")
    (tmp_path / "4.57.6.json").write_text(json.dumps(evidence("4.57.6", {"llama": CELL})))
    assert provenance.main(["--evidence", str(tmp_path)]) == 1


def test_the_commit_is_looked_up_in_this_clone():
    assert provenance._after("0" * 12)[0].startswith("This clone does not have commit 000000000000")
    assert commits.changed("HEAD") == []


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ('"""Another text."""\nX = 1  # why\n', []),
        ('"""A text."""\nX = 2\n', ["fa2patch/some.py"]),
        (None, ["fa2patch/some.py"]),
    ],
)
def test_measurements_are_old_if_code_changed_not_if_a_text_did(tmp_path, monkeypatch, text, changed):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    (tmp_path / "fa2patch").mkdir()
    file = tmp_path / "fa2patch" / "some.py"
    file.write_text('"""A text."""\nX = 1\n')
    monkeypatch.setattr(commits, "ROOT", tmp_path)
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        git(*words)
    file.unlink() if text is None else file.write_text(text)
    git("commit", "-qam", "second")
    assert commits.changed("HEAD^") == changed
