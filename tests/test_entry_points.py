"""Other packages add traits and kernels through entry points."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from two_layers import tiny_llama

import fa2patch
from fa2patch import entry_points, kernels
from fa2patch.kernels import picks
from fa2patch.kernels.reference import Reference
from fa2patch.patch import model_plan

MODULE = """
from fa2patch.kernels import register_kernel
from fa2patch.kernels.reference import Reference
from fa2patch.traits import Trait, register_trait

class Own(Reference):
    name = "own"

class Nothing(Trait):
    name = "nothing"
    def finds(self, model):
        return None

def kernel():
    register_kernel(Own())

def trait():
    register_trait(Nothing())
"""
GOOD = "[fa2patch.kernels]\nown = their_module:kernel\n[fa2patch.traits]\nnothing = their_module:trait\n"
BROKEN = "[fa2patch.kernels]\nabsent = their_module:absent\n" + GOOD.partition("\n")[2]


def install(folder: Path, points: str) -> None:
    # The folder gets what an installed package has.
    info = folder / "their_package-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(points)
    (folder / "their_module.py").write_text(MODULE)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for module, name in (
        (entry_points, "_added"),
        (entry_points, "_done"),
        (picks, "_registered"),
        (model_plan, "_registered"),
    ):
        monkeypatch.setattr(module, name, type(getattr(module, name))())
    monkeypatch.delitem(sys.modules, "their_module", raising=False)
    return lambda points: install(tmp_path, points)


def test_the_first_apply_adds_them_once(installed):
    installed(GOOD)
    model = tiny_llama()
    fa2patch.apply(model, kernel="own")
    assert [(one.kind, one.name, one.package) for one in entry_points.added()] == [
        ("trait", "nothing", "their-package 1.2"),
        ("kernel", "own", "their-package 1.2"),
    ]
    fa2patch.apply(model)
    assert len(entry_points.added()) == 2


def test_commands_that_list_kernels_have_them(installed):
    installed(GOOD)
    assert "own" in [kernel.name for kernel in picks.every_kernel()]


def test_what_a_program_registers_itself_is_not_of_a_package(installed):
    kernels.register_kernel(type("Mine", (Reference,), {"name": "mine"})())
    assert entry_points.added() == ()


def test_one_that_fails_is_named_with_its_package_and_the_others_are_added(installed):
    installed(BROKEN)
    said = r"'absent' of fa2patch.kernels, .* of their-package 1.2, failed .* AttributeError"
    with pytest.warns(RuntimeWarning, match=said):
        entry_points.load()
    assert [one.name for one in entry_points.added()] == ["nothing", "own"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry_points.load()


def test_importing_loads_none_and_status_names_them(tmp_path):
    install(tmp_path, GOOD)
    code = "import sys, fa2patch; assert 'their_module' not in sys.modules"
    root = Path(fa2patch.__file__).parents[1]
    variables = {"PYTHONPATH": f"{root}:{tmp_path}", "PATH": "", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code], env=variables, check=True)
    command = [sys.executable, "-m", "fa2patch", "status", "llama", "--json"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    package = "their-package 1.2"
    assert json.loads(done.stdout)["added"] == [
        {"kind": "trait", "name": "nothing", "package": package},
        {"kind": "kernel", "name": "own", "package": package},
    ]
