"""The choice of a layer's kernel, the reason for it, and the trial before a kernel's first use."""

import copy
import pickle
import warnings

import pytest
import stand_in_aten
import torch

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.kernel_cases import HEADS, LENGTHS, documents, states
from compat_matrix.check.rows import documents as some_documents
from compat_matrix.check.rows import pack
from fa2patch import kernels
from fa2patch.errors import KernelUnavailable, KernelWrong, UnknownKernel
from fa2patch.kernels import Options, packed_attention, picks, trial
from fa2patch.kernels.reference import Reference

CPU = torch.device("cpu")


def asks(features=(), device="cpu", dtype=torch.bfloat16, dim=64, value_dim=None, key_heads=HEADS, causal=True):
    return kernels.Asked(device, dtype, HEADS, key_heads, dim, value_dim or dim, causal, tuple(features))


class Scripted(Reference):
    """The reference, with boundaries and options changed by ``wrong``."""

    name = "scripted"
    FEATURES = Reference.FEATURES

    def __init__(self, wrong=lambda options: options, available=(True, "")):
        self.wrong, self.is_available = wrong, available

    def available(self):
        return self.is_available

    def attend(self, q, k, v, boundaries, options, scale):
        return super().attend(q, k, v, *self.wrong(boundaries, options), scale)


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

# The choice


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
    assert len(set(kernels.NAMES)) == len(kernels.NAMES) == len(kernels.ORDER) + len(kernels.BY_NAME_ONLY) + 1
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
    """A name that was read from a file or a command line is not the same string object as the kernel's."""
    for kernel in kernels.ORDER:
        assert kernels.named("".join(list(kernel.name))) is kernel


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_names_that_run_everywhere_pass(name):
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


# The trial


FAULTS = {
    "one document": lambda boundaries, options: (documents((sum(boundaries.lengths),)), options),
    "documents end a token late": lambda boundaries, options: (documents((2, 70, 5, 133, 63)), options),
    "a window one wider": lambda boundaries, options: (boundaries, replaced(options, window=options.window + 1)),
    "no softcap": lambda boundaries, options: (boundaries, replaced(options, softcap=None)),
    "no sinks": lambda boundaries, options: (boundaries, replaced(options, sinks=options.sinks * 0)),
    "no slopes": lambda boundaries, options: (boundaries, replaced(options, alibi_slopes=None)),
    "both ways": lambda boundaries, options: (boundaries, replaced(options, causal=False)),
}


def replaced(options, **changes):
    from dataclasses import replace

    return replace(options, **changes)


@pytest.mark.parametrize("dtype", trial.BOUNDS, ids=str)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch, fault, dtype):
    wrong = Scripted(fault)
    monkeypatch.setattr(trial, "Reference", type("Truth", (Reference,), {}))
    asked = asks(["window", "softcap", "sinks", "alibi"], dtype=dtype, key_heads=2)
    able, reason = trial.passes(wrong, asked, CPU)
    assert not able
    assert reason.startswith("tried on this machine, its outputs are off by ")
    assert trial.passes(Scripted(lambda *given: given), asked, CPU) == (True, "")


def test_a_kernel_that_takes_the_usual_scale_for_granted_is_not_used(monkeypatch):
    class Usual(Scripted):
        def attend(self, q, k, v, boundaries, options, scale):
            return super().attend(q, k, v, boundaries, options, q.shape[-1] ** -0.5)

    monkeypatch.setattr(trial, "Reference", type("Truth", (Reference,), {}))
    able, reason = trial.passes(Usual(lambda *given: given), asks(), CPU)
    assert not able and "its outputs are off by " in reason


def test_a_kernel_whose_gradients_alone_are_wrong_is_not_used(monkeypatch):
    class Forgetful(Scripted):
        def attend(self, q, k, v, boundaries, options, scale):
            right = super().attend(q, k, v, boundaries, options, scale)
            leaking = super().attend(q, k, v, boundaries, replaced(options, window=None), scale)
            return leaking + (right - leaking).detach()

    monkeypatch.setattr(trial, "Reference", type("Truth", (Reference,), {}))
    able, reason = trial.passes(Forgetful(lambda *given: given), asks(["window"]), CPU)
    assert not able
    assert "its gradients of " in reason


