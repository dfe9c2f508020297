"""The processes of :mod:`compat_matrix.bench.first_gpu`, which go on where they were, and training at size."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa2patch.kernels import ORDER

from .. import commits
from . import figures
from .gpu_once import OUT_OF_TIME
from .workloads import DISTRIBUTIONS

ALONE = {"USE_TF": "0", "USE_JAX": "0", "USE_FLAX": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
START = 45  # seconds that a variant may take to start, in addition to its steps

# --- processes that go on where they were ---------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A process of a stage: a command of ``python -m compat_matrix.bench.gpu_once``, and the JSON that it writes."""

    stage: str
    name: str
    command: list[str]
    result: Path
    most: float | None = None  # seconds that it is told beside "start"; None for its part of the stage's time
    start: float = 0  # seconds that it may take to start
    path: Path | None = None  # a folder that comes first on its path

    def record(self, out: Path) -> Path:
        # It says what is known about the process when it is done.
        return out / "jobs" / f"{self.stage}--{self.name.replace(':', '-').replace(', ', '--')}.json"

    def run(self, seconds: float) -> dict[str, Any]:
        # "done" says whether the process need not be run again.
        told = max(min(seconds - self.start, self.most or seconds), 1)
        command = [sys.executable, "-m", "compat_matrix.bench.gpu_once", *self.command]
        command += ["--out", str(self.result), "--seconds", str(round(told))]
        path = [*([self.path.resolve()] if self.path else []), commits.ROOT, os.environ.get("PYTHONPATH", "")]
        given = {**os.environ, **ALONE, "PYTHONPATH": os.pathsep.join(str(part) for part in path if str(part))}
        limit, started = max(seconds + 30, 1), time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=given, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"done": False, "seconds": round(time.monotonic() - started, 1)}
        ended = round(time.monotonic() - started, 1)
        found: dict[str, Any] = {"done": done.returncode != OUT_OF_TIME, "seconds": ended, "command": self.command}
        if done.returncode not in (0, OUT_OF_TIME):
            found["error"] = (done.stderr.strip() or "it said nothing").splitlines()[-1][:300]
        return found


def run_all(
    jobs: list[Job], out: Path, header: Mapping[str, Any], shares: Mapping[str, float], seconds: float,
    report: Callable[[dict[str, Any]], object] = len,
) -> dict[str, Any]:  # fmt: skip
    # shares: of the stages. What a stage does not use goes to the next one.
    # report: called with all records before the first job that runs, and after each
    until = time.monotonic() + seconds
    files = {f"{job.stage}, {job.name}": job.record(out) for job in jobs}
    records: dict[str, Any] = {name: figures.read(file) for name, file in files.items() if file.exists()}
    report(records)
    for place, job in [*enumerate(jobs)] * 2:  # the second time in what the last stage has left
        if f"{job.stage}, {job.name}" in records:
            continue
        left = [other for other in jobs[place + 1 :] if f"{other.stage}, {other.name}" not in records]
        later = sum(shares[stage] for stage in {other.stage for other in left} - {job.stage})
        mine = until - time.monotonic() - later * seconds / sum(shares.values())
        if mine > max(5, job.start + 15 * bool(job.start)):
            print(f"{place + 1} of {len(jobs)}: {job.stage}, {job.name}", file=sys.stderr, flush=True)
            beside = 1 + sum(other.stage == job.stage for other in left)
            record = job.run(mine / beside if job.most is None else mine)
            if record["done"]:
                figures.write(job.record(out), {**header, **record})
                records[f"{job.stage}, {job.name}"] = record
            report(records)
    if len(records) < len(jobs):
        print(f"time is over: {len(records)} of {len(jobs)} are done, run the same command again")
    return records


def require_same(parser: argparse.ArgumentParser, jobs: list[Job], out: Path, header: Mapping[str, Any]) -> None:
    # A record of another commit, device or versions, or of a job with other settings, is an error.
    wanted = {job.record(out): job.command for job in jobs}
    same = ("commit", "dirty", "torch", "transformers", "device")
    for file in sorted((out / "jobs").glob("*.json")):
        record = figures.read(file)
        if any(record[key] != header[key] for key in same) or record["command"] != wanted.get(file, record["command"]):
            parser.error(f"--out: {out} holds results of another commit or setting ({file.name}): take another folder")


# --- training -------------------------------------------------------------------------------------------------


