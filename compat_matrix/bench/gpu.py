"""Padded against packed training at size, on a GPU: ``python -m compat_matrix.bench.gpu --out FOLDER``.

Variants: ``padded:sdpa``; ``padded:flash_attention_2`` and ``upstream:flash_attention_2`` where flash-attn is installed
(Transformers alone, on padded and on packed batches); ``upstream:sdpa`` (Transformers' block-diagonal mask);
``fa2patch:KERNEL`` for every kernel that can run here; ``by-hand:KERNEL``, in which every layer calls the best of these
kernels with precomputed boundaries: the lowest possible cost of a packed batch. ``+lengths``: with the collator's
``return_flash_attn_kwargs=True``.

A variant with a record in FOLDER/jobs is skipped, so an interrupted command can be run again to continue. One weight
under AdamW takes 8 bytes (2 for itself, 2 for its gradient, 4 for two states): 54 GB for Llama-2-7B, 58 for Mistral-7B,
64 for Granite-8B-code, before activations and logits. Use ``--layers`` and ``--optimizer sgd`` for models that do not
fit.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fa2patch.kernels import ORDER

from .. import commits
from ..screen import BarColumn, Console, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from . import figures
from .gpu_once import SETTINGS, training_options
from .workloads import SHAPES

COMMAND = "python -m compat_matrix.bench.gpu"
HEAD = ("commit", "dirty", "date", "device", "threads", "python", "torch", "transformers")
ALONE = {"USE_TF": "0", "USE_JAX": "0", "USE_FLAX": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
OUT_OF_TIME = 3
START = 45
"""Seconds that a variant may take to start, in addition to its steps."""

# --- processes that go on where they were ---------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A process of a stage.

    Attributes:
        command: its arguments behind ``python -m``, without paths.
        result: the JSON file that it writes.
        stops: whether it stops by itself if it is told its ``--seconds``.
        most: the most seconds that it is told, beside those of its start; None for its part of the stage's time.
        start: the seconds that it may take to start.
        path: a folder that comes first on the path, or None.
    """

    stage: str
    name: str
    command: list[str]
    result: Path
    stops: bool = True
    most: float | None = None
    start: float = 0
    path: Path | None = None

    def record(self, out: Path) -> Path:
        """Return the file that says what is known about the process when it is done."""
        return out / "jobs" / f"{self.stage}--{self.name.replace(':', '-').replace(', ', '--')}.json"

    def run(self, seconds: float) -> dict[str, Any]:
        """Run the process and return what is known about it; its ``done`` says whether it need not be run again."""
        told = max(min(seconds - self.start, self.most or seconds), 1)
        more = ["--out", self.result, "--seconds", round(told)] if self.stops else ["--evidence", self.result.parent]
        path = [*([self.path.resolve()] if self.path else []), commits.ROOT, os.environ.get("PYTHONPATH", "")]
        given = {**os.environ, **ALONE, "PYTHONPATH": os.pathsep.join(str(part) for part in path if str(part))}
        limit = max(seconds + (30 if self.stops else 0), 1)
        command, started = [sys.executable, "-m", *self.command, *map(str, more)], time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=given, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"done": False, "seconds": round(time.monotonic() - started, 1)}
        ended = round(time.monotonic() - started, 1)
        found: dict[str, Any] = {"done": done.returncode != OUT_OF_TIME, "seconds": ended, "command": self.command}
        failed = done.returncode not in (0, 1, OUT_OF_TIME) or "Traceback (most recent call last)" in done.stderr
        if failed or not self.result.exists():
            said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
            found["error"] = said[-1][:300]
        return found


def run_all(
    jobs: list[Job], out: Path, header: Mapping[str, Any], shares: Mapping[str, float], seconds: float
) -> dict[str, Any]:
    """Run the jobs without a record until time is up; return the records of all that are done, by stage and name.

    Args:
        shares: the share of each stage. What a stage does not use goes to the next one.
    """
    until = time.monotonic() + seconds
    records: dict[str, Any] = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(jobs))
        for place, job in enumerate(jobs):
            progress.update(task, description=f"{job.stage}: {job.name}")
            file, record = job.record(out), {"done": False}
            later = sum(shares[stage] for stage in {other.stage for other in jobs[place + 1 :]} - {job.stage})
            mine = until - time.monotonic() - later * seconds / sum(shares.values())
            if file.exists():
                record = figures.read(file)
            elif mine > max(5, job.start + 15 * bool(job.start)):
                beside = sum(other.stage == job.stage for other in jobs[place:])
                record = job.run(mine / beside if job.stops and job.most is None else mine)
                if record["done"]:
                    figures.write(file, {**header, **record})
            if record["done"]:
                records[f"{job.stage}, {job.name}"] = record
            progress.update(task, advance=1)
    if len(records) < len(jobs):
        print(f"time is over: {len(records)} of {len(jobs)} are done, run the same command again")
    return records


