"""Which kernels run on which device: compute capabilities, the order of ``auto``, and the warning of a slow kernel."""

import warnings

import pytest
import torch

from fa2patch import kernels
from fa2patch.kernels import flex, picks, protocol, varlen
from fa2patch.kernels.reference import Reference

AMPERE, HOPPER, BLACKWELL, CONSUMER = (8, 0), (9, 0), (10, 0), (12, 0)


def asks(features=(), device="cuda", dtype=torch.bfloat16):
    return kernels.Asked(device, dtype, 4, 4, 64, 64, True, tuple(features))


@pytest.fixture
def on(monkeypatch):
    """Return a function that sets the current device's compute capability; None is no NVIDIA device."""

    def put(capability):
        for module in (protocol, picks):
            monkeypatch.setattr(module, "capability", lambda: capability)

    return put


@pytest.fixture
def everything_is_here(monkeypatch):
    """Every kernel is available, and none is tried."""
    found = varlen.EntryPoint(lambda: None, frozenset(name for names in varlen.PARAMETERS.values() for name in names))
    monkeypatch.setattr(varlen.VarlenFunc, "found", lambda self: found)
    monkeypatch.setattr(picks, "passes", lambda kernel, asked, device: (True, ""))
    for kernel in kernels.ORDER:
        monkeypatch.setattr(type(kernel), "available", lambda self: (True, ""))


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        (None, ["flash_attn_3", "flash_attn", "flash_attn_4"]),
        (AMPERE, ["flash_attn_3", "flash_attn", "flash_attn_4"]),
        (HOPPER, ["flash_attn_3", "flash_attn", "flash_attn_4"]),
        (BLACKWELL, ["flash_attn_4", "flash_attn_3", "flash_attn"]),
        (CONSUMER, ["flash_attn_4", "flash_attn_3", "flash_attn"]),
    ],
    ids=str,
)
def test_a_kernel_that_was_made_for_the_device_is_tried_first(on, capability, expected):
    on(capability)
    names = [kernel.name for kernel in kernels.order()]
    assert names[:3] == expected
    assert names[3:] == ["torch_varlen", "efficient", "flex", "reference"]


def test_a_registered_kernel_stays_before_the_one_that_it_was_put_before(on, monkeypatch):
    class Own(Reference):
        name = "own"

    monkeypatch.setattr(picks, "_registered", [])
    picks.register_kernel(Own(), before="flash_attn_4")
    for capability in (HOPPER, BLACKWELL):
        on(capability)
        names = [kernel.name for kernel in kernels.order()]
        assert names.index("own") == names.index("flash_attn_4") - 1


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(AMPERE, "flash_attn_3"), (HOPPER, "flash_attn_3"), (BLACKWELL, "flash_attn_4"), ((7, 5), "torch_varlen")],
    ids=str,
)
def test_auto_takes_what_has_code_for_the_device(on, everything_is_here, capability, expected):
    on(capability)
    assert kernels.pick("auto", asks(), torch.device("cuda", 0)).kernel.name == expected


def test_a_kernel_without_code_for_the_device_says_so(on, everything_is_here):
    on(BLACKWELL)
    able, reason = kernels.named("flash_attn_3").supports(asks())
    assert (able, reason) == (False, "it has no code for compute capability 10.0")
    on(AMPERE)
    assert kernels.named("flash_attn_4").supports(asks()) == (False, "it has no code for compute capability 8.0")


def test_numbers_of_rocm_are_no_compute_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 4))
    assert protocol.capability() == (9, 4)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert protocol.capability() is None


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda", "torch_varlen"), ("xpu", "flex"), ("mps", "reference"), ("npu", "reference")]
)
def test_what_runs_on_a_device(everything_is_here, monkeypatch, device, expected):
    for kernel in kernels.ORDER[:3]:
        monkeypatch.setattr(type(kernel), "available", lambda self: (False, "not installed"))
    able = [
        kernel.name for kernel in kernels.ORDER if kernel.available()[0] and kernel.supports(asks(device=device))[0]
    ]
    assert able[0] == expected


def test_flex_is_available_on_an_xpu(monkeypatch):
    monkeypatch.setattr(flex.importlib.util, "find_spec", lambda name: True)
    assert flex._runs.__wrapped__() == (False, "torch finds no CUDA or XPU device")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert flex._runs.__wrapped__() == (True, "")


# The warning


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_the_reference_on_an_accelerator_warns_once(monkeypatch, device):
    monkeypatch.setattr(picks, "pick", lambda *given: kernels.Pick(kernels.ORDER[-1], "flash_attn: not installed"))
    chosen = picks.Picks("auto")
    with pytest.warns(
        UserWarning, match=r"'reference', which is right and slow on a GPU \(flash_attn: not installed\)"
    ):
        chosen(None, asks(device=device), torch.device(device))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen(None, asks(device=device), torch.device(device))


@pytest.mark.parametrize(("feature", "kernel"), [("window", "flex"), ("sinks", "flex")])
def test_float32_that_loses_a_fast_kernel_is_told_what_to_do(everything_is_here, feature, kernel):
    chosen = picks.Picks("auto")
    device = torch.device("cuda", 0)
    with pytest.warns(UserWarning) as caught:
        assert chosen(None, asks([feature], dtype=torch.float32), device).name == kernel
    (warning,) = caught
    said = str(warning.message)
    assert "torch_varlen: it needs float16 or bfloat16, found float32" in said
    assert "Load the model in bfloat16, or use torch.autocast, for " in said and "torch_varlen" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen(None, asks([feature]), device)
        chosen(None, asks(dtype=torch.float32), device)


def test_flex_that_is_the_best_there_is_does_not_warn(everything_is_here, monkeypatch):
    for name in ("flash_attn_3", "flash_attn", "flash_attn_4"):
        monkeypatch.setattr(type(kernels.named(name)), "available", lambda self: (False, "not installed"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert picks.Picks("auto")(None, asks(["softcap"]), torch.device("cuda", 0)).name == "flex"