def variants(device: str, toy: bool) -> list[str]:
    # "padded" and "upstream" are Transformers alone, on padded and on packed batches; "upstream:sdpa" has its
    # block-diagonal mask. In "by-hand" every layer calls the best kernel with precomputed boundaries: the lowest
    # possible cost of a packed batch. "+lengths": with the collator's return_flash_attn_kwargs=True
    able = [kernel.name for kernel in ORDER if kernel.available()[0] and kernel.name != "reference"]
    own = (able if device == "cuda" else []) + (["reference"] if toy else [])
    flash = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    upstream = ["upstream:flash_attention_2", "upstream:flash_attention_2+lengths"] if flash else []
    best = [f"fa2patch:{own[0]}+lengths", f"by-hand:{own[0]}"] if own else []
    padded = ["padded:sdpa", *(["padded:flash_attention_2"] if flash else [])]
    return [*padded, *(f"fa2patch:{name}" for name in own), *best, *upstream, "upstream:sdpa"]


def missing() -> dict[str, str]:
    reasons = {f"fa2patch:{kernel.name}": kernel.available()[1] for kernel in ORDER}
    return {name: why for name, why in reasons.items() if why}


def planned(given: argparse.Namespace) -> list[Job]:
    # One weight under AdamW takes 8 bytes: 54 GB for Llama-2-7B, 58 for Mistral-7B, 64 for Granite-8B-code, before
    # activations and logits. --layers and --optimizer sgd are for models that do not fit.
    settings = ["--device", given.device, "--optimizer", given.optimizer, "--steps", str(given.steps)]
    settings += ["--documents", str(given.documents), "--warm-up", str(given.warm_up)]
    settings += [*(["--toy"] if given.toy else []), *(["--layers", str(given.layers)] if given.layers else [])]
    most, start = given.variant_seconds, 0 if given.toy else START
    made = []
    for shape, name in itertools.product(given.shapes, given.variants):
        file = given.out.resolve() / "runs" / f"{shape}--{name.replace(':', '-')}.json"
        made.append(Job("training", f"{shape}, {name}", ["training", shape, name, *settings], file, most, start))
    return made


def merged(given: argparse.Namespace, records: Mapping[str, Any]) -> dict[str, Any]:
    # Rates cover the steps that every variant of a model and distribution has taken.
    shapes: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    runs: dict[str, dict[str, Any]] = {shape: {} for shape in given.shapes}
    for job in planned(given):
        record = records.get(f"training, {job.name}", {})
        shape, _, variant = job.name.partition(", ")
        if job.result.exists() or "error" in record:
            runs[shape][variant] = record if "error" in record else figures.read(job.result)
    notes = f"bfloat16, {given.optimizer}, gradient checkpointing, mini-batches of {given.documents} documents."
    for shape, of in runs.items():
        good = {name: run for name, run in of.items() if "error" not in run}
        if good:
            first = next(iter(good.values()))
            found = {name: _compared(name, of, good) for name in DISTRIBUTIONS}
            shapes[shape] = {"layers": first["layers"], "parameters": first["parameters"], "distributions": found}
            notes = f"{shape}: {first['layers']} layers, {first['parameters'] / 1e9:.2f} G parameters; {notes}"
            for name, run in found.items():
                for one, at in run["variants"].items():
                    share = at.get("share_of_limit")
                    rows.append({
                        "": f"{shape}, {name}, {one}",
                        "real tokens/s": at["error"][:80] if "error" in at else round(at["real_tokens_per_second"]),
                        "to padded": at.get("ratio_to_padded", ""),
                        "limit": run["limit"],
                        "share of it": f"{share:.0%}" if share and not one.startswith("padded:") else "",
                        "peak GB": round(at["peak_bytes"] / 1e9, 1) if at.get("peak_bytes") else "",
                        "synchronisations per forward": at.get("synchronisations_per_forward", ""),
                    })  # fmt: skip
    return {"notes": notes, "shapes": shapes, "rows": rows}


def _compared(distribution: str, runs: Mapping[str, Any], good: Mapping[str, Any]) -> dict[str, Any]:
    good = {name: run["distributions"][distribution] for name, run in good.items()}
    steps = min(len(run["step_seconds"]) for run in good.values())
    first = next(iter(good.values()))
    real, padded = sum(first["real_tokens"][:steps]), sum(first["padded_tokens"][:steps])
    rates = {name: real / sum(run["step_seconds"][:steps]) for name, run in good.items()}
    best = max((rate for name, rate in rates.items() if name.startswith("padded")), default=None)
    found: dict[str, Any] = {name: {"error": run.get("error")} for name, run in runs.items()}
    for name, run in good.items():
        rate, waits = rates[name], run.get("synchronisations")
        one = {
            "real_tokens_per_second": round(rate, 1),
            "peak_bytes": run["peak_bytes"],
            "last_loss": run["losses"][-1],
        }
        if best:
            one |= {"ratio_to_padded": round(rate / best, 4), "share_of_limit": round(rate / best * real / padded, 4)}
        if waits:
            one |= {"synchronisations_per_forward": waits["forward"]["per_step"], "synchronisations": waits}
        found[name] = one
    return {"steps": steps, "real_tokens": real, "limit": round(padded / real, 4), "variants": found}
