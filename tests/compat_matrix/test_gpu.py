"""The program for a GPU, rehearsed from its first task to this repository's pages, and its processes on a CPU."""

import json
import re
import time
from pathlib import Path

import pytest
import torch
from stand_in_gpu import STEPS, Machine, of_page

from compat_matrix import environments, keys, plans
from compat_matrix.bench import workloads
from compat_matrix.gpu import __main__ as gpu
from compat_matrix.gpu import models, page, pool, program, store, training
from compat_matrix.publish import blocks, matrix
from fa2patch.kernels.reference import Reference

README = Path(__file__).parents[2] / "compat_matrix" / "README.md"
MINUTES = range(1, 10)
NEWEST = environments.newest().name


@pytest.fixture
def nothing_committed(monkeypatch, tmp_path_factory):
    empty = tmp_path_factory.mktemp("results")
    original = store.committed
    monkeypatch.setattr(store, "committed", lambda folder=empty: original(folder))


@pytest.fixture
def run(monkeypatch, tmp_path, nothing_committed):
    def begun(seconds=float("inf"), *more):
        machine = Machine(monkeypatch, tmp_path, seconds)
        machine.code = machine.run(*more)
        return machine

    begun.folder = tmp_path
    return begun


def test_what_matters_comes_first_and_each_kind_in_its_order(run):
    machine = run(float("inf"), "--seconds", "100000")
    assert machine.code == 0
    begun = list(dict.fromkeys(name.partition(":")[0] for name in machine.started))
    assert begun == [step for step in STEPS if step != "beyond"] + ["beyond"]
    cells = [name for name in machine.started if name.startswith("matrix")]
    every = plans.read()[NEWEST].snapshots
    assert len(cells) == len(every) and cells[:2] == [f"matrix: {NEWEST}, llama", f"matrix: {NEWEST}, mistral"]


def test_more_than_120_cells_are_done_in_ten_minutes(run):
    machine = run()
    assert machine.code == gpu.OUT_OF_TIME
    assert sum(name.startswith("matrix") for name, when in machine.done.items() if when <= 600) >= 120


def test_tasks_that_are_timed_run_alone(monkeypatch, run):
    beside, start = [], Machine.start
    monkeypatch.setattr(
        Machine, "start", lambda self, task: (beside.append((task.alone, len(self.busy))), start(self, task))
    )
    run(float("inf"), "--steps", "kernels", "training")
    assert {busy for alone, busy in beside if alone} == {0} and max(busy for alone, busy in beside if not alone) == 15


@pytest.mark.parametrize("minute", MINUTES[:-1])  # in the last one it has ended by itself
def test_a_machine_that_goes_leaves_what_was_done_and_nothing_is_run_twice(run, minute):
    machine = run(60 * minute)
    assert machine.code == -1
    text, records = of_page(run.folder)
    assert {*records} == {*machine.done} and records
    following = re.search(r"next: (.*)\.\*\*", text)[1]
    again = run()
    assert not {*machine.done} & {*again.started}, "nothing is computed twice"
    assert {*machine.started} - {*machine.done} <= {*again.started}, "what was cut is computed again"
    assert again.started[0] == following


def test_machines_of_ten_minutes_do_all(run):
    codes, done = [], []
    while not codes or codes[-1] == gpu.OUT_OF_TIME:
        machine = run(600)
        codes.append(machine.code)
        done += machine.done
        assert machine.time < 600 and len(codes) < 20, "it ends before the machine goes"
    assert codes[-1] == 0 and len(done) == len({*done})


def test_the_page_says_what_was_found_and_what_is_next(run):
    run()
    text, records = of_page(run.folder)
    lines = text.splitlines()
    assert lines[0] == "# What was run on GPUs"
    assert re.match(rf"\*\*\d+ of \d+ goals are met, .* {len(records)} of \d+ tasks are done; next: ", lines[2])
    assert all(words in text for words in ("NVIDIA H200", "torch 2.11", "flash_attn 2.8.3", "times padded", "| 2.33 |"))


