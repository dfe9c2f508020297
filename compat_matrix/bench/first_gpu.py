"""Everything that a GPU is needed for, within ten minutes: ``python -m compat_matrix.bench.first_gpu --out FOLDER``.

Four stages run in this order: every kernel against the reference; tiny models in this Transformers and in the releases
of ``--overlays``; training at size, padded against packed; hybrids with the kernels of flash-linear-attention and
mamba-ssm. What is done is not run again, so repeat the command until it returns 0. It returns 3 when time ran out.
After each process it writes FOLDER/first_gpu.json, which holds all results and the goals, and first_gpu.md, the page
that shows them, so that nothing is lost with the machine. At the end it prints the table of goals.

A folder of ``--overlays`` is named by a release of Transformers and comes first on the path. In a copy of the files
without git's folder, or with an older one, set FA2PATCH_COMMIT to the commit, which the results name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import commits, diffable
from ..check.gpu import present_kernels
from . import figures, gpu, gpu_page
from .gpu import Job
from .gpu_once import OUT_OF_TIME, training_options
from .workloads import SHAPES

COMMAND = "python -m compat_matrix.bench.first_gpu"
# The share of each stage. What a stage does not use goes to the next one.
SECONDS = {"kernels": 90, "models": 90, "training": 270, "hybrids": 90}

FAMILIES = ("llama", "mistral", "qwen2", "gemma2", "qwen2_moe", "falcon", "phi3", "gpt_oss", "deepseek_v3", "bamba")
OVERLAY_FAMILIES = FAMILIES[:4]

# the result files of all stages, by stage and job
Results = dict[str, dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    # The exit code is 0 when everything is done, 2 without a CUDA device, 3 when time ran out.
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder that the JSON files go to")
    add("--stages", nargs="+", choices=SECONDS, default=list(SECONDS), metavar="S", help=", ".join(SECONDS))
    add("--overlays", type=Path, help="folder with other releases of Transformers, one in each folder")
    add("--shapes", nargs="+", choices=SHAPES, default=["Llama-2-7B"], metavar="S", help=", ".join(SHAPES))
    add("--variants", nargs="+", metavar="V", help="of training; default: all that can run here")
    add("--seconds", type=float, default=sum(SECONDS.values()), help="start nothing that may not end within so many")
    add("--variant-seconds", type=float, default=45, help="for one variant's steps, over all distributions")
    training_options(parser)
    given = parser.parse_args(arguments)
    if given.device == "cpu" and not given.toy:
        parser.error("--device cpu goes with --toy: only to see that it runs")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("looked for a CUDA device, found none: run this where torch.cuda.is_available()")
    if given.toy:
        given.steps, given.warm_up = 2, 1
    header = figures.header(f"{COMMAND} --out FOLDER{' --device cpu --toy' if given.toy else ''}", given.device)
    able = present_kernels(given.device)
    kernels = [name for name in able if name != "reference"] or able
    if not given.variants:
        given.variants = in_order(gpu.variants(given.device, given.toy), kernels[0])[: 3 if given.toy else None]
    planned = [job for job in jobs(given, kernels) if job.stage in given.stages]
    gpu.require_same(parser, planned, given.out, header)
    report = partial(written, given, header, planned)
    found = report(gpu.run_all(planned, given.out, header, SECONDS, given.seconds, report))
    figures.show("Goals", *table(goals(found["results"]), header))
    for name, why in gpu_page.reasons(found):
        print(f"{name}: {why}")
    return 0 if found["done"] else OUT_OF_TIME


def written(
    given: argparse.Namespace, header: dict[str, Any], planned: list[Job], records: dict[str, Any]
) -> dict[str, Any]:
    # It is called before the first job and after each one, because a machine may be gone before the last.
    results: Results = {stage: {} for stage in SECONDS}
    for job in planned:
        if job.result.exists() and job.stage != "training":
            results[job.stage][job.name] = figures.read(job.result)
    results["training"]["training"] = gpu.merged(given, records)
    failed = {name: record["error"] for name, record in records.items() if "error" in record}
    rest = [f"{job.stage}, {job.name}" for job in planned if f"{job.stage}, {job.name}" not in records]
    found = {**header, "toy": given.toy, "done": not rest, "goals": [vars(goal) for goal in goals(results)]}
    found.update(failed=failed, missing=gpu.missing(), not_run=rest, jobs=records, results=results)
    figures.write(given.out / "first_gpu.json", found)
    diffable.write(given.out / "first_gpu.md", f"# A GPU's first run\n\n{gpu_page.page(found)}\n")
    return found


def in_order(variants: list[str], kernel: str) -> list[str]:
    # The variants that the goals are about come first: time may run out.
    padded = [name for name in variants if name.startswith("padded:")][-1:]
    first = [*padded, f"fa2patch:{kernel}+lengths", f"by-hand:{kernel}", f"fa2patch:{kernel}"]
    return sorted(variants, key=lambda name: first.index(name) if name in first else len(first))


def jobs(given: argparse.Namespace, kernels: list[str]) -> list[Job]:
    # kernels: those that can run here, best first
    out, more = given.out.resolve(), ["--device", given.device, *(["--toy"] if given.toy else [])]
    return [
        *(Job("kernels", one, ["kernel", one, *more], out / "kernels" / f"{one}.json") for one in kernels),
        *models(given, out / "models", kernels),
        *gpu.planned(given),
        Job("hybrids", "hybrids", ["hybrids", *more], out / "hybrids.json"),
    ]


def models(given: argparse.Namespace, out: Path, kernels: list[str]) -> Iterator[Job]:
    # The best kernel runs first, in every release. The other kernels run in the installed release only.
    import transformers

    overlays = sorted(path for path in given.overlays.iterdir() if path.is_dir()) if given.overlays else []
    best, *others = kernels
    for path, kernel in [(None, best), *((path, best) for path in overlays), *((None, other) for other in others)]:
        families = FAMILIES[:1] if given.toy else OVERLAY_FAMILIES if path else FAMILIES
        name = f"{path.name if path else transformers.__version__}-{kernel}"
        command = ["models", kernel, *families, "--device", given.device]
        yield Job("models", name, command, out / f"{name}.json", path=path)


# --- goals ----------------------------------------------------------------------------------------------------

SHARE, OVERHEAD = 0.97, 0.01
# The least throughput of packed training, relative to padded: what the paper reports (arXiv 2407.09105).
RATIO = {"FLAN-like": 2.0, "OrcaMath-like": 1.4}

# The least part of the padded peak of memory that packed training saves.
MEMORY = {"FLAN-like": 0.20, "OrcaMath-like": 0.06}


@dataclass(frozen=True)
class Goal:
    goal: str
    found: str
    met: bool | None  # None if nothing was measured


def goals(results: Results) -> list[Goal]:
    # Goals that nothing was measured for are among them.
    cases = {
        f"{kernel}: {name}": case["ok"]
        for kernel, result in results.get("kernels", {}).items()
        for name, case in result["cases"].items()
        if "refused" not in case
    }
    models = {
        f"{name}: {family}": "error" not in cell
        and not any(counts["fail"] for counts in cell.get("fa2patch", {}).values())
        for name, result in results.get("models", {}).items()
        for family, cell in result["architectures"].items()
    }
    found = [
        _all_right("every kernel equals the reference, gradients too", "cases", cases),
        _all_right("tiny models are right with every kernel", "models", models),
    ]
    shapes = results.get("training", {}).get("training", {}).get("shapes", {})
    for shape, runs in (shapes or {"training": {"distributions": dict.fromkeys(MEMORY, {"variants": {}})}}).items():
        for distribution, run in runs["distributions"].items():
            good = {name: variant for name, variant in run["variants"].items() if "error" not in variant}
            found += _of_a_distribution(f"{shape}, {distribution}", distribution, good)
    return found


def table(found: list[Goal], header: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    on = f"{header['device']}, torch {header['torch']}, Transformers {header['transformers']}"
    rows = [{"": goal.goal, "found": goal.found, "met": gpu_page.MET[goal.met]} for goal in found]
    return rows, f"Measured on {commits.named(header)}; {on}."


def _all_right(goal: str, what: str, ran: dict[str, bool]) -> Goal:
    wrong = [name for name, ok in ran.items() if not ok]
    said = f"{len(ran) - len(wrong)} of {len(ran)} {what}{'; wrong: ' if wrong else ''}{', '.join(wrong[:5])}"
    return Goal(goal, said, not wrong) if ran else Goal(goal, "", None)


def _of_a_distribution(where: str, distribution: str, variants: dict[str, Any]) -> Iterator[Goal]:
    # All goals are about packed batches with their lengths, computed by the kernel that runs by hand too.
    least, saved = RATIO[distribution], MEMORY[distribution]
    kernel = next((name.partition(":")[2] for name in variants if name.startswith("by-hand:")), "")
    padded = [variants[name] for name in variants if name.startswith("padded:")]
    own, bare = (variants.get(name, {}) for name in (f"fa2patch:{kernel}+lengths", f"by-hand:{kernel}"))
    ratio = own.get("ratio_to_padded")
    yield _goal(f"{where}: at least {least:.1f} times the padded throughput", ratio, (ratio or 0) >= least, "{:.2f}")
    share = own.get("share_of_limit")
    yield _goal(f"{where}: at least {SHARE:.0%} of the padding limit", share, share and share >= SHARE, "{:.1%}")
    rates = [variant.get("real_tokens_per_second") for variant in (bare, own)]
    over = rates[0] / rates[1] - 1 if all(rates) else None
    yield _goal(f"{where}: at most {OVERHEAD:.0%} over the bare kernel", over, (over or 0) <= OVERHEAD, "{:+.2%}")
    waits = own.get("synchronisations_per_forward")
    yield _goal(f"{where}: no synchronisation in a forward", waits, waits == 0, "{:g}")
    peak = min((variant["peak_bytes"] for variant in padded), default=None)
    less = 1 - own["peak_bytes"] / peak if own and peak else None
    goal = f"{where}: peak memory at least {saved:.0%} below padded"
    yield _goal(goal, less, (less or 0) >= saved, "{:.1%} below")


def _goal(goal: str, found: float | None, met: bool | None, shown: str) -> Goal:
    return Goal(goal, "", None) if found is None else Goal(goal, shown.format(found), bool(met))


if __name__ == "__main__":
    sys.exit(main())
