"""Measure on a CPU what packed rows cost and save: ``python -m compat_matrix.bench``. Takes about half an hour.

Each part is a function of ``bench_*.py``, which pytest-benchmark runs. ``python -m pytest compat_matrix/bench/FILE``
runs them with pytest-benchmark's own options, and writes no result file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .. import commits
from . import figures

FILES = {
    "bench_counts.py": ("calls", "startup", "syncs", "dry"),
    "bench_times.py": ("overhead", "kernels", "training", "sharing", "embeddings", "packing"),
}
PARTS = {part: f"{file}::bench_{part}" for file, parts in FILES.items() for part in parts}


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen parts, write one JSON file for each and print the tables.

    Args:
        arguments: the command line; None reads ``sys.argv``.

    Returns:
        The exit code: pytest's if a part failed.
    """
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.bench", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="P", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=figures.HERE / "results", help="where a JSON for each part goes")
    parser.add_argument("--environments", type=Path, default=commits.ROOT / ".compat", help="where they are kept")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: tiny, and few repeats")
    given = parser.parse_args(arguments)
    import pytest

    options = [f"--out={given.out}", f"--environments={given.environments}", *(["--quick"] if given.quick else [])]
    code = pytest.main([*(f"{figures.HERE / PARTS[part]}" for part in given.parts), *options])
    for part in given.parts if not code else ():
        found = figures.read(given.out / f"{part}.json")
        figures.show(part, found["rows"], found["notes"])
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
