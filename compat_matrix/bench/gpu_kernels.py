"""One kernel against the reference in a separate process: KERNEL --out FILE. ``first_gpu`` starts it.

The process is separate because an illegal access on a GPU ends everything that comes after it. The file is written
after each case, and cases that it has are not run again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fa2patch import kernels

from ..check.kernels import Case, cases, compared, refusal
from . import about

TOY_EVERY = 10
"""A toy run takes one case of so many."""


def main(arguments: list[str] | None = None) -> int:
    """Run the cases that the file does not have; returns 3 if time ran out before the last."""
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.bench.gpu_kernels", description=__doc__)
    parser.add_argument("kernel", help="a kernel's name")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=60, help="start no case later")
    parser.add_argument("--toy", action="store_true", help="a few cases, only to see that it runs")
    given = parser.parse_args(arguments)
    until = time.monotonic() + given.seconds
    found = about.read(given.out)["cases"] if given.out.exists() else {}
    wanted = dict(list(cases().items())[:: TOY_EVERY if given.toy else 1])
    header = {"kernel": given.kernel, **about.header("", given.device)}
    for name, case in wanted.items():
        if name in found:
            continue
        if time.monotonic() > until:
            return 3
        found[name] = result(kernels.named(given.kernel), case, given.device)
        about.write(given.out, {**header, "cases": found})
    return 0


def result(kernel: kernels.Kernel, case: Case, device: str) -> dict[str, Any]:
    """Return the relative errors of a case and whether all are small enough, or why there are none."""
    why = refusal(kernel, case, device)
    if why:
        return {"refused": why}
    torch.manual_seed(0)
    try:
        errors = compared(kernel, case, device)
    except Exception as error:  # kernels raise errors of many types
        return {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
    relative = {name: float(f"{error.relative:.2e}") for name, error in errors.items()}
    return {"ok": all(error.ok for error in errors.values()), "relative_errors": relative}


if __name__ == "__main__":
    sys.exit(main())
