"""Every job of the GitHub workflows runs on a machine that has nothing installed, except those of ``NOT_HERE``."""

import json
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("yaml")

import yaml
from github_jobs import ROOT, Machine, StepFailed

import fa2patch
from compat_matrix import commits, environments, results

pytestmark = pytest.mark.slow

SMALLEST = "4.34.1"
# Jobs that cannot be run here, with the reason.
NOT_HERE = {
    "gpu: gpu": "needs a GPU; tests/compat_matrix/test_gpu.py runs its command on a CPU",
    "pages: deploy": "publishes to GitHub Pages",
    "release: publish": "publishes to PyPI",
}

# What the expressions of each job's steps stand for.
VALUES = {
    "tests: tests": {"matrix.python": "3.11"},
    "tests: changed": {"github.event.pull_request.base.sha || github.event.before": "HEAD"},
    "matrix: versions": {"inputs.versions": "", "vars.TORCH_NEXT_INDEX": "https://index.example"},
    "matrix: check": {"matrix.version": SMALLEST, "vars.TORCH_NEXT_INDEX": ""},
    "matrix: report": {"needs.versions.outputs.versions": json.dumps([SMALLEST])},
    "packing-matrix: matrix": {
        "inputs.model": "tests/own_configs/llama_3_1.json",
        "inputs.transformers": "4.44.2",
        "inputs.pins": "peft==0.13.2",
        "inputs.python": "",
        "inputs.allow-refused": "false",
    },
    "release: build": {"github.ref_name": f"v{fa2patch.__version__}"},
}

# The job is README's test command, which .ci/run runs whole. Here it runs two files.
VARIABLES = {"tests: tests": {"PYTEST_ADDOPTS": "tests/test_package.py tests/test_project.py"}}


def dated(clone):
    # The commit of a release gives the version a date in the changelog.
    file = clone / "CHANGELOG.md"
    file.write_text(file.read_text(encoding="utf-8").replace("(unreleased)", "(2026-11-23)", 1), encoding="utf-8")


PREPARE = {"release: build": dated}  # what is changed in a job's clone

# The step that must fail between releases, if the code is newer than the evidence.
OF_A_RELEASE = "The evidence is of this code"

# Steps that are not run, because they have a condition: they talk to GitHub, or run only if something is red.
LEFT_OUT = {"matrix: report": ["An issue that says so, or that it is over", "Red"]}


def jobs():
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for job in yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]:
            yield f"{file.stem}: {job}"


def code_is_newer():
    # Whether the code changed after the commits that the cells of the evidence name.
    made = results.read(ROOT / "compat_matrix" / "evidence", environments.versions()).made
    return any(commits.changed(commit) for commit in {one.commit for one in made})


def run(where, folder, artifacts, without=()):
    variables = dict(VARIABLES.get(where, {}))
    if os.environ.get("PIP_FIND_LINKS"):
        # The variable names an index of torch's own, which a closed network lacks.
        variables["UV_TORCH_BACKEND"] = None
    values, prepare = VALUES.get(where, {}), PREPARE.get(where, Path.resolve)
    machine = Machine(folder, artifacts, values, variables, without, prepare)
    return machine.run(*where.split(": ")), machine


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    # Earlier jobs leave the distribution of the release, and the evidence of one version.
    folder = tmp_path_factory.mktemp("jobs") / "artifacts"
    run("release: build", folder.parent / "build", folder, [OF_A_RELEASE])
    evidence = folder / f"evidence-{SMALLEST}"
    evidence.mkdir()
    shutil.copy(ROOT / "compat_matrix" / "evidence" / f"{SMALLEST}.json", evidence)
    return folder


def test_what_cannot_be_run_here_is_named():
    assert {*NOT_HERE, *VALUES, *LEFT_OUT} <= {*jobs()}


@pytest.mark.parametrize("where", [job for job in jobs() if job not in NOT_HERE])
def test_every_step_of_a_job_runs_on_a_bare_machine(where, artifacts, tmp_path):
    if where == "release: build" and code_is_newer():
        with pytest.raises(StepFailed, match=f"{OF_A_RELEASE}: exit code 1"):
            run(where, tmp_path / "machine", artifacts)
        return
    left_out, machine = run(where, tmp_path / "machine", artifacts)
    assert left_out == LEFT_OUT.get(where, [])
    if where == "matrix: versions":
        (line,) = (tmp_path / "machine" / "output").read_text().splitlines()
        wanted = json.loads(line.partition("=")[2])
        assert SMALLEST in wanted and wanted[-1] == "torch-next"


def test_a_step_that_fails_is_seen(artifacts, tmp_path):
    machine = Machine(tmp_path / "machine", artifacts, {"github.ref_name": "v0"})
    with pytest.raises(StepFailed, match="expected the tag"):
        machine.run("release", "build")
