"""Measure on a CPU what packed rows cost and save: ``python -m compat_matrix.bench``. Takes about half an hour.

Each part is a function of ``bench_*.py``, which pytest-benchmark runs. ``python -m pytest compat_matrix/bench/FILE``
runs them without writing a result file. Other options than these are pytest's and those of ``conftest.py``: ``--quick``
only sees that it runs, and ``--environments`` names the folder where environments are kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from .figures import HERE, PARTS, read, show


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.bench", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="P", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where a JSON for each part goes")
    given, more = parser.parse_known_args(arguments)
    import pytest

    # only files that hold a part are imported: `against` runs them on an older fa2patch, where another one's fail
    texts = {file: file.read_text(encoding="utf-8") for file in HERE.glob("bench_*.py")}
    wanted = [f"{file}::bench_{part}" for part in given.parts for file in texts if f"def bench_{part}(" in texts[file]]
    started = time.time()
    code = pytest.main([*wanted, f"--out={given.out}", *more])
    files = [given.out / f"{part}.json" for part in given.parts]
    for found in (read(file) for file in files if file.exists() and file.stat().st_mtime >= started):
        show(found["part"], found["rows"], found["notes"])
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
