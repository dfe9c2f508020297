"""The wheel and the sdist: what is in them, and that the command works from an installed wheel."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import fa2patch
from compat_matrix.environments import tomllib

ROOT = Path(__file__).parents[1]
LLAMA = ROOT / "tests" / "own_configs" / "llama_3_1.json"
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def built(builder, root, folder):
    return Path(next(builder(str(root)).build(directory=str(folder), versions=["standard"])))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built(WheelBuilder, ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    # The folder holds what pip would put into site-packages.
    folder = tmp_path_factory.mktemp("site-packages")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def names(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_has_one_top_level_package(wheel):
    assert {name.split("/")[0] for name in names(wheel)} == {"fa2patch"}


def test_the_wheel_holds_the_whole_package_and_the_part_of_compat_matrix_that_the_command_uses(wheel):
    held = names(wheel)
    package = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "fa2patch").rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert package <= held and "fa2patch/py.typed" in held
    rest = {name[len("fa2patch/compat_matrix/") :] for name in held - package}
    assert {name.split("/")[0] for name in rest} == {
        *(
            f"{name}.py"
            for name in ("__init__", "cells", "commits", "diffable", "environments", "media_families", "results", "run")
        ),
        *(f"tiny_{name}.py" for name in ("configs", "copies", "media", "models", "overrides", "pairs", "pictures")),
        *("versions.toml", "xfail.toml", "check", "user_models", "keys.py"),
    }
    assert {name.rpartition(".")[2] for name in rest} == {"py", "toml"}


def test_the_sdist_makes_the_same_wheel(wheel, tmp_path):
    sdist = built(SdistBuilder, ROOT, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    home = tmp_path / sdist.name[: -len(".tar.gz")]
    for name in ("README.md", "CHANGELOG.md", "LICENSE", "compat_matrix/README.md", "tests/constraints.txt"):
        assert (home / name).is_file(), name
    again = built(WheelBuilder, home, tmp_path / "again")
    assert again.read_bytes() == wheel.read_bytes()


def test_the_metadata_names_the_home_and_the_readme(wheel):
    (file,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    found = message_from_string(zipfile.ZipFile(wheel).read(file).decode())
    assert found["Version"] == fa2patch.__version__ and found["Description-Content-Type"] == "text/markdown"
    urls = dict(url.split(", ") for url in found.get_all("Project-URL"))
    assert urls == METADATA["urls"]
    assert [*urls] == ["Homepage", "Documentation", "Repository", "Changelog", "Issues"]


FROM_THE_WHEEL = """
import sys
from pathlib import Path
from fa2patch.cli.commands import main
from fa2patch.cli.models import compat
environments, results, run = map(compat, ("environments", "results", "run"))
environments.make = lambda version, folder: Path(sys.executable)  # in place of an environment that takes minutes
lines = run.lines
run.lines = lambda python, packages, processes: lines(
    python, packages, {{part: [*module, "--points", *results.CORE] for part, module in processes.items()}}
)
assert {fa2patch!r} == str(Path(environments.__file__).parents[1]), environments.__file__
assert "compat_matrix" not in sys.modules
main(["matrix", "--model", {model!r}, "--transformers", environments.newest().name, "--format", "markdown"])
"""


@pytest.mark.slow
def test_the_matrix_works_from_an_installed_wheel(installed, tmp_path):
    code = FROM_THE_WHEEL.format(fa2patch=str(installed / "fa2patch"), model=str(LLAMA))
    code = f"import sys; sys.path.insert(0, {str(installed)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\| llama_3_1 \(llama\) \| ok ", done.stdout), done.stdout


@pytest.mark.parametrize(
    "name",
    ["", ".bench"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in (".suite", ".ecosystem", ".bench.figures", ".bench.against", ".gpu")
    ],
)
def test_a_command_of_a_clone_names_the_extra_that_it_lacks(name):
    code = (
        "import runpy, sys; sys.modules['rich'] = None; sys.argv[1:] = ['--help']\n"
        f"runpy.run_module('compat_matrix{name}', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("compat_matrix needs rich") and "pip install -e '.[matrix]'" in line