def test_a_kernel_that_fails_its_trial_is_passed_over_and_named(monkeypatch):
    class Broken(Scripted):
        def attend(self, *unused):
            raise RuntimeError("no kernel image is available\nfor execution on the device")

    monkeypatch.setattr(trial, "Reference", type("Truth", (Reference,), {}))
    monkeypatch.setattr(picks, "ORDER", (Broken(), Scripted(FAULTS["one document"]), Reference()))
    found = kernels.pick("auto", asks(), CPU)
    assert found.kernel.name == "reference"
    first, second = found.why.split("; ")
    assert first == "scripted: tried on this machine it fails: RuntimeError: no kernel image is available"
    assert second.startswith("scripted: tried on this machine, its outputs are off by ")
    with pytest.raises(KernelWrong, match="kernel='scripted' cannot compute this layer: tried on this"):
        kernels.pick("scripted", asks(), CPU)


class Unlucky(Scripted):
    """A kernel that raises each of these errors in turn, then computes."""

    def __init__(self, *errors):
        super().__init__(lambda *given: given)
        self.errors = list(errors)

    def attend(self, q, k, v, boundaries, options, scale):
        if self.errors:
            raise self.errors.pop(0)
        return super().attend(q, k, v, boundaries, options, scale)


@pytest.mark.parametrize("error", NO_VERDICTS, ids=repr)
def test_an_error_that_is_no_verdict_is_raised_and_the_next_use_tries_again(monkeypatch, error):
    kernel = Unlucky(error)
    monkeypatch.setattr(trial, "Reference", type("Truth", (Reference,), {}))
    monkeypatch.setattr(picks, "ORDER", (kernel, Reference()))
    chosen = picks.Picks("auto")
    with pytest.raises(type(error)) as raised:
        chosen(None, asks(), CPU)
    assert raised.value is error
    assert chosen(None, asks(), CPU) is kernel


@pytest.mark.parametrize("error", VERDICTS, ids=repr)
def test_an_error_that_is_a_verdict_is_remembered(monkeypatch, error):
    kernel = Unlucky(error)
    monkeypatch.setattr(trial, "Reference", type("Truth", (Reference,), {}))
    for _ in range(2):
        able, reason = trial.passes(kernel, asks(), CPU)
        assert not able and reason.startswith(f"tried on this machine it fails: {type(error).__name__}: ")


def test_a_trial_leaves_no_trace_in_the_forward_around_it():
    """A trial changes neither outputs, gradients nor random numbers in inference mode, autocast or a checkpoint."""
    with stand_in_aten.installed() as calls:
        rows = [tensor.detach().float()[None].requires_grad_() for tensor in states()]

        def attend(q, k, v):
            trial._tried.cache_clear()
            return packed_attention(q, k, v, documents(LENGTHS), Options(), "torch_varlen")

        before = torch.get_rng_state()
        plain = attend(*rows)
        assert torch.equal(before, torch.get_rng_state())
        with torch.inference_mode():
            assert torch.equal(attend(*rows), plain)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(attend(*rows), plain)
        with torch.no_grad():
            assert torch.equal(attend(*rows), plain)
        checkpointed = torch.utils.checkpoint.checkpoint(attend, *rows, use_reentrant=False)
        assert torch.equal(checkpointed, plain)
        trial._tried.cache_clear()
        found = torch.autograd.grad(checkpointed.square().sum(), rows)
        expected = torch.autograd.grad(plain.square().sum(), rows)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
        assert {call["max"] for call in calls} == {max(LENGTHS), max(trial.LENGTHS)}


def test_what_a_kernel_is_handed_in_its_trial(monkeypatch):
    handed = []

    class Asking(Scripted):
        def __call__(self, q, k, v, boundaries, options):
            handed.append((q, k, v, boundaries, options))
            return super().__call__(q, k, v, boundaries, options)

    monkeypatch.setattr(trial, "Reference", type("Truth", (Reference,), {}))
    asked = asks(kernels.FEATURES[:4], key_heads=2, value_dim=32, causal=False)
    assert trial.passes(Asking(lambda *given: given), asked, CPU) == (True, "")
    ((q, k, v, boundaries, options),) = handed
    tokens = sum(trial.LENGTHS)
    assert [tuple(x.shape) for x in (q, k, v)] == [(tokens, 4, 64), (tokens, 2, 64), (tokens, 2, 32)]
    assert {x.dtype for x in (q, k, v, options.sinks)} == {asked.dtype}
    assert boundaries.lengths == trial.LENGTHS == tuple(boundaries.cu_seqlens.diff().tolist())
    assert boundaries.cu_seqlens.dtype == torch.int32 and boundaries.max_seqlen == max(trial.LENGTHS)
    assert (options.window, options.softcap, options.causal) == (trial.WINDOW, trial.SOFTCAP, False)
    assert options.scale == trial.SCALE / 8 != 1 / 8 and options.dropout == 0
    assert options.sinks.shape == options.alibi_slopes.shape == (4,)
    assert options.alibi_slopes.dtype == torch.float32 and 0 < options.alibi_slopes.max() <= trial.SLOPE


