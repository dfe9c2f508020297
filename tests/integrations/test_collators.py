"""fa2patch's collators in the place of TRL's and Transformers', with the real packages."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from in_stack import run_in

from compat_matrix.ecosystem.stacks import stacks

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).with_name("scripts")
THEIRS = "tests/test_data_collator_completion_only.py"

# TRL's releases with an sdist that pip can read, and the number of their tests of the collator
SDISTS = {"trl-0.7.11": 2, "trl-0.19.1": 4}


def sources_of_trl(release: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "trl", f"trl=={release}"]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        source = opened.extractfile(f"trl-{release}/{THEIRS}")
        assert source is not None
        folder.joinpath("theirs.py").write_bytes(source.read())
    return folder / "theirs.py"


@pytest.mark.parametrize("stack", SDISTS)
def test_trls_own_tests_pass_with_the_import_changed(stack: str, tmp_path: Path) -> None:
    file = str(sources_of_trl(str(stacks()[stack].pins["trl"]), tmp_path))
    for package in ("trl", "fa2patch"):  # TRL's own class shows that the tests run here
        found: dict[str, Any] = run_in(stack, SCRIPTS / "trl_collator_tests.py", file, package)
        assert found["failed"] == {}
        assert len(found["passed"]) == SDISTS[stack]


@pytest.mark.parametrize("stack", ["trl-0.7.11", "trl-0.9.6", "trl-0.12.2", "trl-0.19.1"])
def test_the_completion_collator_is_trls(stack: str) -> None:
    found = run_in(stack, SCRIPTS / "completion_only_with_trl.py")
    assert found["trl"] == stacks()[stack].pins["trl"]
    assert found["batches"] >= 160
    assert found["differ"] == []
    assert found["refused"] == []


@pytest.mark.parametrize("stack", ["transformers-4.44.2", "transformers-4.57.6", "transformers-5.23.0"])
def test_the_flattening_collator_is_transformers(stack: str) -> None:
    found = run_in(stack, SCRIPTS / "flattening_with_transformers.py")
    assert found["batches"] >= 16
    assert found["differ"] == []
    assert found["signature"] == []
