import gc
import json
import os
import platform
import sys
from importlib import metadata

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import pytest
import torch

from fa2patch import binding

pytest_plugins = ["fa2patch.testing"]
PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "trl", "datasets", "deepspeed", "bitsandbytes", "wrapt", "numpy",
    "liger-kernel", "cut-cross-entropy", "triton",
)  # fmt: skip


def pytest_collection_finish(session):
    # What the imports made is left out of later collections, which then take milliseconds instead of a second.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def versions(record_testsuite_property):
    # The report says which packages it was made with, and ``compat_matrix.ecosystem`` keeps that.
    record_testsuite_property("python", platform.python_version())
    for package in PACKAGES:
        try:
            record_testsuite_property(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            continue


@pytest.fixture
def finding(record_property):
    # ``compat_matrix.ecosystem`` keeps a test's finding as evidence.
    found = {}
    yield found
    record_property("finding", json.dumps(found))


@pytest.fixture(autouse=True)
def deterministic():
    torch.manual_seed(0)
    torch.set_num_threads(1)


covered_for_good = set()  # bindings: torch.compile's first graph puts its own around Tracer.trace, for the process


@pytest.fixture(autouse=True)
def patches_end_with_their_test():
    # A forgotten model keeps the bindings of its class until it is collected, in the middle of a later test.
    of_fixtures = binding.users()
    yield
    for user in binding.users() - of_fixtures:
        binding.release(user)
    if any(each.waited_for for each in binding._bindings if each not in covered_for_good):
        gc.collect()  # a binding that is covered ends with what covers it
        covered_for_good.update(each for each in binding._bindings if each.waited_for)


@pytest.fixture(autouse=True)
def no_accelerate_state_left_over():
    # Accelerate keeps its state for the whole process, so one test would determine the precision of the next.
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
