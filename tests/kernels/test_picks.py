"""The choice of a layer's kernel and the reason for it: what kernels support, on which device, and the warnings."""

import copy
import pickle
import warnings

import pytest
import stand_in_aten
import torch
from definition_cases import asks
from scripted_kernels import OTHERS, Scripted, asks_other

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.kernel_cases import HEADS, documents, states
from compat_matrix.check.rows import documents as some_documents
from compat_matrix.check.rows import pack
from fa2patch import kernels
from fa2patch.errors import KernelUnavailable, UnknownKernel
from fa2patch.kernels import Options, flex, picks, protocol, varlen
from fa2patch.kernels.reference import Reference

CPU = torch.device("cpu")
AMPERE, HOPPER, BLACKWELL, CONSUMER = (8, 0), (9, 0), (10, 0), (12, 0)


CUDA = torch.device("cuda", 0)


def asks_cuda(features=(), dtype=torch.bfloat16):
    return asks(features, "cuda", dtype)


def test_auto_takes_the_reference_on_a_cpu():
    found = kernels.pick("auto", asks(), CPU)
    assert found.kernel.name == "reference"
    assert found.why.startswith("flash_attn_3: ")
    assert len(found.why.split("; ")) == len(kernels.ORDER) - 1
    assert kernels.pick("reference", asks(), CPU) == (found.kernel, "")


def test_the_last_kernel_takes_everything():
    last = kernels.ORDER[-1]
    assert last.available() == (True, "")
    assert last.supports(asks(kernels.FEATURES, "mps", torch.float64, 7, 9)) == (True, "")


def test_names_are_auto_and_one_for_each_kernel():
    assert kernels.NAMES[0] == "auto"
    assert (
        len(set(kernels.NAMES))
        == len(kernels.NAMES)
        == 1 + len([*kernels.ORDER, *picks.ELSEWHERE, *kernels.BY_NAME_ONLY])
    )
    assert {"flash_attn", "torch_varlen", "reference"} < set(kernels.NAMES)


@pytest.mark.parametrize("name", ["nonsense", "", "FLASH_ATTN", None, "hub:"])
def test_an_unknown_kernel_is_named_beside_the_known_ones(name):
    for ask in (kernels.check_name, lambda name: kernels.pick(name, asks(), CPU)):
        with pytest.raises(UnknownKernel) as error:
            ask(name)
        assert str(error.value).startswith(f"kernel={name!r}: expected one of 'auto', ")
        assert all(repr(known) in str(error.value) for known in kernels.NAMES)
        assert isinstance(error.value, LookupError)


def test_a_name_is_known_by_its_letters():
    # A name that was read from a file or a command line is not the same string object as the kernel's.
    for kernel in kernels.ORDER:
        assert kernels.named("".join(list(kernel.name))) is kernel


def test_names_that_run_everywhere_pass():
    for name in ("auto", "reference"):
        kernels.check_name(name)


def test_a_named_kernel_that_cannot_compute_a_layer_says_why():
    with stand_in_aten.installed(), pytest.raises(KernelUnavailable) as error:
        kernels.pick("torch_varlen", asks(["window", "softcap"]), CPU)
    assert error.value.message == (
        "kernel='torch_varlen' cannot compute this layer: it has no softcap. Use kernel='auto'."
    )


@pytest.mark.parametrize(
    ("asked", "expected", "why"),
    [
        (asks(), "torch_varlen", ""),
        (asks(["window", "sinks", "dropout", "deterministic"]), "torch_varlen", ""),
        (asks(["softcap"]), "reference", "torch_varlen: it has no softcap; efficient: it has no softcap; "),
        (asks(dim=512), "efficient", "torch_varlen: its head dimensions end at 256, found 512"),
        (asks(["window"], dim=512), "reference", "efficient: it has no window; "),
    ],
    ids=["plain", "much", "Gemma 2", "head dimension 512", "head dimension 512 with a window"],
)
def test_auto_takes_the_best_that_can_do_what_the_layer_asks(asked, expected, why):
    with stand_in_aten.installed():
        found = kernels.pick("auto", asked, CPU)
    assert found.kernel.name == expected
    assert why in found.why


