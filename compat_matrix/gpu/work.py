"""Computes tasks in a process of its own: reads one a line, and prints what it found as JSON, one a line.

A task is a function of this package that is given the device, and texts. It returns texts and numbers: ``row`` by
column, or ``rows`` by name; what is ``wrong``, and what was ``refused`` by a build or a release, with the reasons.
"""

from __future__ import annotations

from ..check import executed

executed.record()  # before anything of fa2patch is imported

import functools  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from datetime import datetime, timezone  # noqa: E402
from importlib import metadata  # noqa: E402
from typing import Any  # noqa: E402

from .. import commits, keys  # noqa: E402

# What is executed here says nothing about a task.
HARNESS = tuple(f"compat_matrix/{file}.py" for file in ("gpu/work", "check/executed", "commits", "keys"))


def main() -> None:
    # What libraries print goes to standard error.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        print(json.dumps(result(**json.loads(line))), file=out, flush=True)


def result(call: str, arguments: list[str], device: str) -> dict[str, Any]:
    import torch

    module, _, name = call.partition(":")
    when, started = datetime.now(timezone.utc).isoformat(timespec="seconds"), time.monotonic()
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    try:
        function = getattr(importlib.import_module(f".{module}", __package__), name)
        found = function(device, *arguments)
        if device == "cuda":
            torch.cuda.synchronize()  # which raises if the device computes nothing more
    except Exception as error:  # also running out of a GPU's memory, which is a result
        found |= {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    gc.collect()
    if device == "cuda" and "error" not in found:
        torch.cuda.empty_cache()
    made = {**about(device), "when": when, "seconds": round(time.monotonic() - started, 1), "key": key()}
    return {**found, "made": made}


def key() -> keys.Items:
    # Earlier tasks of this process count, too: what they left in caches would run again.
    ran = executed.executed()
    ours = {"files": [file for file in ran["files"] if file not in HARNESS]}
    return _sources().key({**ours, "functions": [each for each in ran["functions"] if each[0] not in HARNESS]})


@functools.cache
def _sources() -> keys.Sources:
    return keys.Sources(commits.ROOT)


@functools.cache
def about(device: str) -> dict[str, Any]:
    import torch
    import transformers

    from ..bench.figures import processor

    builds = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    named = {name: builds[name] for name in ("flash_attn", "flash-linear-attention", "triton") if name in builds}
    on = {"device": processor()}
    if device == "cuda":
        driver: Any = torch._C
        on = {"device": torch.cuda.get_device_name(), "driver": str(driver._cuda_getDriverVersion())}
    return {**commits.of_code("compat_matrix/gpu"), **on, "torch": torch.__version__, "builds": named,
            "transformers": transformers.__version__}  # fmt: skip


if __name__ == "__main__":
    main()
