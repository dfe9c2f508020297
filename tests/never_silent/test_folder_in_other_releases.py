"""Run this folder's files in environments of other releases, in addition to the installed one."""

import os
import subprocess
from pathlib import Path

import pytest

from compat_matrix import environments

ROOT = Path(__file__).parents[2]
RELEASES = ("4.36.2", "4.43.4", "4.46.3", "4.48.3", "4.57.6", environments.newest().name)
TOOLS = ("pytest==8.4.2", "hypothesis==6.135.26", "rich")


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_every_case_in_another_release(release):
    wanted = environments.version(release)
    python = environments.make(wanted.changed(pins=(*wanted.pins, *TOOLS)), ROOT / ".compat")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