def test_the_readme_of_the_matrix_says_what_a_cut_leaves(monkeypatch, tmp_path, nothing_committed):
    rows = []
    for minute in MINUTES:
        machine = Machine(monkeypatch, tmp_path / str(minute), 60 * minute)
        machine.run()
        text, _ = of_page(machine.folder)
        steps = [name.partition(":")[0] for name in machine.done]
        done = ", ".join(f"{steps.count(step)} {step}" for step in dict.fromkeys(steps))
        rows.append(f"| {minute} | {done} | {re.search(r'next: (.*)[.]..', text)[1]} |")
    assert "\n".join(rows) in README.read_text(encoding="utf-8"), "\n" + "\n".join(rows)


def test_the_tests_that_the_readme_names_are_there():
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", README.read_text(encoding="utf-8"))
    assert len(named) > 15
    for file, test in named:
        texts = (found.read_text(encoding="utf-8") for found in (README.parents[1] / "tests").glob(f"**/{file}"))
        assert any(f"def {test}(" in text for text in texts), (file, test)


# --- what is due ----------------------------------------------------------------------------------------------


def record(key, **found):
    made = {"device": "a GPU", "when": "2026-11-30", "torch": "2", "transformers": "5", "builds": {}, "commit": "a"}
    return {"row": {"right": "all"}, "wrong": {}, "refused": {}, **found, "made": {**made, "dirty": False, "key": key}}


def test_what_was_never_done_comes_before_what_is_stale():
    sources = keys.Sources(store.ROOT)
    fresh = sources.key({"files": ["compat_matrix/gpu/store.py"], "functions": []})
    stale = dict.fromkeys(fresh, "another")
    tasks = [pool.Task("matrix", name, "models:cell") for name in "abcd"]
    records = {"matrix: a": record(stale), "matrix: b": record(fresh), "matrix: d": record(stale)}
    del records["matrix: d"]["made"]["key"]  # a result of before there were keys
    assert [task.what for task in program.due(tasks, records, sources)] == ["c", "a", "d"]


def test_results_are_taken_beside_those_that_are_there(tmp_path):
    run, folder = tmp_path / "run", tmp_path / "results"
    old, new = {"a.py::f": "1"}, {"a.py::f": "2", "b.py::g": "3"}
    store.Run(run).keep("matrix: 5, llama", record(old))
    store.Run(run).keep("training: 7B, 4 documents, padded:sdpa", record(old))
    assert store.take(run, folder) == 2
    again = store.Run(run)
    again.keep("matrix: 5, llama", record(new, wrong={"p": "no"}))
    again.keep("matrix: 5, phi:masked", record(new))
    assert store.take(run, folder) == 3
    found = store.committed(folder)
    assert [*found] == ["matrix: 5, llama", "matrix: 5, phi:masked", "training: 7B, 4 documents, padded:sdpa"]
    assert found["matrix: 5, llama"] == record(new, wrong={"p": "no"})
    assert found["training: 7B, 4 documents, padded:sdpa"]["made"]["key"] == old


def test_a_machine_that_goes_while_it_writes_loses_one_line(tmp_path):
    run = store.Run(tmp_path)
    run.keep("matrix: a", record({"a.py::f": "1"}))
    run.keep("matrix: b", record({"a.py::f": "1", "b.py::g": "2"}))
    whole = run.file.read_text(encoding="utf-8")
    for cut in range(len(whole)):
        run.file.write_text(whole[:cut], encoding="utf-8")
        found = store.Run(tmp_path)
        found.keep("matrix: c", record({"c.py::h": "3"}))
        records = store.Run(tmp_path).records
        assert records["matrix: c"]["made"]["key"] == {"c.py::h": "3"}
        assert all(records[name] == run.records[name] for name in records if name != "matrix: c")
        assert len(records) == 1 + sum('"task"' in line for line in whole[:cut].split("\n")[:-1])


def test_the_newest_result_of_an_architecture_is_shown_and_a_refusal_hides_none():
    def cell(when, **found):
        made = record({}, row={"architecture": "llama", "kernels": "flash_attn"}, **found)
        made["made"]["when"] = when
        return made

    records = {"families: a": cell("2026-01-02"), "matrix: b": cell("2026-01-03", refused={"all": "a build"})}
    assert matrix.on_gpus(records)["llama"][0] == "ok"
    records["matrix: c"] = cell("2026-01-04", wrong={"point": "off"})
    state, said = matrix.on_gpus(records)["llama"]
    assert state == "fail" and said == "Wrong on a GPU, 2026-01-04, Transformers 5."


