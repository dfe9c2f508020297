"""Measure on a CPU what packed rows cost and save: ``python -m compat_matrix.bench``. Takes about half an hour."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any, Callable

from ..screen import BarColumn, Console, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from . import PARTS

RESULTS = Path(__file__).parent / "results"
ENVIRONMENTS = Path(__file__).parents[2] / ".compat"
COMMAND = "python -m compat_matrix.bench"


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen parts, write one JSON file for each and print the tables.

    Args:
        arguments: the command line; None reads ``sys.argv``.

    Returns:
        The exit code, always 0.
    """
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="P", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="where a JSON for each part goes")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="where environments are kept")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: tiny, and few repeats")
    given = parser.parse_args(arguments)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    warnings.simplefilter("ignore")
    import torch

    from . import about, tables

    torch.set_num_threads(1)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console() if sys.stdout.isatty() else Console(width=150)
    for part in given.parts:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            found = measuring(part, given)(progress)
        quick = " --quick" if given.quick else ""
        header = about.header(f"{COMMAND} --parts {part}{quick}")
        about.write(given.out / f"{part}.json", {"part": part, **header, **found})
        for table in tables.of({part: about.read(given.out / f"{part}.json")}):
            console.print(table.as_rich())
    return 0


def measuring(part: str, given: argparse.Namespace) -> Callable[[Progress], Any]:
    """Return the part's ``measure``. Its module is imported only here, because each part needs its own packages."""
    if part == "startup":
        from . import startup

        return lambda progress: startup.measure(progress, given.quick)
    if part == "syncs":
        from . import syncs

        return lambda progress: syncs.measure(progress, given.environments, quick=given.quick)
    if part == "dry":
        from . import dry

        return lambda progress: dry.measure(progress, given.environments, quick=given.quick)
    if part == "kernels":
        from . import kernels

        return lambda progress: kernels.measure(progress, given.quick)
    if part == "overhead":
        from . import overhead

        return lambda progress: overhead.measure(progress, given.quick)
    if part == "mixers":
        from . import mixers

        return lambda progress: mixers.measure(progress, given.quick)
    if part == "sharing":
        from . import sharing

        return lambda progress: sharing.measure(progress, given.quick)
    if part == "embeddings":
        from . import embeddings

        return lambda progress: embeddings.measure(progress, given.environments, quick=given.quick)
    if part == "packing":
        from . import packing

        return lambda progress: packing.measure(progress, given.environments, quick=given.quick)
    if part == "collator":
        from . import collator

        return lambda progress: collator.measure(progress, given.quick)
    from . import training

    return lambda progress: training.measure(progress, given.quick)


if __name__ == "__main__":
    sys.exit(main())
