"""Fresh evidence is compared with the committed, cell by cell."""

import json

import pytest
from evidence import GOOD, MADE, POINTS, evidence

from compat_matrix import agreed
from compat_matrix.check.found import VOUCHED
from compat_matrix.results import read_file

ROWS = {"one row": "ok", "two rows": "leak"}
CELL = {"seam": ["interface"], "fa2patch": {"sdpa": GOOD}, "upstream": {"sdpa": ROWS}}
ONE_LESS = {**GOOD, "ok": GOOD["ok"] - 1}


@pytest.fixture
def compare(tmp_path, capsys):
    def compare(fresh, name="llama"):
        for folder, cells in (("fresh", {name: fresh}), ("committed", {"llama": CELL, "phi": CELL})):
            (tmp_path / folder).mkdir(exist_ok=True)
            made = evidence("5.0.0", cells, upstream_rows=list(ROWS))
            (tmp_path / folder / "5.0.0.json").write_text(json.dumps(made))
        code = agreed.main([str(tmp_path / "fresh"), "--committed", str(tmp_path / "committed")])
        return code, capsys.readouterr().out.splitlines()

    return compare


def test_the_same_cell_agrees_whatever_made_it_and_whatever_its_errors_say(compare):
    assert compare({**CELL, "made": {**MADE, "commit": "2" * 40, "seconds": 1}}) == (
        0,
        ["1 versions agree with what is committed."],
    )
    held = {**GOOD, "n/a": {"windows": "another reason"}}
    assert compare({**CELL, "fa2patch": {"sdpa": held}})[0] == 0
    assert compare({**CELL, "seam": ["formula"]})[0] == 0, "the plans say which seam is right"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"upstream": {"sdpa": {**ROWS, "two rows": "ok"}}}, "sdpa, Transformers alone: committed"),
        (
            {"fa2patch": {"sdpa": {**ONE_LESS, "fail": {"padding": "off"}}}},
            "state: committed ok, found fail (sdpa: padding",
        ),
        ({"fa2patch": {"sdpa": {**ONE_LESS, "alone": {"padding": "off"}}}}, "points that fail alone: committed []"),
        ({"fa2patch": {"sdpa": {"ok": len(POINTS), "n/a": {}, "fail": {}}}}, "points that hold: committed"),
    ],
)
def test_a_difference_is_named(compare, change, said):
    code, lines = compare({**CELL, **change})
    assert code == 1 and any(said in line for line in lines), lines
    assert all(line.startswith("5.0.0: llama: ") for line in lines)


def test_an_architecture_that_is_not_committed_and_an_empty_folder_are_errors(compare, tmp_path, capsys):
    assert compare(CELL, "other") == (1, ["5.0.0: other: not in the committed evidence"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit):
        agreed.main([str(tmp_path / "empty")])
    assert "found no JSON" in capsys.readouterr().err


def test_points_that_one_of_both_was_not_run_with_are_not_compared(compare):
    vouched = {"windows": f"{VOUCHED}phi", "padding": f"{VOUCHED}phi"}
    fewer = {"ok": len(POINTS) - 2, "n/a": vouched, "fail": {}}
    assert compare({**CELL, "fa2patch": {"sdpa": fewer}, "points": POINTS})[0] == 1, "phi is not there to vouch"
    newer = {"ok": len(POINTS), "n/a": {"windows": "no sliding window"}, "fail": {}}
    assert compare({**CELL, "fa2patch": {"sdpa": newer}, "points": [*POINTS, "newer"]})[0] == 0


def test_a_committed_cell_that_failed_only_by_the_one_that_vouches_agrees_with_its_own_points(tmp_path):
    vouched = {"ok": len(POINTS) - 1, "n/a": {"windows": f"{VOUCHED}phi"}, "fail": {}}
    broken = {**GOOD, "ok": GOOD["ok"] - 1, "fail": {"packed_row": "wrong"}}
    cells = {"llama": {**CELL, "fa2patch": {"sdpa": vouched}}, "phi": {**CELL, "fa2patch": {"sdpa": broken}}}
    for name, held in {"committed": cells, "fresh": {"llama": CELL}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "5.0.0.json").write_text(json.dumps(evidence("5.0.0", held, upstream_rows=list(ROWS))))
    fresh, committed = (tmp_path / name / "5.0.0.json" for name in ("fresh", "committed"))
    assert read_file(committed).cells["llama"].state == "fail"
    assert list(agreed.differences(fresh, committed)) == []
