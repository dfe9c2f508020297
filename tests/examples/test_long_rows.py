"""examples/long_rows.py: two processes that share rows have the losses of one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "long_rows.py"
SAME = 1e-5
LINE = re.compile(r"step (\d): loss ([\d.]+), ([\d.]+) in one process; (\d+) of (\d+) tokens in each process")
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="no DeepSpeed installed")


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("length", [512, 1024])
def test_two_processes_have_the_losses_of_one(printed, length):
    said = printed(SCRIPT, "--row-length", length, "--steps", 3)
    assert re.search(r"^verify: isolated: \d+ documents", said, re.M), said
    steps = LINE.findall(said)
    assert [step for step, *_ in steps] == ["1", "2", "3"], said
    for _, split, alone, own, tokens in steps:
        assert float(split) == pytest.approx(float(alone), rel=SAME)
        assert (int(own), int(tokens)) == (length // 2, length)
    assert float(steps[-1][1]) < float(steps[0][1]), "something is learnt"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch.distributed.tensor.experimental") is None, reason="torch 2.5")
def test_two_processes_with_context_parallelism_have_the_losses_of_one(printed):
    steps = LINE.findall(printed(SCRIPT, "--engine", "cp", "--row-length", 512, "--steps", 3))
    assert [step for step, *_ in steps] == ["1", "2", "3"]
    for _, split, alone, own, tokens in steps:
        assert float(split) == pytest.approx(float(alone), rel=SAME)
        assert 2 * int(own) == int(tokens) <= 512
    assert float(steps[-1][1]) < float(steps[0][1]), "something is learnt"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sp-size", "1"], "--sp-size: expected 2 or more, found 1"),
        (["--row-length", "1023"], "--row-length: expected a multiple of 2, found 1023"),
    ],
)
def test_a_bad_size_is_named(started, options, said):
    done = started(SCRIPT, *options)
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_the_yaml_file_asks_accelerate_for_ulysses():
    launch = pytest.importorskip("accelerate.commands.launch")
    environment = pytest.importorskip("accelerate.utils.launch")
    parallelism = pytest.importorskip("accelerate.parallelism_config")
    if not hasattr(parallelism.ParallelismConfig(), "sp_size"):
        pytest.skip("accelerate has sp_size from 1.12 on")
    file = ROOT / "examples/configs/accelerate_ulysses.yaml"
    given = launch.launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    given, *_ = launch._validate_launch_command(given)
    variables: dict[str, str] = environment.prepare_extend_env_parallelism_config(given, {})
    wanted = {"SIZE": "8", "BACKEND": "deepspeed", "ATTN_IMPLEMENTATION": "flash_attention_2"}
    assert {name: variables[f"PARALLELISM_CONFIG_SP_{name}"] for name in wanted} == wanted
    assert given.use_deepspeed and given.num_processes == 16
