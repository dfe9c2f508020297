"""Counts, which are the same on any machine, and the times of import and ``apply``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

import fa2patch
from fa2patch.kernels.reference import Reference

from .. import environments
from ..check.reads import calls
from .workloads import BY_HAND, Batch, ByHand, boundaries_of, packed, small_llama

DOCUMENTS = (9, 7)
LAYERS, QUICK_LAYERS = 80, 2
MORE_MODULES = 2000

_IMPORT = """
import json, sys, time, torch, transformers
from compat_matrix.check.reads import calls
before = set(sys.modules)
started = time.perf_counter()
counts = calls(lambda: __import__("fa2patch")) if {counting} else __import__("fa2patch") and {{}}
print(json.dumps([sum(counts.values()), len(set(sys.modules) - before), time.perf_counter() - started]))
"""


def _imported(counting: bool) -> list[Any]:
    """Python calls, modules and seconds of ``import fa2patch`` in a new process. Counting makes it slower."""
    code = _IMPORT.format(counting=counting)
    return list(
        json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    )


def _on_meta(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers))


def row(lengths: bool) -> Batch:
    """Return the packed batch of ``DOCUMENTS`` without labels, with or without the collator's lengths."""
    batch = packed([list(range(3, 3 + length)) for length in DOCUMENTS], lengths)
    return {name: value for name, value in batch.items() if name != "labels"}


def forwards(layers: int, more_modules: int = 0) -> dict[str, Callable[[], Any]]:
    """Return forwards of one row: with the kernel called by hand, and patched, from ids and with lengths.

    The patched model may hold more modules, which compute nothing.
    """
    kernel = Reference()
    ByHand(kernel, boundaries_of(DOCUMENTS))
    patched, bare = (small_llama(layers, 64, name).eval() for name in ("sdpa", BY_HAND))
    patched.more = torch.nn.ModuleList(torch.nn.Identity() for _ in range(more_modules))
    fa2patch.apply(patched, kernel=kernel.name)
    plain, with_lengths = row(False), row(True)
    runs: dict[str, Callable[[], Any]] = {
        "by hand": lambda: bare(**plain),
        "position_ids only": lambda: patched(**plain),
        "the collator's lengths": lambda: patched(**with_lengths),
    }
    for run in runs.values():
        run()  # some checks are made only once for each model
    return runs


def bench_calls(rows: list[Any], quick: bool) -> None:
    """How many Python functions are called by import, by ``apply`` and in a forward: what the patch costs the host.

    Counted with `sys.setprofile`, so the numbers depend on the versions alone. The import follows that of torch and
    Transformers. `apply` patches a Llama on the meta device. Calls of a forward are those beyond the same model with
    the kernel called by hand, from models of two and six layers. *Modules* are those that the import loads.
    """
    _imported(counting=False)  # it leaves bytecode
    count, modules, _ = _imported(counting=True)
    rows.append({"what": "import fa2patch", "calls": count, "modules": modules})
    layers = QUICK_LAYERS if quick else LAYERS
    model = _on_meta(layers)
    rows.append({"what": f"apply, {layers} layers", "calls": sum(calls(lambda: fa2patch.apply(model)).values())})
    with torch.no_grad():
        few, many = ({name: sum(calls(run).values()) for name, run in forwards(n).items()} for n in (2, 6))
        larger = {name: sum(calls(run).values()) for name, run in forwards(2, MORE_MODULES).items()}
    for way in [*few][1:]:
        short, long = few[way] - few["by hand"], many[way] - many["by hand"]
        each = (long - short) // 4
        rows.append({"what": f"a forward, {way}: each layer", "calls": each})
        rows.append({"what": f"a forward, {way}: the rest", "calls": short - 2 * each})
        what = f"a forward, {way}: {MORE_MODULES:,} more modules in the model"
        rows.append({"what": what, "calls": larger[way] - few[way]})


def bench_startup(rows: list[Any], quick: bool, benchmark: Any) -> None:
    """The time to import fa2patch after Transformers, and to patch a large model.

    Medians of 15 measurements. Each import runs in a new process. The model is a Llama on the meta device.
    """
    rounds, layers = (1, QUICK_LAYERS) if quick else (15, LAYERS)
    seconds = sorted(_imported(counting=False)[2] for _ in range(rounds))
    benchmark.pedantic(fa2patch.apply, setup=lambda: ((_on_meta(layers),), {}), rounds=rounds, warmup_rounds=1)
    rows.append({"what": "import fa2patch after transformers", "ms": round(1e3 * seconds[rounds // 2], 1)})
    rows.append({"what": f"fa2patch.apply, {layers} layers", "ms": round(1e3 * benchmark.stats.stats.median, 1)})


# --- reads from the device, by version of Transformers --------------------------------------------------------

VERSIONS = ("4.44.2", "4.57.6", environments.newest().name)


@pytest.mark.parametrize("version", VERSIONS)
def bench_syncs(rows: Any, quick: bool, folder: Path, version: str) -> None:
    """How often one forward waits for the device, and how often it derives boundaries, by layers.

    Each cell holds the device-to-host reads in one forward of a packed row of five documents, in bfloat16 with labels.
    *At the kernel's call*: those of the largest model that are made there, because `max_seqlen` is a tensor where the
    kernel takes a number. *Derivations*: how often boundaries are derived from `position_ids` in the largest model.
    *A step with checkpointing*: forward and backward of the largest model; the backward computes each layer again.
    *Lengths*: batches with the collator's `return_flash_attn_kwargs=True`; *refused*: that forward takes no such
    arguments. The reads are counted on a CPU with a stand-in for flash-attn, without the reads inside kernels. The
    counts are the same on any machine.
    """
    with environments.only_our_packages() as packages:
        python = environments.make(environments.version(version), folder)
        found = environments.printed(python, packages, "compat_matrix.bench.syncs", *(["--quick"] if quick else []))
    rows.on = f"{rows.on or 'Transformers'} {version} with torch {found['torch']}"
    rows += [{"model": row["model"], "Transformers": version, **row} for row in found["rows"]]


def bench_dry(rows: Any, quick: bool, folder: Path) -> None:
    """What every GPU kernel's path dispatches beyond the kernel itself, traced without a GPU.

    Each layer of a packed row after the batch's first one, traced by torch on fake tensors: nothing is computed.
    *Copies* and *others* are the operators that `packed_attention` starts besides those of the kernel when it is called
    by hand with the boundaries at hand; views and allocations start nothing. *Once per batch*: how many operators the
    first layer's forward adds. *Reads*: from the device, in both directions and both layers. Rows of trees have five
    segments, rows of spans two spans. flash-attn and FlexAttention are fake operators with their signatures. MLA has
    head dimensions 192 and 128. The counts are the same on any machine.
    """
    from . import dry  # not above: `against` runs the other parts with fa2patch of commits that lack what it looks into

    rows += dry.merged([dry.here()]) if quick else dry.measure(folder)
    rows.on = f"torch {torch.__version__.partition('+')[0] if quick else ', '.join(dry.TORCH)}"
