"""``first_gpu`` from its first process to its page on a stand-in for a GPU; what it leaves when the machine goes."""

import re
from pathlib import Path

import pytest
from stand_in_gpu import KERNELS, Machine

from compat_matrix.bench import figures

README = Path(__file__).parents[2] / "compat_matrix" / "README.md"
MINUTES = range(1, 10)


def left(folder):
    return figures.read(folder / "first_gpu.json"), (folder / "first_gpu.md").read_text(encoding="utf-8")


def test_what_matters_comes_first(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, tmp_path)
    assert machine.first_gpu() == 3
    stages = list(dict.fromkeys(name.partition(",")[0] for name in machine.ran))
    assert stages == ["kernels", "models", "training", "hybrids"]
    assert [name for name in machine.ran if name.startswith("kernels")] == [f"kernels, {name}" for name in KERNELS]
    training = [name.rpartition(", ")[2] for name in machine.ran if name.startswith("training")]
    assert training[:3] == ["padded:flash_attention_2", "fa2patch:flash_attn+lengths", "by-hand:flash_attn"]


def test_one_page_says_what_was_found(tmp_path, monkeypatch):
    assert Machine(monkeypatch, tmp_path).first_gpu() == 3
    found, page = left(tmp_path)
    assert len(found["goals"]) == 12 and {goal["met"] for goal in found["goals"]} == {True, False}
    lines = page.splitlines()
    assert lines[0] == "# A GPU's first run"
    in_short = r"\*\*\d+ of 12 goals are met, \d+ are not, 0 not measured. \d+ of 20 processes are done; next: "
    assert re.match(in_short, lines[2])
    goals = ("times the padded throughput", "over the bare kernel", "no synchronisation", "peak memory")
    stages = ("**Kernels.**", "**Tiny models.**", "**Training.**", "**Hybrids.**")
    assert all(words in page for words in ("NVIDIA H200", "µs", *goals, *stages))
    assert "flash_attn, head dim 256: " in page, "what is wrong is named, with its reason"


@pytest.mark.parametrize("minute", MINUTES[:-1])  # in the last one it has ended by itself
def test_a_machine_that_goes_leaves_what_was_done_until_then(tmp_path, monkeypatch, minute):
    machine = Machine(monkeypatch, tmp_path, 60 * minute)
    assert machine.first_gpu() == -1
    found, page = left(tmp_path)
    assert [*found["jobs"]] == machine.ran[: len(found["jobs"])] == machine.ran[:-1], "all but the last are on the page"
    assert machine.ran[-1] in found["not_run"] and f"next: {found['not_run'][0]}." in page
    again = Machine(monkeypatch, tmp_path)
    again.first_gpu()
    assert again.ran[0] == found["not_run"][0] and machine.ran[-1] in again.ran, "it goes on with what was cut"
    assert not set(machine.computed) & set(again.computed), "nothing is computed twice"


def test_three_machines_of_ten_minutes_do_all(tmp_path, monkeypatch):
    codes = []
    for _ in range(3):
        machine = Machine(monkeypatch, tmp_path, 600)
        codes.append(machine.first_gpu())
        assert machine.now < 600 or not machine.ran, "it ends before the machine goes"
    assert codes[-1] == 0 and left(tmp_path)[0]["done"]


def test_the_page_of_the_matrix_says_what_a_cut_leaves(tmp_path, monkeypatch):
    rows = []
    for minute in MINUTES:
        folder = tmp_path / str(minute)
        Machine(monkeypatch, folder, 60 * minute).first_gpu()
        found, _ = left(folder)
        goals = sum(goal["met"] is not None for goal in found["goals"])
        following = re.sub(r"\d+\.\d+\.\d+-", "", found["not_run"][0])  # the installed release of Transformers
        rows.append(f"| {minute} | {len(found['jobs'])} of 20 | {goals} of 12 | {following} |")
    assert "\n".join(rows) in README.read_text(encoding="utf-8"), "\n" + "\n".join(rows)
