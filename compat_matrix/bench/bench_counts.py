"""Counts, which are the same on any machine, and the times of import and ``apply``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fa2patch

from .. import environments
from ..check.reads import calls
from . import own_time

LAYERS, QUICK_LAYERS = 80, 2


def bench_calls(rows: list[Any], quick: bool) -> None:
    """How many Python functions are called by import, by ``apply`` and in a forward: what the patch costs the host.

    Counted with `sys.setprofile`, so the numbers depend on the versions alone. The import follows that of torch and
    Transformers. `apply` patches a Llama on the meta device. Calls of a forward are those beyond the same model with
    the kernel called by hand, from models of two and six layers. *Modules* are those that the import loads.
    """
    imported = own_time.of_import(1)
    rows.append({"what": "import", "calls": imported["import: calls"], "modules": imported["import: modules"]})
    layers = QUICK_LAYERS if quick else LAYERS
    model = own_time.on_meta(layers)
    rows.append({"what": f"apply, {layers} layers", "calls": sum(calls(lambda: fa2patch.apply(model)).values())})
    with torch.no_grad():
        runs = (own_time.forwards(number, more) for number, more in ((2, 0), (6, 0), (2, own_time.MORE_MODULES)))
        found = own_time.calls_of_forwards(*runs)
    rows += [{"what": what.removesuffix(": calls"), "calls": round(count)} for what, count in found.items()]


def bench_startup(rows: list[Any], quick: bool, benchmark: Any) -> None:
    """The time to import fa2patch after Transformers, and to patch a large model.

    Medians of 15 measurements. Each import runs in a new process and finds bytecode. The model is a Llama on the meta
    device.
    """
    rounds, layers = (1, QUICK_LAYERS) if quick else (15, LAYERS)
    imported = own_time.of_import(rounds)
    benchmark.pedantic(fa2patch.apply, setup=lambda: ((own_time.on_meta(layers),), {}), rounds=rounds, warmup_rounds=1)
    for what, name in (("", "ms"), (", of it garbage collection", "of it garbage collection, ms")):
        rows.append({"what": f"import fa2patch after transformers{what}", "ms": round(imported[f"import: {name}"], 1)})
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
        options = ["--quick"] if quick else []
        said = environments.printed("compat_matrix.bench.syncs", *options, python=python, packages=packages)
    found = json.loads(said)
    before = f"{rows.on}," if rows.on else "Transformers"
    rows.on = f"{before} {version} with torch {found['torch']}"
    rows += [{"model": row["model"], "Transformers": version, **row} for row in found["rows"]]
