"""The trial before a kernel's first use: what it finds, what it hands over, and what it leaves alone."""

from dataclasses import replace

import pytest
import stand_in_aten
import torch
from definition_cases import asks
from scripted_kernels import OTHERS, Scripted, asks_other

from compat_matrix.check.kernel_cases import HEADS, LENGTHS, documents, states
from fa2patch import kernels
from fa2patch.errors import KernelWrong
from fa2patch.kernels import Kernel, Options, packed_attention, picks, trial, trial_rows
from fa2patch.kernels.reference import Reference

CPU = torch.device("cpu")

NO_VERDICTS = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    RuntimeError("CUDA error: out of memory"),
    KeyboardInterrupt(),
]
VERDICTS = [
    RuntimeError("no kernel image is available for execution on the device"),
    ValueError("out of memory is what this argument is called"),
    type("OutOfResources", (Exception,), {})(
        "out of resource: shared memory, Required: 264192, Hardware limit: 232448"
    ),
]


def a_token_late(lengths):
    return (lengths[0] + 1, *lengths[1:-1], lengths[-1] - 1)


FAULTS = {
    "one document": lambda boundaries, options: (documents((sum(boundaries.lengths),)), options),
    "documents end a token late": lambda boundaries, options: (documents(a_token_late(boundaries.lengths)), options),
    "a window one wider": lambda boundaries, options: (boundaries, replace(options, window=options.window + 1)),
    "no softcap": lambda boundaries, options: (boundaries, replace(options, softcap=None)),
    "no sinks": lambda boundaries, options: (boundaries, replace(options, sinks=options.sinks * 0)),
    "no slopes": lambda boundaries, options: (boundaries, replace(options, alibi_slopes=None)),
    "both ways": lambda boundaries, options: (boundaries, replace(options, causal=False)),
}


@pytest.mark.parametrize("dtype", trial.BOUNDS, ids=str)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_kernel_that_computes_something_else_is_not_used(fault, dtype):
    asked = asks(["window", "softcap", "sinks", "alibi"], dtype=dtype, key_heads=2)
    able, reason = trial.passes_trial(Scripted(fault), asked, CPU)
    assert not able and reason.startswith("tried on this machine, its outputs are off by ")
    assert trial.passes_trial(Scripted(), asked, CPU) == (True, "")


def test_a_kernel_that_takes_the_usual_scale_for_granted_is_not_used():
    class Usual(Scripted):
        def attend(self, q, k, v, boundaries, options, scale):
            return super().attend(q, k, v, boundaries, options, q.shape[-1] ** -0.5)

    able, reason = trial.passes_trial(Usual(), asks(), CPU)
    assert not able and "its outputs are off by " in reason


def test_a_kernel_whose_gradients_alone_are_wrong_is_not_used():
    class Forgetful(Scripted):
        def attend(self, q, k, v, boundaries, options, scale):
            right = super().attend(q, k, v, boundaries, options, scale)
            leaking = super().attend(q, k, v, boundaries, replace(options, window=None), scale)
            return leaking + (right - leaking).detach()

    able, reason = trial.passes_trial(Forgetful(), asks(["window"]), CPU)
    assert not able and "its gradients of " in reason


def test_a_kernel_that_fails_its_trial_is_passed_over_and_named(monkeypatch):
    class Broken(Scripted):
        def attend(self, *unused):
            raise RuntimeError("no kernel image is available\nfor execution on the device")

    monkeypatch.setattr(picks, "ORDER", (Broken(), Scripted(FAULTS["one document"]), Reference()))
    found = kernels.pick("auto", asks(), CPU)
    assert found.kernel.name == "reference"
    first, second = found.why.split("; ")
    assert first == "scripted: tried on this machine it fails: RuntimeError: no kernel image is available"
    assert second.startswith("scripted: tried on this machine, its outputs are off by ")
    with pytest.raises(KernelWrong, match="kernel='scripted' cannot compute this layer: tried on this"):
        kernels.pick("scripted", asks(), CPU)


