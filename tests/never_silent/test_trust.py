"""Code of the hub's kernels is loaded from where the caller said, and from nowhere else."""

from __future__ import annotations

import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from small_models import llama, refusal

import fa2patch
from fa2patch import kernels
from fa2patch.kernels import picks, varlen


def local_until_0_13(calls):
    return lambda repo_path, package_name: calls.append(("folder", str(repo_path), package_name)) or build()


def local_from_0_17(calls):
    def get_local_kernel(repo_path, *, backend=None, trust_remote_code=False, user_agent=None):
        calls.append(("folder", str(repo_path), trust_remote_code))
        return build()

    return get_local_kernel


def build():
    return SimpleNamespace(flash_attn_varlen_func=lambda q, k, v: q)


@pytest.fixture(params=[local_until_0_13, local_from_0_17])
def loaded(request, monkeypatch, tmp_path):
    # The package ``kernels`` is asked in a working directory with folders of many names.
    calls = []
    package = ModuleType("kernels")
    package.__spec__ = ModuleSpec("kernels", loader=None)
    package.get_local_kernel = request.param(calls)
    package.get_kernel = lambda repo_id, revision=None: calls.append(("hub", repo_id, revision)) or build()
    monkeypatch.setitem(sys.modules, "kernels", package)
    monkeypatch.setattr(varlen, "entry_points", {})
    picks._of_hub.cache_clear()
    here = tmp_path / "here"
    for name in ("kernels-community/flash-attn2", "org/name", "org/name@v1", "name", "~/x"):
        (here / name).mkdir(parents=True)
    (tmp_path / "beside").mkdir()
    monkeypatch.chdir(here)
    yield calls
    picks._of_hub.cache_clear()


@pytest.mark.parametrize("kernel", ["hub", "hub:kernels-community/flash-attn2", "hub:org/name", "hub:org/name@v1"])
def test_a_folder_does_not_take_the_place_of_a_repository(kernel, loaded):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert kernels.named(kernel).available() == (True, "")
    repository, _, revision = (kernel[4:] or "kernels-community/flash-attn2").partition("@")
    assert loaded == [("hub", repository, revision or "main")]


def test_a_folder_is_said_by_a_path_and_gets_no_trust(loaded, tmp_path):
    for path in (str(tmp_path / "beside"), "./org/name", "./../beside"):
        assert kernels.named(f"hub:{path}").available() == (True, "")
    assert [call[0] for call in loaded] == ["folder"] * 3
    assert not any(call[2] is True for call in loaded), "code that the folder wants from elsewhere is not trusted"


@pytest.mark.parametrize(
    "source", ["../beside", "..", "name", "~/x", ".", "org/name/more", "@v1", "org/", "/", "-org/x"]
)
def test_anything_else_is_refused(source, loaded):
    if source == "/":
        assert kernels.named("hub:/").available()[0] and loaded[0][1] == "/"
        return
    with refusal(r"begins with / or ./, found '", fa2patch.errors.KernelUnavailable):
        kernels.check_name(f"hub:{source}")
    assert not loaded


def test_a_missing_folder_is_no_repository(loaded):
    # The package says what it did not find.
    kernels.named("hub:./org/missing").available()
    assert loaded[0][0] == "folder"


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("hub", "names no revision: what its branch main holds today was loaded"),
        ("hub:org/name", "kernel='hub:org/name@revision'"),
        ("hub:org/name@main", ""),
        ("hub:org/name@0a1b2c3", ""),
        ("hub:./org/name", ""),
    ],
)
def test_a_branch_is_said_to_be_untried(kernel, says, loaded):
    model = llama()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fa2patch.apply(model, kernel=kernel)
        fa2patch.apply(model, kernel=kernel)
    ours = [str(one.message) for one in said if one.category is fa2patch.errors.NothingProven]
    assert len(ours) == bool(says) and all(says in one for one in ours), ours
