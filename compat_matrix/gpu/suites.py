"""Tests of this repository on this device, each run in a process of its own: those that need one, and never_silent.

As a plugin of pytest (``-p compat_matrix.gpu.suites``) it makes the tensors and models of a test on the device that
``FA2PATCH_DEVICE`` names, so that what is loud on a CPU is seen to be loud there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_map_only

from .. import commits
from ..suite import reported
from .models import on

DEVICE = "FA2PATCH_DEVICE"


def suite(device: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    path = os.pathsep.join([str(commits.ROOT), str(commits.ROOT / "tests" / "helpers"), os.environ["PYTHONPATH"]])
    given = {**os.environ, DEVICE: device, "PYTHONPATH": path}
    report = reported(command, commits.ROOT, given, lambda percent: None)
    outcomes = [case.outcome for case in report.cases]
    failed = [case for case in report.cases if case.outcome in ("failure", "error")]
    row = {"tests": " ".join(arguments), "passed": outcomes.count("passed"), "skipped": outcomes.count("skipped")}
    return {"row": {**row, "failed": len(failed)}, "wrong": {case.name: case.failure for case in failed}}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: Any, nextitem: Any) -> Iterator[None]:
    # Fixtures count, too. What a library or a collator made on the host is moved when a model is called with it.
    device, call, inside = os.environ.get(DEVICE, "cpu"), torch.nn.Module.__call__, False

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return call(module, *args, **kwargs)
        inside = True
        try:
            given = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
            if any(parameter.device != torch.device(device) for parameter in module.parameters()):
                module.to(device)
            return call(module, *given[0], **given[1])
        finally:
            inside = False

    with on(device), mock.patch.object(torch.nn.Module, "__call__", called):
        yield