def test_what_a_call_asks_for():
    q, k, v = states(groups=2, value_dim=6)
    everything = Options(
        window=1, softcap=1.0, dropout=0.5, sinks=torch.zeros(4), alibi_slopes=torch.zeros(4), causal=False
    )
    assert kernels.asked_by(q, k, v, everything) == kernels.Asked(
        "cpu", torch.float64, 4, 2, 8, 6, False, ("window", "softcap", "sinks", "alibi", "dropout")
    )
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels.asked_by(q, k, v, Options()).features == ("deterministic",)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_row_of_the_table_for_every_kernel():
    rows = {row["name"]: row for row in kernels.kernel_rows()}
    assert list(rows) == list(kernels.NAMES[1:])
    assert rows["reference"]["usable"] and rows["reference"]["here"] == list(kernels.FEATURES)
    assert rows["torch_varlen"]["features"] == [
        "window",
        "sinks",
        "dropout",
        "deterministic",
        "trees",
        "spans",
        "pairs",
    ]
    assert all(row["reason"] or row["usable"] for row in rows.values())


# A layer that asks for something else gets its own choice


def test_every_field_of_what_is_asked_has_a_case():
    assert set(OTHERS) == {*kernels.Asked._fields, *kernels.FEATURES} - {"features"}


@pytest.mark.parametrize("what", OTHERS)
def test_a_layer_that_asks_for_something_else_is_picked_for_anew(monkeypatch, what):
    made = []
    monkeypatch.setattr(picks, "pick", lambda name, asked, device: made.append(asked) or kernels.Pick(Scripted(), ""))
    chosen, other = picks.Picks("auto"), asks_other(what)
    assert chosen(None, asks(), CPU) is chosen(None, asks(), CPU)
    assert chosen(None, asks(), CPU) is not chosen(None, other, CPU)
    assert made == [asks(), other]


def test_another_device_of_the_same_type_is_picked_for_anew(monkeypatch):
    made = []
    monkeypatch.setattr(picks, "pick", lambda name, asked, device: made.append(device) or kernels.Pick(Scripted(), ""))
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    chosen = picks.Picks("flash_attn")
    for device in (*devices, *devices):
        chosen(None, asks(device="cuda"), device)
    assert made == devices


@pytest.mark.parametrize("what", [what for what in OTHERS if what != "device"])
def test_in_a_graph_a_layer_that_asks_for_something_else_is_picked_for_anew(monkeypatch, what):
    # The choice is made while the graph is captured. Each of the two kernels supports only one of the two calls.

    class Only(Scripted):
        def __init__(self, asked, name):
            super().__init__()
            self.asked, self.name = asked, name

        def supports(self, asked):
            return asked == self.asked, "it is for another"

    wanted = (asks(), asks_other(what))
    monkeypatch.setattr(picks, "passes_trial", lambda *given: (True, ""))
    monkeypatch.setattr(picks, "ORDER", tuple(Only(asked, f"for {i}") for i, asked in enumerate(wanted)))
    chosen, found = picks.Picks("auto"), []

    def layers(states):
        for asked in wanted:
            found.append(chosen(None, asked, CPU).name)
        return states + 1

    torch._dynamo.reset()
    torch.compile(layers, backend="eager", fullgraph=True)(torch.ones(1))
    assert found == ["for 0", "for 1"]


# Devices


@pytest.fixture
def on(monkeypatch):
    # A capability of None is no NVIDIA device.

    def put(capability):
        for module in (protocol, picks):
            monkeypatch.setattr(module, "capability", lambda: capability)

    return put