def test_a_trial_computes_in_the_dtype_that_was_asked_for_also_in_autocast(monkeypatch):
    class Sensitive(Scripted):
        def attend(self, q, k, v, boundaries, options, scale):
            assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.float32
            return super().attend(q, k, v, boundaries, options, scale)

    monkeypatch.setattr(trial, "Reference", type("Truth", (Reference,), {}))
    with torch.autocast("cpu", torch.bfloat16):
        assert trial.passes(Sensitive(lambda *given: given), asks(dtype=torch.float32), CPU) == (True, "")


def test_one_trial_for_every_kind_of_call():
    trial._tried.cache_clear()
    with stand_in_aten.installed() as calls:
        for _ in range(3):
            kernels.pick("torch_varlen", asks(), CPU)
            kernels.pick("torch_varlen", asks(["dropout"]), CPU)
        assert len(calls) == 1
        kernels.pick("torch_varlen", asks(["window"]), CPU)
        assert len(calls) == 2


# A layer that asks for something else gets its own choice

OTHERS = {
    "device": "cuda", "dtype": torch.float16, "heads": 8, "key_heads": 2, "head_dim": 128, "value_dim": 32,
    "causal": False, "gradients": False, **{feature: (feature,) for feature in kernels.FEATURES},
}  # fmt: skip


def asks_other(what):
    return asks()._replace(**{"features" if what in kernels.FEATURES else what: OTHERS[what]})


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


@pytest.mark.parametrize("what", [what for what in OTHERS if what not in ("dropout", "gradients")])
def test_what_asks_for_something_else_has_a_trial_of_its_own(monkeypatch, what):
    tried, kernel, other = [], Scripted(), asks_other(what)
    monkeypatch.setattr(trial, "Reference", type("Truth", (Reference,), {}))
    monkeypatch.setattr(trial, "_compared", lambda kernel, asked, device: tried.append(asked) or (True, ""))
    for asked in (asks(), asks(), other, other):
        trial.passes(kernel, asked, CPU)
    assert tried == [asks(), other]
    trial.passes(kernel, other, torch.device("cpu", 0))
    trial.passes(Scripted(), other, CPU)
    assert tried == [asks(), other, other, other]


@pytest.mark.parametrize("what", [what for what in OTHERS if what != "device"])
def test_in_a_graph_a_layer_that_asks_for_something_else_is_picked_for_anew(monkeypatch, what):
    """The choice is made while the graph is captured. Each of the two kernels supports only one of the two calls."""

    class Only(Scripted):
        def __init__(self, asked, name):
            super().__init__()
            self.asked, self.name = asked, name

        def supports(self, asked):
            return asked == self.asked, "it is for another"

    wanted = (asks(), asks_other(what))
    monkeypatch.setattr(picks, "passes", lambda *given: (True, ""))
    monkeypatch.setattr(picks, "ORDER", tuple(Only(asked, f"for {i}") for i, asked in enumerate(wanted)))
    chosen, found = picks.Picks("auto"), []

    def layers(states):
        for asked in wanted:
            found.append(chosen(None, asked, CPU).name)
        return states + 1

    torch._dynamo.reset()
    torch.compile(layers, backend="eager", fullgraph=True)(torch.ones(1))
    assert found == ["for 0", "for 1"]


# A patched model


@pytest.fixture
def model():
    return tiny_models.build("llama", "eager")


def test_status_tells_what_was_picked_and_why(model):
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


def test_the_reference_on_a_gpu_warns_once(monkeypatch):
    chosen = picks.Picks("auto")
    monkeypatch.setattr(picks, "pick", lambda *given: kernels.Pick(Reference(), "flash_attn: not installed"))
    with pytest.warns(UserWarning, match=r"right and slow on a GPU \(flash_attn: not installed\)"):
        chosen(None, asks(device="cuda"), torch.device("cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen(None, asks(device="cuda"), torch.device("cuda"))
        picks.Picks("auto")(None, asks(), CPU)
        picks.Picks("reference")(None, asks(device="cuda"), torch.device("cuda"))


def test_a_row_of_the_table_for_every_kernel():
    rows = {row["name"]: row for row in kernels.kernel_rows()}
    assert list(rows) == list(kernels.NAMES[1:])
    assert rows["reference"]["usable"] and rows["reference"]["here"] == list(kernels.FEATURES)
    assert rows["torch_varlen"]["features"] == ["window", "sinks", "dropout", "deterministic", "trees", "spans"]
    assert all(row["reason"] or row["usable"] for row in rows.values())
