"""The bench counts and computes what it claims; no test depends on how long anything takes."""

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fa2patch
from compat_matrix import commits, tiny_models
from compat_matrix.bench import __main__ as bench
from compat_matrix.bench import against, bench_times, figures, syncs, workloads
from compat_matrix.check import reads as counting
from compat_matrix.check.rows import documents, pack
from compat_matrix.publish import __main__ as publish
from compat_matrix.publish import blocks

# --- counting -------------------------------------------------------------------------------------------------

READS = {
    "item": (lambda x: x.sum().item(), 1),
    "bool": (lambda x: bool((x > 0).all()), 1),
    "int": (lambda x: int(x.max()), 1),
    "cpu and numpy": (lambda x: x.cpu().numpy(), 1),
    "numpy": (lambda x: x.detach().numpy(), 1),
    "tolist": (lambda x: x.tolist(), 1),
    "to cpu, then more": (lambda x: (x.to("cpu") * 2).max().item(), 1),
    "to a dtype": (lambda x: x.to(torch.float64), 0),
    "nonzero": (lambda x: (x > 0).nonzero(), 1),
    "boolean index": (lambda x: x[x > 0], 1),
    "integer index": (lambda x: x[torch.tensor([0])], 0),
    "equal": (lambda x: torch.equal(x, x), 1),
    "unique": (lambda x: x.unique(), 1),
    "repeat_interleave": (lambda x: x.repeat_interleave(x.long()), 1),
    "repeat_interleave of known size": (lambda x: x.repeat_interleave(x.long(), output_size=6), 0),
    "arithmetic": (lambda x: (x + 1).cumsum(0).max(), 0),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_counted_once(name):
    read, expected = READS[name]
    with counting.counted(packages=(__name__,)) as count:
        read(torch.tensor([1.0, 2.0, 3.0]))
    assert count.reads == expected == sum(count.where.values()), count.where


def test_reads_of_others_are_not_counted_and_afterwards_nothing_is():
    with counting.counted(packages=("somebody",)) as count:
        torch.ones(3).tolist()
    before = torch.Tensor.tolist
    torch.ones(3).tolist()
    assert (count.reads, before is torch.Tensor.tolist, sys.getprofile()) == (0, True, None)


def test_tensors_that_a_kernel_wants_as_numbers_are_counted():
    kernel = counting.watched(lambda **keywords: None)
    with counting.counted() as count:
        kernel(max_seqlen_q=torch.tensor(3), max_seqlen_k=3)
        kernel(max_seqlen_q=torch.tensor(3), max_seqlen_k=torch.tensor(3))
    assert count.arguments == 3


def test_calls_of_python_functions_are_counted():
    def inner():
        return len([1])

    def outer():
        return [inner() for _ in range(3)]

    found = counting.calls(outer)
    here = f"{__name__}."
    assert (found[f"{here}outer"], found[f"{here}inner"], sys.getprofile()) == (1, 3, None)
    assert counting.calls(outer) == found


def test_finalizers_of_what_is_collected_meanwhile_are_not_counted():
    class InACycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            pass

    InACycle()
    found = counting.calls(lambda: [[] for _ in range(2000)])  # so many lists make Python collect
    assert not [name for name in found if name.endswith("__del__")]
    assert gc.isenabled()


@pytest.mark.parametrize("given, reads, derived", [("position_ids", 1, 1), ("lengths", 0, 0)])
@pytest.mark.parametrize("layers", [1, 5])
def test_fa2patch_reads_once_whatever_the_layers_and_not_at_all_with_lengths(layers, given, reads, derived):
    model = tiny_models.build("llama", "sdpa", num_hidden_layers=layers)
    batch = syncs.row(given == "lengths")
    with fa2patch.apply(model, kernel="reference"), counting.counted() as count:
        model(**batch, use_cache=False)
    assert (count.reads, count.derived, count.arguments) == (reads, derived, 0), count.where


def test_a_packed_row_and_the_collators_agree():
    # Reads are counted in the row that the points pack.
    expected = pack(documents(*syncs.DOCUMENTS))
    assert all(torch.equal(syncs.row(False)[name], value) for name, value in expected.items())


# --- workloads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, ratio", [("FLAN-like", 2.066), ("OrcaMath-like", 1.448)])
@pytest.mark.parametrize("scale", [1, 0.25])
def test_mini_batches_hold_the_padding_that_they_are_drawn_for(name, ratio, scale):
    drawn = workloads.mini_batches(workloads.DISTRIBUTIONS[name].scaled(scale), 20_000)
    assert workloads.padding_ratio(drawn) == pytest.approx(ratio, abs=0.02)
    assert workloads.padding_ratio([[1, 3], [2, 2]]) == (6 + 4) / 8


def test_rows_of_documents_hold_the_same_tokens():
    rows = bench_times.layouts()
    assert {sum(row) for row in rows.values()} == {2048} and all(min(row) > 0 for row in rows.values())
    assert rows["2048 x 1"] == [1] * 2048
    assert workloads.cut([3, 4, 5], 8) == [3, 4, 1] and workloads.cut([3, 5, 5], 8) == [3, 5]


# --- the command ----------------------------------------------------------------------------------------------


def columns(rows):
    return list(dict.fromkeys(name for row in rows for name in row))


FAST = ("overhead", "training", "sharing", "embeddings", "packing", "dealing")
SLOW = tuple(part for part in bench.PARTS if part not in FAST)


def test_only_the_file_of_a_part_is_collected(monkeypatch, tmp_path):
    # ``against`` runs today's parts on an older fa2patch, where imports of other files fail.
    monkeypatch.setattr(pytest, "main", lambda given: chosen.extend(given) or 1)
    for part in bench.PARTS:
        chosen = []
        bench.main(["--parts", part, "--out", str(tmp_path)])
        assert [each.partition("::")[2] for each in chosen[:-1]] == [f"bench_{part}"]


@pytest.mark.slow
@pytest.mark.parametrize("parts", [FAST, SLOW], ids=["fast", "slow"])
def test_every_part_makes_the_columns_that_are_committed(parts, tmp_path):
    # The parts that have other environments run in this test's own.
    code = (
        "import sys, pathlib; from compat_matrix import environments; from compat_matrix.bench.__main__ import main; "
        "environments.make = lambda *unused: pathlib.Path(sys.executable); sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "--quick", "--out", str(tmp_path), "--parts", *parts]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}  # it times
    done = subprocess.run(command, cwd=commits.ROOT, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    found = {part: figures.read(tmp_path / f"{part}.json") for part in parts}
    for part, made in found.items():
        kept = figures.committed(part)
        assert made["command"] == f"python -m compat_matrix.bench --parts {part} --quick"
        layers = {"8 layers", "16 layers", "32 layers"}  # a quick run has fewer
        assert set(columns(made["rows"])) == set(columns(kept["rows"])) - layers, part
        assert set(made) - {"on"} == set(kept) - {"on"}
    for row in found["syncs"]["rows"] if "syncs" in found else ():
        if row["way"].startswith("fa2patch"):
            assert [row["2 layers"], row["4 layers"], row["derivations"]] == [int("lengths" not in row["way"])] * 3
    for row in found["training"]["rows"] if "training" in found else ():
        assert float(row["largest loss difference"]) < 1e-4


# --- figures --------------------------------------------------------------------------------------------------


def test_the_committed_page_and_the_documents_say_what_the_results_say():
    assert figures.main(["--check"]) == 0


def changed(folder, part, change):
    file = folder / "results" / f"{part}.json"
    found = figures.read(file)
    change(found["rows"])
    figures.write(file, found)


def test_check_detects_drift_of_the_page_and_of_a_quoted_number(tmp_path, capsys):
    shutil.copytree(figures.HERE / "results", tmp_path / "results")
    arguments = ["--folder", str(tmp_path)]
    assert figures.main([*arguments, "--check"]) == 1, "there is no page"
    assert figures.main(arguments) == 0 and figures.main([*arguments, "--check"]) == 0
    changed(tmp_path, "kernels", lambda rows: rows[0].update(padded=99.0))
    assert figures.main([*arguments, "--check"]) == 1 and "BENCH.md" in capsys.readouterr().err
    for part, column, file in (
        ("sharing", "padded / shared", "shared.md"),
        ("packing", "processor, s", "packing.md"),
        ("training", "share of it", "README.md"),
    ):
        changed(tmp_path, part, lambda rows, column=column: rows[-1].update({column: 0.9 if "," in column else "90%"}))
        if part == "sharing":
            changed(tmp_path, part, lambda rows: rows[-1].update({"padded / shared": 99.0}))
        assert figures.main(arguments) == 0 and figures.main([*arguments, "--check"]) == 1
        assert file in capsys.readouterr().err


def test_nothing_committed_names_a_machine():
    for file in (figures.HERE / "BENCH.md", *(figures.HERE / "results").glob("*.json")):
        text = file.read_text()
        assert str(figures.HERE.parents[1]) not in text and str(Path.home()) + "/" not in text, file


def test_reads_are_shown_with_and_without_lengths_on_both_sides():
    rows = [line.strip("| ").split(" | ") for line in blocks.reads().splitlines() if line.startswith("|")]
    cells = {row[0]: dict(zip(rows[0], row)) for row in rows[2:]}
    assert list(cells) == list(blocks.WAYS.values())
    given = cells["Transformers, with lengths"]
    assert list(given.values())[1:] == ["refused", "0", "1"]
    assert set(list(cells["fa2patch, with lengths"].values())[1:]) == {"0"}


def test_readme_and_the_page_about_kernels_have_both():
    said = " ".join(blocks.overhead().split())
    for row in figures.committed("overhead")["rows"]:
        assert f"{row['µs per layer']:.0f} µs" in said and f"{row['µs per forward']:.0f} µs" in said
    made = {"reads": blocks.reads(), "overhead": blocks.overhead()}
    for file in (commits.ROOT / "README.md", commits.ROOT / "docs" / "kernels.md"):
        assert publish.between(file, **made) == file.read_text(encoding="utf-8")


# --- against another commit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "timed", "verdict"),
    [
        ([1.0, 1.1, 1.05], [1.3, 1.2, 1.25], True, "slower"),
        ([1.0, 1.1, 1.05], [1.1, 1.0, 1.1], True, ""),
        ([1.0, 1.3, 1.0], [1.2, 1.2, 1.2], True, ""),
        ([1.3, 1.2, 1.25], [1.0, 1.1, 1.05], True, "faster"),
        ([-1.0, 1.0, 1.0], [9.0, 9.0, 9.0], True, ""),
        ([2, 2], [0, 0], False, "fewer"),
        ([0, 0], [1, 1], False, "more"),
        ([7, 7], [7, 7], False, ""),
    ],
)
def test_a_time_differs_only_beyond_the_spread_of_one_sides_runs(before, after, timed, verdict):
    assert against.judged(before, after, timed)["verdict"] == verdict


def test_times_rates_and_counts_are_compared_and_ratios_are_not():
    def run(calls, ms, rate):
        return [
            {"what": "a", "range": f"{ms} to 9", "calls": calls, "its time, ms": ms, "tokens/s": rate, "ratio": 2.0}
        ]

    rows = against.compared([run(5, 1.0, 1e3), run(5, 1.1, 1e3)], [run(6, 2.0, 2e3), run(6, 2.2, 2e3)])
    said = {row[""]: row["verdict"] for row in rows}
    assert said == {"a, calls": "more", "a, its time, ms": "slower", "a, 1e6 / tokens/s": "faster"}


def test_sides_take_turns():
    assert against.order(3) == ["before", "after", "after", "before", "before", "after"]


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
    monkeypatch.undo()
    monkeypatch.setenv(commits.STATED, "1234567890abcdef")  # a copy may have the git folder of an older commit
    assert commits.here() == {"commit": "1234567890abcdef", "dirty": None}


def test_one_run_of_a_side_and_an_unknown_commit_are_errors(capsys):
    for arguments, said in ((["HEAD", "--rounds", "1"], "at least 2"), (["no-such-commit"], "git rev-parse failed")):
        with pytest.raises(SystemExit):
            against.main(arguments)
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_function_that_is_called_once_more_is_found(tmp_path, monkeypatch, capsys):
    # The copy of fa2patch calls one more function for each layer in every packed forward.
    shutil.copytree(commits.ROOT / "fa2patch", tmp_path / "fa2patch", ignore=against.CACHES)
    with open(tmp_path / "fa2patch" / "upstream" / "packed_mask.py", "a") as file:
        file.write("\n\n_again = PackedMask.attend_again\nPackedMask.attend_again = lambda *given: _again(*given)\n")
    copied = SimpleNamespace(copytree=lambda old, new, **more: shutil.copytree(tmp_path / "fa2patch", new, **more))
    monkeypatch.setattr(against, "shutil", copied)
    assert against.main(["HEAD", "--parts", "calls", "--rounds", "2", "--quick"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "a layer" in line]
    assert len(lines) == 2 and all(" more " in line for line in lines), lines
