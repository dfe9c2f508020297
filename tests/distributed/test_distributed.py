"""Packed training in two processes equals padded training in one. The scripts are in the same folder."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from compat_matrix.ecosystem import distributed

ROOT = Path(__file__).parents[2]
VARIABLES = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
needs_fsdp2 = pytest.mark.skipif(
    importlib.util.find_spec("torch.distributed.fsdp._fully_shard") is None, reason="FSDP2 came with torch 2.6"
)
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="no DeepSpeed installed")


@needs_fsdp2
def test_ddp_and_fsdp2_quickly():
    command = distributed.command(sys.executable, "raw", "--quick")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=VARIABLES)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    finding = json.loads(done.stdout.splitlines()[-1])
    assert finding["ok"] and {"DDP, plain", "FSDP2, reentrant"} <= finding.keys()


@pytest.mark.skipif(
    not hasattr(transformers.modeling_utils, "ALL_ATTENTION_FUNCTIONS"), reason="Ulysses needs Transformers 4.51"
)
def test_ulysses_quickly():
    """Without DeepSpeed too: what it registers is looked at, and the rows are split as it splits them."""
    finding = distributed.launched(
        "ulysses_architectures llama gpt_oss jamba bert:masked", Path(sys.executable), VARIABLES
    )
    found = finding["finding"]["architectures"]
    assert [one["crossing"]["found"] for one in found.values()] == ["right", "right", "refused", "right"], found
    assert found["jamba"]["whole"]["found"] == "right"


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param("raw", marks=needs_fsdp2),
        "trainer ddp",
        pytest.param("trainer zero2", marks=needs_deepspeed),
        pytest.param("trainer zero3", marks=needs_deepspeed),
        pytest.param("sequence_parallel", marks=needs_deepspeed),
    ],
)
def test_two_processes(script):
    finding = distributed.launched(script, Path(sys.executable), VARIABLES)["finding"]
    assert finding["ok"], finding


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(
    "script",
    [
        "sampler torch",
        "sampler accelerate tp_size",
        "sampler accelerate cp_size",
        "sampler trainer tp_size",
        "sampler trainer cp_size",
        pytest.param("sampler_ulysses", marks=needs_deepspeed),
    ],
)
def test_rows_of_groups_of_two_processes(script, processes):
    finding = distributed.launched(script, Path(sys.executable), VARIABLES, processes)["finding"]
    assert finding["ok"] and finding["processes"] == processes, finding


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_split_models(processes):
    finding = distributed.launched("tensor_parallel", Path(sys.executable), VARIABLES, processes)["finding"]
    assert finding["ok"], finding


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "accelerate", "Trainer", "ring_flash_attn"])
def test_split_rows(engine):
    finding = distributed.launched(f"split_rows {engine}", Path(sys.executable), VARIABLES)["finding"]
    assert finding["ok"], finding


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="FSDP1 and Trainer's FSDP need an accelerator: no CUDA device"
)
@pytest.mark.parametrize("engine", ["fsdp1", "trainer fsdp1", "trainer fsdp2"])
def test_fsdp_on_gpus(engine):
    """The test uses two processes, or one if there is only one GPU."""
    processes = min(2, torch.cuda.device_count())
    command = distributed.command(sys.executable, f"fsdp_gpu {engine}", processes=processes)
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=VARIABLES)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["ok"]
