"""An example without a package that it needs ends with one line, which says what to install."""

from pathlib import Path

import pytest

for needed in ("transformers", "tokenizers", "matplotlib", "rich"):
    pytest.importorskip(needed)

EXAMPLES = Path(__file__).parents[2] / "examples"
CODE = """
import runpy, sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name.partition(".")[0] in {missing!r} else find(name, *more)
sys.argv = [{script!r}]
sys.path.insert(0, {folder!r})
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "missing", "install"),
    [
        ("sft", ("trl",), "pip install trl"),
        ("sft_old", ("trl",), "pip install 'trl<0.12'"),
        ("peft_lora", ("peft",), "pip install peft"),
        ("accelerate_loop", ("accelerate", "peft"), "pip install accelerate"),
        ("trainer", ("matplotlib",), "pip install 'fa2patch[demo]'"),
        ("long_rows", ("deepspeed",), "pip install deepspeed accelerate"),
        ("long_rows", ("accelerate", "peft"), "pip install deepspeed accelerate"),
    ],
)
def test_one_line_says_what_to_install(started, script, missing, install):
    code = CODE.format(missing=missing, script=str(EXAMPLES / f"{script}.py"), folder=str(EXAMPLES))
    done = started("-c", code)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 1 and len(lines) == 1 and lines[0].endswith(install), done.stderr


@pytest.mark.slow
def test_fsdp_without_torchrun_says_how_to_start_it(started):
    done = started(EXAMPLES / "fsdp.py")
    assert done.returncode == 1 and "torchrun --nproc-per-node 2 fsdp.py" in done.stderr.strip().splitlines()[-1]