class Unlucky(Scripted):
    # It raises each of these errors in turn, then computes.

    def __init__(self, *errors):
        super().__init__()
        self.errors = list(errors)

    def attend(self, q, k, v, boundaries, options, scale):
        if self.errors:
            raise self.errors.pop(0)
        return super().attend(q, k, v, boundaries, options, scale)


@pytest.mark.parametrize("error", NO_VERDICTS, ids=repr)
def test_an_error_that_is_no_verdict_is_raised_and_the_next_use_tries_again(monkeypatch, error):
    kernel = Unlucky(error)
    monkeypatch.setattr(picks, "ORDER", (kernel, Reference()))
    chosen = picks.Picks("auto")
    with pytest.raises(type(error)) as raised:
        chosen(None, asks(), CPU)
    assert raised.value is error
    assert chosen(None, asks(), CPU) is kernel


@pytest.mark.parametrize("error", VERDICTS, ids=repr)
def test_an_error_that_is_a_verdict_is_remembered(error):
    kernel = Unlucky(error)
    for _ in range(2):
        able, reason = trial.passes_trial(kernel, asks(), CPU)
        assert not able and reason.startswith(f"tried on this machine it fails: {type(error).__name__}: ")


def test_a_trial_leaves_no_trace_in_the_forward_around_it():
    # Outputs, gradients and random numbers stay the same in inference mode, autocast and a checkpoint.
    with stand_in_aten.installed() as calls:
        rows = [tensor.detach().float()[None].requires_grad_() for tensor in states()]

        def attend(q, k, v):
            trial._tried.cache_clear()
            return packed_attention(q, k, v, documents(LENGTHS), Options(), "torch_varlen")

        before = torch.get_rng_state()
        plain = attend(*rows)
        assert torch.equal(before, torch.get_rng_state())
        for mode in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.no_grad()):
            with mode:
                assert torch.equal(attend(*rows), plain)
        checkpointed = torch.utils.checkpoint.checkpoint(attend, *rows, use_reentrant=False)
        assert torch.equal(checkpointed, plain)
        trial._tried.cache_clear()
        found = torch.autograd.grad(checkpointed.square().sum(), rows)
        expected = torch.autograd.grad(plain.square().sum(), rows)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
        longest = max(trial_rows.LENGTHS)
        assert {call["max"] for call in calls} == {max(LENGTHS), longest, 2 * longest}


def test_what_a_kernel_is_handed_in_its_trial():
    handed = []

    class Asking(Scripted):
        def __call__(self, q, k, v, boundaries, options):
            handed.append((q, k, v, boundaries, options))
            return super().__call__(q, k, v, boundaries, options)

    asked = asks(kernels.FEATURES[:4], key_heads=2, value_dim=32, causal=False)
    assert trial.passes_trial(Asking(), asked, CPU) == (True, "")
    tokens = sum(trial_rows.LENGTHS)
    for q, k, v, boundaries, options in handed:
        assert [tuple(x.shape) for x in (q, k, v)] == [(tokens, 4, 64), (tokens, 2, 64), (tokens, 2, 32)]
        assert {x.dtype for x in (q, k, v)} == {asked.dtype}
        assert all(x.stride(-1) == 1 and not x.is_contiguous() for x in (q, k, v))
        assert boundaries.lengths == tuple(boundaries.cu_seqlens.diff().tolist())
        assert boundaries.cu_seqlens.dtype == torch.int32
        assert (options.window, options.softcap, options.causal) == (9, 2.0, False)
        assert options.scale == trial_rows.SCALE / 8 != 1 / 8 and options.dropout == 0
        assert options.sinks.shape == options.alibi_slopes.shape == (4,)
        assert options.alibi_slopes.dtype == torch.float32 and 0 < options.alibi_slopes.max() <= 0.3
    first, second = ([boundaries, options] for *_, boundaries, options in handed)
    assert first[0].lengths == second[0].lengths[::-1] == trial_rows.LENGTHS
    assert second[0].max_seqlen == 2 * first[0].max_seqlen == 2 * max(trial_rows.LENGTHS)
    assert (first[1].sinks.dtype, second[1].sinks.dtype) == (asked.dtype, torch.float32)


