"""Which errors of a trial say nothing about the thing that was tried, and that a trial leaves no trace."""

import errno

import pytest
import torch

from fa2patch._torch import is_no_verdict, outside_the_forward


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
    """The CPU's random state is left unchanged on every device."""
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
