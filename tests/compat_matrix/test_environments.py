"""The requirements of an environment, when it is made again, and which of our packages it sees."""

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compat_matrix import environments


def test_another_release_of_a_known_minor_has_that_minors_pins():
    known = environments.version("4.44.2")
    assert environments.version("4.44") == known
    other = environments.version("4.44.0")
    assert (other.transformers, other.pins) == ("4.44.0", known.pins)


def test_ones_own_pins_take_the_place_of_those_of_the_same_package():
    known = environments.version("4.44.2")
    mine = known.changed(["PEFT==0.12.0", "wrapt==1.16.0"], python="3.10")
    assert "peft==0.13.2" not in mine.requirements and {"PEFT==0.12.0", "numpy<2"} <= {*mine.requirements}
    assert "wrapt" not in mine.requirements and mine.python == "3.10"
    assert mine.name.startswith("4.44.2-") and mine.name != known.changed(["peft==0.12.0"]).name
    assert known.changed() is known


def test_main_is_the_release_to_come_and_is_allowed_to_fail(monkeypatch):
    main = environments.version("main")
    assert main.allowed_to_fail and main.name == "main" and "transformers" in main.requirements
    assert main.stamp != "\n".join(main.requirements), "made again tomorrow"
    monkeypatch.setattr(environments, "_output", lambda command: "1234 refs/heads/main")
    assert environments._next().endswith("transformers@main")
    monkeypatch.setattr(environments, "_output", lambda command: "")
    assert "dev" in environments._next()


def test_a_block_may_say_which_wrapt_and_that_it_may_fail(monkeypatch, tmp_path):
    (tmp_path / "versions.toml").write_text(
        '[defaults]\npython = "3.11"\ntorch = "2.13.0"\npins = []\n'
        '[version."5.0.0"]\nwrapt = "1.16.0"\nallowed_to_fail = true\n'
    )
    monkeypatch.setattr(environments, "HERE", tmp_path)
    (block,) = environments.versions().values()
    assert block.allowed_to_fail and "wrapt==1.16.0" in block.requirements


def test_an_environment_is_made_again_when_what_it_is_made_of_changes(monkeypatch, tmp_path):
    made = []

    def uv(*arguments):
        made.append(arguments)
        if arguments[0] == "venv":
            home = tmp_path / "4.44.2"
            home.mkdir(exist_ok=True)
            (home / "pyvenv.cfg").write_text("version_info = 3.11.7\n")

    monkeypatch.setattr(environments, "_uv", uv)
    known = environments.version("4.44.2")
    environments.make(known, tmp_path)
    environments.make(known, tmp_path)
    assert [arguments[0] for arguments in made] == ["venv", "pip"]
    environments.make(environments.replace(known, wrapt="1.16.0"), tmp_path)
    environments.make(environments.replace(known, wrapt="1.16.0", python="3.10"), tmp_path)
    assert len(made) == 6


def test_only_our_packages_are_seen():
    with environments.only_our_packages() as folder:
        assert sorted(os.listdir(folder)) == ["compat_matrix", "fa2patch"]
        code = "import compat_matrix.environments as e; print(e.HERE)"
        alone = {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"]}
        seen = subprocess.run([sys.executable, "-c", code], cwd=folder, env=alone, capture_output=True, text=True)
        assert seen.stdout.startswith(str(folder)), seen.stderr
    assert not folder.exists()


def test_a_package_that_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(environments.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="fa2patch, found none: reinstall"), environments.only_our_packages():
        pass


def test_environments_are_made_one_at_a_time_and_each_of_them_once(monkeypatch, tmp_path):
    running, most, made = [0], [0], []

    def uv(*arguments):
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.02)
        if arguments[0] == "venv":
            made.append(arguments[-1])
            Path(arguments[-1]).mkdir(parents=True)
            Path(arguments[-1], "pyvenv.cfg").write_text("version_info = 3.11.7\n")
        running[0] -= 1

    monkeypatch.setattr(environments, "_uv", uv)
    wanted = [environments.version(name) for name in ("4.44.2", "4.57.6") * 2]
    with ThreadPoolExecutor(len(wanted)) as pool:
        pythons = list(pool.map(lambda version: environments.make(version, tmp_path / "new"), wanted))
    assert most == [1]
    assert sorted(made) == sorted({str(python.parents[1]) for python in pythons}) and len(made) == 2


GONE = "error: Failed to write to the client cache\n  cause: failed to rename file"
UNPUBLISHED = "because there is no version of transformers==4.99.0"


@pytest.mark.parametrize(
    "errors, expected_runs, error",
    [
        ([], 1, None),
        ([GONE], 2, None),
        ([GONE, GONE], 2, "client cache"),
        ([UNPUBLISHED], 1, "the package index has no transformers==4.99.0"),
    ],
)
def test_uv_is_run_once_more_only_when_it_fails_at_its_cache(monkeypatch, errors, expected_runs, error):
    runs = []

    def run(command, **settings):
        said = errors[len(runs)] if len(runs) < len(errors) else ""
        runs.append(command)
        return subprocess.CompletedProcess(command, int(bool(said)), "", said)

    monkeypatch.setattr(environments.subprocess, "run", run)
    monkeypatch.setattr(environments.shutil, "which", lambda name: name)
    with pytest.raises(RuntimeError, match=error) if error else contextlib.nullcontext():
        environments._uv("pip", "install", "transformers")
    assert len(runs) == expected_runs
