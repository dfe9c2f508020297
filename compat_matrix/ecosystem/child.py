"""The checks of one stack, inside its environment: ``python -m compat_matrix.ecosystem.child NAME OUT [CHECK ...]``."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "datasets",
    "deepspeed",
    "bitsandbytes",
    "wrapt",
    "numpy",
    "liger-kernel",
    "cut-cross-entropy",
    "triton",
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of those ``PACKAGES`` that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def main(name: str, out: str, *wanted: str) -> None:
    """Run checks and write versions and findings as JSON.

    Args:
        name: the stack's name, for messages.
        out: the file to write.
        wanted: names of checks; none means all of ``CHECKS``.
    """
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    import torch

    torch.set_num_threads(1)
    from transformers.utils import logging

    logging.disable_progress_bar()
    from .checks import CHECKS, NAMED
    from .training import Stage

    stage = Stage(trl="trl" in versions())
    if stage.trl:
        import datasets

        datasets.disable_progress_bars()
    ready = time.perf_counter() - start
    print(f"{name}: ready after {ready:.0f} s", file=sys.stderr, flush=True)
    findings = {}
    for check in wanted or CHECKS:
        begun = time.perf_counter()
        finding = held({**CHECKS, **NAMED}[check], stage)
        finding["seconds"] = round(time.perf_counter() - begun, 1)
        findings[check] = finding
        word = "skipped" if "skipped" in finding else "ok" if finding["ok"] else "FAILED"
        print(f"{name}: {check} {word}, {finding['seconds']:.0f} s", file=sys.stderr, flush=True)
    Path(out).write_text(json.dumps({"versions": versions(), "import_seconds": round(ready, 1), "checks": findings}))


def held(check: Any, stage: Any) -> dict[str, Any]:
    """Run one check. An exception becomes a finding that is not ok."""
    try:
        return dict(check(stage))
    except Exception as error:
        traceback.print_exc()
        return {"ok": False, "error": f"{type(error).__name__}: {error}"[:1000]}


if __name__ == "__main__":
    main(*sys.argv[1:])
