"""Two commits' benches are compared by their repeated runs. No test depends on how long anything takes."""

import json
import subprocess
import sys

import pytest

from compat_matrix import commits
from compat_matrix.bench import against, compared

RESULT = {
    "part": "some", "date": "2026-01-01", "threads": 1, "repeats": 9,
    "rows": [
        {"prompt": 512, "completions": 2, "padded": {"tokens": 7, "min_ms": 1.5}, "ratio": 2.0},
        {"prompt": 512, "completions": 8, "padded": {"tokens": 9, "min_ms": 2.5}, "ratio": 2.0},
    ],
    "cases": [{"planner": "a", "seconds": 0.5, "rows": 3}],
    "position_ids": {"us_per_layer": 4.0, "us_per_layer_range": [3.0, 5.0]},
    "real_tokens_per_second": 2e6,
    "synchronisations": 3,
}  # fmt: skip


def test_times_are_found_by_their_keys_and_named_by_what_tells_rows_apart():
    assert dict(compared.times(RESULT)) == {
        "rows, prompt 512, completions 2, padded, min_ms": 1.5,
        "rows, prompt 512, completions 8, padded, min_ms": 2.5,
        "cases, a, seconds": 0.5,
        "position_ids, us_per_layer": 4.0,
        "1e6 / real_tokens_per_second": 0.5,
    }


def test_every_committed_result_that_holds_times_gives_rows_of_different_names():
    for part in set(against.PARTS) - {"syncs", "dry"}:
        found = list(
            compared.times(against.about.read(against.commits.ROOT / f"compat_matrix/bench/results/{part}.json"))
        )
        assert found and len(dict(found)) == len(found), part


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([1.0, 1.1, 1.05], [1.3, 1.2, 1.25], "slower"),
        ([1.0, 1.1, 1.05], [1.1, 1.0, 1.1], ""),
        ([1.0, 1.3, 1.0], [1.2, 1.2, 1.2], ""),
        ([1.3, 1.2, 1.25], [1.0, 1.1, 1.05], "faster"),
        ([-1.0, 1.0, 1.0], [9.0, 9.0, 9.0], ""),
        ([2, 2], [0, 0], "faster"),
        ([0, 0], [1, 1], "slower"),
        ([0, 1], [1, 0], ""),
    ],
)
def test_a_difference_counts_only_beyond_the_spread_of_one_sides_runs(before, after, verdict):
    assert compared.Row("a time", before, after).verdict == verdict


def test_rows_of_one_side_only_are_left_out_and_values_keep_their_order():
    before = [{"a_ms": value, "gone_ms": 1} for value in (1, 2)]
    after = [{"a_ms": value, "new_ms": 1} for value in (3, 4)]
    assert compared.rows(before, after) == [compared.Row("a_ms", [1, 2], [3, 4])]
    assert (
        "| a_ms | 1.5 | 3.5 | 2.333 | 2.000 | **slower** |"
        in compared.table("p", compared.rows(before, after)).as_markdown()
    )


def test_sides_take_turns():
    assert against.order(3) == ["before", "after", "after", "before", "before", "after"]


class Told:
    """Sides whose runs are told beforehand."""

    def __init__(self, before, after):
        self.told = {"before": before, "after": after}

    def run(self, side, part, turn):
        if isinstance(self.told[side], str):
            raise against.Failed(self.told[side])
        return self.told[side]


LACKING = "Traceback ...\nImportError: cannot import name 'spans' from 'fa2patch.kernels' (somewhere)\n"


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (LACKING, {"a_ms": 1}, "new"),
        ("ModuleNotFoundError: No module named 'fa2patch.padded'", {"a_ms": 1}, "new"),
        ("ModuleNotFoundError: No module named 'rich'", {"a_ms": 1}, "error"),
        ({"a_ms": 1}, LACKING, "error"),
    ],
)
def test_a_part_that_only_the_commit_cannot_run_is_new_and_any_other_failure_an_error(before, after, kind):
    found = against.all_parts(Told(before, after), ["kernels"], 2)
    assert list(found["kernels"]) == [kind]
    assert f"kernels: {'new' if kind == 'new' else 'failed'}" in against.as_markdown(found, "")


def test_a_commit_is_exported_as_it_was(tmp_path):
    commits.export("HEAD", "fa2patch", tmp_path)
    shown = subprocess.run(["git", "-C", commits.ROOT, "show", "HEAD:fa2patch/errors.py"], capture_output=True)
    assert (tmp_path / "fa2patch" / "errors.py").read_bytes() == shown.stdout
    assert len(commits.here()["commit"]) == 40


def test_without_git_a_commit_is_what_was_stated(monkeypatch, tmp_path):
    monkeypatch.setattr(commits, "ROOT", tmp_path)
    monkeypatch.delenv(commits.STATED, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commits.here() == {"commit": None, "dirty": None}
    monkeypatch.setenv(commits.STATED, "1234567890abcdef")
    assert commits.named(commits.here()) == "commit 1234567890ab, stated by hand"


def test_one_run_of_a_side_and_an_unknown_commit_are_errors(capsys):
    for arguments, said in ((["HEAD", "--rounds", "1"], "at least 2"), (["no-such-commit"], "git rev-parse failed")):
        with pytest.raises(SystemExit):
            against.main(arguments)
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_compares_the_files_of_now_with_head(tmp_path):
    options = ["--parts", "overhead", "--rounds", "2", "--quick", "--out", str(tmp_path), "--keep", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "compat_matrix.bench.against", "HEAD", *options], check=True, cwd=commits.ROOT
    )
    found = json.loads((tmp_path / "against.json").read_text())
    rows = {row["name"]: row for row in found["parts"]["overhead"]["rows"]}
    assert {"position_ids, us_per_layer", "call, kernel_us", "forwards, layers 4, by_hand_us"} <= set(rows)
    assert all(len(row[side]) == 2 for row in rows.values() for side in ("before", "after"))
    assert found["before"]["commit"] == found["after"]["commit"]
    kept = json.loads((tmp_path / "overhead.json").read_text())
    assert (
        kept["commit"] == found["after"]["commit"] and kept["call"]["kernel_us"] == rows["call, kernel_us"]["after"][-1]
    )
    assert "| call, kernel_us |" in (tmp_path / "against.md").read_text()
