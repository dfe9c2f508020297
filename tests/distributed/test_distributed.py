"""Packed training in several processes, by the scripts of this folder, equals training in one."""

import importlib.util

import pytest
import torch
import transformers
from torchrun import launched

from compat_matrix.ecosystem.stacks import DISTRIBUTED, split, stacks

needs_fsdp2 = pytest.mark.skipif(
    importlib.util.find_spec("torch.distributed.fsdp._fully_shard") is None, reason="FSDP2 came with torch 2.6"
)
needs_registry = pytest.mark.skipif(
    not hasattr(transformers.modeling_utils, "ALL_ATTENTION_FUNCTIONS"), reason="Ulysses needs Transformers 4.51"
)
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="no DeepSpeed installed")


@needs_fsdp2
@pytest.mark.slow  # two processes, each of which imports Transformers: 20 s
def test_ddp_and_fsdp2_quickly():
    finding = launched("raw --quick")
    assert finding["ok"] and {"DDP, plain", "FSDP2, reentrant"} <= finding.keys()


@pytest.mark.slow
@needs_registry
def test_ulysses_quickly():
    # Without DeepSpeed too: what it registers is looked at, and the rows are split as it splits them.
    found = launched("architectures ulysses llama gpt_oss jamba bert:masked")["architectures"]
    assert [one["crossing"]["found"] for one in found.values()] == ["right", "right", "refused", "right"], found
    assert found["jamba"]["whole"]["found"] == "right"


@pytest.mark.slow
@needs_registry
def test_a_parts_router_loss():
    found = launched("router_parts")
    assert found["ok"], found


@pytest.mark.slow
@needs_fsdp2
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_packed_pairs(family):
    found = launched(f"pairs_ranks {family}")
    assert found["ok"], found


@pytest.mark.slow
@needs_fsdp2
def test_passes_of_ranks_that_need_different_numbers():
    found = launched("passes")
    assert found["ok"], found


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3"])
def test_passes_of_a_loss_that_is_not_known(engine):
    found = launched(f"trainer {engine} budget any")
    assert found["ok"], found


def needs(entry):
    if entry == "raw":
        return needs_fsdp2
    return needs_deepspeed if "zero" in entry or "ulysses" in entry else ()


PREFIX, SUFFIX = DISTRIBUTED.split("{}")
ENTRIES = dict.fromkeys(
    test[len(PREFIX) : -len(SUFFIX)] for stack in stacks().values() for test in stack.tests if test.startswith(PREFIX)
)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [pytest.param(entry, marks=needs(entry)) for entry in ENTRIES])
def test_a_script_in_several_processes(entry, finding):
    # The stacks run it, each in its environment: stacks.toml names the scripts.
    finding.update(launched(entry))
    assert finding["ok"]


def test_every_script_about_long_rows_is_in_a_stack():
    processes = {split(entry) for entry in ENTRIES}
    scripts = {script.split()[0] for script, _ in processes}
    assert {"ulysses", "ulysses_engine", "architectures", "tensor_parallel", "context_parallel"} <= scripts
    assert {("ulysses", 4), ("tensor_parallel", 4), ("context_parallel torch", 4)} <= processes


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
    entry = f"{script}, {processes} processes"
    finding = launched(entry)
    assert finding["ok"] and finding["processes"] == processes, finding


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch", "trainer"])
def test_ranks_and_workers_read_a_stream_once(way):
    finding = launched(f"streams {way}")
    assert finding["ok"], finding


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="FSDP1 and Trainer's FSDP need an accelerator: no CUDA device"
)
@pytest.mark.parametrize("engine", ["fsdp1", "trainer fsdp1", "trainer fsdp2"])
def test_fsdp_on_gpus(engine):
    processes = min(2, torch.cuda.device_count())
    assert launched(f"fsdp_gpu {engine}, {processes} processes")["ok"]
