"""Take the next steps on this machine's GPU: ``python -m compat_matrix.gpu --out FOLDER``.

Steps run in the order of their value: first those that neither FOLDER nor this repository has results of, then those
whose results are of other code. Each result is a line of FOLDER/results.jsonl as soon as it is there, and FOLDER/gpu.md
shows all, so that nothing is lost with the machine. Repeat the command while it returns 3, because time ran out. At the
end it returns 1 if something is wrong.
``--take FOLDER`` brings results into this repository, its pages and its README.

A folder of ``--overlays`` is named by a release of Transformers and comes first on the path. In a copy of the files
without git's folder, or with an older one, set FA2PATCH_COMMIT to the commit, which the results name.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from .. import diffable, keys, plans
from ..bench import figures
from . import page, pool, program, store

OUT_OF_TIME = 3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m compat_matrix.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, help="folder that results go to, and that a run goes on with")
    add("--take", type=Path, metavar="FOLDER", help="bring the results of a run into this repository")
    add("--steps", nargs="+", choices=page.WHAT, default=list(page.WHAT), metavar="S",
        help=", ".join(page.WHAT))  # fmt: skip
    add("--overlays", type=Path, help="folder with other releases of Transformers, one in each folder")
    add("--seconds", type=float, default=540, help="start nothing that may not end within so many")
    add("--processes", type=int, default=os.cpu_count() or 1, help="that compute at a time")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny sizes, only to see that it runs")
    add("--list", action="store_true", help="print what is due, and run nothing")
    given = parser.parse_args(arguments)
    if given.take:
        return take(given.take)
    here = machine(given.device, given.overlays)
    if here is None:
        parser.error("looked for a CUDA device, found none: run this where torch.cuda.is_available()")
    if not given.out and not given.list:
        parser.error("--out FOLDER: expected a folder that results go to, found none")
    known = {name: plan.snapshots for name, plan in plans.read().items()}
    planned = [task for task in program.tasks(here, known) if task.step in given.steps]
    run = store.Run(given.out) if given.out else None
    records = store.committed() | (run.records if run else {})
    left = program.due(planned, records, keys.Sources(store.ROOT))
    if given.list or run is None:
        print("\n".join(task.name for task in left))
        return 0
    return computed(left, records, run, pool.Pool(given.processes, given.device, here.overlays), given.seconds)


def machine(device: str, overlays: Path | None) -> program.Machine | None:
    import torch
    import transformers

    from .models import present

    if device == "cuda" and not torch.cuda.is_available():
        return None
    flash_attn = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    folders = {path.name: path.resolve() for path in sorted(overlays.iterdir()) if path.is_dir()} if overlays else {}
    releases = {name: path for name, path in folders.items() if (path / "transformers").is_dir()}
    return program.Machine(device, transformers.__version__, present(device), flash_attn, releases)


def computed(
    left: list[pool.Task], records: store.Records, run: store.Run, processes: pool.Pool, seconds: float
) -> int:
    waiting = {task.name: task for task in left}

    def keep(task: pool.Task, found: pool.Found) -> None:
        run.keep(task.name, found)
        records[task.name] = found
        del waiting[task.name]
        print(f"{len(left) - len(waiting)} of {len(left)}: {task.name}", file=sys.stderr, flush=True)
        written()

    def written() -> None:
        of_this = {name: found for name, found in records.items() if name not in waiting}
        diffable.write(run.file.with_name("gpu.md"), f"{page.page(of_this, list(waiting))}\n")

    written()
    pool.run(left, processes, seconds, keep)
    figures.show("Goals", page.goals_table({name: records[name] for name in records if name not in waiting}))
    wrong = any(found.get("wrong") or "error" in found for found in records.values())
    return OUT_OF_TIME if waiting else int(wrong)


def take(folder: Path) -> int:
    from ..publish.__main__ import main as publish

    count = store.take(folder)
    print(f"took {count} results")
    return figures.main([]) or publish([])


if __name__ == "__main__":
    sys.exit(main())