def test_a_trial_computes_in_the_dtype_that_was_asked_for_also_in_autocast():
    class Sensitive(Scripted):
        def attend(self, q, k, v, boundaries, options, scale):
            assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.float32
            return super().attend(q, k, v, boundaries, options, scale)

    with torch.autocast("cpu", torch.bfloat16):
        assert trial.passes_trial(Sensitive(), asks(dtype=torch.float32), CPU) == (True, "")


def test_one_trial_for_every_kind_of_call():
    trial._tried.cache_clear()
    with stand_in_aten.installed() as calls:
        for _ in range(3):
            kernels.pick("torch_varlen", asks(), CPU)
            kernels.pick("torch_varlen", asks(["dropout"]), CPU)
        assert len(calls) == 2
        kernels.pick("torch_varlen", asks(["window"]), CPU)
        assert len(calls) == 4


@pytest.mark.parametrize("what", [what for what in OTHERS if what not in ("dropout", "gradients")])
def test_what_asks_for_something_else_has_a_trial_of_its_own(monkeypatch, what):
    tried, kernel, other = [], Scripted(), asks_other(what)
    monkeypatch.setattr(trial, "_compared", lambda kernel, asked, device: tried.append(asked) or (True, ""))
    for asked in (asks(), asks(), other, other):
        trial.passes_trial(kernel, asked, CPU)
    assert tried == [asks(), other]
    trial.passes_trial(kernel, other, torch.device("cpu", 0))
    trial.passes_trial(Scripted(), other, CPU)
    assert tried == [asks(), other, other, other]


class Build(Kernel):
    # The build says that it takes values of another head dimension. ``refuses`` says what it raises for.

    name = "build"
    DEVICES = None

    def __init__(self, refuses):
        self.refuses, self.tried = refuses, []

    def available(self):
        return True, ""

    def takes(self, head_dim, value_dim):
        return True

    def attend(self, q, k, v, boundaries, options, scale):
        dims = q.shape[-1], v.shape[-1]
        self.tried.append(dims)
        if self.refuses(*dims):
            raise RuntimeError(f"V's head dimension {dims[1]} is not supported")
        return Reference().attend(q, k, v, boundaries, options, scale)


@pytest.mark.parametrize(
    ("refuses", "verdict", "tried"),
    [
        (lambda dim, value_dim: dim != value_dim, (True, ""), [(24, 16), (24, 24)]),
        (lambda dim, value_dim: False, (True, ""), [(24, 16)]),
        (lambda dim, value_dim: True, (False, "RuntimeError: V's head dimension 24 is not supported"),
         [(24, 16), (24, 24)]),
    ],
    ids=["takes them padded", "takes them as they are", "fails in both ways"],
)  # fmt: skip
def test_a_build_that_fails_with_values_of_another_dimension_gets_them_padded(refuses, verdict, tried):
    build = Build(refuses)
    able, reason = trial.passes_trial(build, asks(dim=24, value_dim=16), CPU)
    assert able is verdict[0] and reason.endswith(verdict[1])
    assert list(dict.fromkeys(build.tried)) == tried  # each twice
    assert Build.alike == frozenset(), "another build of the class is not affected"
    if able:
        q, v = torch.ones(sum(LENGTHS), HEADS, 24), torch.ones(sum(LENGTHS), HEADS, 16)
        assert build(q, q, v, documents(LENGTHS), Options()).shape == v.shape
        assert build.tried[-1] == tried[-1]
