"""Padded against packed training at size, on a GPU: ``python -m compat_matrix.bench.gpu --out FOLDER``.

Variants: ``padded:sdpa``; ``padded:flash_attention_2`` and ``upstream:flash_attention_2`` where flash-attn is installed
(Transformers alone, on padded and on packed batches); ``upstream:sdpa`` (Transformers' block-diagonal mask);
``fa2patch:KERNEL`` for every kernel that can run here; ``by-hand:KERNEL``, in which every layer calls the best of these
kernels with precomputed boundaries: the lowest possible cost of a packed batch. ``+lengths``: with the collator's
``return_flash_attn_kwargs=True``.

A variant whose JSON file exists in FOLDER/runs is skipped, so an interrupted command can be run again to continue. One
weight under AdamW takes 8 bytes (2 for itself, 2 for its gradient, 4 for two states): 54 GB for Llama-2-7B, 58 for
Mistral-7B, 64 for Granite-8B-code, before activations and logits. Use ``--layers`` and ``--optimizer sgd`` for models
that do not fit.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import fa2patch

from ..screen import Console
from . import about, tables
from .lengths import DISTRIBUTIONS
from .shapes import SHAPES

COMMAND = "python -m compat_matrix.bench.gpu"
START = 45
"""Seconds that a variant may take to start, in addition to its steps."""


def main(arguments: list[str] | None = None) -> int:
    """Run the variants that have no result yet, merge all results into gpu.json and print the tables.

    Args:
        arguments: the command line; None reads ``sys.argv``.

    Returns:
        The exit code: 0 when all variants have run, 2 without a CUDA device, 3 when time ran out.
    """
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder that the JSON files go to")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: with --toy only")
    add("--toy", action="store_true", help="tiny models and documents, only to see that it runs; not for figures")
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="S", help=", ".join(SHAPES))
    add("--distributions", nargs="+", choices=DISTRIBUTIONS, default=list(DISTRIBUTIONS), metavar="D")
    add("--variants", nargs="+", metavar="V", help="default: all that can run here (--list shows them)")
    add("--list", action="store_true", help="show the variants and what is missing for others")
    add("--layers", type=int, help="fewer than the model has")
    add("--optimizer", default="adamw", choices=("adamw", "sgd"))
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--batch", type=int, default=4, help="documents in a mini-batch")
    add("--steps", type=int, default=30, help="timed steps of each distribution, at most")
    add("--warm-up", type=int, default=3, help="steps before these")
    add("--sync-steps", type=int, default=20, help="steps in which synchronisations are counted")
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=540, help="start nothing that may not end within so many")
    add("--variant-seconds", type=float, default=90, help="for one variant's steps, over all distributions")
    given = parser.parse_args(arguments)
    if is_without_device(given, parser):
        return 2
    names = given.variants or variants(given.device, given.toy)
    console = Console(stderr=True)
    if given.list:
        console.print("\n".join([*names, *(f"{name}: {why}" for name, why in missing().items())]), highlight=False)
        return 0
    others = of_other_settings(given)
    if others:
        parser.error(f"--out: {others[0].parent} holds runs of other settings ({others[0].name}): take another folder")
    done = run_all(given, names, console)
    found = merged(given, names)
    about.write(given.out / "gpu.json", found)
    for table in tables.gpu(found) if found["shapes"] else []:
        Console(width=150).print(table.as_rich())
    return 0 if done else 3


def is_without_device(given: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Say so and return True if a CUDA device is asked for and there is none. A CPU is an error without ``--toy``."""
    if given.device == "cpu" and not given.toy:
        parser.error("--device cpu goes with --toy: only to see that it runs")
    missing = given.device == "cuda" and not torch.cuda.is_available()
    if missing:
        print("looked for a CUDA device, found none: run this where torch.cuda.is_available()", file=sys.stderr)
    return missing


def variants(device: str, toy: bool) -> list[str]:
    """Return the names of all variants that can run here. The reference kernel is included only for a toy run."""
    able = [kernel.name for kernel in fa2patch.kernels.ORDER if kernel.available()[0]]
    fast = [name for name in able if name != "reference"] if device == "cuda" else []
    kernels = fast + (["reference"] if toy else [])
    flash = ["padded:flash_attention_2"] if _has_flash_attn(device) else []
    upstream = ["upstream:flash_attention_2", "upstream:flash_attention_2+lengths"] if flash else []
    own = [f"fa2patch:{name}" for name in kernels]
    best = [f"fa2patch:{kernels[0]}+lengths", f"by-hand:{kernels[0]}"] if kernels else []
    return ["padded:sdpa", *flash, *own, *best, *upstream, "upstream:sdpa"]


def missing() -> dict[str, str]:
    """Return why kernels are not available here, by variant."""
    reasons = {f"fa2patch:{kernel.name}": kernel.available()[1] for kernel in fa2patch.kernels.ORDER}
    return {name: why for name, why in reasons.items() if why}


def _has_flash_attn(device: str) -> bool:
    return device == "cuda" and importlib.util.find_spec("flash_attn") is not None