def made_otherwise(jobs: list[Job], out: Path, header: Mapping[str, Any]) -> Path | None:
    """Return a record of another commit, device or versions, or of a job with other settings; None if there is none."""
    wanted = {job.record(out): job.command for job in jobs}
    same = ("commit", "dirty", "torch", "transformers", "device")
    for file in sorted((out / "jobs").glob("*.json")):
        record = figures.read(file)
        if any(record[key] != header[key] for key in same) or record["command"] != wanted.get(file, record["command"]):
            return file
    return None


def is_without_device(given: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Say so and return True if a CUDA device is asked for and there is none. A CPU is an error without ``--toy``."""
    if given.device == "cpu" and not given.toy:
        parser.error("--device cpu goes with --toy: only to see that it runs")
    lacking = given.device == "cuda" and not torch.cuda.is_available()
    if lacking:
        print("looked for a CUDA device, found none: run this where torch.cuda.is_available()", file=sys.stderr)
    return lacking


# --- training -------------------------------------------------------------------------------------------------


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder that the JSON files go to")
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="S", help=", ".join(SHAPES))
    add("--variants", nargs="+", metavar="V", help="default: all that can run here (--list shows them)")
    add("--list", action="store_true", help="show the variants and what is missing for others")
    add("--seconds", type=float, default=540, help="start nothing that may not end within so many")
    add("--variant-seconds", type=float, default=90, help="for one variant's steps, over all distributions")
    training_options(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the variants that have no result yet, merge all results into gpu.json and print the table.

    Args:
        arguments: the command line; None reads ``sys.argv``.

    Returns:
        The exit code: 0 when all variants have run, 2 without a CUDA device, 3 when time ran out.
    """
    parser = options()
    given = parser.parse_args(arguments)
    if is_without_device(given, parser):
        return 2
    given.variants = given.variants or variants(given.device, given.toy)
    if given.list:
        print("\n".join([*given.variants, *(f"{name}: {why}" for name, why in missing().items())]))
        return 0
    header, jobs = figures.header("", given.device), planned(given)
    other = made_otherwise(jobs, given.out, header)
    if other:
        parser.error(f"--out: {other.parent} holds runs of other settings ({other.name}): take another folder")
    records = run_all(jobs, given.out, header, {"training": 1}, given.seconds)
    found = merged(given, records)
    figures.write(given.out / "gpu.json", found)
    figures.show("gpu", found["rows"], found["notes"])
    return 0 if len(records) == len(jobs) else OUT_OF_TIME


def variants(device: str, toy: bool) -> list[str]:
    """Return the names of all variants that can run here. The reference kernel is included only for a toy run."""
    able = [kernel.name for kernel in ORDER if kernel.available()[0] and kernel.name != "reference"]
    own = (able if device == "cuda" else []) + (["reference"] if toy else [])
    flash = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    upstream = ["upstream:flash_attention_2", "upstream:flash_attention_2+lengths"] if flash else []
    best = [f"fa2patch:{own[0]}+lengths", f"by-hand:{own[0]}"] if own else []
    padded = ["padded:sdpa", *(["padded:flash_attention_2"] if flash else [])]
    return [*padded, *(f"fa2patch:{name}" for name in own), *best, *upstream, "upstream:sdpa"]


def missing() -> dict[str, str]:
    """Return why kernels are not available here, by variant."""
    reasons = {f"fa2patch:{kernel.name}": kernel.available()[1] for kernel in ORDER}
    return {name: why for name, why in reasons.items() if why}


def planned(given: argparse.Namespace) -> list[Job]:
    """Return a process for each shape and variant."""
    settings = []
    for name in (*SETTINGS, "sync_steps"):
        value = getattr(given, name)
        if value is not None and value is not False:
            values = value if isinstance(value, list) else [] if value is True else [value]
            settings += [f"--{name.replace('_', '-')}", *map(str, values)]
    most, start = given.variant_seconds, 0 if given.toy else START
    made = []
    for shape in given.shapes:
        for name in given.variants:
            file = given.out.resolve() / "runs" / f"{shape}--{name.replace(':', '-')}.json"
            command = ["compat_matrix.bench.gpu_once", "training", shape, name, *settings]
            made.append(Job("training", f"{shape}, {name}", command, file, most=most, start=start))
    return made


def merged(given: argparse.Namespace, records: Mapping[str, Any]) -> dict[str, Any]:
    """Merge all runs. Rates and ratios cover the steps that every variant of a model and distribution has taken."""
    head: dict[str, Any] = {}
    shapes: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    runs: dict[str, Any] = {}
    for job in planned(given):
        record = records.get(f"training, {job.name}", {})
        shape, _, variant = job.name.partition(", ")
        if job.result.exists() or "error" in record:
            runs.setdefault(shape, {})[variant] = record if "error" in record else figures.read(job.result)
    for shape, of in runs.items():
        good = {name: run for name, run in of.items() if "error" not in run}
        for first in list(good.values())[:1]:
            head = {key: first[key] for key in HEAD}
            found = {name: _compared(name, of, good) for name in given.distributions}
            shapes[shape] = {"layers": first["layers"], "parameters": first["parameters"], "distributions": found}
            for name, run in found.items():
                rows += [_row(f"{shape}, {name}, {one}", run["limit"], at) for one, at in run["variants"].items()]
    settings = {key: getattr(given, key) for key in ("toy", "dtype", "optimizer", "batch", "seed")}
    notes = "".join(
        f"{n}: {of['layers']} layers, {of['parameters'] / 1e9:.2f} G parameters; " for n, of in shapes.items()
    )
    notes += f"{given.dtype}, {given.optimizer}, gradient checkpointing, mini-batches of {given.batch} documents."
    words = {"what": "Models of published sizes with random weights.", "notes": notes}
    command = f"{COMMAND} --out FOLDER{' --device cpu --toy' if given.toy else ''}"
    return {"part": "gpu", "command": command, **head, **words, **settings, "shapes": shapes, "rows": rows}


def _compared(distribution: str, runs: Mapping[str, Any], good: Mapping[str, Any]) -> dict[str, Any]:
    good = {name: run["distributions"][distribution] for name, run in good.items()}
    steps = min(len(run["step_seconds"]) for run in good.values())
    first = next(iter(good.values()))
    real, padded = sum(first["real_tokens"][:steps]), sum(first["padded_tokens"][:steps])
    rates = {name: real / sum(run["step_seconds"][:steps]) for name, run in good.items()}
    best = max((rate for name, rate in rates.items() if name.startswith("padded")), default=None)
    found: dict[str, Any] = {name: {"error": run["error"]} for name, run in runs.items() if "error" in run}
    for name, run in good.items():
        found[name] = {"real_tokens_per_second": round(rates[name], 1), "peak_bytes": run["peak_bytes"]}
        found[name]["last_loss"] = run["losses"][-1]
        if best:
            found[name]["ratio_to_padded"] = round(rates[name] / best, 4)
            found[name]["share_of_limit"] = round(rates[name] / best * real / padded, 4)
        if "synchronisations" in run:
            found[name]["synchronisations_per_forward"] = run["synchronisations"]["forward"]["per_step"]
            found[name]["synchronisations"] = run["synchronisations"]
    in_order = {name: found[name] for name in runs}
    return {"steps": steps, "real_tokens": real, "limit": round(padded / real, 4), "variants": in_order}


def _row(name: str, limit: float, run: Mapping[str, Any]) -> dict[str, Any]:
    share = run.get("share_of_limit")
    return {
        "": name,
        "real tokens/s": run["error"][:80] if "error" in run else round(run["real_tokens_per_second"]),
        "to padded": run.get("ratio_to_padded", ""),
        "limit": limit,
        "share of it": f"{share:.0%}" if share and ", padded:" not in name else "",
        "peak GB": round(run["peak_bytes"] / 1e9, 1) if "peak_bytes" in run else "",
        "synchronisations per forward": run.get("synchronisations_per_forward", ""),
    }


if __name__ == "__main__":
    sys.exit(main())
