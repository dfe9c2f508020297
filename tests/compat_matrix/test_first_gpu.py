"""The command for the first minutes on a GPU: its stages, where it goes on, and what its goals say."""

import argparse
import json
from dataclasses import dataclass

import pytest
import torch

from compat_matrix.bench import about, first_gpu, gpu_goals, gpu_kernels
from compat_matrix.check import kernels as checked

HEADER = {"commit": "a" * 40, "dirty": False, "torch": "2", "transformers": "5", "device": "a GPU"}


@dataclass(frozen=True)
class Told:
    """A job whose outcome is told beforehand, and which notes the seconds that it is given."""

    stage: str
    name: str
    ran: list
    done: bool = True
    stops: bool = True

    def run(self, seconds):
        self.ran.append((self.name, round(seconds)))
        return {"done": self.done}


def given(folder, seconds=540):
    return argparse.Namespace(out=folder, seconds=seconds)


def test_what_is_done_is_not_run_again_and_what_ran_out_of_time_is(tmp_path):
    ran = []
    planned = [Told("kernels", "a", ran), Told("kernels", "b", ran, done=False)]
    assert list(first_gpu.run_all(planned, given(tmp_path), HEADER)) == ["kernels, a"]
    assert list(first_gpu.run_all(planned, given(tmp_path), HEADER)) == ["kernels, a"]
    assert [name for name, _ in ran] == ["a", "b", "b"]
    assert about.read(tmp_path / "jobs" / "kernels--a.json") == {**HEADER, "done": True}


def test_a_stage_leaves_the_shares_of_those_behind_it_and_takes_what_others_left(tmp_path):
    ran = []
    planned = [Told("kernels", "a", ran), Told("training", "t", ran), Told("hybrids", "h", ran)]
    first_gpu.run_all(planned, given(tmp_path), HEADER)
    shares = first_gpu.SECONDS
    assert ran == [("a", 540 - shares["training"] - shares["hybrids"]), ("t", 540 - shares["hybrids"]), ("h", 540)]


def test_nothing_starts_when_time_is_over(tmp_path):
    ran = []
    assert first_gpu.run_all([Told("hybrids", "h", ran)], given(tmp_path, 1), HEADER) == {} and ran == []


def test_results_of_another_commit_are_not_mixed_in(tmp_path):
    about.write(tmp_path / "jobs" / "kernels--a.json", {**HEADER, "done": True})
    assert first_gpu.of_another_commit(tmp_path, HEADER) is None
    assert first_gpu.of_another_commit(tmp_path, {**HEADER, "commit": "b" * 40}).name == "kernels--a.json"


def test_it_needs_a_gpu_or_says_toy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert first_gpu.main(["--out", str(tmp_path)]) == 2
    with pytest.raises(SystemExit):
        first_gpu.main(["--out", str(tmp_path), "--device", "cpu"])
    assert "found none" in capsys.readouterr().err


def test_overlays_are_checked_with_the_best_kernel_and_come_first_on_the_path(tmp_path):
    (tmp_path / "overlays" / "4.36.2").mkdir(parents=True)
    found = list(first_gpu._models(
        argparse.Namespace(overlays=tmp_path / "overlays", toy=False, device="cuda"), tmp_path, ["one", "two"]
    ))  # fmt: skip
    assert [job.name.partition("-")[2] for job in found] == ["one", "one", "two"]
    assert found[1].path.name == "4.36.2" and found[1].result == tmp_path / "4.36.2-one.json"


def variant(rate, share, peak, waits):
    measured = {"real_tokens_per_second": rate, "share_of_limit": share, "peak_bytes": peak}
    return {**measured, "synchronisations_per_forward": waits}


def trained(own, bare=100.0):
    variants = {
        "padded:sdpa": variant(50.0, 0.5, 100, 1),
        "fa2patch:x+lengths": own,
        "by-hand:x": variant(bare, 1.0, 70, 0),
    }
    runs = {"FLAN-like": {"variants": variants}}
    return {"training": {"training": {"shapes": {"S": {"distributions": runs}}}}}


@pytest.mark.parametrize(
    ("own", "met"),
    [
        (variant(99.5, 0.98, 79, 0), [True] * 4),
        (variant(98.0, 0.96, 81, 0.5), [False] * 4),
        ({"error": "out of memory"}, [None] * 4),
    ],
)
def test_goals_of_training(own, met):
    found = gpu_goals.goals(trained(own))
    assert [goal.met for goal in found] == [None, None, *met]
    table = gpu_goals.table(found, HEADER).as_markdown()
    assert "Measured on commit aaaaaaaaaaaa; a GPU, torch 2, Transformers 5." in table


def test_without_results_every_goal_is_there_and_not_measured():
    assert {goal.met for goal in gpu_goals.goals({})} == {None} and len(gpu_goals.goals({})) == 10


def test_one_wrong_case_or_model_misses_a_goal_and_is_named():
    cases = {"plain": {"ok": True}, "sinks": {"ok": False}, "alibi": {"refused": "it has no alibi"}}
    cell = {"fa2patch": {"sdpa": {"ok": 3, "fail": {}}}}
    models = {"5-x": {"architectures": {"llama": cell, "phi": {"error": "no"}}}}
    found = gpu_goals.goals({"kernels": {"x": {"cases": cases}}, "models": models})
    assert [goal.met for goal in found[:2]] == [False, False]
    assert found[0].found == "1 of 2 cases; wrong: x: sinks" and found[1].found == "1 of 2 models; wrong: 5-x: phi"


def test_a_kernels_file_goes_on_where_it_was(tmp_path, monkeypatch):
    some = {"one": checked.Case(lengths=(3, 4)), "two": checked.Case("sinks", lengths=(3, 4))}
    monkeypatch.setattr(gpu_kernels, "cases", lambda: some)
    arguments = ["reference", "--device", "cpu", "--out", str(tmp_path / "r.json")]
    monkeypatch.setattr(gpu_kernels, "TOY_EVERY", 2)
    assert gpu_kernels.main([*arguments, "--toy"]) == 0
    assert gpu_kernels.main([*arguments, "--seconds", "-1"]) == 3
    assert list(about.read(tmp_path / "r.json")["cases"]) == ["one"]
    assert gpu_kernels.main(arguments) == 0
    found = about.read(tmp_path / "r.json")
    assert list(found["cases"]) == ["one", "two"] and all(case["ok"] for case in found["cases"].values())
    assert set(found["cases"]["two"]["relative_errors"]) == set(checked.NAMES)


@pytest.mark.slow
def test_a_toy_run_goes_through_every_stage_on_a_cpu_and_again_does_nothing(tmp_path, monkeypatch):
    arguments = ["--toy", "--device", "cpu", "--out", str(tmp_path)]
    assert first_gpu.main(arguments) == 0
    found = json.loads((tmp_path / "first_gpu.json").read_text())
    assert found["done"] and found["failed"] == {} and set(found["results"]) == set(first_gpu.SECONDS)
    assert all(found["results"].values()) and found["commit"] and found["device"]
    assert [goal["met"] for goal in found["goals"][:2]] == [True, True]
    assert str(tmp_path) not in json.dumps(found)
    monkeypatch.setattr(first_gpu.subprocess, "run", lambda *unused, **also: pytest.fail("it ran again"))
    monkeypatch.setattr(
        first_gpu.about.commits, "here", lambda *paths: {name: found[name] for name in ("commit", "dirty")}
    )
    assert first_gpu.main(arguments) == 0