def run_all(given: argparse.Namespace, names: list[str], console: Console) -> bool:
    """Run every variant that has no JSON file yet; return False if time ran out first."""
    until = time.monotonic() + given.seconds
    jobs = [(shape, name) for shape in given.shapes for name in names if not result_file(given, shape, name).exists()]
    for place, (shape, name) in enumerate(jobs, 1):
        left = until - time.monotonic()
        if left < (0 if given.toy else START + 15):
            console.print(f"time is over: {len(jobs) - place + 1} of {len(jobs)} left, run the same command again")
            return False
        console.print(f"[{place}/{len(jobs)}] {shape}, {name} ({left:.0f} s left)", highlight=False, markup=False)
        seconds = given.variant_seconds if given.toy else min(given.variant_seconds, left - START)
        started = time.monotonic()
        error = once(job(given, shape, name, seconds), result_file(given, shape, name), max(left, 60))
        took = f"{time.monotonic() - started:.0f} s"
        console.print(f"    {error or 'done'} ({took})", highlight=False, markup=False)
    return True


SETTINGS = ("device", "toy", "distributions", "layers", "optimizer", "dtype", "batch", "steps", "warm_up", "seed")


def of_other_settings(given: argparse.Namespace) -> list[Path]:
    """Return files of earlier runs whose settings differ, so that they cannot be compared with new runs."""
    wanted = {name: getattr(given, name) for name in SETTINGS}
    files = sorted((given.out / "runs").glob("*.json"))
    return [file for file in files if about.read(file).get("settings", wanted) != wanted]


def job(given: argparse.Namespace, shape: str, variant: str, seconds: float) -> dict[str, Any]:
    """Return what gpu_once needs to run one variant."""
    settings = {name: getattr(given, name) for name in SETTINGS}
    return {
        "settings": settings,
        **settings,
        "sync_steps": given.sync_steps,
        "shape": shape,
        "variant": variant,
        "seconds": seconds,
    }


def result_file(given: argparse.Namespace, shape: str, variant: str) -> Path:
    """Return the path of one run's JSON file."""
    return given.out / "runs" / f"{shape}--{variant.replace(':', '-')}.json"


def once(settings: dict[str, Any], file: Path, limit: float) -> str:
    """Run one variant in a separate process.

    An error is written to the result file, so that the variant is not run again; a timeout is not.

    Args:
        settings: the dictionary of :func:`job`.
        file: the result file.
        limit: seconds after which the process is ended.

    Returns:
        The error, or an empty string.
    """
    with tempfile.TemporaryDirectory() as folder:
        job_file = Path(folder, "job.json")
        about.write(job_file, settings)
        command = [sys.executable, "-m", "compat_matrix.bench.gpu_once", str(job_file), str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return "took longer than the time that was left"
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        about.write(file, {"error": said[-1][:300], "settings": settings["settings"]})
    return str(about.read(file).get("error", ""))


def merged(given: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Merge all runs. Rates and ratios cover the steps that every variant of a model and distribution has taken."""
    head: dict[str, Any] = {}
    made: dict[str, Any] = {}
    for shape in given.shapes:
        runs = {name: about.read(result_file(given, shape, name)) for name in names if _ran(given, shape, name)}
        good = {name: run for name, run in runs.items() if "error" not in run}
        if not good:
            continue
        head = {key: value for key, value in next(iter(good.values())).items() if key in HEAD}
        any_run = next(iter(good.values()))
        made[shape] = {
            **{key: any_run[key] for key in ("layers", "parameters")},
            "distributions": {name: _compared(name, runs) for name in given.distributions},
        }
    settings = {key: getattr(given, key) for key in ("toy", "dtype", "optimizer", "batch", "seed")}
    toy = " --device cpu --toy" if given.toy else ""
    return {"part": "gpu", "command": f"{COMMAND} --out FOLDER{toy}", **head, **settings, "shapes": made}


HEAD = ("commit", "dirty", "date", "device", "threads", "python", "torch", "transformers")


def _ran(given: argparse.Namespace, shape: str, name: str) -> bool:
    return result_file(given, shape, name).exists()


def _compared(distribution: str, runs: dict[str, Any]) -> dict[str, Any]:
    good = {name: run["distributions"][distribution] for name, run in runs.items() if "error" not in run}
    steps = min(len(run["step_seconds"]) for run in good.values())
    first = next(iter(good.values()))
    real, padded = sum(first["real_tokens"][:steps]), sum(first["padded_tokens"][:steps])
    limit = padded / real
    rates = {name: real / sum(run["step_seconds"][:steps]) for name, run in good.items()}
    best = max((rate for name, rate in rates.items() if name.startswith("padded")), default=None)
    found: dict[str, Any] = {}
    for name, run in runs.items():
        if "error" in run:
            found[name] = {"error": run["error"]}
            continue
        run = good[name]
        found[name] = {"real_tokens_per_second": round(rates[name], 1), "peak_bytes": run["peak_bytes"]}
        found[name]["last_loss"] = run["losses"][-1]
        if best:
            found[name]["ratio_to_padded"] = round(rates[name] / best, 4)
            found[name]["share_of_limit"] = round(rates[name] / best / limit, 4)
        if "synchronisations" in run:
            found[name]["synchronisations_per_forward"] = run["synchronisations"]["forward"]["per_step"]
            found[name]["synchronisations"] = run["synchronisations"]
    return {"steps": steps, "real_tokens": real, "limit": round(limit, 4), "variants": found}


if __name__ == "__main__":
    sys.exit(main())
