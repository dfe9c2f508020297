"""The commands for a GPU: their processes, where they go on, and what the goals say."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from compat_matrix.bench import figures, first_gpu, gpu, gpu_once
from compat_matrix.check import kernels as checked
from compat_matrix.diffable import of_results

HEADER = {"commit": "a" * 40, "dirty": False, "torch": "2", "transformers": "5", "device": "a GPU"}


@dataclass(frozen=True)
class Told(gpu.Job):
    """A job whose outcome is told beforehand."""

    ran: tuple = ()
    done: bool = True

    def run(self, seconds):
        self.ran[0].append((self.name, round(seconds)))
        return {"done": self.done, "command": self.command}


def told(stage, name, ran, **more):
    return Told(stage, name, [], Path("x"), ran=(ran,), **more)


def run_all(planned, folder, seconds=540):
    return gpu.run_all(planned, folder, HEADER, first_gpu.SECONDS, seconds)


def test_what_is_done_is_not_run_again_and_what_ran_out_of_time_is(tmp_path):
    ran = []
    planned = [told("kernels", "a", ran), told("kernels", "b", ran, done=False)]
    assert list(run_all(planned, tmp_path)) == ["kernels, a"] == list(run_all(planned, tmp_path))
    assert [name for name, _ in ran] == ["a", "b", "b", "b", "b"]
    assert figures.read(tmp_path / "jobs" / "kernels--a.json") == {**HEADER, "done": True, "command": []}


def test_a_stage_leaves_the_shares_of_those_behind_it_and_takes_what_others_left(tmp_path):
    ran, shares = [], first_gpu.SECONDS
    planned = [told("kernels", "a", ran), told("training", "t", ran, most=45, start=45), told("hybrids", "h", ran)]
    run_all(planned, tmp_path)
    assert ran == [("a", 540 - shares["training"] - shares["hybrids"]), ("t", 540 - shares["hybrids"]), ("h", 540)]


def test_nothing_starts_when_time_is_over(tmp_path):
    ran = []
    assert run_all([told("hybrids", "h", ran)], tmp_path, 1) == {} and ran == []
    assert run_all([told("training", "t", ran, most=45, start=45)], tmp_path, 50) == {} and ran == []


def test_results_of_another_commit_or_of_other_settings_are_not_mixed_in(tmp_path, capsys):
    job = gpu.Job("kernels", "a", ["kernel", "--steps", "3"], tmp_path / "a.json")
    figures.write(job.record(tmp_path), {**HEADER, "done": True, "command": job.command})
    parser = argparse.ArgumentParser()
    gpu.require_same(parser, [job], tmp_path, HEADER)
    other = gpu.Job("kernels", "a", ["kernel", "--steps", "4"], tmp_path / "a.json")
    for jobs, header in (([], {**HEADER, "commit": "b" * 40}), ([other], HEADER)):
        with pytest.raises(SystemExit):
            gpu.require_same(parser, jobs, tmp_path, header)
        assert "another commit or setting (kernels--a.json)" in capsys.readouterr().err


def test_it_needs_a_gpu_or_says_toy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for more, said in (([], "found none"), (["--device", "cpu"], "goes with --toy")):
        with pytest.raises(SystemExit) as error:
            first_gpu.main(["--out", str(tmp_path), *more])
        assert error.value.code == 2 and said in capsys.readouterr().err


def test_overlays_are_checked_with_the_best_kernel_and_come_first_on_the_path(tmp_path):
    (tmp_path / "overlays" / "4.36.2").mkdir(parents=True)
    asked = argparse.Namespace(overlays=tmp_path / "overlays", toy=False, device="cuda")
    found = list(first_gpu.models(asked, tmp_path, ["one", "two"]))
    assert [job.name.partition("-")[2] for job in found] == ["one", "one", "two"]
    assert found[1].path.name == "4.36.2" and found[1].result == tmp_path / "4.36.2-one.json"


# --- training -------------------------------------------------------------------------------------------------

TOY = ["--stages", "training", "--device", "cpu", "--toy", "--steps", "2", "--warm-up", "1", "--shapes", "Mistral-7B"]


def test_training_goes_on_where_it_was_and_keeps_errors(tmp_path, monkeypatch):
    ran, threads = [], torch.get_num_threads()

    def here(self, seconds):
        ran.append(self.name)
        if "broken" in self.name:
            return {"done": True, "command": self.command, "error": "ValueError: no such variant"}
        code = gpu_once.main([*self.command, "--out", str(self.result), "--seconds", "90"])
        return {"done": code == 0, "command": self.command}

    monkeypatch.setattr(gpu.Job, "run", here)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(name, "")
    variants = ["padded:sdpa", "fa2patch:reference", "fa2patch:reference+lengths", "by-hand:reference", "broken:sdpa"]
    arguments = [*TOY, "--out", str(tmp_path)]
    try:
        assert first_gpu.main([*arguments, "--variants", *variants[:2]]) == 0
        assert first_gpu.main([*arguments, "--variants", *variants]) == 0
    finally:
        torch.set_num_threads(threads)
    assert ran == [f"Mistral-7B, {variant}" for variant in variants]
    with pytest.raises(SystemExit):
        first_gpu.main([*arguments, "--variants", *variants, "--layers", "1"])
    found = figures.read(tmp_path / "first_gpu.json")
    assert found["toy"] is True and found["commit"] and found["done"]
    trained = found["results"]["training"]["training"]
    for run in trained["shapes"]["Mistral-7B"]["distributions"].values():
        assert list(run["variants"]) == variants and run["variants"].pop("broken:sdpa")["error"]
        losses = [variant["last_loss"] for variant in run["variants"].values()]
        assert max(losses) - min(losses) < 0.05  # the rounding of bfloat16
    assert "Mistral-7B, FLAN-like, broken:sdpa | ValueError: no such variant |" in of_results(trained["rows"])


@pytest.mark.slow
def test_an_error_of_a_process_is_its_last_line_and_a_timeout_is_not_done(tmp_path):
    job = gpu.Job("training", "x", ["kernel", "no-such-kernel", "--device", "cpu"], tmp_path / "x.json")
    found = job.run(100)
    assert found["done"] and found["error"].endswith("errors.html#unknownkernel")
    assert job.run(-40)["done"] is False


def test_a_place_names_no_machine():
    assert gpu_once.place("/somewhere/lib/site-packages/torch/nn/functional.py", 3) == "torch/nn/functional.py:3"
    assert gpu_once.place("/a/clone/fa2patch/boundaries.py", 3) == "fa2patch/boundaries.py:3"


def test_a_kernels_file_goes_on_where_it_was(tmp_path, monkeypatch):
    some = {"one": checked.Case(lengths=(3, 4)), "two": checked.Case("sinks", lengths=(3, 4))}
    monkeypatch.setattr(gpu_once, "cases", lambda: some)
    monkeypatch.setattr(gpu_once, "TOY_EVERY", 2)
    file, threads = tmp_path / "r.json", torch.get_num_threads()
    arguments = ["kernel", "reference", "--device", "cpu", "--out", str(file)]
    try:
        assert gpu_once.main([*arguments, "--toy"]) == 0
        assert gpu_once.main([*arguments, "--seconds", "-1"]) == 3
        assert list(figures.read(file)["cases"]) == ["one"]
        assert gpu_once.main(arguments) == 0
    finally:
        torch.set_num_threads(threads)
    cases = figures.read(file)["cases"]
    assert list(cases) == ["one", "two"] and all(case["ok"] for case in cases.values())
    assert set(cases["two"]["relative_errors"]) == set(checked.NAMES)


# --- goals ----------------------------------------------------------------------------------------------------


def variant(rate, share, peak, waits):
    measured = {"real_tokens_per_second": rate, "share_of_limit": share, "peak_bytes": peak}
    measured["ratio_to_padded"] = share * 2.06
    return {**measured, "synchronisations_per_forward": waits}


@pytest.mark.parametrize(
    ("own", "met"),
    [
        (variant(99.5, 0.98, 79, 0), [True] * 5),
        (variant(98.0, 0.96, 81, 0.5), [False] * 5),
        ({"error": "out of memory"}, [None] * 5),
    ],
)
def test_goals_of_training(own, met):
    bare = {"padded:sdpa": variant(50.0, 0.5, 100, 1), "by-hand:x": variant(100.0, 1.0, 70, 0)}
    runs = {"FLAN-like": {"variants": {**bare, "fa2patch:x+lengths": own}}}
    found = first_gpu.goals({"training": {"training": {"shapes": {"S": {"distributions": runs}}}}})
    assert [goal.met for goal in found] == [None, None, *met]
    rows, notes = first_gpu.table(found, HEADER)
    assert notes == "Measured on commit aaaaaaaaaaaa; a GPU, torch 2, Transformers 5." and len(rows) == 7


def test_without_results_every_goal_is_there_and_not_measured():
    assert {goal.met for goal in first_gpu.goals({})} == {None} and len(first_gpu.goals({})) == 12


def test_one_wrong_case_or_model_misses_a_goal_and_is_named():
    cases = {"plain": {"ok": True}, "sinks": {"ok": False}, "alibi": {"refused": "it has no alibi"}}
    cell = {"fa2patch": {"sdpa": {"ok": 3, "fail": {}}}}
    models = {"5-x": {"architectures": {"llama": cell, "phi": {"error": "no"}}}}
    found = first_gpu.goals({"kernels": {"x": {"cases": cases}}, "models": models})
    assert [goal.met for goal in found[:2]] == [False, False]
    assert found[0].found == "1 of 2 cases; wrong: x: sinks" and found[1].found == "1 of 2 models; wrong: 5-x: phi"


@pytest.mark.slow
def test_a_toy_run_goes_through_every_stage_on_a_cpu_and_again_does_nothing(tmp_path, monkeypatch):
    arguments = ["--toy", "--device", "cpu", "--out", str(tmp_path)]
    assert first_gpu.main(arguments) == 0
    found = json.loads((tmp_path / "first_gpu.json").read_text())
    assert found["done"] and found["failed"] == {} and set(found["results"]) == set(first_gpu.SECONDS)
    assert all(found["results"].values()) and found["commit"] and found["device"]
    assert [goal["met"] for goal in found["goals"][:2]] == [True, True]
    assert str(tmp_path) not in json.dumps(found)
    page = (tmp_path / "first_gpu.md").read_text()
    assert "**Kernels.**" in page and "| reference | 4 of 4 |" in page and "| 3 right |" in page
    assert page.count("fa2patch:reference+lengths") == 2 and "- fla: ModuleNotFoundError" in page
    monkeypatch.setattr(gpu.subprocess, "run", lambda *unused, **also: pytest.fail("it ran again"))
    monkeypatch.setattr(figures.commits, "here", lambda *paths: {name: found[name] for name in ("commit", "dirty")})
    assert first_gpu.main(arguments) == 0
