"""What README, the documentation and examples of 0.1.0 say, as ten scripts that nobody may change, runs with this code.

A name that has moved since may warn, with a FutureWarning that says what to write instead.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from snippets import ROOT
from tiny_hub import make_data, make_models

import fa2patch
from fa2patch.kernels import picks
from fa2patch.patch import model_plan

FOLDER = ROOT / "tests" / "scripts_of_0_1_0"
NAMES = (FOLDER / "names.txt").read_text(encoding="utf-8").splitlines()
"""The public names of 0.1.0, as docs/reference.md had them, functions with their parameters."""

SCRIPTS = sorted(FOLDER.glob("*.py"))
CHECKSUM = "059846577aec0f5ea61003ff71b58316dc1c6a73a41aaee5638604d06ee0899c"
"""SHA-256 of the scripts as they were written, one after the other."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    make_data(home)
    return home


def test_the_scripts_are_as_they_were() -> None:
    assert len(SCRIPTS) == 10
    assert hashlib.sha256(b"".join(script.read_bytes() for script in SCRIPTS)).hexdigest() == CHECKSUM


def _param(script: Path) -> Any:
    marks = [pytest.mark.slow] if "torch.compile" in script.read_text(encoding="utf-8") else []
    return pytest.param(script, id=script.stem, marks=marks)


@pytest.mark.parametrize("script", [*map(_param, SCRIPTS)])
def test_runs_as_it_did(script: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_models(script.read_text(encoding="utf-8"), home)
    monkeypatch.chdir(home)
    monkeypatch.setattr(picks, "_registered", [])  # a script registers a kernel and a trait
    monkeypatch.setattr(model_plan, "_registered", [])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True, raising=False)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # inductor: minutes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runpy.run_path(str(script), run_name="__main__")
    of_fa2patch = [one for one in caught if Path(fa2patch.__file__).parent in Path(one.filename).parents]
    moved = [one for one in caught if one.category is FutureWarning and "fa2patch" in str(one.message)]
    assert not [one for one in of_fa2patch if issubclass(one.category, DeprecationWarning)]
    assert all("fa2patch." in str(one.message) for one in moved)


def found(name: str) -> Any:
    """What a dotted name leads to. A field of a data class need not be an attribute of it."""
    parts = name.split(".")
    module = next(i for i in range(len(parts), 0, -1) if _is_module(".".join(parts[:i])))
    at: Any = importlib.import_module(".".join(parts[:module]))
    for part in parts[module:]:
        at = inspect.getattr_static(at, part, None) if inspect.isclass(at) else getattr(at, part)
    return at


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("line", NAMES)
def test_a_public_name_is_where_it_was(line: str) -> None:
    name, _, rest = line.rstrip(")").partition("(")
    parent, _, last = name.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        at = found(name)
        fields = getattr(found(parent), "__dataclass_fields__", {}) if not _is_module(parent) else {}
        assert at is not None or last in fields or last in getattr(found(parent), "__annotations__", {})
    expected = [one.strip() for one in rest.split(",") if one.strip()]
    if expected:
        has = inspect.signature(at).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in has.values())
        missing = {one for one in expected if one not in has and not one.startswith("*")}
        assert not missing or takes_any
        given = [one for one in expected if one in has]
        assert [one for one in has if one in given] == given, "the order of parameters has changed"