@pytest.fixture
def everything_is_here(monkeypatch):
    # No kernel is tried.
    found = varlen.EntryPoint(lambda: None, frozenset(name for names in varlen.PARAMETERS.values() for name in names))
    monkeypatch.setattr(varlen.VarlenFunc, "found", lambda self: found)
    monkeypatch.setattr(picks, "passes_trial", lambda kernel, asked, device: (True, ""))
    for kernel in kernels.ORDER:
        monkeypatch.setattr(type(kernel), "available", lambda self: (True, ""))


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        *((capability, ["flash_attn_3", "flash_attn", "flash_attn_4"]) for capability in (None, AMPERE, HOPPER)),
        *((capability, ["flash_attn_4", "flash_attn_3", "flash_attn"]) for capability in (BLACKWELL, CONSUMER)),
    ],
    ids=str,
)
def test_a_kernel_that_was_made_for_the_device_is_tried_first(on, capability, expected):
    on(capability)
    names = [kernel.name for kernel in kernels.order()]
    assert names[:3] == expected
    assert names[3:] == [kernel.name for kernel in kernels.ORDER if kernel.name not in expected]


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
    assert kernels.pick("auto", asks_cuda(), CUDA).kernel.name == expected


def test_a_kernel_without_code_for_the_device_says_so(on, everything_is_here):
    on(BLACKWELL)
    able, reason = kernels.named("flash_attn_3").supports(asks_cuda())
    assert (able, reason) == (False, "it has no code for compute capability 10.0")
    on(AMPERE)
    assert kernels.named("flash_attn_4").supports(asks_cuda()) == (False, "it has no code for compute capability 8.0")


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
    asked = asks(device=device)
    able = [kernel.name for kernel in kernels.ORDER if kernel.available()[0] and kernel.supports(asked)[0]]
    assert able[0] == expected


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("torch.nn.attention.flex_attention", f"torch {torch.__version__} has no FlexAttention"),
        ("triton", "the package triton is not installed"),
        ("a device", "torch finds no CUDA or XPU device"),
        ("nothing", ""),
    ],
)
def test_flex_needs_its_module_triton_and_a_device_which_may_be_an_xpu(monkeypatch, missing, reason):
    monkeypatch.setattr(flex.importlib.util, "find_spec", lambda name: None if name == missing else True)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: missing != "a device")
    assert flex._runs.__wrapped__() == (missing == "nothing", reason)


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
        picks.Picks("auto")(None, asks(), CPU)
        picks.Picks("reference")(None, asks(device=device), torch.device(device))


@pytest.mark.parametrize("feature", ["window", "sinks"])
def test_float32_that_loses_a_fast_kernel_is_told_what_to_do(everything_is_here, feature):
    chosen = picks.Picks("auto")
    with pytest.warns(UserWarning) as caught:
        assert chosen(None, asks_cuda([feature], dtype=torch.float32), CUDA).name == "flex"
    (warning,) = caught
    said = str(warning.message)
    assert "torch_varlen: it needs float16 or bfloat16, found float32" in said
    assert "Load the model in bfloat16, or use torch.autocast, for " in said and "torch_varlen" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen(None, asks_cuda([feature]), CUDA)
        chosen(None, asks_cuda(dtype=torch.float32), CUDA)


def test_flex_that_is_the_best_there_is_does_not_warn(everything_is_here, monkeypatch):
    for name in ("flash_attn_3", "flash_attn", "flash_attn_4"):
        monkeypatch.setattr(type(kernels.named(name)), "available", lambda self: (False, "not installed"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert picks.Picks("auto")(None, asks_cuda(["softcap"]), CUDA).name == "flex"


# Head dimensions: each is padded only where the kernel takes no other


def handed(name, head_dim, value_dim):
    # Returned are the head dimensions of q, k and v that ``attend`` is handed, and the tensors.
    seen = []

    class Watched(type(kernels.named(name))):
        def available(self):
            return True, ""

        def attend(self, q, k, v, boundaries, options, scale):
            seen.extend((q, k, v))
            return v.new_zeros(q.shape[0], q.shape[1], v.shape[2])

    q, k = (torch.zeros(10, HEADS, head_dim) for _ in range(2))
    v = torch.zeros(10, HEADS, value_dim)
    output = Watched()(q, k, v, documents((4, 6)), Options())
    assert output.shape == v.shape and output.is_contiguous()
    untouched = [given is got for given, got in zip((q, k, v), seen)]
    dims = tuple(x.shape[-1] for x in seen)
    assert untouched == [given.shape[-1] == got.shape[-1] for given, got in zip((q, k, v), seen)]
    return dims


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("flash_attn", (192, 128), (192, 192)),
        ("flash_attn", (80, 80), (80, 80)),
        ("flash_attn", (100, 60), (104, 104)),
        ("torch_varlen", (192, 128), (192, 192)),
        ("flash_attn_3", (192, 128), (192, 128)),
        ("flash_attn_3", (189, 121), (192, 128)),
        ("flash_attn_3", (160, 128), (160, 128)),
        ("flash_attn_3", (192, 64), (192, 192)),
        ("flash_attn_3", (64, 128), (64, 128)),
        ("flash_attn_3", (96, 64), (96, 96)),
        ("flash_attn_4", (192, 128), (192, 128)),
        ("flash_attn_4", (96, 64), (96, 96)),
        ("flash_attn_4", (72, 72), (96, 96)),
        ("flash_attn_4", (192, 96), (192, 192)),
        ("efficient", (192, 128), (192, 128)),
        ("efficient", (100, 60), (104, 64)),
        ("efficient", (60, 100), (64, 104)),
        ("reference", (13, 7), (13, 7)),
    ],
    ids=str,
)
def test_a_kernel_is_handed_the_head_dimensions_that_it_takes(name, given, expected):
    assert handed(name, *given) == (expected[0], *expected)


