import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module
    sys.path.remove(str(EXAMPLES))


@pytest.fixture
def started():
    # The tolerances are for a CPU. There is no network.

    def started(*arguments, python=sys.executable, **variables):
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja, which DeepSpeed calls
        here = {"PYTHONPATH": path, "PATH": beside, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
        command = [str(python), *map(str, arguments)]
        return subprocess.run(
            command, env={**os.environ, **here}, capture_output=True, text=True, encoding="utf-8", timeout=900
        )

    return started


@pytest.fixture
def printed(started):
    # A process that fails makes the test fail.

    def printed(*arguments, **options):
        done = started(*arguments, **options)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return printed