def test_it_says_what_is_due_and_that_it_needs_a_gpu_and_a_folder(monkeypatch, capsys, tmp_path, nothing_committed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for given, said in ((["--out", "x"], "found none"), (["--device", "cpu"], "--out FOLDER")):
        with pytest.raises(SystemExit) as error:
            gpu.main(given)
        assert error.value.code == 2 and said in capsys.readouterr().err
    assert gpu.main(["--device", "cpu", "--list", "--steps", "kernels"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["kernels: reference", "kernels: reference, llama"]


def test_every_task_is_a_function_that_there_is():
    here = program.Machine("cuda", NEWEST, ["flash_attn", "flex"], True)
    known = {name: plan.snapshots for name, plan in plans.read().items()}
    tasks = [*program.tasks(here, known)]
    assert len({task.name for task in tasks}) == len(tasks)
    for call, arguments in {task.call: task.arguments for task in tasks}.items():
        module, _, name = call.partition(":")
        function = getattr(__import__(f"compat_matrix.gpu.{module}", fromlist=[name]), name)
        function.__code__  # noqa: B018
        assert len(arguments) >= function.__code__.co_argcount - 1 - bool(function.__code__.co_flags & 4)


# --- processes ------------------------------------------------------------------------------------------------


@pytest.fixture
def processes():
    made = pool.Pool(2, "cpu", {})
    yield made
    made.close()


def cell(family, kernel="auto"):
    return pool.Task("matrix", family, "models:cell", (family, kernel, "sdpa", "eager"))


def test_processes_go_on_after_a_crash_an_error_and_a_limit(processes):
    found = {}
    processes.start(cell("llama"))
    (crashing,) = processes.busy
    crashing.process.kill()
    found["crash"] = processes.next(time.monotonic() + 60)[1]
    processes.start(cell("llama"))
    (slow,) = processes.busy
    slow.until = slow.begun
    found["limit"] = processes.next(time.monotonic() + 60)[1]
    wrong = pool.Task("kernels", "x", "models:against_reference", ("no-such-kernel",))
    pool.run(
        [wrong, cell("llama"), cell("bert:masked")], processes, 120, lambda task, what: found.update({task.what: what})
    )
    assert found["crash"]["error"].startswith("the process ended with -9")
    assert found["limit"] == {"error": "it took more than 0 seconds"}
    assert "UnknownKernel" in found["x"]["error"]
    for family in ("llama", "bert:masked"):
        assert found[family]["row"]["right"] == "2 of 2" and found[family]["row"]["kernels"] == "reference"
        assert store.is_done(found[family], keys.Sources(store.ROOT))
        key = found[family]["made"]["key"]
        assert (
            "compat_matrix/check/points/training.py::half_precision" in key and "fa2patch/kernels/reference.py::" in key
        )
        assert not any(item.startswith(("compat_matrix/gpu/work", "compat_matrix/commits")) for item in key)


def test_a_device_that_computes_no_more_is_no_refusal(monkeypatch):
    def refuses(*unused):
        raise RuntimeError("head_dim must be 64")

    monkeypatch.setattr(models, "compared", refuses)
    found = models.against_reference("cpu", "reference")
    assert not found["wrong"] and len(found["refused"]) == found["row"]["refused by the build"] > 30
    monkeypatch.setattr(models, "synchronize", refuses)
    with pytest.raises(RuntimeError):
        models.against_reference("cpu", "reference")


def test_wrong_numbers_and_leaks_are_told_from_refusals(monkeypatch):
    right = Reference.__call__

    def off(*given):
        return right(*given) * 1.5

    def one_document(kernel, q, k, v, boundaries, options):
        return right(kernel, q, k, v, workloads.boundaries_of([len(q)]), options)

    for fault, wrong in ((off, {"half_precision"}), (one_document, {"half_precision", "nothing_crosses"})):
        monkeypatch.setattr(Reference, "__call__", fault)
        found = models.cell("cpu", "llama", "auto", "sdpa")
        assert {*found["wrong"]} == wrong and found["row"]["right"] == f"{2 - len(wrong)} of 2"
    refused = models.cell("cpu", "inkling2_loop_text", "auto", "sdpa", "eager")
    assert refused["row"]["right"] == "0 of 2" and "UnsupportedModel" in refused["refused"]["apply"]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["costs:hybrid bamba", "costs:shared 512 8", "costs:encoder eager",
    "costs:memory_of_trial", "costs:evaluation", "costs:kernel reference", "costs:check_of_lengths",
    "suites:suite tests/test_operators.py -q"])  # fmt: skip
def test_a_task_of_a_device_runs_on_a_cpu(processes, call):
    name, *arguments = call.split()
    found = []
    pool.run([pool.Task("x", call, name, tuple(arguments))], processes, 300, lambda task, what: found.append(what))
    if found[0].get("refused"):
        pytest.skip(str(found[0]["refused"]))  # a package that is not installed
    assert "error" not in found[0] and (found[0].get("row") or found[0]["rows"]) and not found[0].get("wrong")


def test_ways_of_training_learn_from_the_same_documents():
    ways = ("padded:sdpa", "fa2patch:auto+lengths", "by-hand:reference", "padded_batches:auto", "upstream:sdpa")
    losses = {}
    for way in ways:
        of = training.Training("cpu", training.Setting("TinyLlama-1.1B", 4), way)
        of.optimizer.step = lambda: None
        ((batch, share),) = of._passes([[5, 6, 7], [8, 9], [3, 4, 5, 6]])
        losses[way] = of.model(**of._moved(batch, [3, 2, 4]), use_cache=False).loss.item() * share
    assert max(losses.values()) - min(losses.values()) < 0.05  # the rounding of bfloat16
    found = training.train("cpu", "Mistral-7B with LoRA, 4 documents", "budget:auto+lengths")
    assert {*found["rows"]} == {"FLAN-like", "OrcaMath-like"} and all(found["rows"].values())


# --- goals ----------------------------------------------------------------------------------------------------


def of_training(own, budget):
    setting = "training: 7B, 4 documents, "
    rows = {"padded:x": {"real tokens/s": 50, "limit": 2.1, page.PEAK: 10.0}, "by-hand:x": {"real tokens/s": 100}}
    rows |= {"fa2patch:x+lengths": own, "budget:x+lengths": {"real tokens/s": budget}}
    return {setting + way: record({}, rows={"FLAN-like": row}) for way, row in rows.items()}


@pytest.mark.parametrize(
    ("own", "budget", "met"),
    [
        ({"real tokens/s": 101, page.PEAK: 7.9}, 104, [True] * 4),
        ({"real tokens/s": 98, page.PEAK: 8.1}, 100, [False] * 4),
        ({"real tokens/s": 101}, 104, [True, True, True, None]),
    ],
)
def test_goals_of_training(own, budget, met):
    goals = [goal for goal in page.goals(of_training(own, budget)) if goal.goal.startswith("7B")]
    assert [goal.met for goal in goals] == met


def test_one_wrong_task_misses_a_goal_and_is_named_and_a_refusal_does_not():
    records = {"matrix: 5, llama": record({}), "matrix: 5, phi": record({}, refused={"sdpa": "a build"})}
    goal = page.goals(records)[0]
    assert goal.met and goal.found == "2 of 2; a build or release refuses a part of 1"
    records["matrix: 5, opt"] = {**record({}), "error": "out of memory"}
    goal = page.goals(records)[0]
    assert goal.met is False and "wrong: 5, opt" in goal.found
    assert "- matrix: 5, opt, error: out of memory" in page.page(records)


def test_without_results_every_goal_is_there_and_not_measured():
    assert {goal.met for goal in page.goals({})} == {None} and len(page.goals({})) == len(page.WHAT)
    assert blocks.throughput({}) == "Nothing was measured on a GPU yet."


def test_the_committed_results_name_no_machine():
    text = json.dumps(store.committed())
    assert str(Path.home()) not in text and str(store.ROOT) not in text
