"""Measure on a CPU what packed rows cost and save: ``python -m compat_matrix.bench``. Takes about half an hour."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from ..screen import BarColumn, Console, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from . import PARTS

RESULTS = Path(__file__).parent / "results"
ENVIRONMENTS = Path(__file__).parents[2] / ".compat"
OTHER_VERSIONS = {"syncs", "dry", "embeddings", "packing"}
"""The parts that run in environments of other versions, which they make."""

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
            found = measured(part, progress, given.environments, given.quick)
        quick = " --quick" if given.quick else ""
        header = about.header(f"{COMMAND} --parts {part}{quick}")
        about.write(given.out / f"{part}.json", {"part": part, **header, **found})
        for table in tables.of({part: about.read(given.out / f"{part}.json")}):
            console.print(table.as_rich())
    return 0


def measured(part: str, progress: Progress, environments: Path, quick: bool) -> Any:
    """Return a part's result. Its module is imported only here, because each part needs its own packages."""
    measure = importlib.import_module(f".{part}", __package__).measure
    if part in OTHER_VERSIONS:
        return measure(progress, environments, quick=quick)
    return measure(progress, quick)


if __name__ == "__main__":
    sys.exit(main())