@pytest.mark.parametrize(
    ("major", "given", "expected"),
    [
        (9, (160, 160), (160, 160)),
        (10, (160, 160), (256, 256)),
        (10, (128, 100), (128, 128)),
        (11, (192, 192), (256, 256)),
        (10, (192, 128), (192, 128)),
    ],
    ids=str,
)
def test_flash_attn_4_is_handed_head_dimensions_that_the_device_has(monkeypatch, major, given, expected):
    monkeypatch.setattr(varlen, "capability", lambda: (major, 0))
    assert handed("flash_attn_4", *given) == (expected[0], *expected)


@pytest.mark.parametrize(
    ("powers", "given", "expected"),
    [
        (False, (192, 128), (192, 128)),
        (False, (100, 60), (104, 64)),
        (False, (8, 6), (16, 16)),
        (True, (192, 128), (256, 128)),
        (True, (80, 80), (128, 128)),
        (True, (64, 128), (128, 128)),
    ],
    ids=str,
)
def test_flex_is_handed_powers_of_two_where_torch_takes_no_other(monkeypatch, powers, given, expected):
    monkeypatch.setattr(flex, "_takes_powers_only", lambda: powers)
    assert handed("flex", *given) == (expected[0], *expected)


# A patched model


def test_status_tells_what_was_picked_and_why():
    model = tiny_models.build("llama", "eager")
    patch = fa2patch.apply(model)
    assert {(layer.kernel, layer.why) for layer in patch.layers} == {(None, "")}
    model(**pack(some_documents(3, 5)))
    for layer in fa2patch.status(model).layers:
        assert layer.kernel == "reference"
        assert "flash_attn: " in layer.why
    patch.revert()
    with stand_in_aten.installed(), fa2patch.apply(model) as patch:
        model(**pack(some_documents(3, 5)))
        assert [layer.kernel for layer in patch.layers] == ["torch_varlen"] * len(patch.layers)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied = fa2patch.status(other)
            assert [layer.kernel for layer in copied.layers] == [None] * len(patch.layers)
            other(**pack(some_documents(3, 5)))
            assert [layer.kernel for layer in copied.layers] == ["torch_varlen"] * len(patch.layers)


def test_gemma_2_does_not_go_to_a_kernel_without_softcap():
    model = tiny_models.build("gemma2", "eager")
    with stand_in_aten.installed():
        with fa2patch.apply(model) as patch:
            model(**pack(some_documents(3, 5)))
            assert {layer.kernel for layer in patch.layers} == {"reference"}
            assert all("torch_varlen: it has no softcap" in layer.why for layer in patch.layers)
        with fa2patch.apply(model, kernel="torch_varlen"), pytest.raises(KernelUnavailable, match="it has no softcap"):
            model(**pack(some_documents(3, 5)))
