"""Everything that a GPU is needed for, within ten minutes: ``python -m compat_matrix.bench.first_gpu --out FOLDER``.

Four stages run in this order: every kernel against the reference; tiny models in this Transformers and in the releases
of ``--overlays``; training at size by ``compat_matrix.bench.gpu``; hybrids with the kernels of flash-linear-attention
and mamba-ssm. What is done is not run again, so repeat the command until it returns 0. It returns 3 when time ran out.
Each time it writes FOLDER/first_gpu.json, which holds all results and the goals, and prints the table of goals.

A folder of ``--overlays`` is named by a release of Transformers and comes first on the path. In a copy of the files
without git's folder, set FA2PATCH_COMMIT to the commit, which the results name.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import commits
from ..check.gpu import present_kernels
from ..screen import BarColumn, Console, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from . import about, gpu, gpu_goals
from .shapes import SHAPES

COMMAND = "python -m compat_matrix.bench.first_gpu"
SECONDS = {"kernels": 100, "models": 130, "training": 270, "hybrids": 40}
"""The share of each stage. What a stage does not use goes to the next one."""

FAMILIES = ("llama", "mistral", "qwen2", "gemma2", "qwen2_moe", "falcon", "phi3", "gpt_oss", "deepseek_v3", "bamba")
OVERLAY_FAMILIES = FAMILIES[:4]
ALONE = {"USE_TF": "0", "USE_JAX": "0", "USE_FLAX": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
OUT_OF_TIME = 3
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Job:
    """A process of a stage.

    Attributes:
        command: its arguments behind ``python -m``.
        result: the JSON file that it writes.
        stops: whether it stops by itself if it is told its ``--seconds``, and goes on when it is run again.
        path: a folder that comes first on the path, or None.
    """

    stage: str
    name: str
    command: list[str]
    result: Path
    stops: bool = True
    path: Path | None = None

    def run(self, seconds: float) -> dict[str, Any]:
        """Run the process and return what is known about it; its ``done`` says whether it need not be run again."""
        command = [*self.command, *(["--seconds", f"{max(seconds, 1):.0f}"] if self.stops else [])]
        path = [*([self.path.resolve()] if self.path else []), commits.ROOT, os.environ.get("PYTHONPATH", "")]
        given = {**os.environ, **ALONE, "PYTHONPATH": os.pathsep.join(str(part) for part in path if str(part))}
        started = time.monotonic()
        try:
            limit = seconds + (30 if self.stops else 0)
            done = subprocess.run(
                [sys.executable, "-m", *command], capture_output=True, text=True, env=given, timeout=max(limit, 1)
            )
        except subprocess.TimeoutExpired:
            return {"done": False, "seconds": round(time.monotonic() - started, 1)}
        found: dict[str, Any] = {
            "done": done.returncode != OUT_OF_TIME,
            "seconds": round(time.monotonic() - started, 1),
        }
        if not self.result.exists() or done.returncode not in (0, 1, OUT_OF_TIME) or TRACEBACK in done.stderr:
            found["error"] = ([line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"])[-1][
                :300
            ]
        return found


def main(arguments: list[str] | None = None) -> int:
    """Run what is not done, write first_gpu.json and print the goals.

    Args:
        arguments: the command line; None reads ``sys.argv``.

    Returns:
        The exit code: 0 when everything is done, 2 without a CUDA device, 3 when time ran out.
    """
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder that the JSON files go to")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: with --toy only")
    add("--toy", action="store_true", help="tiny, only to see that every stage runs; not for figures")
    add("--overlays", type=Path, help="folder with other releases of Transformers, one in each folder")
    add("--shapes", nargs="+", choices=SHAPES, default=["Llama-2-7B"], metavar="S", help=", ".join(SHAPES))
    add("--seconds", type=float, default=sum(SECONDS.values()), help="in all; default %(default).0f")
    given = parser.parse_args(arguments)
    if gpu.is_without_device(given, parser):
        return 2
    header = about.header(f"{COMMAND} --out FOLDER{' --device cpu --toy' if given.toy else ''}", given.device)
    other = of_another_commit(given.out, header)
    if other:
        parser.error(f"--out: {other.parent} holds results of another commit ({other.name}): take another folder")
    planned = list(jobs(given))
    records = run_all(planned, given, header)
    done = len(records) == len(planned)
    results: gpu_goals.Results = {job.stage: {} for job in planned}
    for job in planned:
        if job.result.exists():
            results[job.stage][job.name] = about.read(job.result)
    goals = gpu_goals.goals(results)
    failed = {name: record["error"] for name, record in records.items() if "error" in record}
    found = {**header, "toy": given.toy, "done": done, "goals": [vars(goal) for goal in goals], "failed": failed}
    about.write(given.out / "first_gpu.json", {**found, "missing": gpu.missing(), "jobs": records, "results": results})
    console = Console(width=150)
    console.print(gpu_goals.table(goals, header).as_rich())
    for name, why in {**failed, **gpu_goals.absent(results)}.items():
        console.print(f"{name}: {why}", highlight=False, markup=False)
    if not done:
        console.print(f"time is over: {len(records)} of {len(planned)} are done, run the same command again")
    return 0 if done else OUT_OF_TIME


def of_another_commit(out: Path, header: dict[str, Any]) -> Path | None:
    """Return a record of a job that ran at another commit, with other versions or on another device, or None."""
    same = ("commit", "dirty", "torch", "transformers", "device")
    for file in sorted((out / "jobs").glob("*.json")):
        record = about.read(file)
        if any(record[key] != header[key] for key in same):
            return file
    return None


def jobs(given: argparse.Namespace) -> Iterator[Job]:
    """Yield the processes of all stages in order."""
    out, device = given.out.resolve(), ["--device", given.device]
    toy = ["--toy"] if given.toy else []
    able = present_kernels(given.device)
    fast = [name for name in able if name != "reference"] or able
    for kernel in fast:
        file = out / "kernels" / f"{kernel}.json"
        yield Job(
            "kernels", kernel, ["compat_matrix.bench.gpu_kernels", kernel, "--out", str(file), *device, *toy], file
        )
    yield from _models(given, out / "models", fast)
    yield _training(given, out / "training", fast[0])
    file = out / "hybrids.json"
    yield Job("hybrids", "hybrids", ["compat_matrix.bench.gpu_hybrids", "--out", str(file), *device, *toy], file)


def _models(given: argparse.Namespace, out: Path, kernels: list[str]) -> Iterator[Job]:
    """The best kernel first, in every release; the other kernels in the installed release only."""
    import transformers

    overlays = sorted(path for path in given.overlays.iterdir() if path.is_dir()) if given.overlays else []
    wanted: list[tuple[str, Path | None, str]] = [(transformers.__version__, None, kernels[0])]
    wanted += [(path.name, path, kernels[0]) for path in overlays]
    wanted += [(transformers.__version__, None, kernel) for kernel in kernels[1:]]
    for release, path, kernel in wanted:
        families = FAMILIES[:1] if given.toy else OVERLAY_FAMILIES if path else FAMILIES
        name = f"{release}-{kernel}"
        command = ["compat_matrix.check.gpu", "--families", *families, "--kernels", kernel]
        command += ["--device", given.device, "--evidence", str(out)]
        yield Job("models", name, command, out / f"{name}.json", stops=False, path=path)


def _training(given: argparse.Namespace, out: Path, kernel: str) -> Job:
    """The variants that the goals are about come first, so that they are there if time runs out."""
    names = gpu.variants(given.device, given.toy)
    padded = [name for name in names if name.startswith("padded:")][-1]
    first = [padded, f"fa2patch:{kernel}+lengths", f"by-hand:{kernel}", f"fa2patch:{kernel}"]
    ordered = [*first, *(name for name in names if name not in first)]
    steps = ["--steps", "2", "--warm-up", "1", "--toy"] if given.toy else ["--steps", "20", "--variant-seconds", "45"]
    command = [
        "compat_matrix.bench.gpu",
        "--out",
        str(out),
        "--device",
        given.device,
        "--shapes",
        *given.shapes,
        *steps,
    ]
    command += ["--variants", *(ordered[:3] if given.toy else ordered)]
    return Job("training", "training", command, out / "gpu.json")


def run_all(planned: list[Job], given: argparse.Namespace, header: dict[str, Any]) -> dict[str, Any]:
    """Run the jobs without a record until time is up; return the records of all that are done, by stage and name."""
    until = time.monotonic() + given.seconds
    records: dict[str, Any] = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("first_gpu", total=len(planned))
        for place, job in enumerate(planned):
            progress.update(task, description=f"{job.stage}: {job.name}")
            file = given.out / "jobs" / f"{job.stage}--{job.name}.json"
            if file.exists():
                record = about.read(file)
            else:
                left = [other.stage for other in planned[place + 1 :] if other.stage != job.stage]
                later = sum(SECONDS[stage] for stage in {*left})
                beside = sum(other.stage == job.stage for other in planned[place:])
                mine = until - time.monotonic() - later * given.seconds / sum(SECONDS.values())
                record = job.run(mine / beside if job.stops else mine) if mine > 5 else {"done": False}
                if record["done"]:
                    about.write(file, {**header, **record})
            if record["done"]:
                records[f"{job.stage}, {job.name}"] = record
            progress.update(task, advance=1)
    return records


if __name__ == "__main__":
    sys.exit(main())
