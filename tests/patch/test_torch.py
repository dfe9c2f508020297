"""Errors that are no verdict, a trial that leaves no trace, and operators that are defined when they are asked for."""

import errno
import os
import subprocess
import sys

import pytest
import torch

from fa2patch._torch import HAS_OPERATORS, is_no_verdict, outside_the_forward

has_operators = pytest.mark.skipif(not HAS_OPERATORS, reason=f"torch {torch.__version__} has no custom_op")


def raised_by(attempt):
    with pytest.raises(BaseException) as raised:
        attempt()
    return raised.value


def because(cause):
    def attempt():
        raise ValueError("it does not build") from cause

    return raised_by(attempt)


def meanwhile(other):
    def attempt():
        try:
            raise other
        except type(other):
            raise ValueError("it does not build") from None

    return raised_by(attempt)


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        raised_by(lambda: torch.empty(1 << 58)),
        raised_by(lambda: bytearray(1 << 62)),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        KeyboardInterrupt(),
        SystemExit(1),
        GeneratorExit(),
        InterruptedError(),
        because(MemoryError()),
        because(because(KeyboardInterrupt())),
    ],
    ids=repr,
)
def test_no_memory_and_interruptions_are_no_verdicts(error):
    assert is_no_verdict(error)


def test_what_torch_calls_it_by_now_is_known():
    assert is_no_verdict(getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)("no more"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("out of resource: shared memory, Required: 264192, Hardware limit: 232448"),
        type("OutOfResources", (Exception,), {})("out of resource: shared memory"),
        TypeError("forward() got an unexpected keyword argument 'seq_idx'"),
        ImportError("undefined symbol: _ZN3c104cuda9SetDeviceEi"),
        OSError(errno.ENOENT, "No such file or directory"),
        because(TypeError()),
        meanwhile(MemoryError()),
    ],
    ids=repr,
)
def test_all_else_is_a_verdict(error):
    assert not is_no_verdict(error)


@pytest.mark.parametrize("device", ["cpu", "mps", "meta"])
def test_what_is_tried_draws_no_random_numbers_and_gets_gradients(device):
    # The CPU's random state must be left unchanged on every device.
    before = torch.get_rng_state()
    leaf = torch.ones(2, requires_grad=True)
    with torch.inference_mode(), outside_the_forward(torch.device(device)):
        torch.rand(3)
        output = leaf * 2
        assert not output.is_inference() and output.requires_grad
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad(), outside_the_forward(torch.device("cpu")):
        assert (leaf * 2).requires_grad


def test_what_is_tried_is_not_handed_to_hooks_around_it():
    def fail(tensor):
        raise AssertionError("saved by a trial")

    leaf = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(fail, fail), outside_the_forward(torch.device("cpu")):
        torch.autograd.grad((leaf * leaf).sum(), leaf)


ASKED = """
import threading, torch, fa2patch
from torch._library.custom_ops import OPDEFS

def defined():
    return sorted(name for name in OPDEFS if name.startswith("fa2patch::"))

assert defined() == []
found, together = [], threading.Barrier(4)

def ask():
    together.wait()
    found.append(torch.ops.fa2patch.documents.default)

threads = [threading.Thread(target=ask) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == 4 and len(set(found)) == 1 and defined() == ["fa2patch::documents"], (found, defined())
cu, longest = found[0](torch.tensor([[0, 1, 0, 1, 2]]))
assert cu.tolist() == [0, 2, 5] and longest.shape == (3, 0)
assert not hasattr(torch.ops.fa2patch, "no_such_operator")
"""


@has_operators
def test_an_operator_is_defined_when_it_is_first_asked_for():
    subprocess.run([sys.executable, "-c", ASKED], check=True, timeout=120)


COMPILED = """
import sys, torch, fa2patch
from torch._dynamo.utils import counters
from fa2patch.documents.find import in_graph

ids = torch.tensor([[0, 1, 0, 1, 2]])
found = torch.compile(lambda ids: in_graph(ids, 0).cu_seqlens + 1, fullgraph=True)(ids)
assert found.tolist() == [1, 3, 6]
print(counters["inductor"]["fxgraph_cache_hit"])
"""


@has_operators
@pytest.mark.slow
def test_a_graph_of_torchs_cache_finds_the_operator_in_another_process(tmp_path):
    pytest.importorskip("setuptools", reason="torch's inductor imports setuptools up to torch 2.6")
    cached = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}

    def hits():
        run = [sys.executable, "-c", COMPILED]
        return int(subprocess.run(run, check=True, env=cached, stdout=subprocess.PIPE, timeout=300).stdout)

    assert [hits(), hits()] == [0, 1]


EXPORTED = """
import sys, torch, fa2patch
from fa2patch.documents.find import in_graph

class Ends(torch.nn.Module):
    def forward(self, ids):
        return in_graph(ids, 0).cu_seqlens + 1

if sys.argv[1] == "save":
    torch.export.save(torch.export.export(Ends(), (torch.tensor([[0, 1, 0, 1, 2]]),)), sys.argv[2])
else:
    ends = torch.export.load(sys.argv[2]).module()
    assert ends(torch.tensor([[0, 1, 2, 3, 0]])).tolist() == [1, 5, 6]
"""


@has_operators
@pytest.mark.slow
def test_an_exported_program_finds_the_operator_in_another_process(tmp_path):
    for what in ("save", "load"):
        subprocess.run([sys.executable, "-c", EXPORTED, what, tmp_path / "ends.pt2"], check=True, timeout=300)
